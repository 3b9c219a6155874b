"""A share of the clients is asked for scores: every engine draws the same ones, and says how many were scored."""

from __future__ import annotations

import json

import pytest

import fedfm
from carried import Carried, waiting
from fedfm.config.experiment import Experiment
from fedfm.reports import html
from processes import on_engine, same
from small import experiment

SILOS = ("east", "middle", "north", "south", "west")
FEW = {"method": {"name": "scaffold", "rounds": 2, "fraction": 0.4}, "run": {"evaluate_fraction": 0.4}}


@pytest.mark.parametrize(
    "engine",
    [
        "local",
        "folder",
        pytest.param("simulation", marks=[pytest.mark.simulation, pytest.mark.release]),
        pytest.param("deployment", marks=[pytest.mark.deployment, pytest.mark.release]),
    ],
)
def test_every_engine_scores_the_same_share_with_the_same_bits_and_says_so(tmp_path, monkeypatch, engine):
    carried, out = Carried(tmp_path, names=SILOS), tmp_path / "run"
    local = carried.local(**FEW)
    if engine == "local":
        tables = carried.tables(**FEW)
        tables["run"] |= {"workers": 2, "wire": True}
        result = fedfm.run(tables, out)
    elif engine == "folder":
        waiting(monkeypatch, carried.pump)
        result = fedfm.run(carried.engine(**FEW), out, progress=fedfm.Progress())
    else:
        tables = carried.tables(**FEW)
        del tables["run"]["workers"]
        (tmp_path / "exp.toml").write_text(Experiment.from_dict(tables).to_toml())
        result = on_engine(engine, "run", tmp_path / "exp.toml", "--out", out, "--engine", engine)
    same(result, local)
    assert result["engine"] == engine
    assert result["details"]["evaluated"] == local["details"]["evaluated"] == {"fraction": 0.4, "clients": 2, "of": 5}
    assert result["details"]["never_asked"] == local["details"]["never_asked"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [sorted(line["client_accuracy"]) for line in lines] == 3 * [sorted(local["client_accuracy"])]
    sent = [json.loads(line) for line in (out / "messages.jsonl").read_text().splitlines()]
    scored = {m["to"] for m in sent if m["handler"].startswith("scores.") and m["from"] == "server"}
    assert scored == set(local["client_accuracy"])
    greeted = [m["to"] for m in sent if m["handler"] == "query.hello" and m["from"] == "server"]
    first = {"east"} if engine == "deployment" else set()  # it tells whether silos have their own rows
    everybody = scored.union(*(line["cohort"] for line in lines)) | first
    assert sorted(greeted) == ([] if engine == "local" else sorted(everybody))
    assert "a sample, 2 of 5 clients" in " ".join(result["warnings"])
    page = " ".join(html.write(out).read_text(encoding="utf-8").split())
    assert "a sample of 2 of 5 clients" in page


@pytest.mark.parametrize(("name", "clients"), [("centralised", 5), ("fedavg", 1)])
def test_a_sample_of_all_clients_or_of_untrained_rows_gives_no_notice(name, clients, tmp_path):
    tables = experiment(tmp_path, method={"name": name, "rounds": 1, "fraction": 1.0}, run={"evaluate_fraction": 0.4})
    tables["data"]["partition"] = {"name": "iid", "clients": clients}
    if name == "centralised":
        del tables["method"]["fraction"]
    result = fedfm.run(tables, tmp_path / "run", progress=fedfm.Progress())
    assert result["details"]["never_asked"] == 0
    assert any("sample" in text for text in result["warnings"]) == (clients > 1)
    assert not any("neither to train" in text for text in result["warnings"])
    assert ("a sample of" in html.write(tmp_path / "run").read_text()) == (clients > 1)
