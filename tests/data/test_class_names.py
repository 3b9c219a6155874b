"""Names of classes that look the same are one class, in every format and in every list of names."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedfm.data.class_names import class_name
from fedfm.data.invisible import is_invisible
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec, check
from fedfm.errors import InputError
from fedfm.sites import silo_config

CELL = "ol\u00e9 cell"
ODD = (
    "ol\u00e9 cell\u200b",
    "ole\u0301 cell",
    "ol\u00e9\u00a0cell",
    "\ufeffol\u00e9 c\u00adell ",
    "ol\u00e9 ce\u200dll",
)


@given(st.text(), st.sampled_from(["\u200b", "\ufeff", "\u00ad", "\u2060", "\u200e", "\u3164", "\x07"]))
def test_reading_a_name_is_idempotent_and_keeps_visible_characters(text: str, mark: str) -> None:
    name = class_name(text)
    assert class_name(name) == name
    assert class_name(mark + text + mark) in (name, class_name(f"{text} ").strip())
    assert not any(is_invisible(c) for c in name if c.isascii())


@pytest.mark.parametrize(
    "text", ["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\U0001f468\u200d\U0001f469", "\u2764\ufe0f"]
)
def test_joiners_that_scripts_and_emoji_need_stay(text: str) -> None:
    assert class_name(text) == text


def csv(folder: Path, names: list[str]) -> DataSpec:
    (folder / "a.csv").write_text("text,label\n" + "".join(f'a word,"{n}"\n' for n in names), encoding="utf-8")
    return DataSpec(path=str(folder / "a.csv"))


def jsonl(folder: Path, names: list[str]) -> DataSpec:
    lines = [json.dumps({"text": "a word", "label": i, "label_name": n}) for i, n in enumerate(names)]
    lines = [line.replace(f'"label": {i}', f'"label": {int(i > 0)}') for i, line in enumerate(lines)]
    (folder / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return DataSpec(path=str(folder / "a.jsonl"))


def pictures(folder: Path, names: list[str]) -> DataSpec:
    for i, name in enumerate(names):
        (folder / "p" / name).mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2), i).save(folder / "p" / name / f"{i}.png")
    return DataSpec(path=str(folder / "p"))


def clients(folder: Path, names: list[str]) -> DataSpec:
    paths = {}
    for i, name in enumerate(names):
        (folder / str(i)).mkdir()
        paths[f"silo-{i}"] = csv(folder / str(i), [name] * 5).path
    return DataSpec(clients=paths)


@pytest.mark.parametrize("write", [csv, jsonl, pictures, clients])
def test_spellings_of_one_class_are_one_class_with_a_notice(tmp_path: Path, write) -> None:
    table = load_table(write(tmp_path, ["a", CELL, *ODD]), seed=0)
    assert table.classes == ("a", CELL)
    said = "invisible or indistinguishable characters"
    assert any(said in notice and "\\u0301" in notice for notice in table.notices)


def test_class_names_of_an_array_and_of_lists_are_alike(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    x, y = np.zeros((4, 3), np.float32), np.array([0, 1, 0, 1])
    np.savez(file, x=x, y=y, classes=np.array(["a", ODD[0]]))
    table = load_table(DataSpec(path=str(file)), seed=0)
    assert table.classes == ("a", CELL)
    assert "\\u200b" in table.notices[0]
    np.savez(file, x=x, y=y, classes=np.array([CELL, ODD[0]]))
    with pytest.raises(InputError, match=r"must be different and not empty, but .*\\u200b"):
        load_table(DataSpec(path=str(file)), seed=0)


@pytest.mark.parametrize("odd", ODD)
def test_a_list_with_a_name_that_no_row_can_have_is_refused_with_the_right_one(tmp_path: Path, odd: str) -> None:
    says = f'is read as "{CELL}" in the rows: write it in that form'
    with pytest.raises(InputError, match=says):
        check(DataSpec(classes=("a", odd), kind="text"))
    file = tmp_path / "silo.toml"
    file.write_text(f"name = 's'\ndata = 'a.csv'\nallow = []\nclasses = {json.dumps(['a', odd])}\n", encoding="utf-8")
    with pytest.raises(InputError, match=says):
        silo_config.load(file)
