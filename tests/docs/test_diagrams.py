"""The drawings of docs/figures/: the packages that exist, and the words of the page on who sees what."""

import importlib.util
import itertools
import re
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("diagrams", ROOT / "docs" / "diagrams.py")
diagrams = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(diagrams)
DRAWN = {path.name: (path, text) for path, text in diagrams.files().items()}


def test_the_house_has_the_packages_that_exist():
    packages = {path.parent.name for path in (ROOT / "src/fedfm").glob("*/__init__.py")}
    assert {*diagrams.HOUSE, *diagrams.WINGS} == packages


def test_the_layers_of_the_diagram_have_the_order_of_the_import_contract():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    layers = tools["importlinter"]["contracts"][0]["layers"]
    drawn = [*diagrams.WINGS, *diagrams.HOUSE, " | ".join(f"fedfm.{name}" for name in diagrams.ROOT)]
    assert [layer.removeprefix("fedfm.") if "|" not in layer else layer for layer in layers] == drawn


def test_what_crosses_the_wire_stands_on_the_page():
    page = (ROOT / "docs/reference/who-sees-what.md").read_text(encoding="utf-8")
    rows = {row[0]: row[1:] for row in re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", page, re.M)}
    for ways in diagrams.WIRE.values():
        for column, said in enumerate(ways):
            assert said
            for row, words in said:
                assert words in rows[row][column], (row, words)


def test_a_round_goes_from_party_to_party_and_comes_back():
    assert all(before[1] == after[0] for before, after in itertools.pairwise(diagrams.ROUND))
    assert diagrams.ROUND[0][0] == diagrams.ROUND[-1][1] == 0


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_is_valid_and_no_text_leaves_it(name):
    path, text = DRAWN[name]
    assert path.read_text(encoding="utf-8") == text
    drawing = ET.fromstring(text)
    width, height = (float(v) for v in drawing.get("viewBox").split()[2:])
    for line in drawing.iter("{http://www.w3.org/2000/svg}text"):
        if line.get("x") is None:
            continue  # along a wing
        long = 0.5 * float(line.get("font-size")) * len(line.text)  # about half the size for each letter
        begin = float(line.get("x")) - {"start": 0, "middle": 0.5}[line.get("text-anchor")] * long
        assert begin >= 0
        assert begin + long <= width, line.text
        assert 0 < float(line.get("y")) < height


@pytest.mark.parametrize("name", DRAWN)
def test_a_page_shows_it(name):
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    assert any(f"figures/{name})" in page for page in pages)
    assert not any("```mermaid" in page for page in pages)
