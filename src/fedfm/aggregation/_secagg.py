"""Secure aggregation: the server sees sums of updates, weights and metrics, and none of a single client.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth. Practical Secure Aggregation for
Privacy-Preserving Machine Learning. CCS 2017. Figure 4, with signatures and the consistency check. Bell, Bonawitz,
Gascon, Lepoint, Raykova. CCS 2020: each client shares masks with O(log n) neighbours. As in Ma, Woods, Angel,
Polychroniadou, Rabin. Flamingo. S&P 2023, keys are agreed once for many sums.

1. keys: each client publishes its keys for the coming sums, signed;
2. share: it sends its neighbours encrypted shares of the seeds from which its masks are made;
3. hold: it receives theirs;
4. the method's train message: its reply is the masked update;
5. consent: each survivor signs the list of survivors;
6. unmask: it reveals, of each neighbour, a share of one of its two seeds.

Messages 1 to 3 come before the first sum, and again when the cohort changes, somebody dropped out, the keys are used
up, or the run was resumed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.aggregation import _secagg_client as clients
from fedfm.aggregation._secagg_client import KEY, SIGNATURE, Member, PublicKeys, bytes_of, packed, refused
from fedfm.aggregation.base import Half, Of, Payload, Transport
from fedfm.core.client import MAX_WEIGHT, Client, ClientId, Update, each, on_client
from fedfm.core.federation import Federation
from fedfm.errors import E_FIELD, E_NORM, E_SHAPE, ClientFault, RunError
from fedfm.linalg.params import Layout, Params
from fedfm.privacy.crypto import keys, masks, shamir
from fedfm.privacy.crypto.fixed_point import FixedPoint

MEMORY = "SecAgg"  # key of the state at both sides
LEAST = 3  # clients: in a sum of two each knows the other's part
_AHEAD = 16  # sums for which keys are agreed, where all clients take part in each


@dataclass(frozen=True)
class Masked:
    """A client's reply to the train message.

    Attributes:
        sum: number of the sum since keys were agreed.
        head: weight and weighted metrics, (1 + M,) int64, masked.
        body: weighted delta, (P,) int64 or int32, masked.
    """

    sum: int
    head: Tensor
    body: Tensor


@dataclass
class Session:
    """The server's state of one agreement on keys.

    Attributes:
        members: names by position.
        published: keys of each member.
        neighbours: of each member, whether their shares came or not.
        dealt: the members whose shares came, in order of names.
        ready: those of them that hold shares of others.
        sums: number of sums that the keys serve.
        used: number of sums so far.
        broken: somebody dropped out.
    """

    name: str
    cohort: tuple[ClientId, ...]
    members: list[ClientId]
    published: dict[ClientId, PublicKeys]
    neighbours: dict[ClientId, list[ClientId]]
    dealt: list[ClientId]
    ready: list[ClientId]
    threshold: int
    sums: int
    used: int = 0
    broken: bool = False
    positions: dict[ClientId, int] = field(init=False)

    def __post_init__(self) -> None:
        self.positions = {name: at for at, name in enumerate(self.members)}

    def holders(self, name: ClientId) -> list[ClientId]:
        """Who holds the shares of a member's seeds, at x = 1, 2, ..."""
        return [name, *self.neighbours[name]]

    def holds(self, name: ClientId) -> list[ClientId]:
        """Whose shares a member holds, in the order in which it reveals them."""
        dealt = set(self.dealt)
        return [name, *(other for other in self.neighbours[name] if other in dealt)]


