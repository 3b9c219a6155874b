"""The update rules against PyTorch's own optimisers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fedfm.training import SGD, Adam, AdamW, update_rules
from fedfm.training.update_rules import Rule


def torch_optimiser(local, p):
    options = {"lr": local.learning_rate, "weight_decay": local.weight_decay}
    match local:
        case SGD():
            return torch.optim.SGD([p], momentum=local.momentum, **options)
        case AdamW():
            return torch.optim.AdamW([p], betas=local.betas, eps=local.epsilon, **options)
        case _:
            return torch.optim.Adam([p], betas=local.betas, eps=local.epsilon, **options)


rates = st.floats(1e-4, 0.5)
decays = st.sampled_from([0.0, 1e-3, 0.3])
betas = st.sampled_from([(0.9, 0.999), (0.9, 0.98), (0.0, 0.5)])
locals_ = st.one_of(
    st.builds(SGD, learning_rate=rates, weight_decay=decays, momentum=st.sampled_from([0.0, 0.5, 0.99])),
    st.builds(Adam, learning_rate=rates, weight_decay=decays, betas=betas, epsilon=st.sampled_from([1e-8, 1e-6])),
    st.builds(AdamW, learning_rate=rates, weight_decay=decays, betas=betas, epsilon=st.sampled_from([1e-8, 1e-6])),
)


@settings(max_examples=80, deadline=None)
@given(local=locals_, steps=st.integers(1, 30), n=st.integers(1, 40), seed=st.integers(0, 10_000))
def test_a_rule_is_the_optimiser_of_that_name(local, steps, n, seed):
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(n, generator=generator, dtype=torch.float64)
    q = torch.nn.Parameter(p.clone())
    rule, optimiser = Rule(local, p), torch_optimiser(local, q)
    for _ in range(steps):
        g = torch.randn(n, generator=generator, dtype=torch.float64)
        q.grad = g.clone()
        optimiser.step()
        rule.step(p, g)
    torch.testing.assert_close(p, q.detach(), rtol=1e-5, atol=1e-9)


RULES = [SGD(), SGD(momentum=0.9, weight_decay=0.1), Adam(weight_decay=0.1), AdamW()]


@pytest.mark.parametrize("piece", [1 << 20, 64], ids=["whole", "in pieces"])
@pytest.mark.parametrize("decayed", [(), [slice(i, i + 1) for i in range(0, 50, 3)]], ids=["all", "some"])
@pytest.mark.parametrize("local", RULES, ids=repr)
def test_a_cohort_is_its_clients_side_by_side(local, decayed, piece, monkeypatch):
    """(K, P) gives each row the bits that it gets alone, also when later rows have stopped."""
    monkeypatch.setattr(update_rules, "PIECE", piece)
    torch.manual_seed(0)
    start, gradients = torch.randn(3, 50), torch.randn(4, 3, 50)
    active = [3, 3, 2, 1]
    p = start.clone()
    rule = Rule(local, p, decayed)
    for t, count in enumerate(active):
        rule.narrow(count)
        rule.step(p[:count], gradients[t, :count].clone())
    for k in range(3):
        alone = start[k].clone()
        rule = Rule(local, alone, decayed)
        for t, count in enumerate(active):
            if k < count:
                rule.step(alone, gradients[t, k].clone())
        assert torch.equal(p[k], alone)


class Allocations(TorchDispatchMode):
    """Notes the number of entries of each tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if out.untyped_storage().data_ptr() not in known:
            self.made.append(out.numel())
        return out


@pytest.mark.parametrize("entries", [1000, 4096, 50_000])
@pytest.mark.parametrize("local", [Adam(weight_decay=0.1), AdamW(weight_decay=0.1)], ids=["adam", "adamw"])
def test_a_step_of_adam_takes_one_piece_at_a_time(local, entries, monkeypatch):
    monkeypatch.setattr(update_rules, "PIECE", 4 * 4096)
    p = torch.randn(entries)
    rule = Rule(local, p)
    with Allocations() as found:
        rule.step(p, torch.ones_like(p))
    whole, *pieces = found.made  # the gradient is the first
    assert whole == entries
    assert len(pieces) == -(-entries // 4096)
    assert sum(pieces) == entries


def test_one_step_of_sgd_by_hand():
    p, rule = torch.tensor([1.0, -2.0]), Rule(SGD(learning_rate=0.5, weight_decay=0.1), torch.zeros(2))
    rule.step(p, torch.tensor([2.0, 4.0]))  # w - 0.5 (g + 0.1 w)
    torch.testing.assert_close(p, torch.tensor([-0.05, -3.9]))


def test_the_first_step_of_adam_is_the_learning_rate_whatever_the_gradient():
    p, rule = torch.zeros(3, dtype=torch.float64), Rule(Adam(learning_rate=0.25), torch.zeros(3, dtype=torch.float64))
    rule.step(p, torch.tensor([1e-3, -5.0, 1e6], dtype=torch.float64))
    torch.testing.assert_close(p, torch.tensor([-0.25, 0.25, -0.25], dtype=torch.float64), rtol=1e-4, atol=0)
