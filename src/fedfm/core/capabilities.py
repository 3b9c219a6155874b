"""Roles of a method beyond its rounds. Its properties (:class:`Traits`) and requirements (:class:`Needs`) are data.

Every method is a :class:`Reporter`. It takes another role by deriving from that role. A role's abstract members are
required; the others are optional, and :func:`has` checks whether a method defines its own. Each role names its caller.
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
from fedfm.errors import InputError
from fedfm.linalg.params import Params

if TYPE_CHECKING:
    from torch import Tensor

    from fedfm.models.model import Model
    from fedfm.privacy.accountant import Accountant
    from fedfm.privacy.spec import PrivacySpec

R = TypeVar("R")
PREDICTIONS = "predictions.jsonl"  # in a client's store: its predictions, one line per row


class Judge(Protocol):
    """A function that computes the metrics of parameters on the global test rows."""

    def __call__(self, w: Params, /, *, by_class: bool = True) -> dict[str, Any]:
        """The metrics of ``w``. With ``by_class`` they include counts by class, which may take another pass."""


def has(method: object, role: type[R], member: str) -> TypeGuard[R]:
    """Whether a method has its own version of an optional member of this role."""
    return isinstance(method, role) and getattr(type(method), member) is not getattr(role, member)


class Reporter:
    """A method's own reports before, during and after a run. Caller: the run and its result."""

    figures: ClassVar[tuple[str, ...]] = ()  # names in fed.metrics that also go into a round's line of metrics.jsonl

    def forewarnings(self, counts: Mapping[ClientId, Sequence[int]]) -> list[str]:
        """Notices about the method's settings before the first round, one line each.

        Args:
            counts: numbers of training rows by client and class; empty in a run, where rounds report on the rows.
        """
        return []

    def staleness_warnings(self) -> list[str]:
        """One-line warnings about settings that are risky with stale updates; each names a better setting."""
        return []

    def arrays(self, state: Any) -> Mapping[str, Any]:
        """NumPy arrays of the last round, by name, for the report."""
        return {}

    def details(self, state: Any, judge: Judge | None) -> dict[str, Any]:
        """Entries of ``details`` in the result line; ``judge`` is None if the server has no test rows."""
        return {}

    def notices(self, state: Any) -> list[str]:
        """Notices for the owner of a finished run, one line each."""
        return []


class Personal:
    """Every client ends with its own model: ``params_for`` differs by client, or clients keep a part of their model.

    Caller: evaluation, which then scores one model per client.
    """

    def own(self, client: Client, w: Params) -> Params:
        """Client half: the client's own model, if it keeps a part that ``params_for`` does not return.

        Args:
            w: the value of ``params_for`` for this client.
        """
        return w

    def start_of(self, client: Client, w: Params) -> Params:
        """Client half: the model from which the client's last local pass started; before the first pass, ``w``."""
        return w

    def start_models(self, state: Any) -> dict[ClientId, Params]:
        """The models from which clients' last local passes started, to be scored; the key "" is for all clients."""
        return {}

    def check_own(self, w: Params, model: Model) -> None:
        """Check a client's own model; override this if own models have other tensors than the federation's model.

        Raises:
            ClientFault: a tensor differs; the message names the first such tensor.
        """
        match(w, model.layout, "model")


class Predictor:
    """The method predicts in another way than with one installed model. Caller: evaluation and the export."""

    def logits(self, model: Model, w: Params, rows: Rows) -> Tensor:
        """Logits (n, C) of rows under w, e.g. of an ensemble."""
        raise NotImplementedError

    def install(self, model: Model, w: Params, rows: Rows) -> AbstractContextManager[Rows]:
        """Install w in the model in the method's own way; yield the rows to score."""
        raise NotImplementedError

    @property
    def feature_transform(self) -> str | None:
        """The transform of features before the head, in words; the export documents it."""
        return None

    def mixture_in_code(self, model: Model) -> list[str]:
        """Lines of Python that build ``model``, for the export's documentation.

        They use ``experts``, a PeftModel with both adapters, and the files in ``FOLDER``.
        """
        return []


class Private(ABC):
    """The method has its own mechanism for ``[privacy]``. Caller: the experiment, and the run's ledger."""

    noise_by: ClassVar[str] = "server"  # who adds the noise: "silo", or "server", whose noise no silo can check

    @abstractmethod
    def settle(self, privacy: PrivacySpec | None) -> Self:
        """This method, with the defaults that depend on the [privacy] table filled in."""

    @abstractmethod
    def protect(self, privacy: PrivacySpec) -> Self:
        """This method with the mechanism of the [privacy] table.

        Raises:
            InputError: the method has no mechanism of that kind.
        """

    @abstractmethod
    def spend(self, accountant: Accountant) -> None:
        """Tell the accountant the privacy that a finished run has spent. A method that claims nothing tells nothing."""


