"""Heads on cached features: fedfm's rounds compared with a plain PyTorch loop, pfl-research, and Ray's messages alone.

    python benchmarks/heads.py
    python benchmarks/heads.py --rows 2000

Every client trains a linear head on features that are there already; the backbone runs for nobody. In turn, on one
thread: a whole round of fedfm's FedAvg over all clients (messages, validation, transcript and mean included), the same
clients in a loop of ``nn.Linear``, ``torch.optim.SGD`` and ``cross_entropy`` with the mean of their weights, and a
central iteration of pfl-research where it is installed. Each has five rounds a turn, as a run's follow one another: a
single one finds in the caches what another had there. fedfm and the loop see the same mini-batches, and their means
have to agree. Ratios are of CPU seconds. The last column sets a client-round of fedfm against what Flower's simulation
takes to move the same head to a client that does nothing and back.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common
import messages
import numpy as np
import torch
from torch.nn import functional

from fedfm import seeds
from fedfm.aggregation.base import Aggregator
from fedfm.config.experiment import Experiment
from fedfm.core.client import Client, Update, on_client
from fedfm.core.federation import Federation
from fedfm.engines.local.engine import LocalLink
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.runtime.client import Silos
from fedfm.runtime.population import populate
from fedfm.training import SGD

ROUNDS = 5  # a turn


def plain_loop(population: Any, local: Any, initial: Params) -> Callable[[], dict[str, torch.Tensor]]:
    """One round over all clients as one writes it without a framework."""
    names = dict(zip(("weight", "bias"), sorted(initial, key=lambda n: not n.endswith("weight")), strict=True))
    classes, width = initial[names["weight"]].shape
    net = torch.nn.Linear(width, classes)
    start = {short: initial[name].clone() for short, name in names.items()}
    data = [(c, population.data(c).train) for c in population.clients]

    def run() -> dict[str, torch.Tensor]:
        total, mean = 0, {short: torch.zeros_like(tensor) for short, tensor in start.items()}
        for client, rows in data:
            x, y, n = rows.tensors["features"], rows.labels, len(rows)
            net.load_state_dict(start)
            optimiser = torch.optim.SGD(net.parameters(), lr=local.learning_rate)
            rng = seeds.generator(seeds.derive(0, "client", 1, client), "batches")
            for _ in range(local.epochs):
                order = torch.from_numpy(rng.permutation(n))
                for at in range(0, n, local.batch_size):
                    index = order[at : at + local.batch_size]
                    optimiser.zero_grad()
                    functional.cross_entropy(net(x[index]), y[index]).backward()
                    optimiser.step()
            for short, tensor in net.state_dict().items():
                mean[short].add_(tensor, alpha=n)
            total += n
        return {names[short]: tensor / total for short, tensor in mean.items()}

    return run


def pfl_round(population: Any, local: Any, initial: Params) -> Callable[[], Any]:
    """A central iteration of pfl-research's FedAvg over all clients; raises ImportError where it is not installed."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    class Head(torch.nn.Linear):
        def loss(self, x: Any, y: Any, eval: bool = False) -> Any:
            return functional.cross_entropy(self(x), y)

        def metrics(self, x: Any, y: Any, eval: bool = False) -> dict[str, Any]:
            return {}

    weight = next(t for n, t in initial.items() if n.endswith("weight"))
    net = Head(weight.shape[1], weight.shape[0])
    central = torch.optim.SGD(net.parameters(), lr=1.0)
    model = PyTorchModel(net, local_optimizer_create=torch.optim.SGD, central_optimizer=central)
    users = {}
    for client in population.clients:
        rows = population.data(client).train
        users[client] = Dataset((rows.tensors["features"], rows.labels), user_id=client)
    dataset = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(users)))
    backend = SimulatedBackend(training_data=dataset, val_data=dataset)
    train = NNTrainHyperParams(
        local_learning_rate=local.learning_rate, local_num_epochs=local.epochs, local_batch_size=local.batch_size
    )
    algorithm = FederatedAveraging()
    settings = NNAlgorithmParams(
        central_num_iterations=1 << 30, evaluation_frequency=1 << 30, train_cohort_size=len(users), val_cohort_size=None
    )

    def run() -> None:
        contexts, _, _ = algorithm.get_next_central_contexts(
            model, 1, settings, train, NNEvalHyperParams(local_batch_size=None)
        )
        for context in contexts:
            gathered, metrics = backend.gather_results(model, algorithm, central_context=context)
            algorithm.process_aggregated_statistics(context, metrics, model, gathered)

    return run


