"""Every task has the local engine's bits and scores on Flower's messages, and at silos whose messages are files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flwr.clientapp import ClientApp

import fedfm
from carried import NAMES as SILOS
from carried import Carried, waiting
from fedfm.config.experiment import Experiment
from fedfm.core import tasks
from fedfm.engines.flower.client_host import of_experiment
from fedfm.engines.flower.private_api import identity
from fedfm.engines.flower.server_app import host
from fedfm.engines.flower.simulation import reply
from fedfm.runtime.run_directory import Run
from grid import InProcessGrid
from processes import same
from task_places import NAMES, Places, rows, tables


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Places(tmp_path_factory.mktemp("tasks"))


class App(ClientApp):
    """The client with this number, as in an actor of the simulation."""

    def __init__(self, site: Any, number: int) -> None:
        super().__init__()
        self.site, self.number = site, number

    def __call__(self, message: Any, context: Any) -> Any:
        return reply(self.site, self.number, message)


@pytest.mark.parametrize("name", NAMES)
def test_the_simulation_has_the_bits_and_the_scores_of_the_local_engine(name, place, tmp_path, monkeypatch):
    experiment = tables(place(name), name)
    local = fedfm.run(experiment, tmp_path / "local", progress=fedfm.Progress())
    run = Run.create(Experiment.from_dict(experiment), tmp_path / "run")
    site = of_experiment(lambda: run.experiment, tmp_path / "memory", tmp_path)
    monkeypatch.setattr("fedfm.engines.flower.server_app.is_simulated", lambda grid: True)
    with identity():
        found = host(run, InProcessGrid({100 + k: App(site, k) for k in range(2)}))
    same(found, local)
    assert found["details"] == local["details"]
    assert found["loss"] is not None


class TaskSilos(Carried):
    """Two silos, each with half of the rows of a task."""

    def __init__(self, root: Path, place: Places, task: str, **keys: Any) -> None:
        self.task, self.place = task, place(task)
        super().__init__(root, **keys)

    def rows(self, name: str, number: int) -> str:
        path, model = self.place
        if path.suffix == ".jsonl":
            lines = [json.dumps(row) for row in rows(self.task)[number::2]]
            path = path.with_name(f"{self.task}-{name}.jsonl")
            path.write_text("\n".join(lines))
        return f'data = "{path}"\nmodels = ["{model}"]\n'
