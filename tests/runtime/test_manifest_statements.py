"""The statements of a manifest: who received what, the smallest sum, the guarantee, and the audits."""

import json
from collections import Counter

import pytest

from fedfm.api import execute
from fedfm.cli import main
from fedfm.reports import html
from fedfm.runtime.exposure import exposure_of
from fedfm.runtime.run_directory import Run
from small import experiment, features

SECRET = {"aggregator": "secagg"}


def lines(run):
    return [json.loads(line) for line in (run / "messages.jsonl").read_text().splitlines()]


def stated(run):
    return json.loads((run / "manifest.json").read_text())


@pytest.mark.parametrize(
    ("changes", "least", "sentence"),
    [
        ({}, 1, "The smallest sum that the server saw has 1 update: it could read what each client sent."),
        ({"privacy": SECRET, "method": {"fraction": 1.0}}, 5, "The smallest sum that the server saw has 5 updates"),
        ({"privacy": SECRET, "method": {"fraction": 0.6}}, 3, "The smallest sum that the server saw has 3 updates"),
    ],
)
def test_the_smallest_sum_is_that_of_the_transport(changes, least, sentence, tmp_path):
    execute.run(experiment(tmp_path, **changes), tmp_path / "run")
    assert stated(tmp_path / "run")["seen"]["smallest_sum"] == least
    assert sentence in html.write(tmp_path / "run").read_text()


def test_every_crossing_is_counted_once(tmp_path):
    execute.run(experiment(tmp_path, privacy=SECRET), tmp_path / "run")
    sent = lines(tmp_path / "run")
    rows = stated(tmp_path / "run")["seen"]["received"]
    assert sum(row["messages"] for row in rows) == len(sent)
    by = Counter()
    for line in sent:
        by["server" if line["to"] == "server" else "clients", line["form"]] += line["bytes"]
    found = Counter()
    for row in rows:
        found[row["by"], row["form"]] += row["bytes"]
    assert found == by
    masked = [row for row in rows if row["form"] == "masked"]
    assert [(row["by"], row["from"]) for row in masked] == [("server", "clients")]
    received = exposure_of(tmp_path / "run" / "messages.jsonl").received
    assert {p: sum(v.values()) for p, v in received.items()} == Counter(
        {p: sum(x["bytes"] for x in sent if x["to"] == p) for p in {x["to"] for x in sent}}
    )


def log(path, *rows):
    """(sender, receiver, handler, form, round, call) of each message."""
    keys = ("from", "to", "handler", "form", "round", "call")
    made = (dict(zip(keys, row, strict=True)) | {"bytes": 1, "counted": True} for row in rows)
    path.write_text("".join(json.dumps(line) + "\n" for line in made))
    return path


def test_means_of_one_round_are_told_apart(tmp_path):
    def mean(call, names):
        return [(name, "server", "train.X_step", "masked", 1, call) for name in names]

    path = log(tmp_path / "m", *mean(3, "abcde"), *mean(9, "ab"), *mean(12, "cde"))
    assert exposure_of(path).smallest_sum == 2
    assert exposure_of(path, {(2, "a")}).smallest_sum == 2
    assert exposure_of(path, {(1, "a")}).smallest_sum == 1  # it may have dropped out: at least so many
    assert exposure_of(log(path, *mean(3, "ab"), ("a", "server", "query.X_more", "plain", 1, 4))).smallest_sum == 1
    assert exposure_of(log(path, *mean(3, "ab"), ("a", "server", "aggregate.S_keys", "plain", 1, 2))).smallest_sum == 2
    assert exposure_of(log(path, *mean(3, "ab"), ("a", "server", "reveal.E_own", "plain", 1, 4))).smallest_sum == 1
    assert exposure_of(log(path, *mean(None, "abc"))).smallest_sum is None  # no line says its call
    assert exposure_of(log(path, *mean(3, "abc"), *mean(None, "abc"))).smallest_sum is None
    assert exposure_of(tmp_path / "none").smallest_sum is None


def test_the_manifest_states_the_guarantee_with_all_that_it_needs(tmp_path):
    features(tmp_path)
    table = experiment(tmp_path, privacy={"unit": "record", "target_epsilon": 2.0, "delta": 1e-6})
    table["method"] = {"name": "fedpft", "components": 1, "covariance": "spherical"}
    result = execute.run(table, tmp_path / "private")
    found = stated(tmp_path / "private")["guarantee"]
    entry = stated(tmp_path / "private")["ledger"]["entries"][0]
    assert found["epsilon"] == result["epsilon"] == pytest.approx(2.0)
    assert {key: found[key] for key in ("delta", "unit", "relation", "mechanism", "composition")} == {
        key: entry[key] for key in ("delta", "unit", "relation", "mechanism", "composition")
    }
    assert found["unit"] == "record"
    assert any("one row, at one client" in text for text in found["assumptions"])
    page = (tmp_path / "private" / "report.html").read_text()
    for text in found["assumptions"]:
        assert text in page

    execute.run(experiment(tmp_path), tmp_path / "open")
    assert stated(tmp_path / "open")["guarantee"] is None


def test_the_manifest_states_the_verdicts_of_audits_and_no_figure_of_rows(tmp_path, capsys):
    features(tmp_path, n=600)
    table = experiment(tmp_path)
    table["method"] = {"name": "fedpft", "components": 1, "covariance": "spherical"}
    execute.run(table, tmp_path / "run")
    assert "audits" not in stated(tmp_path / "run")
    assert main(["audit", str(tmp_path / "run"), "--attack", "membership", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    audits = stated(tmp_path / "run")["audits"]
    assert [(a["name"], a["verdict"]) for a in audits] == [(f["name"], f["verdict"]) for f in found]
    assert {key for a in audits for key in a} == {"name", "question", "verdict", "bound", "contradicts"}
    assert Run.open(tmp_path / "run").manifest["audits"] == audits
