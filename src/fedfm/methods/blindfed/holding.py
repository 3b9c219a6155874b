"""Client half of BlindFed's passes: rows as the server's model takes them, and the states that it released, on disk.

What is kept is written when it comes, in the client's own store: a run that was killed goes on after the last batch
and block, and every round trains on what came once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.core.wire import payload
from fedfm.errors import E_FIELD, E_LOST, E_NONFINITE, E_SHAPE, ClientFault
from fedfm.methods.blindfed import left_out, orders
from fedfm.models import inputs
from fedfm.models.folding import Patches
from fedfm.models.pictures import pixels
from fedfm.models.side_adapter import STATES, Release, SideModel, of_states

if TYPE_CHECKING:
    from fedfm.methods.blindfed.permuted_holder import PermutedSessions
    from fedfm.methods.blindfed.sessions import Sessions

PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class Hello:
    """What the server tells a client before its rows pass.

    Attributes:
        session: names the run at the client, hexadecimal.
        blocks, positions, width: L, P, d of the released states.
        rank: r of the side adapters.
        classes: in the order of the logits.
        kernels: of local training (see ``run.kernels``).
        batch: rows that pass together.
        tokens, patch, extra: T of a row, (height, width) of a patch, tokens before the patches.
        picture: how pictures become the model's input (see :func:`fedfm.models.inputs.told`).
        digest: sha256 of the model.
        key: the server's public key, with encryption.
        ring: degree of the ciphertexts' ring, with encryption.
        release, scales: permuted: from the tokens of a block to what the adapters read, (P, T), and what they are
            divided by, (L,).
    """

    session: str
    blocks: int
    positions: int
    width: int
    rank: int
    classes: list[str]
    kernels: str
    batch: int
    tokens: int
    patch: list[int]
    extra: int
    picture: dict[str, Any]
    digest: str
    key: Tensor | None = None
    ring: int = 8192
    release: Tensor | None = None
    scales: Tensor | None = None


@dataclass(frozen=True)
class Opened:
    """A client's answer.

    Attributes:
        rows: its numbers of rows, of each of :data:`PARTS`.
        key: its public key, with encryption.
        keys: a message with its evaluation keys.
    """

    rows: dict[str, int]
    key: Tensor | None = None
    keys: Tensor | None = None


@dataclass(frozen=True)
class RowSpan:
    """Rows of one batch: ``start`` to ``stop`` of all rows, or of one part's."""

    start: int
    stop: int
    part: str = ""


def spans(rows: Mapping[str, int], batch: int) -> list[RowSpan]:
    """The batches of a client's rows, its parts one after the other."""
    total = sum(rows[part] for part in PARTS)
    return [RowSpan(start, min(start + batch, total)) for start in range(0, total, batch)]


