"""GH-OFL's closed heads: sums of any partition give scikit-learn's Gaussian classifiers of the pooled rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax
from scipy.stats import multivariate_normal
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.naive_bayes import GaussianNB

import fedfm
from fedfm.errors import RunError
from fedfm.linalg.params import Params
from fedfm.methods.ghofl import gaussians, linear_head, moments_of, quadratic_head, quadratic_logits, shrink
from fedfm.runtime.run_directory import Run

C, D = 3, 5
RNG = np.random.default_rng(3)
Y = RNG.integers(0, C, 150)
X = (RNG.standard_normal((150, D)) @ RNG.standard_normal((D, D)) + 2 * np.eye(C, D)[Y]).astype(np.float32)


def logits(owners, form, shrinkage=0.0):
    """The head's logits of X, of rows that clients share."""
    parts = [moments_of(torch.from_numpy(X[owners == k]), torch.from_numpy(Y[owners == k]), C, form) for k in range(4)]
    found = gaussians(sum(parts[1:], parts[0]), form, shrinkage)
    if form == "lda":
        w, b = linear_head(found["mean"], found["covariance"], found["log_prior"])
        return torch.from_numpy(X).double() @ w.T + b
    head = quadratic_head(found["mean"], found["covariance"], found["log_prior"])
    return quadratic_logits(head, torch.from_numpy(X))


def reference(form):
    """Log-posteriors by SciPy's densities, from NumPy's covariances of the pooled rows."""
    x = X.astype(np.float64)
    of = [x[c == Y] for c in range(C)]
    pooled = sum((len(z) - 1) * np.cov(z.T) for z in of) / (len(x) - C)
    covariance = {"lda": lambda z: pooled, "nb": lambda z: np.diag(z.var(0)), "qda": lambda z: np.cov(z.T)}[form]
    joint = [multivariate_normal(z.mean(0), covariance(z)).logpdf(x) + np.log(len(z) / len(x)) for z in of]
    return log_softmax(np.stack(joint, 1), axis=1)


@given(st.integers(0, 2**32 - 1), st.sampled_from(["lda", "nb", "qda"]))
@settings(max_examples=15, deadline=None)
def test_every_partition_gives_the_pooled_classifier(seed, form):
    owners = np.random.default_rng(seed).integers(0, 4, len(X))
    found = torch.log_softmax(logits(owners, form), 1).numpy()
    np.testing.assert_allclose(found, reference(form), rtol=1e-4, atol=1e-4)


def test_shrinkage_is_that_of_scikit_learn():
    from sklearn.covariance import shrunk_covariance

    covariance = np.cov(X.T.astype(np.float64))
    right = shrunk_covariance(covariance, 0.3)
    np.testing.assert_allclose(shrink(torch.from_numpy(covariance), 0.3).numpy(), right, atol=2e-6)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("ghofl")
    split = np.where(np.arange(150) < 110, "train", "test")
    np.savez(place / "rows.npz", x=X, y=Y, split=split, classes=np.array(["a", "b", "c", "nobody"]))
    return place


def tables(place, **method):
    return {
        "data": {"path": str(place / "rows.npz"), "partition": {"name": "dirichlet", "alpha": 0.2, "clients": 4}},
        "model": {"name": "features"},
        "method": {"name": "ghofl"} | method,
        "run": {"workers": 1, "seed": 1},
    }


@pytest.mark.parametrize(
    ("form", "reference"),
    [
        ("lda", LinearDiscriminantAnalysis(solver="lsqr")),
        ("nb", GaussianNB(var_smoothing=0.0)),
        ("qda", QuadraticDiscriminantAnalysis()),
    ],
)
def test_a_run_predicts_as_the_pooled_classifier(place, form, reference, tmp_path):
    result = fedfm.run(tables(place, form=form, shrinkage=0.0), tmp_path)
    reference.fit(X[:110].astype(np.float64), Y[:110])
    right = reference.predict(X.astype(np.float64))
    assert result["accuracy"] == (right == Y)[110:].mean()
    assert list(fedfm.predict(tmp_path, place / "rows.npz")["predictions"]) == ["abc"[c] for c in right]


def test_hidden_sums_give_the_same_head(place, tmp_path):
    found = {}
    for name, privacy in {"clear": {}, "hidden": {"privacy": {"aggregator": "secagg"}}}.items():
        fedfm.run(tables(place) | privacy, tmp_path / name)
        found[name] = Run.open(tmp_path / name).state(Params)["head.weight"].numpy()
    np.testing.assert_allclose(found["hidden"], found["clear"], atol=1e-3)


def test_only_the_linear_head_is_a_model_for_an_export(place, tmp_path):
    from fedfm.api.predict import export
    from fedfm.errors import InputError

    fedfm.run(tables(place), tmp_path / "lda")
    export(tmp_path / "lda", "torch", tmp_path / "out")
    fedfm.run(tables(place, form="nb"), tmp_path / "nb")
    with pytest.raises((InputError, RunError)):
        export(tmp_path / "nb", "torch", tmp_path / "none")


@pytest.mark.parametrize("form", ["lda", "nb", "qda"])
def test_sums_covered_by_noise_give_a_head_of_finite_numbers(place, form, tmp_path):
    """Noise makes counts negative and covariances indefinite."""
    noise = {"unit": "client", "noise_multiplier": 2.0, "clip_norm": 10.0, "delta": 1e-5}
    result = fedfm.run(tables(place, form=form) | {"privacy": noise}, tmp_path)
    assert 0 <= result["accuracy"] <= 1
    assert Run.open(tmp_path).state(Params).is_finite()


@pytest.mark.parametrize("form", ["lda", "nb", "qda"])
def test_noise_that_leaves_no_class_any_rows_gives_equal_priors(form):
    sums = moments_of(torch.as_tensor(X), torch.as_tensor(Y), 4, form)
    found = gaussians(sums.replace({"count": -sums["count"]}), form, 0.1)
    assert torch.equal(found["log_prior"], torch.zeros(4, dtype=torch.float64))
    assert found["mean"].isfinite().all()
    assert found["covariance"].isfinite().all()
