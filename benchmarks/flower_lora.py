"""Federated LoRA of MiniLM on banking77: whole warm rounds of fedfm beside Flower's simulation.

    python benchmarks/flower_lora.py
    python benchmarks/flower_lora.py --rows 64 --rounds 2

Both run the same clients (r = 8 on query and value, AdamW, batch 16), 10 of 50 a round, on all cores. The Flower app is
written as Flower's examples are, with one difference in its favour: an actor loads model and rows once, where the
examples load them at every message. Its local training is the hand-written loop of benchmarks/lora.py. A round is from
sending the first message to having the mean, and the first one does not count. Flower's rounds run after fedfm's and
not in turn with them, since Ray keeps its actors: read the ratios as rough on a machine that others use.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import lora
import numpy as np
import torch

from fedfm import seeds
from fedfm.engines.local import LocalLink
from fedfm.federation import Aggregator, Client, ClientData, Federation
from fedfm.methods.fedavg import FedAvg
from fedfm.params import Params
from fedfm.rows import Rows
from fedfm.silo import Silos
from fedfm.training import AdamW
from fedfm.training.job import Job

LOCAL = AdamW(0.001, batch_size=16)


@functools.cache
def people(clients: int, rows: int) -> People:
    """Model and clients, made once a process."""
    torch.set_num_threads(1)
    return People(clients, rows)


class People:
    """The population: every client's rows, one model."""

    def __init__(self, clients: int, rows: int) -> None:
        self.model, deal = lora.minilm(None)
        parts: Any = deal(clients)
        if rows:
            parts = [part.take(np.arange(min(len(part), rows))) for part in parts]
        self.clients = [f"client-{k:02d}" for k in range(clients)]
        self._data = {
            name: ClientData(lambda part=part: part, Rows, Rows) for name, part in zip(self.clients, parts, strict=True)
        }
        self.written = lora.HandWritten(self.model)

    def data(self, client: str) -> ClientData:
        return self._data[client]


def ours(options: Any, kernels: str) -> list[float]:
    """Wall-clock seconds of fedfm's warm rounds."""
    everyone = people(options.clients, options.rows)
    everyone.model.kernels = kernels
    method = FedAvg(local=LOCAL, fraction=options.cohort / options.clients)
    silos = Silos(method, Aggregator(), everyone, memory=Path(tempfile.mkdtemp(prefix="fedfm-bench-")))
    link = LocalLink(silos, workers=os.cpu_count() or 1)
    try:
        fed = Federation(link, model=everyone.model)
        fed.begin(0)
        w, seconds = method.init(fed), []
        for t in range(1, options.rounds + 2):
            fed.begin(t)
            start = time.perf_counter()
            w = method.step(fed, w, t)
            seconds.append(time.perf_counter() - start)
    finally:
        link.close()
    return seconds[1:]


def theirs(options: Any) -> list[float]:
    """Wall-clock seconds of the warm rounds of Flower's simulation."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
    from flwr.simulation import run_simulation

    client, server, stamps = ClientApp(), ServerApp(), []
    here, clients, rows = str(Path(__file__).parent), options.clients, options.rows

    @client.train()
    def train(message: Message, context: Any) -> Message:
        import sys

        sys.path[:0] = [] if here in sys.path else [here]
        import flower_lora

        number = int(context.node_config["partition-id"])
        round_ = int(message.content["config"]["server-round"])
        arrays = message.content["arrays"].to_torch_state_dict()
        out, n = flower_lora.train_one(clients, rows, number, round_, arrays)
        content = {"arrays": ArrayRecord(out), "metrics": MetricRecord({"num-examples": n})}
        return Message(RecordDict(content), reply_to=message)

    class Timed(FlowerFedAvg):
        def configure_train(self, *args: Any, **more: Any) -> Any:
            stamps.append(time.perf_counter())
            return super().configure_train(*args, **more)

        def aggregate_train(self, *args: Any, **more: Any) -> Any:
            out = super().aggregate_train(*args, **more)
            stamps.append(time.perf_counter())
            return out

    @server.main()
    def main(grid: Any, context: Any) -> None:
        strategy = Timed(fraction_train=options.cohort / clients, fraction_evaluate=0.0, min_available_nodes=clients)
        start = ArrayRecord(dict(people(clients, rows).model.params().state()))
        strategy.start(grid, start, num_rounds=options.rounds + 1)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=clients, backend_config=resources)
    return [stop - start for start, stop in zip(stamps[::2], stamps[1::2], strict=True)][1:]


def train_one(
    clients: int, rows: int, number: int, round_: int, arrays: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], int]:
    """One client's epoch by the hand-written loop; in an actor of Ray."""
    everyone = people(clients, rows)
    name = everyone.clients[number]
    data = everyone.data(name)
    seed = seeds.derive(0, "client", round_, name)
    job = Job(Client(name, data, everyone.model, {}, seed), Params(arrays), LOCAL)
    (out,) = everyone.written.train([job])
    return out.state(), len(data.train)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(seconds), 2),
        "min": round(min(seconds), 2),
        "max": round(max(seconds), 2),
    }


def main() -> None:
    options = common.arguments(
        __doc__,
        clients={"type": int, "default": 50},
        cohort={"type": int, "default": 10, "help": "clients a round"},
        rounds={"type": int, "default": 3, "help": "rounds that count"},
        rows={"type": int, "default": 64, "help": "rows a client at most; 0: all"},
    )
    if options.quick:
        options.rounds, options.rows = 1, 16
    torch.set_num_threads(1)
    seconds = {f"fedfm, {kernels}": ours(options, kernels) for kernels in ("exact", "fast", "fast_bf16")}
    peer = theirs(options)
    middle = statistics.median(peer)
    rows = [{"engine": "Flower's simulation (Ray)", "wall seconds a round": spread(peer), "ratio": 1.0}]
    rows += [
        {"engine": name, "wall seconds a round": spread(s), "ratio": round(middle / statistics.median(s), 2)}
        for name, s in seconds.items()
    ]
    table = {
        "title": f"LoRA r = 8 of MiniLM on banking77, {options.cohort} of {options.clients} clients a round, "
        f"{options.rows or 'all'} rows each, {os.cpu_count()} cores",
        "rows": rows,
    }
    by = {name: middle / statistics.median(s) for name, s in seconds.items()}
    goals = [
        common.goal("times Flower's simulation, float32", by["fedfm, fast"], least=4.5),
        common.goal("times Flower's simulation, bf16", by["fedfm, fast_bf16"], least=8),
    ]
    common.emit("Federated LoRA beside Flower", [table], goals)


if __name__ == "__main__":
    main()
