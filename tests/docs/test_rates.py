"""No claim rests on a rate that was not searched at its own point, and a search goes on until its best is inside."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
PAGES = [p.parent.name for p in sorted((ROOT / "reproduce").glob("*/tables.json"))]


def page_of(folder: str) -> str:
    """The name of a folder's page: ``one_shot`` has one-shot.md."""
    return folder.replace("_", "-")


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
    {"left": "t__a", "right": "t__b"},
    {"left": "t__b:own", "right": "t__a:start"},
    {"sum": {"t__c": 1, "t__a": -1, "t__b": 1}},
    {"spread": ["t__c", "t__b", "t__a"]},
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bound", [{"at_least": 0}, {"at_most": 0}])
@pytest.mark.parametrize("how", ["borrowed", "by hand", "paper", "", None])
def test_one_row_without_a_rate_of_its_own_makes_no_claim(rates, claims, shape, bound, how) -> None:
    values = {"0": 1.0, "1": 1.1, "2": 0.9}
    found = {f"t__{row}{of}": values for row in "abc" for of in ("", ":own", ":start")}
    fit = [{"how": "tuned", "keys": {RATE: 0.1}}, {"how": "tuned", "keys": {RATE: 0.3}}, {"how": "no rate"}]
    for at in range(2):  # whichever of a and b it is
        doubts = {f"t__{row}": rates.doubt(choice) for row, choice in zip("cab", fit, strict=True)}
        row = f"t__{'ab'[at]}"
        unfit = {} if how is None else {"how": how, "of": "t__s"}
        doubts[row] = rates.doubt(unfit)
        claim = {"claim": "c", "checks": [{"what": "w", **shape, **bound}]}
        assert claims.lines([claim], found, doubts) == []
        assert claims.verdicts([claim], found, doubts) == []
        assert claims.left_out([claim], found, doubts) == claim["checks"]
        assert claims.tally([claim], found, doubts)[0].startswith("Of 1 differences 0 are claims. The others (rate")
        line = claims.no_claims([claim], found, doubts, {row: unfit})[-1]
        assert "verdict" not in line
        assert "holds" not in line
        assert "| at " not in line
        said = f"`{'ab'[at]}`"
        origin = {"borrowed": f"rate borrowed: {said} from `s`", "by hand": f"rate set by hand: {said}"}
        origin |= {"paper": f"rate not searched, but the paper's: {said}"}
        assert line.endswith(f"| {origin.get(how, f'rate of unknown origin: {said}')} |")
        doubts[row] = rates.doubt(fit[0])
        assert len(claims.verdicts([claim], found, doubts)) == 1
        assert claims.no_claims([claim], found, doubts, {}) == []
        doubts[row] = rates.doubt({"how": "tuned", "keys": {RATE: 0.1}, "edge": [RATE]})
        assert claims.lines([claim], found, doubts)[-2].endswith(", at a grid's edge |")
        assert claims.tally([claim], found, doubts) == ["All 1 differences are claims."]


def test_a_comparison_names_its_rows_and_what_of_them(claims: ModuleType) -> None:
    assert claims._compared_rows({"left": "t__a", "right": "t__b"}) == "`a` less `b`"
    assert claims._compared_rows({"sum": {"t__a:own": 1, "t__b": -0.5, "t__c": 2}}) == (
        "`a` (theta_i) less 0.5 `b` plus 2 `c`"
    )
    assert claims._compared_rows({"spread": ["t__a", "t__b"]}) == "the largest less the smallest of `a`, `b`"


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
    chosen, edge, words = rates.search(Path("t__r.toml"), Path("x"), {"grid": {RATE: grid}}, {"kept": 1})
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
    assert rates.search(*search)[:2] == ({RATE: 0.0003}, [RATE])
    fits = 1e-9
    with pytest.raises(
        SystemExit, match=r"t__r\.toml: diverged at every point of .*0\.0003, 0\.001, 0\.003, 0\.01, 0\.03, 0\.1"
    ):
        rates.search(*search)


