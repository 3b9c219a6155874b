"""Federated LoRA of MiniLM on banking77: whole warm rounds of fedfm compared with Flower's simulation.

    python benchmarks/flower_lora.py
    python benchmarks/flower_lora.py --rows 64 --rounds 2

All run the same clients (r = 8 on query and value, AdamW, batch 16), 10 of 50 a round, on all cores. There are two
Flower apps. One is written as Flower's examples for transformers and PEFT are: every message loads the model with
``from_pretrained``, wraps it, takes the adapter's state in and gives it back; in its favour the rows stay tokenised.
The other one keeps the model in its actor too, which no example does. Both train by the same plain loop. A round is
from sending the first message to having the mean, and the first one does not count. fedfm's rounds run before Flower's
and again after them, and count together: Ray keeps its actors, so that the two cannot take turns, and a machine that
others use gets slower and faster. One round over ten clients has to give the same mean on both sides, to 1e-4.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import lora
import numpy as np
import torch

from fedfm import seeds
from fedfm.aggregation.base import Aggregator
from fedfm.core.client import Client, ClientData
from fedfm.core.federation import Federation
from fedfm.core.rows import Rows
from fedfm.engines.local.engine import LocalLink
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.runtime.client import Silos
from fedfm.training import AdamW
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client

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
        self.client_model = self.model
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


def ours(options: Any, kernels: str) -> tuple[list[float], Params]:
    """Wall-clock seconds of fedfm's warm rounds, and the last mean."""
    everyone = people(options.clients, options.rows)
    everyone.model.kernels = kernels
    method = FedAvg(local=LOCAL, fraction=options.cohort / options.clients)
    silos = Silos(method, Aggregator(), everyone, memory=common.scratch())
    link = LocalLink(silos, workers=os.cpu_count() or 1)
    try:
        fed = Federation(link, model=everyone.model, aggregator=Aggregator())
        fed.begin(0)
        w, seconds = method.init(fed), []
        for t in range(1, options.rounds + 2):
            fed.begin(t)
            start = time.perf_counter()
            w = method.step(fed, w, t)
            seconds.append(time.perf_counter() - start)
    finally:
        link.close()
    return seconds[1:], w


def theirs(options: Any, keep: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Wall-clock seconds of the warm rounds of Flower's simulation, and the last mean.

    Args:
        keep: actors keep the model between messages.
    """
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
        out, n = flower_lora.train_one(clients, rows, number, round_, arrays, keep)
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

    final: dict[str, torch.Tensor] = {}

    @server.main()
    def main(grid: Any, context: Any) -> None:
        strategy = Timed(fraction_train=options.cohort / clients, fraction_evaluate=0.0, min_available_nodes=clients)
        start = people(clients, rows).model.params().state() if keep else adapter(fresh(clients, rows))
        done = strategy.start(grid, ArrayRecord(dict(start)), num_rounds=options.rounds + 1)
        final.update(done.arrays.to_torch_state_dict())

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=clients, backend_config=resources)
    return [stop - start for start, stop in zip(stamps[::2], stamps[1::2], strict=True)][1:], final


def fresh(clients: int, rows: int) -> Any:
    """The model as a message handler of Flower's examples makes it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    spec = people(clients, rows).model.spec
    classes = len(people(clients, rows).model.classes)
    net = AutoModelForSequenceClassification.from_pretrained(spec.name, num_labels=classes)
    return get_peft_model(net, LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"]))


def adapter(net: Any) -> dict[str, torch.Tensor]:
    """What travels of a PEFT model."""
    from peft import get_peft_model_state_dict

    return {name: tensor.detach().cpu().clone() for name, tensor in get_peft_model_state_dict(net).items()}


def train_one(
    clients: int, rows: int, number: int, round_: int, arrays: dict[str, torch.Tensor], keep: bool
) -> tuple[dict[str, torch.Tensor], int]:
    """One client's epoch by the hand-written loop; in an actor of Ray."""
    everyone = people(clients, rows)
    name = everyone.clients[number]
    data = everyone.data(name)
    job = Job(
        Client(name, data, everyone.model, {}, seeds.derive(0, "client", round_, name), trainer=train_client),
        Params(arrays),
        LOCAL,
    )
    if keep:
        (out,) = everyone.written.train([job])
        return out.state(), len(data.train)
    from peft import set_peft_model_state_dict

    net = fresh(clients, rows)
    set_peft_model_state_dict(net, arrays)
    optimiser = torch.optim.AdamW(
        (p for p in net.parameters() if p.requires_grad), lr=LOCAL.learning_rate, weight_decay=LOCAL.weight_decay
    )
    for index in job.orders():
        optimiser.zero_grad()
        net(**data.train.batch(index)).loss.backward()
        optimiser.step()
    return adapter(net), len(data.train)


def agreement(options: Any) -> float:
    """Largest difference of the means that fedfm and Flower reach in one round of ten clients, 16 rows each."""
    small = argparse.Namespace(**{**vars(options), "clients": 10, "cohort": 10, "rounds": 0, "rows": 16})
    _, w = ours(small, "exact")
    _, theirs_ = theirs(small, keep=True)
    return max(float((theirs_[name] - tensor).abs().max()) for name, tensor in w.items())


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
    names = {f"fedfm, {kernels}": kernels for kernels in ("exact", "fast", "fast_bf16")}
    seconds = {name: ours(options, kernels)[0] for name, kernels in names.items()}
    apart = agreement(options)
    if apart > 1e-4:
        raise SystemExit(f"the means of fedfm and Flower differ by {apart}")
    kept, written = theirs(options, keep=True)[0], theirs(options, keep=False)[0]
    seconds = {name: seconds[name] + ours(options, kernels)[0] for name, kernels in names.items()}
    by_kept, by_written = (
        {name: statistics.median(peer) / statistics.median(s) for name, s in seconds.items()}
        for peer in (kept, written)
    )
    rows: list[dict[str, Any]] = [
        {"engine": name, "wall seconds a round": spread(peer)}
        for name, peer in (
            ("Flower's simulation, as its examples are written", written),
            ("Flower's simulation, the model kept in the actors", kept),
        )
    ]
    rows += [
        {
            "engine": name,
            "wall seconds a round": spread(s),
            "times Flower as written": round(by_written[name], 2),
            "times Flower, model kept": round(by_kept[name], 2),
        }
        for name, s in seconds.items()
    ]
    table = {
        "title": f"LoRA r = 8 of MiniLM on banking77, {options.cohort} of {options.clients} clients a round, "
        f"{options.rows or 'all'} rows each, {os.cpu_count()} cores",
        "rows": rows,
    }
    goals = [
        common.goal("times Flower's simulation as its examples are written, float32", by_written["fedfm, fast"], 4.5),
        common.goal("times Flower's simulation as its examples are written, bf16", by_written["fedfm, fast_bf16"], 8),
    ]
    notes = [f"One round of ten clients: the means of fedfm and of Flower differ by at most {apart:.1g}."]
    common.emit("Federated LoRA compared with Flower", [table], goals, notes)


if __name__ == "__main__":
    main()
