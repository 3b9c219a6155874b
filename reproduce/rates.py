"""Learning rates of the rows: searched on validation rows, and what a claim may rest on.

A claim compares methods only where each has the rate that is best for it *at that point*. So every row remembers how
its rates came about (``Choice``), and ``doubt`` says what of that forbids a claim, or must be said with it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cached_runs import run_once

from fedfm.config.experiment import Experiment
from fedfm.errors import E_NONFINITE, InputError, RunError
from fedfm.runtime.run_directory import Run

TUNED, BORROWED, PAPER, HAND, NONE = "tuned", "borrowed", "paper", "by hand", "no rate"
EDGE = "at a grid's edge"
FORBIDS = {  # the first counts first
    BORROWED: "rate borrowed",
    HAND: "rate set by hand",
    PAPER: "rate not searched, but the paper's",  # it was chosen for a larger model
    "": "rate of unknown origin",
}
STEPS = 3  # largest number of values by which a grid is widened on either side


@dataclass(frozen=True)
class Choice:
    """How the learning rates of a row were chosen.

    Attributes:
        how: ``tuned`` at this row's own point; ``borrowed`` from another row or point; the ``paper``'s; ``by hand``;
            ``no rate``: the row has no gradient descent. If the row has several rates, the worst of these counts.
        of: the row for which the rate was searched, or the place in the paper that states it.
        keys: the chosen value of each searched key.
        edge: the keys whose best value is the first or last of a grid that was not widened further.
    """

    how: str
    of: str = ""
    keys: Mapping[str, float] = field(default_factory=dict)
    edge: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, without empty ones."""
        found = {"how": self.how, "of": self.of, "keys": dict(self.keys), "edge": list(self.edge)}
        return {key: value for key, value in found.items() if value}

    def to_cell(self) -> str:
        """A cell of a table: ``0.03``; ``0.3, edge``; ``0.03, borrowed``."""
        values = [f"{v:g}{', edge' if key in self.edge else ''}" for key, v in self.keys.items()]
        return "; ".join(values) + (", borrowed" if self.how == BORROWED else "") if values else self.how


def doubt(found: Mapping[str, Any]) -> str:
    """The reason why a row's choice of rates forbids a claim on it; ``EDGE``; or "" if there is no reason."""
    choice = Choice(**{"how": "", **found})
    return FORBIDS.get(choice.how, EDGE if choice.edge else "")


def search(
    path: Path, folder: Path, tune: Mapping[str, Any], point: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str], str]:
    """The keys of the least validation loss over a grid, those at its edge, and words; test rows decide nothing.

    One seed is searched, without ``val_fraction`` of every client's rows; the rows of the table then train on all.
    A grid whose best value is its last is widened until the best lies inside, at most ``STEPS`` values to each side;
    one that diverges everywhere is widened downwards.
    """
    grid = {key: sorted(values) for key, values in tune["grid"].items()}
    losses: dict[tuple[Any, ...], float] = {}
    while True:
        for values in itertools.product(*grid.values()):
            if values not in losses:
                changes = dict(zip(grid, values, strict=True))
                out = folder / "-".join(f"{v:g}" for v in values)
                losses[values] = _loss(path, out, tune, {**point, **changes})
        best = min(losses, key=lambda values: (losses[values], values))
        chosen = dict(zip(grid, best, strict=True))
        edge = [key for key, value in chosen.items() if len(grid[key]) > 1 and value in (grid[key][0], grid[key][-1])]
        wider = {key: wide for key in edge if (wide := _next_value(grid[key], tune["grid"][key], chosen[key]))}
        if not wider:
            break
        grid |= wider
    if losses[best] == float("inf"):
        raise SystemExit(f"{path.name}: diverged at every point of {grid}")
    said = [
        f"{key.removeprefix('method.')} {value:g} of {', '.join(f'{v:g}' for v in grid[key])}"
        + (", the grid's edge" if key in edge else "")
        for key, value in chosen.items()
    ]
    return chosen, edge, "; ".join(said)


