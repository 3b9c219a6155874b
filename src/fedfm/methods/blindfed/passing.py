"""Server half of BlindFed's passes: who takes part, which batches are left, how long it takes."""

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
from fedfm.core.federation import Federation
from fedfm.methods.blindfed.holding import PARTS, Hello, Opened
from fedfm.models import inputs
from fedfm.models.fhe_friendly import folded
from fedfm.models.side_adapter import SideModel

SLOTS = 4096  # rows times tokens of a batch, as with the smallest ring
_SESSION, _DONE = "session", "done"  # in the server's store
_OFTEN = 5.0  # seconds between two words on how far it is


@dataclass
class Passing:
    """The server's side of all clients' passes.

    Attributes:
        fed: the federation.
        model: the twin with side adapters.
        session: 16 bytes, the same after a resume.
        opened: what the clients answered.
        done: batches that have passed, by client; on the disk before the next one begins.
    """

    fed: Federation
    model: SideModel
    session: bytes
    opened: dict[ClientId, Opened] = field(default_factory=dict)
    done: dict[ClientId, int] = field(default_factory=dict)
    _begun: float = field(default_factory=time.monotonic)
    _told: float = 0.0

    @classmethod
    def begin(cls, fed: Federation, model: SideModel) -> Passing:
        """A session, or that of the killed run that goes on."""
        if _SESSION not in fed.store:
            fed.store[_SESSION] = os.urandom(16)
        done = json.loads(fed.store[_DONE]) if _DONE in fed.store else {}
        return cls(fed, model, fed.store[_SESSION], done=done)

    @property
    def tokens(self) -> int:
        """T of a row."""
        return len(folded(self.model.owned[0].module).positions)

    @property
    def batch(self) -> int:
        """Rows that pass together."""
        return max(SLOTS // self.tokens, 1)

    def hello(self, **more: Any) -> Hello:
        """What every client is told."""
        model, matrices = self.model, folded(self.model.owned[0].module)
        blocks, positions, width = model.net.shape
        told: dict[str, Any] = {
            "session": self.session.hex(),
            "blocks": blocks,
            "positions": positions,
            "width": width,
            "rank": model.adaptation_spec.rank,
            "classes": list(model.classes),
            "kernels": model.kernels,
            "batch": self.batch,
            "tokens": self.tokens,
            "patch": list(matrices.patch.size),
            "extra": matrices.patch.extra,
            "picture": inputs.told(model.tools.processor),
            "digest": model.fingerprint,
        }
        return Hello(**(told | more))

    def finished(self, clients: Iterable[ClientId], batch: int) -> None:
        """The batch of these clients is kept by them."""
        self.done.update(dict.fromkeys(clients, batch + 1))
        self.fed.store[_DONE] = json.dumps(self.done).encode()

    def tell(self, part: float, what: str) -> None:
        """Say how far it is, now and then, with the time that is left."""
        now = time.monotonic()
        if part > 0 and now - self._told > _OFTEN and now - self._begun > _OFTEN:
            self._told = now
            left = (now - self._begun) * (1 - part) / part
            self.fed.tell(f"{what}: {part:.0%}, about {_span(left)} left")


def rows_of(opened: Opened) -> int:
    """All rows of a client."""
    return sum(opened.rows[part] for part in PARTS)


def clear_states(model: SideModel, pixels: Mapping[ClientId, Tensor]) -> each:
    """Released states (n, L, P, d) of each client's rows, by the model in the clear."""
    from fedfm.core.rows import Rows

    return each({client: model.states(Rows({"pixel_values": x})) for client, x in pixels.items()})


def token_states(model: SideModel, pixels: Tensor) -> Tensor:
    """States of all tokens of all blocks (L, n, T, d), by the model in the clear."""
    from fedfm.core.rows import Rows

    return torch.stack(model.blocks(Rows({"pixel_values": pixels}))[1:])


def _span(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )
