"""The client's side of one secure aggregation: its keys, what it holds for its neighbours, and what it refuses.

A client reveals at most one of the two seeds of another for each sum, masks at most one vector with a key, and signs at
most one list of survivors. :attr:`Client.first` keeps this on the disk, so that neither a resumed run nor a server that
repeats a message undoes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.client import Client
from fedfm.errors import E_REFUSED, ClientFault
from fedfm.privacy.crypto import keys, masks, shamir

KEY, SIGNATURE = keys.KEY, keys.SIGNATURE
DEAD, ALIVE = 0, 1
_LABEL = "fedfm-secagg-1"


def packed(data: bytes) -> Tensor:
    """Bytes as a uint8 tensor, which travels without text."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def bytes_of(tensor: Tensor) -> bytes:
    """The inverse of :func:`packed`, row by row."""
    return tensor.contiguous().numpy().tobytes()


def degree(neighbours: int, n: int) -> int:
    """Number of neighbours of each of n clients: even, or all others.

    Bell, Bonawitz, Gascon, Lepoint, Raykova. Secure Single-Server Aggregation with (Poly)Logarithmic Overhead. CCS
    2020. Here 4 ceil(log2 n) by default.
    """
    wanted = neighbours or 4 * math.ceil(math.log2(n))
    return min(wanted + wanted % 2, n - 1)


