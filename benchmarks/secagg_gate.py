"""Secure aggregation: every number of clients, message, number of dropouts and seed; and servers that cheat.

    python benchmarks/secagg_gate.py              3, 5, 10 and 20 clients, ten seeds: about a quarter of an hour
    python benchmarks/secagg_gate.py --quick      two seeds, 3 and 5 clients
    python benchmarks/secagg_gate.py --out docs/results/secure-aggregation.md

*Sums*: at each message up to n - t of n clients drop out, whose request or reply is lost. The sum of those who sent a
masked update must be exact up to the step of the fixed-point numbers. With one dropout more there must be an error that
counts the clients, and no sum. *Attacks*: each must end with a refusal that names the attack, and without a sum.
*Masks*: masked zeros of all runs are uniform, and no two share a mask. What a client keeps lies in memory. The exit
status is 1 if a goal is missed.
"""

from __future__ import annotations

import datetime
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from scipy import stats
from secagg import Direct, Nothing, Ready
from secagg_page import page

from fedfm.aggregation import _secagg_keys as side
from fedfm.aggregation.secure import Secure
from fedfm.core.client import Update
from fedfm.core.federation import Federation
from fedfm.core.messages import Reply, Request
from fedfm.errors import ClientFault, RunError
from fedfm.linalg.params import Params
from fedfm.privacy.crypto import keys

MESSAGES = {
    "keys": "keys",
    "share": "share",
    "hold": "hold",
    "give": "masked update",
    "consent": "consent",
    "unmask": "unmask",
}
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

    def __init__(
        self, n: int, seed: int, threshold: float = 0.67, scale: float = 1.0, secure: Secure | None = None
    ) -> None:
        rng = np.random.default_rng([n, seed])
        self.updates = {
            f"c{i:02d}": Update(
                Params({"w": torch.from_numpy(rng.normal(0, scale, SIZE).astype(np.float32))}),
                float(rng.integers(1, 2000)) / 2,
            )
            for i in range(n)
        }
        self.names = list(self.updates)
        self.link = Between(self.updates, secure or Secure(threshold=threshold))
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
        most = len(of) * step / 2 / weights.sum() + 1.001 * 2.0**-24 * np.abs(right).max()  # and float32's rounding
        return self.fed.heard == len(of) and bool(np.abs(found - right).max() <= most)


def sums(numbers: Sequence[int], seeds: int) -> list[dict[str, Any]]:
    """Exact sums, and errors below the threshold, among the cases of a number of clients and a message."""
    rows = []
    for n, threshold, message in itertools.product(numbers, (0.5, 0.67), MESSAGES):
        least, cases, exact, below, ended = side.least_of(threshold, n), 0, 0, 0, 0
        most = n - least
        for drops, seed in itertools.product(range(most + 1), range(seeds)):
            if drops and n - drops < 3 and message in ("keys", "share"):
                continue  # two clients agree on no keys
            case, alive = case_with_dropouts(n, threshold, message, drops, seed)
            cases, exact = cases + 1, exact + case.exact(alive)
        beyond = n - 2 if message == "keys" else most + 1  # who is not there at the first message is not counted on
        for seed in range(seeds):
            below, ended = below + 1, ended + orderly(*case_with_dropouts(n, threshold, message, beyond, seed))
        row = {"clients": n, "threshold": threshold, "t": least, "message": message}
        rows.append(row | {"cases": cases, "exact": exact, "below": below, "ended": ended})
    return rows


def case_with_dropouts(n: int, threshold: float, message: str, drops: int, seed: int) -> tuple[Case, set[str]]:
    """A case with dropouts at a message, and whose sum the next one is; requests are lost, with odd seeds replies."""
    case = Case(n, seed, threshold)
    rng = np.random.default_rng([n, seed, drops, [*MESSAGES].index(message)])
    gone = [str(name) for name in rng.choice(case.names, drops, replace=False)]
    if rng.random() < 0.5 and message in ("give", "consent", "unmask"):
        case.sum()  # with keys that were agreed before
    # Nobody's consent is needed without a dropout: the first of those who are gone sends no update.
    dead = set(gone[:1] if message == "consent" else ())
    (case.link.late if seed % 2 else case.link.lost).update({"give": dead, message: set(gone) - dead})
    return case, set(case.names) - (dead or (set() if message in ("consent", "unmask") else set(gone)))


def orderly(case: Case, alive: set[str]) -> bool:
    """Whether the next sum is none, and an error counts the clients that are missing."""
    try:
        case.sum()
    except RunError as error:
        return any(part in str(error) for part in ("that hides them needs", "are needed", "gave a valid reply"))
    return False


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
    middle_of(case)


