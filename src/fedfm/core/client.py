"""What the client half of a method can touch, and what it gives back."""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, overload

from fedfm.core import update_metrics
from fedfm.core.rows import Rows
from fedfm.errors import E_WEIGHT, ClientFault
from fedfm.linalg.params import Params

if TYPE_CHECKING:
    from fedfm.models.model import Model

ClientId = str  # the name a silo gives itself, e.g. "hospital-a"
POOLED = "(pooled)"  # the client that holds everybody's training rows; it exists on the local engine only
Handler = TypeVar("Handler", bound=Callable[..., Any])
MAX_WEIGHT = 1e9  # nobody has more rows: a larger weight would let one client replace the mean


class ClientData:
    """One client's rows, ready for the model: ``train``, ``val`` and ``test``, each made when it is first asked for."""

    def __init__(self, train: Callable[[], Rows], val: Callable[[], Rows], test: Callable[[], Rows]) -> None:
        self._make = {"train": train, "val": val, "test": test}

    @functools.cached_property
    def train(self) -> Rows:
        """Rows to train on."""
        return self._make["train"]()

    @functools.cached_property
    def val(self) -> Rows:
        """Rows that decide (early stopping, tuning); never test rows."""
        return self._make["val"]()

    @functools.cached_property
    def test(self) -> Rows:
        """Rows that judge."""
        return self._make["test"]()


def no_secret(name: str) -> bytes:
    """Of a party that was given none."""
    raise RuntimeError(f"no secret {name}: whoever made this party gave it none")


@dataclass
class Client:
    """Everything the client half may use. Nothing here leaves the silo unless a handler returns it.

    Attributes:
        model: what the experiment gives to this party; None where only the server has one.
        memory: survives between messages and rounds; never sent.
        seed: of this client in this round; derive from it what is random.
        metrics: what the client optimiser noted about its last pass, e.g. ``loss``.
        secret: 32 bytes under a name, from the operating system's entropy, the same for the whole run; never sent.
        trained: what the client optimiser returned last: the client's model before any aggregation.
    """

    id: ClientId
    data: ClientData
    model: Model
    memory: MutableMapping[str, Any]
    seed: int
    metrics: dict[str, float] = field(default_factory=dict)
    secret: Callable[[str], bytes] = no_secret
    trained: Params | None = None


@dataclass(frozen=True)
class Update:
    """The usual reply: a change of parameters and its weight in the mean (n_k unless the method says otherwise).

    Attributes:
        metrics: what the client notes, as :mod:`fedfm.core.update_metrics` allows: at most 100, none named as the
        server's own.
    """

    delta: Params
    weight: float
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.weight <= MAX_WEIGHT:  # NaN fails too
            raise ClientFault(E_WEIGHT, f"weight {self.weight} is not in (0, {MAX_WEIGHT:g}]")
        if self.metrics:
            update_metrics.check(self.metrics)


class each(dict[ClientId, Any]):
    """A payload that differs by client."""


@overload
def on_client(handler: Handler) -> Handler: ...
@overload
def on_client(*, kind: str) -> Callable[[Handler], Handler]: ...
def on_client(handler: Handler | None = None, *, kind: str = "") -> Any:
    """Mark the client half: it runs in a silo, called by message.

    Args:
        kind: of the message, if not the server half's verb decides (``train`` for ``mean``, ``query`` for ``ask``):
            ``aggregate`` of an aggregation's own handlers, ``scores`` or ``reveal`` of the run's.
    """

    def mark(handler: Handler) -> Handler:
        handler.on_client, handler.kind = True, kind  # type: ignore[attr-defined]
        return handler

    return mark if handler is None else mark(handler)


def action(handler: Callable[..., Any]) -> str:
    """The wire name of a handler: its class and its name."""
    return f"{type(handler.__self__).__name__}_{handler.__name__}"  # type: ignore[attr-defined]
