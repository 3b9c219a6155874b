"""The client's side of secure aggregation: the shares of its neighbours' seeds, and the requests that it refuses.

For each sum, a client reveals its share of at most one of another client's two seeds, masks at most one vector with a
key, and agrees to at most one list of survivors. :attr:`Client.write_once` writes these answers to the disk, so that
neither a resumed run nor a repeated message undoes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedfm.aggregation._secagg_keys import (
    ALIVE,
    DEAD,
    KEY,
    LABEL,
    LEAST,
    OUT,
    Agreed,
    OwnKeys,
    least_of,
    pair_mask,
    self_mask,
    witnesses,
)
from fedfm.aggregation._secagg_session import Sum
from fedfm.core.client import Client
from fedfm.errors import E_REFUSED, ClientFault
from fedfm.privacy.crypto import keys, masks, shamir


def refusal(why: str) -> ClientFault:
    """The fault of a client that refuses the server's request."""
    return ClientFault(E_REFUSED, f"secure aggregation: {why}")


def once(client: Client, name: str, what: str, value: bytes = b"") -> None:
    """Refuse a second request of this name, unless it has the same ``value`` and so the same answer."""
    mark = value + keys.entropy(16)
    if client.write_once(name, mark) != mark:
        raise refusal(f"the server requested {what} again; a second answer would reveal an update")


