"""Secure aggregation: the server sees sums of updates, weights and metrics, but learns nothing about single clients.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth. Practical Secure Aggregation for
Privacy-Preserving Machine Learning. CCS 2017. Figure 4, with signatures and the consistency check. Bell, Bonawitz,
Gascon, Lepoint, Raykova. CCS 2020: each client shares masks with O(log n) neighbours. Ma, Woods, Angel, Polychroniadou,
Rabin. Flamingo. S&P 2023: clients agree on keys once for many sums, and clients outside a sum help to unmask it.

1. keys: each client publishes signed keys for the next sums;
2. share: each client receives the keys of all, and sends its neighbours encrypted shares of the seeds of its masks;
3. hold: each client receives its neighbours' shares;
4. the method's train message to the sum's cohort: the reply is the masked update and the client's seal, which is its
   signature of the cohort and of the payload that the server sent to all;
5. consent, if a client of the cohort dropped out: all that keep shares of the cohort sign the list of survivors;
6. unmask: for each neighbour in the cohort, clients that are still there reveal a share of one of its two seeds.

Messages 1 to 3 go to all clients before the first sum. They are repeated if a cohort has a client without keys, a
client dropped out, the keys are used up, or the run was resumed. With agreed keys a sum takes two or three messages.

*Why no client is unmasked alone*. Consider one client. Let h clients (its holders) have shares of its two seeds, let c
of these help the server, and let t shares determine a seed.

(a) For each sum an honest holder agrees to one list of survivors. It reveals once, and only a share of one seed. The
server can get at most h + c shares, and needs 2 t for both seeds. So with 2 t > h + c it gets at most one seed.
(b) A holder reveals for a list with dropouts only if more than ``threshold`` of all that keep shares of the cohort have
signed it. The cohort determines who these are. With two such lists the argument of (a) holds for them in place of the
holders of one client. So there is one such list only.
(c) Some holders may also reveal for the full cohort, in which nobody dropped out. At most h - c - (t - c) honest
holders can do so. Together with the c holders that help the server they are fewer than t. So the server gets the sum
over one list only.

The default t > 0.67 h gives 2 t - h > h / 3, so the proof holds while at most a third of the holders help the server.
``threshold = 0.5`` gives 2 t - h >= 1, so the proof holds against the server alone. In a sparse graph all of this is
true for each neighbourhood.

(d) In a sparse graph a list of survivors may cut their masks into parts, each of which could be added up alone. Nobody
consents to such a list (:meth:`Agreed.splits`). Survivors that help the server hide nothing: with t - d / 2 - 1 of them
among the d / 2 clients on both sides of a part, the others there being dropouts, the server reads the part's sum.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.aggregation._secagg_client import Member, identity_of, member_of, once, refusal, short, sum_of
from fedfm.aggregation._secagg_keys import (
    ALIVE,
    DEAD,
    KEY,
    LEAST,
    OUT,
    SIGNATURE,
    Agreed,
    Card,
    OwnKeys,
    bytes_of,
    degree,
    least_of,
    to_tensor,
    witnesses,
)
from fedfm.aggregation._secagg_session import (
    AHEAD,
    Masked,
    Session,
    Sum,
    bytes_check,
    check_bytes,
    digest_of,
    remove_masks,
)
from fedfm.aggregation.base import Half, Of, Payload, Transport
from fedfm.core.client import AGGREGATION_MESSAGE, MAX_WEIGHT, Client, ClientId, Update, each, on_client
from fedfm.core.federation import Federation
from fedfm.core.wire import limits
from fedfm.errors import E_FIELD, E_NORM, E_SHAPE, ClientFault, RunError
from fedfm.linalg.params import Layout, Params
from fedfm.privacy.crypto import keys, masks
from fedfm.privacy.crypto.fixed_point import FixedPoint

MEMORY = "SecAgg"  # key of the state in the memories of server and client
WEIGHT = "SecAgg.weight"  # key in ``fed.process_memory``: the sum of the weights in the last mean
_TOLD = "SecAgg/coarse"  # set once the user has got a notice about the rounding of sums
_SEAL = KEY + SIGNATURE
_WORD = 8  # bytes of a masked number
_MILLIONTH = 1e-6


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
    message_type = Sum

    @property
    def _terms(self) -> str:
        """Digest of the settings. Signatures and encrypted shares cover it, so they are invalid for other settings."""
        return hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()

    def why_missing(self, metric: str) -> str:
        if metric in self.metrics:
            return f'no client reported it, or its sum is 0; fed.metrics.get("{metric}", 0.0) covers both cases'
        return (
            "clients did not report it, because secure aggregation sums only what aggregation.metrics names; set "
            f'[aggregation] name = "secure", metrics = {json.dumps([*self.metrics, metric])}'
        )

    def head_code(self, n: int) -> FixedPoint:
        """Fixed-point code of weights and weighted metrics; integer weights are exact."""
        return FixedPoint(64, MAX_WEIGHT, n)

    def body_code(self, n: int) -> FixedPoint:
        """Fixed-point code of the weighted delta."""
        return FixedPoint(32 if self.compact else 64, self.bound, n)

    # --- client half

    @on_client(kind="aggregate")
    def keys(self, client: Client, session: str) -> Tensor:
        """Message 1: a :class:`Card`, and whether the silo has a roster, (64 (1 + 16) + 64 + 1,) uint8."""
        master, identity = keys.entropy(KEY), identity_of(client)
        data = OwnKeys(master, AHEAD).public()
        tag = hashlib.sha256(data).hexdigest()[:32]
        member = Member(session, master.hex(), AHEAD, tag, self._terms, self.neighbours)
        client.memory[MEMORY] = dataclasses.asdict(member)
        signature = keys.sign(identity, *member.key_context(client.id, data))
        return to_tensor(keys.identity_of(identity) + data + signature + bytes([client.roster is not None]))

    @on_client(kind="aggregate")
    def share(self, client: Client, names: list[str], published: Tensor) -> Tensor:
        """Message 2: encrypted shares for each neighbour, (d, 28 + 64 sums) uint8."""
        member, n = self._member(client), len(names)
        if n < (least := max(LEAST, client.smallest_cohort)):
            raise refusal(f"the sum has {n} clients, expected at least {least}")
        once(client, f"{member.tag}-share", "shares of seeds")
        member.join(client, names, check_bytes(published, n, Card.length(member.sums)))
        sealed = member.deal(client.id, least_of(self.threshold, degree(self.neighbours, n) + 1))
        client.memory[MEMORY] = dataclasses.asdict(member)
        return to_tensor(b"".join(sealed)).reshape(len(sealed), -1)

    @on_client(kind="aggregate")
    def hold(self, client: Client, present: list[str], sealed: Tensor) -> None:
        """Message 3: store the neighbours' shares."""
        member = self._member(client)
        rows = check_bytes(sealed, len(present), keys.SEALED + 2 * KEY * member.sums)
        member.hold(client.id, present, [bytes_of(row) for row in rows])
        client.memory[MEMORY] = dataclasses.asdict(member)

    def ready(self, client: Client) -> None:
        request, member = sum_of(client), self._member(client)
        member.fit(client, request.number, bytes_of(request.cohort))
        if not 0 <= request.size * _WORD <= limits.room(getattr(client.model, "layout", None)):
            raise refusal(f"the server requests a masked vector of {request.size} numbers")

    def protect(self, client: Client, update: Update) -> Masked:
        """Message 4: the masked update and the client's seal.

        Raises:
            ClientFault: E_NORM, an entry times the update's weight is NaN or above the bound; E_SHAPE, the update has
                another size than the sum; E_REFUSED, there are no agreed keys.
        """
        factor, request = update.weight, sum_of(client)
        if request.size not in (0, size := sum(update.delta.layout.sizes.values())):
            raise ClientFault(E_SHAPE, f"an update of {size} numbers, expected {request.size}")
        if self.clip_norm is not None and (norm := update.delta.norm()) > self.clip_norm:
            factor *= self.clip_norm / norm
        metrics = [update.weight * update.metrics.get(name, 0.0) for name in self.metrics]
        n = max(int(request.cohort.sum()), 1)
        head_code, body_code = self.head_code(n), self.body_code(n)
        try:
            head = head_code.encode(np.clip([update.weight, *metrics], -MAX_WEIGHT, MAX_WEIGHT))
            flats = (flat.numpy() for flat in update.delta.flats.values())
            body = np.concatenate([body_code.encode(flat, factor) for flat in flats])
        except ValueError as error:
            raise ClientFault(E_NORM, f"{error}; see aggregation.bound") from None
        return self._mask(client, head, body)

    def blank(self, client: Client) -> Masked:
        """Message 4 of a client that has no update: masked zeros with weight 0, which look like any other update."""
        size = sum_of(client).size or sum(client.model.layout.sizes.values())
        head, body = self.head_code(1), self.body_code(1)  # zeros have the same code for any settings
        return self._mask(client, np.zeros(1 + len(self.metrics), head.dtype), np.zeros(size, body.dtype))

    def _mask(self, client: Client, head: masks.Words, body: masks.Words) -> Masked:
        member, request = self._member(client), sum_of(client)
        cohort = bytes_of(check_bytes(request.cohort, len(member.names)))
        seal = member.mask(client, request.number, cohort, digest_of(client.broadcast), (head, body))
        integers = torch.from_numpy(head.view(np.int64)), torch.from_numpy(body.view(f"i{body.itemsize}"))
        return Masked(to_tensor(b"".join(seal)), *integers)

    @on_client(kind="aggregate")
    def consent(self, client: Client, sum: int, status: Tensor, seals: Tensor) -> Tensor:
        """Message 5: a signature, (64,) uint8. ``status`` (n,) uint8 is OUT, DEAD or ALIVE."""
        member = self._member(client)
        return to_tensor(member.consent(client, sum, self._survivors(member, client, sum, status, seals)))

    @on_client(kind="aggregate")
    def unmask(
        self, client: Client, sum: int, status: Tensor, seals: Tensor, names: list[str], signatures: Tensor
    ) -> Tensor:
        """Message 6: one share for each cohort member whose seed shares this client keeps, (members, 32) uint8."""
        member = self._member(client)
        digest = self._survivors(member, client, sum, status, seals)
        signed = map(bytes_of, check_bytes(signatures, len(names), SIGNATURE))
        signatures_by_name = dict(zip(names, signed, strict=True))
        shares = member.reveal(client, sum, bytes_of(status), digest, signatures_by_name, self.threshold)
        return to_tensor(b"".join(shares)).reshape(-1, KEY)

    def _survivors(self, member: Member, client: Client, i: int, status: Tensor, seals: Tensor) -> bytes:
        rows = [bytes_of(row) for row in check_bytes(seals, len(seals), _SEAL)]
        return member.survivors(client, i, bytes_of(check_bytes(status, len(member.names))), rows, self.threshold)

    def _member(self, client: Client) -> Member:
        return member_of(client.memory.get(MEMORY))

    # --- server half

    def updates(self, fed: Federation, handler: Half, of: Of, payload: Payload, like: Layout) -> Iterator[Update]:
        asked = sorted(fed.clients if of is None else of)
        if undeclared := {k for k, v in payload.items() if isinstance(v, each)} - {*handler.varying}:  # type: ignore[attr-defined]
            raise RunError(
                f"{handler.__name__}: {undeclared} differ by client; declare them in @on_client(varying=(...))"
            )
        fed.cohort = fed.cohort or tuple(asked)  # set here: the exchange below asks only clients with agreed keys
        _enough(fed, len(asked), LEAST, "clients are asked")
        session: Session | None = fed.process_memory.get(MEMORY)
        if session is None or not session.serves(asked):
            session = self._agree(fed)
        i, agreement = session.used, session.agreement
        fed.process_memory[MEMORY] = session
        session.used, session.broken = i + 1, True  # broken becomes False below if all messages succeed
        wanted = set(asked)
        cohort = bytes(p in session.shares_at and name in wanted for p, name in enumerate(agreement.names))
        n = sum(cohort)
        _enough(fed, n, LEAST, "clients have keys")
        head, body = self.head_code(n), self.body_code(n)
        vectors = np.zeros(1 + len(self.metrics), head.dtype), np.zeros(sum(like.sizes.values()), body.dtype)
        position = {name: p for p, name in enumerate(agreement.names)}
        seals: dict[int, bytes] = {}

        def check(client: ClientId, reply: Masked) -> None:
            for got, vector in zip((reply.head, reply.body), vectors, strict=True):
                if got.shape != vector.shape or got.numpy().itemsize != vector.itemsize or got.is_floating_point():
                    raise ClientFault(E_SHAPE, f"a masked vector of {tuple(got.shape)}, expected {vector.shape}")
            bytes_check(_SEAL)(reply.seal)
            seal, p = bytes_of(reply.seal), position[client]
            said = agreement.statement("masked", i, cohort, seal[:KEY])
            if not keys.verify(agreement.card(p).identity, seal[KEY:], *said):
                raise ClientFault(E_FIELD, f"the masked update is not for sum {i} and its cohort")
            seals[p] = seal

        payloads = {**payload, AGGREGATION_MESSAGE: Sum(i, to_tensor(cohort), vectors[1].size)}
        members = [name for p, name in enumerate(agreement.names) if cohort[p] and p in session.holds]
        alive = 0
        for _, reply in fed.exchange("train", handler, members, payloads, Masked, form="masked", check=check):
            for part, vector in zip((reply.head, reply.body), vectors, strict=True):
                vector += part.numpy().view(vector.dtype)
            alive += 1
        _enough(fed, alive, max(least_of(self.threshold, n), 2), "clients sent a masked update")
        status = bytes((ALIVE if p in seals else DEAD) if here else OUT for p, here in enumerate(cohort))
        if agreement.splits(status):
            raise RunError(
                f"round {fed.round}: {n - alive} of {n} clients dropped out, so that the masks of the others hide only "
                "sums of parts of them; set a larger aggregation.neighbours"
            )
        revealed = self._reveal(fed, session, i, status, seals)
        remove_masks(fed.round, session, i, status, seals, revealed, vectors)
        fed.heard = alive
        session.broken = alive < len(asked) or any(p not in revealed for p in session.askable(status))
        weight, *totals = head.decode(vectors[0]).tolist()
        if not weight > 0:
            raise RunError(
                f"round {fed.round}: the weights in the sum add up to {weight:g}: no client had an update that can be "
                "sent. The log of each silo says why; a smaller method.local.learning_rate is a likely cure"
            )
        fed.process_memory[WEIGHT] = weight
        fed.metrics.update({name: x / weight for name, x in zip(self.metrics, totals, strict=True) if x})
        total = torch.from_numpy(body.decode(vectors[1]))
        self._judge(fed, body.step * math.sqrt(alive / 12), total)
        mean = total.div_(weight)
        flats, at = {}, 0
        for dtype, size in like.sizes.items():
            part = mean[at : at + size]
            flats[dtype] = (part if dtype.is_floating_point else part.round()).to(dtype)
            at += size
        yield Update(Params.from_flat(like, flats), weight)

    def _judge(self, fed: Federation, off: float, total: Tensor) -> None:
        """Give the user a notice, once, if a compact sum is rounded by more than a millionth of its size.

        Args:
            off: root mean square of the rounding error; each term of the sum is off by up to half a step, uniformly.
        """
        if not self.compact or fed.process_memory.get(_TOLD):
            return
        size = float(total.norm()) / math.sqrt(max(len(total), 1))
        if off > _MILLIONTH * size:
            fed.process_memory[_TOLD] = True
            share = f"{off / size:.1g} of it" if size else "all of it"
            fed.notice(
                f"secure aggregation: aggregation.compact rounds the sum by {share}; a smaller aggregation.bound "
                "rounds less, and without compact no bound needs to be set"
            )

    def _agree(self, fed: Federation) -> Session:
        """Messages 1 to 3."""
        name, length = keys.entropy(16).hex(), Card.length(AHEAD)
        sent = fed.ask(self.keys, check=bytes_check(length + 1), session=name)
        names, n = sorted(sent), len(sent)
        _enough(fed, n, LEAST, "clients sent keys")
        table = torch.stack([sent[c][:length] for c in names])
        agreement = Agreed(self._terms, name, names, table, self.neighbours)
        if alone := [p for p, c in enumerate(names) if not sent[c][length]]:
            identities = ", ".join(f"{names[p]} {short(agreement.card(p).identity.hex())}" for p in alone)
            fed.notice(
                f"secure aggregation: silos without a roster trust identities on first use; theirs are {identities}"
            )
        d = degree(self.neighbours, n)
        shape = bytes_check(d, keys.SEALED + 2 * KEY * AHEAD)
        came = fed.ask(self.share, of=names, check=shape, names=names, published=table)
        _enough(fed, len(came), LEAST, "clients sent shares")
        around = {p: agreement.around(p) for p, c in enumerate(names) if c in came}
        present = {p: [o for o in near if o in around] for p, near in around.items()}
        sealed = {
            names[p]: torch.stack([came[names[o]][around[o].index(p)] for o in others])
            for p, others in present.items()
            if others
        }
        theirs = each({names[p]: [names[o] for o in others] for p, others in present.items()})
        hold = fed.ask(self.hold, of=sealed, present=theirs, sealed=each(sealed))
        shares_at = {p: [p, *near] for p, near in around.items()}
        holds = {p: [p, *others] for p, others in present.items() if names[p] in hold}
        return Session(agreement, least_of(self.threshold, d + 1), shares_at, holds)

    def _reveal(
        self, fed: Federation, session: Session, i: int, status: bytes, seals: Mapping[int, bytes]
    ) -> dict[int, Tensor]:
        """Messages 5 and 6: for each client, by position, the shares that it reveals."""
        names = session.agreement.names
        asked = {names[p]: p for p in session.askable(status)}
        rows = {
            c: torch.stack([to_tensor(seals[o]) for o in witnesses(session.holds[p], status)]) for c, p in asked.items()
        }
        message: dict[str, Any] = {"sum": i, "status": to_tensor(status), "seals": each(rows)}
        signed: dict[ClientId, Tensor] = {}
        if DEAD in status:
            signed = fed.ask(self.consent, of=asked, check=bytes_check(SIGNATURE), least=1, **message)
            asked = {c: p for c, p in asked.items() if c in signed}
        message["names"] = sorted(signed)
        none = torch.empty(0, SIGNATURE, dtype=torch.uint8)
        message["signatures"] = torch.stack([signed[name] for name in message["names"]]) if signed else none
        shapes = {c: (sum(status[o] != OUT for o in session.holds[p]), KEY) for c, p in asked.items()}
        found = fed.exchange(
            "aggregate",
            self.unmask,
            asked,
            message,
            Tensor,
            check=lambda client, value: bytes_check(*shapes[client])(value),
            least=1,
        )
        return {asked[c]: value for c, value in found}


def _enough(fed: Federation, got: int, least: int, what: str) -> None:
    if got < least:
        raise RunError(f"round {fed.round}: {got} {what}, but a sum that hides them needs {least}")
