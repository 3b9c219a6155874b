"""A client that answers a request for scores with invalid ones counts as without scores, and the run continues."""

import math
from types import SimpleNamespace

import pytest

import fedfm
import small
from fedfm.config.experiment import Experiment
from fedfm.core.federation import Federation
from fedfm.engines.local.engine import LocalLink
from fedfm.runtime import async_scores, evaluation
from fedfm.runtime.client import Silos
from fedfm.runtime.evaluation import Evaluator
from fedfm.runtime.population import populate
from fedfm.runtime.progress import Progress

LIES = {
    "a word": {"n": 12, "accuracy": "high", "loss": 0.1},
    "a truth": {"n": 12, "accuracy": True, "loss": 0.1},
    "no number of rows": {"accuracy": 1.0, "loss": 0.1},
    "less than no rows": {"n": -12, "accuracy": 1.0, "loss": 0.1},
    "no number": {"n": 12, "accuracy": 1.0, "loss": math.nan},
    "a list": {"n": 12, "accuracy": [1.0], "loss": 0.1},
    "more than all": {"n": 12, "accuracy": 1.5, "loss": 0.1},
    "less than none": {"n": 12, "accuracy": -1e300, "loss": 0.1},
    "rows without end": {"n": 1e300, "accuracy": 1.0, "loss": 0.1},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_client_with_invalid_scores_counts_as_without_scores(tmp_path, monkeypatch, lie):
    tables = small.experiment(tmp_path, method={"rounds": 2})
    tables["data"]["val_fraction"] = 0.2
    honest = fedfm.run(tables, tmp_path / "honest", progress=Progress())
    split = fedfm.load_run(tmp_path / "honest").manifest["split"]["clients"]
    sizes = {client: counts["test"]["rows"] for client, counts in split.items()}
    liar = next(c for c, n in sizes.items() if list(sizes.values()).count(n) == 1)
    told = evaluation.scores
    monkeypatch.setattr(evaluation, "scores", lambda *at: LIES[lie] if len(at[-1]) == sizes[liar] else told(*at))
    found = fedfm.run(tables, tmp_path / "lied", progress=Progress())
    assert found["params_sha256"] == honest["params_sha256"]
    assert honest["excluded"] == []
    assert {(e["client"], e["part"]) for e in found["excluded"]} == {(liar, "scores")}
    assert found["client_accuracy"] == honest["client_accuracy"] | {liar: None}
    known = [value for value in found["client_accuracy"].values() if value is not None]
    assert found["local_accuracy"] == pytest.approx(sum(known) / len(known))


def test_a_client_that_cannot_score_still_trains_and_is_named(tmp_path, monkeypatch):
    """Between asynchronous rounds of a deployment scores come with updates, which have no room for a reason."""
    found = Experiment.from_dict(
        small.experiment(tmp_path, method={"fraction": 1.0}, run={"asynchronous": {"buffer": 2}})
    )
    population, tracebacks = populate(found), {}
    monkeypatch.setattr(async_scores, "of_sent", lambda *at: 1 / 0)
    parts = {"memory": tmp_path, "scores_sent": 1, "on_error": tracebacks.__setitem__}
    silos = Silos(found.method, found.aggregation, population, **parts)
    fed = Federation(LocalLink(silos, workers=1), model=population.model, aggregator=found.aggregation)
    fed.begin(1)
    fed.mean(found.method.train, w=fed.initial)
    evaluator = Evaluator(SimpleNamespace(experiment=found), fed, None)
    evaluator._newest = async_scores.Newest(fed, 1, 2)  # as on a link that streams
    evaluator.hear()
    assert len(fed.cohort) == 2
    assert [(e.round, e.client, e.code, e.part) for e in evaluator.missing] == [
        (1, client, "E_EXCEPTION", "scores") for client in fed.cohort
    ]
    assert all("ZeroDivisionError" in tracebacks[client] for client in fed.cohort)
    assert fed.excluded == []


@pytest.mark.parametrize("told", [{"n": 12.0, "accuracy": 1e300}, {"n": -1.0, "accuracy": 1.0}, {"accuracy": 1.0}])
def test_scores_that_come_with_an_update_are_checked_as_well(tmp_path, told):
    found = Experiment.from_dict(small.experiment(tmp_path))
    model = populate(found).model
    fed = SimpleNamespace(model=model, memory={}, clients=("a", "b"), began={"a": 1, "b": 1}, round=1)
    right = {f"sent/test/{key}": value for key, value in {"n": 12.0, "accuracy": 0.5, "loss": 1.0}.items()}
    fed.client_metrics = {"a": {f"sent/test/{key}": value for key, value in told.items()}, "b": right}
    newest = async_scores.Newest(fed, 1, 2)
    assert newest.hear() == ["a"]
    assert newest.of("test") == {"a": {}, "b": {"n": 12.0, "accuracy": 0.5, "loss": 1.0}}
