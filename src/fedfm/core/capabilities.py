"""Roles of a method beyond its rounds; as data, what is true of it (:class:`Traits`) and what it :class:`Needs`.

Every method is a :class:`Reporter`. It takes another role by deriving from it. A role's abstract members are required;
the others are optional, and :func:`has` tells whether a method has its own. Each role names who calls it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import Field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeGuard, TypeVar

from fedfm.core.checks import match
from fedfm.core.client import Client, ClientData, ClientId
from fedfm.core.needs import Needs as Needs
from fedfm.core.rows import Rows
from fedfm.core.traits import Traits as Traits
from fedfm.core.traits import is_own_member
from fedfm.errors import InputError
from fedfm.linalg.params import Params

if TYPE_CHECKING:
    from torch import Tensor

    from fedfm.models.model import Model
    from fedfm.privacy.accountant import Accountant
    from fedfm.privacy.spec import PrivacySpec

R = TypeVar("R")
PREDICTIONS = "predictions.jsonl"  # in a client's store: its predictions, a line a row


class Judge(Protocol):
    """Metrics of parameters on the global test rows."""

    def __call__(self, w: Params, /, *, by_class: bool = True) -> dict[str, Any]:
        """``by_class``: also the counts by class, which no client tells, so that they may need a pass of their own."""


def has(method: object, role: type[R], member: str) -> TypeGuard[R]:
    """Whether a method has its own version of an optional member of this role."""
    return isinstance(method, role) and getattr(type(method), member) is not getattr(role, member)


class Reporter:
    """What a method says before, during and after a run, besides the usual metrics. Caller: the run and its result."""

    _was: ClassVar[dict[str, str]] = {"late_forewarning": "staleness_warnings"}

    figures: ClassVar[tuple[str, ...]] = ()  # names in fed.metrics that a round's line of metrics.jsonl has as well

    def forewarnings(self, counts: Mapping[ClientId, Sequence[int]]) -> list[str]:
        """What its settings have to tell before the first round, a line each.

        Args:
            counts: of each client, the training rows by class; empty in a run, which tells of rows when they are used.
        """
        return []

    def staleness_warnings(self) -> list[str]:
        """What may go wrong with its settings if updates are of earlier rounds, and what to set, a line each."""
        return []

    def arrays(self, state: Any) -> Mapping[str, Any]:
        """NumPy arrays of the last round, by name, for the report."""
        return {}

    def details(self, state: Any, judge: Judge | None) -> dict[str, Any]:
        """Entries of ``details`` in the result line; ``judge`` is None if the server has no test rows."""
        return {}

    def notices(self, state: Any) -> list[str]:
        """What the owner of a finished run should read, a line each."""
        return []


class Personal:
    """Every client ends with a model of its own: ``params_for`` tells them apart, or the clients keep them.

    Caller: evaluation, which then scores one model per client.
    """

    _was: ClassVar[dict[str, str]] = {"own_models": ""}

    def own(self, client: Client, w: Params) -> Params:
        """Client half: the client's own model, if it keeps a part that ``params_for`` does not return.

        Args:
            w: the value of ``params_for`` for this client.
        """
        return w

    def start_of(self, client: Client, w: Params) -> Params:
        """Client half: the start of the client's last local pass; before the first pass, ``w``."""
        return w

    def start_models(self, state: Any) -> dict[ClientId, Params]:
        """Start model of each client's last local pass, scored at the end; under "" the one that all clients share."""
        return {}

    def check_own(self, w: Params, model: Model) -> None:
        """Refuse what a client gave as its own model where it is none, if it has other tensors than the federation's.

        Raises:
            ClientFault: with the first tensor that differs.
        """
        match(w, model.layout, "model")


class Predictor:
    """Predictions are not those of one installed model, or are more than that. Caller: evaluation and the export."""

    _was: ClassVar[dict[str, str]] = {"applied": "install"}

    def logits(self, model: Model, w: Params, rows: Rows) -> Tensor:
        """Logits (n, C) of rows under w, if they do not come from one model, e.g. from an ensemble."""
        raise NotImplementedError

    def install(self, model: Model, w: Params, rows: Rows) -> AbstractContextManager[Rows]:
        """Install w in the model in the method's own way; yield the rows to score."""
        raise NotImplementedError

    @property
    def feature_transform(self) -> str | None:
        """In words, the transform of features before the head, which the export documents."""
        return None

    def mixture_in_code(self, model: Model) -> list[str]:
        """Lines of Python that make ``model`` of ``experts``, a PeftModel of both, and of the files in ``FOLDER``."""
        return []


