"""Table 1's server seconds: one aggregation of K clients' LoRA of LLaMA-7B, by every method's own server half.

    python reproduce/fedbip/server_seconds.py --clients 8 40

Vectors as the paper's: rank 8 on q and v of 32 blocks of width 4,096, 4.2 M float32 entries in 128 tensors, drawn at
random with a part in common. CPU seconds (of all threads), the least of three, from all updates in memory to all new
starts; no network, no training. L-DAWA's cosines are its clients' in this library, and FedALA's mixture too: their
servers average. Columns: FedAvg's mean (FedIT's, L-DAWA's, FedALA's, FFA-LoRA's over twice as many entries as it
sends), FedAWA, FedAMP, FedBip and FedBip-L (32 layers).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from fedfm.linalg.pairwise import gram, mix
from fedfm.linalg.params import Params, layout_of
from fedfm.methods import fedamp, fedawa
from fedfm.methods.fedbip import fedbip

BLOCKS, WIDTH, RANK = 32, 4096, 8
SHAPES = {f"{m}.lora_{f}": s for m in "qv" for f, s in (("A", (RANK, WIDTH)), ("B", (WIDTH, RANK)))}
LAYERS = [[f"{b}.{name}" for name in SHAPES] for b in range(BLOCKS)]


def vectors(count: int, blocks: int = BLOCKS) -> list[Params]:
    """Task vectors with cosines of about a half."""
    names = tuple((f"{b}.{n}", torch.float32, s) for b in range(blocks) for n, s in SHAPES.items())
    layout, size = layout_of(names), sum(int(np.prod(s)) for _, _, s in names)
    rng = np.random.default_rng(0)
    common = rng.standard_normal(size, np.float32)
    flats = (torch.from_numpy(common + rng.standard_normal(size, np.float32)) for _ in range(count))
    return [Params.from_flat(layout, {torch.float32: flat}) for flat in flats]


def aggregations(tau: list[Params], start: Params) -> dict[str, Callable[[], Any]]:
    """Name -> what the server computes in a round, the replies being there."""
    K = len(tau)
    everything = [[name for layer in LAYERS for name in layer]]

    def mean() -> Any:
        return mix(np.full((1, 1, K), 1 / K), tau, None, [start], threads=1)

    def mix_weighted() -> Any:
        G = gram([start, *tau], everything, threads=1)[0]
        a = np.full(K, 1 / K)
        fedawa.step(a, G, 0.001)
        return mix(fedawa.softmax(a)[None, None], tau, None, [start], threads=1)

    def attentive() -> Any:
        G = gram(tau, everything, threads=1)[0]
        xi = fedamp.weights(fedamp.squared_distances(G))
        return mix(xi[None], tau, None, [start] * K, threads=1)

    def bilevel(layers: list[list[str]]) -> Callable[[], Any]:
        def run() -> Any:
            g, counts = fedbip.similarities(gram(tau, layers, threads=1), "cosine")
            return mix(fedbip.shares(g, counts, "clip"), tau, layers, [start] * K, threads=1)

        return run

    return {
        "mean": mean,
        "FedAWA": mix_weighted,
        "FedAMP": attentive,
        "FedBip": bilevel(everything),
        "FedBip-L": bilevel(LAYERS),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 40])
    rows = []
    with threadpool_limits(1):
        torch.set_num_threads(1)
        for count in parser.parse_args().clients:
            tau = vectors(count)
            found = aggregations(tau, 0.01 * tau[0])
            seconds = []
            for run in found.values():
                taken = []
                for _ in range(3):
                    began = time.process_time()
                    run()
                    taken.append(time.process_time() - began)
                seconds.append(f"{min(taken):.2f}")
            rows.append(f"| {count} | {' | '.join(seconds)} |")
    print(f"| K | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