def _loss(path: Path, out: Path, tune: Mapping[str, Any], changes: Mapping[str, Any]) -> float:
    """The last validation loss of one run; infinite where it diverged, be it at one client that was left out.

    With ``tune["by"]`` "accuracy" it is minus the mean accuracy over ``seeds`` on ``<set>.tuning.npz``: its test rows
    are training rows of the set. This also serves runs whose clients report no scores.
    """
    if tune.get("by") == "accuracy":
        try:
            rows = Path(Experiment.load(path, dict(changes)).data.path or "")
        except InputError:  # a grid was widened beyond what its key can be
            return float("inf")
        change = {**changes, "data.path": str(rows.with_name(f"{rows.stem}.tuning.npz"))}
        runs = [run_once(path, out.with_name(f"{out.name}-seed{s}"), {**change, "run.seed": s}) for s in tune["seeds"]]
        return -statistics.fmean(run["accuracy"] for run in runs)
    try:
        result = run_once(path, out, {**changes, "data.val_fraction": tune["val_fraction"], "run.seed": tune["seed"]})
    except RunError as error:
        if E_NONFINITE not in str(error):
            raise
        return float("inf")
    if any(left["code"] == E_NONFINITE for left in result["excluded"]):
        return float("inf")
    loss: float = [line["val_loss"] for line in Run.open(out).metrics() if line.get("val_loss") is not None][-1]
    return loss if loss == loss else float("inf")


def _next_value(grid: Sequence[float], first: Collection[float], best: float) -> list[float]:
    """One value more beyond ``best``, in the steps of the grid (1, 3, 10 goes on with 30); empty at the bound."""
    outward = list(grid) if best == grid[-1] else list(grid[::-1])
    added = outward[outward.index(max(first) if best == grid[-1] else min(first)) + 1 :]
    if len(added) >= STEPS:
        return []
    step = outward[-2] / outward[-3] if len(outward) > 2 else outward[-1] / outward[-2]
    return sorted([*grid, float(f"{outward[-1] * step:.3g}")])


def rates(method: Mapping[str, Any], within: str = "method") -> dict[str, float]:
    """Dotted key -> value of every learning rate that a method uses: none where no round is made or no step descends.

    A method that wraps another uses the other's rates. Where the wrapping method's own table sets one of them
    (``method.local`` for ``method.base.local``), the key is that of its own table.
    """
    if method.get("rounds") == 0 or method.get("optimizer") == "newton":
        return {}
    found: dict[str, float] = {}
    if isinstance(base := method.get("base"), Mapping):
        own = rates({key: value for key, value in method.items() if key != "base"}, within)
        for key, value in rates(base, f"{within}.base").items():
            handed_on = key.replace(f"{within}.base.", f"{within}.", 1)
            found[handed_on if own.get(handed_on) == value else key] = value
        return found
    for key, value in method.items():
        if isinstance(value, Mapping):
            found |= rates(value, f"{within}.{key}")
        elif key.endswith("learning_rate"):
            found[f"{within}.{key}"] = value
    return found


def choice(
    method: Mapping[str, Any],
    row: str,
    of: str,
    chosen: Mapping[str, float],
    edge: Sequence[str] = (),
    *,
    fixed: Collection[str] = (),
    declared: Mapping[str, str] | None = None,
) -> Choice:
    """How ``row`` came to its rates.

    Args:
        method: of its experiment.
        row: ``<table>__<row>.<point>``.
        of: the row whose search gave ``chosen``.
        chosen: key -> value, of the search; empty without one.
        edge: of these the ones at the grid's edge.
        fixed: of its keys those that it had but one value of.
        declared: what ``tables.json`` says of rates that are in the row's file: ``how`` and ``of``.
    """
    if not (has := rates(method)):
        return Choice(NONE)
    how = "" if not chosen else TUNED if of == row else BORROWED
    if how != BORROWED and any(key in fixed or key not in chosen for key in has):
        if declared is None:
            how = HAND
        elif not how:
            how, of = declared["how"], declared.get("of", "")
    return Choice(how, "" if how in (TUNED, HAND) else of, dict(chosen), tuple(edge))
