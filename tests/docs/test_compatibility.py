"""The page on compatibility has the versions that the code has, and a ledger of a newer version is refused."""

import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest

from fedfm.engines.flower import private_api
from fedfm.errors import InputError
from fedfm.sites import ledger

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/compatibility.md").read_text()
ROWS = re.findall(r"^\| ([^|]+) \| (\d+) \| `(\S+)\.py`, `(\w+)` \|", PAGE, re.M)


def test_every_format_has_a_number():
    assert len(ROWS) == 9


@pytest.mark.parametrize(("format", "version", "module", "name"), ROWS, ids=[row[0] for row in ROWS])
def test_the_number_is_that_of_the_code(format, version, module, name):
    found = getattr(importlib.import_module("fedfm." + module.replace("/", ".")), name)
    assert re.search(r"\d+", str(found))[0] == version


def test_the_range_of_flower_is_that_of_the_code_and_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert private_api.TESTED == ("1.41.", "1.42.")
    assert "flwr>=1.41,<1.43" in project["optional-dependencies"]["flower"]
    assert "Of Flower, 1.41 and 1.42 are accepted" in " ".join(PAGE.split())


def test_the_versions_that_a_page_requires_are_those_of_the_package():
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    least = dict(line.split(">=") for line in lines)
    page = " ".join((ROOT / "docs/reference/engines.md").read_text().split())
    stated = r"PyTorch \(([\d.]+) or newer\), transformers \(([\d.]+) or newer\) and PEFT \(([\d.]+) or newer\)"
    found = re.search(stated, page)
    assert found.groups() == (least["torch"], least["transformers"], least["peft"])


def test_a_ledger_of_a_newer_version_is_refused_with_both_numbers(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps({"version": ledger.VERSION + 1, "something": "new"}) + "\n")
    with pytest.raises(InputError, match=rf"line 1 has version {ledger.VERSION + 1}, .* reads up to {ledger.VERSION};"):
        ledger.entries(path)
