"""FedBip's server: K^2 similarities and K aggregates of K clients' task vectors, against the loops that others write.

    python benchmarks/fedbip_server.py
    python benchmarks/fedbip_server.py --clients 8 40 --millions 1

A client's vector is LoRA of rank 8 on q and v of 32 blocks of width 4,096: 4.2 M float32 parameters in 128 tensors;
every client is a common direction of one of eight groups and noise of its own. Everybody starts from one model, to
which the mixture is added.

- "fedfm" is ``gram``, the clipped cosines' weights, and ``mix``, as one round of FedBip computes them.
- "pairwise" is the same in torch, pair by pair: ``cosine_similarity`` of flat vectors, then p_ik tau_k added vector by
  vector.
- "FedAMP" is attentive message passing as libraries of personalised learning write it: for every client and every
  other one all parameters put into one vector, the norm of the difference, exp(-d / sigma), and the sum parameter by
  parameter.

The loops run on so many pairs as the tables say, and are scaled by K^2 over that. CPU seconds on one thread, wall-clock
seconds on two. The peak is the larger of torch's and NumPy's product of two square matrices of 3,000, in turn with ours
(with files before, between and after); ours counts as 2 K^2 P operations for the similarities, although the symmetric
half is computed once, and as many for the mixture. Goals are of one thread: on a machine that others use, torch's
threads wait for each other and ours do not, which flatters ours on two. The error of cosines is against sums in
float64. Memory comes as in a run: what an earlier round has freed serves again, and a mixture into fresh memory is
given apart. Each row is a process of its own. "Memory" is what grows beside vectors and results that lie in memory (its
peak less theirs), and with files all memory that no file backs.

With K = 1,000 vectors and results lie in files, as a run's do that do not fit into memory
(``fedfm.linalg.out_of_core``). Where Linux can (6.14), they go between disk and memory past the system's cache, so that
every byte comes from the disk; elsewhere the cache has what it holds. "Files alone" is what the same calls cost without
a product: vectors are read once for the similarities, and read and written once for the mixture; of an eighth of the
vectors, times 8. "Of peak and files" is what products at the peak and the files alone would take one after the other,
over what ours take. CPU seconds are this process's; what the system's own threads need to write pages out is in none.
"""

from __future__ import annotations

import gc
import json
import math
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from threadpoolctl import threadpool_limits

from fedfm.linalg.column_blocks import PIECE
from fedfm.linalg.kernels import buffers
from fedfm.linalg.mapped_files import location_of
from fedfm.linalg.out_of_core import allocate, keep_all
from fedfm.linalg.pairwise import gram, mix
from fedfm.linalg.params import Params, layout_of

PAIRS = 64  # about the number of pairs that a loop computes
GOALS = {8: 12, 40: 30, 200: 60}
TENSORS = {f"{m}.lora_{f}": shape for m in "qv" for f, shape in (("A", (8, 4096)), ("B", (4096, 8)))}
BLOCK = sum(math.prod(shape) for shape in TENSORS.values())


def layout(millions: float) -> Any:
    blocks = max(1, round(millions * 1e6 / BLOCK))
    return layout_of(tuple((f"{i}.{n}", torch.float32, s) for i in range(blocks) for n, s in TENSORS.items()))


def draw_vector(k: int, size: int, common_parts: np.ndarray) -> torch.Tensor:
    flat = np.random.default_rng(k).standard_normal(size, np.float32)
    flat += common_parts[k % len(common_parts)]
    return torch.from_numpy(flat)


def clip_weights(products: np.ndarray) -> np.ndarray:
    """Equation 4's weights of cosines (L, K, K) clipped at 0."""
    norms = np.sqrt(np.diagonal(products, axis1=1, axis2=2))
    similar = np.maximum(products / (norms[:, :, None] * norms[:, None, :]), 0)
    return similar / similar.sum(2, keepdims=True)


def pairwise_loop(tau: list[Params], start: Params, pairs: list[tuple[int, list[int]]]) -> list[list[float]]:
    flats = [x.flats[torch.float32] for x in tau]
    rows = []
    for i, others in pairs:
        row = [float(torch.nn.functional.cosine_similarity(flats[i], flats[k], dim=0)) for k in others]
        weights = [max(0.0, c) for c in row]
        new = start.flats[torch.float32].clone()
        for w, k in zip(weights, others, strict=True):
            new += w / sum(weights) * flats[k]
        rows.append(row)
    return rows


def fedamp_loop(models: list[Params], pairs: list[tuple[int, list[int]]], sigma: float) -> None:
    def vector(x: Params) -> torch.Tensor:
        return torch.cat([t.reshape(-1) for t in x.values()])

    for i, others in pairs:
        attention = {k: math.exp(-float(torch.norm(vector(models[i]) - vector(models[k]))) / sigma) for k in others}
        total = sum(attention.values())
        new = {n: torch.zeros_like(t) for n, t in models[i].items()}
        for k in others:
            for n, t in models[k].items():
                new[n] += attention[k] / total * t


