"""Properties of a method, as data that the rest of the program reads."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fedfm.errors import InputError


def _trait(default: Any, help: str, *, claim: bool = False) -> Any:
    """A field of :class:`Traits`. A ``claim`` is about the mathematics, so a subclass must state it again."""
    return field(default=default, metadata={"help": help, "claim": claim})


@dataclass(frozen=True)
class Traits:
    """Properties of a method. The defaults are safe for a method about which nothing is known.

    A claim is about the mathematics of the method. A subclass may change the mathematics, so it inherits no claim: it
    has only the claims that its own ``traits`` state.
    """

    accepts_stale_updates: bool = _trait(
        False,
        "its rounds may use updates that start from earlier rounds: `run.asynchronous` requires it",
        claim=True,
    )
    server_needs_weights_only: bool = _trait(
        False,
        "its server half computes only with parameters, never with outputs of the model: a server without rows then "
        "loads no frozen weights",
        claim=True,
    )
    rows_by_optimiser: bool = _trait(
        False,
        "its clients read training rows only through `self.local`, and otherwise only count them: DP-SGD and "
        "`data.augment` require it",
        claim=True,
    )
    independent_messages: bool = _trait(
        False,
        "it takes one round, a client's messages depend on its own rows only, and the model follows from the messages: "
        "`fedfm leave` is exact without another training, and `fedfm worth` computes the model of any set of clients",
        claim=True,
    )
    server_secrets: tuple[str, ...] = _trait(
        (),
        "names of the secrets that the server draws by `fed.secret(name)`; a run does not resume without them",
    )
    sealed_replies: tuple[str, ...] = _trait(
        (),
        "names of `asks` whose replies are ciphertexts, which the server cannot read: secure aggregation and noise on "
        "means allow them",
    )
    hides_counts: bool = _trait(False, "clients may hide their number of rows, so they are asked for no scores")
    figures_only: bool = _trait(False, "its result is figures in `details`: no model is scored or written")
    predicts_only: bool = _trait(False, "nothing is trained: silos predict rows without labels")
    clients_judge: bool = _trait(
        False, "the accuracy of the shared model comes from the clients' rows, since the server can read no test rows"
    )
    last_round_differs: bool = _trait(
        False,
        "its last round differs from the others and completes its model: a run can neither end before this round nor "
        "continue after it",
    )
    complete_from: int = _trait(
        0,
        "the first round after which its model is complete: `run.patience` neither ends a run before this round nor "
        "chooses the model of an earlier round",
    )
    keeps_foundation: bool = _trait(
        False,
        "a foundation model never leaves the server: the server's moments, which reveal it, are stored under "
        "`private/`",
    )

    @classmethod
    def check_stated(cls, method: type) -> None:
        """Refuse a method that has a class attribute with the name of a trait, since nobody reads the attribute.

        Handlers and settings may have such a name.

        Raises:
            InputError: there is such an attribute; the message names the trait.
        """
        for f in fields(cls):
            if is_own_member(method, f.name):
                raise InputError(
                    f"{method.__qualname__}.{f.name}: nobody reads it: write traits = Traits({f.name}=...) in the "
                    "class, or choose another name"
                )

    def without_claims(self) -> Traits:
        """The traits that a subclass inherits."""
        defaults: dict[str, Any] = {f.name: f.default for f in fields(self) if f.metadata["claim"]}
        return replace(self, **defaults)


def is_own_member(cls: type, name: str) -> bool:
    """Whether a class has a member of this name that is neither a setting nor a message."""
    owner = next((c for c in cls.__mro__ if name in vars(c)), None)  # a mixin may have the attribute, too
    if owner is None:
        return False
    hint = inspect.get_annotations(owner).get(name)
    setting = hint is not None and "ClassVar" not in str(hint)
    return not setting and not getattr(vars(owner)[name], "on_client", False)
