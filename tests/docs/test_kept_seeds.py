"""More seeds of a row that a page has: the same figures as if every seed were run, or every seed is run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
SEEDS = st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True)
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def kept_seeds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "reproduce"))
    yield importlib.import_module("kept_seeds")
    sys.modules.pop("kept_seeds", None)


def figures(seed: int, moved: float = 0.0) -> dict[str, Any]:
    return {"accuracy": 50.0 + seed + moved, "own_loss": 1.0 + seed / 7, "seconds": 3.0, "more": ["words"]}


@FEW
@given(seeds=SEEDS, earlier=st.sets(st.integers(0, 9)), rounding=st.floats(-0.2, 0.2))
def test_only_the_first_seed_and_new_ones_are_run(kept_seeds, seeds, earlier, rounding) -> None:
    asked: list[int] = []

    def run(seed: int) -> dict[str, Any]:
        asked.append(seed)
        return figures(seed) | {"seconds": 9.0}

    old = {str(s): figures(s, 0.9 * rounding) for s in earlier}
    found = kept_seeds.add_seeds("row", seeds, old, run)
    assert list(found) == [str(s) for s in seeds], "the seeds of the table, and no others"
    again = {seeds[0]} | (set(seeds) - earlier)
    if seeds[0] not in earlier:
        again = set(seeds)  # nothing was compared, so nothing is kept
    assert asked == [s for s in seeds if s in again]
    assert all(found[str(s)] == old[str(s)] for s in seeds if s not in again)


@FEW
@given(seeds=SEEDS, moved=st.one_of(st.floats(0.21, 9), st.floats(-9, -0.21)))
def test_a_row_whose_first_seed_changed_runs_every_seed_again(kept_seeds, capsys, seeds, moved) -> None:
    capsys.readouterr()
    old = {str(s): figures(s, moved) for s in range(10)}
    assert kept_seeds.add_seeds("row", seeds, old, figures) == {str(s): figures(s) for s in seeds}
    assert f"row: seed {seeds[0]} moved" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "moved"),
    [
        ({"own_loss": 1.0}, {"own_loss": 1.001}, []),
        ({"own_loss": 1.0}, {"own_loss": 1.01}, ["own_loss 1.0 -> 1.01"]),
        ({"accuracy": None}, {"accuracy": None}, []),
        ({"accuracy": None}, {"accuracy": 5.0}, ["accuracy None -> 5.0"]),
        ({"accuracy": 5.0}, {"accuracy": 5.0, "global": 4.0}, []),  # was not measured then
        ({"accuracy": 5.0, "global": 4.0}, {"accuracy": 5.0}, ["global 4.0 -> None"]),
        ({"tmac": 3.0}, {"tmac": "not reached"}, ["tmac 3.0 -> not reached"]),
        ({"accuracy": 5.0, "seconds": 1.0, "more": ["a"]}, {"accuracy": 5.0, "seconds": 9.0, "more": ["b"]}, []),
    ],
)
def test_changes_of_figures_are_found_beyond_rounding(kept_seeds, old, new, moved) -> None:
    assert kept_seeds.differences(old, new) == moved