@dataclass
class Member:
    """A client's state for one agreement on keys, as its memory stores it.

    Attributes:
        session: the server's name for this agreement.
        master: see :class:`OwnKeys`, in hexadecimal digits.
        tag: name of this client's records of past answers, derived from its own keys.
        terms: digest of the settings, which every signature covers.
        neighbours: the setting ``neighbours``.
        threshold: number of shares that determine a seed.
        names, table: the names of all members, see :class:`Agreed`; the :class:`Card` of each member, one per row.
        digest, ring: see :class:`Agreed`; computed once per agreement, because this takes long for many members.
        holds: positions of the members whose seed shares this client keeps; its own position comes first.
        held: the seed shares of each of these members, 64 bytes for each sum.
    """

    session: str
    master: str
    sums: int
    tag: str
    terms: str
    neighbours: int
    threshold: int = 0
    names: list[str] = field(default_factory=list)
    table: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.uint8))
    digest: str = ""
    ring: list[int] = field(default_factory=list)
    holds: list[int] = field(default_factory=list)
    held: list[str] = field(default_factory=list)

    @property
    def own(self) -> OwnKeys:
        return OwnKeys(bytes.fromhex(self.master), self.sums)

    @cached_property
    def agreement(self) -> Agreed:
        known = (bytes.fromhex(self.digest), self.ring) if self.ring else None
        return Agreed(self.terms, self.session, self.names, self.table, self.neighbours, known)

    def key_context(self, name: str, data: bytes) -> tuple[keys.Context, ...]:
        """The data that the signature of a client's keys covers."""
        return (LABEL, "keys", self.terms, self.session, name, data)

    def join(self, client: Client, names: Sequence[str], table: Tensor) -> None:
        """Accept the keys of all members.

        Raises:
            ClientFault: the list is not sorted, a signature or an identity is wrong, or two members have the same
                identity.
        """
        if client.id not in names or list(names) != sorted(set(names)):
            raise refusal("the list of members is not in order, or lacks this client")
        self.names, self.table, self.ring = list(names), table, []
        self.digest, self.ring = self.agreement.digest.hex(), self.agreement.ring
        found = {}
        owners: dict[bytes, str] = {}
        for at, name in enumerate(names):
            card = self.agreement.card(at)
            if (owner := owners.setdefault(card.identity, name)) != name:
                raise refusal(f"{owner} and {name} sign with the same key, so one silo would count twice")
            if name == client.id:
                if (card.identity, card.keys) != (keys.identity_of(identity_of(client)), self.own.public()):
                    raise refusal("the list of members shows keys for this client that are not its own")
            elif not keys.verify(card.identity, card.signature, *self.key_context(name, card.keys)):
                raise refusal(f"{name} did not sign its keys for this agreement")
            else:
                found[name] = card.identity.hex()
        _trust(client, found)

    def deal(self, name: str, threshold: int) -> list[bytes]:
        """Keep this client's own shares of its seeds for all sums; return the encrypted shares for each neighbour."""
        at, own, self.threshold = self.names.index(name), self.own, threshold
        around = self.agreement.around(at)
        parts = [bytearray() for _ in range(len(around) + 1)]
        for i in range(self.sums):
            for seed in (own.self(i), own.pair(i)):
                dealt = shamir.split(int.from_bytes(seed, "little"), threshold, len(parts))
                for part, share in zip(parts, dealt, strict=True):
                    part += share.to_bytes(KEY, "little")
        self.holds, self.held = [at], [bytes(parts[0]).hex()]
        return [
            keys.seal(self._channel(p, name, self.names[p]), bytes(part), *self._route(name, self.names[p]))
            for p, part in zip(around, parts[1:], strict=True)
        ]

    def hold(self, name: str, present: Sequence[str], sealed: Sequence[bytes]) -> None:
        """Decrypt and keep the shares that arrived from neighbours.

        Raises:
            ClientFault: too few shares arrived, or a share was not encrypted by its sender for this client.
        """
        if len(self.holds) != 1 or len(present) + 1 < self.threshold:
            raise refusal(f"shares of {len(present)} neighbours arrived, {self.threshold - 1} are needed")
        around = {self.names[p]: p for p in self.agreement.around(self.holds[0])}
        if list(present) != sorted(around.keys() & set(present)):
            raise refusal("shares are from clients that are not neighbours")
        for other, data in zip(present, sealed, strict=True):
            try:
                share = keys.unseal(self._channel(around[other], other, name), data, *self._route(other, name))
            except ValueError as error:
                raise refusal(f"shares of {other}: {error}") from None
            self.holds.append(around[other])
            self.held.append(share.hex())

    def _channel(self, p: int, *ends: str) -> bytes:
        return keys.agree(self.own.channel, self.agreement.card(p).channel, LABEL, "channel", *ends)

    def _route(self, *ends: str) -> tuple[keys.Context, ...]:
        return self.agreement.statement("shares", *ends)

    def fit(self, client: Client, i: int, cohort: bytes) -> None:
        """Check the number and the cohort of a sum.

        Raises:
            ClientFault: the cohort is too small or lacks this client, or there are no agreed keys.
        """
        if not self.held or not 0 <= i < self.sums:
            raise refusal("there are no agreed keys for this sum")
        if len(cohort) != len(self.names) or set(cohort) - {0, 1} or not cohort[self.holds[0]]:
            raise refusal("the cohort lacks this client")
        _enough(client, sum(cohort), LEAST)

    def mask(
        self, client: Client, i: int, cohort: bytes, payload_digest: bytes, vectors: Sequence[masks.Words]
    ) -> tuple[bytes, bytes]:
        """Mask ``vectors`` in place for sum i; return the seal: ``payload_digest``, and the client's signature.

        Args:
            cohort: one byte for each position.
            payload_digest: digest of the payload that the server sent to all.

        Raises:
            ClientFault: the cohort is too small or lacks this client, or these keys were used before.
        """
        self.fit(client, i, cohort)
        once(client, f"{self.tag}-mask-{i}", f"a masked update for sum {i}")
        own, context = self.own, self.agreement.context(i, cohort, payload_digest)
        masks.add(vectors, self_mask(own.self(i), context))
        for p in self.agreement.around(self.holds[0], {p for p, here in enumerate(cohort) if here}):
            key = pair_mask(own.pair(i), self.agreement.card(p).pair(i), context, (client.id, self.names[p]))
            masks.add(vectors, key, negative=client.id > self.names[p])
        return payload_digest, keys.sign(
            identity_of(client), *self.agreement.statement("masked", i, cohort, payload_digest)
        )

    def survivors(self, client: Client, i: int, status: bytes, seals: Sequence[bytes], share: float) -> bytes:
        """Check a list of survivors, and return its digest.

        Args:
            status: OUT, DEAD or ALIVE for each position.
            seals: results of :meth:`mask`, in order of positions, see :func:`witnesses`.
            share: more than this fraction of the cohort must have survived.

        Raises:
            ClientFault: the list is too short or malformed, it splits the survivors (:meth:`Agreed.splits`), or a
                survivor's seal is for another cohort or model.
        """
        ok = self.holds and 0 <= i < self.sums and len(status) == len(self.names) and set(status) <= {OUT, DEAD, ALIVE}
        if not ok or status[self.holds[0]] == DEAD:
            raise refusal("the list of survivors is not for a sum of this client")
        cohort, payload_digest = bytes(s != OUT for s in status), b""
        _enough(client, status.count(ALIVE), max(least_of(share, sum(cohort)), 2))
        if self.agreement.splits(status):
            raise refusal("the clients that dropped out leave masks which hide only sums of parts of the others")
        signers = witnesses(self.holds, status)
        if len(signers) != len(seals):
            raise refusal(f"seals of {len(seals)} survivors arrived, expected {len(signers)}")
        for p, seal in zip(signers, seals, strict=True):
            said = self.agreement.statement("masked", i, cohort, seal[:KEY])
            if not keys.verify(self.agreement.card(p).identity, seal[KEY:], *said):
                raise refusal(f"{self.names[p]} did not mask an update in sum {i} for this cohort")
            payload_digest = payload_digest or seal[:KEY]
            if seal[:KEY] != payload_digest:
                raise refusal(f"{self.names[p]} received another model than {self.names[signers[0]]}")
        return hashlib.sha256(keys.encode(i, status, payload_digest)).digest()

    def consent(self, client: Client, i: int, digest: bytes) -> bytes:
        """Agree to a list of survivors.

        Raises:
            ClientFault: this client agreed to another list before.
        """
        once(client, f"{self.tag}-survivors-{i}", f"a list of survivors for sum {i}", digest)
        return keys.sign(identity_of(client), *self.agreement.statement("survivors", digest))

    def reveal(
        self, client: Client, i: int, status: bytes, digest: bytes, signatures: Mapping[str, bytes], share: float
    ) -> list[bytes]:
        """Return one share for each member of the cohort whose seed shares this client keeps. For a survivor it is a
        share of the seed of its own mask; for a member that dropped out, it is a share of the key of its pair masks.

        If no client dropped out, the survivors' seals prove their consent. Otherwise more than the fraction ``share``
        of all that keep shares of the cohort must have signed the list: with the signatures of neighbours alone,
        clients far apart in the ring could agree to different lists.

        Raises:
            ClientFault: this client agreed to another list, or too few signed this one.
        """
        kept = client.write_once(f"{self.tag}-survivors-{i}", digest + keys.entropy(16))
        if kept[: len(digest)] != digest:
            raise refusal(f"sum {i}: this client agreed to another list of survivors")
        known = {name: p for p, name in enumerate(self.names)}
        for name, signature in signatures.items():
            if name not in known or status[known[name]] == DEAD:
                raise refusal(f"{name} is not a member that survived")
            identity = self.agreement.card(known[name]).identity
            if not keys.verify(identity, signature, *self.agreement.statement("survivors", digest)):
                raise refusal(f"{name} signed another list of survivors")
        signed, least = len({client.id, *signatures}), least_of(share, self.agreement.count_holders(status))
        if DEAD in status and signed < least:
            raise refusal(f"{signed} signatures of the survivors arrived, {least} are needed")
        once(client, f"{self.tag}-reveal-{i}", f"shares for sum {i}")
        return [
            bytes.fromhex(held)[KEY * (2 * i + (status[p] == DEAD)) :][:KEY]
            for p, held in zip(self.holds, self.held, strict=True)
            if status[p] != OUT
        ]


