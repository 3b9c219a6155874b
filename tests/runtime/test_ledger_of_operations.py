"""Accuracies before aggregation, and multiply-accumulates on the ledger, of whole runs."""

import numpy as np
import pytest

from fedfm.api import execute
from fedfm.errors import InputError
from small import experiment


def test_accuracy_before_aggregation_is_that_of_clients_alone(tmp_path):
    """After one round from the same start a client of fedavg has trained what the method local trains."""
    local = {"learning_rate": 0.2, "epochs": 3}
    fed = execute.run(
        experiment(tmp_path, method={"rounds": 1, "fraction": 1.0, "local": local}, run={"local_scores": True}),
        tmp_path / "fed",
    )
    tables = experiment(tmp_path, method={"rounds": 1, "local": local})
    tables["method"] = {"name": "local", "rounds": 1, "local": local}
    alone = execute.run(tables, tmp_path / "alone")
    split = execute.load_run(tmp_path / "fed").manifest["split"]["clients"]
    judged = [(split[c]["train"]["rows"], a) for c, a in alone["client_accuracy"].items() if a is not None]
    n, accuracy = np.array(judged).T
    expected = float((n * accuracy).sum() / n.sum())
    assert fed["details"]["accuracy_before_aggregation"] == pytest.approx(expected)
    lines = execute.load_run(tmp_path / "fed").metrics()
    assert "accuracy_before_aggregation" not in lines[0]
    assert lines[1]["accuracy_before_aggregation"] == pytest.approx(expected)
    by_client = {c: a for c, a in alone["client_accuracy"].items() if a is not None}
    assert lines[1]["client_accuracy_before_aggregation"] == pytest.approx(by_client)
    method = {"rounds": 1, "fraction": 1.0, "local": local, "weighting": "uniform"}  # a plain mean, as local's
    even = execute.run(experiment(tmp_path, method=method, run={"local_scores": True}), tmp_path / "even")
    loss = alone["local_loss"]
    assert even["details"]["loss_before_aggregation"] == pytest.approx(loss)
    assert 0 < loss < 3


@pytest.mark.parametrize("name", ["scaffold", "fedadam", "fedprox"])
def test_counting_operations_is_off_by_default_and_changes_no_result(tmp_path, name):
    method = {"name": name, "rounds": 2, "local": {"learning_rate": 0.2}}
    off = execute.run(experiment(tmp_path, method=method), tmp_path / "off")
    on = execute.run(experiment(tmp_path, method=method, run={"local_scores": True, "workers": 2}), tmp_path / "on")
    assert on["params_sha256"] == off["params_sha256"]
    assert 0 < on["details"]["accuracy_before_aggregation"] <= 1
    assert "accuracy_before_aggregation" not in off["details"]


def test_counting_operations_is_refused_under_privacy(tmp_path):
    privacy = {"target_epsilon": 8.0, "delta": 1e-5, "unit": "record"}
    tables = experiment(tmp_path, method={"name": "fedpft", "rounds": 1}, run={"local_scores": True})
    del tables["method"]["local"], tables["method"]["fraction"]
    with pytest.raises(InputError, match=r"run.local_scores: .* does not cover"):
        execute.run({**tables, "privacy": privacy})


def test_the_ledger_counts_by_hand(tmp_path):
    tables = experiment(tmp_path, run={"target_accuracy": 0.5}, method={"local": {"epochs": 3, "learning_rate": 0.2}})
    execute.run(tables, tmp_path / "run")
    run = execute.load_run(tmp_path / "run")
    found = run.manifest["ledger"]["operations"]
    n = float(np.median([c["train"]["rows"] for c in run.manifest["split"]["clients"].values()]))
    assert found["macs_per_sample"] == 8 * 4
    assert found["macs_per_client_round"] == 3 * n * 32
    lines = run.metrics()
    rounds = next(line["round"] for line in lines if line["accuracy"] >= 0.5)
    assert found["rounds_to_target"] == rounds
    assert found["tmac"] == rounds * 3 * 3 * n * 32  # T E m n MACs: three of five clients a round
    assert found["macs"] == 4 * 3 * 3 * n * 32
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"was reached in round {rounds}" in page
    assert "32 multiply-accumulates in a sample's forward pass" in page


