"""Method: a federated algorithm, with its client half and its server half in one class."""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, ForwardRef, Generic, TypeVar, get_args, get_origin

from fedfm.core.capabilities import Needs, Reporter, Traits, check_roles
from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.core.fields import Paper
from fedfm.errors import InputError
from fedfm.linalg.params import Params

S = TypeVar("S")  # server state, carried from round to round: Params, numbers, dicts or dataclasses of them


class Method(Reporter, ABC, Generic[S]):
    """A federated algorithm. Subclass it as a frozen dataclass whose fields are the hyper-parameters, and nothing else.

    ``init`` and ``step`` are the server half; functions marked ``@on_client`` are the client half. The halves share
    only ``self``'s hyper-parameters; everything else is sent by messages. State is a value: the run writes the result
    of ``step`` to disk after every round, and a resumed run continues from it. :mod:`fedfm.core.capabilities` has the
    roles from which a method may derive, and the reports of every method.

    Attributes:
        rounds: number of communication rounds; 0 evaluates the initial model.
        needs: requirements on the experiment.
        traits: properties of the method. A subclass that does not state them inherits all except the claims about the
            mathematics, which it may have changed.
        means, asks: names of the client functions that its rounds call by ``fed.mean`` and by ``fed.ask``. Robust
            aggregation requires a mean, an [attack] requires any call, secure aggregation forbids ``fed.ask``. A
            contract test compares the names with the messages.
        state_type: the class of S, by which a checkpoint is decoded; by default the one in ``Method[S]``.
        paper: the paper's settings, by dotted key in an experiment. `fedfm show` lists those that differ from the
            default.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # set by the subclass's decorator
    rounds: int
    needs: ClassVar[Needs] = Needs()
    traits: ClassVar[Traits] = Traits()
    means: ClassVar[tuple[str, ...]] = ()
    asks: ClassVar[tuple[str, ...]] = ()
    state_type: ClassVar[Any] = Params
    paper: ClassVar[Mapping[str, Paper]] = MappingProxyType({})

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        check_roles(cls)
        Traits.check_stated(cls)
        if "state_type" not in vars(cls) and (state := _state_in_bases(cls)) is not None:
            cls.state_type = state
        traits: Any = inspect.getattr_static(cls, "traits")
        by_settings = hasattr(traits, "__get__")  # a property
        if not (by_settings or isinstance(traits, Traits)):
            raise InputError(f"{cls.__qualname__}.traits = {traits!r:.80}: expected Traits(...)")
        if "traits" not in vars(cls):
            cls.traits = _InheritedTraits(traits) if by_settings else traits.without_claims()  # type: ignore[assignment]

    @abstractmethod
    def init(self, fed: Federation) -> S:
        """Server state before the first round."""

    @abstractmethod
    def step(self, fed: Federation, state: S, t: int) -> S:
        """One communication round (t = 1, 2, ...)."""

    @abstractmethod
    def params_for(self, state: S, client: ClientId) -> Params:
        """The parameters that ``client`` would use if training ended now; "" is the server."""

    def validate(self) -> None:
        """Refuse incompatible hyper-parameters; each single value is already checked against its bounds.

        Raises:
            InputError: the message names the key and what would be right.
        """


def _state_in_bases(cls: type[Method[Any]]) -> Any:
    """The class in place of S in the bases of ``cls``, e.g. ``Params`` in ``Method[Params]``; None if there is none."""
    for base in vars(cls).get("__orig_bases__", ()):
        if (of := get_args(base)) and issubclass(get_origin(base), Method):
            return None if of[0] is Any or isinstance(of[0], TypeVar | ForwardRef) else of[0]
    return None


class _InheritedTraits(property):
    """Traits that depend on settings, in a subclass that does not state its own."""

    def __init__(self, traits: Any) -> None:
        super().__init__(lambda method: traits.__get__(method, type(method)).without_claims())


def fraction_of(method: Method[Any]) -> float:
    """The fraction of the clients that a round selects, in (0, 1]; 1 if the method has no such setting."""
    return float(vars(method).get("fraction", 1.0))


def with_model(state: Any, old: Params, new: Params) -> Any:
    """The server state of an averaging method, with its model ``old`` replaced by ``new``.

    Args:
        old: the same object that the method's ``params_for(state, "")`` returned.

    Raises:
        TypeError: the state is neither that model nor a dataclass that contains it.
    """
    if state is old:
        return new
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        for field in dataclasses.fields(state):
            if getattr(state, field.name) is old:
                return dataclasses.replace(state, **{field.name: new})
    raise TypeError(f"a state {type(state).__name__} holds no model that could be replaced")


def nested_methods(method: Method[Any]) -> Iterator[Method[Any]]:
    """The methods in the fields of a method."""
    for f in dataclasses.fields(method):
        if isinstance(value := getattr(method, f.name, None), Method):
            yield value
