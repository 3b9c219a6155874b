"""Input and output of the client half of a method."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from fedfm.core import update_metrics
from fedfm.core.rows import Rows
from fedfm.errors import E_WEIGHT, ClientFault, InputError
from fedfm.linalg.params import Params

if TYPE_CHECKING:
    from fedfm.models.model import Model

ClientId = str  # the name a silo gives itself, e.g. "hospital-a"
POOLED = "(pooled)"  # a client with all clients' training rows; only on the local engine
Handler = TypeVar("Handler", bound=Callable[..., Any])
# Key of the payload's entry that an aggregation's server half sends to its client half; no method gets this entry.
AGGREGATION_MESSAGE = "+told"
SCALE = "+scale"  # key of an entry: the unit in which a mean's privacy mechanism measures an update's norm
MAX_WEIGHT = 1e9  # no client has more rows; a larger weight would let one client replace the mean


class ClientData:
    """One client's rows, ready for the model: ``train``, ``val`` and ``test``, each prepared on first use."""

    def __init__(self, train: Callable[[], Rows], val: Callable[[], Rows], test: Callable[[], Rows]) -> None:
        self._make = {"train": train, "val": val, "test": test}
        self.table: Callable[[], Any] | None = None  # makes the table of the training rows as read; None without one

    @property
    def ready(self) -> list[Rows]:
        """The parts that are prepared already."""
        return [rows for name, rows in vars(self).items() if name in self._make]

    @functools.cached_property
    def train(self) -> Rows:
        """Rows to train on."""
        return self._make["train"]()

    @functools.cached_property
    def val(self) -> Rows:
        """Rows for model selection (early stopping, tuning); never test rows."""
        return self._make["val"]()

    @functools.cached_property
    def test(self) -> Rows:
        """Rows for evaluation."""
        return self._make["test"]()


def no_secret(name: str) -> bytes:
    """Raise an error: the default of ``secret``, for a party without secrets."""
    raise RuntimeError(f"this party has no secrets, so {name} is missing")


@dataclass(frozen=True)
class Terms:
    """A method's additions to local training.

    Attributes:
        mu: weight of the proximal term mu/2 ||v - w||^2 in the local objective.
        correction: is added to every gradient (SCAFFOLD's c - c_k).
        only: names of the tensors to train; the others stay as in ``w``. If None, all are trained.
    """

    mu: float = 0.0
    correction: Params | None = None
    only: tuple[str, ...] | None = None


NO_TERMS = Terms()


class Trainer(Protocol):
    """Computes local training. The runtime gives each client one (:func:`fedfm.training.scheduler.train_client`)."""

    def __call__(self, client: Client, w: Params, local: Any, terms: Terms) -> Params:
        """The parameters after training by the client optimiser ``local`` from ``w``; untrained ones are unchanged."""


def no_trainer(*_: Any, **__: Any) -> Params:
    """Raise an error: the default of ``trainer``, for a party that trains nothing."""
    raise RuntimeError("this party has no trainer: give it fedfm.training.scheduler.train_client")


def keep_nothing(name: str, value: bytes) -> bytes:
    """Raise an error: the default of ``write_once``, for a party that stores nothing."""
    raise RuntimeError(f"this party has no storage for {name}")


@dataclass
class Client:
    """Everything the client half may use. Nothing here leaves the silo unless a handler returns it.

    Attributes:
        model: the model of this party; None if only the server has one.
        memory: stored between messages and rounds; never sent.
        seed: seed of this client in this round, from which all random streams derive.
        metrics: metrics of the client optimiser's last pass, e.g. ``loss``.
        secret: returns 32 bytes for a name, from the operating system's entropy, the same in the whole run; never sent.
        write_once: stores a value under a name and returns the first value stored in this run. A resume or a repeated
            message does not undo this, unlike a change of :attr:`memory`.
        store: bytes by name. An assignment returns when they are on the disk, and neither a resume nor a repeated
            message undoes it. Never sent.
        private: settings of DP-SGD for the client optimiser; None without DP-SGD. With DP-SGD a client half can only
            count the training rows in ``data``.
        trained: last result of the client optimiser: the client's model before aggregation.
        broadcast: the part of this message that all clients receive: handler, round and payload.
        aggregation_message: the aggregation's own part of this message, from its server half to its client half.
        scale: the unit in which a mean's privacy mechanism measures the update's norm; None if the unit is fixed.
        identity: the silo's own Ed25519 key, 32 bytes; None if the silo has no permanent key.
        roster: the other silos' public keys by name, exchanged without the server; None if they were not exchanged.
        log: writes a line into the silo's log.
        smallest_cohort: the silo's policy requires at least this number of clients in a sum that contains
            the silo's update. If it is 0, the protocol decides.
        span: the part of the run that this round takes, from (t - 1) / T to t / T; schedules of eta depend on it.
        round: t, from the message.
        trainer: computes local training, alone or with other clients as one batch.
    """

    id: ClientId
    data: ClientData
    model: Model
    memory: MutableMapping[str, Any]
    seed: int
    metrics: dict[str, float] = field(default_factory=dict)
    secret: Callable[[str], bytes] = no_secret
    write_once: Callable[[str, bytes], bytes] = keep_nothing
    store: MutableMapping[str, bytes] = field(default_factory=dict)
    private: object = None
    trained: Params | None = None
    broadcast: tuple[Any, ...] = ()
    aggregation_message: Any = None
    scale: float | None = None
    identity: bytes | None = None
    roster: Mapping[ClientId, bytes] | None = None
    log: Callable[[str], None] = lambda text: None
    smallest_cohort: int = 0
    span: tuple[float, float] = (0.0, 1.0)
    round: int = 0
    trainer: Trainer = no_trainer


@dataclass(frozen=True)
class Update:
    """The usual reply: a change of parameters and its weight in the mean (n_k unless the method says otherwise).

    Attributes:
        metrics: at most 100 figures, none with a name that :mod:`fedfm.core.update_metrics` reserves for the server.
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
    """A payload's entry with one value per client."""


@overload
def on_client(handler: Handler) -> Handler: ...
@overload
def on_client(*, kind: str = "", varying: tuple[str, ...] = ()) -> Callable[[Handler], Handler]: ...
def on_client(handler: Handler | None = None, *, kind: str = "", varying: tuple[str, ...] = ()) -> Any:
    """Mark a function of the client half, which a message calls in the silo.

    Args:
        kind: kind of the message. By default the server half decides: ``train`` for ``mean``, ``query`` for ``ask``.
            An aggregation's own handlers have ``aggregate``, the run's have ``scores`` or ``reveal``.
        varying: arguments that may differ by client (see :class:`each`). Under secure aggregation the clients of a
            mean check that each of them received the same values of all other arguments.

    Raises:
        InputError: a parameter other than ``self``, or the return value, has no annotation.
    """

    def mark(handler: Handler) -> Handler:
        for name in (*list(inspect.signature(handler).parameters)[1:], "return"):
            if name not in handler.__annotations__:
                what = "the return value" if name == "return" else f"the parameter {name}"
                raise InputError(
                    f"{handler.__qualname__}: {what} has no annotation; messages are checked by the annotations of a "
                    "client half, e.g. (self, client: Client, w: Params) -> Update"
                )
        handler.on_client, handler.kind, handler.varying = True, kind, varying  # type: ignore[attr-defined]
        return handler

    return mark if handler is None else mark(handler)


def action(handler: Callable[..., Any]) -> str:
    """Name of a handler in messages, from its class and its name."""
    return f"{type(handler.__self__).__name__}_{handler.__name__}"  # type: ignore[attr-defined]
