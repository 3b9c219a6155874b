"""Audits of runs whose rounds ask a part of the clients: only rows that were trained on count as training rows."""

import json

import pytest

from fedfm.api import execute
from fedfm.audits.audit import perform
from fedfm.audits.label_counts import passes
from fedfm.audits.replay import population_of
from fedfm.audits.shadow_runs import affordable, cost, training_clients
from fedfm.runtime.run_directory import Run
from small import features


def finished(folder, clients, fraction):
    """A finished run of FedAvg on heads, 3 rounds."""
    features(folder, n=600, d=8)
    data = {"path": str(folder / "rows.npz"), "partition": {"name": "iid", "clients": clients}}
    method = {"name": "fedavg", "rounds": 3, "fraction": fraction, "local": {"learning_rate": 0.3}}
    given = {"data": data, "model": {"name": "features"}, "method": method, "run": {"workers": 1}}
    execute.run(given, folder / "run")
    return Run.open(folder / "run")


def cohorts(run):
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return [line["cohort"] for line in lines if line["round"]]


@pytest.mark.proof
def test_rows_of_clients_that_never_trained_are_no_training_rows(tmp_path):
    run = finished(tmp_path, 40, 0.1)
    asked, population = {c for cohort in cohorts(run) for c in cohort}, population_of(run)
    assert training_clients(run, population.clients) == asked
    assert len(asked) < 13
    rows = population.federated.clients
    found = {f.name: f for f in perform(run.path, ["model_membership", "update_membership", "head_rows"])}
    of = [c for c in asked if len(rows[c].train) and len(rows[c].test)]
    for name in ("model_membership", "update_membership"):
        assert found[name].detail["clients"] == len(of)
        assert found[name].detail["members"] == sum(len(rows[c].train) for c in of)
    assert found["head_rows"].detail["rows"] == sum(len(rows[c].train) for c in asked)


@pytest.mark.parametrize(("clients", "fraction"), [(40, 0.1), (8, 1.0)])
def test_the_estimate_counts_trainings_and_shadow_runs_need_everybody(tmp_path, clients, fraction):
    run = finished(tmp_path, clients, fraction)
    population, method = population_of(run), run.experiment.method
    sizes = population.sizes()
    asked = [c for cohort in cohorts(run) for c in cohort]
    steps = sum(method.local.steps(sizes[c], population.model) for c in asked)
    macs = run.manifest["ledger"]["operations"]["macs_per_client_round"]
    assert cost(run, population) == pytest.approx(len(asked) * macs / 5e9 + steps * 3e-4)
    assert (affordable(run, population) > 0) == (fraction == 1)
    assert passes(run, population)[2] == len(set(asked))


def test_a_damaged_log_excludes_nobody(tmp_path):
    run = finished(tmp_path, 40, 0.1)
    log = run.path / "metrics.jsonl"
    log.write_text("\n".join(log.read_text().splitlines()[:-1]) + "\n")
    clients = population_of(run).clients
    assert training_clients(run, clients) == set(clients)