def neighbours_of(at: int, n: int, d: int) -> list[int]:
    """The neighbours of the client at a position, sorted: all others, or the d / 2 nearest on each side of a ring."""
    if d >= n - 1:
        return [i for i in range(n) if i != at]
    return sorted((at + side * i) % n for i in range(1, d // 2 + 1) for side in (-1, 1))


def least_of(share: float, n: int) -> int:
    """More than this share of n."""
    return math.floor(share * n + 1e-9) + 1


@dataclass(frozen=True)
class OwnKeys:
    """What a client derives from 32 random bytes for one agreement on keys, which serves ``sums`` sums.

    Each sum has its own key of pairwise masks and its own seed of the client's mask, so what is revealed after one sum
    says nothing about another.
    """

    master: bytes
    sums: int

    @property
    def channel(self) -> bytes:
        """Private key that encrypts shares."""
        return keys.derive(self.master, _LABEL, "channel")

    def pair(self, i: int) -> bytes:
        """Private key of the pairwise masks of sum i; as a number it is in the field of the shares."""
        return _in_field(keys.derive(self.master, _LABEL, "pair", i))

    def self(self, i: int) -> bytes:
        """Seed of the client's own mask of sum i."""
        return _in_field(keys.derive(self.master, _LABEL, "self", i))

    def public(self) -> bytes:
        """Public halves, and a SHA-256 of each seed: 32 (1 + 2 sums) bytes."""
        pairs = b"".join(keys.public_of(self.pair(i)) for i in range(self.sums))
        return keys.public_of(self.channel) + pairs + b"".join(fingerprint(self.self(i)) for i in range(self.sums))


def _in_field(key: bytes) -> bytes:
    return (int.from_bytes(key, "little") % shamir.PRIME).to_bytes(KEY, "little")


def fingerprint(seed: bytes) -> bytes:
    """The SHA-256 by which the server tells whether a seed was put together from right shares."""
    return hashlib.sha256(seed).digest()


@dataclass(frozen=True)
class PublicKeys:
    """What another client published."""

    data: bytes

    @property
    def sums(self) -> int:
        return (len(self.data) // KEY - 1) // 2

    @property
    def channel(self) -> bytes:
        return self.data[:KEY]

    def pair(self, i: int) -> bytes:
        return self.data[KEY * (1 + i) : KEY * (2 + i)]

    def self_fingerprint(self, i: int) -> bytes:
        return self.data[KEY * (1 + self.sums + i) : KEY * (2 + self.sums + i)]


def pair_mask(private: bytes, public: bytes, session: str, i: int, names: Sequence[str]) -> bytes:
    """Key of the mask that two clients share in sum i."""
    return keys.agree(private, public, _LABEL, "pair mask", session, i, *sorted(names))


def self_mask(seed: bytes, session: str, i: int) -> bytes:
    """Key of a client's own mask in sum i."""
    return keys.derive(seed, _LABEL, "self mask", session, i)


def refused(why: str) -> ClientFault:
    """The client does not do what the server asks."""
    return ClientFault(E_REFUSED, f"secure aggregation: {why}")


def once(client: Client, name: str, what: str) -> None:
    """Refuse a second time."""
    mark = keys.entropy(16)
    if client.first(name, mark) != mark:
        raise refused(f"{what} again: this was answered before, and a second answer would reveal an update")


@dataclass
class Member:
    """A client's state of one agreement on keys, as its memory keeps it.

    Attributes:
        session: the server's name of this agreement.
        master: see :class:`OwnKeys`, in hexadecimal digits.
        tag: name under which this client keeps what it has done, from its own keys.
        terms: digest of the settings, which every signature covers.
        threshold: number of shares that determine a seed.
        positions, names, published: the neighbours, in order of positions.
        present: of each neighbour whether its shares came.
        held: shares of oneself, then of each present neighbour, 64 bytes a sum.
        i: number of sums so far.
        alive: the survivors of the last sum that this client signed, one byte a position.
    """

    session: str
    master: str
    sums: int
    tag: str
    terms: str
    at: int = 0
    n: int = 0
    threshold: int = 0
    positions: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    identities: list[str] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    present: list[bool] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    i: int = 0
    alive: str = ""

    @property
    def own(self) -> OwnKeys:
        return OwnKeys(bytes.fromhex(self.master), self.sums)

    def peer(self, k: int) -> PublicKeys:
        """Keys of the neighbour with this index."""
        return PublicKeys(bytes.fromhex(self.published[k]))

    def join(self, client: Client, n: int, at: int, names: Sequence[str], rows: Sequence[bytes], d: int) -> None:
        """Take the neighbours' keys; d is the number that the settings ask for.

        Raises:
            ClientFault: they are not those of this graph, or a signature or an identity is wrong.
        """
        self.n, self.at, self.positions = n, at, neighbours_of(at, n, d) if 0 <= at < n else []
        if not len(self.positions) == len(names) == len(rows) == len({*names, client.id}) - 1 == d:
            raise refused(f"{len(names)} neighbours at position {at} of {n} clients, expected {d} others")
        self.names, self.identities, self.published = list(names), [], []
        for name, row in zip(names, rows, strict=True):
            identity, data, signature = row[:KEY], row[KEY:-SIGNATURE], row[-SIGNATURE:]
            if not keys.signed(identity, signature, *self.statement("keys", name, data)):
                raise refused(f"the keys of {name} are not signed by it for this agreement")
            if client.first(f"identity-{hashlib.sha256(name.encode()).hexdigest()}", identity) != identity:
                raise refused(f"{name} has another identity than before in this run")
            if PublicKeys(data).sums != self.sums:
                raise refused(f"{name} published keys for another number of sums")
            self.identities.append(identity.hex())
            self.published.append(data.hex())

    def statement(self, *what: keys.Context) -> tuple[keys.Context, ...]:
        """What a signature covers."""
        return (_LABEL, self.terms, self.session, *what)

    def deal(self, name: str) -> list[bytes]:
        """Shares of this client's seeds of all sums: those that it holds itself, then encrypted ones by neighbour."""
        own, parts = self.own, [bytearray() for _ in range(len(self.names) + 1)]
        for i in range(self.sums):
            for seed in (own.self(i), own.pair(i)):
                dealt = shamir.split(int.from_bytes(seed, "little"), self.threshold, len(parts))
                for part, share in zip(parts, dealt, strict=True):
                    part += share.to_bytes(KEY, "little")
        self.held = [bytes(parts[0]).hex()]
        return [
            keys.seal(self._channel(k, name, to=True), bytes(part), *self._route(name, k, to=True))
            for k, part in enumerate(parts[1:])
        ]

    def hold(self, name: str, present: Sequence[str], sealed: Sequence[bytes]) -> None:
        """Decrypt the shares of the neighbours whose shares came.

        Raises:
            ClientFault: too few came, or one is not what its sender encrypted for this client at these positions.
        """
        self.present = [other in present for other in self.names]
        if self.held[1:] or sum(self.present) != len(sealed) or len(sealed) + 1 < self.threshold:
            raise refused(f"shares of {len(sealed)} neighbours came, {self.threshold - 1} are needed")
        for k, data in zip((k for k, here in enumerate(self.present) if here), sealed, strict=True):
            try:
                share = keys.unseal(self._channel(k, name, to=False), data, *self._route(name, k, to=False))
            except ValueError as error:
                raise refused(f"shares of {self.names[k]}: {error}") from None
            self.held.append(share.hex())

    def _channel(self, k: int, name: str, *, to: bool) -> bytes:
        ends = (name, self.names[k]) if to else (self.names[k], name)
        return keys.agree(self.own.channel, self.peer(k).channel, _LABEL, "channel", *ends)

    def _route(self, name: str, k: int, *, to: bool) -> tuple[keys.Context, ...]:
        """Sender and receiver with their positions: all must see one another at the same ones."""
        here, there = (name, self.at), (self.names[k], self.positions[k])
        return self.statement("shares", self.n, *(here + there if to else there + here))

    def mask(self, client: Client, vectors: Sequence[masks.Words]) -> int:
        """Add the masks of the next sum, in place; returns its number.

        Raises:
            ClientFault: no keys are left, or those of this sum were used.
        """
        i, own = self.i, self.own
        if not self.held or i >= self.sums:
            raise refused("no keys are agreed for this sum")
        once(client, f"{self.tag}-mask-{i}", f"sum {i}: a masked update")
        masks.add(vectors, self_mask(own.self(i), self.session, i))
        for k, name in enumerate(self.names):
            if self.present[k]:
                key = pair_mask(own.pair(i), self.peer(k).pair(i), self.session, i, (client.id, name))
                masks.add(vectors, key, negative=client.id > name)
        self.i += 1
        return i

    def sign(self, client: Client, i: int, alive: bytes, least: int) -> bytes:
        """Agree to a list of survivors.

        Raises:
            ClientFault: it is too short, not of this sum, or a second one.
        """
        if i != self.i - 1 or len(alive) != self.n or set(alive) - {DEAD, ALIVE} or alive[self.at] != ALIVE:
            raise refused("a list of survivors that is not one of this client's last sum")
        if sum(alive) < least:
            raise refused(f"a sum of {sum(alive)} clients, expected {least} at least")
        once(client, f"{self.tag}-survivors-{i}", f"sum {i}: a list of survivors")
        self.alive = alive.hex()
        return keys.sign(client.secret("identity"), *self.statement("survivors", i, alive))

    def reveal(self, client: Client, i: int, signatures: Mapping[str, bytes]) -> list[bytes]:
        """One share of each seed: of survivors that of their own mask, of the others that of their pairwise masks.

        Raises:
            ClientFault: too few neighbours signed the list of survivors that this client signed.
        """
        if i != self.i - 1 or not self.alive:
            raise refused("shares of a sum whose survivors this client did not sign")
        alive = bytes.fromhex(self.alive)
        for name, signature in signatures.items():
            k = self.names.index(name) if name in self.names else -1
            if k < 0 or not alive[self.positions[k]]:
                raise refused(f"{name} is no neighbour that survived")
            if not keys.signed(bytes.fromhex(self.identities[k]), signature, *self.statement("survivors", i, alive)):
                raise refused(f"{name} signed another list of survivors")
        if len(signatures) + 1 < self.threshold:
            raise refused(f"{len(signatures) + 1} signatures of the survivors came, {self.threshold} are needed")
        once(client, f"{self.tag}-reveal-{i}", f"sum {i}: shares")
        here = [ALIVE, *(alive[p] for p, came in zip(self.positions, self.present, strict=True) if came)]
        return [
            bytes.fromhex(held)[KEY * (2 * i + (status == DEAD)) :][:KEY]
            for held, status in zip(self.held, here, strict=True)
        ]


def member_of(stored: Any) -> Member:
    """The state in a client's memory.

    Raises:
        ClientFault: there is none.
    """
    if stored is None:
        raise refused("no keys are agreed")
    return Member(**stored)
