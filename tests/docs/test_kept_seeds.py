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
@given(seeds=SEEDS, earlier=st.sets(st.integers(0, 9)))
def test_only_new_seeds_are_run(kept_seeds, seeds, earlier) -> None:
    asked: list[int] = []

    def run(seed: int) -> dict[str, Any]:
        asked.append(seed)
        return figures(seed)

    old = {str(s): figures(s, 0.1) for s in earlier}
    found = kept_seeds.add_seeds(seeds, old, run)
    assert list(found) == [str(s) for s in seeds], "the seeds of the table, and no others"
    assert asked == [s for s in seeds if s not in earlier]
    assert all(found[str(s)] == old[str(s)] for s in seeds if s in earlier)


MOVES = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.0, 0.1, -0.15, 0.21, -3.0]), min_size=1)


@FEW
@given(moves=MOVES)
def test_a_table_is_refused_if_any_row_moved(kept_seeds, moves) -> None:
    """The refusal names these rows and no others, by how much, and how to run the whole table."""
    moved = {row: kept_seeds.differences(figures(0), figures(0, by)) for row, by in moves.items()}
    far = {row for row, by in moves.items() if abs(by) > 0.2}
    if not far:
        kept_seeds.refuse_moved("table1", moved, "the command")
        return
    with pytest.raises(SystemExit, match=r"(?s)accuracy 50.0 -> .*`the command`") as refused:
        kept_seeds.refuse_moved("table1", moved, "the command")
    assert {line[0] for line in str(refused.value).splitlines()[:-1]} == far


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
