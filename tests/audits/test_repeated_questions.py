"""An audit of the messages of a run: honest runs repeat no request, and repeated requests are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedfm
from fedfm.audits.audit import perform
from fedfm.audits.repeated_questions import finding_of
from fedfm.runtime.run_directory import Run
from small import features


def run(folder: Path, method: dict[str, Any] | None = None, **tables: Any) -> Path:
    features(folder, n=60)
    data = {"path": str(folder / "rows.npz"), "val_fraction": 0.2, "partition": {"name": "iid", "clients": 3}}
    known = {"data": data, "model": {"name": "features"}, "method": {"name": "fedavg", "rounds": 2} | (method or {})}
    out = folder / "run"
    fedfm.run(known | tables, out)
    return out


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "messages.jsonl").read_text().splitlines()]


HONEST = [
    {},
    {"method": {"name": "scaffold"}},
    {"method": {"name": "fedala"}},
    {"method": {"name": "fedfed"}},
    {"method": {"name": "local"}},
    pytest.param({"method": {"name": "kd", "rounds": 1}}, marks=pytest.mark.proof),
    {"method": {"name": "fedkt", "rounds": 1}},
    {"privacy": {"aggregator": "secagg"}},
    {"run": {"asynchronous": {"buffer": 1}}},
    # the rate is too large, so an early round is the best one, and is scored once more in the last round
    {"method": {"rounds": 6, "local": {"learning_rate": 300.0}}, "run": {"patience": 2}},
]


@pytest.mark.parametrize("tables", HONEST, ids=lambda tables: json.dumps(tables)[:40])
def test_an_honest_run_asks_once(tmp_path, tables):
    finding = finding_of(Run.open(run(tmp_path, **tables)))
    assert (finding.verdict, finding.estimate) == ("holds", 0.0), finding.says
    assert finding.detail["asked"] > 3


def test_the_run_with_the_best_model_of_an_earlier_round_is_one(tmp_path):
    out = run(tmp_path, **HONEST[-1])
    result = json.loads((out / "manifest.json").read_text())["result"]
    assert result["details"]["model_of_round"] < result["rounds"]
    assert result["client_accuracy"] != {}


def test_each_part_is_named(tmp_path):
    asked = [m for m in lines(run(tmp_path)) if m["from"] == "server" and m["handler"].startswith("scores.")]
    assert {m["part"] for m in asked} == {"test", "val"}


def test_repeated_requests_are_counted(tmp_path):
    out = run(tmp_path)
    more = [m | {"call": 50 + i} for i in range(3) for m in lines(out) if m["round"] == 1 and m.get("part") == "test"]
    (one, *_) = [m for m in lines(out) if m["round"] == 2 and m["handler"] == "train.FedAvg_train"]
    more += [one | {"call": 60}, one | {"call": 60}, one | {"call": 61}]
    with open(out / "messages.jsonl", "a") as file:
        file.writelines(json.dumps({k: v for k, v in m.items() if k != "crc32"}) + "\n" for m in more)
    (finding,) = perform(out, ["repeated_questions"])
    assert finding.verdict == "leaks"
    assert finding.estimate == 3 * 3 + 2
    assert finding.detail["again"] == {"scores.Evaluation_evaluate test": 9, "train.FedAvg_train": 2}
    assert not finding.contradicts


@pytest.mark.parametrize("edit", ["an edited line", "a line taken out"])
def test_an_incomplete_log_promises_nothing(edit, tmp_path):
    out = run(tmp_path)
    log = (out / "messages.jsonl").read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(log) if "train.FedAvg_train" in line)
    log[at] = log[at].replace('"round": ', '"round": 1') if edit == "an edited line" else ""
    (out / "messages.jsonl").write_text("".join(log))
    (finding,) = perform(out, ["repeated_questions"])
    assert finding.verdict == "inconclusive"
    assert "messages.jsonl" in finding.rule.otherwise