def time_call(run: Callable[[], Any]) -> tuple[float, float, Any]:
    """Wall-clock and CPU seconds, and what it gave."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = run()
    return time.perf_counter() - wall, time.process_time() - cpu, found


@contextmanager
def anonymous() -> Iterator[list[float]]:
    """MiB that no file backs, at the peak; read every 20 ms."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            lines = Path("/proc/self/status").read_text().splitlines()
            peak[0] = max(peak[0], next(int(x.split()[1]) / 1024 for x in lines if x.startswith("RssAnon")))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def files_alone(tau: list[Params], columns: int) -> dict[str, tuple[float, float]]:
    """Wall-clock and CPU seconds of reading the vectors' files once, and of writing as much, a window after another."""
    made, size = allocate(len(tau), tau[0].layout, most=0), tau[0].layout.sizes[torch.float32]
    window = np.frombuffer(mmap.mmap(-1, 4 * len(tau) * columns), np.float32).reshape(len(tau), columns)  # of pages
    window[:] = 1

    def through(vectors: list[Params], call: str) -> None:
        files = [location_of(x.flats[torch.float32]) for x in vectors]
        for at in range(0, size, columns):
            for row, file in zip(window, files, strict=True):
                getattr(file, call)(4 * at, row[: size - at])

    return {
        "read": time_call(lambda: through(tau, "read"))[:2],
        "write": time_call(lambda: through(made, "write"))[:2],
    }