def middle_of(case: Case) -> None:
    """The server puts its own keys in the place of c00's, signed by itself."""
    own = keys.entropy(32)

    def change(request: Request) -> Request:
        if not request.handler.endswith("_share") or request.client == "c00":
            return request
        session = next(r.payload["session"] for r in reversed(case.link.sent) if r.handler.endswith("_keys"))
        terms = case.link.aggregator.transport._terms  # type: ignore[attr-defined]
        data = side.OwnKeys(keys.entropy(32), 16).public()
        card = keys.identity_of(own) + data + keys.sign(own, side.LABEL, "keys", terms, session, "c00", data)
        rows = request.payload["published"].clone()
        rows[0] = side.to_tensor(card)
        return request._replace(payload={**request.payload, "published": rows})

    case.link.change = change


def replay_keys(case: Case) -> None:
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
    told = set(case.names[1::2])

    def change(request: Request) -> Request:
        here = request.handler.rpartition("_")[2] in ("consent", "unmask") and request.client in told
        return _without(request, 0) if here else request

    case.link.change = change


def again(case: Case, message: str, change: Change = lambda request: request) -> None:
    """After a sum the server sends all clients their requests of one message again; ends if nobody answers."""
    case.sum()
    for request in [change(r) for r in case.link.sent if r.handler.endswith(f"_{message}")]:
        (reply,) = case.link.exchange([request])
        if reply.fault is None:
            return
    raise RunError("all refused")


def shares(case: Case) -> None:
    """The server asks all for the other share of c00."""
    again(case, "unmask", lambda request: _without(request, 0))


def twice(case: Case) -> None:
    """The server asks all for the same shares."""
    again(case, "unmask")


def seeds_again(case: Case) -> None:
    """The server asks all to deal their seeds to the neighbours again."""
    again(case, "share")


def models(case: Case) -> None:
    """The server shows c02 another model than the others."""
    case.link.broadcast = lambda client: "another" if client == "c02" else "one"  # type: ignore[method-assign]


def replayed_round(case: Case) -> None:
    """The server repeats a round's train messages with another model."""

    def change(request: Request) -> Request:
        case.link.broadcast = lambda client: "another"  # type: ignore[method-assign]
        return request

    again(case, "give", change)


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


def minimum(case: Case) -> None:
    """Silos want sums of all clients; one drops out, and the server asks for the sum of the others."""
    for client in case.link.of.values():
        client.smallest_cohort = len(case.names)
    case.sum()
    case.link.late["give"] = {case.names[1]}


def stand_between_with_rosters(case: Case) -> None:
    """The server is in the middle from the first message on; silos have a roster."""
    private = {name: keys.entropy(32) for name in case.names}
    for name, client in case.link.of.items():
        client.identity = private[name]
        client.roster = {other: keys.identity_of(key) for other, key in private.items()}
    middle_of(case)


ATTACKS: dict[str, tuple[Callable[[Case], None], tuple[str, ...]]] = {
    "server in the middle, after a first agreement": (middle, ("c00 has another identity than before",)),
    "server in the middle, with rosters": (stand_between_with_rosters, ("the server shows a key of c00",)),
    "replayed keys": (replay_keys, ("did not sign its keys for this agreement",)),
    "seeds dealt again": (seeds_again, ("shares of seeds again",)),
    "two lists of survivors": (
        views,
        # Of three clients two are left, and the second list would have one.
        (
            "signed another list of survivors",
            "is not a member that survived",
            "the sum has 1 clients, expected at least 2",
        ),
    ),
    "both shares of one client": (shares, ("agreed to another list of survivors",)),
    "the same shares again": (twice, ("requested shares for sum 0 again",)),
    "two models": (models, ("c02 received another model than c00",)),
    "a replayed round with another model": (replayed_round, ("requested a masked update for sum 0 again",)),
    "a second vector with the same masks": (vectors, ("requested a masked update for sum 0 again",)),
    "wrong share": (share, ("a share is wrong",)),
    "a cohort of two": (cohort, ("the sum has 2 clients, expected at least 3",)),
    "fewer survivors than a silo's minimum": (minimum, ("expected at least {n}",)),
}


