"""Secure aggregation: a client's seconds and bytes, compared with the client functions of Flower's SecAgg+.

    python benchmarks/secagg.py
    python benchmarks/secagg.py --quick

Five clients, a million parameters, in one process and in turn. fedfm runs its whole protocol through a Federation whose
link calls the handlers directly and times them; what a client keeps stays in memory, not on a disk. Flower's functions
get the messages that its workflow makes. Bytes are those of the masked vector alone for Flower,
of all replies for fedfm. Then the cost of a client with 10,000 parameters against the number of clients.
"""

from __future__ import annotations

import io
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import common
import numpy as np
import torch

from fedfm.aggregation._secagg_keys import degree
from fedfm.aggregation.base import Aggregator
from fedfm.aggregation.secure import Secure
from fedfm.core.client import AGGREGATION_MESSAGE, Client, ClientData, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.messages import Reply, Request
from fedfm.core.rows import Rows
from fedfm.core.wire import payload as wire
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.privacy.crypto import keys
from fedfm.runtime.client import handlers
from fedfm.training.scheduler import train_client

CLIP, WEIGHT = 1.0, 1000
SETTINGS = Secure(compact=True, bound=CLIP * WEIGHT)


@dataclass(frozen=True)
class Ready(FedAvg):
    """Clients whose updates exist before they are asked."""

    means: ClassVar[tuple[str, ...]] = ("give",)

    @on_client
    def give(self, client: Client) -> Update:
        found: Update = client.memory["update"]
        return found


class Nothing:
    """A server's model without parameters."""

    def params(self) -> Params:
        return Params({"w": torch.zeros(1)})


class Direct:
    """A link that calls the clients' handlers, and counts their seconds and the bytes of their replies by message."""

    def __init__(self, updates: Mapping[str, Update], aggregator: Aggregator) -> None:
        data = ClientData(Rows, Rows, Rows)
        self.clients, self.aggregator = sorted(updates), aggregator
        self.seconds, self.bytes = Counter[str](), Counter[str]()
        parts = (Ready(), *aggregator.parts)
        self._handlers = {fn.__name__: fn for fn in handlers(*parts)}
        self.of: dict[str, Client] = {}
        self._broadcast = ("give", 1, next(iter(updates.values())).delta)
        for name, update in updates.items():
            firsts: dict[str, bytes] = {}
            secret = keys.entropy(32)
            client = Client(name, data, None, {"update": update}, 0, trainer=train_client)  # type: ignore[arg-type]
            client.secret, client.write_once = lambda name, secret=secret: secret, firsts.setdefault
            self.of[name] = client

    def broadcast(self, client: str) -> Any:
        """What a client's train message has for all alike: as many bytes as an update."""
        return self._broadcast

    def exchange(self, requests: Sequence[Request]) -> Iterator[Reply]:
        for request in requests:
            message = request.handler.rpartition("_")[2]
            client, payload = self.of[request.client], dict(request.payload)
            client.aggregation_message = payload.pop(AGGREGATION_MESSAGE, None)
            client.broadcast = self.broadcast(request.client)
            start = time.perf_counter()
            value = self._handlers[message](client, **payload)
            if message == "give":
                value = self.aggregator.protect(client, value)
            self.seconds[message] += time.perf_counter() - start
            self.bytes[message] += wire.size(value)[1]
            yield Reply(request.client, value, request.round, request.call)


def updates_of(clients: int, size: int) -> dict[str, Update]:
    rng = np.random.default_rng(0)
    found = {}
    for i in range(clients):
        delta = rng.normal(0, 0.05, size).clip(-CLIP, CLIP).astype(np.float32)
        found[f"c{i:04d}"] = Update(Params({"w": torch.from_numpy(delta)}), float(rng.integers(10, WEIGHT)))
    return found