def one(count: int, threads: int, millions: float, turns: int, files: bool) -> dict[str, Any]:
    """One row, in this process."""
    torch.set_num_threads(threads)
    of = layout(millions)
    size = of.sizes[torch.float32]
    parts = np.random.default_rng(10**6).standard_normal((min(count, 8), size), np.float32)
    start = Params.from_flat(of, {torch.float32: torch.from_numpy(0.02 * parts[0])})
    vectors = (Params.from_flat(of, {torch.float32: draw_vector(k, size, parts)}) for k in range(count))
    tau = keep_all(vectors, most=0) if files else list(vectors)
    del parts, vectors
    blocks = [[n for n in of.slots if n.startswith(f"{i}.")] for i in range(len(of.entries) // len(TENSORS))]
    matrices, kept = torch.randn(2, 3000, 3000), dict[str, Any]()

    def similarities() -> None:
        kept["products"] = gram(tau, threads=threads)

    def mixture() -> None:
        kept.pop("mixed", None)
        kept["mixed"] = mix(clip_weights(kept["products"]), tau, onto=[start] * count, threads=threads)

    def by_layer() -> None:
        kept.pop("mixed", None)
        kept["mixed"] = mix(
            clip_weights(gram(tau, blocks, threads=threads)), tau, blocks, [start] * count, threads=threads
        )

    def numpys() -> None:
        with threadpool_limits(threads):
            np.matmul(matrices[0].numpy(), matrices[1].numpy())

    parts_of = {"torch": lambda: torch.mm(*matrices), "numpy": numpys, "gram": similarities, "mix": mixture}
    found: dict[str, Any] = {"parameters": size, "files": None}
    if files:  # long, and what the first turn reads no later one finds in memory
        os.environ["FEDFM_MEMORY"], found["layers"] = "0", None
        with anonymous() as peak:
            times = {n: [] for n in parts_of}
            peaks = ["torch", "numpy"]
            for n in [*peaks, "gram", *peaks, "mix", *peaks]:  # it takes minutes, and a processor's clock changes
                times[n].append(time_call(parts_of[n])[:2])
        found["memory"] = peak[0]
        few = max(1, count // 8)
        kept.pop("mixed")  # the disk may not hold more
        alone = files_alone(tau[:few], PIECE)
        found["files"] = {call: [s * count / few for s in seconds] for call, seconds in alone.items()}
    else:
        similarities()
        found["first"] = time_call(mixture)[:2]
        times = common.interleave(parts_of, turns)
        found["layers"] = time_call(by_layer)[:2]
        kept.pop("mixed", None)

        def step() -> None:
            similarities()
            mixture()

        gc.collect()
        buffers._free.clear()
        added = common.added_mib(step)
        found["memory"] = None if added is None else added - count * of.nbytes / 2**20
    kept.pop("mixed", None)
    others = list(range(min(count, PAIRS)))
    rows = [(i, others) for i in range(max(1, min(count, PAIRS // count)))]
    naive = time_call(lambda: pairwise_loop(tau, start, rows))
    fedamp = time_call(lambda: fedamp_loop(tau, rows, sigma=math.sqrt(2 * size)))
    pairs = sum(len(o) for _, o in rows)
    norms = [tau[k].norm() for k in others]
    exact = np.array([[tau[i].dot(tau[k]) / (norms[i] * norms[k]) for k in others] for i, _ in rows])
    products = kept["products"][0]
    ours = products / np.sqrt(np.outer(np.diag(products), np.diag(products)))
    return found | {
        "times": times,
        "naive": [s * count**2 / pairs for s in naive[:2]],
        "fedamp": [s * count**2 / pairs for s in fedamp[:2]],
        "pairs": pairs,
        "error": float(np.abs(ours[: len(rows), : len(others)] - exact).max()),
        "naive_error": float(np.abs(np.array(naive[2]) - exact).max()),
    }


def row(count: int, threads: int, found: dict[str, Any]) -> dict[str, Any]:
    """What one child measured, for the table; wall-clock ratios where it ran on several threads."""
    which = 1 if threads == 1 else 0
    times = {n: common.median(t, which) for n, t in found["times"].items()}
    peak = 2 * 3000**3 / min(times["torch"], times["numpy"])
    products = 2 * count**2 * found["parameters"]
    ours = times["gram"] + times["mix"]
    both = [sum(common.median(found["times"][n], w) for n in ("gram", "mix")) for w in (1, 0)]
    read, write = (found["files"][call][which] for call in ("read", "write")) if found["files"] else (0.0, 0.0)
    least = {"gram": products / peak + read, "mix": products / peak + read + write}
    return {
        "K": count,
        "threads": threads,
        "parameters": f"{found['parameters'] / 1e6:.2f} M",
        "fedfm, CPU s": both[0],
        "wall s": both[1],
        "similarities, mixture": f"{times['gram']:.3g}, {times['mix']:.3g}",
        "mixture, fresh memory": found.get("first") and found["first"][which],
        "by layer, CPU s": found["layers"] and found["layers"][1],
        "pairwise, CPU s": found["naive"][1],
        "times": round(found["naive"][which] / ours, 1),
        "FedAMP, CPU s": found["fedamp"][1],
        "times FedAMP": round(found["fedamp"][which] / ours, 1),
        "pairs timed": f"{found['pairs']} of {count**2}",
        "of peak: similarities": round(products / times["gram"] / peak, 2),
        "of peak: mixture": round(products / times["mix"] / peak, 2),
        "files alone: read, write": found["files"] and f"{read:.3g}, {write:.3g}",
        "of peak and files": found["files"] and ", ".join(f"{least[n] / times[n]:.2f}" for n in ("gram", "mix")),
        "peak, Gflop/s: torch, NumPy": ", ".join(f"{2 * 3000**3 / times[n] / 1e9:.0f}" for n in ("torch", "numpy")),
        "off in the cosine": f"{found['error']:.1e}",
        "pairwise off": f"{found['naive_error']:.1e}",
        "memory, MiB": found["memory"] and round(found["memory"]),
    }


def measure_row(count: int, threads: int, millions: float, turns: int) -> tuple[dict[str, Any], list[str]]:
    """A row, and what has to be said of it."""
    arguments = ["--one", str(count), str(threads), "--turns", str(turns)]
    nbytes, notes = 4 * layout(millions).sizes[torch.float32], []
    if 3 * count * nbytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        return common.child(__file__, *arguments, "--millions", str(millions)), notes
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if (fits := free * 0.8 / (2 * count * nbytes)) < 1:  # leave others some
        millions *= fits
        notes.append(f"K = {count}: {free / 2**30:.0f} GiB of free disk hold {millions:.2f} M parameters a client.")
    found = common.child(__file__, *arguments, "--millions", str(millions), "--files", limit=1700)
    wall = ", ".join(f"{call} {seconds[0]:.0f} s" for call, seconds in found["files"].items())
    notes.append(
        f"K = {count}: {8 * count * found['parameters'] / 2**30:.1f} GiB of vectors and results in files; one turn, "
        f"the loops over the first vectors. Files alone, wall-clock: {wall}."
    )
    return found, notes


def main() -> None:
    options = common.arguments(
        __doc__,
        clients={"type": int, "nargs": "+", "default": [8, 40, 200, 1000]},
        millions={"type": float, "default": 4.2},
        turns={"type": int, "default": 3},
        one={"type": int, "nargs": 2, "metavar": ("K", "THREADS"), "help": "one row in this process"},
        files={"action": "store_true", "help": "with --one: vectors and results lie in files"},
    )
    if options.one:
        print(json.dumps(one(*options.one, options.millions, options.turns, options.files)))
        return
    clients, millions, turns = (
        ([8, 40], 0.5, 1) if options.quick else (options.clients, options.millions, options.turns)
    )
    rows, goals, notes = [], [], list[str]()
    for count in clients:
        for threads in (1, 2) if count < 1000 else (1,):
            try:
                found, said = measure_row(count, threads, millions, turns)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                notes.append(f"K = {count}, {threads} threads: not measured, {type(error).__name__}: {error}"[:300])
                continue
            rows.append(row(count, threads, found))
            notes += said
            name = f"K = {count}"
            if threads > 1:  # what others do on the machine holds up a loop whose threads wait for each other
                continue
            if count in GOALS:
                goals.append(common.goal(f"times the pairwise loop, {name}", rows[-1]["times"], least=GOALS[count]))
            if count >= 200:
                goals += [
                    common.goal(
                        f"of the matrix product's peak, {part}, {name}", rows[-1][f"of peak: {part}"], least=0.75
                    )
                    for part in ("similarities", "mixture")
                ]
            goals.append(common.goal(f"1e-7 in the cosine, K = {count}", found["error"] * 1e7, most=1))
    common.emit("FedBip's server", [{"title": "A round's similarities and mixtures", "rows": rows}], goals, notes)


if __name__ == "__main__":
    main()
