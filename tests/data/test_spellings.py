"""Other programs' spellings of roles, contents, systems, labels, marks and class names are read as intended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.data.load import load_table
from fedfm.data.sources import _conversations, csv
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError

ASK = (("user", "hi"), ("assistant", "yes?"), ("user", "go"))
TURNS = (*ASK, ("assistant", "gone"))


def read(path: Path, task: str | None = None, **more: Any) -> Table:
    return load_table(DataSpec(path=str(path), **more), seed=0, task=task)


def jsonl(path: Path, row: Any) -> Path:
    path.write_text(f"{json.dumps(row)}\n" * 5)
    return path


def talk(**names: str) -> list[dict[str, Any]]:
    return [{"role": names.get(role, role), "content": text} for role, text in TURNS]


@pytest.mark.parametrize(
    "messages",
    [
        talk(user="Human", assistant="Assistant"),
        talk(user="prompter"),
        talk(user="HUMAN", assistant="AI"),
        [{"role": r, "content": [{"type": "text", "text": c[:1]}, {"type": "text", "text": c[1:]}]} for r, c in TURNS],
        [{"from": r.title(), "value": c} for r, c in TURNS],
    ],
)
def test_messages_in_other_spellings(tmp_path: Path, messages: Any) -> None:
    assert read(jsonl(tmp_path / "a.jsonl", {"messages": messages})).inputs[0] == (ASK, "gone")


@pytest.mark.parametrize("tool", ["tool", "function", "observation", "Observation"])
@pytest.mark.parametrize("form", ["tool_calls", "function_call", "role"])
def test_calls_and_answers_of_tools_in_other_spellings(tmp_path: Path, tool: str, form: str) -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    said: dict[str, Any] = {"role": "assistant", "content": None}
    said |= {"tool_calls": {"tool_calls": [call]}, "function_call": {"function_call": call}}.get(form, {})
    if form == "role":
        said = {"role": "function_call", "content": json.dumps(call)}
    messages = [{"role": "user", "content": "hi"}, said, {"role": tool, "content": "3"}]
    row = {"messages": [*messages, {"role": "assistant", "content": "three"}]}
    (_, calling, answer), output = read(jsonl(tmp_path / "a.jsonl", row)).inputs[0]
    assert (calling[:2], answer, output) == (("assistant", ""), ("tool", "3"), "three")
    assert json.loads(calling[2])["tool_calls"][0]["function"] == call


def test_parts_that_are_no_text_and_calls_that_are_none_are_refused(tmp_path: Path) -> None:
    picture = [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}, *talk()[1:]]
    with pytest.raises(InputError, match=r"holds list .*text is expected"):
        read(jsonl(tmp_path / "a.jsonl", {"messages": picture}))
    with pytest.raises(InputError, match="a call is expected, in JSON"):
        read(jsonl(tmp_path / "a.jsonl", {"messages": talk(assistant="function_call")}))


@pytest.mark.parametrize("said", ["Be brief.", "You are a helper for people who are ill"])
@pytest.mark.parametrize("name", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": r, "value": c} for r, c in TURNS]},
        {"messages": talk()},
        {"instruction": "hi", "output": "gone"},
        {"prompt": "hi", "chosen": "gone", "rejected": "stay"},
    ],
    ids=lambda row: next(iter(row)),
)
def test_a_column_of_the_system_is_its_message(tmp_path: Path, row: Any, name: str, said: str) -> None:
    bare = read(jsonl(tmp_path / "bare.jsonl", row)).inputs[0]
    table = read(jsonl(tmp_path / "a.jsonl", row | {name: said}))
    turns = bare[0] if isinstance(bare[0], tuple) else (("user", bare[0]),)
    assert table.inputs[0] == ((("system", said), *turns), *bare[1:])
    assert f'column "{name}"' in "".join(table.notices)
    assert read(jsonl(tmp_path / "b.jsonl", row | {name: ""})).inputs[0] == bare


def test_two_different_system_messages_are_refused(tmp_path: Path) -> None:
    row = {"messages": [{"role": "system", "content": "a"}, *talk()], "system": "a"}
    assert read(jsonl(tmp_path / "a.jsonl", row)).inputs[0][0] == (("system", "a"), *ASK)
    with pytest.raises(InputError, match=r'column "system".*data\.system'):
        read(jsonl(tmp_path / "a.jsonl", row | {"system": "b"}))
    assert read(jsonl(tmp_path / "a.jsonl", row | {"system": "b"}), system="none").inputs[0][0][0] == ("system", "a")


@pytest.mark.parametrize("said", ["<noinput>", " <NoInput>\n", "", None])
def test_an_input_that_means_no_input_counts_as_empty(tmp_path: Path, said: str | None) -> None:
    row = {"instruction": "name a fish", "input": said, "output": "cod"}
    assert read(jsonl(tmp_path / "a.jsonl", row)).inputs[0] == ("name a fish", "cod")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-3, 12), min_size=6, max_size=12), st.sampled_from([".0", ",0", ",00"]))
def test_integers_with_a_fraction_of_zero_are_integers(tmp_path_factory: Any, labels: list[int], end: str) -> None:
    plain, path = (tmp_path_factory.mktemp("rows") / f"{name}.csv" for name in "ab")
    for place, more in ((plain, ""), (path, end)):
        place.write_text("text;label\n" + "".join(f"row {i};{x}{more}\n" for i, x in enumerate(labels)))
    ours, bare = read(path), read(plain)
    assert (ours.classes, ours.labels.tolist()) == (bare.classes, bare.labels.tolist())
    assert "are read as integers" in "".join(ours.notices)
    path.write_text(path.read_text() + "row;0,5\n")  # a quantity: nothing is rounded
    assert "0,5" in read(path).classes


@pytest.mark.parametrize("head", ["sep=;\n", "SEP=;\r\n", '"sep=;"\n'])
def test_a_first_line_that_names_the_mark(tmp_path: Path, head: str) -> None:
    rows = "text;label\n" + "".join(f"a, {i};{'xy'[i % 2]}\n" for i in range(6))
    path = tmp_path / "a.csv"
    path.write_text(head + rows)
    table = read(path)
    assert (table.inputs[3], table.classes) == ("a, 3", ("x", "y"))
    with pytest.raises(InputError, match="sep=~: expected one of"):
        csv.sheet_of(b"sep=~\na~b\n1~2\n", path)


@pytest.mark.parametrize("names", [["cat", "dog"], {"0": "cat", "1": "dog"}, {"1": "dog", "0": "cat"}])
def test_class_names_of_the_hub_as_a_list_or_by_number(tmp_path: Path, names: Any) -> None:
    import pyarrow
    import pyarrow.parquet

    about = {"info": {"features": {"label": {"_type": "ClassLabel", "names": names}}}}
    table = pyarrow.table({"text": [f"row {i}" for i in range(6)], "label": [0, 1] * 3})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(about)}), path)
    found = read(path)
    assert (found.classes, found.labels.tolist()) == (("cat", "dog"), [0, 1] * 3)


def test_metadata_in_the_folders_of_classes(tmp_path: Path) -> None:
    from PIL import Image

    for folder, site in (("train/a", "n"), ("train/b", "s"), ("test/a", "n"), ("test/b", "s")):
        home = tmp_path / folder
        home.mkdir(parents=True)
        for i in range(3):
            Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(home / f"{i}.png")
        (home / "metadata.csv").write_text("file_name,site\n" + "".join(f"{i}.png,{site}\n" for i in range(3)))
    table = read(tmp_path)
    assert table.classes == ("a", "b")
    assert [site == "n" for site in table.columns["site"]] == [label == 0 for label in table.labels]


@pytest.mark.parametrize(("said", "doubted"), [("linux", True), ("mac os", True), ("Be brief, please.", False)])
def test_a_system_of_few_words_is_doubted(tmp_path: Path, said: str, doubted: bool) -> None:
    table = read(jsonl(tmp_path / "a.jsonl", {"messages": talk(), "system": said}))
    (line,) = [text for text in table.notices if "as the system message of each row" in text]
    assert (f'as "{said}"; if it holds something else, set data.system' in line) == doubted


@given(st.from_regex(r"<\s?[nN]o[ _-]?[iI]nput\s?>", fullmatch=True))
def test_a_mark_that_means_no_input_counts_as_empty(mark: str) -> None:
    columns = {"instruction": ["a"], "input": [mark], "output": ["b"]}
    assert _conversations.pairs(columns, DataSpec(), "x", str, answered=True) == [("a", "b")]


@pytest.mark.parametrize("text", ["N/A", "none", "NaN", "No input", "-", "..."])
def test_a_word_that_means_no_text_gets_a_notice(tmp_path: Path, text: str) -> None:
    table = read(jsonl(tmp_path / "a.jsonl", {"instruction": "a", "input": text, "output": "b"}))
    assert table.inputs[0][0].endswith(text)
    assert [x for x in table.notices if f'holds "{text}" or the like in 5 rows' in x]
    plain = read(jsonl(tmp_path / "a.jsonl", {"instruction": "a", "input": f"{text} of it", "output": "b"}))
    assert not [x for x in plain.notices if "or the like" in x]


@pytest.mark.parametrize(
    "names",
    [["ant", "bee"], {"0": "ant", "1": "bee"}, {"1": "bee", "0": "ant"}, {"ant": 0, "bee": 1}, {"bee": 1, "ant": 0}],
)
def test_names_of_classes_next_to_parquet_files_are_read_in_every_form(tmp_path: Path, names: Any) -> None:
    assert parquet(tmp_path / "a.parquet", names).classes == ("ant", "bee")


@pytest.mark.parametrize("names", [{"0": "ant", "2": "bee"}, {"x": "ant", "y": "bee"}, {"ant": 1, "bee": 2}, 7])
def test_names_of_classes_that_are_not_read_are_reported(tmp_path: Path, names: Any) -> None:
    table = parquet(tmp_path / "a.parquet", names)
    assert table.classes == ("0", "1")
    assert [x for x in table.notices if 'class names of column "label"' in x and "are not read" in x]


def parquet(path: Path, names: Any) -> Table:
    """Rows of two classes with these names beside them, as the library datasets writes them."""
    import pyarrow
    import pyarrow.parquet

    features = {"text": {"dtype": "string", "_type": "Value"}, "label": {"names": names, "_type": "ClassLabel"}}
    table = pyarrow.table({"text": ["a b", "c d"] * 5, "label": [0, 1] * 5})
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    pyarrow.parquet.write_table(table.replace_schema_metadata(about), path)
    return read(path)
