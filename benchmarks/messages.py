"""The cost of a message to a client and its reply, without training: the local engine, and Flower's simulation on Ray.

    python benchmarks/messages.py
    python benchmarks/messages.py --skip-ray

1,000 clients whose handler returns what it was sent: nothing, or a million floats. One worker, so tensors pass by
reference. fedfm's time covers the whole ``Federation.exchange``: requests, silos, byte counts, transcript,
validation. The scan for NaN, infinity and absurd sizes reads every number and is shown on its own: the rows "without
values check" run with it switched off in the benchmark; a run never does. Flower's simulation runs a ClientApp that
returns the arrays it got, under FedAvg, as its examples do, in the same sitting, after fedfm; its first round, which
starts Ray, does not count.
"""

from __future__ import annotations

import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import common
import torch

from fedfm.aggregation.base import Aggregator
from fedfm.core.client import ClientData, on_client
from fedfm.core.federation import Federation
from fedfm.core.rows import Rows
from fedfm.engines.local.engine import LocalLink
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.runtime.client import Silos

MILLION = 1_000_000


@dataclass(frozen=True)
class Echo(FedAvg):
    """A client that returns what it was sent."""

    asks: ClassVar[tuple[str, ...]] = ("echo",)

    @on_client
    def echo(self, client: Any, w: Params | None) -> Params | None:
        return w


class Nobody:
    """A model and clients without rows."""

    def __init__(self, count: int) -> None:
        self.clients = [f"c{i:05d}" for i in range(count)]
        self.model = self.client_model = self
        self._data = ClientData(Rows, Rows, Rows)

    def params(self) -> Params:
        return Params({"w": torch.zeros(1)})

    def data(self, client: str) -> ClientData:
        return self._data


def federation(count: int, wire: bool = False) -> tuple[Echo, Federation]:
    method, people = Echo(), Nobody(count)
    silos = Silos(method, Aggregator(), people, memory=common.scratch())
    return method, Federation(LocalLink(silos, wire=wire), model=people, aggregator=Aggregator())


@contextmanager
def without_scan() -> Any:
    """Without the scan for NaN, infinity and absurd sizes; for measuring what it costs."""
    scan, Params.within = Params.within, lambda self, most: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        Params.within = scan  # type: ignore[method-assign]


def exchange(method: Echo, fed: Federation, w: Params | None) -> None:
    fed.begin(1)
    for _ in fed.exchange("query", method.echo, None, {"w": w}, Params | None):
        pass
    fed.transcript.drain()


def ray_rounds(size: int, clients: int, rounds: int) -> list[float]:
    """Wall-clock seconds a client-round of Flower's simulation, of every round after the first."""
    import numpy as np
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
    from flwr.simulation import run_simulation

    client, server, stamps = ClientApp(), ServerApp(), []

    @client.train()
    def train(message: Message, context: Any) -> Message:
        content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    class Timed(FlowerFedAvg):
        def configure_train(self, *args: Any, **more: Any) -> Any:
            stamps.append(time.perf_counter())
            return super().configure_train(*args, **more)

        def aggregate_train(self, *args: Any, **more: Any) -> Any:
            stamps.append(time.perf_counter())
            return super().aggregate_train(*args, **more)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=clients)
        strategy.start(grid, ArrayRecord([np.zeros(max(size, 1), np.float32)]), num_rounds=rounds + 1)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=clients, backend_config=resources)
    return [(stop - start) / clients for start, stop in zip(stamps[::2], stamps[1::2], strict=True)][1:]


def main() -> None:
    options = common.arguments(
        __doc__,
        clients={"type": int, "default": 1000},
        turns={"type": int, "default": 15},
        ray_clients={"type": int, "default": 100},
        skip_ray={"action": "store_true", "help": "without Flower's simulation"},
    )
    turns = 3 if options.quick else options.turns
    torch.set_num_threads(1)
    count = options.clients
    method, fed = federation(count)
    big = Params({"w": torch.randn(MILLION)})

    def plain(w: Params | None) -> None:
        with without_scan():
            exchange(method, fed, w)

    names = ("nothing", "a million floats, without values check", "a million floats")
    variants = {
        names[0]: lambda: exchange(method, fed, None),
        names[1]: lambda: plain(big),
        names[2]: lambda: exchange(method, fed, big),
    }
    times = common.interleave(variants, turns)
    rows = []
    for name, spent in times.items():
        each = [(1e6 * wall / count, 1e6 * cpu / count) for wall, cpu in spent]
        cpus = [cpu for _, cpu in each]
        rows.append(
            {
                "payload and reply": name,
                "CPU us a client-round": {k: round(v, 1) for k, v in _range(cpus).items()},
                "wall us": round(common.median(each, 0), 1),
            }
        )
    goals = [
        common.goal(
            f"us a client-round, {name}",
            rows[i]["CPU us a client-round"]["median"],
            most=20.0,  # type: ignore[index]
        )
        for i, name in enumerate(names[:2])
    ]
    scan = rows[2]["CPU us a client-round"]["median"] - rows[1]["CPU us a client-round"]["median"]  # type: ignore[index]
    notes = [f"The values check of a million floats (one norm of them) adds {scan:.0f} us of CPU time a client-round."]
    tables = [{"title": f"Messages on the local engine, {count} clients, one worker", "rows": rows}]
    ray: list[dict[str, Any]] = []
    if not options.skip_ray:
        for size, name, ours in ((0, "nothing", rows[0]), (MILLION, "a million floats", rows[2])):
            clients = min(options.ray_clients, 20) if size else options.ray_clients
            try:
                spent = ray_rounds(size, clients, 3 if options.quick else 8)
            except ImportError as error:
                notes.append(f"Flower's simulation is left out: {error} (extra bench).")
                break
            mine = float(ours["wall us"])  # type: ignore[arg-type]
            against = _range([1e6 * s / mine for s in spent])
            ray.append(
                {
                    "payload and reply": name,
                    "clients": clients,
                    "Flower simulation, wall ms a client-round": {
                        k: round(1e3 * v, 2) for k, v in _range(spent).items()
                    },
                    "fedfm, wall us, values checked": mine,
                    "ratio of wall-clock times": {k: round(v) for k, v in against.items()},
                }
            )
    if ray:
        tables.append({"title": "Compared with Flower's simulation (Ray), trivial clients", "rows": ray})
    common.emit("Messages", tables, goals, notes)


def _range(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


if __name__ == "__main__":
    main()
