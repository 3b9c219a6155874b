"""A last batch of one row joins the batch before it where batch norm trains, and nowhere else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import fedfm
from fedfm import seeds
from fedfm.errors import InputError
from fedfm.training.local_job import mini_batches
from fedfm.training.optimisers import batches


@given(st.integers(0, 70), st.integers(1, 20), st.booleans())
def test_every_row_once_and_none_alone(n, size, joins):
    found = [index.tolist() for index in mini_batches(n, size, 1, 0, joins)]
    assert sorted(i for batch in found for i in batch) == list(range(n))
    assert len(found) == batches(n, size, joins)
    if joins and n > 1 and size > 1:
        assert min(map(len, found)) > 1
        assert max(map(len, found)) <= size + 1
    if not joins or n % size != 1:
        plain = [index.tolist() for index in mini_batches(n, size, 1, 0)]
        assert found == plain


def rows(n, seed=0):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > 0).long())


def network(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), *([nn.BatchNorm1d(6)] if norm else []), nn.Tanh(), nn.Linear(6, 2))


def federate(net, clients, out, **keys):
    return fedfm.federate(
        net, clients=clients, test=rows(12, 5), loss=cross_entropy, rounds=1, out=out, run={"workers": 1}, **keys
    )


@pytest.mark.parametrize("norm", [True, False])
def test_a_client_of_17_rows_takes_the_steps_of_a_loop_by_hand(norm, tmp_path):
    local = {"learning_rate": 0.3, "batch_size": 8}
    net, mine, data = network(norm), network(norm), rows(17)
    assert not federate(net, {"a": data}, tmp_path / "run", local=local)["excluded"]
    order = seeds.generator(seeds.derive(0, "client", 1, "a"), "batches").permutation(17)
    optimiser = torch.optim.SGD(mine.parameters(), lr=0.3)
    for index in (order[:8], order[8:]) if norm else (order[:8], order[8:16], order[16:]):
        optimiser.zero_grad()
        x, y = data[torch.from_numpy(index)]
        cross_entropy(mine(x), y).backward()
        optimiser.step()
    for name, value in mine.state_dict().items():
        if value.is_floating_point():
            assert torch.allclose(net.state_dict()[name], value, atol=1e-6), name


def test_scaffold_divides_by_the_steps_that_were_taken(tmp_path):
    """With one client and option II the control variate is the mean gradient: c = (x - y) / (steps eta)."""
    net, data, eta = network(True), rows(17), 0.05
    start = {name: value.clone() for name, value in net.state_dict().items()}
    local = {"learning_rate": eta, "batch_size": 8}
    result = federate(net, {"a": data}, tmp_path / "run", method="scaffold", local=local)
    run = fedfm.load_run(result["run"])
    state = run.state(run.experiment.method.state_type)
    moved = start["0.weight"] - net.state_dict()["0.weight"]
    assert torch.allclose(state.c["0.weight"], moved / (2 * eta), atol=1e-5)


class TestWhatCannotBeJoined:
    @pytest.mark.parametrize(("n", "local"), [(1, {}), (6, {"batch_size": 1})])
    def test_a_batch_of_one_row_is_refused_before_the_first_round(self, n, local, tmp_path):
        what = "b has one training row" if n == 1 else r"method\.local\.batch_size = 1"
        net = network(True)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        with pytest.raises(InputError, match=what):
            federate(net, {"a": rows(6), "b": rows(n, 1)}, tmp_path / "run", local=local)
        assert not (tmp_path / "run").exists()
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())

    def test_one_row_with_a_variance_of_its_own_trains(self, tmp_path):
        """Batch norm over places has many values of one picture."""
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.LazyLinear(2))
        net(torch.zeros(2, 1, 6, 6))
        x = torch.from_numpy(np.random.default_rng(0).normal(size=(7, 1, 6, 6)).astype(np.float32))
        y = torch.tensor([0, 1, 0, 1, 0, 1, 0])
        clients = {"a": TensorDataset(x[:6], y[:6]), "b": TensorDataset(x[6:], y[6:])}
        found = fedfm.federate(
            net, clients=clients, loss=cross_entropy, rounds=1, out=tmp_path / "run", run={"workers": 1}
        )
        assert not found["excluded"]
