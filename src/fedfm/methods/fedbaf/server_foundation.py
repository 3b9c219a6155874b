"""Base of FedBaF and weight initialisation: an averaging method with a foundation model that only the server reads."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from fedfm.core.capabilities import Judge, Needs, Personal, ServerModel
from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.core.fields import Paper, setting
from fedfm.core.method import Method
from fedfm.errors import InputError
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.fedbaf.matching import DECLARED, Matching, check_place, match
from fedfm.methods.fedbaf.paper import TRAINING
from fedfm.models.model import Model
from fedfm.training import SGD, Local


@dataclass(frozen=True)
class Around(ServerModel, Method[Any]):
    """An averaging method with a foundation model that only the server reads. The state is the base method's."""

    needs: ClassVar[Needs] = Needs("full")
    paper: ClassVar[Mapping[str, Paper]] = TRAINING

    rounds: int = setting(10, "communication rounds; 0 evaluates the initial model", ge=0)
    fraction: float = setting(1.0, "C, the fraction of clients that a round asks", gt=0, le=1)
    local: Local = setting(SGD(), "client optimiser: E, B, eta")
    base: FedAvg = setting(FedAvg(), "the name of the averaging method, and the method's own keys")
    foundation: str = setting(
        "",
        "built-in name, folder or hub id [required]; only the server reads it",
        required=True,
        words="a built-in name, a folder or a hub id; only the server reads it",
        metadata={"server_only": True},
    )
    identical: tuple[str, ...] = setting(
        (),
        '"labels", "vocabulary" or both, if the indices mean the same in both models; otherwise the tensors of '
        "labels or vocabulary are not mixed",
        choices=DECLARED,
    )

    def __post_init__(self) -> None:
        plain, usual = FedAvg(), type(self.base)()
        settings: dict[str, Any] = {key: getattr(self, key) for key in ("rounds", "fraction", "local")}
        for key, ours in settings.items():
            if getattr(self.base, key) not in (ours, getattr(plain, key), getattr(usual, key)):
                raise InputError(f"method.base.{key}: set it once, as method.{key}", key=f"method.base.{key}")
        object.__setattr__(self, "base", dataclasses.replace(self.base, **settings))

    @property
    def means(self) -> tuple[str, ...]:  # type: ignore[override]
        """The handlers whose replies the base method averages."""
        return self.base.means

    @property
    def asks(self) -> tuple[str, ...]:  # type: ignore[override]
        """The handlers whose single replies the base method sees."""
        return self.base.asks

    @property
    def state_type(self) -> Any:
        """The type of the base method's state."""
        return self.base.state_type

    def matching(self, fed: Federation) -> Matching:
        """Match the foundation model with the federation's model; the foundation model is read once."""
        if not self._last_matching or self._last_matching[0]() is not fed.model:
            self._last_matching[:] = [weakref.ref(fed.model), self.match_with(fed.model)]
        return self._last_matching[1]  # type: ignore[no-any-return]

    def check_foundation(self) -> None:
        check_place(self.foundation)

    def match_with(self, model: Model) -> Matching:
        return match(model, self.foundation, self.identical)

    @cached_property
    def _last_matching(self) -> list[Any]:
        """The last matched model and its matching."""
        return []

    def params_for(self, state: Any, client: ClientId) -> Any:
        return self.base.params_for(state, client)

    def details(self, state: Any, judge: Judge | None) -> dict[str, Any]:
        found = self.base.details(state, judge)
        if self._last_matching:
            found["matching"] = self._last_matching[1].summary()
        return found

    def validate(self) -> None:
        if self.base.needs.pooled:
            raise InputError(
                "method.base.name: this method trains on pooled rows and has no aggregate to mix with; expected "
                'e.g. "fedavg"',
                key="method.base.name",
            )
        try:
            self.base.validate()
        except InputError as error:
            own = {f.name for f in dataclasses.fields(self.base)} - {"rounds", "fraction", "local"}
            first, *rest = (_of_base(fault, own) for fault in error.all)
            first.more = tuple(rest)
            raise first from None
        if isinstance(self.base, Personal):
            raise InputError(
                "method.base.name: this method gives each client its own model, but the foundation model mixes with "
                "one model for "
                'all; expected e.g. "fedavg"',
                key="method.base.name",
            )


def _of_base(fault: InputError, own: set[str]) -> InputError:
    """The same fault; its key moves to [method.base] if the base method has this setting (``own``)."""
    section, _, rest = fault.key.partition(".")
    return fault.move(f"method.base.{rest}") if section == "method" and rest.partition(".")[0] in own else fault
