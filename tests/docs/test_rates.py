"""No verdict rests on a rate that was not searched at its own point, and a search goes on until its best is inside."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
PAGES = [p.parent.name for p in sorted((ROOT / "reproduce").glob("*/tables.json"))]
RATE = "method.local.learning_rate"


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "reproduce"))
    yield importlib.import_module("rates")
    for name in ("run", "cached_runs", "rates", "claims"):
        sys.modules.pop(name, None)


@pytest.fixture
def claims(rates: ModuleType) -> ModuleType:
    return importlib.import_module("claims")


SHAPES = (
    {"left": "a", "right": "b"},
    {"left": "b:own", "right": "a:start"},
    {"sum": {"c": 1, "a": -1, "b": 1}},
    {"spread": ["c", "b", "a"]},
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bound", [{"at_least": 0}, {"at_most": 0}])
@pytest.mark.parametrize("how", ["borrowed", "by hand", "paper", "", None])
def test_one_row_without_a_rate_of_its_own_leaves_no_verdict(rates, claims, shape, bound, how) -> None:
    values = {"0": 1.0, "1": 1.1, "2": 0.9}
    found = {f"{row}{of}": values for row in "abc" for of in ("", ":own", ":start")}
    fit = [{"how": "tuned", "keys": {RATE: 0.1}}, {"how": "tuned", "keys": {RATE: 0.3}}, {"how": "no rate"}]
    for at in range(2):  # whichever of a and b it is
        doubts = dict(zip("cab", map(rates.doubt, fit), strict=True))
        doubts["ab"[at]] = rates.doubt({} if how is None else {"how": how})
        claim = {"claim": "c", "checks": [{"what": "w", **shape, **bound}]}
        line = claims.lines([claim], found, doubts)[-2]
        why = line.rpartition("| no verdict: rate ")[2]
        assert why[:-2] in ("borrowed", "set by hand", "not searched, but the paper's", "of unknown origin")
        assert claims.tally([claim], found, doubts)[0].startswith("Of 1 differences 1 have no verdict (rate")
        doubts["ab"[at]] = rates.doubt(fit[0])
        assert "verdict" not in claims.lines([claim], found, doubts)[-2]
        doubts["ab"[at]] = rates.doubt({"how": "tuned", "keys": {RATE: 0.1}, "edge": [RATE]})
        assert claims.lines([claim], found, doubts)[-2].endswith(", at a grid's edge |")
        assert claims.tally([claim], found, doubts) == ["All 1 differences have a verdict."]


@given(
    grid=st.sampled_from(
        [[0.01, 0.03, 0.1], [0.003, 0.01, 0.03, 0.1], [1.0, 5.0, 20.0], [0.01, 0.03], [0.1, 0.3, 0.01]]
    ),
    best=st.floats(-12, 12),
    diverges=st.floats(0, 14),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_a_grid_is_widened_until_its_best_is_inside_or_three_values_were_added(
    rates: ModuleType, monkeypatch: pytest.MonkeyPatch, grid: list[float], best: float, diverges: float
) -> None:
    def loss(rate: float) -> float:
        x = math.log(rate)
        return math.inf if x > best + diverges else (x - best) ** 2

    def run(path: Path, out: Path, tune: object, changes: dict[str, float]) -> float:
        assert changes["kept"] == 1
        tried.append(changes[RATE])
        return loss(changes[RATE])

    tried: list[float] = []
    monkeypatch.setattr(rates, "_loss", run)
    assume(any(loss(v) < math.inf for v in grid))
    chosen, edge, words = rates.searched(Path("t__r.toml"), Path("x"), {"grid": {RATE: grid}}, {"kept": 1})
    assert len(tried) == len(set(tried)) <= len(grid) + 3
    assert chosen[RATE] == min(tried, key=loss)
    first, last = min(tried), max(tried)
    assert (edge == [RATE]) == (chosen[RATE] in (first, last)) == ("the grid's edge" in words)
    if edge:
        assert len({v for v in tried if v not in grid and (v > max(grid)) == (chosen[RATE] == last)}) == 3
    assert words.startswith(f"local.learning_rate {chosen[RATE]:g} of {first:g}, ")


def test_a_grid_that_diverges_everywhere_is_widened_downwards(
    rates: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = 0.0005
    monkeypatch.setattr(
        rates, "_loss", lambda path, out, tune, changes: -math.inf if changes[RATE] < fits else math.inf
    )
    search = Path("t__r.toml"), Path("x"), {"grid": {RATE: [0.01, 0.03, 0.1]}}, {}
    assert rates.searched(*search)[:2] == ({RATE: 0.0003}, [RATE])
    fits = 1e-9
    with pytest.raises(
        SystemExit, match=r"t__r\.toml: diverged at every point of .*0\.0003, 0\.001, 0\.003, 0\.01, 0\.03, 0\.1"
    ):
        rates.searched(*search)


def test_a_run_that_diverged_at_one_client_is_not_chosen(rates: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    left = {"round": 1, "client": "client-0", "code": "E_NONFINITE", "reason": "reply.delta: head has NaN"}
    monkeypatch.setattr(rates, "finished", lambda *asked: {"excluded": [left]})
    assert rates._loss(Path("t__r.toml"), Path("x"), {"val_fraction": 0.5, "seed": 0}, {RATE: 0.01}) == math.inf


def test_grids_go_on_in_their_steps(rates: ModuleType) -> None:
    assert rates._widened([0.01, 0.03, 0.1], [0.01, 0.03, 0.1], 0.1) == [0.01, 0.03, 0.1, 0.3]
    assert rates._widened([0.01, 0.03, 0.1, 0.3], [0.01, 0.03, 0.1], 0.3)[-1] == 1.0
    assert rates._widened([0.01, 0.03, 0.1], [0.01, 0.03, 0.1], 0.01)[0] == 0.003
    assert rates._widened([1.0, 5.0, 20.0], [1.0, 5.0, 20.0], 20.0)[-1] == 100.0
    assert rates._widened([0.01, 0.03, 0.1, 0.3, 1.0, 3.0], [0.01, 0.03, 0.1], 3.0) == []


def test_where_a_rate_came_from(rates: ModuleType) -> None:
    method = {"rounds": 2, "local": {"learning_rate": 0.1}, "head": {"optimizer": "newton", "learning_rate": 1e-4}}
    both = {**method, "server_learning_rate": 0.01}
    assert rates.rates(method) == {RATE: 0.1}
    wrapped = {"rounds": 2, "local": {"learning_rate": 9.0}, "base": both}
    assert rates.rates(wrapped) == {"method.base.local.learning_rate": 0.1, "method.base.server_learning_rate": 0.01}
    wrapped["local"]["learning_rate"] = 0.1  # handed on to the base
    assert rates.rates(wrapped) == {RATE: 0.1, "method.base.server_learning_rate": 0.01}
    assert rates.rates({**method, "rounds": 0}) == {}
    paper = {"how": "paper", "of": "its Section 5"}
    chosen = {RATE: 0.3}

    def how(method: dict, row: str, of: str, chosen: dict, **options: object) -> str:
        return rates.choice(method, row, of, chosen, **options).how

    assert how(method, "t__r.p", "t__r.p", chosen) == "tuned"
    assert how(method, "t__r.p", "t__r.q", chosen) == how(method, "t__r", "u__r", chosen) == "borrowed"
    assert how(method, "t__r.p", "t__r.q", chosen, declared=paper) == "borrowed"
    assert how(both, "t__r", "t__r", chosen) == how(method, "t__r", "", {}) == "by hand"  # one of two was not searched
    assert how(both, "t__r", "t__r", chosen, declared=paper) == "tuned"  # the other is the paper's
    assert how(method, "t__r", "t__r", chosen, fixed=[RATE]) == "by hand"  # a grid of one value is no search
    assert how(method, "t__r", "", {}, declared=paper) == "paper"
    assert how({"head": method["head"]}, "t__r", "", {}) == "no rate"
    assert rates.Choice("borrowed", "t__s", chosen, [RATE]).said() == "0.3, edge, borrowed"


@pytest.mark.parametrize("name", PAGES)
def test_no_page_has_a_verdict_on_a_borrowed_rate(rates: ModuleType, claims: ModuleType, name: str) -> None:
    page = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    about = json.loads((ROOT / "reproduce" / name / "tables.json").read_text(encoding="utf-8"))
    written = (ROOT / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8")
    choices = {f"{t}__{row}": choice for t, part in page.items() for row, choice in part["choices"].items()}
    without = 0
    for claim in about["claims"]:
        for check in claim["checks"]:
            of = [choices.get(row.partition(":")[0]) for row in claims.rows_of(check)]
            if None not in of:
                without += any(choice["how"] not in ("tuned", "no rate") for choice in of)
    assert written.count("no verdict: ") == without
    for table, part in page.items():  # what is called tuned was searched, and the search names the value
        for row, choice in part["choices"].items():
            if choice["how"] == "tuned":
                said = "; ".join(next(iter(part["rows"][row].values()))["more"])
                assert all(f"{key.removeprefix('method.')} {v:g} of " in said for key, v in choice["keys"].items()), row
                assert said.count("the grid's edge") == len(choice.get("edge", ())), f"{table}__{row}"