def products_alone(population: Any, batch_size: int, epochs: int, weight: torch.Tensor) -> float:
    """Seconds a client of nothing but the loop's two products a step, for 40 clients at once and rows that need not be
    gathered: about the least that stepping on the weights takes on this machine, with nothing sent or received.
    """
    n, (classes, width) = len(population.data(population.clients[0]).train), weight.shape
    w = torch.randn(40, classes, width)
    sizes = [min(batch_size, n - at) for at in range(0, n, batch_size)]
    batches = [(torch.randn(40, size, width), torch.randn(40, classes, size)) for size in sizes]

    def run() -> None:
        for _ in range(epochs):
            for x, e in batches:
                torch.bmm(w, x.transpose(1, 2))
                w.baddbmm_(e, x, alpha=-1e-6)

    return common.median(common.interleave({"products": run}, 5)["products"]) / 40


@dataclass(frozen=True)
class Nothing(FedAvg):
    """FedAvg whose clients send back what they were sent."""

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        return Update(w, len(client.data.train))


def messages_alone(population: Any, initial: Params) -> float:
    """Seconds a client-round in which nobody trains: delivery, validation, transcript and mean."""
    method = Nothing(fraction=1.0)
    silos = Silos(method, Aggregator(), population, memory=common.scratch())
    fed = Federation(LocalLink(silos), model=population.model, aggregator=Aggregator())

    def run() -> None:
        fed.begin(1)
        method.step(fed, initial, 1)
        fed.transcript.drain()

    return common.median(common.interleave({"messages": run}, 15)["messages"]) / len(population.clients)


def several(run: Callable[[], Any]) -> Callable[[], None]:
    """A turn's rounds."""

    def rounds() -> None:
        for _ in range(ROUNDS):
            run()

    return rounds


def measure(
    title: str, tables: Mapping[str, Any], settings: Sequence[tuple[int, int]], turns: int
) -> tuple[list[dict[str, Any]], int, list[str]]:
    """Rows of the table, the number of floats of the head, and notes."""
    population = populate(Experiment.from_dict(tables))
    for client in population.clients:
        population.data(client).train  # noqa: B018 - the backbone runs here, once
    rows, notes = [], []
    for batch_size, epochs in settings:
        method = FedAvg(local=SGD(learning_rate=0.1, batch_size=batch_size, epochs=epochs), fraction=1.0)
        silos = Silos(method, Aggregator(), population, memory=common.scratch())
        fed = Federation(LocalLink(silos), model=population.model, aggregator=Aggregator())
        state = method.init(fed)

        def ours(fed: Federation = fed, method: Any = method, state: Any = state) -> Params:
            fed.begin(1)
            out = method.step(fed, state, 1)
            fed.transcript.drain()
            return out  # type: ignore[no-any-return]

        loop = plain_loop(population, method.local, fed.initial)
        variants: dict[str, Callable[[], Any]] = {"fedfm": ours, "loop": loop}
        try:
            variants["pfl"] = pfl_round(population, method.local, fed.initial)
        except ImportError as error:
            notes.append(f"pfl-research is left out: {error}.")
        apart = max(float((ours()[n] - t).abs().max()) for n, t in loop().items())
        if apart > 1e-4:
            raise SystemExit(f"{title}: fedfm and the loop differ by {apart}")
        times = common.interleave({name: several(run) for name, run in variants.items()}, turns)
        count = ROUNDS * len(population.clients)
        weight = next(t for n, t in fed.initial.items() if n.endswith("weight"))
        each = len(population.data(population.clients[0]).train)
        products = products_alone(population, batch_size, epochs, weight)
        sent = messages_alone(population, fed.initial)
        rows.append(
            {
                "clients": f"{title}, {len(population.clients)} of about {each} rows",
                "head": "x".join(map(str, weight.shape[::-1])),
                "B, E": f"{batch_size}, {epochs}",
                "fedfm, client updates a CPU second": count / common.median(times["fedfm"]),
                "loop": count / common.median(times["loop"]),
                "ratio to the loop": common.ratio(times["loop"], times["fedfm"]),
                "pfl-research": count / common.median(times["pfl"]) if "pfl" in times else None,
                "the same products alone, us": round(1e6 * products),
                "the messages alone, us": round(1e6 * sent),
                "ratio to the loop of both": round(common.median(times["loop"]) / count / (products + sent), 1),
                "ratio to pfl-research": common.ratio(times["pfl"], times["fedfm"]) if "pfl" in times else None,
                "wall us a client-round": round(1e6 * common.median(times["fedfm"], 0) / count),
                "MiB added, fedfm and loop": f"{common.added_mib(ours)}, {common.added_mib(loop)}",
                "largest difference": f"{apart:.1g}",
            }
        )
    return rows, sum(fed.initial.layout.sizes.values()), notes


