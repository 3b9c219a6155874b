"""Client half of BlindFed's encrypted forward pass: it sends inputs, and stores the disclosed activations.

The client writes disclosed activations into its own store as soon as they arrive. So a run that was killed continues
after the last batch and block, and every round trains on the same activations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.encrypted.inference.serialization import of_bytes, pack, unpack
from fedfm.encrypted.protocol import out_of_range, permutations, text_rows
from fedfm.encrypted.protocol.handshake import PARTS, Hello, Opened, check_numbers, spans, spans_by_part
from fedfm.encrypted.student.folding import Patches
from fedfm.errors import E_FIELD, E_LOST, E_NONFINITE, E_SHAPE, ClientFault
from fedfm.models import image_settings
from fedfm.models.adapters.side_adapter import STATES, Release, SideModel, of_states
from fedfm.models.images import pixels

if TYPE_CHECKING:
    from fedfm.encrypted.protocol.client_sessions import PermutedSessions, Sessions


@dataclass(frozen=True)
class SeenRows:
    """A client's disclosed activations as rows, and for each part a mask (n,), true for rows with finite states."""

    data: ClientData
    finite: dict[str, Tensor]


@dataclass
class ClientHalf:
    """The client half for all clients of this process.

    Attributes:
        protocol, encryption: the method's settings.
    """

    protocol: str
    encryption: str
    _sessions: list[Any] = field(default_factory=list)
    _models: dict[tuple[Any, ...], SideModel] = field(default_factory=dict)
    _views: dict[tuple[str, str], SeenRows] = field(default_factory=dict)

    # --- messages -----------------------------------------------------------------------------------------------------
    def open(self, client: Client, hello: Hello) -> Opened:
        """Store the server's hello, and return the client's numbers of rows.

        Raises:
            ClientFault: the server sends no key although this client encrypts rows, or sends a key to a client that
                does not encrypt; its sizes, tokenizer and tables do not fit together, or its model does not read
                the client's kind of rows.
        """
        if (hello.key is None) != (self.encryption == "clear"):
            raise ClientFault(E_FIELD, f'the server does not use encryption = "{self.encryption}"')
        check_numbers(hello)
        have = {part: rows for part in PARTS if len(rows := getattr(client.data, part))}
        if hello.tokenizer:
            text_rows.check_embedding(hello)
            text_rows.describe_rows(client, have, hello)
            client.store["tables"] = pack(hello.tables)
        else:
            for rows in have.values():
                images_of(rows)
        client.store["hello"] = pack(replace(hello, tables={}))  # it is read with every message
        key, evaluation = None, None
        if hello.key is not None:
            key, evaluation = self.sessions.open(client, hello.session, hello.tokens, hello.ring, hello.key)
        return Opened(counts(client), key, evaluation)

    def rows(self, client: Client, batch: int, session: Tensor | None, go_on: bool) -> Tensor:
        """Return the pixel values (n, 3, H, W) of a batch, or token ids (n, T), which are -1 after a row's last one.

        With a session, the values are encrypted. If ``go_on`` is true, the server already has the states of the batch,
        so the answer is empty.
        """
        hello = hello_of(client)
        if session is not None and go_on:
            self.sessions.begin(client, session)
            return of_bytes(b"")
        images, _ = self._batch(client, hello, batch)
        if hello.tokenizer:
            return self._text_rows(client, hello, images, session)
        pixels = preprocess(images, hello)
        if session is None and hello.key is None:
            return pixels  # nothing can overflow, and the simulated server applies the limits
        if session is None or hello.key is None:
            raise ClientFault(E_FIELD, "a session and a key belong together, but the server sent only one of them")
        pixels = self._screen(client, hello, batch, pixels, images)
        patches = Patches((hello.patch[0], hello.patch[1]), hello.extra)
        return self.sessions.rows(client, hello.session, hello.key, session, patches(pixels))

    def _text_rows(self, client: Client, hello: Hello, texts: list[str], session: Tensor | None) -> Tensor:
        """Return token ids of texts, or with a session the message with the encrypted embedded tokens."""
        ids, lengths, _ = text_rows.token_ids(texts, hello)
        if session is None and hello.key is None:
            return ids
        if session is None or hello.key is None:
            raise ClientFault(E_FIELD, "a session and a key belong together, but the server sent only one of them")
        x = text_rows.embed_ids(ids, lengths, unpack(client.store["tables"], dict[str, Tensor]))
        return self.sessions.rows(client, hello.session, hello.key, session, x)

    def keep(self, client: Client, batch: int, block: int, states: Tensor) -> int:
        """Store disclosed activations (n, k, P, d) of k blocks; the first of these is ``block``."""
        hello = hello_of(client)
        n = len(self._batch(client, hello, batch)[0])
        if hello.key is not None:
            message = states
            states = self.sessions.decrypt_released(client, hello.session, hello.key, message, n)[:, None]
            if (unlike := client.store.get(f"unlike-{batch}")) is not None:
                states[unpack(unlike, Tensor)] = 0
            if block == hello.blocks:
                self.sessions.end(client, message)
        shape = (n, states.shape[1] if states.dim() == 4 else 0, hello.positions, hello.width)
        if tuple(states.shape) != shape or not 1 <= block <= block + shape[1] - 1 <= hello.blocks:
            raise ClientFault(E_SHAPE, f"states have shape {tuple(states.shape)} for block {block}, expected {shape}")
        if not bool(torch.isfinite(states).all()):
            raise ClientFault(E_NONFINITE, f"disclosed activations of block {block} are not finite")
        client.store[f"states-{batch}-{block}"] = pack(states)
        self._views.pop((client.id, hello.session), None)
        return n

    def refresh(self, client: Client, message: Tensor) -> Tensor:
        """Encrypt masked values again."""
        hello = hello_of(client)
        if hello.key is None:
            raise ClientFault(E_FIELD, "this run has no encryption")
        return self.sessions.refresh(client, hello.session, hello.key, message)

    def rows_with_labels(self, client: Client, batch: int, session: Tensor | None, go_on: bool) -> dict[str, Tensor]:
        """Permuted: return rows as :meth:`rows` does, and their labels. With a session, both are encrypted."""
        rows, hello = self.rows(client, batch, session, go_on), hello_of(client)
        _, labels = self._batch(client, hello, batch)
        if session is not None and hello.key is not None:
            labels = self.permuted_sessions.labels(
                client, hello.session, hello.key, session, labels, len(hello.classes)
            )
        return {"rows": rows, "labels": labels}

    def turn(self, client: Client, batch: int, block: int, states: Tensor) -> Tensor:
        """Permuted: store a block's states (n, T, d) in the order in which they arrived, and return them encrypted."""
        hello = hello_of(client)
        n, answer = len(self._batch(client, hello, batch)[0]), states
        if hello.key is not None:
            last = block == hello.blocks
            states, answer = self.permuted_sessions.exchange_states(client, hello.session, hello.key, states, n, last)
        if tuple(states.shape) != (n, hello.tokens, hello.width) or not 1 <= block <= hello.blocks:
            raise ClientFault(
                E_SHAPE, f"states have shape {tuple(states.shape)}, expected {(n, hello.tokens, hello.width)}"
            )
        client.store[f"turned-{batch}-{block}"] = pack(states)
        return answer

    def align(self, client: Client, batch: int, relative: Tensor, labels: Tensor) -> int:
        """Permuted: store the relative orders (L + 1, n), and the labels (n,), which are in the last order."""
        hello = hello_of(client)
        n = len(self._batch(client, hello, batch)[0])
        if hello.key is not None:
            labels = self.permuted_sessions.labels_of(client, hello.session, hello.key, labels, n, len(hello.classes))
        if tuple(relative.shape) != (hello.blocks + 1, n) or tuple(labels.shape) not in ((n,), (0,)):
            raise ClientFault(E_SHAPE, f"orders have shape {tuple(relative.shape)}, expected {(hello.blocks + 1, n)}")
        for order in relative:
            permutations.check(order)
        client.store[f"orders-{batch}"] = pack({"relative": relative, "labels": labels})
        self._views.pop((client.id, hello.session), None)
        return n

    @property
    def sessions(self) -> Sessions:
        """The sessions under encryption, which need TenSEAL."""
        from fedfm.encrypted.protocol.client_sessions import PermutedSessions, Sessions

        if not self._sessions:
            self._sessions.append(PermutedSessions() if self.protocol == "permuted" else Sessions())
        return self._sessions[0]  # type: ignore[no-any-return]

    @property
    def permuted_sessions(self) -> PermutedSessions:
        """The sessions of the permuted protocol."""
        return cast("PermutedSessions", self.sessions)

    def _screen(self, client: Client, hello: Hello, batch: int, pixels: Tensor, images: Sequence[Any]) -> Tensor:
        """Return what is encrypted of a batch's pixel values: a copy of another row in place of each unlike one.

        Raises:
            ClientFault: permuted: states come back in secret orders, so that those of such a row cannot be dropped.
        """
        pixels, reasons = out_of_range.replace_unlike(pixels, hello.limits)
        span = (spans_by_part if self.protocol == "permuted" else spans)(counts(client), hello.batch)[batch]
        names = [
            str(image) if isinstance(image, str | Path) else f"{span.part} row {span.start + i + 1}".strip()
            for i, image in enumerate(images)
        ]
        text = out_of_range.describe_unlike(reasons, names)
        client.store.pop(f"unlike-{batch}", None)
        if text:
            client.log(text)
            if self.protocol == "permuted":  # the server reads the fault, so it names no row and no figure
                raise ClientFault(
                    E_FIELD,
                    "rows are beyond the limits of the server's model; the silo's log names them: take them out, or "
                    'choose protocol = "masked", which leaves them out',
                )
            client.store[f"unlike-{batch}"] = pack(torch.tensor([bool(reason) for reason in reasons]))
        return pixels

    # --- training -----------------------------------------------------------------------------------------------------
    def view(self, client: Client) -> Client:
        """Return the client with disclosed activations as its rows and side adapters as its model.

        Raises:
            ClientFault: the forward pass of the client's rows is not complete.
        """
        hello = hello_of(client)
        key = client.id, hello.session
        if key not in self._views:
            self._views[key] = self._read(client, hello)
        return replace(client, model=self._model(hello), data=self._views[key].data)

    def errors(self, seen: ClientData, clear: Callable[[str], Rows]) -> dict[str, float]:
        """Return the largest difference between disclosed and clear values, and the number of rows that overflowed."""
        most = 0.0
        finite = next(view.finite for view in self._views.values() if view.data is seen)
        for part in PARTS:
            states = getattr(seen, part).tensors[STATES]
            states = states[finite[part]] if part == "test" else states
            if len(states):
                true = clear(part).tensors[STATES][finite[part]]
                if (
                    self.protocol == "permuted"
                ):  # only the server knows the order, so compare each row with the closest one
                    true = true[torch.cdist(states.flatten(1), true.flatten(1)).argmin(1)]
                most = max(most, float((states - true).abs().max()))
        return {"max_error": most, "most_rows_left_out": float(sum(int((~mask).sum()) for mask in finite.values()))}

    def _model(self, hello: Hello) -> SideModel:
        shape = hello.blocks, hello.positions, hello.width, hello.rank, tuple(hello.classes)
        if shape not in self._models:
            self._models[shape] = of_states(*shape)
        model = self._models[shape]
        model.kernels = hello.kernels
        return model

    def _read(self, client: Client, hello: Hello) -> SeenRows:
        have = counts(client)
        try:
            read = _permuted_rows if self.protocol == "permuted" else _masked_rows
            parts, finite = out_of_range.exclude_rows(client, read(client, hello, have))
        except KeyError as error:
            raise ClientFault(
                E_LOST, f"the encrypted forward pass of the rows is not complete: {error} is missing"
            ) from None
        train, val, test = (parts[part] for part in PARTS)
        return SeenRows(ClientData(lambda: train, lambda: val, lambda: test), finite)

    def _batch(self, client: Client, hello: Hello, batch: int) -> tuple[list[Any], Tensor]:
        """Return images or texts of a batch, and their labels."""
        of = (spans_by_part if self.protocol == "permuted" else spans)(counts(client), hello.batch)
        if not 0 <= batch < len(of):
            raise ClientFault(E_FIELD, f"there is no batch {batch}, only {len(of)} batches")
        span = of[batch]
        parts = [getattr(client.data, part) for part in ([span.part] if span.part else PARTS)]
        parts = [rows for rows in parts if len(rows)]
        # Rows to predict have no labels.
        labels = torch.cat([torch.full((len(r),), -1) if r.labels is None else r.labels for r in parts])
        images = itertools.chain.from_iterable(map(text_rows.texts_of if hello.tokenizer else images_of, parts))
        return list(itertools.islice(images, span.start, span.stop)), labels[span.start : span.stop]