class Private(ABC):
    """The method has its own mechanism for ``[privacy]``. Caller: the experiment, and the run's ledger."""

    _was: ClassVar[dict[str, str]] = {"settled": "settle", "protected": "protect"}

    @abstractmethod
    def settle(self, privacy: PrivacySpec | None) -> Self:
        """This method with the defaults filled in that depend on whether there is a [privacy] table."""

    @abstractmethod
    def protect(self, privacy: PrivacySpec) -> Self:
        """This method under the [privacy] table.

        Raises:
            InputError: it has no mechanism of that kind.
        """

    @abstractmethod
    def spend(self, accountant: Accountant) -> None:
        """Compose what a finished run has spent of privacy; nothing if nothing is claimed."""


class Joinable(ABC):
    """A client that joins after training gets its own start. Caller: ``fedfm join``."""

    @abstractmethod
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


class Comparable(ABC):
    """The method has baselines. Caller: ``fedfm run --baselines``."""

    @abstractmethod
    def baselines(self) -> Mapping[str, Reporter]:
        """The baselines, which are methods, by name."""


class Line(Protocol):
    """A line of a table: a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class TensorTable(Protocol):
    """Lines about the tensors of a model; its text is the table for a reader."""

    @property
    def table(self) -> Sequence[Line]:
        """A line for every tensor, in the model's order."""


class ServerModel(ABC):
    """The server has a foundation model of its own besides the federation's model. Caller: ``fedfm check``."""

    @abstractmethod
    def check_foundation(self) -> None:
        """Check that the foundation model exists.

        Raises:
            InputError: with the path where it was expected.
        """

    @abstractmethod
    def match_with(self, model: Model) -> TensorTable:
        """The tensors that it shares with the federation's model: ``table``, one dataclass per tensor, for printing."""


class HiddenModel(ABC):
    """The model is the server's, so there is no [model]: clients see other rows, and have a model for these.

    Caller: the experiment, the population and evaluation.
    """

    _was: ClassVar[dict[str, str]] = {"encoded": "encode"}

    @abstractmethod
    def model_table(self) -> dict[str, Any]:
        """Keys of [model]."""

    @abstractmethod
    def check_model(self) -> None:
        """Check that the model exists and is of the kind that it needs, without loading it.

        Raises:
            InputError: with what would be right.
        """

    @abstractmethod
    def view(self, client: Client) -> Client:
        """Client half: the same client, with the rows and the model that its training uses."""

    @abstractmethod
    def encode(self, model: Model, rows: Rows) -> Rows:
        """Rows as the server's model gives them to whoever holds them. Caller: ``fedfm predict`` and ``fedfm join``."""

    def fidelity(self, visible: ClientData, clear: Callable[[str], Rows]) -> dict[str, float]:
        """How far a client's rows are from those of the server's model in the clear, for ``details``. Caller: the local
        engine, the one place that has both.

        Args:
            visible: of :meth:`view`.
            clear: the rows of ``train``, ``val`` or ``test`` by the server's model; not called where nothing is told.
        """
        return {}


class RunPlan(Protocol):
    """What a run costs."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""

    def table(self) -> str:
        """For a reader."""


class Planned:
    """What a run costs is known before it starts. Caller: ``fedfm check`` and the ledger."""

    def plan(self, model: Model, rows: Sequence[Sequence[int]]) -> RunPlan | None:
        """The plan, with ``to_dict()`` and ``table()``, or None.

        Args:
            rows: of each client, training, validation and test rows.

        Raises:
            InputError: such a run would be refused.
        """
        return None

    @property
    def passes(self) -> int:
        """Epochs a round over everything that is trained, if they differ from the client optimiser's."""
        raise NotImplementedError


ROLES: tuple[type, ...] = (
    *(Personal, Predictor, Private, Joinable, Comparable),
    *(ServerModel, HiddenModel, Planned),
)


def check_roles(method: type) -> None:
    """Check that a class derives from the role of each member that it has, which nobody would call otherwise.

    Messages and settings may have such a name. A member that has another name by now is refused, too.

    Raises:
        InputError: with the role.
    """
    for role in (Reporter, *ROLES):
        for old, new in vars(role).get("_was", {}).items():
            if is_own_member(method, old):
                now = f"it is {role.__name__}.{new}" if new else f"a method says it by deriving from {role.__name__}"
                raise InputError(f"{method.__qualname__}.{old}: nobody reads it: {now}; or choose another name")
    for role in ROLES:
        for name in () if issubclass(method, role) else sorted(vars(role).keys() & set(dir(method))):
            member = inspect.getattr_static(method, name)
            is_member = isinstance(member, property) or (callable(member) and not getattr(member, "on_client", False))
            if is_member and not name.startswith("_"):
                raise InputError(
                    f"{method.__qualname__}.{name} is a member of the role {role.__name__}, and nobody would call it: "
                    f"derive from it, class {method.__name__}({role.__name__}, ...), import it from "
                    f"{role.__module__}, or choose another name"
                )