def test_fedala_pays_for_its_weights(tmp_path):
    """W takes nothing in a client's first round, 11 passes in its second (10 losses are compared), then one."""
    local = {"learning_rate": 0.2, "epochs": 2}
    method = {"name": "fedala", "rounds": 4, "fraction": 1.0, "share": 0.5, "threshold": 1e9, "local": local}
    execute.run(experiment(tmp_path, method=method), tmp_path / "run")
    run = execute.load_run(tmp_path / "run")
    n = np.array([c["train"]["rows"] for c in run.manifest["split"]["clients"].values()])
    share = (n // 2).sum() / n.sum()  # of all clients' rows: updates are weighted by n_k
    found = run.manifest["ledger"]["operations"]
    assert [line.get("passes_beside") for line in run.metrics()] == [
        None,
        0,
        *(pytest.approx(p * share) for p in (11, 1, 1)),
    ]
    macs = len(n) * np.median(n) * 32 * (4 * 2 + 13 * share)
    assert found["macs"] == pytest.approx(macs)
    assert found["macs_per_client_round"] == pytest.approx(macs / (4 * len(n)))


def test_a_target_that_is_not_reached_and_methods_without_an_optimiser(tmp_path):
    execute.run(experiment(tmp_path, run={"target_accuracy": 1.0}, method={"rounds": 1}), tmp_path / "run")
    found = execute.load_run(tmp_path / "run").manifest["ledger"]["operations"]
    assert found["rounds_to_target"] is None
    assert found["tmac"] is None
    assert "was not reached" in (tmp_path / "run" / "report.html").read_text()
    tables = experiment(tmp_path)
    tables["method"] = {"name": "fedncm"}
    execute.run(tables, tmp_path / "ncm")
    assert "operations" not in execute.load_run(tmp_path / "ncm").manifest["ledger"]
    with pytest.raises(InputError, match=r"run.target_accuracy = 1.5: expected a number in \(0, 1\]"):
        execute.run(experiment(tmp_path, run={"target_accuracy": 1.5}))


def test_blocks_of_running_text_are_samples(tmp_path):
    text = tmp_path / "play.txt"
    text.write_text("to be or not to be, that is the question\n" * 200)
    tables = experiment(
        tmp_path,
        data={"path": str(text), "partition": {"name": "iid", "clients": 2}},
        model={"name": "nano-gpt2", "weights": "random", "max_length": 32, "adaptation": {"name": "full"}},
        method={"rounds": 1, "fraction": 1.0, "local": {"learning_rate": 0.1}},
    )
    execute.run(tables, tmp_path / "run")
    found = execute.load_run(tmp_path / "run").manifest["ledger"]["operations"]
    n, d = 32, 64
    assert found["macs_per_sample"] == 2 * (n * 12 * d * d + 2 * n * n * d) + n * d * 257
    assert found["samples"] == pytest.approx(0.4 * 41 * 200 / 32, rel=0.25)  # bytes of half the training text


def test_running_text_is_counted_alike_by_check_and_run(tmp_path):
    """Blocks are what clients sample: pieces of the file, by which DP-SGD was accounted, give another epsilon."""
    from fedfm.config.experiment import Experiment
    from fedfm.runtime.disclosure import rows_of
    from fedfm.runtime.population import populate

    text = tmp_path / "play.txt"
    text.write_text("to be or not to be, that is the question\n" * 200)
    tables = experiment(
        tmp_path,
        data={"path": str(text), "partition": {"name": "iid", "clients": 2}, "val_fraction": 0.3},
        model={"name": "nano-gpt2", "weights": "random", "max_length": 32, "adaptation": {"name": "lora", "rank": 1}},
        method={"rounds": 0, "fraction": 1.0},
    )
    execute.run(tables, tmp_path / "run")
    run, population = execute.load_run(tmp_path / "run"), populate(Experiment.from_dict(tables))
    data = {client: population.data(client) for client in population.clients}
    blocks = {client: (len(d.train), len(d.val), len(d.test)) for client, d in data.items()}
    pieces = [len(rows.train) for rows in population.federated.clients.values()]
    assert all(train > 10 * p for (train, _, _), p in zip(blocks.values(), pieces, strict=True))
    assert population.counts() == blocks  # what check says
    assert rows_of(run) == list(population.sizes().values()) == [train for train, _, _ in blocks.values()]
    split = run.manifest["split"]
    assert split["test"]["rows"] == len(population.test)
    assert [tuple(c[part]["rows"] for part in ("train", "val", "test")) for c in split["clients"].values()] == [
        *blocks.values()
    ]


def test_a_client_that_trains_two_models_costs_twice_as_much(tmp_path):
    macs = {}
    for name in ("sgd", "ditto"):
        local = {"name": name, "epochs": 2, "learning_rate": 0.2}
        execute.run(experiment(tmp_path, method={"rounds": 1, "local": local}), tmp_path / name)
        macs[name] = execute.load_run(tmp_path / name).manifest["ledger"]["operations"]["macs_per_client_round"]
    assert macs["ditto"] == 2 * macs["sgd"] > 0
