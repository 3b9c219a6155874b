"""Every task has the local engine's bits and scores on Flower's messages, and at silos whose messages are files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flwr.clientapp import ClientApp

import fedfm
import tiny_seq2seq
from carried import NAMES as SILOS
from carried import Carried, waiting
from fedfm.api.predict import predict
from fedfm.config.experiment import Experiment
from fedfm.core import tasks
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.engines.flower.client_host import of_experiment
from fedfm.engines.flower.private_api import identity
from fedfm.engines.flower.server_app import host
from fedfm.engines.flower.simulation import reply
from fedfm.runtime.run_directory import Run
from fedfm.sites import silo_config
from grid import InProcessGrid
from processes import same
from small import jsonl
from task_places import NAMES, Places, tables

SPEECH = "speech"  # the rows of a Whisper, which are another form of a task's
ROWS = (*NAMES, SPEECH)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return SpeechToo(tmp_path_factory.mktemp("tasks"))


class SpeechToo(Places):
    def _make(self, name: str) -> tuple[Path, Path]:
        if name != SPEECH:
            return super()._make(name)
        path = jsonl(self._folder / "speech.jsonl", tiny_seq2seq.recordings(self._folder, 20))
        return path, tiny_seq2seq.save_whisper(self._folder / "whisper")


def task_of(name: str) -> str:
    return "sequence_to_sequence" if name == SPEECH else name


class App(ClientApp):
    """The client with this number, as in an actor of the simulation."""

    def __init__(self, site: Any, number: int) -> None:
        super().__init__()
        self.site, self.number = site, number

    def __call__(self, message: Any, context: Any) -> Any:
        return reply(self.site, self.number, message)


@pytest.mark.sample("classification", "instruction", "token_classification")
@pytest.mark.parametrize("name", ROWS)
def test_the_simulation_has_the_bits_and_the_scores_of_the_local_engine(name, place, tmp_path, monkeypatch):
    experiment = tables(place(name), task_of(name))
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
    """Two silos, each with half of the rows of a task, in columns of their own names; the server has no rows.

    Attributes:
        files: the same rows with the columns' usual names, by silo.
    """

    def __init__(self, root: Path, place: tuple[Path, Path | str], task: str) -> None:
        self.task, self.place, self.files = task, place, dict[str, str]()
        whole = load_table(DataSpec(path=str(place[0])), seed=0, task=task)
        self.table = {"classes": list(whole.classes), "kind": whole.kind}
        super().__init__(root, f"classes = {json.dumps(whole.classes)}\n" if whole.classes else "")

    def rows(self, name: str, number: int) -> str:
        path, model = self.place
        known = f'models = ["{model}"]\ntask = "{self.task}"\n'
        self.files[name] = str(path)
        if path.suffix != ".jsonl":
            return f'{known}data = "{path}"\n'
        mine = [json.loads(line) for line in path.read_text().splitlines()][number::2]
        self.files[name] = str(jsonl(path.with_name(f"{path.stem}-{name}.jsonl"), mine))
        renamed = ({f"own_{key}": value for key, value in row.items()} for row in mine)
        own = jsonl(path.with_name(f"{path.stem}-own-{name}.jsonl"), renamed)
        return known + f'data = "{own}"\n' + "".join(f'{key} = "own_{key}"\n' for key in mine[0])


@pytest.mark.sample("regression")
@pytest.mark.parametrize("name", ROWS)
def test_silos_with_columns_of_their_own_have_the_local_bits_and_a_server_without_rows_their_scores(
    name, place, tmp_path, monkeypatch
):
    silos = TaskSilos(tmp_path, place(name), task_of(name))
    experiment = tables(place(name), task_of(name))
    half = {"test_fraction": 0.5}  # enough test rows for the scores of every task
    alone = {**experiment, "data": {"clients": silos.files, **half}}
    local = fedfm.run(alone, tmp_path / "local", progress=fedfm.Progress())
    waiting(monkeypatch, silos.pump)
    changes = {**experiment, "data": {**silos.table, **half}}
    found = fedfm.run(silos.engine_of(changes), tmp_path / "run", progress=fedfm.Progress())
    assert found["excluded"] == []
    for key in ("params_sha256", "bytes_up", "bytes_down"):
        assert found[key] == local[key]
    close = pytest.approx(local["local_accuracy"], abs=1e-3)  # a silo sends scores with few digits
    assert found["local_accuracy"] == (None if local["local_accuracy"] is None else close)
    task = tasks.find(task_of(name))
    for figure in {f"local_{figure}" for figure in task.figures if figure not in task.lists}:
        assert found["details"][figure] == pytest.approx(local["details"][figure], rel=1e-3, abs=1e-3), figure
    assert not [text for text in found["warnings"] if "do not leave a silo" in text]
    for silo in SILOS:
        checked = silo_config.report(silos.file(silo))
        assert checked["classes"] == silos.table["classes"]
        assert checked["rows"]["train"] > 0
    path, _ = place(name)
    assert predict(tmp_path / "run", path)


@pytest.mark.proof
def test_silos_that_list_the_function_of_a_module_have_the_local_bits(place, tmp_path, monkeypatch):
    known = place("segmentation")[0], "tiny_unets:unet"
    silos, experiment = TaskSilos(tmp_path, known, "segmentation"), tables(known, "segmentation")
    local = fedfm.run({**experiment, "data": {"clients": silos.files}}, tmp_path / "local", progress=fedfm.Progress())
    waiting(monkeypatch, silos.pump)
    changes = {**experiment, "data": silos.table}
    found = fedfm.run(silos.engine_of(changes), tmp_path / "run", progress=fedfm.Progress())
    assert found["excluded"] == []
    assert found["params_sha256"] == local["params_sha256"]


@pytest.mark.proof
def test_a_silo_with_few_test_rows_sends_no_scores_and_the_run_says_so(place, tmp_path, monkeypatch):
    silos = TaskSilos(tmp_path, place("regression"), "regression")
    waiting(monkeypatch, silos.pump)
    changes = {**tables(place("regression"), "regression"), "data": silos.table}  # 2 of 10 rows are test rows
    found = fedfm.run(silos.engine_of(changes), tmp_path / "run", progress=fedfm.Progress())
    assert found["excluded"] == []
    assert found["local_loss"] is None
    why = 'scores on fewer than 5 rows do not leave a silo: the sums of task "regression" would disclose their targets'
    assert sum(why in text for text in found["warnings"]) == len(SILOS)
    for silo in SILOS:
        logs = [path.read_text() for path in silos.file(silo).parent.rglob("silo.log")]
        assert any(f"2 test rows: {why}" in text for text in logs)
