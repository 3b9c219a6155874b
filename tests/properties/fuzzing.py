"""Damaged messages of every type that a server or a site takes; what may be accepted of them, and what it costs.

    python tests/properties/fuzzing.py --mutations 100000

prints a line a message type: how many were refused by code, how many were accepted (some damage leaves another valid
message), the longest time that one took, and by how much the process has grown. Any other outcome ends it with an
error. The suite runs a few thousand.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import math
import random
import resource
import string
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedfm.core import update_metrics
from fedfm.core.checks import conform, match, nonfinite
from fedfm.core.client import Update
from fedfm.core.federation import MAX_NORM
from fedfm.core.wire import codec, payload
from fedfm.errors import ClientFault
from fedfm.linalg.params import Params
from fedfm.methods.fedpft.encoding import MAX_ROW, pack
from fedfm.methods.fedpft.mixtures import Mixture
from fedfm.methods.fedpft.private import Noised
from fedfm.methods.fedpft.summary import Summary, checker, mixtures_of
from fedfm.methods.fedpft.topology import ForwardedSummary, PeerReply

CLASSES, D = 3, 4


@dataclass(frozen=True)
class Kind:
    """One type of message: a good one, its annotation, the method's own check, and what must hold of what passes."""

    good: Any
    hint: Any
    check: Callable[[Any], None] = lambda value: None
    valid: Callable[[Any], bool] = lambda value: True


def _update(update: Update) -> bool:
    named = all(len(name) <= update_metrics.LONGEST and name not in update_metrics.SERVERS for name in update.metrics)
    return 0 < update.weight <= 1e9 and len(update.metrics) <= update_metrics.MOST and named


def _summary(summary: Summary) -> bool:
    found = mixtures_of([summary])
    for label, count, mixture in found:
        mixture.check()
        row = float(np.square(mixture.means.astype(np.float64)).sum(1).max()) ** 0.5
        if not (0 <= label < CLASSES and count >= 1 and row <= MAX_ROW * 1.001):
            return False
    return len(found) == len(set(summary.labels))


def _noised(reply: Noised) -> None:
    shapes = [tuple(t.shape) for t in (reply.counts, reply.totals, reply.seconds)]
    if shapes != [(CLASSES,), (CLASSES, D), (CLASSES, 0)]:
        raise ClientFault("E_SHAPE", "noisy sums have wrong shapes")


def kinds() -> dict[str, Kind]:
    """Values of every kind of field, by name."""
    generator = torch.Generator().manual_seed(0)
    w = Params({"w": torch.randn(4, 3, generator=generator), "b": torch.zeros(3)})
    rng = np.random.default_rng(0)
    mixtures = [
        Mixture(np.full(2, 0.5), rng.normal(size=(2, D)).astype("f4"), rng.uniform(0.1, 1, (2, D)).astype("f4"))
        for _ in range(CLASSES)
    ]
    labels = list(range(CLASSES))
    summary = Summary(labels, [20, 30, 40], pack(mixtures, "float16"), [], 0, [0.5] * CLASSES, [0.1] * CLASSES)
    plain = Summary(labels, [20, 30, 40], pack(mixtures, "float32"), [])
    usable, bounded = checker(CLASSES, D), checker(CLASSES, D, bounded=True)
    head = functools.partial(match, like=w.layout, path="head")
    noised = Noised(torch.ones(CLASSES), torch.randn(CLASSES, D, generator=generator), torch.zeros(CLASSES, 0), 0)
    scores = {"n": 12, "accuracy": 0.5, "loss": None, "confusion": [[1, 2], [3, 4]], "labels": list("abcdefghij")}

    def passed(value: PeerReply) -> None:
        usable(value.summary)
        head(value.head)

    return {
        "update": Kind(
            Update(w, 5.0, {"loss": 0.5, "steps": 3.0}), Update, lambda u: match(u.delta, w.layout, "delta"), _update
        ),
        "parameters": Kind(w, Params, head, lambda value: value.layout == w.layout),
        "summary": Kind(plain, Summary, usable, _summary),
        "summary with bound": Kind(summary, Summary, bounded, _summary),
        "passed on": Kind(
            PeerReply(plain, w, {"head_iterations": 3.0}), PeerReply, passed, lambda value: _summary(value.summary)
        ),
        "handed": Kind([ForwardedSummary(["a", "b"], plain)], list[ForwardedSummary]),
        "noisy sums": Kind(noised, Noised, _noised),
        "scores": Kind(scores, dict[str, Any]),
        "counts": Kind({"errors": 3, "rows": 20}, dict[str, int]),
        "request": Kind(codec.envelope(3, 1, {"w": w, "part": "test", "r": 2}), Mapping[str, Any]),
    }