class Ours:
    """A federation whose clients' seconds and bytes are counted."""

    def __init__(self, updates: Mapping[str, Update], aggregator: Aggregator) -> None:
        self.link, self.t = Direct(updates, aggregator), 0
        self.fed = Federation(self.link, model=Nothing(), aggregator=aggregator)  # type: ignore[arg-type]
        self.like = next(iter(updates.values())).delta.layout

    def sum(self) -> tuple[Params, float, int]:
        """The mean, seconds and bytes of one client."""
        self.link.seconds.clear()
        self.link.bytes.clear()
        self.t += 1
        self.fed.begin(self.t)
        mean = self.fed.mean(Ready().give, like=self.like)
        n = len(self.link.clients)
        return mean, sum(self.link.seconds.values()) / n, sum(self.link.bytes.values()) // n

    def sum_with_new_keys(self) -> tuple[Params, float, int]:
        """The same with keys that are agreed anew."""
        self.fed.process_memory.clear()
        return self.sum()


def flowers(updates: Mapping[str, Update]) -> tuple[np.ndarray, float, int]:
    """The mean by Flower's functions, seconds and bytes of the masked vectors of one client."""
    from flwr.common import ndarrays_to_parameters
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares
    from flwr.common.secure_aggregation.ndarrays_arithmetic import (
        factor_extract,
        parameters_addition,
        parameters_mod,
        parameters_subtraction,
    )
    from flwr.common.secure_aggregation.quantization import dequantize
    from flwr.common.secure_aggregation.secaggplus_constants import Key
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    theirs = import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")  # its package hides it by a function
    n = len(updates)
    settings = {
        Key.SAMPLE_NUMBER: n,
        Key.SHARE_NUMBER: n,
        Key.THRESHOLD: n // 2 + 1,
        Key.CLIPPING_RANGE: 8.0,
        Key.TARGET_RANGE: 1 << 22,
        Key.MOD_RANGE: 1 << 32,
        Key.MAX_WEIGHT: float(WEIGHT),
    }
    states = {i: theirs.SecAggPlusState() for i in range(n)}
    spent = 0.0

    def measure(fn: Callable[..., Any], *what: Any) -> Any:
        nonlocal spent
        start = time.perf_counter()
        found = fn(*what)
        spent += time.perf_counter() - start
        return found

    published = {}
    for i, state in states.items():
        state.nid = i
        found = measure(theirs._setup, state, settings)
        published[str(i)] = (found[Key.PUBLIC_KEY_1], found[Key.PUBLIC_KEY_2])
    inbox: dict[int, list[tuple[int, bytes]]] = {i: [] for i in states}
    for i, state in states.items():
        found = measure(theirs._share_keys, state, published)
        for to, text in zip(found[Key.DESTINATION_LIST], found[Key.CIPHERTEXT_LIST], strict=True):
            inbox[to].append((i, text))
    vectors, sent = [], 0
    for (i, state), update in zip(states.items(), updates.values(), strict=True):
        mail = {Key.SOURCE_LIST: [s for s, _ in inbox[i]], Key.CIPHERTEXT_LIST: [c for _, c in inbox[i]]}
        parameters = ndarrays_to_parameters([update.delta["w"].numpy()])
        found = measure(theirs._collect_masked_vectors, state, mail, int(update.weight), parameters)
        sent += sum(map(len, found[Key.MASKED_PARAMETERS]))
        vectors.append([np.load(io.BytesIO(x)) for x in found[Key.MASKED_PARAMETERS]])
    shares: dict[int, list[bytes]] = {i: [] for i in states}
    for state in states.values():
        found = measure(theirs._unmask, state, {Key.ACTIVE_NODE_ID_LIST: list(states), Key.DEAD_NODE_ID_LIST: []})
        for of, share in zip(found[Key.NODE_ID_LIST], found[Key.SHARE_LIST], strict=True):
            shares[of].append(share)
    total = vectors[0]
    for vector in vectors[1:]:
        total = parameters_addition(total, vector)
    shapes = [x.shape for x in total]
    for held in shares.values():
        total = parameters_subtraction(total, pseudo_rand_gen(combine_shares(held), 1 << 32, shapes))
    factor, total = factor_extract(parameters_mod(total, 1 << 32))
    (mean,) = dequantize(total, 8.0, 1 << 22)
    # As Flower's workflow: the quantised numbers carry an offset for each of the n clients.
    mean = (mean - (n - 1) * 8.0) / (factor / (1 << 22))
    return mean, spent / n, sent // n


