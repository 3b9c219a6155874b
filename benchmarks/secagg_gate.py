"""Secure aggregation: every number of clients, message, number of dropouts and seed; and servers that cheat.

    python benchmarks/secagg_gate.py              3, 5, 10 and 20 clients, ten seeds
    python benchmarks/secagg_gate.py --quick      two seeds, 3 and 5 clients

*Sums*: at each message up to n - t of n clients drop out, whose request or reply is lost. The sum of those who sent a
masked update must be exact up to the step of the fixed-point numbers. *Attacks*: each must end with a refusal that
names a client or the reason, and without a sum. *Masks*: masked zeros of all runs are uniform, and no two share a mask.
What a client keeps lies in memory.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import common
import numpy as np
import torch
from scipy import stats
from secagg import Direct, Nothing, Ready

from fedfm.aggregation import _secagg_keys as side
from fedfm.aggregation.secure import Secure
from fedfm.core.client import Update
from fedfm.core.federation import Federation
from fedfm.core.messages import Reply, Request
from fedfm.errors import ClientFault, RunError
from fedfm.linalg.params import Params
from fedfm.privacy.crypto import keys

MESSAGES = ("keys", "share", "hold", "give", "consent", "unmask")
SIZE = 60
Change = Callable[[Request], Request]


class Between(Direct):
    """A link that drops and changes messages; errors of clients become faults.

    Attributes:
        lost, late: {message: clients} whose request, or reply, does not arrive.
    """

    def __init__(self, updates: dict[str, Update], secure: Secure) -> None:
        super().__init__(updates, secure)
        self.lost: dict[str, set[str]] = {}
        self.late: dict[str, set[str]] = {}
        self.change: Change = lambda request: request
        self.reply: Callable[[str, Reply], Reply] = lambda message, reply: reply
        self.faults: list[str] = []
        self.masked: list[Any] = []
        self.sent: list[Request] = []

    def exchange(self, requests: Sequence[Request]) -> Iterator[Reply]:
        message = requests[0].handler.rpartition("_")[2]
        for request in requests:
            if request.client in self.lost.get(message, ()):
                continue
            request = self.change(request)
            self.sent.append(request)
            try:
                (reply,) = super().exchange([request])
            except ClientFault as fault:
                self.faults.append(fault.reason)
                reply = Reply(request.client, None, request.round, request.call, fault=fault)
            if message == "give" and reply.fault is None:
                self.masked.append(reply.value.body)
            if request.client not in self.late.get(message, ()):
                yield self.reply(message, reply)


class Case:
    """A federation of n clients with updates of one seed."""

    def __init__(self, n: int, seed: int, threshold: float = 0.67, scale: float = 1.0) -> None:
        rng = np.random.default_rng([n, seed])
        self.updates = {
            f"c{i:02d}": Update(
                Params({"w": torch.from_numpy(rng.normal(0, scale, SIZE).astype(np.float32))}),
                float(rng.integers(1, 2000)) / 2,
            )
            for i in range(n)
        }
        self.names = list(self.updates)
        self.link = Between(self.updates, Secure(threshold=threshold))
        self.fed = Federation(self.link, model=Nothing(), aggregator=self.link.aggregator)  # type: ignore[arg-type]
        self.t = 0

    def sum(self) -> Params:
        self.t += 1
        self.fed.begin(self.t)
        like = next(iter(self.updates.values())).delta.layout
        return self.fed.mean(Ready().give, like=like)

    def exact(self, alive: set[str]) -> bool:
        """Whether the next sum is that of these clients."""
        found = self.sum()["w"].double().numpy()
        of = [self.updates[name] for name in sorted(alive)]
        weights = np.array([u.weight for u in of])
        right = np.average([u.delta["w"].double().numpy() for u in of], axis=0, weights=weights)
        step = len(self.names) * 2.0**28 / 2**62
        most = len(of) * step / 2 / weights.sum() + 2.0**-23 * np.abs(right).max()  # and float32's rounding
        return self.fed.heard == len(of) and bool(np.abs(found - right).max() <= most)


def sums(numbers: Sequence[int], seeds: int) -> list[dict[str, Any]]:
    """Exact sums among the cases, by number of clients and message."""
    rows = []
    for n, threshold, message in itertools.product(numbers, (0.5, 0.67), MESSAGES):
        least, cases, right = side.least_of(threshold, n), 0, 0
        for drops, seed in itertools.product(range(n - least + 1), range(seeds)):
            for way in ("lost", "late"):
                if drops and n - drops < 3 and message in ("keys", "share"):
                    continue  # two clients agree on no keys
                case = Case(n, seed, threshold)
                rng = np.random.default_rng([n, seed, drops, MESSAGES.index(message)])
                gone = [str(name) for name in rng.choice(case.names, drops, replace=False)]
                if rng.random() < 0.5 and message in ("give", "consent", "unmask"):
                    case.sum()  # with keys that were agreed before
                # Nobody's consent is needed without a dropout: the first of those who are gone sends no update.
                dead = set(gone[:1] if message == "consent" else ())
                getattr(case.link, way).update({"give": dead, message: set(gone) - dead})
                alive = set(case.names) - (dead or (set() if message in ("consent", "unmask") else set(gone)))
                cases, right = cases + 1, right + case.exact(alive)
        rows.append(
            {"clients": n, "threshold": threshold, "t": least, "message": message, "cases": cases, "exact": right}
        )
    return rows


def edit(message: str, client: str | None = None, **values: Any) -> Change:
    """Change entries of one message's payload, for one client or all."""

    def change(request: Request) -> Request:
        if request.handler.rpartition("_")[2] != message or client not in (None, request.client):
            return request
        new = {k: v(request.payload[k]) if callable(v) else v for k, v in values.items()}
        return request._replace(payload={**request.payload, **new})

    return change


def middle(case: Case) -> None:
    """The server puts its own keys in the place of c00's, after the first agreement."""
    case.sum()
    case.fed.process_memory.clear()
    own = keys.entropy(32)

    def change(request: Request) -> Request:
        if not request.handler.endswith("_share") or request.client == "c00":
            return request
        session = next(r.payload["session"] for r in reversed(case.link.sent) if r.handler.endswith("_keys"))
        terms = case.link.aggregator.transport._terms  # type: ignore[attr-defined]
        data = side.OwnKeys(keys.entropy(32), 16).public()
        card = keys.identity_of(own) + data + keys.sign(own, side.LABEL, "keys", terms, session, "c00", data)
        rows = request.payload["published"].clone()
        rows[0] = side.packed(card)
        return request._replace(payload={**request.payload, "published": rows})

    case.link.change = change


def replayed(case: Case) -> None:
    """The server shows everybody the others' keys of an earlier agreement."""
    case.sum()
    old = next(r.payload["published"] for r in case.link.sent if r.handler.endswith("_share"))
    case.fed.process_memory.clear()

    def change(request: Request) -> Request:
        if not request.handler.endswith("_share"):
            return request
        rows, at = old.clone(), case.names.index(request.client)
        rows[at] = request.payload["published"][at]
        return request._replace(payload={**request.payload, "published": rows})

    case.link.change = change


def _without(request: Request, at: int) -> Request:
    status = request.payload["status"].clone()
    status[at] = side.DEAD
    return request._replace(payload={**request.payload, "status": status, "seals": request.payload["seals"][1:]})


def views(case: Case) -> None:
    """The last client dropped out; to every second other client the server says that c00 did, too."""
    case.link.late["give"] = {case.names[-1]}
    told = set(case.names[2::2])

    def change(request: Request) -> Request:
        here = request.handler.rpartition("_")[2] in ("consent", "unmask") and request.client in told
        return _without(request, 0) if here else request

    case.link.change = change


def shares(case: Case) -> None:
    """After a sum the server asks all for the other share of c00."""
    case.sum()
    asked = [_without(r, 0) for r in case.link.sent if r.handler.endswith("_unmask")]
    for request in asked:
        (reply,) = case.link.exchange([request])
        if reply.fault is None:
            return
    raise RunError("all refused")


def models(case: Case) -> None:
    """The server shows c02 another model than the others."""
    case.link.shown = lambda client: "another" if client == "c02" else "one"  # type: ignore[method-assign]


