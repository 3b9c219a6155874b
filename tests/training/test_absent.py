"""Absent classes against gradients worked by hand, and against a model that never had them."""

import numpy as np
import pytest
import torch
from torch import nn

from fedfm.api import execute
from fedfm.core import tasks
from fedfm.core.client import Client, ClientData, Terms
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.wrap import wrap
from fedfm.training import SGD, Adam, Proximal, local_job, loop, scheduler
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client
from small import experiment

X = torch.tensor([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0]])
Y = torch.tensor([0, 2, 2])  # class 1 of three is absent


class Linear:
    """A linear model of three classes: logits x W^T, with cross-entropy as the loss."""

    task, adaptation, softmax, classes = tasks.find("classification"), "full", True, ("a", "b", "c")

    def __init__(self):
        self.module = nn.Linear(2, 3, bias=False)
        self.names = ("weight",)

    def params(self):
        return Params({"weight": self.module.weight})

    def load(self, w):
        with torch.no_grad():
            self.module.weight.copy_(w["weight"])

    def live(self):
        return {"weight": self.module.weight}

    def logits(self, batch):
        return self.module(batch["x"])

    def loss(self, batch):
        return nn.functional.cross_entropy(self.logits(batch), batch["labels"])

    def count_targets(self, batch):
        return len(batch["labels"])

    def train_mode(self): ...

    def eval_mode(self): ...


W = Params({"weight": torch.tensor([[0.3, -0.2], [0.8, 0.1], [-0.5, 0.4]])})


def trained(local, *, mu=0.0, correction=None, w=W):
    rows = Rows({"x": X}, labels=Y)
    client = Client("c", ClientData(lambda: rows, Rows, Rows), Linear(), {}, 0, trainer=train_client)
    return scheduler.train(Job(client, w, local, Terms(mu, correction)))


def gradient(w, fill):
    """The gradient (3, 2) of the mean cross-entropy if ``fill`` replaces the logit of class 1.

    It is p - y for every other class, and 0 for class 1.
    """
    z = X.numpy().astype(np.float64) @ w.numpy().astype(np.float64).T
    z[:, 1] = fill
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    error = p - np.eye(3)[Y.numpy()]
    error[:, 1] = 0  # ``fill`` does not depend on w
    return torch.from_numpy(error.T @ X.numpy() / 3).float()


@pytest.mark.parametrize(("absent", "fill"), [("zero", 0.0), ("exclude", -np.inf)])
def test_one_step_equals_the_hand_computed_one(absent, fill):
    got = trained(SGD(learning_rate=0.5, absent=absent))
    torch.testing.assert_close(got["weight"], W["weight"] - 0.5 * gradient(W["weight"], fill))
    assert torch.equal(got["weight"][1], W["weight"][1])
    kept = trained(SGD(learning_rate=0.5))
    assert not torch.equal(kept["weight"][1], W["weight"][1])


def test_a_pull_and_a_correction_are_added_as_ever():
    c, start = Params({"weight": torch.full((3, 2), 0.25)}), W["weight"]
    got = trained(Proximal(learning_rate=0.5, epochs=2, mu=0.1, absent="zero"), mu=0.3, correction=c)
    w = start
    for _ in range(2):
        w = w - 0.5 * (gradient(w, 0.0) + 0.3 * (w - start) + c["weight"])
    torch.testing.assert_close(got["weight"], w)


def test_exclude_is_a_model_without_those_classes():
    local = Adam(learning_rate=0.05, epochs=3, batch_size=2, absent="exclude")
    got = trained(local)["weight"]
    two = Linear()
    two.module, two.classes = nn.Linear(2, 2, bias=False), ("a", "c")
    rows = Rows({"x": X}, labels=torch.tensor([0, 1, 1]))
    client = Client("c", ClientData(lambda: rows, Rows, Rows), two, {}, 0, trainer=train_client)
    job = Job(client, Params({"weight": W["weight"][[0, 2]]}), Adam(learning_rate=0.05, epochs=3, batch_size=2))
    torch.testing.assert_close(got[[0, 2]], loop.train([job])[0]["weight"])


def test_a_vectorised_trainer_leaves_it_to_the_loop(tmp_path):
    """A head on features; each client has two classes. Weights and biases of the absent classes do not change."""
    local = {"learning_rate": 0.2, "absent": "zero", "epochs": 2}
    partition = {"name": "by_class", "classes_per_client": 2, "clients": 4}
    tables = experiment(tmp_path, data={"partition": partition}, method={"rounds": 1, "fraction": 0.2, "local": local})
    result = execute.run(tables, tmp_path / "run")
    run = execute.load_run(tmp_path / "run")
    (client,) = run.metrics()[1]["cohort"]
    counts = run.manifest["split"]["clients"][client]["train"]["by_class"]
    w = run.state(Params)
    assert [float(b) != 0 for b in w["head.bias"]] == [n > 0 for n in counts]
    assert sum(n > 0 for n in counts) == 2
    assert result["rounds"] == 1


@pytest.mark.parametrize("name", ["fedprox", "scaffold", "fedadam"])
def test_every_averaging_method_takes_it(tmp_path, name):
    method = {"name": name, "rounds": 2, "local": {"absent": "exclude", "epochs": 2}}
    keep = {**method, "local": {"epochs": 2}}
    data = {"partition": {"name": "by_class", "classes_per_client": 2, "clients": 4}}
    tables = [experiment(tmp_path, data=data, method=m) for m in (method, keep)]
    one, two = (execute.run(t, tmp_path / f"run{i}") for i, t in enumerate(tables))
    assert one["params_sha256"] != two["params_sha256"]
    assert one["excluded"] == []


def test_invalid_settings_are_refused(tmp_path):
    with pytest.raises(InputError, match=r'method.local.absent = "drop": expected "keep", "zero" or "exclude"'):
        execute.run(experiment(tmp_path, method={"local": {"absent": "drop"}}))
    text = tmp_path / "play.txt"
    text.write_text("to be or not to be, that is the question\n" * 400)
    tables = experiment(
        tmp_path,
        data={"path": str(text), "partition": {"clients": 2}},
        model={"name": "nano-gpt2", "weights": "random", "max_length": 16, "adaptation": {"name": "full"}},
        method={"local": {"absent": "zero"}, "rounds": 1},
    )
    with pytest.raises(InputError, match=r'absent = "zero" needs a classifier .* "language_modelling"'):
        execute.run(tables, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    own = wrap(nn.Linear(2, 3), lambda m, b: m(b["features"]).sum(), classes=("a", "b", "c"))
    with pytest.raises(InputError, match="needs a classifier with cross-entropy"):
        local_job.over_classes(own, SGD(absent="zero"))