class Joinable(ABC):
    """A client that joins after training gets its own start model. Caller: ``fedfm join``."""

    @abstractmethod
    def newcomer(
        self, model: Model, state: Any, w_0: Params, client: ClientId, adapt: Callable[[Params], Params]
    ) -> tuple[Params, dict[ClientId, float]]:
        """Start weights for a late client, and each client's share in them.

        Args:
            w_0: the parameters before the first round.
            client: the newcomer's name.
            adapt: the newcomer's local training.

        Raises:
            InputError: the method has no start for the newcomer.
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
    """Lines about the tensors of a model; ``str`` gives the table for users."""

    @property
    def table(self) -> Sequence[Line]:
        """A line for every tensor, in the model's order."""


class ServerModel(ABC):
    """The server has its own foundation model in addition to the federation's. Caller: ``fedfm check``."""

    @abstractmethod
    def check_foundation(self) -> None:
        """Check that the foundation model exists.

        Raises:
            InputError: there is none; the message names the expected path.
        """

    @abstractmethod
    def match_with(self, model: Model) -> TensorTable:
        """The tensors that the foundation model shares with the federation's model: ``table`` has a line for each."""


class HiddenModel(ABC):
    """Only the server has the model, so there is no [model] table; clients train another model on derived rows.

    Caller: the experiment, the population and evaluation.
    """

    @abstractmethod
    def model_table(self) -> dict[str, Any]:
        """The keys of a [model] table."""

    @abstractmethod
    def check_model(self) -> None:
        """Check that the model exists and is of the right kind, without loading it.

        Raises:
            InputError: there is no such model; the message says what would be right.
        """

    @abstractmethod
    def view(self, client: Client) -> Client:
        """Client half: the same client, with the rows and the model that its training uses."""

    @abstractmethod
    def encode(self, model: Model, rows: Rows) -> Rows:
        """Encode rows with the server's model for the clients. Caller: ``fedfm predict`` and ``fedfm join``."""

    def fidelity(self, visible: ClientData, clear: Callable[[str], Rows]) -> dict[str, float]:
        """The distance of a client's rows from the rows that the server's model computes in the clear, for ``details``.

        Caller: the local engine, because only there one process has both kinds of rows.

        Args:
            visible: the client's data in :meth:`view`.
            clear: computes the rows of ``train``, ``val`` or ``test`` by the server's model; called only if needed.
        """
        return {}


class RunPlan(Protocol):
    """The cost of a run."""

    def to_dict(self) -> dict[str, Any]:
        """The cost as JSON values."""

    def table(self) -> str:
        """The cost as a table for users."""


class Planned:
    """The cost of a run is known before it starts. Caller: ``fedfm check`` and the ledger."""

    def plan(self, model: Model, rows: Sequence[Sequence[int]]) -> RunPlan | None:
        """The cost of a run; None if there is nothing to report.

        Args:
            rows: for each client its numbers of training, validation and test rows.

        Raises:
            InputError: the run would be refused.
        """
        return None

    @property
    def passes(self) -> int:
        """Epochs per round over all trained parts, if they differ from the client optimiser's."""
        raise NotImplementedError


ROLES: tuple[type, ...] = (
    *(Personal, Predictor, Private, Joinable, Comparable),
    *(ServerModel, HiddenModel, Planned),
)


def check_roles(method: type) -> None:
    """Check that a class derives from each role whose members it has; otherwise a member would never be called.

    Handlers and settings may have the name of a member.

    Raises:
        InputError: the class does not derive from the role; the message names the role.
    """
    for role in ROLES:
        for name in () if issubclass(method, role) else sorted(vars(role).keys() & set(dir(method))):
            member = inspect.getattr_static(method, name)
            is_member = isinstance(member, property) or (callable(member) and not getattr(member, "on_client", False))
            if is_member and not name.startswith("_"):
                raise InputError(
                    f"{method.__qualname__}.{name} is a member of the role {role.__name__}, and nobody would call it: "
                    f"derive from the role, class {method.__name__}({role.__name__}, ...), imported from "
                    f"{role.__module__}, or choose another name"
                )
