"""Who learns from whom: the K x K weights of methods whose server mixes a model for each client, from weights.npz."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedfm.core.text import visible
from fedfm.report.page import details, figure, grid, legend, note, table
from fedfm.report.read import RunFiles
from fedfm.report.svg import COLOURS, Series, lines, matrix
from fedfm.report.text import count, esc, percent, plural, shorten

FILE = "weights.npz"
MOST_CLIENTS = 60  # rows of a map; more are gathered
GROUPS = 40  # rows of a gathered one
SMALL = 24  # rows of a small one
FEW = 5  # layers, and rounds, that have a map of their own
MOST_WORDS = 12  # clients that the terminal is told of
REVEALS = (
    "The map says who resembles whom. Where several clients share a task, a client's nearest neighbour on it had the "
    "same one for 21 of 24 clients in our runs: whoever knows what one of them holds knows it of the other; "
    "fedfm audit measures that on this run. The server computes the map and no client is sent it: pass it on only to "
    "whom all clients would tell it."
)


@dataclass(frozen=True)
class Weights:
    """What the file holds.

    Attributes:
        p: (T, L, K, K): the share of client k's vector in client i's model, by round and layer; a row of a client that
            the round did not ask is zero.
        rounds: (T,) their numbers.
    """

    p: np.ndarray
    rounds: tuple[int, ...]
    clients: tuple[str, ...]
    layers: tuple[str, ...]

    @property
    def asked(self) -> np.ndarray:
        """(T, K): the client has a row in the round."""
        found: np.ndarray = (self.p != 0).any((1, 3))
        return found

    @property
    def last(self) -> np.ndarray:
        """(L, K, K): every client's row of the last round that asked it; zero where none did."""
        known = self.asked
        at = len(known) - 1 - known[::-1].argmax(0)  # (K,)
        return self.p[at, :, np.arange(len(self.clients))].swapaxes(0, 1)


