"""The section about who learns from whom: the weights (K, K) by which the server mixes a model for each client."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedfm.core.text import visible
from fedfm.reports.matrix import matrix
from fedfm.reports.page import details, figure, grid, legend, note, table
from fedfm.reports.read import WEIGHTS, RunFiles
from fedfm.reports.svg import COLOURS, Series, lines, neighbours
from fedfm.reports.text import count, esc, numbers, percent, plural, shorten

FILE = WEIGHTS
MOST_CLIENTS = 60  # largest number of clients in a map; if there are more, neighbours are grouped
GROUPS = 40  # number of rows in a grouped map
SMALL = 24  # largest number of rows in a small map
FEW = 5  # largest number of layers, and of rounds, that have a map of their own
MOST_WORDS = 12  # largest number of clients in the text for the terminal
REVEALS = (
    "The map shows which clients are alike, so the data of one client disclose something about the data of its "
    "neighbours. fedfm audit measures this on this run. The server computes the map and sends it to no client; share "
    "it only with readers whom all clients trust."
)


@dataclass(frozen=True)
class Weights:
    """Content of the file of weights, for T rounds, L layers and K clients.

    Attributes:
        p: (T, L, K, K): entry (t, l, i, k) is the fraction of client k's vector in client i's model, in layer l. Rows
            of clients outside the round's cohort are zero.
        rounds: (T,): the numbers of the rounds.
    """

    p: np.ndarray
    rounds: tuple[int, ...]
    clients: tuple[str, ...]
    layers: tuple[str, ...]

    @property
    def cohorts(self) -> np.ndarray:
        """(T, K): whether the client was in the cohort of the round."""
        found: np.ndarray = (self.p != 0).any((1, 3))
        return found

    @property
    def last(self) -> np.ndarray:
        """(L, K, K): each client's row in the last round that had the client in its cohort; zero if there was none."""
        known = self.cohorts
        at = len(known) - 1 - known[::-1].argmax(0)  # (K,)
        return self.p[at, :, np.arange(len(self.clients))].swapaxes(0, 1)


def load(path: Path) -> Weights | None:
    """The weights in a run's directory; None if the run has no such file.

    Raises:
        ValueError: the file is not valid.
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
    """The map of the last round, small maps of single rounds and layers, and each client's weight of its own vector."""
    try:
        w = load(run.path)
    except ValueError:
        return note(f"<code>{FILE}</code> of the run is not a valid file of weights.")
    if w is None:
        waits = (run.path / "arrays").is_dir() and not run.is_finished
        return note("The map of who learns from whom is drawn when the run is finished.") if waits else ""
    order = seriation(w.last.mean(0))
    parts = [_map(w, order), _table(w, order), "<h3>A client's weight of itself, by round</h3>", _own_by_round(w)]
    if len(w.layers) > 1:
        parts.append(f"<h3>A client's weight of itself, by layer</h3>{_own_by_layer(w)}")
    if len(w.rounds) > 1:
        at = _spread(len(w.rounds), FEW)
        maps = [(f"round {w.rounds[t]}", w.p[t].mean(0)) for t in at]
        parts.append(_multiples("By round", maps, order, f"{len(at)} of {plural(len(w.rounds), 'round')}"))
    if len(w.layers) > 1:
        at = _spread(len(w.layers), FEW)
        maps = [("mean", w.last.mean(0)), *((w.layers[layer], w.last[layer]) for layer in at)]
        parts.append(_multiples("By layer", maps, order, f"the mean and {len(at)} of {count(len(w.layers))} layers"))
    return "".join(parts)


def words(path: Path) -> str:
    """The map as text for the terminal, with a line for each client; "" if the run has no valid weights."""
    try:
        w = load(path)
    except ValueError:
        return ""
    if w is None:
        return ""
    p = w.last.mean(0)
    out = [f"who learns from whom ({FILE}; it shows which clients are alike):"]
    for i, (k, share) in enumerate(_most(p)[:MOST_WORDS]):
        name = shorten(w.clients[i], 40)
        most = (
            f", learns most from {shorten(w.clients[k], 40)} ({percent(share)})" if k >= 0 else ", from no other client"
        )
        out.append(f"  {name} keeps {percent(p[i, i])}{most}")
    if len(p) > MOST_WORDS:
        out.append(f"  and {count(len(p) - MOST_WORDS)} more: all in the report")
    return "\n".join(out)


def seriation(p: np.ndarray) -> list[int]:
    """An order of the K clients in which clients that learn from each other are neighbours (average linkage)."""
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


def group_means(p: np.ndarray, order: Sequence[int], most: int) -> tuple[np.ndarray, list[list[int]]]:
    """The map with the clients in this order and with neighbours joined into at most ``most`` groups.

    Returns:
        q (G, G) and the groups. Entry (a, b) of q is the fraction that all clients of group b together have in the
        model of a client of group a, averaged over the clients of group a.
    """
    groups = [list(group) for group in neighbours(order, most)]
    q = np.array([[p[np.ix_(a, b)].sum(1).mean() for b in groups] for a in groups])
    return q, groups


