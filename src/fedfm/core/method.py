"""Method: a federated algorithm, client half and server half in one class."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from fedfm.core.checks import match
from fedfm.core.client import Client, ClientId, on_client
from fedfm.core.federation import Federation
from fedfm.core.rows import Rows
from fedfm.errors import InputError, one_of
from fedfm.linalg.params import Params

Judge = Callable[[Params], dict[str, Any]]
S = TypeVar("S")  # server state, carried from round to round: Params, numbers, dicts or dataclasses of them


class Method(ABC, Generic[S]):
    """Subclass as a frozen dataclass: its fields are the hyper-parameters, and nothing else.

    ``init`` and ``step`` are the server half; functions marked ``@on_client`` are the client half. The halves share
    only ``self``'s hyper-parameters: all else travels by message. State is a value: what ``step`` returns is written to
    disk after every round, and a resumed run continues from it.

    Attributes:
        rounds: number of communication rounds; 0 evaluates the start.
        own_models: every client ends with a model of its own.
        adaptation: what is trainable when the experiment does not say.
        means, asks: names of the client halves that its rounds call, by ``fed.mean`` and by ``fed.ask``. Robust
            aggregation needs a mean, an [attack] something that is called, secure aggregation that nothing is asked.
            A contract test compares them with what crosses.
        secrets: what it asks of ``fed.secret``, by name. They are drawn when the run begins; a resumed run that has
            lost one is refused, since another draw would be a second release. The contract test compares these, too.
    """

    rounds: int
    own_models: ClassVar[bool] = False
    adaptation: ClassVar[str] = "lora"
    secrets: ClassVar[tuple[str, ...]] = ()
    keeps_foundation: ClassVar[bool] = False  # no message carries its foundation model: a contract test listens
    adaptations: ClassVar[tuple[str, ...]] = ()  # the only ones that it takes; empty: all
    means: ClassVar[tuple[str, ...]] = ()  # the server takes the mean of their updates
    asks: ClassVar[tuple[str, ...]] = ()  # the server sees each of their replies
    state_type: ClassVar[Any] = Params  # the class of S, by which a checkpoint is read back

    @abstractmethod
    def init(self, fed: Federation) -> S:
        """Server state before the first round."""

    @abstractmethod
    def step(self, fed: Federation, state: S, t: int) -> S:
        """One communication round (t = 1, 2, ...)."""

    @abstractmethod
    def params_for(self, state: S, client: ClientId) -> Params:
        """The parameters that ``client`` would use if training ended here; "" asks for the server's own."""

    @on_client
    def evaluate(self, client: Client, w: Params, part: str) -> dict[str, Any]:
        """The client's own model on its own ``test`` or ``val`` rows (see ``models.metrics.evaluate``)."""
        return self.scores(client.model, self.own(client, w), _rows(client, part))

    @on_client
    def evaluate_start(self, client: Client, w: Params, part: str) -> dict[str, Any]:
        """As :meth:`evaluate`, of w itself."""
        return self.scores(client.model, w, _rows(client, part))

    @on_client
    def reveal(self, client: Client, w: Params) -> Params:
        """The client's own model, for the run's directory; a silo's policy may keep it."""
        return self.own(client, w)

    def check_own(self, w: Params, model: Any) -> None:
        """Refuse what a client gave as its own model where it is none (see :meth:`reveal`); a ``ClientFault``."""
        local = getattr(self, "local", None)
        match(w, model.layout, "model") if local is None else local.check_own(w, model)

    def own(self, client: Client, w: Params) -> Params:
        """Client half: the client's own model, where ``w`` is what :meth:`params_for` gives for it."""
        local = getattr(self, "local", None)
        return w if local is None else local.own(client, w)

    @property
    def personal(self) -> bool:
        """Every client ends with a model of its own, by the method or by its client optimiser."""
        return type(self).own_models or self._local_is_personal

    @property
    def kept(self) -> bool:
        """Clients keep of their own models what :meth:`params_for` does not know."""
        return type(self).own is not Method.own or self._local_is_personal

    @property
    def _local_is_personal(self) -> bool:
        return bool(getattr(getattr(self, "local", None), "personal", False))

    def starts(self, state: S) -> dict[ClientId, Params] | None:
        """What each client's last local pass started from, where every client has a model of its own."""
        return None

    def newcomer(
        self, model: Any, state: S, w_0: Params, client: ClientId, adapt: Callable[[Params], Params]
    ) -> tuple[Params, dict[ClientId, float]]:
        """What a client that comes after training starts its local pass from, and whose share in it is how large.

        Args:
            w_0: the parameters before the first round.
            client: the newcomer's name.
            adapt: its local pass.

        Raises:
            InputError: the method has nothing to give it.
        """
        w = self.params_for(state, "") if hasattr(self, "local") and not self.personal else None
        if w is None or set(w) != set(model.names):
            raise InputError("join: this method has nothing that a client that comes after training could train on")
        return w, {}

    def arrays(self, state: S) -> dict[str, Any]:
        """NumPy arrays that tell of the last round and are kept for the report, by name; see ``Run.keep_arrays``."""
        return {}

    def scores(self, model: Any, w: Params, rows: Rows) -> dict[str, Any]:
        """How good w is on these rows (see ``models.metrics.evaluate``)."""
        if type(self).logits is Method.logits:
            with self.wearing(model, w, rows) as judged:
                return model.evaluate(judged)  # type: ignore[no-any-return]
        return model.evaluate(rows, self.logits(model, w, rows))  # type: ignore[no-any-return]

    def logits(self, model: Any, w: Params, rows: Rows) -> Tensor:
        """(n, C): what w says about rows. A method whose result is not a model's parameters (an ensemble) says how."""
        with self.wearing(model, w, rows) as judged:
            return model.predict(judged)  # type: ignore[no-any-return]

    @contextmanager
    def wearing(self, model: Any, w: Params, rows: Rows) -> Iterator[Rows]:
        """The model as w says, which the client optimiser may have made of more than one; the rows as it takes them."""
        if self._local_is_personal:
            with self.local.wearing(model, w, rows) as judged:  # type: ignore[attr-defined]
                yield judged
        else:
            model.load(w)
            yield rows

    @property
    def asks_scores(self) -> bool:
        """Clients may be asked for scores on rows of their own, which come with how many these are."""
        return True

    def notices(self, state: S) -> list[str]:
        """What whoever watches a finished run should know of it."""
        return []

    def details(self, state: S, judge: Judge | None) -> dict[str, Any]:
        """What the result line tells of this method under ``details``.

        Args:
            judge: metrics of parameters on the global test rows; None where the server has none.
        """
        return {}

    def yardsticks(self) -> dict[str, Method[Any]]:
        """Runs to set beside one of this method, by name; `fedfm run --yardsticks` makes them."""
        return {}

    def settled(self, privacy: Any) -> Method[S]:
        """This method with every default filled in that depends on whether there is a [privacy] table."""
        return self

    def protected(self, privacy: Any) -> Method[S]:
        """This method under the [privacy] table.

        Raises:
            InputError: it has no mechanism of that kind.
        """
        raise InputError("privacy: this method has no mechanism of its own; drop [privacy]")

    def spent(self) -> list[dict[str, Any]]:
        """The ledger's lines: what a finished run has spent of privacy; empty where nothing is claimed."""
        return []

    @property
    def head_takes(self) -> str | None:
        """What is done to features before the head that is no part of the model's own parameters; None: nothing."""
        return None

    def validate(self) -> None:
        """Refuse hyper-parameters that make no sense. Here: those that most methods have.

        Raises:
            InputError: with the key and what would be right.
        """
        if self.rounds < 0:
            raise InputError(f"method.rounds = {self.rounds}: expected a whole number of at least 0")
        if not 0 < (fraction := getattr(self, "fraction", 1.0)) <= 1:
            raise InputError(f"method.fraction = {fraction}: expected a number in (0, 1]")
        one_of("method.weighting", getattr(self, "weighting", "size"), ("size", "uniform"))
        if (local := getattr(self, "local", None)) is not None:
            local.validate("method.local")


def _rows(client: Client, part: str) -> Rows:
    return client.data.test if part == "test" else client.data.val


def with_model(state: Any, old: Params, new: Params) -> Any:
    """The server state of an averaging method with ``new`` in the place of its model ``old``; moments, control variates
    and whatever else it holds stay.

    Args:
        old: the very object that the method's ``params_for(state, "")`` gave.

    Raises:
        TypeError: the state is neither that model nor a dataclass that holds it.
    """
    if state is old:
        return new
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        for field in dataclasses.fields(state):
            if getattr(state, field.name) is old:
                return dataclasses.replace(state, **{field.name: new})
    raise TypeError(f"a state {type(state).__name__} holds no model that could be replaced")


def nested(method: Any) -> Iterator[Method[Any]]:
    """The methods in the fields of a method."""
    for f in dataclasses.fields(method):
        if isinstance(value := getattr(method, f.name, None), Method):
            yield value
