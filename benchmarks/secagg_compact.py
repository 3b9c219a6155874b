"""Whether 32 bits an entry can hide sums without a bound that the user chooses.

    python benchmarks/secagg_compact.py
    python benchmarks/secagg_compact.py --quick

Runs of FedAvg in the clear are repeated by a recorder. The largest weight times entry of any update of a round is the
least ``bound`` that serves this round. ``compact`` rounds the sum by less than a millionth (root mean square, over that
of the sum) up to another bound. Between the two a bound serves both.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import common
import numpy as np

from fedfm.aggregation.secure import Secure
from fedfm.api import execute
from fedfm.audits.replay import replay
from fedfm.core.client import Update
from fedfm.privacy.crypto.fixed_point import FixedPoint
from fedfm.runtime.run_directory import Run

MILLIONTH = 1e-6
EVEN, UNEVEN = {"name": "iid", "clients": 5}, {"name": "dirichlet", "alpha": 0.3, "clients": 5}
ADAM = {"name": "adam", "learning_rate": 0.003}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # data, adaptation, local optimiser
    "head, iid": ({}, {"name": "head"}, {"learning_rate": 0.1}),
    "head, alpha 0.3": ({"partition": UNEVEN}, {"name": "head"}, {"learning_rate": 0.1}),
    "LoRA, iid": ({}, {"name": "lora", "rank": 4}, ADAM),
    "full, iid": ({}, {"name": "full"}, {"learning_rate": 0.03}),
    "full, iid, 100 rows": ({"limit": 100}, {"name": "full"}, {"learning_rate": 0.03}),
}


def rounds_of(path: Path) -> list[tuple[int, float, float]]:
    """Of each round: the clients, the largest weight times entry, and the root mean square of the weighted sum."""
    found = []
    for _, seen in itertools.groupby(replay(Run.open(path)).replies, key=lambda s: s.round):
        updates = [s.value for s in seen if isinstance(s.value, Update)]
        if updates:
            terms = [u.weight * np.concatenate([x.double().numpy() for x in u.delta.flats.values()]) for u in updates]
            most = max(float(np.abs(x).max()) for x in terms)
            found.append((len(updates), most, float(np.sqrt((sum(terms) ** 2).mean()))))
    return found


def error(bits: int, bound: float, n: int, size: float) -> float:
    """Root mean square error of a sum of n numbers, over that of the sum."""
    return FixedPoint(bits, bound, n).step * math.sqrt(n / 12) / size


def largest_power(n: int, size: float) -> float:
    """The largest power of two up to which ``compact`` is off by a millionth at most."""
    bound = 2.0**40
    while error(32, bound, n, size) > MILLIONTH:
        bound /= 2
    return bound


def main() -> None:
    options = common.arguments(__doc__)
    rounds = 4 if options.quick else 10
    default, rows = Secure().bound, []
    with tempfile.TemporaryDirectory() as folder:
        for at, (name, (data, adaptation, local)) in enumerate(CASES.items()):
            tables = {
                "data": {"name": "digits", "partition": EVEN} | data,
                "model": {"name": "nano-vit", "adaptation": adaptation},
                "method": {"name": "fedavg", "rounds": rounds, "local": local},
                "run": {"evaluate_every": 0},
            }
            execute.run(tables, Path(folder) / str(at))
            found = rounds_of(Path(folder) / str(at))
            first = found[0][1]
            least = max(most for _, most, _ in found)
            most = min(largest_power(n, size) for n, _, size in found)
            rows.append(
                {
                    "updates": name,
                    "largest entry, round 1": first,
                    "largest of all rounds": least,
                    "of all over round 1": least / first,
                    "largest bound below 1e-6": most,
                    "room, a factor": most / least,
                    "compact's error at the default bound": float(
                        f"{max(error(32, default, n, size) for n, _, size in found):.1e}"
                    ),
                    "64 bits' error at the default bound": float(
                        f"{max(error(64, default, n, size) for n, _, size in found):.1e}"
                    ),
                }
            )
    spread = max(row["largest of all rounds"] for row in rows) / min(row["largest bound below 1e-6"] for row in rows)
    common.emit(
        "Secure aggregation with 32 bits an entry",
        [
            {
                "title": f"Digits, five clients, nano-vit, {rounds} rounds; entries are times the weight of their "
                "client",
                "rows": rows,
            }
        ],
        [
            common.goal(
                "largest entry of all runs, in multiples of the bound that rounds each of them by less than 1e-6",
                spread,
                most=1,
            )
        ],
        [
            "`room` is between the largest entry of a run, below which a bound refuses an update, and the largest "
            "bound that rounds every sum of the run by less than 1e-6.",
        ],
    )


if __name__ == "__main__":
    main()