def main() -> None:
    options = common.arguments(
        __doc__,
        turns={"type": int, "default": 15},
        rows={"type": int, "default": 2000, "help": "training rows of banking77, 100 a client"},
        skip_ray={"action": "store_true", "help": "without Flower's simulation"},
    )
    torch.set_num_threads(1)
    np.random.seed(0)  # noqa: NPY002 - pfl-research draws from it
    turns = 3 if options.quick else options.turns
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    floats = 0
    settings = [(16, 1), (32, 1), (10, 5)]
    for title, clients, make in (
        ("digits, nano-vit", 40, common.digits),
        ("banking77, MiniLM", (500 if options.quick else options.rows) // 100, common.banking77),
    ):
        try:
            tables = make(clients)
        except FileNotFoundError as error:
            notes.append(f"{title} is left out: {error}.")
            continue
        if title.startswith("banking"):
            tables["data"]["limit"] = clients * 100
        more, floats, said = measure(title, tables, settings, turns)
        rows += more
        notes += [n for n in said if n not in notes]
    tables_out = [{"title": "Heads on cached features, one thread", "rows": rows}]
    goals = [
        common.goal(f"times the loop, {r['clients']}, B, E = {r['B, E']}", r["ratio to the loop"]["median"], least=5.0)
        for r in rows
    ]
    if not options.skip_ray:
        try:
            spent = messages.ray_rounds(floats, 100, 3 if options.quick else 8)
            alone = statistics.median(spent)
            against = []
            for r in rows:
                mine = r["wall us a client-round"] / 1e6
                by_round = [s / mine for s in spent]
                against.append(
                    {
                        "clients": r["clients"],
                        "B, E": r["B, E"],
                        "fedfm, wall us, training included": r["wall us a client-round"],
                        "Ray, wall us, messages alone": round(1e6 * alone),
                        "ratio of the products and messages alone": round(
                            1e6 * alone / (r["the same products alone, us"] + r["the messages alone, us"]), 1
                        ),
                        "ratio": {
                            "median": round(alone / mine, 1),
                            "min": round(min(by_round), 1),
                            "max": round(max(by_round), 1),
                        },
                    }
                )
                goals.append(
                    common.goal(
                        f"times Ray's messages alone, {r['clients']}, B, E = {r['B, E']}", alone / mine, least=50.0
                    )
                )
            tables_out.append({"title": "Compared with the messages of Flower's simulation", "rows": against})
        except ImportError as error:
            notes.append(f"Flower's simulation is left out: {error} (extra bench).")
    notes.append("pfl-research takes each client's rows in their order; fedfm and the loop shuffle them each epoch.")
    notes.append("Ray's messages ran after the rest, not in turn with it; those ratios are of wall-clock times.")
    common.emit("Heads on cached features", tables_out, goals, notes)


if __name__ == "__main__":
    main()
