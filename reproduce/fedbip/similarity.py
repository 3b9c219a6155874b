"""Figures 1 to 3 and 7 of the paper: cosines of clients' parameters and of their task vectors; whose share is whose.

    python reproduce/fedbip/similarity.py vision__fedbip.shared-seed0       # after python reproduce/run.py fedbip

Of the state after a FedBip run's last round: theta_i, theta_i less the common start (what the start has in common
drowns differences), and tau_i, compared in pairs of clients of one kind (the name up to the last dash before a number)
and of two kinds. One line a run: mean cosine within, mean cosine between, and how often a client's nearest neighbour is
of its kind, which is what the server's map tells of the clients. The second table is of the weights p of every round:
p_ii, and the sum over the other clients of i's kind, means over i and layers. Of FedBip-L runs a third one: p_ii of the
last round by layer.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedfm.linalg.pairwise import gram
from fedfm.linalg.params import Params
from fedfm.methods.fedbip.fedbip import BipState, similarities
from fedfm.runtime.population import populate
from fedfm.runtime.run_directory import Run

HERE = Path(__file__).resolve().parents[1]
HEAD = (
    "| run | vectors | cosine within a kind | between kinds | nearest neighbour of its kind, % |\n|---|---|---|---|---|"
)


def cosines(vectors: Sequence[Params]) -> np.ndarray:
    """(K, K)."""
    g, _ = similarities(gram(vectors, [list(vectors[0])]), "cosine")
    c: np.ndarray = g[0]
    return c


def summary(c: np.ndarray, kinds: Sequence[str]) -> tuple[float | None, float | None, float | None]:
    """Means of the cosines c (K, K) within kinds and between them, and the share of nearest neighbours of one's kind;
    None where there are no such pairs.
    """
    same = np.equal.outer(np.array(kinds), np.array(kinds))
    others = ~np.eye(len(c), dtype=bool)
    nearest = np.where(others, c, -np.inf).argmax(1)
    within, between = c[same & others], c[~same]
    hits = [same[i, k] for i, k in enumerate(nearest) if (same & others)[i].any()]
    return tuple(float(np.mean(x)) if len(x) else None for x in (within, between, hits))  # type: ignore[return-value]


def lines(out: Path) -> list[str]:
    """Rows of the table, of a finished run."""
    run = Run.open(out)
    s: BipState = run.state(BipState)
    clients = sorted(s.tau)
    kinds = [re.sub(r"-\d+$", "", c) for c in clients]
    start = initial(run)
    found = {
        "theta_i": [s.theta[c] for c in clients],
        "theta_i less theta_pre": [s.theta[c] - start for c in clients],
        "tau_i, last round": [s.tau[c] for c in clients],
    }
    rows = []
    for name, vectors in found.items():
        within, between, hits = summary(cosines(vectors), kinds)
        cells = [
            out.name,
            name,
            digits(within),
            digits(between),
            digits(None if hits is None else 100 * hits),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def weights(out: Path) -> list[str]:
    """Rows of the second table."""
    with np.load(out / "weights.npz") as z:
        p, clients = z["weights"].mean(1), z["clients"].tolist()  # (T, K, K)
    kinds = np.array([re.sub(r"-\d+$", "", c) for c in clients])
    other = np.equal.outer(kinds, kinds) & ~np.eye(len(kinds), dtype=bool)
    found = {"p_ii": np.einsum("tkk->tk", p).mean(1), "others of its kind": (p * other).sum(2).mean(1)}
    return [f"| {out.name} | {name} | {' | '.join(f'{x:.2f}' for x in line)} |" for name, line in found.items()]


def by_layer(out: Path) -> list[str]:
    """A table of p_ii in the last round, mean over i, of a run with several layers."""
    with np.load(out / "weights.npz") as z:
        own, layers = np.einsum("lkk->lk", z["weights"][-1]).mean(1), z["layers"].tolist()
    if len(layers) < 2:
        return []
    head = f"| run | layer | {' | '.join(layers)} |\n|---|---|{'---|' * len(layers)}"
    return ["", head, f"| {out.name} | p_ii | {' | '.join(f'{x:.2f}' for x in own)} |"]


def digits(x: float | None) -> str:
    """Three digits, or nothing."""
    return "" if x is None else f"{x:.3g}"


def initial(run: Run) -> Params:
    """theta_pre: made again from the experiment, as every party made it."""
    theta_pre: Params = populate(run.experiment).model.params()
    return theta_pre


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="names below reproduce/.runs/fedbip")
    os.chdir(HERE)
    runs = [HERE / ".runs" / "fedbip" / name for name in parser.parse_args().runs]
    print("\n".join([HEAD, *(line for run in runs for line in lines(run))]), end="\n\n")
    rounds = max(Run.open(run).experiment.method.rounds for run in runs)
    print(f"| run | round | {' | '.join(map(str, range(1, rounds + 1)))} |\n|---|---|{'---|' * rounds}")
    print("\n".join(line for of in (weights, by_layer) for run in runs for line in of(run)))


if __name__ == "__main__":
    main()