NASTY: list[Any] = [
    None, True, "f", "i", "x", 7, -1, 1.5, 10**30, [], {}, "", "\ud800", {"s": "text"}, {"s": 5}, {"m": {}},
    {"m": []}, {"t": ["float32", [2**39, 2**39]]}, {"t": ["float32", [0, 2**39]]}, {"t": ["float32", [-1]]},
    {"t": ["float64", [1]]}, {"t": ["object", [1]]}, {"t": ["bool", [3]]}, {"t": ["float16", [2, 2]]}, {"t": 1},
    {"t": [[], {}]},
    {"p": [["w", "float32", [10**9]]]}, {"p": [["w", "float32", [1]], ["w", "float32", [1]]]}, {"p": [["w"]]},
    {"p": "w"}, {"p": [["w", "float32", [True]]]}, [[[[[[[[]]]]]]]], ["f"] * 40, [{"s": "a"}] * 40, {"z": "f"},
]  # fmt: skip
NUMBERS = [math.nan, math.inf, -math.inf, 1e308, -1e300, 1e30, 1e15, 5e-324, -0.0, -1.0, 2.0**63]


def _places(tree: Any, out: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a head."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, item in items:
        out.append((tree, key))
        _places(item, out)
    return out


def _retold(head: str, rng: random.Random) -> str:
    """One to three places of the tree say something else."""
    tree = json.loads(head)
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(_places([tree], [])[1:] or [([tree], 0)])
        if isinstance(container, dict) and rng.random() < 0.3:
            container[rng.choice(["extra", "Weight", "round", "loss", "n" * 200, ""])] = copy.deepcopy(
                rng.choice(NASTY)
            )
        elif rng.random() < 0.1:
            del container[key]
        else:
            container[key] = copy.deepcopy(rng.choice(NASTY))
    return json.dumps(tree, separators=(",", ":"))


def _bomb(head: str, rng: random.Random) -> str:
    """A head that is large, wide or deep where the good one has an entry."""
    much = rng.choice([50, 200, 5_000, 60_000])
    item = rng.choice(['"f"', "[]", '{"m":{}}', '{"s":"x"}', '{"t":["float32",[0]]}', '{"p":[]}'])
    inner = rng.choice(
        [
            f"[{','.join([item] * much)}]",
            '{"m":{' + ",".join(f'"k{i}":"f"' for i in range(much)) + "}}",
            '{"p":[' + ",".join(f'["k{i}","int8",[0]]' for i in range(much)) + "]}",
            "[" * much + "]" * much,
            '{"m":{"]}":' * much + "null" + "}}" * much,
            '{"s":"' + "\\u0041" * much + '"}',
            '{"t":["float32",[' + ",".join(["1099511627775"] * much) + "]]}",
            "9" * much,
        ]
    )
    at = rng.choice([i for i, c in enumerate(head) if c in ":[,"] or [0])
    return head[: at + 1] + inner + rng.choice([",", ""]) + head[at + 1 :]


def mutated(head: str, data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """A good message, damaged in one way of nine."""
    match rng.choices(range(9), [4, 4, 1, 1, 3, 6, 0.15, 1, 1])[0]:
        case 0:  # other characters
            text = bytearray(head.encode())
            for _ in range(rng.randint(1, 4)):
                text[rng.randrange(len(text))] = rng.choice([rng.randrange(256), ord(rng.choice('"[]{},:\\0'))])
            return text.decode("latin-1"), data
        case 1:  # a part of it twice, or not at all: keys that come again among them
            a, b = sorted(rng.sample(range(len(head) + 1), 2))
            return (head[:b] + rng.choice(["", ","]) + head[a:] if rng.random() < 0.5 else head[:a] + head[b:]), data
        case 2:
            return head, data[: rng.randrange(len(data) + 1)]
        case 3:
            return head, data + rng.randbytes(rng.randint(1, 9))
        case 4:  # numbers
            block = bytearray(data)
            for _ in range(rng.randint(1, 3)):
                dtype = rng.choice(["<f8", "<f4", "<f2", "<i8"])
                with np.errstate(over="ignore", invalid="ignore"):
                    value = np.array(rng.choice(NUMBERS)).astype(dtype).tobytes()
                if len(block) >= len(value):
                    at = rng.randrange(0, len(block) - len(value) + 1, 2)
                    block[at : at + len(value)] = value
            return head, bytes(block)
        case 5:
            return _retold(head, rng), data
        case 6:
            return _bomb(head, rng), data
        case 7:  # a key twice, each time with a value
            keys = [i for i, c in enumerate(head) if c == "{" and head[i + 1 : i + 2] == '"']
            at = rng.choice(keys or [0]) + 1
            name = head[at : head.find(":", at) + 1] or '"x":'
            return head[:at] + name + rng.choice(["null,", '"f",', "[],", '{"m":{}},']) + head[at:], data
        case _:
            text = "".join(rng.choices(string.printable, k=rng.randrange(60)))
            return text, rng.randbytes(rng.randrange(40))


@dataclass
class Outcome:
    """The outcome of many mutations of one type: how many were refused, by code; how many passed; the longest time.

    ``slowest`` is that message: its code, the length of its head, and the head around its damage.
    """

    refused: Counter[str] = field(default_factory=Counter)
    accepted: int = 0
    longest: float = 0.0
    slowest: str = ""


def attempt(kind: Kind, head: str, data: bytes) -> str | None:
    """What a server does with a reply: the code of its refusal, or None.

    Raises:
        AssertionError: something passed that is not valid.
        Exception: whatever is neither a value nor the client's fault.
    """
    return _timed(kind, head, data)[0]


def _receive(kind: Kind, head: str, data: bytes) -> Any:
    """All that a server does with a reply before its method takes the value."""
    value = conform(payload.decode(head, data, None), kind.hint, "reply", MAX_NORM)
    kind.check(value)
    return value


def _timed(kind: Kind, head: str, data: bytes) -> tuple[str | None, float]:
    """The code of a message that is handed over once, and the processor seconds that a server spends on it.

    What the tests ask of a value that passed is not in the time.
    """
    begun = time.thread_time()
    try:
        value = _receive(kind, head, data)
    except ClientFault as fault:
        return fault.code, time.thread_time() - begun
    taken = time.thread_time() - begun
    assert nonfinite(value) is None, value
    assert kind.valid(value), value
    again, pieces = payload.encode(value)
    assert payload.size(value) == (len(again), sum(map(len, pieces))), value
    return None, taken


def fuzz(kind: Kind, count: int, seed: int) -> Outcome:
    """``count`` mutations of one type."""
    head, pieces = payload.encode(kind.good)
    data, rng, found = b"".join(pieces), random.Random(seed), Outcome()
    assert attempt(kind, head, data) is None
    gc.collect()
    gc.freeze()  # what is timed is the message, not a look at everything that is imported
    _attack(found, kind, head, data, count, rng)
    return found


def _attack(found: Outcome, kind: Kind, head: str, data: bytes, count: int, rng: random.Random) -> None:
    for _ in range(count):
        broken = mutated(head, data, rng)
        code, taken = _timed(kind, *broken)
        if taken > found.longest:  # the message, and not what the machine did meanwhile
            taken = min(taken, *(_timed(kind, *broken)[1] for _ in range(3)))
        if taken > found.longest:
            found.longest, found.slowest = taken, f"{code}, {len(broken[0])} characters, {_damage(head, broken[0])!r}"
        if code is None:
            found.accepted += 1
        else:
            found.refused[code] += 1


def _damage(head: str, broken: str) -> str:
    """A damaged head where it begins to differ from the good one."""
    at = next((i for i, (a, b) in enumerate(zip(head, broken, strict=False)) if a != b), 0)
    return broken[max(0, at - 40) : at + 80]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=100_000, help="of each message type")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, kind in kinds().items():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = fuzz(kind, options.mutations, options.seed)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        codes = ", ".join(f"{code} {n}" for code, n in found.refused.most_common())
        sys.stdout.write(
            f"{name}: {options.mutations} mutations, {found.accepted} accepted and valid, longest "
            f"{1e3 * found.longest:.1f} ms, {grown:.0f} MiB more at the peak; refused: {codes}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
