"""Runs with very many clients: a share is evaluated, and the files follow the clients that take part."""

import json
from dataclasses import replace

import numpy as np
import pytest

import fedfm
from fedfm.core.crossing import Crossing
from fedfm.core.grouped_messages import group, ungroup
from fedfm.core.name_ranges import expand, shorten
from fedfm.core.transcript import MANY
from fedfm.data.partition import deal
from fedfm.data.spec import DataSpec, PartitionSpec
from fedfm.data.table import DealtRows, Table
from fedfm.errors import InputError
from fedfm.reports import html
from fedfm.reports.run_table import table
from fedfm.runtime import logs
from fedfm.runtime.partitioned import Partitioned
from small import experiment
from stopping import StopAfter


def rows(folder, clients):
    """Two training rows a client, and one test row for every second client."""
    rng = np.random.default_rng(0)
    n = clients * 5 // 2
    y = rng.integers(0, 3, n)
    split = np.where(np.arange(n) < 2 * clients, "train", "test")
    path = folder / f"{clients}.npz"
    np.savez(path, x=(rng.normal(size=(n, 4)) + 3 * np.eye(3, 4)[y]).astype(np.float32), y=y, split=split)
    return path


def many(folder, clients, *, asked=10, **run):
    """A run of two rounds that asks as many clients to train, and as many for scores."""
    return experiment(
        folder,
        data={"path": str(rows(folder, clients)), "partition": {"name": "iid", "clients": clients}},
        method={"name": "fedavg", "rounds": 2, "fraction": asked / clients, "local": {"learning_rate": 0.1}},
        run={"workers": 1, "evaluate_fraction": asked / clients} | run,
    )


