"""The parts of an experiment that its rules across tables read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from fedfm.aggregation.base import Aggregator
from fedfm.attacks.attack import Attack
from fedfm.config.run_spec import RunSpec
from fedfm.config.user_code import is_function
from fedfm.core.method import Method
from fedfm.data.spec import IN_MEMORY, DataSpec
from fedfm.models.spec import ModelSpec
from fedfm.privacy.spec import PrivacySpec

M = TypeVar("M")


@dataclass(frozen=True)
class ExperimentParts:
    """The settings in the tables of an experiment.

    Attributes:
        tuning: the trials of a search for the learning rate before this run, and their costs.
    """

    name: str
    data: DataSpec
    model: ModelSpec
    method: Method[Any]
    method_name: str
    privacy: PrivacySpec | None
    attack: Attack | None
    run: RunSpec
    aggregation: Aggregator
    tuning: tuple[dict[str, Any], ...]

    def method_as(self, kind: type[M]) -> M:
        """The method, for code that needs a certain class of methods.

        Raises:
            TypeError: the method is of another class.
        """
        if not isinstance(self.method, kind):
            raise TypeError(f"method {self.method_name!r} is not a {kind.__name__}")
        return self.method

    @property
    def in_memory(self) -> bool:
        """Whether data and model come from a Python program, :func:`fedfm.federate`."""
        return self.data.name == IN_MEMORY

    @property
    def own_code(self) -> bool:
        """Whether data and model come from a user's function that the experiment names."""
        return is_function(self.data.name)
