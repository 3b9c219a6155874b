"""What FedBaF takes at the server beside one copy of the model in memory, and what it adds to a round of FedAvg.

    python benchmarks/fedbaf_step.py
    python benchmarks/fedbaf_step.py --millions 25

One copy is ``out.copy_(x)`` into a buffer that is there already: it reads and writes every entry once. "Norms, tau,
mixture" is Algorithm 1's lines 9 to 11, ``chord`` and ``mix``; the whole step is the mean of three updates, w_t + mean
and these, as ``FedAvg.step`` and ``FedBaF.step`` compute them. The tensors are those of transformer blocks of width
768, the foundation model's lie side by side as ``match`` puts them, w_{t+1} stays until the next one is there. Memory
comes as it comes in a run: what an earlier round has freed serves again; the first round of a process clears fresh
memory, and is given apart. The other side keeps dictionaries of tensors, stacks and sums: torch's operations one by
one, in fresh memory each time, as torch's allocator gives it. Both sides have to agree.

The rounds are real ones of FedAvg on the local engine, one process, full adaptation; what FedBaF adds is its step
around a base step that is done already. Ratios are of CPU seconds, which count the kernel's part; one thread.
"""

from __future__ import annotations

import gc
import math
import time
from typing import Any, ClassVar

import common
import torch

from fedfm.aggregation.base import Aggregator
from fedfm.config.experiment import Experiment
from fedfm.core.federation import Federation
from fedfm.engines.local.engine import LocalLink
from fedfm.linalg.kernels import buffers
from fedfm.linalg.params import Params
from fedfm.linalg.running_mean import weighted_mean
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.fedbaf.fedbaf import FedBaF
from fedfm.methods.fedbaf.pull import Piece, chord, mix
from fedfm.runtime.client import Silos
from fedfm.runtime.population import populate
from fedfm.training import SGD

BLOCK = {
    **{f"attention.{n}.weight": (768, 768) for n in "qkvo"},
    **{f"attention.{n}.bias": (768,) for n in "qkvo"},
    **{"mlp.in.weight": (3072, 768), "mlp.in.bias": (3072,), "mlp.out.weight": (768, 3072), "mlp.out.bias": (768,)},
    **{f"norm{i}.{n}": (768,) for i in (1, 2) for n in ("weight", "bias")},
}
WEIGHTS = (100.0, 350.0, 50.0)  # n_k of the three clients
A = 0.75


