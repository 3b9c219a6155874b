"""The server waits as long as measured steps say, unless run.timeout says how long."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedfm
import small
import toy
from fedfm.config.experiment import Experiment
from fedfm.core.client import Update
from fedfm.methods.fedavg import FedAvg
from fedfm.runtime import client_timeout as module
from fedfm.runtime.client_timeout import patience
from fedfm.runtime.population import populate
from fedfm.training import SGD


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("patience")


def experiment(folder: Path, **run: Any) -> Experiment:
    return Experiment.from_dict(
        {
            "data": {"path": str(small.pictures(folder)), "partition": {"name": "iid", "clients": 2}},
            "model": {"name": str(small.tiny_vit(folder)), "adaptation": {"name": "full"}},
            "method": {"name": "fedavg", "rounds": 1, "local": {"epochs": 3, "batch_size": 10}},
            "run": {"workers": 1, **run},
        }
    )


def test_small_work_is_not_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    e = experiment(folder)
    monkeypatch.setattr(module, "step_seconds", lambda *a: pytest.fail("measured"))
    assert patience(e.method, populate(e), e.run, pytest.fail) == 600.0
    assert patience(e.method, populate(e), experiment(folder, timeout=7.0).run, pytest.fail) == 7.0


def test_slow_steps_extend_the_usual_time_and_not_a_stated_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    e, said = experiment(folder), list[str]()
    everyone = populate(e)
    monkeypatch.setattr(module, "_WORK", 0.0)
    monkeypatch.setattr(module, "step_seconds", lambda model, rows, size: 100.0)
    rows = max(len(everyone.federated.clients[c].train) for c in everyone.clients)
    steps = 3 * -(-rows // 10)
    assert patience(e.method, everyone, e.run, said.append) == 600 + 4 * 100 * steps
    assert patience(e.method, everyone, experiment(folder, timeout=50.0).run, said.append) == 50.0
    assert f"{steps} steps of 1e+02 s" in said[0]
    assert said[1].startswith("run.timeout = 50")
    assert patience(e.method, everyone, experiment(folder, timeout=1e6).run, pytest.fail) == 1e6


def test_measuring_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    e, before = experiment(folder), fedfm.run(experiment(folder))
    monkeypatch.setattr(module, "_WORK", 0.0)
    everyone = populate(e)
    w = everyone.model.params()
    seconds = module.step_seconds(everyone.model, everyone.data(everyone.clients[0]).train, 10)
    assert seconds is not None
    assert seconds > 0
    assert everyone.model.params().sha256() == w.sha256()
    assert all(p.grad is None for p in everyone.model.live().values())
    after = fedfm.run(experiment(folder, timeout=900.0))  # a stated time is compared with the measured one
    assert after["params_sha256"] == before["params_sha256"]


class Slow(FedAvg):
    """Takes longer than the time that is stated."""

    def weight(self, client: Any) -> int:
        import time

        time.sleep(0.05)
        return 1


@pytest.mark.parametrize(("timeout", "left_out"), [(0.01, True), (float("inf"), False)])
def test_in_this_process_only_a_stated_time_throws_away(tmp_path: Path, timeout: float, left_out: bool) -> None:
    fed = toy.federation(Slow(local=SGD()), {"a": [0.0]}, tmp_path, min_clients=0, timeout=timeout)
    fed.begin(1)
    replies = list(fed.exchange("train", Slow(local=SGD()).train, None, {"w": fed.initial}, Update, least=0))
    assert (replies == []) == left_out


@pytest.mark.parametrize(
    ("run", "timeout", "extends"),
    [
        ({}, 600.0, True),
        ({"timeout": 600.0}, 600.0, False),
        ({"timeout": 30.0}, 30.0, False),
        ({"timeout": 30.0, "extend_timeout": True}, 30.0, True),
        ({"extend_timeout": False}, 600.0, False),
    ],
)
def test_a_stated_time_holds_also_after_a_file_with_all_defaults(
    folder: Path, run: dict[str, Any], timeout: float, extends: bool
) -> None:
    e = experiment(folder, **run)
    for same in (e, Experiment.from_dict(e.to_dict()), Experiment.from_dict(tomllib.loads(e.to_toml()))):
        assert (same.run.timeout, same.run.extend_timeout) == (timeout, extends)