def _map(w: Weights, order: Sequence[int]) -> str:
    p = w.last.mean(0)
    q, groups = group_means(p, order, GROUPS if len(p) > MOST_CLIENTS else MOST_CLIENTS)
    names = [w.clients[g[0]] if len(g) == 1 else f"{w.clients[g[0]]} +{len(g) - 1}" for g in groups]
    text = "Row: the client that learns. Column: from which client, in the same order. A row sums to 100 %. "
    text += f"Round {w.rounds[-1]}" + (f", mean of {count(len(w.layers))} layers. " if len(w.layers) > 1 else ". ")
    if late := int((~w.cohorts[-1]).sum()):
        text += f"{plural(late, 'client was', 'clients were')} not asked then: their rows are of the last round "
        text += "that asked them. "
    text += "Clients that learn from each other are neighbours. "
    if len(groups) < len(p):
        text += f"{count(len(p))} clients are gathered into {len(groups)} groups; a cell is the share that all clients "
        text += "of the column's group together have in a model of the row's group. "
    low, high = float(q.min()), float(q.max())
    key = f'Share: 0 <span class="ramp"></span> {percent(high, 0)}'
    key += f"; below 0 (raw similarities) down to {percent(low, 0)} in the second colour" if low < 0 else ""
    label = f"Heat map of {len(names)} by {len(names)} weights. {text}"
    draw = figure(lambda width: matrix(width, names, q.tolist(), label, high))
    return note(esc(text)) + note(f"{key}.") + draw + note(esc(REVEALS))


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
    """For each client, the other client k from which it learns most, and the weight; (-1, 0) if there is none."""
    off = p.copy()
    np.fill_diagonal(off, -np.inf)
    best = off.argmax(1) if len(p) > 1 else np.zeros(1, dtype=int)
    return [(int(k), float(row[k])) if row[k] > 0 else (-1, 0.0) for k, row in zip(best, off, strict=True)]


def _own(w: Weights) -> np.ndarray:
    """(T, L, K): p_ii, each client's weight of its own vector; NaN for clients outside the round's cohort."""
    own = np.einsum("tlkk->tlk", w.p)
    return np.where(w.cohorts[:, None], own, np.nan)


def _own_by_round(w: Weights) -> str:
    own = _own(w).mean(1)  # (T, K)
    band: list[tuple[float, float | None, float | None]] = []
    if len(w.clients) <= COLOURS:
        series = [_line(c, w, own[:, i], i + 1) for i, c in enumerate(w.clients)]
    else:
        known = [(float(t), row[np.isfinite(row)]) for t, row in zip(w.rounds, own, strict=True)]
        spread = [(t, *np.quantile(row, [0.1, 0.5, 0.9]).tolist()) for t, row in known if len(row)]
        series = [Series("median client", [(t, middle) for t, _, middle, _ in spread])]
        band = [(t, low, high) for t, low, _, high in spread]
    return _plot(series, "Lines of a client's weight of itself, by round.", band)


def _own_by_layer(w: Weights) -> str:
    own = _own(w)
    shown = _spread(len(w.layers), FEW)
    series = [_line(f"mean of {len(w.layers)} layers", w, map(_mean, own), 1)]
    for colour, layer in enumerate(shown, start=2):
        series.append(_line(w.layers[layer], w, map(_mean, own[:, layer]), colour))
    text = "Mean over clients. The lower the line of a layer, the more of this layer comes from other clients."
    if len(shown) < len(w.layers):
        text += f" {len(shown)} of {len(w.layers)} layers, evenly from the first to the last; all are in {FILE}."
    return note(esc(text)) + _plot(series, "Lines of a client's weight of itself, by layer and round.")


def _plot(series: Sequence[Series], label: str, band: Sequence[tuple[float, float | None, float | None]] = ()) -> str:
    named = [Series(shorten(s.name, 48), s.points, s.colour) for s in series if s.points]
    lows = numbers([*(y for s in named for _, y in s.points), *(low for _, low, _ in band)])
    key = legend(named, [percent(s.points[-1][1]) for s in named], "10 to 90 % of clients" if band else "")
    from_zero = min(lows, default=0.0) >= 0  # weights by raw similarities may be negative
    return key + figure(lambda width: lines(width, named, label, percent, band, from_zero=from_zero))


def _multiples(summary: str, maps: Sequence[tuple[str, np.ndarray]], order: Sequence[int], which: str) -> str:
    drawn = [(name, group_means(p, order, SMALL)[0]) for name, p in maps]
    high = max(float(q.max()) for _, q in drawn)
    cells = [(name, matrix(160, [], q.tolist(), f"Heat map, {visible(name)}.", high)) for name, q in drawn]
    text = f"{which[0].upper()}{which[1:]}, rows and columns as above"
    text += f", gathered into {SMALL} groups" if len(order) > SMALL else ""
    text += f"; one scale, up to {percent(high, 0)}. A client with a blank row was not asked. All are in {FILE}."
    return details(summary, note(esc(text)) + grid(cells))


def _line(name: str, w: Weights, values: Iterable[float], colour: int) -> Series:
    points = zip(w.rounds, values, strict=True)
    return Series(name, [(float(t), float(v)) for t, v in points if np.isfinite(v)], colour)


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def _spread(n: int, most: int) -> list[int]:
    """At most ``most`` of n positions, evenly spaced, including the first and the last."""
    return sorted({round(i) for i in np.linspace(0, n - 1, min(n, most)).tolist()})