def plain(page):
    """The text of a page, with ordinary spaces."""
    return " ".join(page.read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    return fedfm.run(many(folder, 2 * MANY), folder / "run"), folder / "run"


# --- the share of the clients that is evaluated -----------------------------------------------------------------------


def test_the_same_clients_are_evaluated_in_every_round_with_any_number_of_workers_and_after_a_resume(tmp_path):
    whole = fedfm.run(many(tmp_path, 60, asked=6), tmp_path / "whole")
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    drawn = [sorted(line["client_accuracy"]) for line in lines]
    assert drawn == 3 * [sorted(whole["client_accuracy"])]
    assert len(drawn[0]) == 6

    with pytest.raises(KeyboardInterrupt):
        fedfm.run(many(tmp_path, 60, asked=6), tmp_path / "stopped", progress=StopAfter(1))
    for other in (
        fedfm.resume(tmp_path / "stopped"),
        fedfm.run(many(tmp_path, 60, asked=6, workers=2), tmp_path / "workers"),
        fedfm.run(many(tmp_path, 60, asked=6, wire=True), tmp_path / "wire"),
    ):
        assert other["client_accuracy"] == whole["client_accuracy"]
        assert other["params_sha256"] == whole["params_sha256"]


def test_another_seed_evaluates_other_clients_and_a_share_does_not_change_the_model(tmp_path):
    some = fedfm.run(many(tmp_path, 60, asked=6), tmp_path / "some")
    other = fedfm.run(many(tmp_path, 60, asked=6, seed=2), tmp_path / "other")
    every = fedfm.run(many(tmp_path, 60, asked=6, evaluate_fraction=1.0), tmp_path / "every")
    assert some["client_accuracy"].keys() != other["client_accuracy"].keys()
    assert some["params_sha256"] == every["params_sha256"]
    assert some["accuracy"] == every["accuracy"]  # on the global test rows
    assert some["client_accuracy"].items() <= every["client_accuracy"].items()
    assert "evaluated" not in every["details"]


def test_a_run_says_that_its_scores_are_of_a_sample_and_whom_it_never_asked(tmp_path):
    result = fedfm.run(many(tmp_path, 60, asked=6), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    asked = {c for line in lines for c in (*line["cohort"], *line["client_accuracy"])}
    assert result["details"]["evaluated"] == {"fraction": 0.1, "clients": 6, "of": 60}
    assert result["details"]["never_asked"] == 60 - len(asked)
    said = " ".join(result["warnings"])
    assert "a sample, 6 of 60 clients" in said
    assert f"{60 - len(asked)} of 60 clients were asked neither to train nor for scores" in said
    assert "local scores of fedavg are of a sample of 6 of 60 clients" in table([tmp_path / "run"])
    page = plain(html.write(tmp_path / "run"))
    assert "a sample of 6 of 60 clients" in page
    assert "at 60 clients" in page


def test_personal_models_are_scored_on_the_same_share(tmp_path):
    spec = many(tmp_path, 20, asked=5)
    spec["method"] = {"name": "ditto", "rounds": 1, "fraction": 1.0, "local": {"learning_rate": 0.1}}
    result = fedfm.run(spec, tmp_path / "run")
    assert len(result["client_accuracy"]) == 5
    assert len(list((tmp_path / "run" / "clients").iterdir())) == 20  # every client's own model is stored
    assert any("makes the models of all clients, asks each" in text for text in result["warnings"]), result["warnings"]
    one = fedfm.run(many(tmp_path, 60, asked=6), tmp_path / "one")
    assert not any("models of all clients" in text for text in one["warnings"])


def test_a_share_of_clients_does_not_go_with_asynchronous_rounds(tmp_path):
    with pytest.raises(InputError, match=r"run\.evaluate_fraction: with run\.asynchronous"):
        fedfm.run(many(tmp_path, 60, asynchronous={"buffer": 2}), tmp_path / "run")


# --- growth -----------------------------------------------------------------------------------------------------------


def test_files_and_prepared_clients_follow_the_clients_that_take_part(tmp_path, large, monkeypatch):
    prepared = set()
    data = Partitioned.data
    monkeypatch.setattr(Partitioned, "data", lambda self, client: prepared.add(client) or data(self, client))
    fedfm.run(many(tmp_path, 4 * MANY), tmp_path / "run")
    assert len(prepared) <= 3 * 10
    for name in ("manifest.json", "messages.jsonl", "metrics.jsonl"):
        small, twice = ((path / name).stat().st_size for path in (large[1], tmp_path / "run"))
        assert twice < small + 1000, name


def test_evaluating_everybody_takes_few_bytes_a_client(tmp_path):
    spec = many(tmp_path, MANY + 1, evaluate_fraction=1.0, evaluate_every=0)
    fedfm.run(spec, tmp_path / "run")
    assert (tmp_path / "run" / "messages.jsonl").stat().st_size < 30 * MANY
    messages = list(logs.messages(tmp_path / "run" / "messages.jsonl"))
    asked = {m["to"] for m in messages if m["round"] == 2 and m["handler"].startswith("scores.")} - {"server"}
    assert asked == set(fedfm.load_run(tmp_path / "run").manifest["clients"])


def test_a_client_of_a_partition_exists_while_it_is_used():
    n = 5000
    table = Table("features", np.zeros((n, 1), np.float32), None, (), np.full(n, "train"))
    federated = deal(table, DataSpec(path="x", partition=PartitionSpec("iid", clients=n)), seed=0)
    assert isinstance(federated.clients, DealtRows)
    assert sum(1 for part in federated.clients.parts.values() for _ in part) == 6  # arrays, whatever the number
    assert federated.sizes("train").tolist() == n * [1]
    assert sorted(federated.all_rows("train").tolist()) == list(range(n))
    as_dict = replace(federated, clients=dict(federated.clients))
    assert as_dict.all_rows("train").tolist() == federated.all_rows("train").tolist()
    assert as_dict.sizes("train").tolist() == federated.sizes("train").tolist()


# --- short forms ------------------------------------------------------------------------------------------------------


def test_a_manifest_lists_ranges_of_names_and_is_read_with_all_names(large):
    result, path = large
    written = json.loads((path / "manifest.json").read_text())
    assert written["clients"] == [["client-0000", f"client-{2 * MANY - 1}"]]
    assert len(fedfm.load_run(path).manifest["clients"]) == 2 * MANY
    assert written["split"]["sums"]["train"] | {"by_class": None} == {
        "rows": 4 * MANY, "by_class": None, "least": 2, "median": 2.0, "most": 2, "sizes": {"2": 2 * MANY},
    }  # fmt: skip
    assert "clients" not in written["split"]
    assert fedfm.resume(path)["params_sha256"] == result["params_sha256"]
    assert "2 000 clients: 2 to 2 each, median 2; 40 clients are shown" in plain(html.write(path))


def test_names_in_short_form_come_back_in_their_order():
    rng = np.random.default_rng(0)
    for _ in range(50):
        names = [f"{stem}{k:0{w}d}" for stem in ("a-", "", "b9x") for w in (1, 3) for k in rng.integers(0, 40, 20)]
        assert expand(shorten(names)) == names
        assert expand(shorten(sorted(names))) == sorted(names)


@pytest.mark.parametrize(
    "parts", ["x", [["a-1"]], [["a-1", "b-2"]], [["a-2", "a-1"]], [["a-0", f"a-{10**17}"]], [["a-1", 2]], [3], [None]]
)
def test_a_damaged_list_of_names_is_refused(parts):
    with pytest.raises(ValueError, match="names"):
        expand(parts)


def test_messages_of_one_line_are_the_messages_that_were_sent():
    clients = [f"client-{k:03d}" for k in range(300)]
    sent = [Crossing(1, "server", c, "scores.E_evaluate", 90, "plain", False, 2, 0, "test") for c in clients]
    sent += [
        Crossing(1, c, "server", "scores.E_evaluate", 50 + k % 2, "plain", False, 2) for k, c in enumerate(clients)
    ]
    sent += [Crossing(1, "client-000", "client-001", "query.x", 5, "masked", True, 1)]
    lines = [json.loads(line) for line in group(sent)]
    assert len(lines) == 4
    back = [m for line in lines for m in (ungroup(line) if "messages" in line else [line])]
    keys = ("from", "to", "bytes", "round", "call", "form", "counted", "handler")

    def key(line):
        return tuple(str(line[name]) for name in keys)

    assert sorted(map(key, back)) == sorted(key(json.loads(c.line())) for c in sent)
