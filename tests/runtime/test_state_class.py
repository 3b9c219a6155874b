"""A state that no checkpoint could be read back as ends the run before its first round, and a named one resumes."""

from dataclasses import dataclass
from typing import Any

import pytest

import fedfm
from fedfm import ClientId, Federation, Method, Params, setting
from fedfm.errors import RunError
from small import experiment


@dataclass(frozen=True)
class Counted:
    w: Params
    rounds: int


@dataclass(frozen=True)
class Silent(Method):  # type: ignore[type-arg] # that is the mistake
    """Asks nobody, and does not say what its state is."""

    rounds: int = setting(1, "rounds", ge=0)

    def init(self, fed: Federation) -> Any:
        return Counted(fed.initial, 0)

    def step(self, fed: Federation, state: Any, t: int) -> Any:
        return Counted(state.w, state.rounds + 1)

    def params_for(self, state: Any, client: ClientId) -> Params:
        return state.w


@dataclass(frozen=True)
class Named(Silent, Method[Counted]):
    """Says it in its base."""


@dataclass(frozen=True)
class Changed(Named):
    """Leaves the class in its first round."""

    def step(self, fed: Federation, state: Any, t: int) -> Any:
        return state.w


@pytest.mark.parametrize(("name", "half", "rounds"), [("Silent", "init", 0), ("Changed", "step", 1)])
def test_a_state_of_another_class_ends_the_run(name, half, rounds, tmp_path):
    tables = experiment(tmp_path) | {"method": {"name": f"{__name__}:{name}", "rounds": 1}}
    with pytest.raises(RunError, match=rf"^{name}\.{half} returns a .* derive the class from Method\["):
        fedfm.run(tables, tmp_path / "run")
    assert sum(1 for _ in fedfm.load_run(tmp_path / "run").metrics()) == rounds


def test_a_run_goes_on_from_the_state_that_the_base_names(tmp_path):
    tables = experiment(tmp_path) | {"method": {"name": f"{__name__}:Named", "rounds": 1}}
    fedfm.run(tables, tmp_path / "run")
    assert fedfm.resume(tmp_path / "run", rounds=2)["rounds"] == 2
