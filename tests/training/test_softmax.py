"""Softmax regression on blocks of rows: one head for any blocks, also with absent classes."""

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from fedfm.core.fields import check
from fedfm.errors import InputError
from fedfm.linalg.threads import one_thread
from fedfm.training import fit_head, newton
from fedfm.training.fit_head import NOBODY, HeadSpec, fit, fit_rows


def rows(n=300, d=6, c=4, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, c, n)
    x = rng.normal(size=(n, d)) * (1 + np.arange(d)) + y[:, None] * rng.normal(size=d)
    return torch.from_numpy(x).float(), torch.from_numpy(y)


def test_blocks_make_no_difference():
    x, y = rows()
    w, b = fit(lambda: zip(x.split(37), y.split(37), strict=True), 4, 6)
    one_w, one_b = fit_rows(x, y, 4)
    assert torch.allclose(w, one_w, rtol=1e-6, atol=1e-7)
    assert torch.allclose(b, one_b, rtol=1e-6, atol=1e-7)


def test_rows_beyond_what_is_held_are_read_again_at_every_pass(monkeypatch):
    x, y = rows()
    w, b = fit_rows(x, y, 4)
    passes = []

    def blocks():
        passes.append(1)
        yield from zip(x.split(37), y.split(37), strict=True)

    for module, name, value in ((fit_head, "_HELD", 100), (fit_head, "_PIECE", 50), (newton, "_KEPT", 100)):
        monkeypatch.setattr(module, name, value)
    again_w, again_b = fit(blocks, 4, 6)
    assert len(passes) > 10
    assert torch.allclose(again_w, w, rtol=1e-6, atol=1e-7)
    assert torch.allclose(again_b, b, rtol=1e-6, atol=1e-7)
    monkeypatch.setattr(newton._Search, "_conjugate_gradients", lambda *_: (None, False))  # H itself, from pieces
    factorised, _ = fit(blocks, 4, 6)
    assert torch.allclose(factorised, w, rtol=1e-6, atol=1e-7)


def test_a_class_that_nobody_has_is_never_predicted():
    x, y = rows(c=3)
    w, b = fit_rows(x, y, 5)
    assert b[3:].tolist() == [NOBODY, NOBODY]
    assert int((x @ w.T + b).argmax(1).max()) < 3
    assert (w[3:] == 0).all()


def test_classes_that_nobody_has_cost_nothing_and_change_no_bit():
    x, y = rows(c=3)
    w, b = fit_rows(x, y, 3)
    places = torch.tensor([1, 4, 6])
    wide_w, wide_b = fit_rows(x, places[y], 8)
    assert torch.equal(wide_w[places], w)
    assert torch.equal(wide_b[places], b)


def test_blas_stays_on_one_thread_and_gets_its_threads_back():
    one_thread()  # loads SciPy's own library, which has to be limited too

    def threads():
        return {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}

    with threadpool_limits(2, user_api="blas"):
        with one_thread():
            assert threads() == {1}
        assert threads() == {2}


def test_separable_rows_one_class_and_constant_features_are_no_trouble():
    x = torch.tensor([[0.0, 1.0], [0.0, 1.0], [5.0, 1.0], [6.0, 1.0]])
    w, b = fit_rows(x, torch.tensor([0, 0, 1, 1]), 2)
    assert torch.isfinite(w).all()
    assert (x @ w.T + b).argmax(1).tolist() == [0, 0, 1, 1]
    w, b = fit_rows(x, torch.tensor([1, 1, 1, 1]), 2)
    assert (x @ w.T + b).argmax(1).tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="without rows"):
        fit(lambda: [], 2, 2)


def test_adam_goes_down_from_zero():
    x, y = rows()
    w, b = fit_rows(x, y, 4, HeadSpec(optimizer="adam", learning_rate=0.01, epochs=30))
    loss = torch.nn.functional.cross_entropy(x @ w.T + b, y)
    assert float(loss) < 0.8 * np.log(4)
    by_class = [(x[y == c], y[y == c]) for c in range(4)]  # as a server draws them
    w, b = fit(lambda: by_class, 4, 6, HeadSpec(optimizer="adam", learning_rate=0.01, epochs=30))
    assert float(torch.nn.functional.cross_entropy(x @ w.T + b, y)) < 0.8 * np.log(4)


@pytest.mark.parametrize("wrong", [{"optimizer": "sgd"}, {"l2": -1.0}, {"epochs": 0}, {"iterations": 0}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InputError, match=f"method.head.{next(iter(wrong))}"):
        check(HeadSpec(**wrong), "method.head")
