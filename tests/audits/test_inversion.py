"""Feature inversion as FedPFT's Figure 7 measures it: all images, those the attacker trusts, and the best."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.audits import inversion
from fedfm.audits.inference import similarity
from fedfm.audits.inference.inverter import Inverters, train
from fedfm.audits.inversion import CLEAR, ClassImages, Compared


def images(rng, n):
    return rng.random((n, 32, 32, 3)).astype(np.float32)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4))
@settings(deadline=None, max_examples=20)
def test_images_are_compared_with_each_true_one_of_their_cell(seed, k, t):
    rng = np.random.default_rng(seed)
    cells = [(images(rng, k), rng.random(k), images(rng, t)) for _ in range(2)]
    found = Compared.of(cells)
    best, score = [], []
    for some, _, true in cells:
        each = [[float(similarity.ssim(a, b)) for a in some] for b in true]
        best += [max(row) for row in each]
        score += [max(row[i] for row in each) for i in range(k)]
    np.testing.assert_allclose(found.best[:, 0], best)
    np.testing.assert_allclose(found.score[:, 0], score)
    figures = found.figures()
    assert figures["all"]["ssim"] == pytest.approx(np.mean(score))
    assert figures["oracle"]["ssim"] == pytest.approx(max(score))  # 1 % of a few images is one
    trusted = int(np.argmax(found.trust))
    assert figures["attacker"]["ssim"] == pytest.approx(score[trusted])
    assert (found.score[:, 1] <= CLEAR).all()


def test_raw_features_belong_to_one_image_each():
    rng = np.random.default_rng(0)
    true = images(rng, 5)
    right, wrong = (Compared.of([(some, np.ones(5), true)], paired=True) for some in (true, true[::-1]))
    assert right.best[:, 0] == pytest.approx(1.0)
    assert right.best[:, 1] == pytest.approx(CLEAR)
    assert wrong.best[2, 0] == pytest.approx(1.0)
    assert max(wrong.best[[0, 1, 3, 4], 0]) < 0.5


def test_one_in_a_hundred_is_a_share_of_the_images():
    rng = np.random.default_rng(1)
    score = np.stack([rng.random(400), rng.random(400)], 1)
    figures = Compared(score, score, -score[:, 0]).figures()
    assert figures["oracle"]["ssim"] == pytest.approx(np.sort(score[:, 0])[-4:].mean())
    assert figures["attacker"]["ssim"] == pytest.approx(np.sort(score[:, 0])[:4].mean())


def test_inverters_agree_where_they_say_the_same():
    rng = np.random.default_rng(2)
    same, other = images(rng, 2), images(rng, 1)[0]

    def inverter(last):
        return lambda features: np.stack([same[0], last])

    pictures, agreement = Inverters([inverter(same[1]), inverter(same[1]), inverter(other)])(np.zeros((2, 3)))
    np.testing.assert_allclose(pictures[0], same[0], atol=1e-6)
    np.testing.assert_allclose(pictures[1], (2 * same[1] + other) / 3, atol=1e-6)
    assert agreement[0] == pytest.approx(1.0)
    assert agreement[1] == pytest.approx((1 + 2 * float(similarity.ssim(same[1], other))) / 3)


def rate_of(computed, members, strangers):
    view = SimpleNamespace(rng=lambda *purpose: np.random.default_rng(0))
    cells = [ClassImages(None, np.arange(len(m)), m, s) for m, s in zip(members, strangers, strict=True)]
    return inversion._rows(view, cells, computed)


def test_images_that_show_rows_leak_and_those_that_show_the_class_do_not():
    rng = np.random.default_rng(3)
    members, strangers = ([images(rng, 20) for _ in range(3)] for _ in range(2))
    noisy = [np.clip(of + rng.normal(0, 0.05, of.shape), 0, 1).astype(np.float32) for of in members]
    shown = rate_of(noisy, members, strangers)
    assert (shown.verdict, shown.estimate) == ("leaks", 1.0)
    other = rate_of([images(rng, 20) for _ in range(3)], members, strangers)
    assert other.verdict != "leaks"
    assert other.low <= 0.01 <= other.high
    assert rate_of(noisy, members, [of[:2] for of in strangers]).verdict == "inconclusive"  # too few rows of nobody


@pytest.mark.proof
def test_a_linear_feature_of_an_image_is_inverted():
    """Images of one grey value each, whose feature is this value: inverters draw them, and noise on it is seen."""
    rng = np.random.default_rng(4)
    grey = rng.random(300)
    own = np.broadcast_to(grey[:, None, None, None], (300, 32, 32, 3)).astype(np.float32)
    inverters = Inverters([train(grey[:200, None], own[:200], seed, 100) for seed in (0, 1)])
    error = np.abs(inverters(grey[200:, None])[0] - own[200:]).mean()
    assert error < 0.05
    assert np.abs(inverters(rng.random((100, 1)))[0] - own[200:]).mean() > 4 * error
