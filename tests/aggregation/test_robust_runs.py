"""Robust rules in runs: the same bits on every link, metrics as under the mean, cohorts that are too small."""

import tomllib

import pytest

import fedfm
from fedfm.aggregation.krum import Krum
from fedfm.config.experiment import Experiment
from fedfm.errors import InputError, RunError
from fedfm.methods.fedavg import FedAvg
from fedfm.training import SGD
from small import experiment
from toy import federation
from toy import run as rounds

RULES = {
    "median": {},
    "trimmed_mean": {"trim": 0.3},
    "krum": {},
    "multi_krum": {"keep": 3},
    "norm_clipping": {"bound": 0.4},
    "geometric_median": {"iterations": 5},
}


def tables(folder, rule="median", method="fedavg", run=None, **keys):
    found = experiment(folder, method={"name": method, "fraction": 1.0}, run=run or {})
    return found | {"aggregation": {"name": rule, **keys}}


@pytest.mark.sample("trimmed_mean", "krum")
@pytest.mark.parametrize("rule", RULES)
def test_the_same_bits_whatever_runs_it_and_other_bits_than_the_mean(rule, tmp_path):
    links = ({"workers": 1}, {"workers": 3}, {"workers": 1, "wire": True})
    results = [
        fedfm.run(tables(tmp_path, rule, run=run, **RULES[rule]), tmp_path / str(i)) for i, run in enumerate(links)
    ]
    assert len({r["params_sha256"] for r in results}) == 1
    assert len({(r["bytes_up"], r["bytes_down"], r["accuracy"]) for r in results}) == 1
    mean = fedfm.run(tables(tmp_path, "mean"), tmp_path / "mean")
    assert mean["params_sha256"] != results[0]["params_sha256"]
    assert results[0]["accuracy"] > 0.5
    losses = [fedfm.load_run(tmp_path / r).metrics()[1]["train_loss"] for r in ("mean", "0")]
    assert losses[0] == losses[1]  # of the first round, which starts from the same weights


@pytest.mark.parametrize("method", ["scaffold", "fedadam", "fedavgm", "fedprox"])
def test_works_with_every_averaging_method(method, tmp_path):
    results = [fedfm.run(tables(tmp_path, rule, method), tmp_path / rule) for rule in ("mean", "median")]
    assert results[0]["params_sha256"] != results[1]["params_sha256"]


def test_the_default_is_the_mean(tmp_path):
    plain = experiment(tmp_path)
    results = [
        fedfm.run(plain | more, tmp_path / str(i)) for i, more in enumerate(({}, {"aggregation": {"name": "mean"}}))
    ]
    assert results[0]["params_sha256"] == results[1]["params_sha256"]


def test_an_aggregation_table_survives_toml(tmp_path):
    e = Experiment.from_dict(tables(tmp_path, "trimmed_mean", trim=0.2))
    assert "[aggregation]" in e.to_toml()
    assert Experiment.from_dict(tomllib.loads(e.to_toml())).to_dict() == e.to_dict()
    assert Experiment.from_dict(experiment(tmp_path)).to_dict()["aggregation"] == {"name": "mean"}


def test_krum_by_hand(tmp_path):
    """One step at rate 1 sends a - w. Of 1.0, 1.5, 2.5, 10, 11 the smallest sum of two squared distances is 1.5's."""
    rows = {"a": [1.0], "b": [1.5], "c": [2.5], "d": [10.0], "e": [11.0]}
    method = FedAvg(local=SGD(learning_rate=1.0))
    fed = federation(method, rows, tmp_path, w=0.0, aggregator=Krum(1), workers=1)
    assert float(rounds(method, fed, 1)[-1]["w"]) == 1.5


def test_too_few_updates_in_a_round_stop_the_run(tmp_path):
    rows = {name: [1.0] for name in "abcd"}
    method = FedAvg()
    fed = federation(method, rows, tmp_path, aggregator=Krum(1), workers=1)
    with pytest.raises(RunError, match=r"round 1: 4 updates arrived, but Krum\(byzantine=1\) needs 5"):
        rounds(method, fed, 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"aggregation": {"name": "krum", "byzantine": 2}}, "needs 7 updates per round, and a round asks 5 of 5"),
        ({"aggregation": {"name": "multi_krum", "keep": 5}}, "needs 6 updates"),
        ({"aggregation": {"name": "krum"}, "method": {"name": "fedavg", "fraction": 0.8}}, "asks 4 of 5 clients"),
        ({"aggregation": {"name": "medain"}}, 'did you mean "median"'),
        ({"aggregation": {"trim": 0.2}}, "aggregation.trim: unknown key"),
        ({"aggregation": {"name": "trimmed_mean", "trim": 0.5}}, r"expected a number in \(0, 0.5\)"),
        ({"aggregation": {"name": "krum", "byzantine": 0}}, "at least 1"),
        ({"aggregation": {"name": "multi_krum", "keep": -1}}, "aggregation.keep = -1"),
        ({"aggregation": {"name": "norm_clipping", "bound": 0.0}}, "aggregation.bound = 0.0"),
        ({"aggregation": {"name": "geometric_median", "epsilon": 0.0}}, "aggregation.epsilon"),
        ({"aggregation": {"name": "geometric_median", "iterations": 0}}, "aggregation.iterations"),
        ({"aggregation": "median"}, r"expected a table \[aggregation\]"),
        ({"aggregation": {"name": 3}}, "aggregation.name = 3: expected"),
        ({"aggregation": {"name": "median"}, "method": {"name": "local"}}, "takes no mean"),
        ({"aggregation": {"name": "median"}, "method": {"name": "fedpft"}}, "takes no mean"),
        (
            {
                "aggregation": {"name": "median"},
                "method": {"name": "fedpft", "pooled": True, "components": 1},
                "privacy": {"unit": "record", "target_epsilon": 1.0, "delta": 1e-5},
            },
            r"the accounting of \[privacy\] assumes the mean",
        ),
    ],
)
def test_invalid_rules_are_refused_before_anything_is_computed(tmp_path, change, said):
    base = experiment(tmp_path)
    base["method"] = {"name": "fedavg", "fraction": 1.0}
    with pytest.raises(InputError, match=said):
        fedfm.run(base | change, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_federate_takes_it_too(tmp_path):
    import torch
    from torch import nn

    x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
    parts = {name: list(zip(x[i::4], y[i::4], strict=True)) for i, name in enumerate("abcd")}
    results = []
    for rule in ("mean", {"name": "trimmed_mean", "trim": 0.3}):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        out = tmp_path / str(len(results))
        loss = nn.functional.cross_entropy
        results.append(fedfm.federate(model, clients=parts, loss=loss, rounds=1, aggregation=rule, out=out))
    assert results[0]["params_sha256"] != results[1]["params_sha256"]
