"""Cells of ``predict --out FILE.csv``: a spreadsheet computes none of them, and no text is lost."""

import csv
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.api.prediction_files import write

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n"), max_size=8)
ODD = st.builds(
    str.__add__, st.sampled_from(["=", "+", "-", "@", "\t=", " -", "\uff1d", "'", '"=', "-1", "+2.5"]), TEXT
)


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(TEXT | ODD, min_size=1, max_size=4), key=TEXT | ODD)
def test_no_text_is_a_formula_and_every_text_can_be_read(texts, key, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    result = {"ids": texts, "answers": texts, "cut": []}
    said = write(result, folder / "a.csv")
    assert write(result, folder / "a.jsonl") == ""
    with (folder / "a.csv").open(newline="", encoding="utf-8") as file:
        _, *cells = csv.reader(file)
    marked = 0
    for line, text, of in zip(cells, texts, (folder / "a.jsonl").read_text("utf-8").split("\n"), strict=False):
        assert json.loads(of)["answer"] == text  # the other formats have the text itself
        for cell in (line[1], line[2]):
            try:
                float(cell)
            except ValueError:
                assert not cell.lstrip().startswith(("=", "+", "-", "@"))
            marked += cell != text
            assert cell in (text, f"'{text}")
    assert (f"{marked} texts" in said) if marked else said == ""
    write({"outputs": [{key: 1.0}]}, folder / "b.csv")  # names of a module's outputs head the columns
    with (folder / "b.csv").open(newline="", encoding="utf-8") as file:
        (_, name), _ = csv.reader(file)
    assert name in (key, f"'{key}")


def test_rows_with_other_keys_keep_their_columns(tmp_path):
    write({"values": [{"a": 1.0}, {"b": 2.0, "a": 3.0}]}, tmp_path / "v.csv")
    assert (tmp_path / "v.csv").read_text().splitlines() == ["row,values.a,values.b", "0,1.0,", "1,3.0,2.0"]
