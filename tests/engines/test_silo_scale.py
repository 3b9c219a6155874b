"""Regression at silos: each sends sums of its targets once, and all train with the scale of all rows together."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_apps import App

import fedfm
from carried import NAMES, Carried, waiting
from fedfm.api.predict import load, predict
from fedfm.config.experiment import Experiment
from fedfm.core.wire import payload
from fedfm.engines.flower import client_stub
from fedfm.engines.flower.app_writer import experiment_text
from fedfm.engines.flower.client_host import of_folder
from fedfm.engines.flower.private_api import identity
from fedfm.engines.flower.server_app import host
from fedfm.errors import InputError, RunError
from fedfm.privacy.exposure import HELLO
from fedfm.runtime.row_sums import KEYS
from fedfm.runtime.run_directory import Run
from grid import InProcessGrid
from processes import same

ASKED = "query.RowSums_tell"
MODEL = {"model": {"name": "features", "task": "regression"}}
SCALE = {"target_means": [1e6], "target_scales": [50.0]}


@pytest.fixture
def carried(tmp_path):
    return federation(tmp_path)


def federation(folder, tables=""):
    found = Carried(folder, f'task = "regression"\n{tables}')
    for number, name in enumerate(NAMES):
        rng = np.random.default_rng(number)
        x = rng.normal(size=(40 + 10 * number, 4)).astype(np.float32)
        np.savez(folder / name / "rows.npz", x=x, y=1e6 + 30 * (x @ np.array([1.0, -2, 3, 0.5])) + 40 * number)
    return found


def manifest(path):
    return json.loads((path / "manifest.json").read_text())


def sums_left(carried, name):
    return [line for line in carried.left(name) if line["handler"] == ASKED]


def test_silos_learn_the_scale_of_all_rows_with_the_bits_of_one_process(carried, monkeypatch):
    waiting(monkeypatch, carried.pump)
    run = carried.root / "run"
    result = fedfm.run(carried.engine(**MODEL), run, progress=fedfm.Progress())
    same(result, carried.local(**MODEL))
    for name in NAMES:
        (line,) = sums_left(carried, name)
        assert (line["round"], line["exposes"], line["fault"]) == (0, "reply", "")
    local = manifest(carried.root / "local")["experiment"]["model"]
    assert manifest(run)["chosen"] == {key: local[key] for key in SCALE}
    assert [text for text in result["warnings"] if "mean and deviation of the 72 training rows of all" in text]
    assert list(load(run)[1].task.target_means) == manifest(run)["chosen"]["target_means"]
    rows = carried.root / "north" / "rows.npz"
    assert predict(run, rows)["values"] == predict(carried.root / "local", rows)["values"]


@pytest.mark.sample("rows")
@pytest.mark.parametrize("data", [{}, {"classes": ["value"], "kind": "features", "width": 4}], ids=["rows", "none"])
def test_silos_of_a_deployment_learn_the_same_scale(carried, data):
    """The server has rows of its own, which do not count, or none."""
    tables = carried.tables(**MODEL)
    tables["data"] = data or tables["data"]
    tables["run"] = {"engine": "deployment", "seed": 3, "timeout": 5.0}
    demanded, apps = Experiment.from_dict(tables), {}
    for number, name in enumerate(NAMES):
        config = {"experiment": experiment_text(demanded), "key": "k"}
        apps[100 + number] = App(*of_folder(client_stub.admit(config, {"silo": str(carried.file(name))}, 1)))
    run = Run.create(demanded, carried.root / "run")
    with identity():
        result = host(run, InProcessGrid(apps))
    local = carried.local(**MODEL)
    assert result["params_sha256"] == local["params_sha256"]
    for name in ("mse", "r2"):  # silos send four digits
        assert result["details"][f"local_{name}"] == pytest.approx(local["details"][f"local_{name}"], rel=5e-3)
    assert [len(sums_left(carried, name)) for name in NAMES] == [1, 1]


def test_a_stopped_run_asks_no_silo_twice(carried, monkeypatch):
    class Stop(fedfm.Progress):
        def round(self, line):
            if line["round"] == 1:
                raise RuntimeError

    def pump():
        carried.desks = {name: carried.desk(name) for name in NAMES}  # a new process for each message
        carried.pump()

    waiting(monkeypatch, pump)
    with pytest.raises(RuntimeError):
        fedfm.run(carried.engine(**MODEL), carried.root / "run", progress=Stop())
    result = fedfm.resume(carried.root / "run", progress=fedfm.Progress())
    assert result["params_sha256"] == carried.local(**MODEL)["params_sha256"]
    assert [len(sums_left(carried, name)) for name in NAMES] == [1, 1]


def test_a_silo_that_sends_no_sums_trains_with_the_scale_of_the_others(carried, monkeypatch):
    carried.file("south").write_text(carried.file("south").read_text() + 'allow = ["mean", "scores"]\n')
    waiting(monkeypatch, carried.pump)
    result = fedfm.run(carried.engine(**MODEL), carried.root / "run", progress=fedfm.Progress())
    assert [text for text in result["warnings"] if text.startswith("south sent no sums of its rows (E_REFUSED)")]
    y = np.load(carried.root / "north" / "rows.npz")["y"]
    assert manifest(carried.root / "run")["chosen"]["target_means"] == pytest.approx([y.mean()], abs=30)
    assert result["excluded"] == []
    assert [line["round"] for line in carried.left("south") if line["handler"].startswith("train.")] == [1, 2]


def test_no_silo_sends_sums(tmp_path, monkeypatch):
    carried = federation(tmp_path, 'allow = ["mean"]\n')
    waiting(monkeypatch, carried.pump)
    with pytest.raises(RunError, match=r"0 of 2 .*set it to false, or set a fixed scale"):
        fedfm.run(carried.engine(**MODEL), tmp_path / "run", progress=fedfm.Progress())


def test_sums_are_not_sent_where_updates_are_hidden(carried):
    tables = carried.engine(**MODEL, privacy={"aggregator": "secagg"})
    with pytest.raises(InputError, match=r"secure aggregation would not hide the silos' sums: set it to false"):
        Experiment.from_dict(tables)


# --- a hostile server -------------------------------------------------------------------------------------------------


class Asked:
    """A silo's host, to which a server sends what it likes."""

    def __init__(self, carried):
        tables = carried.tables(**MODEL)
        tables["run"] = {"engine": "deployment", "seed": 3}
        config = {"experiment": experiment_text(Experiment.from_dict(tables)), "key": "k"}
        folder = client_stub.admit(config, {"silo": str(carried.file("north"))}, 1)
        self.new = lambda: of_folder(folder)[0]
        self.host, self.call = self.new(), 0

    def __call__(self, handler, **body):
        self.call += 1
        head, pieces = payload.encode({"round": 0, "call": self.call, "body": body})
        return payload.decode(*self.host.answer("north", handler, head, b"".join(pieces)), None)

    def hello(self, **more):
        return self(HELLO, classes=["value"], **more)


