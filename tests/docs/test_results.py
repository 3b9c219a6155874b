"""The verdicts of ``reproduce/`` follow from the figures, and the pages of results from what was kept of the runs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def reproduce(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "reproduce"))
    yield importlib.import_module("run")
    for name in ("run", "claims", "sets"):
        sys.modules.pop(name, None)


def test_the_interval_decides_and_not_the_mean_alone(reproduce: ModuleType) -> None:
    verdict = sys.modules["claims"].verdict
    # Mean 2 and standard deviation 1 of three: the half-width is 4.303 / sqrt(3) = 2.484.
    assert verdict([1.0, 2.0, 3.0], -0.5, at_least=True) == "holds"
    assert verdict([1.0, 2.0, 3.0], -0.4, at_least=True) == "open: the mean holds"
    assert verdict([1.0, 2.0, 3.0], 4.4, at_least=True) == "open: the mean does not"
    assert verdict([1.0, 2.0, 3.0], 4.5, at_least=True) == "does not hold"
    assert verdict([1.0, 2.0, 3.0], 4.5, at_least=False) == "holds"
    assert verdict([1.0, 2.0, 3.0], -0.5, at_least=False) == "does not hold"
    assert verdict([1.0], 0.0, at_least=True) == "holds, one seed"


def test_differences_are_taken_seed_by_seed(reproduce: ModuleType) -> None:
    claims = sys.modules["claims"]
    found = {"a": {"0": 90.0, "1": 80.0, "2": 1.0}, "b": {"0": 89.0, "1": 82.0}}
    assert claims.measured({"left": "a", "right": "b"}, found) == {"0": 1.0, "1": -2.0}
    assert claims.measured({"spread": ["a", "b"]}, found) == {"0": 1.0, "1": 2.0}
    assert claims.measured({"left": "a", "right": "c"}, found) == {}
    line = claims.lines([{"claim": "c", "checks": [{"what": "w", "left": "a", "right": "b", "at_least": 0}]}], found)
    # Mean -0.5, standard deviation 1.5 sqrt(2), half-width 12.706 * 1.5.
    said = f"-0.5 ± {12.706 * 1.5:.1f}"
    assert line[-2] == f"| w | at least 0 | {said} | 0, 1 | open: the mean does not |"


@pytest.mark.parametrize("name", [p.parent.name for p in sorted((ROOT / "reproduce").glob("*/tables.json"))])
def test_the_page_is_what_the_runs_gave(
    reproduce: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    about = json.loads((ROOT / "reproduce" / name / "tables.json").read_text(encoding="utf-8"))
    rows = {path.stem for path in (ROOT / "reproduce" / name).glob("*.toml")}
    for table, part in page.items():
        assert {f"{table}__{row}" for row in part["rows"]} == {r for r in rows if r.partition("__")[0] == table}
    assert {row.partition("__")[0] for row in rows} == set(about["tables"])
    for claim in about["claims"]:
        for check in claim["checks"]:
            assert set(check.get("spread") or [check["left"], check["right"]]) <= rows
    (tmp_path / "docs" / "results").mkdir(parents=True)
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    reproduce.write(ROOT / "reproduce" / name, about, page)
    written = (tmp_path / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8")
    assert written == (ROOT / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8")