def identity_of(client: Client) -> bytes:
    """The key with which a client signs: the silo's own key, or else a key that is drawn for this run."""
    return client.identity or client.secret("identity")


def _enough(client: Client, got: int, least: int) -> None:
    least = max(least, client.smallest_cohort)
    if got < least:
        raise refusal(f"the sum has {got} clients, expected at least {least}")


def _trust(client: Client, found: Mapping[str, str]) -> None:
    """Compare identities with the silo's roster, or, without a roster, with the first identities in this run.

    Raises:
        ClientFault: an identity differs.
    """
    if client.roster is not None:
        for name, identity in found.items():
            if name not in client.roster:
                raise refusal(f"{name} is not in this silo's roster")
            if client.roster[name].hex() != identity:
                raise refusal(f"the server shows a key of {name}, {short(identity)}, that differs from the roster's")
        return
    seen = json.loads(client.write_once("identities", json.dumps(found).encode()))
    for name, identity in found.items():
        label = f"identity-{hashlib.sha256(name.encode()).hexdigest()}"
        if (seen.get(name) or client.write_once(label, identity.encode()).decode()) != identity:
            raise refusal(f"{name} has another identity than before in this run")
    identities = ", ".join(f"{name} {short(identity)}" for name, identity in found.items())
    client.log(f"no roster: these identities are trusted on first use: {identities}")


def short(identity: str) -> str:
    """The fingerprint by which people compare a public key: 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(bytes.fromhex(identity)).hexdigest()[:16]


def sum_of(client: Client) -> Sum:
    """The parameters of the sum, from the train message.

    Raises:
        ClientFault: the message lacks them.
    """
    if not isinstance(client.aggregation_message, Sum):
        raise refusal("the request lacks number and cohort of the sum")
    return client.aggregation_message


def member_of(stored: Any) -> Member:
    """The :class:`Member` from its entry in a client's memory.

    Raises:
        ClientFault: the memory has no such entry.
    """
    if stored is None:
        raise refusal("there are no agreed keys")
    return Member(**stored)