def vector(millions: int, seed: int) -> dict[str, torch.Tensor]:
    """Blocks, and an embedding that fills up what is left."""
    draw, width = torch.Generator().manual_seed(seed), 768
    blocks, left = divmod(millions * 10**6, sum(math.prod(shape) for shape in BLOCK.values()))
    shapes = {"embedding.weight": (left // width, width)}
    shapes |= {f"{i}.{name}": shape for i in range(blocks) for name, shape in BLOCK.items()}
    return {name: 0.02 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def naive_mixture(u: Any, w: Any, pre: Any) -> Any:
    flat_u, flat_w = (torch.cat([t.flatten() for t in v.values()]) for v in (u, w))
    tau = float((flat_u / flat_u.norm() - flat_w / flat_w.norm()).norm())
    return tau, {n: (u[n] + A * pre[n]) / (1 + A) for n in u}


def naive_mean(w: Any, updates: Any) -> Any:
    weights = torch.tensor(WEIGHTS) / sum(WEIGHTS)
    stacked = {n: torch.stack([d[n] for d in updates]) for n in w}
    return {n: w[n] + (t * weights.view(-1, *[1] * (t.dim() - 1))).sum(0) for n, t in stacked.items()}


def step(millions: int, turns: int) -> dict[str, Any]:
    """One row: copies that each takes, on so many million parameters."""
    w, *updates = (Params(vector(millions, seed)) for seed in range(4))
    pre = Params(vector(millions, 4))
    pieces, names = {n: Piece(tuple(t.shape), t) for n, t in pre.items()}, set(pre)
    plain, plain_updates = w.state(), [d.state() for d in updates]
    w1 = w + weighted_mean(zip(WEIGHTS, updates, strict=True))
    plain_w1 = w1.state()
    x = w.flats[torch.float32]
    out, held = torch.empty_like(x).zero_(), dict[str, Any]()

    def mixture(u: Params) -> None:
        found = chord(u, w, names)
        held["ours"] = found.length, mix(u, pieces, A)  # what was here is w_t, and nobody needs it after this

    def whole() -> None:
        mixture(w + weighted_mean(zip(WEIGHTS, updates, strict=True)))

    variants = {
        "copy": lambda: out.copy_(x),
        "mixture": lambda: mixture(w1),
        "whole": whole,
    }
    naive = {
        "copy": variants["copy"],
        "naive mixture": lambda: held.update(naive=naive_mixture(plain_w1, plain, pre)),
        "naive whole": lambda: held.update(naive=naive_mixture(naive_mean(plain, plain_updates), plain, pre)),
    }
    whole()  # compiles
    held.clear()
    gc.collect()
    buffers._free.clear()
    begun = time.process_time()
    whole()
    first = time.process_time() - begun
    times, slow = common.interleave(variants, turns), common.interleave(naive, min(turns, 2))
    tau, mixed = held["naive"]
    apart = max(float((held["ours"][1][n] - t).abs().max()) for n, t in mixed.items())
    if apart > 1e-6 or abs(held["ours"][0] / tau - 1) > 0.05:  # the naive norm is a float32 sum
        raise SystemExit(
            f"{millions} M parameters: the two sides differ by {apart}, chords {held['ours'][0]} and {tau}"
        )
    ratios = {n: common.ratio(found[n], found["copy"]) for found in (times, slow) for n in found if n != "copy"}
    return {
        "parameters": f"{len(x) / 1e6:.1f} M",
        "one copy, CPU ms": round(1e3 * common.median(times["copy"]), 1),
        "norms, tau, mixture: copies": ratios["mixture"],
        "naive": ratios["naive mixture"],
        "whole step: copies": ratios["whole"],
        "whole step, naive": ratios["naive whole"],
        "whole step, fresh memory": round(first / common.median(times["copy"]), 1),
        "wall-clock ratios of ours": ", ".join(
            f"{common.ratio(times[n], times['copy'], 0)['median']:g}" for n in ("mixture", "whole")
        ),
        "off in the naive chord": f"{abs(held['ours'][0] / tau - 1):.1g}",
    }


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
    options = common.arguments(
        __doc__,
        millions={"type": int, "nargs": "+", "default": [25, 100]},
        turns={"type": int, "default": 9},
    )
    turns = 2 if options.quick else options.turns
    torch.set_num_threads(1)
    rows, goals = [], []
    for millions in [8] if options.quick else options.millions:
        rows.append(step(millions, turns))
        goals += [
            common.goal(f"copies, norms, tau and mixture, {millions} M", rows[-1][part]["median"], most=most)
            for part, most in (("norms, tau, mixture: copies", 2.5), ("whole step: copies", 5))
        ]
        gc.collect()
    notes = []
    cases = [("10 of 36 rows, nano-vit", common.digits(10, "full"), SGD(0.05, 1, 32), "nano-vit")]
    try:
        banking = common.banking77(4)
        banking["data"]["limit"] = 128
        banking["model"]["adaptation"] = {"name": "full"}
        cases.append(("4 of 32 rows, MiniLM", banking, SGD(0.01, 1, 16), banking["model"]["name"]))
    except FileNotFoundError as error:
        notes.append(f"banking77 is left out: {error}.")
    shares = []
    for title, tables, local, foundation in cases:
        shares.append(overhead(title, tables, local, foundation, min(turns, 3)))
        goals.append(common.goal(f"per cent of FedAvg's round, {title}", shares[-1]["per cent"]["median"], most=3))
    common.emit(
        "FedBaF's step at the server",
        [
            {"title": "Copies of the model in memory, one thread", "rows": rows},
            {"title": "What FedBaF adds to a round", "rows": shares},
        ],
        goals,
        notes,
    )


if __name__ == "__main__":
    main()
