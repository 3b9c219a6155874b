"""Every source: the rows of a good file, and the refusal of a bad one."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.data.arrow_texts import ArrowTexts
from fedfm.data.load import load_table
from fedfm.data.pictures import SUFFIXES, decode
from fedfm.data.rows_to_predict import read_inputs
from fedfm.data.sources import digits, tables, text
from fedfm.data.spec import DataSpec
from fedfm.data.table import fingerprint
from fedfm.errors import InputError

GOOD = "text,label,split\n" + "".join(
    f"word{i} here,{'ab'[i % 2]},{'test' if i % 5 == 0 else 'train'}\n" for i in range(100)
)


def png(size: tuple[int, int] = (6, 4), value: int = 0, mode: str = "RGB") -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new(mode, size, value if mode == "L" else (value, 0, 0)).save(out, "PNG")
    return out.getvalue()


def jpeg(size: tuple[int, int] = (64, 64)) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8)
    Image.fromarray(noise).save(out, "JPEG")
    return out.getvalue()


def npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def parquet(columns: dict[str, list[Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.array([0, 1, 0, 1])

# file name -> (content, what the message says): the file's name and the place are part of it
BAD: dict[str, tuple[str, bytes, str]] = {
    "empty": ("a.csv", b"", r"a\.csv is empty \(0 bytes\): a CSV file is expected"),
    "blank": ("a.csv", b"\n \n", r"a\.csv holds only blanks"),
    "header only": ("a.csv", b"text,label\n", r'a\.csv holds column names \("text", "label"\) and no rows'),
    "no label": (
        "a.csv",
        GOOD.replace("label", "lable").encode(),
        r'a\.csv: no column "label" \(data\.label\); found "text", "lable", "split" \(did you mean "lable"\?\)',
    ),
    "no text": ("a.csv", b"body,label\nx,a\n", r'no column "text" \(data\.text\); found "body", "label"'),
    "not utf8": (
        "a.csv",
        b"text,label\n\xff\xfe\x00,a\n",
        r"a\.csv, line 2: byte 0xff at offset 11 is not UTF-8: save the file as UTF-8",
    ),
    "half of utf16": ("a.csv", "text,label\nx,a\n".encode("utf-16")[:-1], r"a\.csv, line .*not UTF-16, which"),
    "nul": ("a.csv", b"text,label\nx\0y,a\n", r"a\.csv, line 2: a NUL byte"),
    "unclosed quote": ("a.csv", (GOOD + '"unclosed\n').encode(), r"a\.csv, row 102: a quote \(\"\) is opened here"),
    "quote inside": ("a.csv", b'text,label\n"x"y,a\n', r"a\.csv, row 2: .*between quotes"),
    "ragged short": ("a.csv", b"text,label\nx,a\ny\n", r"a\.csv, row 3: 1 field where row 1 names 2"),
    "ragged long": ("a.csv", b"text,label\nx,a\ny,z,b\n", r"a\.csv, row 3: 3 fields where row 1 names 2"),
    "empty line": ("a.csv", b"text,label\nx,a\n\ny,b\n", r"a\.csv, row 3: an empty line"),
    "row and line": ("a.csv", b'text,label\n"x\ny",a\nz\n', r"a\.csv, row 3 \(line 4\): 1 field"),
    "empty label": ("a.csv", b"text,label\nx,a\ny, \n", r'a\.csv, row 3: column "label" is empty'),
    "empty text": ("a.csv", b"text,label\n,a\n", r'a\.csv, row 2: column "text" is empty'),
    "twice": ("a.csv", b"text,label,text\nx,a,y\n", r'row 1: column "text" occurs 2 times'),
    "ragged semicolons": ("a.csv", b"text;label\nx;a\ny\n", r"a\.csv, row 3: 1 field .*fields with semicolons"),
    "json object": ("a.json", b'{"text": "x"}', r'a\.json holds one object, with "text": a list'),
    "json object without keys": ("a.json", b"{}", r"a\.json holds one object, with no key: a list"),
    "json lists": ("a.json", b'{"a": [{"x": 1}], "b": [{"x": 1}]}', r'several lists \("a", "b"\): a list of objects'),
    "json cut": ("a.json", b'[{"text": "x"},\n{"te', r"a\.json: line 2, column 2: not JSON"),
    "json texts": ("a.json", b'["x"]', r"a\.json, object 1: a JSON str: a list of objects"),
    "tabs": ("a.tsv", b"text\tlabel\nx\ta\ny\n", r"a\.tsv, row 3: 1 field where row 1 names 2"),
    "unknown split": (
        "a.csv",
        b"text,label,split\nx,a,train\ny,b,validation\n",
        r'a\.csv, row 3: split "validation" is not one of train, val, test; did you mean "val"\?',
    ),
    "no training rows": ("a.csv", b"text,label,split\nx,a,test\n", r"a\.csv has no training rows \(0 val, 1 test\)"),
    "two names": (
        "a.csv",
        b"text,label,label_name\nx,0,a\ny,0,b\n",
        r'row 3: label "0" is named "b" here and "a" in .*row 2',
    ),
    "one name twice": (
        "a.csv",
        b"text,label,label_name\nx,0,a\ny,1,a\n",
        r'row 3: "a" names label "1" here and label "0" in .*row 2',
    ),
    "png as csv": ("a.csv", png(), r"a\.csv holds a PNG image, not a CSV file"),
    "parquet as csv": ("a.csv", parquet({"text": ["a"]}), r"a\.csv holds a Parquet file, not a CSV file"),
    "csv as npz": ("a.npz", GOOD.encode(), r"a\.npz holds something else, not an npz file"),
    "csv as parquet": ("a.parquet", GOOD.encode(), r"a\.parquet holds something else, not a Parquet file"),
    "cut parquet": ("a.parquet", parquet({"text": ["a"]})[:-20], r"a\.parquet is damaged or cut short"),
    "csv as gzip": ("a.jsonl.gz", GOOD.encode(), r"a\.jsonl\.gz holds something else, not gzip"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(b'{"text": 1}' * 99)[:-9], r"a\.jsonl\.gz is damaged or cut short"),
    "png as txt": ("a.txt", png(), r"a\.txt holds a PNG image, not plain text"),
    "empty txt": ("a.txt", b"", r"a\.txt is empty"),
    "unknown name": ("a.xlsx", b"PK\x03\x04", r"a\.xlsx: files with this ending .*zip archive.*; expected \.csv"),
    "not json": ("a.jsonl", b'{"text": "x", "label": 1}\n{text}\n', r"a\.jsonl, line 2: not JSON"),
    "json list": ("a.jsonl", b"[1, 2]\n", r"a\.jsonl, line 1: a JSON list, not an object"),
    "json null": ("a.jsonl", lines({"text": "x", "label": None}), r'line 1: column "label" is empty'),
    "json missing": (
        "a.jsonl",
        lines({"text": "x", "label": 1}, {"text": "x"}),
        r'a\.jsonl, line 2: column "label" is empty',
    ),
    "json number": ("a.jsonl", lines({"text": 5, "label": 1}), r'line 1: column "text" holds int 5: text is expected'),
    "json half": (
        "a.jsonl",
        lines({"text": "x", "label": 0.5}),
        r"line 1: .*float 0\.5: labels are class names or int",
    ),
    "parquet nan": (
        "a.parquet",
        parquet({"text": ["x", "y"], "label": [1.0, float("nan")]}),
        r'a\.parquet, row 2: column "label" is empty',
    ),
    "no x": ("a.npz", npz(X=X, y=Y), r'a\.npz: no array "x"; found "X", "y" \(did you mean "X"\?\)'),
    "no y": ("a.npz", npz(x=X), r'a\.npz: no array "y"; found "x"'),
    "x int": ("a.npz", npz(x=X.astype(int), y=Y), r"x is int64 \(4, 3\); expected uint8 or uint16 \(N, H, W, C\)"),
    "no channel": ("a.npz", npz(x=np.zeros((4, 2, 2), np.uint8), y=Y), r"x\[\.\.\., None\] adds the channel"),
    "four channels": ("a.npz", npz(x=np.zeros((4, 2, 2, 4), np.uint8), y=Y), r"x is uint8 \(4, 2, 2, 4\)"),
    "no rows": ("a.npz", npz(x=X[:0], y=Y[:0]), r"a\.npz: x has no rows"),
    "y float": ("a.npz", npz(x=X, y=Y.astype(float)), r"a\.npz: y is float64; expected integers"),
    "y strings": ("a.npz", npz(x=X, y=Y.astype(str)), r"a\.npz: y is <U21; expected integers; names go into classes"),
    "y short": ("a.npz", npz(x=X, y=Y[:3]), r"a\.npz: y has shape \(3,\) and x has 4 rows"),
    "outside": (
        "a.npz",
        npz(x=X, y=Y + 1, classes=["a", "b"]),
        r"a\.npz: y\[1\] is 2, outside the 2 classes \(0\.\.1\)",
    ),
    "classes": ("a.npz", npz(x=X, y=Y, classes=Y), r"classes is int64 \(4,\); expected strings \(C,\)"),
    "nan": ("a.npz", npz(x=np.where(X == 5, np.nan, X), y=Y), r"a\.npz: x\[1, 2\] is nan: .*must be finite"),
    "too large": ("a.npz", npz(x=np.where(X == 5, 1e300, X.astype(float)), y=Y), r"x\[1, 2\] is 1e\+300"),
    "objects": ("a.npz", npz(x=X, y=np.array([0, 1, None, 2])), r'array "y" holds Python objects'),
    "split length": ("a.npz", npz(x=X, y=Y, split=["train"]), r"split has shape \(1,\) and x has 4 rows"),
    "split value": ("a.npz", npz(x=X, y=Y, split=["train"] * 3 + ["tst"]), r'split\[3\]:.*"tst" is not one of train'),
    "cut npz": ("a.npz", npz(x=X, y=Y)[:200], r"a\.npz is damaged or cut short"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_with_its_place(case: str, tmp_path: Path) -> None:
    name, content, message = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_table(DataSpec(path=str(tmp_path / name)), seed=0)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(
    data=st.binary(max_size=60), name=st.sampled_from(["a.csv", "a.jsonl", "a.jsonl.gz", "a.parquet", "a.npz", "a.txt"])
)
def test_whatever_the_bytes_nothing_but_input_errors(data: bytes, name: str, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(data)
    try:
        table = load_table(DataSpec(path=str(path)), seed=0)
    except InputError:
        return
    assert len(table) > 0


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 400), name=st.sampled_from(["a.npz", "a.parquet", "a.jsonl.gz"]), value=st.integers(0, 255))
def test_damage_in_a_binary_file_is_an_input_error(place: int, name: str, value: int, tmp_path_factory: Any) -> None:
    rows = [{"text": f"t{i}", "label": i % 2} for i in range(9)]
    content = bytearray(
        {
            "a.npz": npz(x=X, y=Y),
            "a.parquet": parquet({"text": ["x", "y"], "label": [0, 1]}),
            "a.jsonl.gz": gzip.compress(lines(*rows)),
        }[name]
    )
    content[place % len(content)] = value
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content)
    try:
        table = load_table(DataSpec(path=str(path)), seed=0)
    except InputError as error:
        message = str(error)
    else:
        message = table.source
    assert name in message


def test_a_missing_path_says_what_lies_nearby(tmp_path: Path) -> None:
    (tmp_path / "silo.csv").write_text(GOOD)
    with pytest.raises(
        InputError, match=r'data\.path: there is no ".*sillo\.csv".*holds "silo\.csv".*mean "silo\.csv"'
    ):
        load_table(DataSpec(path=str(tmp_path / "sillo.csv")), seed=0)
    with pytest.raises(InputError, match=r'data\.path: there is no "/no/such\.csv"; "/" holds '):
        load_table(DataSpec(path="/no/such.csv"), seed=0)
    with pytest.raises(InputError, match=r'data\.hub: there is no "/no/such"'):
        load_table(DataSpec(hub="/no/such"), seed=0)


def test_csv_quotes_line_breaks_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbf text ,label,site\r\n"a, ""b""\r\nc",x,1\r\nd,y,2\r\n\r\n')
    table = tables.read(path, DataSpec())
    assert table.inputs == ['a, "b"\r\nc', "d"]
    assert table.labels is not None
    assert table.labels.tolist() == [0, 1]
    assert table.classes == ("x", "y")
    assert table.columns["site"].tolist() == ["1", "2"]


def test_csv_takes_long_fields(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label,note\n" + "x" * 200_000 + ",a," + "n" * 200 + "\ny,b,m\n")
    table = tables.read(tmp_path / "a.csv", DataSpec())
    assert len(table.inputs[0]) == 200_000
    assert table.columns["note"].tolist() == ["n" * 200, "m"]


@pytest.mark.parametrize(
    ("values", "classes", "labels"),
    [
        (["b", "a", "b"], ("a", "b"), [1, 0, 1]),
        (["10", "9", "10"], ("9", "10"), [1, 0, 1]),  # integers sort by value, not as text
        (["01", "1", "01"], ("01", "1"), [0, 1, 0]),  # post codes and the like are names
        (["-1", "1", "1"], ("-1", "1"), [0, 1, 1]),
        ([" a", "a ", "b"], ("a", "b"), [0, 0, 1]),
    ],
)
def test_labels_by_hand(values: list[str], classes: tuple[str, ...], labels: list[int], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"t,{value}\n" for value in values))
    table = tables.read(tmp_path / "a.csv", DataSpec())
    assert table.classes == classes
    assert table.labels is not None
    assert table.labels.tolist() == labels
    spelt = {("9", "10"), ("-1", "1")} | ({classes} if any(value != value.strip() for value in values) else set())
    assert bool(table.notices) == (classes in spelt)


def test_label_names_rename_integers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label,label_name\nx,7,zebra\ny,3,ant\nz,7,zebra\n")
    table = tables.read(tmp_path / "a.csv", DataSpec())
    assert table.classes == ("ant", "zebra")
    assert table.labels is not None
    assert table.labels.tolist() == [1, 0, 1]
    assert table.columns == {}


def test_csv_jsonl_and_parquet_give_the_same_table(tmp_path: Path) -> None:
    columns = {
        "text": ["one", "two\u2028x", "drei"],
        "label": [1, 2, 1],
        "split": ["train", "test", "val"],
        "site": [1, 2, 3],
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    raw = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    (tmp_path / "a.jsonl").write_bytes(raw)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "a.parquet").write_bytes(parquet(columns))
    text_ = "\n".join([",".join(columns), *(",".join(map(str, row.values())) for row in rows)])
    (tmp_path / "a.csv").write_text(text_, encoding="utf-8")
    tables = [load_table(DataSpec(path=str(p)), seed=0) for p in sorted(tmp_path.iterdir())]
    assert len(tables) == 4
    assert len({fingerprint(table) for table in tables}) == 1
    for table in tables:
        assert table.split.tolist() == ["train", "test", "val"]
        assert table.classes == ("1", "2")
        assert table.columns["site"].tolist() == ["1", "2", "3"]


def test_instruction_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(*({"instruction": f"q{i}", "output": f"a{i}", "client": i % 2} for i in range(10))))
    table = load_table(DataSpec(path=str(path)), seed=0, task="instruction")
    assert (table.kind, table.inputs[3], table.labels) == ("instruction", ("q3", "a3"), None)
    assert len(table.rows("test")) == 2
    with pytest.raises(InputError, match=r'no column "text" \(data\.text\).*has instructions: .*task = "instruction"'):
        load_table(DataSpec(path=str(path)), seed=0, task="classification")
    path.write_bytes(lines({"instruction": "q", "output": ""}))
    with pytest.raises(InputError, match=r'line 1: column "output" is empty'):
        load_table(DataSpec(path=str(path)), seed=0, task="instruction")


@given(st.text(alphabet="ab \n", max_size=200), st.integers(2, 30))
def test_passages_joined_give_the_text(content: str, size: int) -> None:
    pieces = text.cut(content, size)
    assert "".join(pieces) == content
    assert all(0 < len(piece) <= size for piece in pieces) or content == ""


def test_passages_by_hand() -> None:
    assert text.cut("aaaa bb\ncc dd", 9) == ["aaaa bb\n", "cc dd"]
    assert text.cut("a bbbbbbbbb", 6) == ["a bbbb", "bbbbb"]  # the blank lies in the first half


def test_a_text_ends_in_its_test_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words to read\n" * 2000)
    table = load_table(DataSpec(path=str(tmp_path / "a.txt")), seed=0, task="language_modelling")
    assert table.kind == "passages"
    assert len(table) == 20
    assert table.rows("test").tolist() == [16, 17, 18, 19]
    with pytest.raises(InputError, match=r'"classification" needs .*holds running text, for task "language_modelling"'):
        load_table(DataSpec(path=str(tmp_path / "a.txt")), seed=0, task="classification")


def test_digits_are_uint8_images_with_values_from_0_to_255() -> None:
    table = digits.read()
    assert table.inputs.shape == (1797, 8, 8, 1)
    assert table.inputs.dtype == np.uint8
    assert (table.inputs.min(), table.inputs.max()) == (0, 255)
    assert table.inputs[0, 0, 2, 0] == 80  # the file says 5 of 16: 5 * 255 / 16 = 79.7
    assert table.labels is not None
    assert table.labels[:4].tolist() == [0, 1, 2, 3]


def test_npz_of_pictures_with_domains(tmp_path: Path) -> None:
    x = np.arange(4 * 2 * 2 * 3, dtype=np.uint8).reshape(4, 2, 2, 3)
    np.savez(tmp_path / "a.npz", x=x, y=Y, domain=["d", "e", "d", "e"], site=[1, 2, 3, 4], junk=np.zeros(3))
    table = load_table(DataSpec(path=str(tmp_path / "a.npz"), test_fraction=0.0), seed=0)
    assert table.kind == "image"
    assert np.array_equal(table.inputs, x)
    assert table.columns["domain"].tolist() == ["d", "e", "d", "e"]
    assert table.columns["site"].tolist() == ["1", "2", "3", "4"]
    assert len(table.notices) == 1
    assert 'array "junk"' in table.notices[0]


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ">f4"])
def test_npz_features_become_float32(dtype: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X.astype(dtype), y=Y, classes=["no", "yes"])
    table = load_table(DataSpec(path=str(tmp_path / "a.npz"), test_fraction=0.0), seed=0)
    assert table.inputs.dtype == np.float32
    assert np.array_equal(table.inputs, X)
    assert table.classes == ("no", "yes")


def folder(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_image_folder(tmp_path: Path) -> None:
    root = folder(
        tmp_path / "pets",
        {
            "train/dog/1.png": png(value=1),
            "train/cat/2.jpg": jpeg(),
            "test/dog/3.png": png((9, 9), 3, "L"),
            "train/metadata.csv": b"file_name,domain\ndog/1.png,photo\ncat/2.jpg,sketch\n",
            "train/dog/Thumbs.db": b"junk",
            "train/dog/.DS_Store": b"junk",
        },
    )
    (root / "train/bird").mkdir()
    table = load_table(DataSpec(path=str(root)), seed=0)
    assert [Path(p).name for p in table.inputs] == ["3.png", "2.jpg", "1.png"]
    assert table.classes == ("cat", "dog")
    assert table.labels is not None
    assert table.labels.tolist() == [1, 0, 1]
    assert table.split.tolist() == ["test", "train", "train"]
    assert table.columns["domain"].tolist() == ["", "sketch", "photo"]
    hollow, other = table.notices
    assert f'"{root / "train/bird"}/" holds no readable image and is not a class' in hollow
    assert other.startswith("1 file of ")
    assert "(1 .db), e.g." in other
    assert "Thumbs.db" in other
    assert decode(table.inputs[0]).shape == (9, 9, 1)
    assert decode(table.inputs[2]).tolist() == np.broadcast_to([1, 0, 0], (4, 6, 3)).tolist()
    inputs = read_inputs(root, DataSpec(), kind="image")
    assert len(inputs) == 3
    assert inputs.labels is None


def test_every_ending_of_a_picture_is_read(tmp_path: Path) -> None:
    """Those that Pillow writes; what it does not read is refused, not left out."""
    from PIL import Image

    Image.init()
    picture = Image.fromarray(np.zeros((8, 8, 3), np.uint8))
    written = [ending for ending in SUFFIXES if Image.EXTENSION.get(ending) in Image.SAVE]
    (tmp_path / "x/a").mkdir(parents=True)
    for ending in written:
        picture.convert("1" if ending == ".pbm" else "RGB").save(tmp_path / f"x/a/1{ending}")
    assert len(load_table(DataSpec(path=str(tmp_path / "x")), seed=0)) == len(written) > 15


def test_a_folder_without_classes_serves_to_predict_only(tmp_path: Path) -> None:
    root = folder(tmp_path / "new", {"b.png": png(), "a.png": png()})
    table = read_inputs(root, DataSpec(), kind="image")
    assert [Path(p).name for p in table.inputs] == ["a.png", "b.png"]
    with pytest.raises(InputError, match=r"a\.png is in no class folder; expected train/<class>"):
        load_table(DataSpec(path=str(root)), seed=0)
    (root / "metadata.csv").write_text("file_name,label\na.png,x\nb.png,y\n")
    assert load_table(DataSpec(path=str(root)), seed=0).classes == ("x", "y")


BAD_FOLDERS: dict[str, tuple[dict[str, bytes], str]] = {
    "nothing": ({"train/notes.md": b"x"}, r"no images .* in this folder but 1 .md; expected train/<class>"),
    "text as png": ({"dog/1.png": b"hello"}, r"dog/1\.png: not an image that can be read"),
    "cut png": ({"dog/1.png": png((90, 90), 7)[:-30], "cat/1.png": png()}, r"dog/1\.png: .*: replace the file"),
    "cut jpeg": ({"dog/1.jpg": jpeg()[:2000]}, r"dog/1\.jpg: a JPEG without its end"),
    "deep": ({"photo/dog/1.png": png()}, r"photo/dog is a folder inside the class folder photo"),
    "mixed": ({"train/dog/1.png": png(), "tets/dog/1.png": png()}, r'tets is next to "train" .*did you mean "test"'),
    "outside": ({"train/dog/1.png": png(), "2.png": png()}, r'2\.png is outside "train"'),
    "only test": ({"test/dog/1.png": png()}, r"has no training rows"),
    "metadata missing": (
        {"dog/1.png": png(), "dog/2.png": png(), "metadata.csv": b"file_name,site\ndog/1.png,a\n"},
        r"dog/2\.png has no row in .*metadata\.csv",
    ),
    "metadata wrong": (
        {"dog/1.png": png(), "metadata.csv": b"file_name,site\ndog/l.png,a\n"},
        r'metadata\.csv, row 2: there is no image "dog/l\.png".*did you mean "dog/1\.png"',
    ),
    "metadata without names": (
        {"dog/1.png": png(), "metadata.csv": b"filename,site\ndog/1.png,a\n"},
        r'no column "file_name".*did you mean "filename"',
    ),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_bad_folder_is_refused(case: str, tmp_path: Path) -> None:
    files, message = BAD_FOLDERS[case]
    with pytest.raises(InputError, match=message):
        load_table(DataSpec(path=str(folder(tmp_path / "set", files))), seed=0)


def saved(path: Path, splits: dict[str, dict[str, list[Any]]], features: Any) -> str:
    from datasets import Dataset, DatasetDict

    DatasetDict({k: Dataset.from_dict(v, features=features) for k, v in splits.items()}).save_to_disk(str(path))
    return str(path)


def test_hub_splits_and_class_labels(tmp_path: Path) -> None:
    from datasets import ClassLabel, Features, Value

    features = Features(text=Value("string"), label=ClassLabel(names=["pos", "neg"]))
    rows = {"text": ["a", "b"], "label": [0, 1]}
    hidden = {"text": ["c"], "label": [-1]}
    whole = {"train": rows, "validation": rows, "test": rows, "extra": rows}
    table = load_table(DataSpec(hub=saved(tmp_path / "whole", whole, features)), seed=0)
    assert table.split.tolist() == ["train"] * 2 + ["val"] * 2 + ["test"] * 2
    assert table.classes == ("pos", "neg")  # their own order
    assert [n for n in table.notices if '"extra"' in n]
    withheld = {"train": rows, "validation": rows, "test": hidden}
    table = load_table(DataSpec(hub=saved(tmp_path / "withheld", withheld, features)), seed=0)
    assert table.split.tolist() == ["train"] * 2 + ["test"] * 2
    assert any("no labels" in n for n in table.notices)
    assert any("validation rows are the test" in n for n in table.notices)
    bad = {"train": {"text": ["a", "b"], "label": [0, -1]}}
    with pytest.raises(InputError, match=r'train\[1\]: label "-1" is outside the 2 classes "pos", "neg" \(0\.\.1\)'):
        load_table(DataSpec(hub=saved(tmp_path / "bad", bad, features)), seed=0)
    with pytest.raises(InputError, match=r'no column "sentence" \(data\.text\); found "text", "label"'):
        load_table(DataSpec(hub=str(tmp_path / "whole"), text="sentence"), seed=0)
    with pytest.raises(InputError, match=r"written by save_to_disk: give it as data\.hub"):
        load_table(DataSpec(path=str(tmp_path / "whole")), seed=0)
    (tmp_path / "plain").mkdir()
    with pytest.raises(InputError, match=r'data\.hub: ".*plain" cannot be loaded .* a folder written by save_to_disk'):
        load_table(DataSpec(hub=str(tmp_path / "plain")), seed=0)


def test_pictures_of_a_large_npz_stay_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 5, 6, 3), dtype=np.uint8)
    path = tmp_path / "rows.npz"
    np.savez(path, y=np.arange(40) % 2, x=pixels)
    spec = DataSpec(path=str(path))
    small = load_table(spec, seed=0)
    monkeypatch.setattr("fedfm.data.sources.npz.MAPPED", 1000)
    large = load_table(spec, seed=0)
    base = large.inputs
    while not isinstance(base, np.memmap):
        base = base.base
    assert np.array_equal(large.inputs, pixels)
    monkeypatch.setattr("fedfm.data.table._PIECE", 1000)  # 11 rows of 90 bytes
    assert fingerprint(large) == fingerprint(small)
    np.savez_compressed(path, y=np.arange(40) % 2, x=pixels)
    assert fingerprint(load_table(spec, seed=0)) == fingerprint(small)
    np.savez(path, y=np.arange(40) % 2, x=pixels)
    data = path.read_bytes()
    at = data.index(pixels[7].tobytes())
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(InputError, match=r"rows\.npz is damaged or cut short \(the checksum of x\.npy is wrong\)"):
        load_table(spec, seed=0)
    path.write_bytes(b"hello" * 1000)
    with pytest.raises(InputError, match=r"rows\.npz holds something else, not an npz file"):
        load_table(spec, seed=0)


@pytest.mark.parametrize("values", [np.array([[-1000, 3000]], np.int32), np.array([[0.5, 1]], np.float32)])
def test_grey_values_without_a_range_of_their_own_are_refused(tmp_path: Path, values: Any) -> None:
    """Pillow turns them into RGB by cutting at 0 and 255: a scan in Hounsfield units would be black and white."""
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(png())
    Image.fromarray(values).save(tmp_path / "dog" / "1.tif")
    for read in (
        lambda: load_table(DataSpec(path=str(tmp_path)), seed=0),
        lambda: read_inputs(tmp_path, DataSpec(), kind="image"),
    ):
        with pytest.raises(InputError, match=r"dog/1\.tif: its grey values are .* from .* apply a window"):
            read()


def test_a_hub_id_that_no_file_system_takes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be loaded"):
        load_table(DataSpec(hub="a" * 300), seed=0)


def test_many_hub_texts_stay_in_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {
        s: {"text": [f"{s} {i}" for i in range(n)], "label": [0, 1] * (n // 2)} for s, n in (("train", 30), ("test", 8))
    }
    spec = DataSpec(hub=saved(tmp_path / "set", splits, None), limit=20)
    few = load_table(spec, seed=0)
    monkeypatch.setattr("fedfm.data.sources.hub.LISTED", 10)
    many = load_table(spec, seed=0)
    assert isinstance(few.inputs, list)
    assert isinstance(many.inputs, ArrowTexts)
    assert list(many.inputs) == few.inputs
    assert fingerprint(many) == fingerprint(few)
    part = many.take([9, 2, 27]).inputs
    assert [part[0], part[-1], *part[1:]] == [few.inputs[i] for i in (9, 27, 2, 27)]
    with pytest.raises(IndexError):
        part[3]
    splits["train"]["text"][7] = " "
    with pytest.raises(InputError, match=r'train\[7\]: column "text" is empty'):
        load_table(DataSpec(hub=saved(tmp_path / "blank", splits, None)), seed=0)


def test_hub_pictures(tmp_path: Path) -> None:
    from datasets import ClassLabel, Features, Image

    features = Features(img=Image(), label=ClassLabel(names=["x", "y"]))
    same = [{"bytes": png(value=v), "path": None} for v in (1, 2)]
    other = [same[0], {"bytes": png((3, 3)), "path": None}]
    split = {"train": {"img": same, "label": [0, 1]}, "test": {"img": same, "label": [1, 0]}}
    table = load_table(DataSpec(hub=saved(tmp_path / "same", split, features)), seed=0)
    assert table.inputs.shape == (4, 4, 6, 3)
    assert table.inputs[1, 0, 0].tolist() == [2, 0, 0]
    assert any('column "img"' in n for n in table.notices)
    split["train"]["img"] = other
    table = load_table(DataSpec(hub=saved(tmp_path / "other", split, features)), seed=0)
    assert [decode(item).shape for item in table.inputs] == [(4, 6, 3), (3, 3, 3), (4, 6, 3), (4, 6, 3)]
    with pytest.MonkeyPatch.context() as patched:  # pictures of one size that are too many stay encoded
        patched.setattr("fedfm.data.pictures.DECODED", 4 * 6 * 4 * 3 - 1)
        many = load_table(DataSpec(hub=str(tmp_path / "same")), seed=0)
        assert len(many.inputs) == 4
        assert [decode(item)[0, 0, 0] for item in many.inputs] == [1, 2, 1, 2]
        assert many.inputs[-3:-1] == many.inputs[1:3]
        with pytest.raises(IndexError):
            many.inputs[4]
    split["train"]["img"] = [same[0], {"bytes": b"junk", "path": None}]
    with pytest.raises(InputError, match=r"train\[1\]: not an image that can be read"):
        load_table(DataSpec(hub=saved(tmp_path / "junk", split, features)), seed=0)


def test_rows_to_predict_need_no_labels(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\none\ntwo\n")
    table = read_inputs(tmp_path / "a.csv", DataSpec(), kind="text")
    assert (table.inputs, table.labels, table.split.tolist()) == (["one", "two"], None, ["test", "test"])
    (tmp_path / "a.csv").write_text("text,label,split\none,,what\n")  # labels and splits are not looked at
    assert len(read_inputs(tmp_path / "a.csv", DataSpec(), kind="text")) == 1
    np.savez(tmp_path / "a.npz", x=X)
    table = read_inputs(tmp_path / "a.npz", DataSpec(scale="unit"), kind="features")
    assert np.allclose(np.linalg.norm(table.inputs, axis=1), 1)
    with pytest.raises(InputError, match=r"a\.npz holds feature vectors; the model takes texts"):
        read_inputs(tmp_path / "a.npz", DataSpec(), kind="text")
    (tmp_path / "a.jsonl").write_bytes(lines({"instruction": "why?"}))
    assert read_inputs(tmp_path / "a.jsonl", DataSpec(), kind="instruction").inputs == [("why?", "")]
    with pytest.raises(InputError, match=r"file: there is no"):
        read_inputs(tmp_path / "b.csv", DataSpec(), kind="text")


def test_a_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    def of(files: dict[str, bytes], name: str) -> str:
        return fingerprint(load_table(DataSpec(path=str(folder(tmp_path / name, files)), test_fraction=0.0), seed=0))

    a = of({"dog/1.png": png(value=1), "cat/2.png": png(value=2)}, "a")
    assert a == of({"dog/9.png": png(value=1), "cat/8.png": png(value=2)}, "b")
    assert a != of({"dog/1.png": png(value=3), "cat/2.png": png(value=2)}, "c")
    assert a != of({"dog/1.png": png(value=1), "cow/2.png": png(value=2)}, "d")
    table = digits.read()
    changed: list[Callable[[], Any]] = [
        lambda: table.inputs.__setitem__((0, 0, 0, 0), 9),
        lambda: table.split.__setitem__(0, "val"),
        lambda: table.labels.__setitem__(0, 1) if table.labels is not None else None,
    ]
    prints = [fingerprint(table)]
    for change in changed:
        change()
        prints.append(fingerprint(table))
    assert len(set(prints)) == 4