def test_a_run_that_diverged_at_one_client_is_not_chosen(rates: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    left = {"round": 1, "client": "client-0", "code": "E_NONFINITE", "reason": "reply.delta: head has NaN"}
    monkeypatch.setattr(rates, "run_once", lambda *asked: {"excluded": [left]})
    assert rates._loss(Path("t__r.toml"), Path("x"), {"val_fraction": 0.5, "seed": 0}, {RATE: 0.01}) == math.inf


def test_a_setting_without_validation_losses_is_chosen_by_the_accuracy_on_rows_for_tuning(
    rates: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "t__r.toml").write_text(
        '[data]\npath = ".data/set.model.npz"\n[model]\nname = "features"\n[method]\nname = "analytic"\n'
    )
    asked = []

    def finished(path: Path, out: Path, changes: dict[str, Any]) -> dict[str, float]:
        asked.append((out.name, changes["data.path"], changes["run.seed"]))
        return {"accuracy": 0.5 + 0.1 * changes["run.seed"] - abs(math.log10(changes["method.ridge"])) / 10}

    monkeypatch.setattr(rates, "run_once", finished)
    tune = {"grid": {"method.ridge": [0.1, 1.0, 10.0]}, "by": "accuracy", "seeds": [0, 1]}
    chosen, edge, words = rates.search(tmp_path / "t__r.toml", tmp_path / "x", tune, {})
    assert (chosen, edge) == ({"method.ridge": 1.0}, [])
    assert words == "ridge 1 of 0.1, 1, 10"
    assert asked[:2] == [(f"0.1-seed{s}", ".data/set.model.tuning.npz", s) for s in (0, 1)]


def test_grids_go_on_in_their_steps(rates: ModuleType) -> None:
    assert rates._next_value([0.01, 0.03, 0.1], [0.01, 0.03, 0.1], 0.1) == [0.01, 0.03, 0.1, 0.3]
    assert rates._next_value([0.01, 0.03, 0.1, 0.3], [0.01, 0.03, 0.1], 0.3)[-1] == 1.0
    assert rates._next_value([0.01, 0.03, 0.1], [0.01, 0.03, 0.1], 0.01)[0] == 0.003
    assert rates._next_value([1.0, 5.0, 20.0], [1.0, 5.0, 20.0], 20.0)[-1] == 100.0
    assert rates._next_value([0.01, 0.03, 0.1, 0.3, 1.0, 3.0], [0.01, 0.03, 0.1], 3.0) == []


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
    assert how(method, "t__r", "t__r", chosen, fixed=[RATE]) == "by hand"  # a grid of one value is not a search
    assert how(method, "t__r", "", {}, declared=paper) == "paper"
    assert how({"head": method["head"]}, "t__r", "", {}) == "no rate"
    assert rates.Choice("borrowed", "t__s", chosen, [RATE]).to_cell() == "0.3, edge, borrowed"


@pytest.mark.parametrize("name", PAGES)
def test_no_page_has_a_claim_on_a_borrowed_rate(rates: ModuleType, claims: ModuleType, name: str) -> None:
    page = json.loads((ROOT / "docs" / "results" / f"{page_of(name)}.json").read_text(encoding="utf-8"))
    about = json.loads((ROOT / "reproduce" / name / "tables.json").read_text(encoding="utf-8"))
    written = (ROOT / "docs" / "results" / f"{page_of(name)}.md").read_text(encoding="utf-8")
    choices = {f"{t}__{row}": choice for t, part in page.items() for row, choice in part["choices"].items()}
    fit, unfit = 0, 0
    for claim in about.get("claims", []):
        for check in claim["checks"]:
            of = [choices.get(row.partition(":")[0]) for row in claims.rows_of(check)]
            if None not in of:
                tuned = all(choice["how"] in ("tuned", "no rate") for choice in of)
                fit, unfit = fit + tuned, unfit + (not tuned)
    assert "no verdict:" not in written
    stated, _, others = written.partition(f"## {claims.NO_CLAIMS}")
    table = others.partition("| table | rows |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == unfit
    assert all("rate " in line and "hold" not in line and "open" not in line for line in table)
    stated = stated.partition("## The claims")[2].partition("\n## ")[0]
    lines = [line for line in stated.splitlines() if "| at " in line]
    decided = re.compile(r"(?:[\d)]|\|) (?:holds|does not hold|open|one seed)(?=[:, ])")
    assert sum(len(decided.findall(line)) for line in lines) == fit
    for table, part in page.items():  # what is called tuned was searched, and the search names the value
        for row, choice in part["choices"].items():
            if choice["how"] == "tuned":
                said = "; ".join(next(iter(part["rows"][row].values()))["more"])
                assert all(f"{key.removeprefix('method.')} {v:g} of " in said for key, v in choice["keys"].items()), row
                assert said.count("the grid's edge") == len(choice.get("edge", ())), f"{table}__{row}"


def test_the_index_counts_claims_alone_and_says_how_many_comparisons_are_none(
    rates: ModuleType, claims: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = (ROOT / "docs" / "results" / "index.md").read_text(encoding="utf-8")
    run = importlib.import_module("run")
    for name in PAGES:
        page = json.loads((ROOT / "docs" / "results" / f"{page_of(name)}.json").read_text(encoding="utf-8"))
        about = json.loads((ROOT / "reproduce" / name / "tables.json").read_text(encoding="utf-8"))
        checks = about.get("claims", []), run.figures(page), run.doubtful(page)
        row = re.search(rf"^\| \[[\w ]+\]\({page_of(name)}\.md#the-claims\) \| (.*) \|$", written, re.M)
        assert (row is None) == (not checks[0])
        if row:
            *counts, few, edges, others = row[1].split(" | ")
            decided = [check["verdict"] for check in claims.verdicts(*checks)]
            assert sum(map(int, counts)) == len(decided)
            needed = [int(n[1]) for verdict in decided if (n := re.search(r"\((\d+) seeds\)", verdict))]
            assert int(few) == sum(n <= 20 for n in needed)
            assert int(edges) == sum(verdict.endswith(rates.EDGE) for verdict in decided)
            assert others.partition(" ")[0] == str(len(claims.left_out(*checks)))
            assert claims.reasons(*checks) in others
