"""The clients' agreement in secure aggregation: their keys, and the graph of neighbours that the keys determine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedfm.privacy.crypto import keys, shamir

KEY, SIGNATURE = keys.KEY, keys.SIGNATURE
OUT, DEAD, ALIVE = 0, 1, 2  # status of a member in a sum: not in the cohort, dropped out, masked update received
LEAST = 3  # smallest number of clients in a sum; in a sum of two, each client could compute the other's part
LABEL = "fedfm-secagg-2"


def to_tensor(data: bytes) -> Tensor:
    """Bytes as a uint8 tensor, which is sent without text encoding."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a uint8 tensor, row after row; the inverse of :func:`to_tensor`."""
    return tensor.contiguous().numpy().tobytes()


def degree(neighbours: int, n: int) -> int:
    """Number of neighbours of each of n clients: an even number, or n - 1.

    Bell, Bonawitz, Gascon, Lepoint, Raykova. Secure Single-Server Aggregation with (Poly)Logarithmic Overhead. CCS
    2020. Here the default is 4 ceil(log2 n).
    """
    wanted = neighbours or 4 * math.ceil(math.log2(n))
    return min(wanted + wanted % 2, n - 1)


def neighbours_of(at: int, n: int, d: int) -> list[int]:
    """The neighbours of the client at a position, sorted: all others, or the d / 2 nearest on each side of a ring."""
    if d >= n - 1:
        return [i for i in range(n) if i != at]
    return sorted((at + side * i) % n for i in range(1, d // 2 + 1) for side in (-1, 1))


def least_of(share: float, n: int) -> int:
    """The smallest integer above the fraction ``share`` of n."""
    return math.floor(share * n + 1e-9) + 1


@dataclass(frozen=True)
class OwnKeys:
    """A client's keys for one agreement, which serves ``sums`` sums. They are derived from 32 random bytes.

    Each sum has its own key for pairwise masks, and its own seed for the client's mask. So shares that are revealed
    after one sum disclose nothing about another one.
    """

    master: bytes
    sums: int

    @property
    def channel(self) -> bytes:
        """The private key for encrypting shares."""
        return keys.derive(self.master, LABEL, "channel")

    def pair(self, i: int) -> bytes:
        """The private key for the pairwise masks of sum i; as a number it is in the field of the shares."""
        return _in_field(keys.derive(self.master, LABEL, "pair", i))

    def self(self, i: int) -> bytes:
        """The seed of the client's own mask in sum i."""
        return _in_field(keys.derive(self.master, LABEL, "self", i))

    def public(self) -> bytes:
        """The public keys, and a SHA-256 of each seed: 32 (1 + 2 sums) bytes."""
        pairs = b"".join(keys.public_of(self.pair(i)) for i in range(self.sums))
        return keys.public_of(self.channel) + pairs + b"".join(fingerprint(self.self(i)) for i in range(self.sums))


def _in_field(key: bytes) -> bytes:
    return (int.from_bytes(key, "little") % shamir.PRIME).to_bytes(KEY, "little")


def fingerprint(seed: bytes) -> bytes:
    """The SHA-256 by which the server checks a seed that it has reconstructed from shares."""
    return hashlib.sha256(seed).digest()


@dataclass(frozen=True)
class Card:
    """The data that a client publishes: identity, keys and signature."""

    data: bytes

    @staticmethod
    def length(sums: int) -> int:
        return 2 * KEY + 2 * KEY * sums + SIGNATURE

    @property
    def identity(self) -> bytes:
        return self.data[:KEY]

    @property
    def keys(self) -> bytes:
        return self.data[KEY:-SIGNATURE]

    @property
    def signature(self) -> bytes:
        return self.data[-SIGNATURE:]

    @property
    def channel(self) -> bytes:
        return self.keys[:KEY]

    def pair(self, i: int) -> bytes:
        return self.keys[KEY * (1 + i) : KEY * (2 + i)]

    def self_fingerprint(self, i: int) -> bytes:
        sums = (len(self.keys) // KEY - 1) // 2
        return self.keys[KEY * (1 + sums + i) : KEY * (2 + sums + i)]


class Agreed:
    """The members and their keys. Each client and the server compute the same graph of neighbours from them.

    Hashes of all names and keys determine the order of the ring. So nobody can choose a client's place in the ring
    without the keys of all others, and every client can check its neighbours.

    Args:
        known: digest and ring, if they were computed before; computing them takes long for many members.

    Attributes:
        names: names of all members, sorted; a member's position is its index in this list.
        digest: digest of names, keys, settings and the agreement's name; signatures and encrypted shares cover it.
        ring: positions in the order of the ring.
    """

    def __init__(
        self,
        terms: str,
        session: str,
        names: Sequence[str],
        table: Tensor,
        neighbours: int,
        known: tuple[bytes, list[int]] | None = None,
    ) -> None:
        self.names, self._table, self._neighbours = list(names), table, neighbours
        if known is None:
            parts: tuple[keys.Context, ...] = (LABEL, terms, session, *self.names, bytes_of(table))
            digest = hashlib.sha256(keys.encode(*parts)).digest()
            order = {at: hashlib.sha256(digest + name.encode()).digest() for at, name in enumerate(self.names)}
            known = digest, sorted(order, key=order.__getitem__)
        self.digest, self.ring = known

    def card(self, at: int) -> Card:
        """The published data of the member at a position."""
        return Card(bytes_of(self._table[at]))

    def around(self, at: int, among: Container[int] | None = None) -> list[int]:
        """Sorted neighbours of a member in the ring, or in the ring of only those members that are in ``among``."""
        ring = self.ring if among is None else [p for p in self.ring if p in among]
        n = len(ring)
        return sorted(ring[j] for j in neighbours_of(ring.index(at), n, degree(self._neighbours, n)))

    def count_holders(self, status: bytes) -> int:
        """The number of members that keep shares of the cohort: the cohort and its neighbours, dropouts included.

        Args:
            status: OUT, DEAD or ALIVE for each position.
        """
        cohort = [at for at, p in enumerate(self.ring) if status[p] != OUT]
        n = len(self.ring)
        d = degree(self._neighbours, n)
        gaps = [(after - at - 1) % n for at, after in zip(cohort, [*cohort[1:], *cohort[:1]], strict=True)]
        return n if d >= n - 1 else len(cohort) + sum(min(gap, d) for gap in gaps)

    def splits(self, status: bytes) -> bool:
        """Whether the dropouts cut the graph of the survivors' masks into parts.

        Two survivors with a mask in common are revealed together only. Between parts there is no such mask, so whoever
        unmasks all survivors can also add up one part alone. No mask reaches across d / 2 or more dropouts next to
        each other in the ring, and two such gaps separate the clients between them from all others.

        Args:
            status: OUT, DEAD or ALIVE for each position.
        """
        ring = [p for p in self.ring if status[p] != OUT]
        alive = [at for at, p in enumerate(ring) if status[p] == ALIVE]
        n = len(ring)
        if len(alive) < 2 or (d := degree(self._neighbours, n)) >= n - 1:
            return False
        gaps = [(after - at) % n for at, after in zip(alive, [*alive[1:], alive[0]], strict=True)]
        return sum(gap > d // 2 for gap in gaps) > 1

    def statement(self, *what: keys.Context) -> tuple[keys.Context, ...]:
        """The data that a signature or an encrypted share covers."""
        return (LABEL, self.digest, *what)

    def context(self, i: int, cohort: bytes, payload_digest: bytes) -> bytes:
        """Digest of the context of sum i. Masks are derived from it.

        If the server sends two clients different cohorts or models, the masks differ and do not cancel.
        """
        return hashlib.sha256(keys.encode(*self.statement("masked", i, cohort, payload_digest))).digest()


def pair_mask(private: bytes, public: bytes, context: bytes, names: Sequence[str]) -> bytes:
    """Key of the mask that two clients have in common."""
    return keys.agree(private, public, LABEL, "pair mask", context, *sorted(names))


def self_mask(seed: bytes, context: bytes) -> bytes:
    """Key of a client's own mask."""
    return keys.derive(seed, LABEL, "self mask", context)


def witnesses(holds: Sequence[int], status: bytes) -> list[int]:
    """Positions of the survivors whose seals a client receives: the first survivor, and all survivors whose seed
    shares the client keeps.
    """
    return sorted({p for p in holds if status[p] == ALIVE} | {status.index(ALIVE)})
