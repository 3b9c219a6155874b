"""The attacks' mathematics, against SciPy, PyTorch's gradients and known answers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import norm

from fedfm.audits.inference import rates
from fedfm.audits.inference.head_updates import class_means, distance, features, guesses, label_shares, traces
from fedfm.audits.inference.one_run import epsilon_bound
from fedfm.audits.inference.shadow_ratio import confidence, log_ratio


def test_confidence_is_the_log_odds_of_the_label():
    x, y = torch.randn(50, 7, dtype=torch.float64) * 5, torch.arange(50) % 7
    p = torch.softmax(x, 1)[torch.arange(50), y]
    assert confidence(x.numpy(), y.numpy()) == pytest.approx(torch.log(p / (1 - p)).numpy(), rel=1e-9, abs=1e-9)
    assert np.isfinite(confidence(np.array([[1e4, 0.0], [0.0, 1e4]]), np.array([0, 0]))).all()


def shadows(rng, n, number, shift):
    """phi of n rows of unequal difficulty in shadows, higher by ``shift`` for those that had the row."""
    hard = rng.normal(size=n) * 3
    inside = rng.random((number, n)) < 0.5
    return hard, hard + shift * inside + rng.normal(size=(number, n)), inside


def test_the_ratio_separates_as_well_as_the_best_test_and_better_than_the_loss():
    rng = np.random.default_rng(0)
    hard, phi, inside = shadows(rng, 4000, 64, 2.0)
    target = hard + rng.normal(size=4000) + 2.0 * (np.arange(4000) < 2000)
    found = log_ratio(target, phi, inside)
    auc = rates.auc(found[:2000], found[2000:])
    assert auc == pytest.approx(norm.cdf(2.0 / np.sqrt(2)), abs=0.02)  # of two unit normals 2 apart
    assert auc > rates.auc(target[:2000], target[2000:]) + 0.15


def test_a_model_that_saw_none_of_the_rows_gives_one_half():
    rng = np.random.default_rng(1)
    hard, phi, inside = shadows(rng, 4000, 16, 2.0)
    found = log_ratio(hard + rng.normal(size=4000), phi, inside)
    assert rates.auc(found[:2000], found[2000:]) == pytest.approx(0.5, abs=4 / np.sqrt(12 * 2000))
    assert not log_ratio(hard, phi, np.zeros_like(inside)).any()  # no shadow had any row: nothing is known


def head_gradient(x, y, classes, bias=True):
    """(weight, bias) of one step of rate 1 down the mean cross-entropy, by autograd."""
    torch.manual_seed(0)
    head = torch.nn.Linear(x.shape[1], classes, bias=bias).double()
    F.cross_entropy(head(x), y).backward()
    return -head.weight.grad.numpy(), -head.bias.grad.numpy() if bias else None, head


def test_one_row_is_read_from_its_gradient_and_a_mean_of_rows_is_no_row():
    x = torch.randn(1, 12, dtype=torch.float64)
    classes, found = features(*head_gradient(x, torch.tensor([2]), 5)[:2])
    assert classes.tolist() == [0, 1, 2, 3, 4]
    assert found == pytest.approx(np.repeat(x.numpy(), 5, 0), rel=1e-9)
    many = torch.randn(20, 12, dtype=torch.float64)
    _, mixed = features(*head_gradient(many, torch.arange(20) % 5, 5)[:2])
    assert np.linalg.norm(mixed[:, None] - many.numpy()[None], axis=2).min() > 1
    assert len(features(np.zeros((3, 4)), np.zeros(3))[0]) == 0


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("features", ["of any sign", "at least 0"])
def test_label_shares_are_read_from_gradients(bias, features):
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(4, 6)) * 2
    own = np.arange(80) % 4

    def drawn(y):
        x = centres[y] + rng.normal(size=(len(y), 6))
        return torch.from_numpy(x if features == "of any sign" else np.abs(x))

    x = drawn(own)

    def traces_of(counts):
        y = np.repeat(np.arange(4), counts)
        weight, shift, head = head_gradient(drawn(y), torch.from_numpy(y), 4, bias)
        said = torch.softmax(head(x), 1).detach().numpy()
        return traces(weight, shift, class_means(x.numpy(), own, 4), own, said)

    tried = guesses(4, 60, 80, rng)
    assert (tried.sum(1) == 60).all()
    known = np.stack([traces_of(counts) for counts in tried])
    for counts in ([60, 0, 0, 0], [15, 15, 15, 15], [40, 10, 10, 0]):
        found = label_shares(known, tried / 60, traces_of(counts))
        assert found.sum() == pytest.approx(1)
        assert distance(found, np.array(counts) / 60) < 0.06


def test_coins_that_nobody_used_refute_no_epsilon():
    rng = np.random.default_rng(0)
    low = [epsilon_bound(rng.normal(size=300), 1e-5) for _ in range(60)]
    assert sum(x > 0 for x in low) <= 7  # 95 % confidence; 8 or more of 60 have chance 0.01
