"""Which trained tensors of a user's module get no gradient is told before the first round."""

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given as having
from hypothesis import strategies as some
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import fedfm
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError
from fedfm.models.loss_graph import reach
from fedfm.models.user.user_inputs import read_inputs
from fedfm.runtime.user_population import of_inputs

ROWS = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(24)]


def notices(module, loss=cross_entropy, **more):
    user_inputs = read_inputs({"model": module, "clients": {"a": ROWS[:12], "b": ROWS[12:]}, "loss": loss} | more)
    return [text for text in of_inputs(user_inputs, DataSpec(), 0).model.notices if "gradient" in text]


class Net(nn.Module):
    """Layers, and a head; what runs is said by ``way``."""

    def __init__(self, way, **parts):
        super().__init__()
        self.way, self.calls = way, 0
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        self.calls += 1
        return self.way(self, x)


def linears(n):
    return nn.ModuleList(nn.Linear(5, 5) for _ in range(n))


def gated(net, h):
    if not (net.training and random.random() < 2):  # always in training
        return h
    return h + net.layers[0](h)


def normed(net, x):
    return net.head(net.norm(net.body(x)))


def tied():
    net = Net(lambda s, x: s.head(s.last(s.body(x))), last=nn.Linear(5, 5))
    net.again = net.last
    return net


SOUND = {
    "plain": lambda: Net(lambda s, x: s.head(s.body(x))),
    "training alone": lambda: Net(lambda s, x: s.head(gated(s, s.body(x))), layers=linears(1)),
    "evaluation without gradients": lambda: Net(
        lambda s, x: s.head(s.body(x)) if s.training else s.head(s.body(x)).detach()
    ),
    "tied": tied,
    "recomputed": lambda: Net(lambda s, x: s.head(checkpoint(s.body, x.requires_grad_(), use_reentrant=True))),
    "recomputed layers": lambda: Net(lambda s, x: s.head(checkpoint(s.body, x, use_reentrant=False))),
    "weights of zero": lambda: Net(lambda s, x: s.head(s.body(x) + s.up(s.down(x))), down=nn.Linear(4, 2), up=zero()),
    "batch norm": lambda: Net(normed, norm=nn.BatchNorm1d(5)),
    "recurrent": lambda: Net(lambda s, x: s.head(s.cell(x[:, None])[0][:, 0]), cell=nn.GRU(4, 5), body=nn.Identity()),
}


def zero():
    up = nn.Linear(2, 5)
    nn.init.zeros_(up.weight)
    return up


_SLOW = ("recomputed", "recomputed layers")  # torch loads its compiler for a checkpoint


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.proof if n in _SLOW else ()) for n in SOUND])
def test_parameters_that_all_move_give_no_notice(name):
    assert notices(SOUND[name]()) == []


IDLE = {
    "unused": (lambda: Net(lambda s, x: s.head(s.body(x)), pooler=nn.Linear(5, 5)), "pooler.weight, pooler.bias", 2),
    "the last layer": (
        lambda: Net(lambda s, x: s.head(s.layers[1](s.layers[0](s.body(x)))), layers=linears(3)),
        "layers.2.weight, layers.2.bias",
        2,
    ),
    "cut off": (lambda: Net(lambda s, x: s.head(s.body(x).detach())), "body.weight, body.bias", 2),
    "weights that their owner reads": (
        lambda: Net(lambda s, x: s.head(x @ s.body.weight.T), body=nn.Linear(4, 5)),
        "body.bias",
        1,
    ),
}


@pytest.mark.parametrize("name", IDLE)
def test_trained_tensors_without_a_gradient_are_named(name):
    build, words, count = IDLE[name]
    net = build()
    (said,) = notices(net)
    assert said.startswith(f"{count} of {len(list(net.parameters()))} trained tensors get no gradient")
    assert said.endswith(words)


@having(some.lists(some.booleans(), min_size=4, max_size=4).filter(any))
def test_the_graph_predicts_which_gradients_autograd_gives(used):
    parts = [nn.Linear(3, 3) for _ in used]
    x = torch.ones(2, 3)
    for part, on in zip(parts, used, strict=True):
        x = part(x) if on else part(x).detach() + x
    live = dict(nn.ModuleList(parts).named_parameters())
    found = torch.autograd.grad(x.sum(), list(live.values()), allow_unused=True, retain_graph=True)
    expected = {name for name, g in zip(live, found, strict=True) if g is not None}
    assert reach(x.sum(), live) == expected


def test_a_loss_that_moves_nothing_is_refused_before_any_training(tmp_path):
    for net, loss in (
        (Net(lambda s, x: s.head(s.body(x)).detach()), cross_entropy),
        (Net(lambda s, x: s.head(s.body(x))), lambda out, y: cross_entropy(out.detach().requires_grad_(), y)),
    ):
        with pytest.raises(InputError, match="loss: no trained tensor gets a gradient"):
            fedfm.federate(net, clients={"a": ROWS}, loss=loss, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_user_code_runs_once_where_all_is_reached():
    net = SOUND["plain"]()
    notices(net)
    assert net.calls == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_look_changes_nothing(fails):
    def way(net, x):
        if net.training and fails:
            raise RuntimeError("three rows at least")
        if net.training:
            random.random()
            np.random.rand()  # noqa: NPY002
        return normed(net, x + 0 * torch.rand(4))

    net = Net(way, norm=nn.BatchNorm1d(5), unused=nn.Linear(2, 2))
    net.eval()
    net.body.weight.grad = kept = torch.ones(5, 4)
    random.seed(3)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]  # noqa: NPY002
    (said,) = notices(net)
    assert ("three rows at least" in said) == fails
    assert net.calls == 2
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[2]) == states[1:]  # noqa: NPY002
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert net.body.weight.grad is kept
    assert [p.grad for p in net.parameters() if p is not net.body.weight] == [None] * (len(list(net.parameters())) - 1)
    assert not any(m.training for m in net.modules())


def test_the_notice_is_in_the_run(tmp_path):
    net = IDLE["unused"][0]()
    fedfm.federate(net, clients={"a": ROWS}, loss=cross_entropy, rounds=1, out=tmp_path / "run", run={"workers": 1})
    assert any("pooler.weight" in text for text in json.loads((tmp_path / "run/manifest.json").read_text())["notices"])