@dataclass(frozen=True)
class SecAgg(Transport):
    """The transport; :class:`fedfm.aggregation.secure.Secure` explains its settings."""

    compact: bool
    bound: float
    clip_norm: float | None
    threshold: float
    neighbours: int
    metrics: tuple[str, ...]

    form = "masked"
    wire_type = Masked

    @property
    def _terms(self) -> str:
        """Digest of the settings: who has others can neither sign nor decrypt for those who have these."""
        return hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()

    def head_code(self, n: int) -> FixedPoint:
        """Code of weights and weighted metrics; whole weights are exact."""
        return FixedPoint(64, MAX_WEIGHT, n)

    def body_code(self, n: int) -> FixedPoint:
        """Code of the weighted delta."""
        return FixedPoint(32 if self.compact else 64, self.bound, n)

    # --- client half

    @on_client(kind="aggregate")
    def keys(self, client: Client, session: str, sums: int) -> Tensor:
        """Message 1: identity, public keys and signature, (64 (1 + sums) + 64,) uint8."""
        if not 1 <= sums <= _AHEAD:
            raise refused(f"keys for {sums} sums, expected 1 to {_AHEAD}")
        master, identity = keys.entropy(KEY), client.secret("identity")
        data = clients.OwnKeys(master, sums).public()
        member = Member(session, master.hex(), sums, hashlib.sha256(data).hexdigest()[:32], self._terms)
        client.memory[MEMORY] = dataclasses.asdict(member)
        signature = keys.sign(identity, *member.statement("keys", client.id, data))
        return packed(keys.identity_of(identity) + data + signature)

    @on_client(kind="aggregate")
    def share(self, client: Client, n: int, at: int, names: list[str], published: Tensor) -> Tensor:
        """Message 2: encrypted shares for each neighbour, (d, 28 + 64 sums) uint8."""
        member = self._member(client)
        if n < LEAST:
            raise refused(f"a sum of {n} clients, expected {LEAST} at least")
        clients.once(client, f"{member.tag}-share", "shares of seeds")
        d = clients.degree(self.neighbours, n)
        rows = [bytes_of(row) for row in _rows(published, len(names), 2 * KEY + 2 * KEY * member.sums + SIGNATURE)]
        member.join(client, n, at, names, rows, d)
        member.threshold = clients.least_of(self.threshold, d + 1)
        sealed = member.deal(client.id)
        client.memory[MEMORY] = dataclasses.asdict(member)
        return packed(b"".join(sealed)).reshape(len(names), -1)

    @on_client(kind="aggregate")
    def hold(self, client: Client, present: list[str], sealed: Tensor) -> None:
        """Message 3."""
        member = self._member(client)
        rows = _rows(sealed, len(present), keys.SEALED + 2 * KEY * member.sums)
        member.hold(client.id, present, [bytes_of(row) for row in rows])
        client.memory[MEMORY] = dataclasses.asdict(member)

    def protect(self, client: Client, update: Update) -> Masked:
        """Message 4.

        Raises:
            ClientFault: E_NORM, an entry times its weight is NaN or above the bound; E_REFUSED, no keys are agreed.
        """
        member, factor = self._member(client), update.weight
        if self.clip_norm is not None and (norm := update.delta.norm()) > self.clip_norm:
            factor *= self.clip_norm / norm
        told = [update.weight * update.metrics.get(name, 0.0) for name in self.metrics]
        try:
            head = self.head_code(member.n).encode(np.clip([update.weight, *told], -MAX_WEIGHT, MAX_WEIGHT))
            flats = (flat.numpy() for flat in update.delta.flats.values())
            body = np.concatenate([self.body_code(member.n).encode(flat, factor) for flat in flats])
        except ValueError as error:
            raise ClientFault(E_NORM, f"{error}: see aggregation.bound") from None
        i = member.mask(client, (head, body))
        client.memory[MEMORY] = dataclasses.asdict(member)
        return Masked(i, torch.from_numpy(head.view(np.int64)), torch.from_numpy(body.view(f"i{body.itemsize}")))

    @on_client(kind="aggregate")
    def consent(self, client: Client, sum: int, alive: Tensor) -> Tensor:
        """Message 5: signature, (64,) uint8; ``alive`` (n,) uint8 is 1 at the survivors' positions."""
        member = self._member(client)
        least = max(clients.least_of(self.threshold, member.n), 2)
        signature = member.sign(client, sum, bytes_of(alive), least)
        client.memory[MEMORY] = dataclasses.asdict(member)
        return packed(signature)

    @on_client(kind="aggregate")
    def unmask(self, client: Client, sum: int, names: list[str], signatures: Tensor) -> Tensor:
        """Message 6: a share of one seed of oneself and of each present neighbour, (1 + present, 32) uint8."""
        signed = map(bytes_of, _rows(signatures, len(names), SIGNATURE))
        shares = self._member(client).reveal(client, sum, dict(zip(names, signed, strict=True)))
        return packed(b"".join(shares)).reshape(-1, KEY)

    def _member(self, client: Client) -> Member:
        return clients.member_of(client.memory.get(MEMORY))

    # --- server half

    def updates(self, fed: Federation, handler: Half, of: Of, payload: Payload, like: Layout) -> Iterator[Update]:
        cohort = tuple(sorted(fed.clients if of is None else of))
        session: Session | None = fed.process_memory.get(MEMORY)
        if session is None or session.cohort != cohort or session.broken or session.used == session.sums:
            session = self._agree(fed, cohort)
        i, n = session.used, len(session.members)
        fed.process_memory[MEMORY] = session
        session.used, session.broken = i + 1, True  # unless all goes well
        head, body = self.head_code(n), self.body_code(n)
        vectors = np.zeros(1 + len(self.metrics), head.dtype), np.zeros(sum(like.sizes.values()), body.dtype)

        def check(client: ClientId, reply: Masked) -> None:
            if reply.sum != i:
                raise ClientFault(E_FIELD, f"a masked update of sum {reply.sum}, expected sum {i}")
            for got, vector in zip((reply.head, reply.body), vectors, strict=True):
                if got.shape != vector.shape or got.numpy().itemsize != vector.itemsize or got.is_floating_point():
                    raise ClientFault(E_SHAPE, f"a masked vector of {tuple(got.shape)}, expected {vector.shape}")

        alive = []
        for client, reply in fed.exchange("train", handler, session.ready, payload, Masked, form="masked", check=check):
            for part, vector in zip((reply.head, reply.body), vectors, strict=True):
                vector += part.numpy().view(vector.dtype)
            alive.append(client)
        _enough(fed, len(alive), max(clients.least_of(self.threshold, n), 2), "clients sent a masked update")
        revealed = self._reveal(fed, session, i, alive)
        self._remove_masks(fed, session, i, alive, revealed, vectors)
        fed.heard = len(alive)
        session.broken = len(revealed) < len(cohort)
        weight, *totals = head.decode(vectors[0]).tolist()
        fed.metrics.update({name: x / weight for name, x in zip(self.metrics, totals, strict=True) if x})
        mean = torch.from_numpy(body.decode(vectors[1])).div_(weight)
        flats, at = {}, 0
        for dtype, size in like.sizes.items():
            part = mean[at : at + size]
            flats[dtype] = (part if dtype.is_floating_point else part.round()).to(dtype)
            at += size
        yield Update(Params.from_flat(like, flats), weight)

    def _agree(self, fed: Federation, cohort: tuple[ClientId, ...]) -> Session:
        """Messages 1 to 3."""
        name, sums = keys.entropy(16).hex(), _AHEAD if cohort == fed.clients else 1
        length = 2 * KEY + 2 * KEY * sums + SIGNATURE
        sent = fed.ask(self.keys, of=cohort, check=_shaped(length), session=name, sums=sums)
        members, n = list(sent), len(sent)
        _enough(fed, n, LEAST, "clients sent keys")
        random.SystemRandom().shuffle(members)
        d = clients.degree(self.neighbours, n)
        neighbours = {c: [members[j] for j in clients.neighbours_of(at, n, d)] for at, c in enumerate(members)}
        came = fed.ask(
            self.share,
            of=members,
            check=_shaped(d, keys.SEALED + 2 * KEY * sums),
            n=n,
            at=each({c: at for at, c in enumerate(members)}),
            names=each(neighbours),
            published=each({c: torch.stack([sent[other] for other in neighbours[c]]) for c in members}),
        )
        published = {c: PublicKeys(bytes_of(row)[KEY:-SIGNATURE]) for c, row in sent.items()}
        threshold = clients.least_of(self.threshold, d + 1)
        session = Session(name, cohort, members, published, neighbours, list(came), [], threshold, sums)
        present = {c: session.holds(c)[1:] for c in came}
        place = {c: {other: k for k, other in enumerate(neighbours[c])} for c in came}
        sealed = {c: torch.stack([came[other][place[other][c]] for other in present[c]]) for c in came if present[c]}
        _enough(fed, len(came), LEAST, "clients sent shares")
        session.ready = list(fed.ask(self.hold, of=sealed, present=each(present), sealed=each(sealed)))
        return session

    def _reveal(self, fed: Federation, session: Session, i: int, alive: Sequence[ClientId]) -> dict[ClientId, Tensor]:
        """Messages 5 and 6: what each survivor reveals."""
        survivors = set(alive)
        status = packed(bytes(clients.ALIVE if c in survivors else clients.DEAD for c in session.members))
        signed = fed.ask(self.consent, of=alive, check=_shaped(SIGNATURE), least=1, sum=i, alive=status)
        names = {c: [other for other in session.neighbours[c] if other in signed] for c in signed}
        empty = torch.empty(0, SIGNATURE, dtype=torch.uint8)
        signatures = {c: torch.stack([signed[o] for o in names[c]]) if names[c] else empty for c in signed}
        shapes = {c: (len(session.holds(c)), KEY) for c in signed}
        rows = fed.exchange(
            "aggregate",
            self.unmask,
            signed,
            {"sum": i, "names": each(names), "signatures": each(signatures)},
            Tensor,
            check=lambda client, value: _shaped(*shapes[client])(value),
            least=1,
        )
        return dict(rows)

    def _remove_masks(
        self,
        fed: Federation,
        session: Session,
        i: int,
        alive: Sequence[ClientId],
        revealed: Mapping[ClientId, Tensor],
        vectors: Sequence[masks.Words],
    ) -> None:
        """Take from the sum the survivors' own masks, and those that they share with members who dropped out."""
        rows = {c: {o: k for k, o in enumerate(session.holds(c))} for c in revealed}
        survivors = set(alive)
        for name in session.dealt:
            shares = {
                x: int.from_bytes(bytes_of(revealed[h][rows[h][name]]), "little")
                for x, h in enumerate(session.holders(name), 1)
                if h in revealed and name in rows[h]
            }
            known = session.published[name]
            partners = [o for o in session.neighbours[name] if o in survivors]
            if name not in survivors and not partners:
                continue
            try:
                seed = shamir.combine(shares, session.threshold).to_bytes(KEY, "little")
            except ValueError as error:
                raise RunError(f"round {fed.round}: the masks of {name} stay in the sum: {error}") from None
            right = clients.fingerprint(seed) == known.self_fingerprint(i)
            if not (right if name in survivors else keys.public_of(seed) == known.pair(i)):
                raise RunError(f"round {fed.round}: the masks of {name} stay in the sum: a share is wrong")
            if name in survivors:
                masks.add(vectors, clients.self_mask(seed, session.name, i), negative=True)
                continue
            for other in partners:
                key = clients.pair_mask(seed, session.published[other].pair(i), session.name, i, (name, other))
                masks.add(vectors, key, negative=other < name)  # the survivor added it if its name comes first


def _enough(fed: Federation, got: int, least: int, what: str) -> None:
    if got < least:
        raise RunError(f"round {fed.round}: {got} {what}, a sum that hides them needs {least}")


def _shaped(*shape: int) -> Any:
    """Check of a reply: bytes of this shape."""

    def check(value: Tensor) -> None:
        if value.dtype != torch.uint8 or tuple(value.shape) != shape:
            raise ClientFault(E_SHAPE, f"{value.dtype} {tuple(value.shape)}, expected bytes {shape}")

    return check


def _rows(tensor: Tensor, count: int, length: int) -> Tensor:
    """Check a payload: bytes (count, length)."""
    _shaped(count, length)(tensor)
    return tensor
