"""Estimate the cost of an encrypted run in advance: count its operations, and time each kind of operation here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedfm.core.durations import duration_text
from fedfm.encrypted.ckks import slot_permutation
from fedfm.encrypted.ckks.refresh import HOLDS_WHILE, MOST, PAIRED, distance
from fedfm.encrypted.ckks.ring import SECURE_BITS, Parameters
from fedfm.encrypted.ckks.transformer_block import Packing
from fedfm.encrypted.inference import messages
from fedfm.encrypted.inference.folded_model import FoldedModel
from fedfm.encrypted.inference.operation_count import count_operations
from fedfm.encrypted.inference.operation_seconds import Work, operation_seconds
from fedfm.encrypted.inference.released_states import Released
from fedfm.errors import InputError


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
            ("all batches", f"{duration_text(self.seconds)} on one core"),
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
    disclosed = None if permuted else kind
    counts = [
        count_operations(layer, tokens, parameters, number == 0, bool(permuted), disclosed)
        for number, layer in enumerate(folded.blocks)
    ]
    full, low = (sum(parameters.bits[:n]) * parameters.degree // 8 for n in (parameters.limbs, floor))
    rows_bytes = sum(parameters.bits[: messages.rows_limbs(parameters)]) * parameters.degree // 8
    one = 2 * parameters.bits[0] * parameters.degree // 8
    batches = [sum(-(-n // layout.samples) for n in ([parts] if isinstance(parts, int) else parts)) for parts in rows]
    total = sum(parts if isinstance(parts, int) else sum(parts) for parts in rows)
    refreshed = sum(sum(c.refreshes) for c in counts)
    spent = max(batches, default=0) * refreshed * distance(parameters, floor, parameters.scale, folded.bound * PAIRED)
    if spent > MOST:
        raise InputError(
            f"{max(batches)} batches of one client would bring the masks' statistical distance to "
            f"2^{math.log2(spent):.1f}, above 2^{math.log2(MOST):.0f}; encrypt fewer rows"
        )
    out, again = (-(-d // 2), d * (len(counts) - 1)) if permuted else (kind.ciphertexts, 0)
    sizes = refreshed * (full + 2 * low) + len(counts) * out * one + folded.embedding.shape[1] * rows_bytes
    if permuted:
        labels = -(-permuted // tokens)
        sizes += again * full + labels * sum(parameters.bits[: messages.RELEASE_LIMBS]) * parameters.degree // 8
        sizes += -(-labels // 2) * one
    rotations = layout.rotations | (slot_permutation.rotations(layout) if permuted else set())
    operations: Counter[tuple[str, int]] = sum((c.operations for c in counts), Counter())
    work = Work(
        operations,
        Counter(size for c in counts for size in c.refreshes),
        _maps(folded, kind, parameters, bool(permuted)),
        folded.embedding.shape[1] + again,
        len(counts) * out,
    )
    spent_seconds = operation_seconds(work, layout, folded.bound, rotations)
    owner, client = (sum(part.values()) / len(counts) for part in (spent_seconds.owner, spent_seconds.client))
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
        key_bytes=spent_seconds.key_bytes,
        wide=max(sum(2 * n >= d for n in c.refreshes) for c in counts),
        narrow=max(sum(2 * n < d for n in c.refreshes) for c in counts),
        refreshed=refreshed,
        messages=1 + sum(2 * len(c.refreshes) + (2 if permuted else 1) for c in counts),
        bytes_per_batch=sizes,
        bytes_per_sample=sizes * sum(batches) / max(total, 1),
        statistical_distance=spent,
        seconds_per_block=(owner, client),
        seconds=sum(batches) * len(counts) * (owner + client),
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


def _maps(folded: FoldedModel, kind: Released, parameters: Parameters, permuted: bool) -> Counter[tuple[int, int, int]]:
    """Count the linear maps of all blocks by (rows, columns, number of primes)."""
    primes = messages.rows_limbs(parameters)  # the last of them is narrow, and their rescaling drops it
    embedded = "residual" in folded.blocks[0].weights  # texts come embedded
    out = Counter([] if embedded else [(*folded.embedding.shape, primes)])
    for layer in folded.blocks:
        out.update((*w.shape, primes) for w in layer.weights.values() if w.ndim == 2)
    if kind.projection is not None and not permuted:
        out[(*kind.projection.shape, messages.RELEASE_LIMBS)] += len(folded.blocks)
    return out