def attacks(numbers: Sequence[int], seeds: int) -> list[dict[str, Any]]:
    """Attacks that ended without a sum, and with their name in a refusal."""
    rows = []
    for (name, (attack, reasons)), n in itertools.product(ATTACKS.items(), numbers):
        ended = named = 0
        for seed in range(seeds):
            case = Case(n, seed, threshold=0.5)
            try:
                attack(case)
                case.sum()
            except RunError as error:
                ended += 1
                said = [*case.link.faults, str(error)]
                named += any(reason.format(n=n) in text for reason in reasons for text in said)
        rows.append({"attack": name, "clients": n, "cases": seeds, "no sum": ended, "with the reason": named})
    return rows


def mask_statistics(runs: int, secure: Secure) -> dict[str, Any]:
    """p-values of the bytes of masked zeros and of their differences, and equal words of two vectors."""
    found = []
    for seed in range(runs):
        case = Case(3, seed, secure.threshold, scale=0.0, secure=secure)
        for _ in range(2):
            case.sum()
        found += [body.numpy() for body in case.link.masked]

    def p(words: list[np.ndarray]) -> float:
        counts = np.bincount(np.concatenate([w.view(np.uint8) for w in words]), minlength=256)
        return float(stats.chisquare(counts).pvalue)

    pairs = list(itertools.combinations(found, 2))
    equal = sum(int((a == b).sum()) for a, b in pairs)
    words = sum(len(a) for a, _ in pairs)
    expected = words / 2.0 ** (8 * found[0].itemsize)
    table = {"bits": 8 * found[0].itemsize, "vectors": len(found), "p, bytes": p(found)}
    table["p, differences"] = p([a - b for a, b in pairs])
    return table | {"pairs of words": words, "equal": equal, "p, equal": float(stats.poisson.sf(equal - 1, expected))}


def drop_table(exact: list[dict[str, Any]], did: str, of: str) -> list[dict[str, Any]]:
    """A row a number of clients and a threshold, a column a message."""
    rows: dict[tuple[int, float], dict[str, Any]] = {}
    for row in exact:
        key = row["clients"], row["threshold"]
        start = {name: row[name] for name in ("clients", "threshold", "t")}
        rows.setdefault(key, start)[MESSAGES[row["message"]]] = f"{row[did]} of {row[of]}"
    return list(rows.values())


def main() -> None:
    options = common.arguments(__doc__, out={"type": Path, "help": "a page for the documents, and its JSON beside it"})
    numbers, seeds = ((3, 5), 2) if options.quick else ((3, 5, 10, 20), 10)
    start = time.perf_counter()
    exact = sums(numbers, seeds)
    found = attacks(numbers, seeds)
    runs = 4 if options.quick else 40
    kinds = [mask_statistics(runs, Secure()), mask_statistics(runs, Secure(compact=True, bound=1e6))]
    total = {key: sum(row[key] for row in exact) for key in ("cases", "exact", "below", "ended")}
    tries, refused = (sum(row[key] for row in found) for key in ("cases", "with the reason"))
    stopped = sum(row["no sum"] for row in found)
    tables = [
        {"title": "Exact sums with up to n - t dropouts at a message", "rows": drop_table(exact, "exact", "cases")},
        {
            "title": "Errors that count the clients, with one dropout more",
            "rows": drop_table(exact, "ended", "below"),
        },
        {"title": "Attacks, threshold 0.5", "rows": found},
        {"title": "Masked zeros", "rows": kinds},
    ]
    least = min(row[key] for row in kinds for key in ("p, bytes", "p, differences", "p, equal"))
    goals = [
        common.goal("exact sums, of all", total["exact"] / total["cases"], least=1),
        common.goal("errors below the threshold, of all", total["ended"] / total["below"], least=1),
        common.goal("attacks without a sum, of all", stopped / tries, least=1),
        common.goal("attacks with the reason, of all", refused / tries, least=1),
        common.goal("smallest p-value of the masks, in millionths", 1e6 * least, least=1),
    ]
    spent = time.perf_counter() - start
    notes = [f"{total['cases'] + total['below']} sums and {tries} attacks in {spent:.0f} s."]
    title = "Secure aggregation: dropouts and attacks"
    common.emit(title, tables, goals, notes)
    if options.out is not None:
        command = "python benchmarks/secagg_gate.py" + (" --quick" if options.quick else "")
        result = {"title": title, "command": command, "tables": tables, "goals": goals, "notes": notes}
        result |= {"machine": common.machine(), "versions": common.versions()}
        result["date"] = datetime.date.today().isoformat()
        options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        options.out.write_text(page(result))
    sys.exit(not all(goal["met"] for goal in goals))


if __name__ == "__main__":
    main()
