"""Optional capabilities of a method: protocols of one purpose each, checked by ``isinstance``, and its needs.

A method has a capability if it has the protocol's members; it neither registers nor inherits anything. Each protocol
names its one caller. :class:`Needs` is data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar, runtime_checkable

from fedfm.core.client import Client, ClientData, ClientId
from fedfm.core.needs import Needs as Needs
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params

if TYPE_CHECKING:
    from torch import Tensor

    from fedfm.aggregation.base import Aggregator
    from fedfm.core.method import Method
    from fedfm.models.model import Model
    from fedfm.privacy.accountant import Accountant

C = TypeVar("C")
_KNOWN: dict[tuple[type, type], bool] = {}
PREDICTIONS = "predictions.jsonl"  # in a client's store: its predictions, a line a row


class Judge(Protocol):
    """Metrics of parameters on the global test rows."""

    def __call__(self, w: Params, /, *, by_class: bool = True) -> dict[str, Any]:
        """``by_class``: also the counts by class, which no client tells, so that they may need a pass of their own."""


def has(method: object, capability: type[C]) -> TypeGuard[C]:
    """``isinstance``, cached by class: it takes ten microseconds, and evaluation calls it five times a client."""
    key = type(method), capability
    if key not in _KNOWN:
        _KNOWN[key] = isinstance(method, capability)
    return _KNOWN[key]


@runtime_checkable
class Sampling(Protocol):
    """Rounds select a fraction of the clients. Caller: the check of ``run.min_clients``."""

    @property
    def fraction(self) -> float:
        """C, in (0, 1]."""


@runtime_checkable
class Modelled(Protocol):
    """The method says which model it is about: there is no [model]. Caller: the experiment and the population."""

    def model_table(self) -> dict[str, Any]:
        """Keys of [model]."""

    def check_model(self) -> None:
        """Check that the model exists and is of the kind that it needs, without loading it.

        Raises:
            InputError: with what would be right.
        """


@runtime_checkable
class Planned(Protocol):
    """What a run costs is known before it starts. Caller: ``fedfm check``."""

    def plan(self, model: Model, rows: Sequence[Sequence[int]]) -> Any:
        """The plan, with ``to_dict()`` and ``table()``, or None.

        Args:
            rows: of each client, training, validation and test rows.

        Raises:
            InputError: such a run would be refused.
        """


@runtime_checkable
class Costing(Protocol):
    """The number of passes over the clients' rows differs from the client optimiser's. Caller: the ledger."""

    @property
    def passes(self) -> int:
        """Epochs a round, summed over everything that is trained."""


# --- models of clients' own -------------------------------------------------------------------------------------------


@runtime_checkable
class Personal(Protocol):
    """Every client ends with a model of its own. Caller: evaluation, which then scores one model per client."""

    @property
    def own_models(self) -> bool:
        """True."""


@runtime_checkable
class Keeping(Protocol):
    """A client keeps its own model, or a part of it, that ``params_for`` does not return. Caller: evaluation."""

    def own(self, client: Client, w: Params) -> Params:
        """Client half: the client's own model; ``w`` is the value of ``params_for`` for this client."""

    def start_of(self, client: Client, w: Params) -> Params:
        """Client half: the start of the client's last local pass; before the first pass, ``w``."""


@runtime_checkable
class Composed(Protocol):
    """A client's own model has other tensors than the federation's. Caller: evaluation, which checks what it takes."""

    def check_own(self, w: Params, model: Model) -> None:
        """Refuse what a client gave as its own model where it is none.

        Raises:
            ClientFault: with the first tensor that differs.
        """


@runtime_checkable
class Starting(Protocol):
    """The start models of the last local pass are worth scoring. Caller: the last evaluation."""

    def start_models(self, state: Any) -> dict[ClientId, Params]:
        """Start model of each client's last local pass; under "" the one that all clients share."""


