"""Before any silo connects, a run reports violated rules on numbers of clients, and that no client can score."""

import numpy as np
import pytest
import torch

import fedfm
import small
from fedfm.cli.entry import main
from fedfm.config.experiment import Experiment
from fedfm.engines.known_clients import check_known
from fedfm.errors import InputError
from fedfm.runtime.progress import Progress
from fedfm.runtime.who_scores import scoring_notices
from fedfm.sites import federation_config, kits

SECAGG = {"privacy": {"aggregator": "secagg"}}
NOISE = {"unit": "client", "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-5}
BY_ROW = {"unit": "record", "mechanism": "dp_sgd", "target_epsilon": 8.0, "clip_norm": 1.0, "delta": 1e-5}
RULES = {  # number of silos, tables, what is said
    "a sum of two": (2, SECAGG, 'privacy.aggregator = "secagg": it needs 3 clients per round'),
    "by its own name": (2, {"aggregation": {"name": "secure"}}, 'aggregation.name = "secure": it needs 3 clients'),
    "a fraction of them": (
        5,
        {**SECAGG, "method": {"fraction": 0.4}},
        "method.fraction of at least 0.6 asks that number",
    ),
    "krum": (4, {"aggregation": {"name": "krum", "byzantine": 1}}, "needs 5 updates per round"),
    "min_clients": (2, {"run": {"min_clients": 3}}, "run.min_clients = 3: the kit"),
    "buffer": (2, {"run": {"asynchronous": {"buffer": 3}}}, "run.asynchronous.buffer = 3: the kit"),
    "groups": (
        3,
        {"privacy": NOISE | {"mechanism": "correlated_gaussian"}, "method": {"fraction": 0.25}},
        "method.fraction = 0.25: 4 groups of clients take turns",
    ),
}


def provisioned(folder, silos):
    """The server's kit of a federation of so many silos."""
    names = [f"silo-{i}" for i in range(silos)]
    (folder / "federation.toml").write_text(f'server = "127.0.0.1:0"\nsilos = {names}\n')
    kits.provision(federation_config.load(folder / "federation.toml"), folder / "kits")
    return folder / "kits" / "server"


def deployed(kit, **more):
    tables = {
        "data": {"classes": ["a", "b", "c"], "kind": "features", "width": 5},
        "model": {"name": "features"},
        "method": {"name": "fedavg", "rounds": 4},
        "run": {"engine": "deployment", "superlink": str(kit), "timeout": 5},
    }
    for table, values in more.items():
        tables[table] = {**tables.get(table, {}), **values}
    return tables


@pytest.mark.parametrize("rule", RULES)
def test_a_kit_with_too_few_silos_is_refused_before_anything_starts(rule, tmp_path):
    silos, tables, said = RULES[rule]
    found = deployed(provisioned(tmp_path, silos), **tables)
    with pytest.raises(InputError) as error:
        check_known(Experiment.from_dict(found))
    assert said in str(error.value)
    assert f"{tmp_path / 'kits' / 'server'}" in str(error.value)
    with pytest.raises(InputError) as again:
        fedfm.run(found, tmp_path / "run", progress=Progress())
    assert str(again.value) == str(error.value)
    assert not (tmp_path / "run").exists()
    kits.provision(
        federation_config.FederationFile("127.0.0.1:0", tuple(f"silo-{i}" for i in range(8))), tmp_path / "kits"
    )
    check_known(Experiment.from_dict(found))


def test_a_roster_counts_as_well(tmp_path):
    (tmp_path / "roster.toml").write_text(f'north = "{"ab" * 32}"\nsouth = "{"cd" * 32}"\n')
    run = {"engine": "folder", "folder": str(tmp_path), "roster": str(tmp_path / "roster.toml")}
    with pytest.raises(InputError, match=r'"secagg": it needs 3 .* of 2 silos of the roster .*roster\.toml'):
        check_known(Experiment.from_dict(small.experiment(tmp_path, run=run, method={"fraction": 1.0}) | SECAGG))


def test_on_loopback_too_few_clients_are_refused_before_a_superlink_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("fedfm.engines.flower.deployment.loopback", None)
    data = {"partition": {"name": "iid", "clients": 2}}
    tables = small.experiment(tmp_path, data=data, run={"engine": "deployment"}, method={"fraction": 1.0}) | SECAGG
    with pytest.raises(InputError, match="it needs 3 clients per round"):
        fedfm.run(tables, tmp_path / "run", progress=Progress())


UNSCORED = {  # tables, test rows at the server -> what is said
    "hidden sums": (SECAGG, 0, "this run ends without an accuracy or a loss"),
    "hidden sums and test rows": (SECAGG, 9, ""),
    "an epsilon": ({"privacy": NOISE}, 0, "this run ends without an accuracy or a loss"),
    "an epsilon and test rows": ({"privacy": NOISE}, 9, ""),
    "models of their own": (
        {"method": {"name": "local", "fraction": None}, "privacy": BY_ROW},
        9,
        "accuracy and client_accuracy stay empty",
    ),
    "nothing private": ({}, 0, ""),
}


@pytest.mark.parametrize("case", UNSCORED)
def test_a_run_that_nobody_scores_says_so_first(case, tmp_path):
    tables, rows, said = UNSCORED[case]
    found = small.experiment(tmp_path)
    found["data"]["test_fraction"] = 0.2
    for table, values in tables.items():
        found[table] = {k: v for k, v in {**found.get(table, {}), **values}.items() if v is not None}
    notices = scoring_notices(Experiment.from_dict(found), rows)
    assert [text[: len(said)] for text in notices] == ([said] if said else [])
    if rows:  # the run itself: the file has test rows
        result = fedfm.run(found, tmp_path / "run", progress=Progress())
        assert (result["accuracy"] is None) == bool(said)
        assert [text for text in result["warnings"] if said and text.startswith(said)] == notices


def test_a_run_without_test_rows_says_so_first(tmp_path, capsys):
    tables = small.experiment(tmp_path)
    with np.load(tmp_path / "rows.npz") as rows:
        np.savez(tmp_path / "rows.npz", **{key: rows[key] for key in ("x", "y", "classes")})
    tables["data"]["test_fraction"] = 0.0
    said = "this run ends without an accuracy or a loss: there are no test rows"
    result = fedfm.run(tables, tmp_path / "run", progress=Progress())
    assert result["accuracy"] is None
    assert [text for text in result["warnings"] if text.startswith(said)]
    (tmp_path / "e.toml").write_text(Experiment.from_dict(tables).to_toml())
    assert main(["check", str(tmp_path / "e.toml")]) == 0
    assert said in capsys.readouterr().out
    tables["data"]["test_fraction"] = 0.2
    assert not [
        text for text in fedfm.run(tables, tmp_path / "other", progress=Progress())["warnings"] if "test rows" in text
    ]


def test_a_run_of_a_module_without_test_rows_names_the_argument_that_takes_them(tmp_path):
    pairs = [(torch.full((4,), float(i % 2)), i % 2) for i in range(8)]
    clients = {"north": pairs[:4], "south": pairs[4:]}
    found = fedfm.federate(
        torch.nn.Linear(4, 2), clients=clients, loss=torch.nn.functional.cross_entropy, rounds=1, out=tmp_path / "run"
    )
    (notice,) = [text for text in found["warnings"] if "no test rows" in text]
    assert "federate(test=...)" in notice
    assert "data." not in notice


def test_check_gives_the_notice_wherever_the_superlink_is(tmp_path, capsys):
    for link in (provisioned(tmp_path, 3), "fed.example.org:8443"):
        (tmp_path / "e.toml").write_text(Experiment.from_dict(deployed(link) | SECAGG).to_toml())
        assert main(["check", str(tmp_path / "e.toml")]) == 0
        assert "# this run ends without an accuracy or a loss: under privacy.aggregator" in capsys.readouterr().out