@pytest.fixture
def asked(carried):
    return Asked(carried)


@pytest.mark.parametrize(
    "keys",
    [
        {"target_means": [0.0]},
        {"target_means": [0.0], "target_scales": [0.0]},
        {"target_means": [0.0], "target_scales": [-1.0]},
        {"target_means": [0.0, 1.0], "target_scales": [1.0, 1.0]},
        {"target_means": ["0"], "target_scales": [1.0]},
        {**SCALE, "threshold": [0.5]},
        {},
        5,
    ],
)
def test_a_silo_takes_no_other_keys(keys, asked):
    assert "fault" not in asked.hello()
    assert asked.hello(keys=keys)["fault"]["code"] == "E_FIELD"
    assert asked("train.FedAvg_train", w=1.0)["fault"]["code"] in ("E_REFUSED", "E_FIELD")


def test_a_silo_trains_only_with_the_scale_and_keeps_it(asked, carried):
    assert "fault" not in asked.hello()
    w = asked.host.silos.population.client_model.params()
    refused = asked("train.FedAvg_train", w=w)["fault"]
    assert refused["code"] == "E_REFUSED"
    assert "have not come yet" in refused["reason"]
    assert "fault" not in asked.hello(**{KEYS: SCALE})
    other = asked.hello(**{KEYS: {**SCALE, "target_scales": [51.0]}})["fault"]
    assert (other["code"], other["reason"]) == (
        "E_REFUSED",
        "hello.keys differ from those at the beginning of this run",
    )
    asked.host = asked.new()
    assert "fault" not in asked("train.FedAvg_train", w=w)
    assert asked.host.silos.population.client_model.task.target_scales == (50.0,)


def test_scores_of_a_silo_have_no_sums_of_few_rows(asked):
    asked.hello()
    asked.hello(**{KEYS: SCALE})
    w = asked.host.silos.population.client_model.params()
    told = asked("scores.Evaluation_evaluate", w=w, part="test")["body"]
    assert len(told["moments"]) == 9
    assert "calibration" not in told


def test_a_silo_repeats_its_first_sums_although_its_rows_change(asked, carried):
    asked.hello()
    first = asked(ASKED)["body"]
    rows = np.load(carried.root / "north" / "rows.npz")
    np.savez(carried.root / "north" / "rows.npz", x=rows["x"], y=rows["y"] + 1)
    asked.host = asked.new()
    assert asked(ASKED)["body"] == first
    assert first[0] == 32


def test_an_experiment_that_needs_no_keys_takes_none(carried):
    carried.tables = lambda **changes: Carried.tables(carried, model={**MODEL["model"], "scale_targets": False})
    asked = Asked(carried)
    assert asked.hello(keys=SCALE)["fault"]["code"] == "E_FIELD"