@runtime_checkable
class Joining(Protocol):
    """A client that joins after training gets its own start. Caller: ``fedfm join``."""

    def newcomer(
        self, model: Model, state: Any, w_0: Params, client: ClientId, adapt: Callable[[Params], Params]
    ) -> tuple[Params, dict[ClientId, float]]:
        """Start weights for a late client, and each client's share in them.

        Args:
            w_0: the parameters before the first round.
            client: the newcomer's name.
            adapt: its local pass.

        Raises:
            InputError: the method has no start for it.
        """


@runtime_checkable
class Viewing(Protocol):
    """Clients see other rows than those they hold, and have a model for these. Caller: evaluation."""

    @property
    def clients_judge(self) -> bool:
        """Whether the accuracy of one model for all comes from the clients' rows: the server can read no test rows."""

    def view(self, client: Client) -> Client:
        """Client half: the same client, with the rows and the model that its training uses."""

    def fidelity(self, seen: ClientData, clear: Callable[[str], Rows]) -> dict[str, float]:
        """How far a client's rows are from those of the server's model in the clear, for ``details``. Caller: the local
        engine, the one place that has both.

        Args:
            seen: of :meth:`view`.
            clear: the rows of ``train``, ``val`` or ``test`` by the server's model; not called where nothing is told.
        """

    def encoded(self, model: Model, rows: Rows) -> Rows:
        """Rows as the server's model gives them to whoever holds them. Caller: ``fedfm predict`` and ``fedfm join``."""


# --- predictions ------------------------------------------------------------------------------------------------------


@runtime_checkable
class Predicting(Protocol):
    """Predictions do not come from one model, e.g. an ensemble. Caller: evaluation, and ``fedfm predict``."""

    def logits(self, model: Model, w: Params, rows: Rows) -> Tensor:
        """Logits (n, C) of rows under w."""


@runtime_checkable
class Applying(Protocol):
    """The method has its own way to install w in the model. Caller: evaluation, and ``fedfm predict``."""

    def applied(self, model: Model, w: Params, rows: Rows) -> AbstractContextManager[Rows]:
        """Install w in the model; yield the rows to score."""


@runtime_checkable
class Transforming(Protocol):
    """Features are transformed before the head. Caller: the export, which documents the transform."""

    @property
    def feature_transform(self) -> str | None:
        """The transform in words, or None."""


@runtime_checkable
class Mixing(Protocol):
    """Predictions mix those of two exported adapters. Caller: the card of the export."""

    def mixture_in_code(self, model: Model) -> list[str]:
        """Lines of Python that make ``model`` of ``experts``, a PeftModel of both, and of the files in ``FOLDER``."""


# --- privacy ----------------------------------------------------------------------------------------------------------


@runtime_checkable
class Private(Protocol):
    """The method has its own mechanism for ``[privacy]``. Caller: the experiment, and the run's ledger."""

    def settled(self, privacy: Any) -> Method[Any]:
        """This method with the defaults filled in that depend on whether there is a [privacy] table."""

    def protected(self, privacy: Any) -> Method[Any]:
        """This method under the [privacy] table.

        Raises:
            InputError: it has no mechanism of that kind.
        """

    def spend(self, accountant: Accountant) -> None:
        """Compose what a finished run has spent of privacy; nothing if nothing is claimed."""


@runtime_checkable
class RowsByOptimiser(Protocol):
    """Clients use training rows, besides their number, by the optimiser alone. Caller: checks of DP-SGD and augment.

    A subclass declares it anew. The client half of a method that declares it wrongly fails under DP-SGD.
    """

    @property
    def rows_by_optimiser(self) -> bool:
        """Whether they do."""


@runtime_checkable
class ParametersAlone(Protocol):
    """The server half computes with parameters, and with no output of the model. Caller: a server without clients in
    its process, which then loads no frozen weights if it has no rows to judge. A subclass declares it anew: one that
    declares it wrongly ends with an error at such a server.
    """

    @property
    def parameters_alone(self) -> bool:
        """Whether it does."""