def counts(client: Client) -> dict[str, int]:
    """Return the client's number of rows in each part."""
    return {part: len(getattr(client.data, part)) for part in PARTS}


def hello_of(client: Client) -> Hello:
    """Read the server's stored hello.

    Raises:
        ClientFault: the server has not sent a hello.
    """
    if "hello" not in client.store:
        raise ClientFault(E_LOST, "the server has not sent a hello in this run")
    found: Hello = unpack(client.store["hello"], Hello)
    return found


def images_of(rows: Rows) -> Iterable[Any]:
    """Return the images of rows: uint8 (H, W, C), paths or encoded images.

    Raises:
        ClientFault: the rows are not images.
    """
    if rows.pictures is not None:
        return rows.pictures
    if "pixels" not in rows.tensors:
        raise ClientFault(E_FIELD, f"rows of {', '.join(rows.tensors) or 'text'}: the server's model takes images")
    return iter(rows.tensors["pixels"].numpy())


def preprocess(images: Sequence[Any], hello: Hello) -> Tensor:
    """Convert images to pixel values (n, 3, H', W'): resize and normalise them as the server's hello specifies."""
    return pixels(images, image_settings.call_from(hello.picture))


def _masked_rows(client: Client, hello: Hello, have: Mapping[str, int]) -> dict[str, Rows]:
    """Masked: return the rows of disclosed activations, by part."""
    done = [torch.zeros(0, hello.blocks, hello.positions, hello.width)]
    for batch in range(len(spans(have, hello.batch))):
        levels: list[Tensor] = []
        while (block := sum(x.shape[1] for x in levels) + 1) <= hello.blocks:
            levels.append(unpack(client.store[f"states-{batch}-{block}"], Tensor))
        done.append(torch.cat(levels, 1))
    states, found, at = torch.cat(done), {}, 0
    for part in PARTS:
        labels = getattr(client.data, part).labels
        found[part] = Rows({STATES: states[at : at + have[part]]}, labels=labels)
        at += have[part]
    return found


