"""The mathematics of the audits of double-blind runs, each against a case whose answer is known."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.encrypted.audits import (
    inference_alignment,
    inference_loss_oracle,
    inference_second_polynomials,
    inference_substitute,
)


def residual_stream(n=12, levels=4, tokens=3, dim=16, seed=0):
    """States that change little from block to block."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, tokens, dim))
    return np.stack([x := x + 0.3 * rng.normal(size=x.shape) for _ in range(levels)], axis=1)


def test_the_orders_of_a_residual_stream_are_found():
    mixed, orders = inference_alignment.shuffle(residual_stream(), 1)
    assert inference_alignment.aligned_shares(mixed, orders) == [1.0, 1.0, 1.0]
    assert len({tuple(order) for order in orders}) == 4  # they were different


def test_states_without_likeness_keep_their_order():
    rng = np.random.default_rng(2)
    mixed, orders = inference_alignment.shuffle(rng.normal(size=(40, 3, 2, 8)), 3)
    assert max(inference_alignment.aligned_shares(mixed, orders)) < 0.3  # chance is 1 in 40


def test_one_sample_has_no_order():
    with pytest.raises(ValueError, match="n >= 2"):
        inference_alignment.align(np.zeros((1, 2)), np.zeros((1, 2)))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.integers(1, 20), st.integers(0, 10**6))
def test_labels_are_read_from_losses(classes, count, seed):
    labels = np.random.default_rng(seed).integers(classes, size=count)
    asked = []

    def loss(chosen):
        assert chosen.shape == (count, classes)
        asked.append(chosen.max())
        return float(chosen[np.arange(count), labels].mean())

    found, queries = inference_loss_oracle.labels_by_loss(loss, count, classes)
    assert found.tolist() == labels.tolist()
    assert queries == len(asked)
    assert max(asked) < 2**20


def test_sixteen_labels_of_ten_classes_take_three_queries():
    labels = np.arange(16) % 10
    found, queries = inference_loss_oracle.labels_by_loss(lambda c: float(c[range(16), labels].mean()), 16, 10)
    assert (found == labels).all()
    assert queries == 3


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 10**6))
def test_weights_are_solved_exactly(n, m, seed):
    prime = 68_719_403_009  # of 36 bits
    rng = np.random.default_rng(seed)
    weights = rng.integers(-(2**24), 2**24, size=(m, n))
    inputs = rng.integers(prime, size=(n, 9))
    outputs = np.array([[sum(int(w) * int(c) for w, c in zip(row, col, strict=True)) % prime for col in inputs.T]
                        for row in weights])  # fmt: skip
    assert (inference_second_polynomials.weights_of(inputs, outputs, prime) == weights).all()


def test_a_singular_system_is_refused():
    with pytest.raises(ValueError, match="singular"):
        inference_second_polynomials.solve_modulo(np.ones((2, 2), int), np.ones((2, 1), int), 97)


def test_a_block_is_fitted_from_its_pairs_and_not_from_others():
    torch.manual_seed(0)
    true = inference_substitute.SurrogateBlock(8, 2, 16).eval()
    for p in true.parameters():
        p.data += 0.3 * torch.randn_like(p)
    x = torch.randn(300, 4, 8)
    with torch.no_grad():
        y = true(x)
    net = inference_substitute.fit_block(x[:250], y[:250], 2, 16, seed=0, steps=400)
    assert inference_substitute.update_error(net, x[250:], y[250:]) < 0.2
    blind = inference_substitute.fit_block(x[:250], x[:250] + torch.randn(250, 4, 8), 2, 16, seed=0, steps=50)
    assert inference_substitute.update_error(blind, x[250:], y[250:]) > 0.5


@pytest.mark.proof
def test_a_student_learns_from_released_means_and_the_same_seed_gives_the_same_bits():
    torch.manual_seed(1)
    true = inference_substitute.Student(4, 6, 2, 8, 2, 16).eval()
    x = torch.randn(300, 4, 6)

    class Mean(torch.nn.Module):
        def forward(self, states):
            return states.mean(2, keepdim=True)

    read = Mean()
    with torch.no_grad():
        released = read(true(x))
    fits = [
        inference_substitute.fit_student(x[:250], released[:250], read, heads=2, hidden=16, dim=8, seed=0, steps=n)
        for n in (250, 250, 1)
    ]
    with torch.no_grad():
        said = [read(net(x[250:]))[:, -1, 0] for net in fits]
    true_features = released[250:, -1, 0]
    assert torch.equal(said[0], said[1])
    assert (
        inference_substitute.likeness(true_features, said[0])
        > inference_substitute.likeness(true_features, said[2]) + 0.2
    )
    labels = (released[:, -1, 0, 0] > released[:, -1, 0, 0].median()).long()
    fit = (released[:250, -1, 0], labels[:250])
    assert inference_substitute.agreement(fit, true_features, true_features, 2) == 1.0
    assert inference_substitute.agreement(fit, true_features, said[0], 2) > 0.7
