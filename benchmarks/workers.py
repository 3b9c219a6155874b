"""Two worker processes against one on the local engine, and whether the machine had two cores to give meanwhile.

    python benchmarks/workers.py

Rounds of LoRA and of heads with one worker and with two, in turn; the means have to be equal bit for bit, also with
three. A turn of heads has twenty rounds, as a run's follow one another. Between the turns two controls run, in one
process and in two at once. The first is a fixed piece of arithmetic: what two processes do less than twice the work of
one is taken by others. The second is the same rounds with one worker, as whole runs of their own that never wait for
each other: what two of them do less than twice the work of one is lost to the caches and the memory that the cores
share, and no scheduler of ours could get it back. Ratios are of wall-clock time. Processor time says what the best
schedule could give: two cores that never rest need half of what all processes take together.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch

from fedfm.aggregation.base import Aggregator
from fedfm.config.experiment import Experiment
from fedfm.core.federation import Federation
from fedfm.engines.local.engine import LocalLink
from fedfm.methods.fedavg import FedAvg
from fedfm.runtime.client import Silos
from fedfm.runtime.population import populate
from fedfm.training import SGD

ROUNDS = 20  # a turn of heads: a second


def together(processes: int, piece: Callable[[], Any], seconds: float = 0.4) -> float:
    """Pieces of work a second that so many processes do at once, each in a fork of its own."""
    pipes = []
    for _ in range(processes):
        reader, writer = os.pipe()
        if not os.fork():
            try:
                piece()
                count, begun = 0, time.perf_counter()
                while time.perf_counter() < begun + seconds:
                    piece()
                    count += 1
                os.write(writer, str(count / (time.perf_counter() - begun)).encode())
            finally:
                os._exit(0)
        os.close(writer)
        pipes.append(reader)
    total = 0.0
    for reader in pipes:
        with os.fdopen(reader) as answer:
            total += float(answer.read())
        os.wait()
    return total


def processor_time(pids: list[int]) -> float:
    """Seconds of processor time that these processes have taken, NaN where the system does not say."""
    try:
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9
    except OSError:
        return math.nan


def crew(fed: Federation) -> list[int]:
    """Process ids of a federation's workers."""
    pool = fed._link._pool  # type: ignore[attr-defined]
    return [worker.pid for worker in pool._workers] if pool else []


def arithmetic() -> None:
    """A piece of work that fits into a core's own cache."""
    a = torch.ones(192, 192)
    for _ in range(20):
        a @ a


def prepare(tables: dict[str, Any], local: SGD) -> tuple[FedAvg, dict[int, Federation], Any]:
    """A federation a number of workers, over the same clients."""
    population = populate(Experiment.from_dict(tables))
    for client in population.clients:
        population.data(client).train  # noqa: B018 - what is frozen is computed before the workers fork
    method, feds = FedAvg(local=local, fraction=1.0), {}
    for workers in (1, 2, 3):
        silos = Silos(method, Aggregator(), population, memory=common.scratch())
        feds[workers] = Federation(LocalLink(silos, workers=workers), model=population.model, aggregator=Aggregator())
    return method, feds, population


def main() -> None:
    options = common.arguments(
        __doc__, turns={"type": int, "default": 7}, clients={"type": int, "default": 8, "help": "for LoRA"}
    )
    turns = 2 if options.quick else options.turns
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2:
        common.skip("this process may use one core only")
    rows, goals = [], []
    cases = [
        (f"{options.clients}, LoRA of nano-vit", common.digits(options.clients, "lora"), SGD(0.05, 1, 32), 1.8),
        ("400 of 4 rows, head of nano-vit", common.digits(400, "head"), SGD(0.1, 20, 4), None),
    ]
    notes = [
        "Two free cores give 2.0 in the arithmetic. Two runs at once, which never wait for each other, are about the "
        "most that two workers of one run can give.",
        '"So at most": the time of one worker over half of the processor time that two and the server take together, '
        "the speed-up if no core ever rested.",
        "400 clients of four rows: training takes as long as reading the replies, which one process does for all.",
        "40 heads of 30,000 entries: with 5 epochs a client trains for half a millisecond; its reply of 120 KB is "
        "written, read, checked and added, with one worker it is checked and added only.",
    ]
    try:
        banking = common.banking77(40)
        banking["data"]["limit"] = 4000
        for epochs in (5, 50):
            title = f"40 of 100 rows, head of MiniLM, {epochs} epochs"
            cases.append((title, banking, SGD(0.1, epochs, 10), 1.8))
    except FileNotFoundError as error:
        notes.append(f"banking77 is left out: {error}.")
    for title, tables, local, least in cases:
        method, feds, _ = prepare(tables, local)
        hashes: dict[int, set[str]] = {workers: set() for workers in feds}
        burnt: dict[int, list[float]] = {workers: [] for workers in feds}
        rounds = 1 if "LoRA" in title else ROUNDS

        def turn(
            workers: int,
            method: FedAvg = method,
            feds: Any = feds,
            hashes: Any = hashes,
            burnt: Any = burnt,
            rounds: int = rounds,
        ) -> float:
            fed, spent = feds[workers], 0.0
            pids = [os.getpid(), *crew(fed)]
            before = processor_time(pids)
            for _ in range(rounds):
                fed.begin(1)
                begun = time.perf_counter()
                w = method.step(fed, fed.initial, 1)
                spent += time.perf_counter() - begun
                fed.transcript.drain()
            burnt[workers].append((processor_time(pids) - before) / rounds)
            hashes[workers].add(w.sha256())
            return spent / rounds

        for workers in feds:
            turn(workers)  # forks, and warms up
            burnt[workers].clear()
        speedups, cores_free, runs, one, two = [], [], [], [], []
        for _ in range(turns):
            alone, run, single = together(1, arithmetic), together(1, lambda: turn(1)), turn(1)
            pair, apart, double = together(2, arithmetic), together(2, lambda: turn(1)), turn(2)
            one.append(single)
            two.append(double)
            speedups.append(single / double)
            cores_free.append(pair / alone)
            runs.append(apart / run)
        speedup, possible = statistics.median(one) / statistics.median(two), statistics.median(runs)
        needs = {workers: statistics.median(burnt[workers]) for workers in (1, 2)}
        same = len(set().union(*hashes.values())) == 1
        rows.append(
            {
                "clients": title,
                "one worker, s": round(statistics.median(one), 3),
                "two, s": round(statistics.median(two), 3),
                "speed-up": _range(speedup, speedups),
                "processor time with one, s": round(needs[1], 4),
                "with two, s": round(needs[2], 4),
                "so at most": round(2 * statistics.median(one) / needs[2], 2),
                "arithmetic, two processes over one": _range(statistics.median(cores_free), cores_free),
                "two runs at once over one": _range(possible, runs),
                "speed-up / two runs": round(speedup / possible, 2),
                "same bits with 1, 2, 3": "yes" if same else "NO",
            }
        )
        if least is not None:
            goals.append(common.goal(f"two workers over one, {title}", speedup, least=least))
        for fed in reversed(feds.values()):  # a later pool's workers hold the earlier one's sockets
            fed._link.close()  # type: ignore[attr-defined]
        if not same:
            raise SystemExit(f"{title}: the parameters depend on the number of workers")
    common.emit("Workers", [{"title": "Two workers against one", "rows": rows}], goals, notes)


def _range(middle: float, values: list[float]) -> dict[str, float]:
    return {"median": round(middle, 2), "min": round(min(values), 2), "max": round(max(values), 2)}


if __name__ == "__main__":
    main()
