"""Method: a federated algorithm, client half and server half in one class."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, TypeVar

from fedfm.core.capabilities import Needs
from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.linalg.params import Params

S = TypeVar("S")  # server state, carried from round to round: Params, numbers, dicts or dataclasses of them


class Method(ABC, Generic[S]):
    """Subclass as a frozen dataclass: its fields are the hyper-parameters, and nothing else.

    ``init`` and ``step`` are the server half; functions marked ``@on_client`` are the client half. The halves share
    only ``self``'s hyper-parameters: all else travels by message. State is a value: what ``step`` returns is written to
    disk after every round, and a resumed run continues from it. What a method may have beside these members stands in
    :mod:`fedfm.core.capabilities`.

    Attributes:
        rounds: number of communication rounds; 0 evaluates the start.
        needs: what it asks of the experiment around it.
        means, asks: names of the client halves that its rounds call, by ``fed.mean`` and by ``fed.ask``. Robust
            aggregation needs a mean, an [attack] something that is called, secure aggregation that nothing is asked.
            A contract test compares them with what crosses.
        state_type: the class of S, by which a checkpoint is read back.
    """

    rounds: int
    needs: ClassVar[Needs] = Needs()
    means: ClassVar[tuple[str, ...]] = ()
    asks: ClassVar[tuple[str, ...]] = ()
    state_type: ClassVar[Any] = Params

    @abstractmethod
    def init(self, fed: Federation) -> S:
        """Server state before the first round."""

    @abstractmethod
    def step(self, fed: Federation, state: S, t: int) -> S:
        """One communication round (t = 1, 2, ...)."""

    @abstractmethod
    def params_for(self, state: S, client: ClientId) -> Params:
        """The parameters that ``client`` would use if training ended here; "" asks for the server's own."""

    def validate(self) -> None:
        """Refuse hyper-parameters that do not go together; each alone is checked against its bounds before.

        Raises:
            InputError: with the key and what would be right.
        """


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
