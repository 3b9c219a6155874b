"""Clients without a model take part in a round, on every engine; the server alone loads the experiment's."""

import json

import numpy as np
import pytest

from fedfm.config.experiment import Experiment
from fedfm.errors import InputError
from fedfm.runtime.population import populate
from processes import experiment, fedfm, here, same

METHOD = 'name = "modelless:MeanPictures"'


@pytest.fixture(scope="module")
def locally(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modelless")
    exp = experiment(folder, method=METHOD, data="")
    return exp, here("run", exp, "--out", folder / "local")


@pytest.mark.proof
def test_the_head_is_made_of_what_clients_without_a_model_sent(locally, monkeypatch):
    exp, result = locally
    monkeypatch.syspath_prepend(str(__import__("pathlib").Path(__file__).parent))
    population = populate(Experiment.load(exp))
    assert population.client_model is None
    table, clients = population.federated.table, population.federated.clients
    train = np.concatenate([rows.train for rows in clients.values()])
    means = [table.inputs[train[table.labels[train] == c]].astype(float).mean(0) for c in range(len(table.classes))]
    x = population.model.features(population.model.prepare(table, population.federated.test)).numpy()
    pictures = np.round(means).astype(np.uint8)
    looked_at = table.take(population.federated.test[: len(means)])
    object.__setattr__(looked_at, "inputs", pictures)
    head = population.model.features(population.model.prepare(looked_at, range(len(means)))).numpy()
    nearest = ((x[:, None] - head[None]) ** 2).sum(2).argmin(1)
    accuracy = (nearest == table.labels[population.federated.test]).mean()
    assert result["global_accuracy"] == pytest.approx(accuracy, abs=1e-9)
    assert accuracy > 0.3  # a tenth is guessing
    assert set(result["client_accuracy"].values()) == {None}  # nobody can be asked for scores


@pytest.mark.proof
def test_the_same_bits_with_workers_and_over_the_wire(locally, tmp_path):
    exp, result = locally
    for i, setting in enumerate(("run.workers=2", "run.wire=true")):
        same(here("run", exp, "--out", tmp_path / str(i), "--set", setting), result)


@pytest.mark.release
def test_in_a_simulation(locally, tmp_path):
    exp, result = locally
    same(fedfm("run", exp, "--out", tmp_path / "run", "--engine", "simulation"), result)


@pytest.mark.release
@pytest.mark.deployment
def test_deployed(locally, tmp_path):
    exp, result = locally
    same(here("run", exp, "--out", tmp_path / "run", "--engine", "deployment"), result)
    told = [p.read_text() for p in (tmp_path / "run" / "private" / "deployment").rglob("site.json")]
    assert told
    for text in told:
        assert "nano-vit" not in json.loads(text)["experiment"]


def test_settings_that_need_a_model_at_the_clients_are_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(__import__("pathlib").Path(__file__).parent))
    exp = experiment(tmp_path, method=METHOD, run='[attack]\nname = "sign_flip"\nfraction = 0.5')
    with pytest.raises(InputError, match=r"clients of method .* have no model"):
        Experiment.load(exp)
