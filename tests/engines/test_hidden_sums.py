"""Under secure sums a silo that has no update sends an empty part: sums by silos' messages would be too large."""

import functools

import numpy as np
import pytest
import torch
from test_silo_terms import NAMES, Federation

from fedfm.config.registry import resolve
from fedfm.core.client import Update
from fedfm.engines.flower.private_api import identity
from fedfm.linalg.params import Params
from fedfm.methods.fedpft import private
from fedfm.runtime.run_directory import Run

SECURE = {"aggregator": "secagg"}
SUMMING = {  # the client half, and the method's keys
    "fedncm": ("sums", {"name": "fedncm"}),
    "ghofl": ("moments", {"name": "ghofl"}),
    "analytic": ("sums", {"name": "analytic"}),
    "ccvr": ("moments", {"name": "ccvr", "rounds": 2}),
}


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


def change_north(monkeypatch, name, handler, change):
    """Let ``change`` make north's answer."""
    cls = resolve("methods", name)
    whole = getattr(cls, handler)

    @functools.wraps(whole)
    def half(self, client, *args, **kwargs):
        update = whole(self, client, *args, **kwargs)
        return change(update) if client.id == "north" else update

    monkeypatch.setattr(cls, handler, half)


def fail(update):
    raise ValueError("these rows have no sums")


def empty(update):
    return Update(0.0 * update.delta, update.weight)


@pytest.mark.parametrize("name", SUMMING)
def test_a_hidden_sum_is_that_of_the_silos_that_could_answer(name, tmp_path, monkeypatch):
    """A silo whose sums are zeros counts as a silo, and adds nothing: the sums are the same as without it."""
    handler, method = SUMMING[name]
    states = {}
    for how, change in (("fails", fail), ("zeros", empty)):
        with monkeypatch.context() as patch:
            change_north(patch, name, handler, change)
            federation = Federation(tmp_path / how)
            federation.run(method=method, privacy=SECURE)
            states[how] = Run.open(federation.directory).state(Params)
        assert ("empty part of the sum" in federation.log("north")) == (how == "fails")
    for entry, tensor in states["zeros"].items():
        assert torch.allclose(states["fails"][entry], tensor, rtol=1e-4, atol=1e-4), entry


def test_the_noise_of_a_pooled_sum_covers_it_where_a_silo_could_not_answer(tmp_path, monkeypatch):
    """The noise is for rows of norm one: a sum that is half as large again would spend more than its epsilon."""
    add, found = private.federation_sum, []

    def keep(mean, clients, *args):
        found.append(mean * clients)
        return add(mean, clients, *args)

    monkeypatch.setattr(private, "federation_sum", keep)
    method = {"name": "fedpft", "pooled": True, "components": 1, "covariance": "diag"}
    privacy = SECURE | {"unit": "record", "target_epsilon": 8.0, "delta": 1e-5}
    for how, change in (("fails", fail), ("zeros", empty)):
        with monkeypatch.context() as patch:
            change_north(patch, "fedpft", "sums", change)
            Federation(tmp_path / how).run(method=method, privacy=privacy)
    assert len(NAMES) == 3
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)
