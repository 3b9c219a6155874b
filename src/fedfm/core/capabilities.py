"""What a method may have beyond its rounds: protocols of one purpose each, checked by ``isinstance``, and its needs.

A method has a capability by having its members; nothing is registered and nothing inherited. Each protocol names its
one caller. :class:`Needs` is data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard, TypeVar, runtime_checkable

from fedfm.core.client import Client, ClientId
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params

if TYPE_CHECKING:
    from torch import Tensor

    from fedfm.core.method import Method
    from fedfm.models.model import Model
    from fedfm.privacy.accountant import Accountant

C = TypeVar("C")
_KNOWN: dict[tuple[type, type], bool] = {}
Judge = Callable[[Params], dict[str, Any]]  # metrics of parameters on the global test rows


def has(method: object, capability: type[C]) -> TypeGuard[C]:
    """``isinstance``, remembered by class: it takes ten microseconds, and evaluation asks five times a client."""
    key = type(method), capability
    if key not in _KNOWN:
        _KNOWN[key] = isinstance(method, capability)
    return _KNOWN[key]


@dataclass(frozen=True)
class Needs:
    """What a method asks of the experiment around it.

    Attributes:
        adaptation: what is trainable when the experiment does not say.
        adaptations: the only ones that it takes; empty: all.
        ranks: LoRA's ranks that it deals out; the model's own has to reach the largest.
        pooled: it trains on all rows in one place, which the local engine alone has.
        model: who has the experiment's model: everybody, or the server alone. A client without one gets its rows as
            they were read, and is asked for no scores.
        because: the setting that asks for it, for messages; empty: the method.
    """

    adaptation: str = "lora"
    adaptations: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    pooled: bool = False
    model: Literal["everybody", "server"] = "everybody"
    because: str = ""


@runtime_checkable
class Sampling(Protocol):
    """Rounds ask a fraction of the clients. Caller: the check of ``run.min_clients``."""

    @property
    def fraction(self) -> float:
        """C, in (0, 1]."""


@runtime_checkable
class Costing(Protocol):
    """A round costs other passes over the clients' rows than its client optimiser says. Caller: the ledger."""

    @property
    def passes(self) -> int:
        """Epochs a round, of all that is trained."""


# --- models of clients' own -------------------------------------------------------------------------------------------


@runtime_checkable
class Personal(Protocol):
    """Every client ends with a model of its own. Caller: evaluation, which then judges one model a client."""

    @property
    def own_models(self) -> bool:
        """True."""


@runtime_checkable
class Keeping(Protocol):
    """A client keeps its own model, or a part of it, which ``params_for`` does not know. Caller: evaluation."""

    def own(self, client: Client, w: Params) -> Params:
        """Client half: the client's own model, where ``w`` is what ``params_for`` gives for it."""

    def start_of(self, client: Client, w: Params) -> Params:
        """Client half: what the client's last local pass started from; before the first one, ``w``."""


@runtime_checkable
class Starting(Protocol):
    """Clients with models of their own start each pass from something worth judging. Caller: the last evaluation."""

    def start_models(self, state: Any) -> dict[ClientId, Params]:
        """What each client's last local pass started from; under "" what all of them share."""


@runtime_checkable
class Joining(Protocol):
    """A client that comes after training gets a start of its own. Caller: ``fedfm join``."""

    def newcomer(
        self, model: Model, state: Any, w_0: Params, client: ClientId, adapt: Callable[[Params], Params]
    ) -> tuple[Params, dict[ClientId, float]]:
        """Start weights for a late client, and each client's share in them.

        Args:
            w_0: the parameters before the first round.
            client: the newcomer's name.
            adapt: its local pass.

        Raises:
            InputError: the method has nothing to give it.
        """


# --- predictions ------------------------------------------------------------------------------------------------------


@runtime_checkable
class Predicting(Protocol):
    """The result is not a model's parameters: an ensemble, say. Caller: evaluation, and ``fedfm predict``."""

    def logits(self, model: Model, w: Params, rows: Rows) -> Tensor:
        """(n, C): what w says about rows."""


@runtime_checkable
class Applying(Protocol):
    """w is installed in the model in a way of its own. Caller: evaluation, and ``fedfm predict``."""

    def applied(self, model: Model, w: Params, rows: Rows) -> AbstractContextManager[Rows]:
        """Install w in the model; yield the rows to score."""


@runtime_checkable
class Transforming(Protocol):
    """Features are transformed before the head. Caller: the export, whose reader has to know."""

    @property
    def feature_transform(self) -> str | None:
        """In words, or None."""


# --- privacy ----------------------------------------------------------------------------------------------------------


@runtime_checkable
class Private(Protocol):
    """The method has a mechanism of its own for ``[privacy]``. Caller: the experiment, and the run's ledger."""

    def settled(self, privacy: Any) -> Method[Any]:
        """This method with every default filled in that depends on whether there is a [privacy] table."""

    def protected(self, privacy: Any) -> Method[Any]:
        """This method under the [privacy] table.

        Raises:
            InputError: it has no mechanism of that kind.
        """

    def spend(self, accountant: Accountant) -> None:
        """Compose what a finished run has spent of privacy; nothing where nothing is claimed."""


@runtime_checkable
class HidingCounts(Protocol):
    """Clients may hide how many rows they have. Caller: evaluation, which then asks for no scores."""

    @property
    def hides_counts(self) -> bool:
        """As the settings say."""


@runtime_checkable
class ServerSecrets(Protocol):
    """The server draws secrets. Caller: the run, which draws them first and refuses to go on without one.

    Another draw would be a second release. A contract test compares ``secrets`` with what is asked of ``fed.secret``.
    """

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names."""


def secrets_of(method: Method[Any]) -> tuple[str, ...]:
    """Names of what the server draws; empty where it draws nothing."""
    return method.secrets if isinstance(method, ServerSecrets) else ()


@runtime_checkable
class ServerFoundation(Protocol):
    """A foundation model never leaves the server. Caller: the run directory, which keeps moments under ``private/``.

    A contract test listens: no message carries it.
    """

    @property
    def keeps_foundation(self) -> bool:
        """True."""


@runtime_checkable
class Founded(Protocol):
    """The server has a foundation model of its own, beside the federation's. Caller: ``fedfm check``."""

    def check_foundation(self) -> None:
        """Refuse one that is not there.

        Raises:
            InputError: with the place that was looked at.
        """

    def match_with(self, model: Model) -> Any:
        """What of it mixes with the federation's model: ``table``, a dataclass a tensor; its text is for reading."""


# --- reports ----------------------------------------------------------------------------------------------------------


@runtime_checkable
class Detailed(Protocol):
    """There is more to tell than metrics. Caller: the result line."""

    def details(self, state: Any, judge: Judge | None) -> dict[str, Any]:
        """For ``details`` of the result line; ``judge`` is None where the server has no test rows."""


@runtime_checkable
class Noticing(Protocol):
    """A finished run has something that its owner should know. Caller: the result."""

    def notices(self, state: Any) -> list[str]:
        """One line each."""


@runtime_checkable
class Charting(Protocol):
    """Rounds leave arrays for the report. Caller: the run directory, which stacks them."""

    def arrays(self, state: Any) -> Mapping[str, Any]:
        """NumPy arrays of the last round, by name."""


@runtime_checkable
class Compared(Protocol):
    """There are runs to set beside one of this method. Caller: ``fedfm run --baselines``."""

    def baselines(self) -> dict[str, Method[Any]]:
        """By name."""
