"""Membership inference on FedMS's experts and FedPGP's prompts, against scikit-learn's AUC."""

import numpy as np
import pytest
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score

import fedfm
from fedfm.audits.audit import perform
from fedfm.models.adapter_reading import load_adapter
from fedfm.runtime.population import populate
from fedfm.runtime.predictions import logits
from fedfm.runtime.run_directory import Run
from tiny_clip import save

LORA = {"name": "lora", "rank": 8}
FEDMS = {"name": "fedms", "global_rounds": 1, "local_rounds": 3, "queue": 1, "threshold": 2.0}


def run(folder, epochs, shuffled, method=None, adaptation=None):
    save("vtde", folder / "model")
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (180, 16, 16, 3)).astype(np.uint8), rng.integers(0, 3, 180)
    if not shuffled:
        x = np.broadcast_to(80 * y[:, None, None, None], x.shape).astype(np.uint8)
    split = np.array(["train", "test"] * 90)
    np.savez(folder / "rows.npz", x=x, y=y, split=split, classes=np.array(["fox", "small_dog", "bird"]))
    local = {"name": "adamw", "learning_rate": 0.02, "epochs": epochs, "batch_size": 8}
    tables = {
        "data": {"path": str(folder / "rows.npz"), "partition": {"name": "iid", "clients": 3}},
        "model": {
            "name": str(folder / "model"),
            "task": "zero_shot",
            "adaptation": adaptation or {"name": "lora", "rank": 8},
        },
        "method": (method or FEDMS) | {"local": local},
    }
    fedfm.run(tables, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def memorised(tmp_path_factory):
    """Labels that have nothing to do with the pictures: only who remembers the rows has a low loss on them."""
    return run(tmp_path_factory.mktemp("memorised"), 10, shuffled=True)


def by_scikit_learn(path):
    """The mean AUC of the clients' own models, weighted by their training rows."""
    experiment = Run.open(path).experiment
    population = populate(experiment)
    aucs, sizes = [], []
    for client in population.clients:
        data = population.data(client)
        w = load_adapter(population.model, Run.open(path).adapter(client))
        losses = [
            F.cross_entropy(logits(experiment.method, population.model, w, rows), rows.labels, reduction="none").numpy()
            for rows in (data.train, data.test)
        ]
        truth = np.repeat([1, 0], [len(x) for x in losses])
        aucs.append(roc_auc_score(truth, -np.concatenate(losses)))
        sizes.append(len(data.train))
    return np.average(aucs, weights=sizes)


@pytest.mark.proof
def test_memorised_rows_leak_and_the_auc_is_that_of_scikit_learn(memorised):
    found = {f.name: f for f in perform(memorised, ["expert_membership"])}
    own = found["own_mixture_membership"]
    assert own.verdict == "leaks"
    assert own.estimate == pytest.approx(by_scikit_learn(memorised), abs=1e-9)
    assert own.low < own.estimate < own.high
    assert found["global_expert_membership"].estimate < own.estimate


@pytest.mark.proof
def test_rows_that_are_all_alike_disclose_nobody(tmp_path):
    found = {f.name: f for f in perform(run(tmp_path, 1, shuffled=False), ["expert_membership"])}
    assert {f.verdict for f in found.values()} <= {"holds", "inconclusive"}


@pytest.mark.proof
def test_prompts_of_clients_are_attacked_too(tmp_path):
    method = {"name": "fedpgp", "rounds": 3, "rank": 8, "mu": 0.0}
    path = run(tmp_path, 10, True, method, {"name": "prompt", "tokens": 8})
    found = {f.name: f for f in perform(path, ["expert_membership"])}
    own = found["own_mixture_membership"]
    assert own.detail["clients"] == 3
    assert own.estimate == pytest.approx(by_scikit_learn(path), abs=1e-9)
    assert found["global_expert_membership"].estimate < own.estimate
