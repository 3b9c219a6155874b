"""An experiment accepts every change that one of its notices or errors advises."""

import copy

import pytest

import fedfm
from fedfm.api.studies import tune
from fedfm.config.advice import against_divergence, stays_valid
from fedfm.config.experiment import Experiment
from fedfm.config.toml import put
from fedfm.core.messages import Excluded
from fedfm.core.reasons import reasons
from fedfm.errors import E_NONFINITE, InputError
from fedfm.methods.fedpft.release_plan import too_noisy
from fedfm.runtime.after_run_checks import overfitting_notices

BASE = {
    "data": {"name": "digits", "partition": {"name": "iid", "clients": 8}},
    "model": {"name": "nano-vit", "adaptation": {"name": "head"}},
    "method": {"name": "fedavg", "rounds": 4},
}
CLIENT = {"unit": "client", "clip_norm": 1.0, "target_epsilon": 8.0, "delta": 1e-5}
RECORD = {"unit": "record", "target_epsilon": 8.0, "delta": 1e-5}
DP_SGD = RECORD | {"mechanism": "dp_sgd", "clip_norm": 1.0}


def tables(**changes):
    found = copy.deepcopy(BASE)
    for key, value in changes.items():
        put(found, key.replace("__", "."), value)
    return found


EXPERIMENTS = {
    "plain": tables(),
    "scaffold": tables(method__name="scaffold"),
    "secure": tables(aggregation={"name": "secure"}),
    "secagg": tables(privacy={"aggregator": "secagg"}),
    "asynchronous": tables(run={"asynchronous": {"buffer": 2}}),
    "patient": tables(data__val_fraction=0.1, run={"patience": 2}),
    "validated": tables(data__val_fraction=0.1),
    "not evaluated": tables(run={"evaluate_every": 0}),
    "dp_sgd": tables(privacy=DP_SGD),
    "gaussian": tables(privacy=CLIENT),
    "coins": tables(privacy=CLIENT, method__fraction=0.5),
    "distributed": tables(privacy=CLIENT | {"mechanism": "distributed_gaussian", "aggregator": "secagg"}),
    "correlated": tables(privacy=CLIENT | {"mechanism": "correlated_gaussian"}, method__fraction=0.5),
    "adaptive clip": tables(privacy=CLIENT | {"clip_quantile": 0.5}),
    "fedpft": tables(method={"name": "fedpft"}),
    "fedpft, private": tables(method={"name": "fedpft"}, privacy=RECORD),
    "fedpft, pooled": tables(method={"name": "fedpft", "pooled": True}, privacy=RECORD),
    "fedpft, paper": tables(method={"name": "fedpft", "calibration": "paper", "relation": "replace"}, privacy=RECORD),
    "fedpft, chain": tables(method={"name": "fedpft", "topology": "chain"}, privacy=RECORD),
}
VALUES = {
    "run.patience": 3,
    "data.val_fraction": 0.1,
    "method.local.learning_rate": 0.001,
    "method.local.max_grad_norm": 1.0,
    "method.fraction": 0.1,
    "pooled = true": {"method.pooled": True},
}
ROSE = [{"round": t, "loss": loss, "accuracy": a} for t, (loss, a) in enumerate([(2.0, 0.1), (0.5, 0.8), (0.7, 0.7)])]


def advice_for(e):
    """All advice that a run of this experiment may give."""
    yield from overfitting_notices(ROSE, e)
    yield reasons([Excluded(1, "a", E_NONFINITE, "NaN")], against_divergence(e))
    plan = getattr(e.method, "privacy", None)
    if plan is not None:
        yield too_noisy(plan, 192, 1, client_rows=1) if e.method.asks == ("release",) else ""
        yield "pooled = true" if e.method.could_pool else ""


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_accepts_the_changes_that_its_notices_advise(name):
    e = Experiment(**EXPERIMENTS[name])
    for text in advice_for(e):
        changes = {}
        for key, value in VALUES.items():
            if key in text:
                changes |= value if isinstance(value, dict) else {key: value}
        assert stays_valid(e, changes), (text, changes)


def test_only_runs_without_privacy_are_advised_to_stop_early():
    (plain,) = overfitting_notices(ROSE, Experiment(**EXPERIMENTS["plain"]))
    assert plain.endswith(
        "the model overfits; take fewer rounds, a smaller method.local.learning_rate or data.val_fraction with "
        "run.patience, which keeps the best round"
    )
    (validated,) = overfitting_notices(ROSE, Experiment(**EXPERIMENTS["validated"]))
    assert "run.patience, which keeps" in validated
    assert "val_fraction" not in validated
    (private,) = overfitting_notices(ROSE, Experiment(**EXPERIMENTS["dp_sgd"]))
    assert "patience" not in private
    assert "each run on the same rows spends its own epsilon" in private


@pytest.mark.parametrize(
    ("broken", "advised"),
    [
        (tables(privacy=CLIENT, run={"patience": 2}), None),
        (tables(privacy=CLIENT, run={"patience": 2, "evaluate_every": 0}), None),
        (tables(privacy=CLIENT | {"mechanism": "correlated_gaussian"}), {"method.fraction": 0.1}),
        (tables(method={"name": "ditto"}, privacy=CLIENT | {"mechanism": "correlated_gaussian"}), None),
        (tables(privacy=CLIENT | {"mechanism": "distributed_gaussian"}), {"privacy.aggregator": "secagg"}),
        (tables(privacy=RECORD | {"clip_norm": 1.0}), {"privacy.mechanism": "dp_sgd"}),
        (tables(method={"name": "fedncm"}, privacy=RECORD), None),
        (tables(privacy=CLIENT | {"clip_norm": None}), {"privacy.clip_norm": 1.0}),
        (tables(run={"patience": 2}), {"data.val_fraction": 0.1}),
    ],
)
def test_the_changes_that_an_error_advises_are_valid(broken, advised):
    with pytest.raises(InputError) as error:
        Experiment(**broken)
    named = [key for key in VALUES if key.startswith(("data.", "method.fraction")) and key in str(error.value)]
    assert set(named) <= set(advised or ()), error.value
    assert ("dp_sgd" in str(error.value)) == ("privacy.mechanism" in (advised or ()))
    for key, value in (advised or {}).items():
        assert key.split(".")[-1] in str(error.value)
        put(broken, key, value)
        Experiment(**broken)


def test_a_search_under_privacy_is_not_advised_to_split_rows_first():
    with pytest.raises(InputError, match="does not cover validation losses"):
        tune(Experiment(**EXPERIMENTS["gaussian"]), [0.1], None, fedfm.runtime.progress.Progress())