def vectors(case: Case) -> None:
    """The server asks for a second vector with the masks of a sum."""
    case.sum()
    case.fed.process_memory["SecAgg"].used = 0


def share(case: Case) -> None:
    """c00 reveals wrong shares."""

    def reply(message: str, found: Reply) -> Reply:
        wrong = message == "unmask" and found.client == "c00"
        return found._replace(value=found.value ^ 1) if wrong else found

    case.link.reply = reply


def cohort(case: Case) -> None:
    """The server asks for the sum of two clients alone."""
    two = torch.zeros(len(case.names), dtype=torch.uint8)
    two[:2] = 1
    case.link.change = edit("give", **{"+told": lambda told: replace(told, cohort=two)})


ATTACKS: dict[str, tuple[Callable[[Case], None], str]] = {
    "server in the middle": (middle, "c00 has another identity than before"),
    "replayed keys": (replayed, "not signed by it for this agreement"),
    "two lists of survivors": (views, ""),
    "both shares of one client": (shares, "another list of survivors than the one"),
    "two models": (models, "c02 was shown another model than c00"),
    "a second vector with the same masks": (vectors, "a masked update again"),
    "wrong share": (share, "a share is wrong"),
    "a cohort of two": (cohort, "a sum of 2 clients, expected 3 at least"),
}
_SPLIT = ("signed another list of survivors", "is no neighbour that survived", "expected")


def attacks(numbers: Sequence[int], seeds: int) -> list[dict[str, Any]]:
    rows = []
    for (name, (attack, reason)), n in itertools.product(ATTACKS.items(), (n for n in numbers if n > 3)):
        ended = named = 0
        for seed in range(seeds):
            case = Case(n, seed, threshold=0.5)
            try:
                attack(case)
                case.sum()
            except RunError as error:
                ended += 1
                said = [*case.link.faults, str(error)]
                named += any(any(part in text for part in ((reason,) if reason else _SPLIT)) for text in said)
        rows.append({"attack": name, "clients": n, "cases": seeds, "no sum": ended, "with the reason": named})
    return rows


def masked(runs: int) -> tuple[float, float, int]:
    """p-values of the bytes of masked zeros and of their differences, and equal words of two vectors."""
    found = []
    for seed in range(runs):
        case = Case(3, seed, scale=0.0)
        for _ in range(2):
            case.sum()
        found += [body.numpy() for body in case.link.masked]

    def p(words: list[np.ndarray]) -> float:
        counts = np.bincount(np.concatenate([w.view(np.uint8) for w in words]), minlength=256)
        return float(stats.chisquare(counts).pvalue)

    pairs = list(itertools.combinations(found, 2))
    return p(found), p([a - b for a, b in pairs]), sum(int((a == b).sum()) for a, b in pairs)


def main() -> None:
    options = common.arguments(__doc__)
    numbers, seeds = ((3, 5), 2) if options.quick else ((3, 5, 10, 20), 10)
    start = time.perf_counter()
    exact = sums(numbers, seeds)
    found = attacks(numbers, seeds)
    uniform, apart, equal = masked(4 if options.quick else 40)
    cases, right = (sum(row[key] for row in exact) for key in ("cases", "exact"))
    tries, refused = (sum(row[key] for row in found) for key in ("cases", "with the reason"))
    ended = sum(row["no sum"] for row in found)
    common.emit(
        "Secure aggregation: dropouts and attacks",
        [
            {"title": "Sums with up to n - t clients dropped out at a message", "rows": exact},
            {"title": "Attacks, threshold 0.5", "rows": found},
            {"title": "Masks", "rows": [{"p, bytes": uniform, "p, differences": apart, "equal words": equal}]},
        ],
        [
            common.goal("exact sums, of all", right / cases, least=1),
            common.goal("attacks without a sum, of all", ended / tries, least=1),
            common.goal("attacks with the reason, of all", refused / tries, least=1),
            common.goal("p-value of uniform bytes of masked zeros", min(uniform, apart), least=1e-6),
            common.goal("equal words of two masked vectors", equal, most=0),
        ],
        [f"{cases} sums and {tries} attacks in {time.perf_counter() - start:.0f} s."],
    )


if __name__ == "__main__":
    main()