def error(found: np.ndarray, updates: Mapping[str, Update]) -> float:
    """Root mean square error, in units of the mean's standard deviation."""
    weights = [u.weight for u in updates.values()]
    right = np.average([u.delta["w"].double().numpy() for u in updates.values()], axis=0, weights=weights)
    return float(np.sqrt(((found - right) ** 2).mean()) / right.std())


def main() -> None:
    options = common.arguments(__doc__)
    size, turns = (100_000, 2) if options.quick else (1_000_000, 7)
    updates = updates_of(5, size)
    masked, plain = Ours(updates, SETTINGS), Ours(updates, Aggregator())
    wide = Ours(updates, Secure())
    kinds: dict[str, Callable[[], Any]] = {
        "plain aggregation": plain.sum,
        "fedfm, first sum": masked.sum_with_new_keys,
        "fedfm, later sums": masked.sum,
        "fedfm, 64 bits, later sums": wide.sum,
        "Flower's SecAgg+": lambda: flowers(updates),
    }
    rows: dict[str, list[tuple[float, int, float]]] = {name: [] for name in kinds}
    for turn in range(turns + 1):
        for name, make in kinds.items():
            mean, seconds, sent = make()
            if turn:
                found = mean["w"].double().numpy() if isinstance(mean, Params) else mean
                rows[name].append((seconds, sent, error(found, updates)))
    theirs = rows["Flower's SecAgg+"]
    table = [
        {
            "": name,
            "ms a client": 1000 * statistics.median(s for s, _, _ in every),
            "share of Flower's": common.ratio([(s, s) for s, _, _ in every], [(s, s) for s, _, _ in theirs]),
            "MB up a client": every[-1][1] / 1e6,
            "relative error": float(f"{max(e for _, _, e in every):.1e}"),
        }
        for name, every in rows.items()
    ]
    scaling = []
    for n in (5, 20, 50) if options.quick else (5, 20, 100, 300, 1000):
        ours = Ours(updates_of(n, 10_000), SETTINGS)
        _, first, sent = ours.sum_with_new_keys()
        _, later, sent_later = min((ours.sum() for _ in range(3)), key=lambda found: found[1])
        row = {"clients": n, "neighbours": degree(0, n), "first, ms a client": 1000 * first, "kB": sent / 1e3}
        scaling.append(row | {"later, ms a client": 1000 * later, "later kB": sent_later / 1e3})
    ours_later, peer = table[2], table[4]
    neighbours = scaling[-1]["neighbours"] / scaling[2]["neighbours"]  # which are 4 ceil(log2 n)
    grown = scaling[-1]["later, ms a client"] / scaling[2]["later, ms a client"]
    common.emit(
        "Secure aggregation",
        [{"title": f"5 clients, {size:,} parameters", "rows": table}, {"title": "10,000 parameters", "rows": scaling}],
        [
            common.goal("time of a client, of Flower's", ours_later["share of Flower's"]["median"], most=0.25),
            common.goal(
                "time of a client in the first sum, of Flower's", table[1]["share of Flower's"]["median"], most=0.25
            ),
            common.goal(
                "bytes of a client, of Flower's", ours_later["MB up a client"] / peer["MB up a client"], most=0.51
            ),
            common.goal("relative error, in millionths", 1e6 * ours_later["relative error"], most=1),
            common.goal(
                "growth of a client's time in later sums from the third to the last number of clients, over that of "
                "the logarithm",
                grown / neighbours,
                most=1.5,
            ),
        ],
        [
            "Flower's error is with its defaults: clipping 8, 2^22 levels; ours with the bound of the updates.",
            "The first sum of an agreement costs time that grows with the number of clients: each checks the signed "
            "keys of all. It serves 16 sums.",
            "Of later sums with 10,000 parameters the fastest of three counts.",
        ],
    )


if __name__ == "__main__":
    main()
