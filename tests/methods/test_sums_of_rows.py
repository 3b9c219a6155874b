"""Sums that rows have pass, whoever sends them; sums that no rows have, and other weights, are refused."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedfm
from fedfm.aggregation._secagg import WEIGHT
from fedfm.aggregation.secure import Secure
from fedfm.config.registry import resolve
from fedfm.core.client import Update
from fedfm.errors import ClientFault, RunError
from fedfm.linalg.params import Params
from fedfm.methods._one_shot import class_sums, clients_in_mean
from fedfm.methods._sums_of_rows import check_part, why_no_sums
from fedfm.methods.analytic import Analytic
from fedfm.methods.ghofl import moments_of
from small import features

FORMS = ("none", "nb", "lda", "qda")
CLASSES = 3


def sums_of(x, y, form):
    if form == "none":
        return Params({name: tensor.float() for name, tensor in class_sums(x, y, CLASSES).items()})
    return moments_of(x, y, CLASSES, form)


def drawn(seed, n, d, scale=1.0):
    rng = np.random.default_rng(seed)
    x = (scale * rng.standard_normal((n, d)) + rng.standard_normal(d)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(rng.integers(0, CLASSES, n))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from([1e-4, 1.0, 1e4]),
    st.sampled_from(FORMS),
)
def test_sums_of_rows_pass_alone_together_and_rounded_as_hidden_ones(seed, sizes, d, scale, form):
    parts = [sums_of(*drawn(seed + k, n, d, scale), form) for k, n in enumerate(sizes)]
    assert [why_no_sums(part) for part in parts] == [None] * len(parts)
    total = functools.reduce(Params.__add__, parts)
    assert why_no_sums(total) is None
    step = 2.0**-32  # of fixed-point numbers of four clients, each rounded
    noise = np.random.default_rng(seed)
    rounded = {k: v + step * torch.from_numpy(noise.uniform(-2, 2, v.shape)).to(v.dtype) for k, v in total.items()}
    assert why_no_sums(rounded) is None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(3, 12), st.integers(2, 6), st.sampled_from(FORMS))
def test_sums_that_no_rows_have_are_refused(seed, n, d, form):
    found = sums_of(*drawn(seed, n, d), form)
    assert "whole numbers" in why_no_sums(-1.0 * found)
    assert "whole numbers" in why_no_sums(found.replace({"count": found["count"] + 0.5}))
    empty = found["count"].clone()
    empty[int(found["count"].argmax())] = 0
    assert why_no_sums(found.replace({"count": empty})) is not None
    if form != "none":
        assert why_no_sums(found.replace({"total": 30 * found["total"]})) is not None
        assert why_no_sums(found.replace({"second": -found["second"]})) is not None


def test_a_part_has_weight_1():
    """A weight near 0 would scale the other clients' sums, and a large one would make them vanish."""
    delta = Params({"count": torch.ones(1)})
    check_part(Update(delta, 1.0), None)
    for weight in (1e-9, 0.5, 2.0, 1e6):
        with pytest.raises(ClientFault, match="weight 1"):
            check_part(Update(delta, weight), None)


@pytest.mark.parametrize("weight", [0.501, 1.5, 2.4999, 4.0])
def test_hidden_weights_that_are_no_number_of_clients_end_the_run(weight):
    """The mean times a rounded weight would be up to twice the sum that noise covers."""
    fed = SimpleNamespace(aggregator=Secure(), heard=3, round=1, process_memory={WEIGHT: weight})
    with pytest.raises(RunError, match="another weight than 1"):
        clients_in_mean(fed)
    fed.process_memory[WEIGHT] = 2.0  # one client had no update
    assert clients_in_mean(fed) == 2


def lying(monkeypatch, method, handler, lie):
    """Let client-01 send something else."""
    cls = resolve("methods", method)
    honest = getattr(cls, handler)

    @functools.wraps(honest)
    def half(self, client, *args, **payload):
        update = honest(self, client, *args, **payload)
        return lie(update) if client.id == "client-01" else update

    monkeypatch.setattr(cls, handler, half)


METHODS = [
    ({"name": "fedncm"}, "sums"),
    ({"name": "ghofl"}, "moments"),
    ({"name": "ghofl", "form": "qda"}, "moments"),
    ({"name": "ccvr"}, "moments"),
    ({"name": "analytic"}, "sums"),
    ({"name": "analytic", "class_weights": "balanced"}, "count"),
    ({"name": "survey"}, "sums"),
    ({"name": "fedpft", "pooled": True}, "sums"),
]


@pytest.mark.parametrize(("method", "handler"), METHODS, ids=[f"{m['name']}-{h}" for m, h in METHODS])
@pytest.mark.parametrize(
    ("lie", "code"),
    [(lambda u: replace(u, delta=-1.0 * u.delta), "E_FIELD"), (lambda u: replace(u, weight=1e-9), "E_WEIGHT")],
    ids=["sign", "weight"],
)
def test_a_client_that_lies_in_the_clear_is_left_out(tmp_path, monkeypatch, method, handler, lie, code):
    lying(monkeypatch, method["name"], handler, lie)
    tables = {
        "data": {"path": str(features(tmp_path, d=4)), "partition": {"name": "iid", "clients": 4}},
        "model": {"name": "features"},
        "method": method,
        "run": {"seed": 1, "workers": 1},
    }
    if method["name"] == "fedpft":
        tables["privacy"] = {"unit": "record", "target_epsilon": 8.0, "delta": 1e-5}
    result = fedfm.run(tables, tmp_path / "run", progress=fedfm.Progress())
    assert [(e["client"], e["code"]) for e in result["excluded"]] == [("client-01", code)]


def test_false_hidden_sums_end_the_run_where_they_are_those_of_no_rows(tmp_path, monkeypatch):
    lying(monkeypatch, "ghofl", "moments", lambda u: replace(u, delta=0.3 * u.delta))
    tables = {
        "data": {"path": str(features(tmp_path, n=241, d=4)), "partition": {"name": "iid", "clients": 4}},
        "model": {"name": "features"},
        "method": {"name": "ghofl"},
        "privacy": {"aggregator": "secagg"},
        "run": {"seed": 1, "workers": 1},
    }
    with pytest.raises(RunError, match="no rows can have the clients' sums"):
        fedfm.run(tables, tmp_path / "run", progress=fedfm.Progress())


@pytest.mark.parametrize("one_class", [True, False])
def test_analytic_knows_its_rows_by_the_constant(one_class):
    from fedfm.methods.analytic import _sums_of

    rng = np.random.default_rng(0)
    x = torch.cat([torch.from_numpy(rng.standard_normal((9, 3))), torch.ones(9, 1).double()], 1)
    y = torch.eye(2).double()[rng.integers(0, 2, 9)] if one_class else torch.from_numpy(rng.standard_normal((9, 2)))
    model = SimpleNamespace(task=SimpleNamespace(one_class_a_row=one_class))
    found = _sums_of(x, y, torch.ones(1))
    assert Analytic()._why_no_sums(model, found) is None
    for lie in (-1.0 * found, 0.5 * found, found.replace({"C": 0.5 * found["C"]}), found.replace({"C": -found["C"]})):
        assert Analytic()._why_no_sums(model, lie) is not None
