"""Server half of BlindFed's forward pass: the clients, the remaining batches, and the progress."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedfm.core.client import ClientId, each
from fedfm.core.crossing import Crossing
from fedfm.core.durations import duration_text
from fedfm.core.federation import Federation
from fedfm.encrypted.protocol import text_rows
from fedfm.encrypted.protocol.handshake import PARTS, Hello, Opened
from fedfm.encrypted.protocol.out_of_range import within_limits
from fedfm.encrypted.student.folding import fold, patches_of
from fedfm.encrypted.student.input_limits import limits_of
from fedfm.encrypted.token_places import places_of
from fedfm.models import image_settings
from fedfm.models.adapters.side_adapter import SideModel
from fedfm.models.adapters.side_texts import text_places

SLOTS = 4096  # rows of a full batch times tokens of a row, in a ring of degree 8192
_SESSION, _DONE, _CROSSED = "session", "done", "crossed-"  # keys in the server's store
_PAGE = 64  # number of messages in one entry of the store; a new message rewrites only the last entry
_OFTEN = 5.0  # seconds between two reports of progress


@dataclass
class ForwardPass:
    """The server's side of the forward pass of all clients.

    Attributes:
        fed: the federation.
        model: the student with side adapters.
        session: 16 bytes, which stay the same after a resume.
        ring: degree of the ciphertexts' ring; without encryption it only determines the rows per batch.
        opened: the clients' answers to the hello.
        done: the completed batches of each client; they are stored on disk before the next batch begins.
    """

    fed: Federation
    model: SideModel
    session: bytes
    ring: int = 8192
    opened: dict[ClientId, Opened] = field(default_factory=dict)
    done: dict[ClientId, list[int]] = field(default_factory=dict)
    _begun: float = field(default_factory=time.monotonic)
    _reported: float = 0.0
    _full: int = 0

    @classmethod
    def begin(cls, fed: Federation, model: SideModel, ring: int = 8192) -> ForwardPass:
        """Begin a session, or continue the session of a killed run."""
        if _SESSION not in fed.store:
            fed.store[_SESSION] = os.urandom(16)
        done = json.loads(fed.store[_DONE]) if _DONE in fed.store else {}
        for key in sorted(key for key in fed.store if key.startswith(_CROSSED)):  # messages that earlier processes sent
            for values in json.loads(fed.store[key]):
                fed.transcript.add(Crossing(*values))
        return cls(fed, model, fed.store[_SESSION], ring, done=done)

    @property
    def tokens(self) -> int:
        """T, the number of tokens of a row."""
        module = self.model.frozen_parts[0].module
        return text_places(module) or len(fold(module).positions)

    @property
    def batch(self) -> int:
        """The number of rows per batch."""
        return max(SLOTS * self.ring // 8192 // places_of(self.tokens), 1)

    def hello(self, **more: Any) -> Hello:
        """Make the hello to every client; ``more`` has further fields of the hello."""
        model = self.model
        blocks, positions, width = model.net.shape
        fields: dict[str, Any] = {
            "session": self.session.hex(),
            "blocks": blocks,
            "positions": positions,
            "width": width,
            "rank": model.adaptation_spec.rank,
            "classes": list(model.classes),
            "kernels": model.kernels,
            "batch": self.batch,
            "tokens": self.tokens,
            **_input_of(model),
            "digest": model.fingerprint,
            "ring": self.ring,
            "limits": _limits(model),
        }
        return Hello(**(fields | more))

    def finish_batch(self, clients: Iterable[ClientId], batch: int) -> None:
        """Record that these clients have stored the states of a batch."""
        for client in clients:
            self.done.setdefault(client, []).append(batch)
        self.fed.store[_DONE] = json.dumps(self.done).encode()
        self.count_bytes()

    def count_bytes(self) -> None:
        """Store the list of messages, so that a killed run loses no message that was answered."""
        pending = self.fed.transcript.pending  # messages of round 0, which is not stored yet
        while len(pending) > self._full * _PAGE:
            page = pending[self._full * _PAGE :][:_PAGE]
            self.fed.store[f"{_CROSSED}{self._full:06}"] = json.dumps(page).encode()
            if len(page) < _PAGE:
                return
            self._full += 1

    def tell(self, part: float, what: str) -> None:
        """Report progress at intervals, with an estimate of the remaining time."""
        now = time.monotonic()
        if part > 0 and now - self._reported > _OFTEN and now - self._begun > _OFTEN:
            self._reported = now
            left = (now - self._begun) * (1 - part) / part
            self.fed.tell(f"{what}: {part:.0%}, about {duration_text(left)} left")


def _input_of(model: SideModel) -> dict[str, Any]:
    """Return the fields of the hello by which clients make the model's input of their rows."""
    if text_places(model.frozen_parts[0].module):
        return {"patch": [], "extra": 0, "picture": {}} | text_rows.embedding_fields(model)
    patches = patches_of(model.frozen_parts[0].module)
    settings = image_settings.settings_of(model.tools.processor)
    return {"patch": list(patches.size), "extra": patches.extra, "picture": settings}


def rows_of(opened: Opened) -> int:
    """Return the total number of rows of a client."""
    return sum(opened.rows[part] for part in PARTS)


def clear_states(model: SideModel, pixels: Mapping[ClientId, Tensor]) -> each:
    """Compute disclosed activations (n, L, P, d) of each client's rows in the clear.

    Rows beyond the student's limits get zeros, as on ciphertexts, where clients do not encrypt them.
    """
    states = {client: model.states(text_rows.rows_of(x)) for client, x in pixels.items()}
    return each({client: within_limits(x, pixels[client], _limits(model)) for client, x in states.items()})


def token_states(model: SideModel, pixels: Tensor) -> Tensor:
    """Compute states of all tokens of all blocks (n, L, T, d) in the clear; rows that overflowed get zeros."""
    from fedfm.core.rows import Rows

    levels = torch.stack(model.blocks(Rows({"pixel_values": pixels}))[1:], 1)
    _, _, scales = model.frozen_parts
    return within_limits(model.within_ranges(levels, unit=scales), pixels, _limits(model))


def _limits(model: SideModel) -> dict[str, float]:
    return limits_of(model.frozen_parts[0].module)