def load(path: Path) -> Weights | None:
    """The weights of a run's directory; None where it has none.

    Raises:
        ValueError: the file is not what a run writes.
    """
    try:
        with open(path / FILE, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            p, rounds, clients, layers = (file[key] for key in ("weights", "rounds", "clients", "layers"))
    except FileNotFoundError:
        return None
    except (OSError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(str(error)) from error
    if p.ndim != 4 or p.shape != (len(rounds), len(layers), len(clients), len(clients)) or not p.size:
        raise ValueError(f"weights of shape {p.shape}")
    named = (tuple(map(str, names.tolist())) for names in (clients, layers))
    return Weights(np.nan_to_num(p.astype(np.float64)), tuple(int(t) for t in rounds), *named)


def section(run: RunFiles) -> str:
    """The map of the last round, small ones of single rounds and layers, what each client keeps for itself."""
    try:
        w = load(run.path)
    except ValueError:
        return note(f"<code>{FILE}</code> lies in the run, and is not what a run writes.")
    if w is None:
        waits = (run.path / "arrays").is_dir() and not run.finished
        return note("The map of who learns from whom is drawn when the run is finished.") if waits else ""
    order = seriation(w.last.mean(0))
    parts = [_map(w, order), _table(w, order), "<h3>Share kept for oneself, by round</h3>", _kept(w)]
    if len(w.layers) > 1:
        parts.append(f"<h3>Share kept for oneself, by layer</h3>{_kept_by_layer(w)}")
    return "".join([*parts, _small_rounds(w, order), _small_layers(w, order)])


def words(path: Path) -> str:
    """The same for the terminal: a line a client, "" where the run has no weights."""
    try:
        w = load(path)
    except ValueError:
        return ""
    if w is None:
        return ""
    p = w.last.mean(0)
    out = [f"who learns from whom ({FILE}; it says who resembles whom):"]
    for i, (k, share) in enumerate(_most(p)[:MOST_WORDS]):
        name = shorten(w.clients[i], 40)
        most = f", learns most from {shorten(w.clients[k], 40)} ({percent(share)})" if k >= 0 else ", from nobody else"
        out.append(f"  {name} keeps {percent(p[i, i])}{most}")
    if len(p) > MOST_WORDS:
        out.append(f"  and {count(len(p) - MOST_WORDS)} more: all in the report")
    return "\n".join(out)


def seriation(p: np.ndarray) -> list[int]:
    """An order of the clients (K,) in which those that learn from each other are neighbours: average linkage."""
    if len(p) < 3:
        return list(range(len(p)))
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    shared = (p + p.T) / 2
    np.fill_diagonal(shared, 0)
    distance = shared.max() - shared
    np.fill_diagonal(distance, 0)
    order: list[int] = leaves_list(linkage(squareform(distance, checks=False), "average")).tolist()
    return order


def gathered(p: np.ndarray, order: Sequence[int], most: int) -> tuple[np.ndarray, list[list[int]]]:
    """The map in this order, neighbours gathered into at most ``most`` groups.

    Returns:
        ``q`` (G, G): what a client of group a takes from all of group b together, the mean over a: rows sum to what
        they did; and the groups.
    """
    n = min(most, len(order))
    groups = [list(order[len(order) * i // n : len(order) * (i + 1) // n]) for i in range(n)]
    q = np.array([[p[np.ix_(a, b)].sum(1).mean() for b in groups] for a in groups])
    return q, groups


def _map(w: Weights, order: Sequence[int]) -> str:
    p = w.last.mean(0)
    q, groups = gathered(p, order, GROUPS if len(p) > MOST_CLIENTS else MOST_CLIENTS)
    names = [w.clients[g[0]] if len(g) == 1 else f"{w.clients[g[0]]} +{len(g) - 1}" for g in groups]
    said = f"Row: who learns; column: from whom, in the same order. A row sums to 100{visible(' ')}%. "
    said += f"Round {w.rounds[-1]}" + (f", mean of {count(len(w.layers))} layers. " if len(w.layers) > 1 else ". ")
    if late := int((~w.asked[-1]).sum()):
        said += f"{plural(late, 'client was', 'clients were')} not asked then: their rows are of the last round "
        said += "that asked them. "
    said += "Clients that learn from each other are neighbours. "
    if len(groups) < len(p):
        said += f"{count(len(p))} clients are gathered into {len(groups)} groups; a cell is what a client of the row "
        said += "takes from all of the column's. "
    high = float(q.max())
    below = float(q.min()) < 0
    key = f'Share: 0 <span class="ramp"></span> {percent(high, 0)}'
    key += f"; below 0, as raw similarities give, down to {percent(float(q.min()), 0)} in the second colour" * below
    label = f"Heat map of {len(names)} by {len(names)} weights. {said}"
    draw = figure(lambda width: matrix(width, names, q.tolist(), label, high))
    return note(esc(said)) + note(f"{key}.") + draw + note(esc(REVEALS))


def _table(w: Weights, order: Sequence[int]) -> str:
    p = w.last.mean(0)
    most = _most(p)
    others = (p.sum(0) - p.diagonal()) / max(len(p) - 1, 1)
    rows = []
    for i in order:
        k, share = most[i]
        there = [w.clients[k], percent(share)] if k >= 0 else ["nobody", ""]
        rows.append([w.clients[i], percent(p[i, i]), *there, percent(others[i])])
    head = ["client", "keeps", "learns most from", "share", "mean share at others"]
    return details("Who learns most from whom", table(head, rows, "Who learns most from whom", words=(2,)))


def _most(p: np.ndarray) -> list[tuple[int, float]]:
    """(from whom, share) of each client's largest share but its own; (-1, 0) where there is none."""
    off = p.copy()
    np.fill_diagonal(off, -np.inf)
    best = off.argmax(1) if len(p) > 1 else np.zeros(1, dtype=int)
    return [(int(k), float(row[k])) if row[k] > 0 else (-1, 0.0) for k, row in zip(best, off, strict=True)]


def _own(w: Weights) -> np.ndarray:
    """(T, L, K): p_ii; NaN where the round did not ask i."""
    own = np.einsum("tlkk->tlk", w.p)
    return np.where(w.asked[:, None], own, np.nan)


def _kept(w: Weights) -> str:
    own = _own(w).mean(1)  # (T, K)
    band: list[tuple[float, float | None, float | None]] = []
    if len(w.clients) <= COLOURS:
        series = [Series(c, _line(w, own[:, i]), i + 1) for i, c in enumerate(w.clients)]
    else:
        spread = [_quantiles(row) for row in own]
        series = [Series("median client", [(float(t), q[1]) for t, q in zip(w.rounds, spread, strict=True) if q])]
        band = [(float(t), q[0], q[2]) for t, q in zip(w.rounds, spread, strict=True) if q]
    return _drawn(
        series, "Lines of the share that a client keeps of its own vector, by round.", band, "10 to 90 % of clients"
    )


def _kept_by_layer(w: Weights) -> str:
    own = _own(w)
    shown = _spread(len(w.layers), FEW)
    mean = np.array([_mean(row) for row in own])
    series = [Series(f"mean of {len(w.layers)} layers", _line(w, mean), 1)]
    for colour, layer in enumerate(shown, start=2):
        values = np.array([_mean(row) for row in own[:, layer]])
        series.append(Series(w.layers[layer], _line(w, values), colour))
    said = "Mean over clients. The lower a layer's line, the more it takes from others."
    if len(shown) < len(w.layers):
        said += f" {len(shown)} of {len(w.layers)} layers, evenly from the first to the last; all are in {FILE}."
    return note(esc(said)) + _drawn(series, "Lines of the share kept for oneself by layer and round.")


def _drawn(
    series: Sequence[Series],
    label: str,
    band: Sequence[tuple[float, float | None, float | None]] = (),
    band_name: str = "",
) -> str:
    ends = [percent(s.points[-1][1]) if s.points else "" for s in series]
    named = [Series(shorten(s.name, 48), s.points, s.colour) for s in series if s.points]
    least = min((y for s in named for _, y in s.points if y is not None), default=0.0)
    least = min([least, *(low for _, low, _ in band if low is not None)])  # raw similarities may give less than none
    key = legend(named, [e for e in ends if e], band_name if band else "")
    return key + figure(lambda width: lines(width, named, label, percent, band, from_zero=least >= 0))


def _small_rounds(w: Weights, order: Sequence[int]) -> str:
    shown = _spread(len(w.rounds), FEW)
    if len(w.rounds) < 2:
        return ""
    maps = [(f"round {w.rounds[t]}", w.p[t].mean(0)) for t in shown]
    return _multiples("By round", maps, order, f"{len(shown)} of {plural(len(w.rounds), 'round')}")


def _small_layers(w: Weights, order: Sequence[int]) -> str:
    if len(w.layers) < 2:
        return ""
    shown = _spread(len(w.layers), FEW)
    maps = [("mean", w.last.mean(0)), *((w.layers[layer], w.last[layer]) for layer in shown)]
    return _multiples("By layer", maps, order, f"the mean and {len(shown)} of {count(len(w.layers))} layers")


def _multiples(summary: str, maps: Sequence[tuple[str, np.ndarray]], order: Sequence[int], which: str) -> str:
    drawn = [(name, gathered(p, order, SMALL)[0]) for name, p in maps]
    high = max(float(q.max()) for _, q in drawn)
    cells = [(name, matrix(160, [], q.tolist(), f"Heat map, {visible(name)}.", high)) for name, q in drawn]
    said = f"{which[0].upper()}{which[1:]}, rows and columns as above"
    said += f", gathered into {SMALL} groups" if len(order) > SMALL else ""
    said += f"; one scale, up to {percent(high, 0)}. A blank row was not asked. All are in {FILE}."
    return details(summary, note(esc(said)) + grid(cells))


def _line(w: Weights, values: Any) -> list[tuple[float, float | None]]:
    return [(float(t), float(v)) for t, v in zip(w.rounds, values, strict=True) if np.isfinite(v)]


def _quantiles(row: np.ndarray) -> tuple[float, float, float] | None:
    known = row[np.isfinite(row)]
    if not len(known):
        return None
    low, middle, high = np.quantile(known, [0.1, 0.5, 0.9])
    return float(low), float(middle), float(high)


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def _spread(n: int, most: int) -> list[int]:
    """At most so many of n places, evenly from the first to the last."""
    return sorted({round(i) for i in np.linspace(0, n - 1, min(n, most)).tolist()})