@runtime_checkable
class TakesLate(Protocol):
    """Updates may be of earlier rounds; a subclass declares it anew. Caller: checks of ``run.asynchronous``."""

    @property
    def takes_late(self) -> bool:
        """Whether it does."""


@runtime_checkable
class WaryOfLate(Protocol):
    """Its settings may not suit updates of earlier rounds. Caller: what a run and ``fedfm check`` say first."""

    @property
    def late_forewarning(self) -> str:
        """What may go wrong, and what to set; "" if nothing."""


@runtime_checkable
class Sealed(Protocol):
    """The server cannot read some replies. Caller: the checks of secure aggregation and of noise on means."""

    @property
    def sealed(self) -> tuple[str, ...]:
        """Names of ``asks``, whose replies are ciphertexts; neither check refuses them."""


@runtime_checkable
class HidingCounts(Protocol):
    """Clients may hide their number of rows. Caller: evaluation, which then requests no scores."""

    @property
    def hides_counts(self) -> bool:
        """Whether the settings hide it."""


@runtime_checkable
class Foretelling(Protocol):
    """A run may train nothing: silos predict rows without labels, into :data:`PREDICTIONS`. Caller: a silo's file."""

    @property
    def predicts_only(self) -> bool:
        """Whether the settings say so."""


@runtime_checkable
class ServerSecrets(Protocol):
    """The server draws secrets. Caller: the run, which draws them first and does not resume without them, as a second
    draw would be a second release.
    """

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names."""


def secrets_of(method: Method[Any], aggregator: Aggregator) -> tuple[str, ...]:
    """Names of the secrets that the server draws, for its method and for its aggregation's mechanism."""
    return (*(method.secrets if isinstance(method, ServerSecrets) else ()), *aggregator.mechanism.secrets)


@runtime_checkable
class ServerFoundation(Protocol):
    """A foundation model never leaves the server. Caller: the run directory, which keeps moments under ``private/``."""

    @property
    def keeps_foundation(self) -> bool:
        """True."""


@runtime_checkable
class Founded(Protocol):
    """The server has a foundation model of its own besides the federation's model. Caller: ``fedfm check``."""

    def check_foundation(self) -> None:
        """Check that the foundation model exists.

        Raises:
            InputError: with the path where it was expected.
        """

    def match_with(self, model: Model) -> Any:
        """The tensors that it shares with the federation's model: ``table``, one dataclass per tensor, for printing."""


# --- reports ----------------------------------------------------------------------------------------------------------


@runtime_checkable
class Detailed(Protocol):
    """The method reports more than metrics. Caller: the result line."""

    def details(self, state: Any, judge: Judge | None) -> dict[str, Any]:
        """Entries of ``details`` in the result line; ``judge`` is None if the server has no test rows."""


@runtime_checkable
class Noticing(Protocol):
    """A finished run has something to tell its owner. Caller: the result."""

    def notices(self, state: Any) -> list[str]:
        """One line each."""


@runtime_checkable
class Forewarning(Protocol):
    """The settings have something to tell before the first round. Caller: what a run and ``fedfm check`` say first."""

    def forewarnings(self, counts: Mapping[ClientId, Sequence[int]]) -> list[str]:
        """One line each.

        Args:
            counts: of each client, the training rows by class; empty in a run, which tells of rows when they are used.
        """


@runtime_checkable
class Measuring(Protocol):
    """Rounds measure more than losses. Caller: the server, for the round's line of metrics.jsonl."""

    @property
    def figures(self) -> tuple[str, ...]:
        """Names in ``fed.metrics``."""


@runtime_checkable
class Charting(Protocol):
    """Rounds leave arrays for the report. Caller: the run directory, which stacks them."""

    def arrays(self, state: Any) -> Mapping[str, Any]:
        """NumPy arrays of the last round, by name."""


@runtime_checkable
class Compared(Protocol):
    """The method has baselines. Caller: ``fedfm run --baselines``."""

    def baselines(self) -> dict[str, Method[Any]]:
        """The baselines by name."""