def _permuted_rows(client: Client, hello: Hello, have: Mapping[str, int]) -> dict[str, Rows]:
    """Permuted: return each part's labels, and its states of every block; all are in the last order."""
    if hello.release is None or hello.scales is None:
        raise ClientFault(E_FIELD, "release and scales are missing")
    release = Release(hello.release)
    states: dict[str, list[Tensor]] = {part: [torch.zeros(0, hello.blocks, *_shape(hello))] for part in PARTS}
    labels: dict[str, list[Tensor]] = {part: [torch.zeros(0, dtype=torch.int64)] for part in PARTS}
    for batch, span in enumerate(spans_by_part(have, hello.batch)):
        came = unpack(client.store[f"orders-{batch}"], dict[str, Tensor])
        turned = [unpack(client.store[f"turned-{batch}-{b}"], Tensor) for b in range(1, hello.blocks + 1)]
        levels = torch.stack(permutations.to_last(turned, came["relative"]), 1)  # (n, L, T, d)
        states[span.part].append(release(levels / hello.scales[:, None, None]))
        labels[span.part].append(came["labels"])
    return {part: Rows({STATES: torch.cat(states[part])}, labels=torch.cat(labels[part])) for part in PARTS}


def _shape(hello: Hello) -> Sequence[int]:
    return hello.positions, hello.width
