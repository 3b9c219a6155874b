"""Trackers, read back by the services' own libraries."""

import importlib.util
import json
import struct
import warnings

import pytest

import fedfm
from fedfm.api import execute
from fedfm.cli import main
from fedfm.errors import InputError
from fedfm.runtime.progress import Progress
from fedfm.runtime.run_directory import Run
from fedfm.runtime.trackers import to_tensorboard
from fedfm.runtime.trackers.tracker import Tracked, Tracker, figures
from small import experiment


def needs(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


@pytest.fixture(autouse=True)
def _their_warnings_are_not_ours(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Stopping(Progress):
    """A user who stops the run after round 2."""

    def __init__(self):
        self.told = []

    def round(self, line):
        if line["round"] == 2:
            raise KeyboardInterrupt

    def notice(self, text):
        self.told.append(text)


def stopped_and_resumed(folder, name):
    tables = experiment(folder, run={"track": [name]})
    with pytest.raises(KeyboardInterrupt):
        fedfm.run(tables, folder / "run", progress=Stopping())
    result = fedfm.resume(folder / "run")
    return Run.open(folder / "run"), result


def expected(run, key):
    return {line["round"]: line[key] for line in run.metrics()}


@needs("tensorboard")
def test_tensorboard_has_every_round_and_client_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, result = stopped_and_resumed(tmp_path, "tensorboard")
    events = EventAccumulator(str(run.path / "tensorboard"), purge_orphaned_data=True).Reload()
    assert {e.step: e.value for e in events.Scalars("accuracy")} == pytest.approx(expected(run, "accuracy"))
    assert [e.step for e in events.Scalars("accuracy")] == [0, 1, 2, 3, 4]
    by_client = {e.step: e.value for e in events.Scalars("client_accuracy/client-02")}
    assert by_client == pytest.approx({t: c["client-02"] for t, c in expected(run, "client_accuracy").items()})
    assert events.Scalars("result/bytes_up")[0].value == result["bytes_up"]
    texts = [events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]]
    assert any("| method.name | fedavg |" in text for text in texts)
    assert any(str((run.path / "adapter").resolve()) in text for text in texts)


@needs("mlflow")
def test_mlflow_has_one_run_with_parameters_metrics_and_models(tmp_path):
    from mlflow.tracking import MlflowClient

    run, result = stopped_and_resumed(tmp_path, "mlflow")
    client = MlflowClient(tracking_uri=(run.path / "mlflow").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("fedfm").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["method.local.learning_rate"] == "0.2"
    history = client.get_metric_history(found.info.run_id, "client_accuracy/client-02")
    assert [(m.step, m.value) for m in history] == [
        (t, c["client-02"]) for t, c in expected(run, "client_accuracy").items()
    ]
    assert found.data.metrics["result/accuracy"] == result["accuracy"]
    assert found.data.tags["model"] == str((run.path / "adapter").resolve())
    assert found.data.tags["params_sha256"] == result["params_sha256"]


def log_records(data, block=1 << 15):
    """Records of LevelDB's log format: in each block a CRC, a length, a type (whole, first, middle, last), bytes."""
    at, parts = 7, b""  # after the file's own header
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


@pytest.mark.proof
@needs("wandb")
def test_wandb_keeps_its_run_offline(tmp_path, monkeypatch):
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")  # its service starts slowly on a busy machine
    run, result = stopped_and_resumed(tmp_path, "wandb")
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len({f.name.rpartition("-")[2] for f in folders}) == 1  # one id: `wandb sync` makes one run of them
    steps, summary = {}, {}
    for file in (path for folder in folders for path in folder.glob("*.wandb")):
        for data in log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            if items:
                steps[record.history.step.num] = items["accuracy"]
            summary |= {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.summary.update}
    assert steps == pytest.approx(expected(run, "accuracy"))
    assert summary["result/accuracy"] == result["accuracy"]
    assert summary["model"] == str((run.path / "adapter").resolve())


def test_a_run_is_the_same_with_a_tracker_that_fails(tmp_path):
    class Failing(Tracker):
        extra = "none"

        def start(self, run, done):
            return -1

        def log(self, t, figures):
            if t == 1:
                raise OSError("the disk is full\nsecond line")

        def finish(self, run, result):
            raise AssertionError("it was left out")

    heard = Stopping()
    heard.round = lambda line: None
    run = Run.create(execute.Experiment.from_dict(experiment(tmp_path)), tmp_path / "tracked")
    result = execute.drive(run, Tracked(heard, {"failing": Failing()}), fresh=True)
    assert heard.told.count("failing stops tracking this run: OSError: the disk is full") == 1
    plain = fedfm.run(experiment(tmp_path), tmp_path / "plain")
    assert result["params_sha256"] == plain["params_sha256"]


def test_a_missing_library_is_refused_before_the_run_with_its_extra(tmp_path, monkeypatch, capsys):
    def missing(self):
        raise ModuleNotFoundError("No module named 'tensorboard'")

    monkeypatch.setattr(to_tensorboard.TensorBoard, "__init__", missing)
    tables = experiment(tmp_path, run={"track": ["tensorboard"]})
    with pytest.raises(InputError, match=r'run.track: tensorboard is not installed .*fedfm\[tensorboard\]"'):
        fedfm.run(tables, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    file = tmp_path / "exp.toml"
    tables = '[data]\nname = "digits"\n[model]\nname = "nano-vit"\n[method]\nname = "fedavg"\n'
    file.write_text(tables + '[run]\ntrack = ["tensorbord"]\n')
    assert main(["check", str(file)]) == 2
    assert "run.track" in capsys.readouterr().err


def test_figures_are_the_numbers_of_a_line():
    line = {"round": 3, "accuracy": 0.5, "loss": None, "perplexity": float("inf"), "cohort": ["a"], "excluded": [{}]}
    line |= {"client_accuracy": {"st. mary's/icu": 0.25, "b": None}}
    assert figures(line) == {"accuracy": 0.5, "excluded": 1.0, "client_accuracy/st. mary_s_icu": 0.25}