def spans_by_part(rows: Mapping[str, int], batch: int) -> list[RowSpan]:
    """Batches of one part each, of at least two rows: with one row an order hides nothing.

    Raises:
        ClientFault: a part has one row.
    """
    found = []
    for part in PARTS:
        n = rows[part]
        if n == 1:
            raise ClientFault(E_FIELD, f"1 {part} row: a batch in a secret order needs at least 2")
        count = -(-n // batch)
        ends = [round(n * i / count) for i in range(count + 1)] if count else [0]
        found += [RowSpan(a, b, part) for a, b in itertools.pairwise(ends)]
    return found


@dataclass(frozen=True)
class SeenRows:
    """A client's released states as rows; of all its rows of a part (n,), which have numbers (:mod:`.left_out`)."""

    data: ClientData
    whole: dict[str, Tensor]


@dataclass
class Held:
    """The client half, for all clients of this process.

    Attributes:
        protocol, encryption: of the method.
    """

    protocol: str
    encryption: str
    _sessions: list[Any] = field(default_factory=list)
    _models: dict[tuple[Any, ...], SideModel] = field(default_factory=dict)
    _views: dict[tuple[str, str], SeenRows] = field(default_factory=dict)

    # --- messages -----------------------------------------------------------------------------------------------------
    def open(self, client: Client, told: Hello) -> Opened:
        """Keep what was told; the numbers of rows.

        Raises:
            ClientFault: the server has no key although the experiment says that rows leave encrypted, or has one.
        """
        if (told.key is None) != (self.encryption == "clear"):
            raise ClientFault(E_FIELD, f'a server that does not agree on encryption = "{self.encryption}"')
        client.store["told"] = pack(told)
        key, evaluation = None, None
        if told.key is not None:
            key, evaluation = self.sessions.open(client, told.session, told.tokens, told.ring, told.key)
        return Opened(counts(client), key, evaluation)

    def rows(self, client: Client, batch: int, session: Tensor | None, go_on: bool) -> Tensor:
        """Pixel values (n, 3, H, W) of a batch; in a session ciphertexts, or nothing if its states are known."""
        told = told_to(client)
        if session is not None and go_on:
            self.sessions.begin(client, session)
            return of_bytes(b"")
        pictures, _ = self._batch(client, told, batch)
        pixels = prepared(pictures, told)
        if session is None and told.key is None:
            return pixels
        if session is None or told.key is None:
            raise ClientFault(E_FIELD, "rows leave encrypted, or not at all: a session and a key belong together")
        patches = Patches((told.patch[0], told.patch[1]), told.extra)
        return self.sessions.rows(client, told.session, told.key, session, pixels, patches)

    def keep(self, client: Client, batch: int, block: int, states: Tensor) -> int:
        """Keep released states (n, k, P, d) of the blocks from ``block`` on."""
        told = told_to(client)
        n = len(self._batch(client, told, batch)[0])
        if told.key is not None:
            message = states
            states = self.sessions.released(client, told.session, told.key, message, n)[:, None]
            if block == told.blocks:
                self.sessions.end(client, message)
        shape = (n, states.shape[1] if states.dim() == 4 else 0, told.positions, told.width)
        if tuple(states.shape) != shape or not 1 <= block <= block + shape[1] - 1 <= told.blocks:
            raise ClientFault(E_SHAPE, f"states {tuple(states.shape)} of block {block}: expected {shape}")
        if not bool(torch.isfinite(states).all()):
            raise ClientFault(E_NONFINITE, f"released states of block {block} are not finite")
        client.store[f"states-{batch}-{block}"] = pack(states)
        self._views.pop((client.id, told.session), None)
        return n

    def refresh(self, client: Client, message: Tensor) -> Tensor:
        """Masked numbers, encrypted again."""
        told = told_to(client)
        if told.key is None:
            raise ClientFault(E_FIELD, "there is no encryption in this run")
        return self.sessions.refresh(client, told.session, told.key, message)

    def labelled(self, client: Client, batch: int, session: Tensor | None, go_on: bool) -> dict[str, Tensor]:
        """Permuted: a batch as :meth:`rows` gives it, and its labels; in a session ciphertexts."""
        rows, told = self.rows(client, batch, session, go_on), told_to(client)
        _, labels = self._batch(client, told, batch)
        if session is not None and told.key is not None:
            labels = self.ordered.labels(client, told.session, told.key, session, labels, len(told.classes))
        return {"rows": rows, "labels": labels}

    def turn(self, client: Client, batch: int, block: int, states: Tensor) -> Tensor:
        """Permuted: keep the states (n, T, d) of a block, in the order in which they came; return them, encrypted."""
        told = told_to(client)
        n, answer = len(self._batch(client, told, batch)[0]), states
        if told.key is not None:
            last = block == told.blocks
            states, answer = self.ordered.turned(client, told.session, told.key, states, n, last)
        if tuple(states.shape) != (n, told.tokens, told.width) or not 1 <= block <= told.blocks:
            raise ClientFault(E_SHAPE, f"states {tuple(states.shape)}: expected {(n, told.tokens, told.width)}")
        client.store[f"turned-{batch}-{block}"] = pack(states)
        return answer

    def align(self, client: Client, batch: int, relative: Tensor, labels: Tensor) -> int:
        """Permuted: keep the relative orders (L + 1, n) and the labels (n,) in the last order."""
        told = told_to(client)
        n = len(self._batch(client, told, batch)[0])
        if told.key is not None:
            labels = self.ordered.labels_of(client, told.session, told.key, labels, n, len(told.classes))
        if tuple(relative.shape) != (told.blocks + 1, n) or tuple(labels.shape) not in ((n,), (0,)):
            raise ClientFault(E_SHAPE, f"orders {tuple(relative.shape)}: expected {(told.blocks + 1, n)}")
        for order in relative:
            orders.check(order)
        client.store[f"orders-{batch}"] = pack({"relative": relative, "labels": labels})
        self._views.pop((client.id, told.session), None)
        return n

    @property
    def sessions(self) -> Sessions:
        """Of the encryption; needs TenSEAL."""
        from fedfm.methods.blindfed.permuted_holder import PermutedSessions
        from fedfm.methods.blindfed.sessions import Sessions

        if not self._sessions:
            self._sessions.append(PermutedSessions() if self.protocol == "permuted" else Sessions())
        return self._sessions[0]  # type: ignore[no-any-return]

    @property
    def ordered(self) -> PermutedSessions:
        """Of the permuted protocol."""
        return cast("PermutedSessions", self.sessions)

    # --- training -----------------------------------------------------------------------------------------------------
    def view(self, client: Client) -> Client:
        """The client with its released states as rows, and with side adapters as its model.

        Raises:
            ClientFault: its rows have not passed the server's model.
        """
        told = told_to(client)
        key = client.id, told.session
        if key not in self._views:
            self._views[key] = self._read(client, told)
        return replace(client, model=self._model(told), data=self._views[key].data)

    def errors(self, seen: ClientData, clear: Callable[[str], Rows]) -> dict[str, float]:
        """The largest difference of a released number from that in the clear; how many rows have no numbers."""
        most = 0.0
        whole = next(view.whole for view in self._views.values() if view.data is seen)
        for part in PARTS:
            states = getattr(seen, part).tensors[STATES]
            states = states[whole[part]] if part == "test" else states
            if len(states):
                true = clear(part).tensors[STATES][whole[part]]
                if self.protocol == "permuted":  # nobody but the server knows which row is which: the closest one
                    true = true[torch.cdist(states.flatten(1), true.flatten(1)).argmin(1)]
                most = max(most, float((states - true).abs().max()))
        return {"max_error": most, "most_rows_left_out": float(sum(int((~mask).sum()) for mask in whole.values()))}

    def _model(self, told: Hello) -> SideModel:
        shape = told.blocks, told.positions, told.width, told.rank, tuple(told.classes)
        if shape not in self._models:
            self._models[shape] = of_states(*shape)
        model = self._models[shape]
        model.kernels = told.kernels
        return model

    def _read(self, client: Client, told: Hello) -> SeenRows:
        have = counts(client)
        try:
            read = _aligned if self.protocol == "permuted" else _released
            parts, whole = left_out.kept(client, read(client, told, have))
        except KeyError as error:
            raise ClientFault(E_LOST, f"the rows have not passed the server's model: {error} is missing") from None
        train, val, test = (parts[part] for part in PARTS)
        return SeenRows(ClientData(lambda: train, lambda: val, lambda: test), whole)

    def _batch(self, client: Client, told: Hello, batch: int) -> tuple[list[Any], Tensor]:
        """Pictures and labels of a batch."""
        of = (spans_by_part if self.protocol == "permuted" else spans)(counts(client), told.batch)
        if not 0 <= batch < len(of):
            raise ClientFault(E_FIELD, f"batch {batch}: there are {len(of)}")
        span = of[batch]
        parts = [getattr(client.data, part) for part in ([span.part] if span.part else PARTS)]
        parts = [rows for rows in parts if len(rows)]
        # Rows to predict have no labels.
        labels = torch.cat([torch.full((len(r),), -1) if r.labels is None else r.labels for r in parts])
        pictures = itertools.chain.from_iterable(map(pictures_of, parts))
        return list(itertools.islice(pictures, span.start, span.stop)), labels[span.start : span.stop]


def counts(client: Client) -> dict[str, int]:
    """Its numbers of rows."""
    return {part: len(getattr(client.data, part)) for part in PARTS}


def told_to(client: Client) -> Hello:
    """What the server told this client.

    Raises:
        ClientFault: nothing.
    """
    if "told" not in client.store:
        raise ClientFault(E_LOST, "the server has not opened this run")
    found: Hello = unpack(client.store["told"], Hello)
    return found


def pictures_of(rows: Rows) -> Iterable[Any]:
    """Pictures uint8 (H, W, C), or paths or encoded pictures.

    Raises:
        ClientFault: the rows are no pictures.
    """
    if rows.pictures is not None:
        return rows.pictures
    if "pixels" not in rows.tensors:
        raise ClientFault(E_FIELD, f"rows of {', '.join(rows.tensors) or 'text'}: the server's model takes pictures")
    return iter(rows.tensors["pixels"].numpy())


def prepared(pictures: Sequence[Any], told: Hello) -> Tensor:
    """Pictures as pixel values (n, 3, H', W'), resized and normalised as the server says."""
    return pixels(pictures, inputs.from_told(told.picture))


def _released(client: Client, told: Hello, have: Mapping[str, int]) -> dict[str, Rows]:
    """Masked: rows of released states, by part."""
    done = [torch.zeros(0, told.blocks, told.positions, told.width)]
    for batch in range(len(spans(have, told.batch))):
        levels: list[Tensor] = []
        while (block := sum(x.shape[1] for x in levels) + 1) <= told.blocks:
            levels.append(unpack(client.store[f"states-{batch}-{block}"], Tensor))
        done.append(torch.cat(levels, 1))
    states, found, at = torch.cat(done), {}, 0
    for part in PARTS:
        labels = getattr(client.data, part).labels
        found[part] = Rows({STATES: states[at : at + have[part]]}, labels=labels)
        at += have[part]
    return found


def _aligned(client: Client, told: Hello, have: Mapping[str, int]) -> dict[str, Rows]:
    """Permuted: every block's states in the last order, by the relative orders, and the labels in that order."""
    if told.release is None or told.scales is None:
        raise ClientFault(E_FIELD, "release and scales are missing")
    release = Release(told.release)
    states: dict[str, list[Tensor]] = {part: [torch.zeros(0, told.blocks, *_shape(told))] for part in PARTS}
    labels: dict[str, list[Tensor]] = {part: [torch.zeros(0, dtype=torch.int64)] for part in PARTS}
    for batch, span in enumerate(spans_by_part(have, told.batch)):
        came = unpack(client.store[f"orders-{batch}"], dict[str, Tensor])
        turned = [unpack(client.store[f"turned-{batch}-{b}"], Tensor) for b in range(1, told.blocks + 1)]
        levels = torch.stack(orders.to_last(turned, came["relative"]), 1)  # (n, L, T, d)
        states[span.part].append(release(levels / told.scales[:, None, None]))
        labels[span.part].append(came["labels"])
    return {part: Rows({STATES: torch.cat(states[part])}, labels=torch.cat(labels[part])) for part in PARTS}


def _shape(told: Hello) -> Sequence[int]:
    return told.positions, told.width


def of_bytes(data: bytes) -> Tensor:
    """Bytes as a message carries them, uint8 (n,)."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def to_bytes(tensor: Tensor | None) -> bytes:
    """The inverse of :func:`of_bytes`; nothing for None."""
    return b"" if tensor is None else tensor.contiguous().numpy().tobytes()


def pack(value: Any) -> bytes:
    """A value of the wire format as bytes; :func:`unpack` is the inverse."""
    head, pieces = payload.encode(value)
    text = head.encode()
    return len(text).to_bytes(8, "little") + text + b"".join(pieces)


def unpack(data: bytes, hint: Any) -> Any:
    """The value, checked against ``hint``."""
    end = 8 + int.from_bytes(data[:8], "little")
    body = np.frombuffer(bytearray(data[end:]), np.uint8)
    return payload.decode(data[8:end].decode(), body, hint, trusted=True)
