"""What FedBaF's step at the server adds to a round of FedAvg.

    python benchmarks/fedbaf_step.py

The rounds are real ones of FedAvg on the local engine, one process, full adaptation; what FedBaF adds is its step
around a base step that is done already: Algorithm 1, lines 9 to 11. Shares are of CPU seconds, which count the kernel's
part; one thread.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import common
import torch

from fedfm.aggregation.base import Aggregator
from fedfm.config.experiment import Experiment
from fedfm.core.federation import Federation
from fedfm.engines.local.engine import LocalLink
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.fedbaf.fedbaf import FedBaF
from fedfm.runtime.client import Silos
from fedfm.runtime.population import populate
from fedfm.training import SGD


class Done(FedAvg):
    """A base whose step is done already."""

    after: ClassVar[Params]

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        return Done.after


def overhead(title: str, tables: dict[str, Any], local: SGD, foundation: str, turns: int) -> dict[str, Any]:
    """One row: what FedBaF adds to FedAvg's rounds."""
    population = populate(Experiment.from_dict(tables))
    avg = FedAvg(local=local)
    baf = FedBaF(local=local, base=Done(), foundation=foundation)
    silos = Silos(avg, Aggregator(), population, memory=common.scratch())
    fed = Federation(
        LocalLink(silos, workers=1), model=population.model, secret=lambda name: bytes(32), aggregator=Aggregator()
    )
    w = baf.init(fed)
    rounds, added, shares = [], [], []
    for t in range(1, turns + 2):
        fed.begin(t)
        begun = time.process_time()
        Done.after = avg.step(fed, w, t)
        between = time.process_time()
        w = baf.step(fed, w, t)
        ended = time.process_time()
        fed.transcript.drain()
        if t > 1:  # the first compiles, and reads the foundation model
            rounds.append((between - begun, between - begun))
            added.append((ended - between, ended - between))
            shares.append((ended - between) / (between - begun))
    share = common.median(added) / common.median(rounds)
    return {
        "clients": title,
        "parameters": f"{sum(w.layout.sizes.values()) / 1e6:.3g} M",
        "FedAvg's round, CPU ms": round(1e3 * common.median(rounds), 1),
        "FedBaF adds, ms": round(1e3 * common.median(added), 2),
        "per cent": {
            "median": round(100 * share, 2),
            "min": round(100 * min(shares), 2),
            "max": round(100 * max(shares), 2),
        },
    }


def main() -> None:
    options = common.arguments(__doc__, turns={"type": int, "default": 3})
    turns = 2 if options.quick else options.turns
    torch.set_num_threads(1)
    notes = []
    cases = [("10 of 36 rows, nano-vit", common.digits(10, "full"), SGD(0.05, 1, 32), "nano-vit")]
    try:
        banking = common.banking77(4)
        banking["data"]["limit"] = 128
        banking["model"]["adaptation"] = {"name": "full"}
        cases.append(("4 of 32 rows, MiniLM", banking, SGD(0.01, 1, 16), banking["model"]["name"]))
    except FileNotFoundError as error:
        notes.append(f"banking77 is left out: {error}.")
    rows, goals = [], []
    for title, tables, local, foundation in cases:
        rows.append(overhead(title, tables, local, foundation, turns))
        goals.append(common.goal(f"per cent of FedAvg's round, {title}", rows[-1]["per cent"]["median"], most=3))
    common.emit("FedBaF's step at the server", [{"title": "What FedBaF adds to a round", "rows": rows}], goals, notes)


if __name__ == "__main__":
    main()
