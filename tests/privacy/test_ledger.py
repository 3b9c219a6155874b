"""The ledger adds up, and the examples of the room run."""

import dataclasses
import doctest
import importlib
import math
import subprocess
import sys

import pytest

from fedfm.aggregation._record_level import DpSgd
from fedfm.errors import InputError
from fedfm.methods.fedpft.release_plan import Plan
from fedfm.privacy import gaussian
from fedfm.privacy.accountant import Accountant, together
from fedfm.privacy.dp_sgd import DescentPlan


def test_a_record_at_two_clients_spends_at_both():
    one = Plan().ledger_line()
    both = together([one, one])
    assert both.epsilon == pytest.approx(gaussian.epsilon_of(one.sigma, math.sqrt(2) * one.sensitivity, 1e-5))
    assert one.epsilon < both.epsilon < 2 * one.epsilon
    assert both.sensitivity / both.sigma == pytest.approx(math.sqrt(2) * one.sensitivity / one.sigma)
    assert together([both, one]).epsilon == pytest.approx(together([one] * 3).epsilon)
    assert together([one]).epsilon == pytest.approx(1.0)
    assert both.composition.startswith("2 Gaussian")


def test_releases_of_different_noise():
    a, b = Plan(epsilon=0.5).ledger_line(), Plan(epsilon=2.0, covariance="full").ledger_line()
    mu = math.hypot(a.sensitivity / a.sigma, b.sensitivity / b.sigma)
    assert together([a, b]).epsilon == pytest.approx(gaussian.epsilon_of(1.0, mu, 1e-5))


def test_no_guarantee_stays_none():
    one = Plan("replace").ledger_line(10)
    for worthless in (dataclasses.replace(one, epsilon=math.inf), dataclasses.replace(one, sigma=0.0)):
        assert together([one, worthless]).epsilon == math.inf


@pytest.mark.parametrize("other", [Plan("replace").ledger_line(10), Plan(delta=1e-6).ledger_line()])
def test_entries_that_cannot_be_added_are_refused(other):
    with pytest.raises(InputError, match="do not add up"):
        together([Plan().ledger_line(), other])
    with pytest.raises(InputError, match="at least one"):
        together([])


def test_sampled_steps_are_added_to_nothing():
    steps = Accountant()
    DpSgd(DescentPlan(1.0, 1e-5, 3, noise_multiplier=1.0), 32, lambda n: -(-n // 32)).spend(steps, 3, [100, 300])
    (one,) = steps.events
    assert steps.epsilon == one.epsilon > 0
    assert one.sigma is None
    assert "standard deviation 1" in one.note
    assert together([one]) == one
    for other in (one, dataclasses.replace(one, mechanism="Gaussian", sigma=1.0)):
        with pytest.raises(InputError, match="DP-SGD do not add up"):
            together([one, other])


_FEDPFT = ("release_plan", "noisy_moments", "noisy_sums")


@pytest.mark.parametrize(
    "name", ["privacy.gaussian", "privacy.noise", "privacy.accountant", *(f"methods.fedpft.{name}" for name in _FEDPFT)]
)
def test_the_examples_of_the_privacy_modules_run(name):
    module = importlib.import_module(f"fedfm.{name}")
    assert doctest.testmod(module).failed == 0
    for attribute in vars(module).values():
        if getattr(attribute, "__module__", "") == module.__name__ and not attribute.__name__.startswith("_"):
            assert attribute.__doc__


def test_the_room_imports_no_scipy():
    code = "import sys, fedfm.methods.fedpft.noisy_sums; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
