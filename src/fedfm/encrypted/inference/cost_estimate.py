"""Estimate the cost of an encrypted run in advance: count its operations, and time each kind of operation here."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedfm.encrypted.ckks import seal, slot_permutation
from fedfm.encrypted.ckks.ciphertexts import Ciphertexts, outer, products
from fedfm.encrypted.ckks.matrices import linear
from fedfm.encrypted.ckks.refresh import HOLDS_WHILE, MOST, Masking, distance
from fedfm.encrypted.ckks.remote_refresh import answer_refresh, encrypt_message
from fedfm.encrypted.ckks.ring import SECURE_BITS, Parameters
from fedfm.encrypted.ckks.slot_constants import weighted_sum
from fedfm.encrypted.ckks.transformer_block import Packing
from fedfm.encrypted.ckks.wire import Channel, Sender
from fedfm.encrypted.inference import messages
from fedfm.encrypted.inference.folded_model import FoldedModel
from fedfm.encrypted.inference.operation_count import Count, count_operations
from fedfm.encrypted.inference.released_states import Released
from fedfm.errors import InputError

_AGAIN = 4  # number of ciphertexts in a timed operation, and number of its repetitions
_WIDE = 32  # number of ciphertexts in a timed product; a refresh of more ciphertexts is timed once only
_STEPS = 8  # number of rotations of one ciphertext that are timed together
_TERMS = 8  # number of terms in timed sums of products
_SIDES: tuple[Sender, Sender] = ("client", "server")


@dataclass(frozen=True)
class EncryptedPlan:
    """Costs of an encrypted run.

    Attributes:
        ring_dimension: N, the degree of the ring.
        log_q: bits of all primes, including the special prime.
        security_bits: the largest security level that log_q allows, by HomomorphicEncryption.org's tables.
        depth: number of sequential multiplications in the deepest block.
        levels: number of rescalings between two refreshes.
        batch: number of rows in a ciphertext.
        batches: number of batches of all clients.
        ciphertext_bytes: sizes in bytes of a ciphertext that the client sends (seeded, all primes), of a ciphertext
            that the owner sends to be refreshed, and of a ciphertext of disclosed activations (one prime).
        key_bytes: bytes of a client's evaluation keys, which are sent once.
        wide, narrow: number of a block's refreshes with at least d ciphertexts, and with fewer than d; each number
            is the maximum over the blocks.
        refreshed: number of ciphertexts refreshed per batch, over all blocks.
        messages: number of messages per batch over all blocks, including rows and disclosed activations.
        bytes_per_batch: bytes of all messages of a batch; the number of rows in the batch does not change it.
        bytes_per_sample: bytes of all messages of the run, divided by its rows.
        statistical_distance: distance that the masks spend for the client with the most rows; it must be at most 2^-40.
        seconds_per_block: owner's and client's seconds per block for one batch, each on one core of this machine.
        seconds: seconds for all batches one after another on one core, for owner and clients together.
    """

    ring_dimension: int
    log_q: int
    security_bits: int
    depth: int
    levels: int
    batch: int
    batches: int
    ciphertext_bytes: tuple[int, int, int]
    key_bytes: int
    wide: int
    narrow: int
    refreshed: int
    messages: int
    bytes_per_batch: int
    bytes_per_sample: float
    statistical_distance: float
    seconds_per_block: tuple[float, float]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, and the condition on which the statistical distance depends."""
        return asdict(self) | {"statistical_distance_holds": HOLDS_WHILE}

    def table(self) -> str:
        """Format the costs as a table of text."""
        up, down, out = (f"{b / 1e3:,.0f} kB" for b in self.ciphertext_bytes)
        shown = f"2^{math.log2(self.statistical_distance):.1f}" if self.statistical_distance else "0"
        owner, client = self.seconds_per_block
        each = f"on average {self.bytes_per_sample / 1e6:,.2f} MB a row in this run"
        lines = [
            ("ring", f"degree {self.ring_dimension}, {self.log_q} bits, {self.security_bits}-bit security"),
            ("depth", f"{self.depth} per block, {self.levels} between refreshes"),
            ("refreshes per block", f"{self.wide} wide, {self.narrow} narrow"),
            ("ciphertext", f"{up} to the owner, {down} back, {out} disclosed"),
            ("keys", f"{self.key_bytes / 1e6:,.1f} MB per client, once"),
            ("batches", f"{self.batches} of up to {self.batch} rows"),
            (
                "messages",
                f"{self.messages} and {self.bytes_per_batch / 1e6:,.0f} MB per batch however many rows it has; {each}",
            ),
            ("statistical distance", f"at most {shown}, of the 2^{math.log2(MOST):.0f} allowed, {HOLDS_WHILE}"),
            ("seconds per block", f"{owner:,.1f} owner, {client:,.1f} client, one core"),
            ("all batches", f"{_span(self.seconds)} on one core"),
        ]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def plan(
    folded: FoldedModel,
    rows: Sequence[int | Sequence[int]],
    released: str,
    *,
    projection: int = 0,
    permuted: int = 0,
    parameters: Parameters = messages.SETS[0],
) -> EncryptedPlan:
    """Estimate the costs of the encrypted forward pass for these numbers of rows.

    Args:
        rows: each client's number of rows, or a list with one number per part if the parts have separate batches.
        projection: p, number of values per token, for ``released = "tokens"``.
        permuted: number of classes, for the "permuted" protocol; 0 for the "masked" protocol.

    Raises:
        InputError: the parameters have less than 128-bit security, or the run would exceed its statistical distance.
    """
    tokens, d = folded.positions.shape
    layout, floor = Packing(parameters, tokens), messages.floor_of(parameters)
    matrix = np.ones((projection, d)) if released == "tokens" else None
    kind = Released(released, tokens, d, matrix, folded.class_token)
    counts = [
        count_operations(layer, tokens, parameters, number == 0, bool(permuted))
        for number, layer in enumerate(folded.blocks)
    ]
    full, low = (sum(parameters.bits[:n]) * parameters.degree // 8 for n in (parameters.limbs, floor))
    rows_bytes = sum(parameters.bits[: messages.rows_limbs(parameters)]) * parameters.degree // 8
    one = 2 * parameters.bits[0] * parameters.degree // 8
    batches = [sum(-(-n // layout.samples) for n in ([parts] if isinstance(parts, int) else parts)) for parts in rows]
    total = sum(parts if isinstance(parts, int) else sum(parts) for parts in rows)
    refreshed = sum(sum(c.refreshes) for c in counts)
    spent = max(batches, default=0) * refreshed * distance(parameters, floor, parameters.scale, folded.bound)
    if spent > MOST:
        raise InputError(
            f"{max(batches)} batches of one client would bring the masks' statistical distance to "
            f"2^{math.log2(spent):.1f}, "
            f"above 2^{math.log2(MOST):.0f}; encrypt fewer rows"
        )
    out, again = (-(-d // 2), d * (len(counts) - 1)) if permuted else (kind.ciphertexts, 0)
    sizes = refreshed * (full + 2 * low) + len(counts) * out * one + folded.embedding.shape[1] * rows_bytes
    if permuted:
        labels = -(-permuted // tokens)
        sizes += again * full + labels * sum(parameters.bits[: messages.RELEASE_LIMBS]) * parameters.degree // 8
        sizes += -(-labels // 2) * one
    rotations = layout.rotations | (slot_permutation.rotations(layout) if permuted else set())
    seconds, key_bytes = _seconds(folded, counts, layout, rotations, again)
    log_q = sum(parameters.bits) + parameters.special
    return EncryptedPlan(
        ring_dimension=parameters.degree,
        log_q=log_q,
        security_bits=128 if log_q <= SECURE_BITS[parameters.degree] else 0,
        depth=max(_depth(folded, number) for number in range(len(counts))),
        levels=parameters.limbs - floor,
        batch=layout.samples,
        batches=sum(batches),
        ciphertext_bytes=(full, 2 * low, one),
        key_bytes=key_bytes,
        wide=max(sum(n >= d for n in c.refreshes) for c in counts),
        narrow=max(sum(n < d for n in c.refreshes) for c in counts),
        refreshed=refreshed,
        messages=1 + sum(2 * len(c.refreshes) + (2 if permuted else 1) for c in counts),
        bytes_per_batch=sizes,
        bytes_per_sample=sizes * sum(batches) / max(total, 1),
        statistical_distance=spent,
        seconds_per_block=seconds,
        seconds=sum(batches) * len(counts) * sum(seconds),
    )


def _depth(folded: FoldedModel, number: int) -> int:
    """Return the number of levels that a block takes.

    Levels are needed for norms (square and product), W_qkv, scores, exp, the inverse with its scales, products, W_o,
    and the MLP.
    """
    layer = folded.blocks[number]
    known = [getattr(r, "depth", 0) for r in (*layer.norms, layer.exponential, layer.inverse, layer.gelu)]
    first, second, exponential, inverse, gelu = known
    return (2 + first) + (2 + second) + 2 + exponential + (2 + inverse) + 3 + (2 + gelu)


def _seconds(
    folded: FoldedModel, counts: Sequence[Count], layout: Packing, rotations: set[int], again: int
) -> tuple[tuple[float, float], int]:
    """Time operations; return seconds of owner and client for an average block, and bytes of the evaluation keys.

    ``again`` is the number of ciphertexts of states that a client returns, over all blocks; 0 in the masked protocol.
    """
    parameters, d = layout.parameters, folded.positions.shape[1]
    floor = messages.floor_of(parameters)
    client = seal.ClientKeys(parameters)
    public = client.public(rotations)
    server = seal.ServerKeys(parameters, public, floor=floor)
    x = Ciphertexts(client.encrypt(np.ones((_AGAIN, parameters.slots))).view(np.uint64), parameters.scale, server)
    each: dict[tuple[str, int], float] = {}
    operations: Counter[tuple[str, int]] = sum((c.operations for c in counts), Counter())
    steps = sorted(layout.rotations)[:_STEPS]
    for name, limbs in operations:
        y = x.at(limbs)
        if name == "relinearise":
            wide = Ciphertexts(np.repeat(y.limbs, 2, axis=1)[:, :3].copy(), y.scale, server)
            each[name, limbs] = _measure_seconds(lambda wide=wide: server.relinearise_and_rescale(wide))  # type: ignore[misc]
        elif name == "weigh":
            plains = np.ones((len(y), limbs, parameters.degree), np.int64)
            each[name, limbs] = _measure_seconds(lambda y=y, plains=plains: weighted_sum(y, plains, 1.0))  # type: ignore[misc]
        elif name == "rescale":
            each[name, limbs] = _measure_seconds(lambda y=y: server.rescale(y))  # type: ignore[misc]
        elif name == "rotate":
            one = _measure_seconds(lambda y=y: server.rotations(y, steps[:1]))  # type: ignore[misc]
            more = _measure_seconds(lambda y=y: server.rotations(y, steps)) if steps[1:] else 2 * one  # type: ignore[misc]
            each[name, limbs] = (more - one) / max(len(steps) - 1, 1)
            each["decompose", limbs] = max(one - each[name, limbs], 0.0)
    many = Ciphertexts(np.repeat(x.limbs, _WIDE // _AGAIN, axis=0), x.scale, server)
    sizes = Counter(size for c in counts for size in c.refreshes)
    theirs, ours = _refreshes(client, x, floor, folded.bound, sizes)
    returned, taken = _returns(client) if again else (0.0, 0.0)
    product = _measure_seconds(lambda: products(many, many), _WIDE)
    term = _measure_seconds(lambda: outer(many, many, _TERMS), _WIDE**2 // _TERMS)
    matrix = _measure_seconds(lambda: linear(np.ones((4 * _WIDE, _WIDE)), many), 4 * _WIDE**2)
    m = np.mean([len(layer.weights["up"]) for layer in folded.blocks])
    refreshed, again_each = sum(sum(c.refreshes) for c in counts) / len(counts), again / len(counts)
    fixed = sum(count * each[key] for key, count in operations.items()) / len(counts)
    places, baby = layout.places, layout.baby
    pairs = [layer.heads * places + d * (places // baby) for layer in folded.blocks]  # sums of many products
    alone = sum(n for (name, _), n in operations.items() if name == "relinearise") - sum(pairs)
    multiplied = 2 * d * places * term + (alone / len(counts) + 2 * d) * product
    return (
        float(fixed + refreshed * ours + again_each * taken + multiplied + (4 * d * d + 2 * d * m) * matrix),
        float(refreshed * theirs + again_each * returned),
    ), len(public)


def _refreshes(
    client: seal.ClientKeys, x: Ciphertexts, floor: int, bound: float, sizes: Mapping[int, int]
) -> tuple[float, float]:
    """Return client's and owner's seconds per ciphertext, for ``sizes``: size of a refresh -> number of such refreshes.

    In a message of hundreds of ciphertexts, each takes up to twice as long as in a small message, because a large
    message does not fit into the cache, and the system has to clear memory for it.
    """
    parameters, masking = client.parameters, Masking(bound)
    theirs = ours = 0.0
    for size, often in sizes.items():
        here, there = (Channel(parameters, bytes(32), bytes(16), side) for side in _SIDES)
        many = Ciphertexts(np.repeat(x.limbs, -(-size // len(x)), axis=0)[:size], x.scale, x.evaluator)
        hidden, _ = masking.hide(many.at(floor))
        message = there.pack(hidden.residues, x.scale)

        def answer(here: Channel = here, message: bytes = message) -> bytes:
            here.received = here.sent = 0
            return answer_refresh(client, here, message, floor)

        reply = answer()

        def ask(there: Channel = there, many: Ciphertexts = many, reply: bytes = reply) -> None:
            there.received = there.sent = 0
            covered, mask = masking.hide(many.at(floor))
            there.pack(covered.residues, x.scale)
            fresh, scale = there.unpack(reply, limbs=parameters.limbs)
            masking.reveal(Ciphertexts(fresh.view(np.uint64), scale, x.evaluator), mask)

        turns = 1 if size > _WIDE else _AGAIN
        theirs += often * _measure_seconds(answer, 1, turns)
        ours += often * _measure_seconds(ask, 1, turns)
    total = sum(size * often for size, often in sizes.items())
    return theirs / total, ours / total


def _returns(client: seal.ClientKeys) -> tuple[float, float]:
    """Return client's and owner's seconds for a fresh ciphertext that the client sends."""
    parameters = client.parameters
    here, there = (Channel(parameters, bytes(32), bytes(16), side) for side in _SIDES)

    def renew() -> bytes:
        here.sent = 0
        return encrypt_message(client, here, np.ones((_WIDE, parameters.slots)))

    fresh = renew()

    def take() -> None:
        there.received = 0
        there.unpack(fresh, limbs=parameters.limbs)

    return _measure_seconds(renew, _WIDE), _measure_seconds(take, _WIDE)


def _measure_seconds(work: Callable[[], object], count: int = _AGAIN, turns: int = _AGAIN) -> float:
    """Return CPU seconds per ciphertext: the minimum of several calls. Each call processes ``count`` ciphertexts."""
    work()  # the first call compiles code and makes tables
    best = math.inf
    for _ in range(turns):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best / count


def _span(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )
