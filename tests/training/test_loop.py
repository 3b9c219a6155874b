"""The loop over one client's batches, against a loop written by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedfm.core.client import Client, ClientData, Terms
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.models.load import load_model
from fedfm.models.spec import ModelSpec
from fedfm.training import SGD, Adam, AdamW, heads, loop, scheduler
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client


class Tiny:
    """Two layers with dropout between them; the first bias is frozen."""

    task, adaptation = "classification", "full"

    def __init__(self, dropout=0.0):
        torch.manual_seed(5)
        self.module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3))
        self.module[0].bias.requires_grad_(False)
        self.names = tuple(n for n, p in self.module.named_parameters() if p.requires_grad)
        self.layout = self.params().layout
        self.eval_mode()

    def live(self):
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad}

    def params(self):
        return Params(self.live())

    def load(self, w):
        with torch.no_grad():
            for name, p in self.live().items():
                p.copy_(w[name])

    def loss(self, batch):
        return functional.cross_entropy(self.module(batch["features"]), batch["labels"])

    def count_targets(self, batch):
        return len(batch["labels"])

    def train_mode(self):
        self.module.train()

    def eval_mode(self):
        self.module.eval()


def client(model, n=11, seed=3):
    torch.manual_seed(seed)
    rows = Rows({"features": torch.randn(n, 4)}, labels=torch.randint(0, 3, (n,)))
    return Client(f"c{seed}", ClientData(lambda: rows, Rows, Rows), model, {}, seed, trainer=train_client)


def by_hand(job):
    net, local, rows = Tiny().module, job.local, job.client.data.train
    net.load_state_dict(job.w.state(), strict=False)
    parameters = {n: p for n, p in net.named_parameters() if p.requires_grad}
    options = {"lr": local.learning_rate, "weight_decay": local.weight_decay}
    match local:
        case SGD():
            optimiser = torch.optim.SGD(parameters.values(), momentum=local.momentum, **options)
        case AdamW():
            optimiser = torch.optim.AdamW(parameters.values(), **options)
        case _:
            optimiser = torch.optim.Adam(parameters.values(), **options)
    total = 0.0
    for index in job.orders():
        loss = functional.cross_entropy(net(rows.tensors["features"][index]), rows.labels[index])
        optimiser.zero_grad()
        loss.backward()
        with torch.no_grad():
            for name, p in parameters.items():
                p.grad += job.terms.mu * (p - job.w[name])
                if job.terms.correction is not None:
                    p.grad += job.terms.correction[name]
        optimiser.step()
        total += float(loss.detach()) * len(index)
    return parameters, total / (local.epochs * len(rows))


@pytest.mark.parametrize(
    "local",
    [
        SGD(learning_rate=0.2, batch_size=4, epochs=3),
        SGD(learning_rate=0.2, batch_size=4, epochs=2, momentum=0.9, weight_decay=0.1),
        Adam(learning_rate=0.01, batch_size=5, epochs=3, weight_decay=0.1),
        AdamW(learning_rate=0.01, batch_size=5, epochs=3, weight_decay=0.1),
    ],
    ids=repr,
)
@pytest.mark.parametrize(("mu", "corrected"), [(0.0, False), (0.7, False), (0.0, True)])
def test_the_loop_is_the_one_written_by_hand(local, mu, corrected):
    model = Tiny()
    w = model.params()
    correction = w.map(torch.ones_like) * 0.01 if corrected else None
    job = Job(client(model), w, local, Terms(mu, correction))
    (got,) = loop.train([job])
    expected, loss = by_hand(job)
    assert tuple(got) == tuple(w)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor.detach(), rtol=1e-5, atol=1e-6)
    assert job.client.metrics["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_result_depends_on_the_job_alone():
    """Not on whom the model trained before, nor on torch's global generator: dropout draws from the client's seed."""
    model = Tiny(dropout=0.5)
    w, local = model.params(), SGD(learning_rate=0.2, batch_size=4)
    first = loop.train([Job(client(model, seed=3), w, local)])[0]
    loop.train([Job(client(model, seed=4), w, local)])
    third = client(model, seed=3)
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    again = loop.train([Job(third, w, local)])[0]
    assert again.sha256() == first.sha256()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert loop.train([Job(client(Tiny(dropout=0.0), seed=3), w, local)])[0].sha256() != first.sha256()
    assert not model.module.training


def test_the_start_and_the_frozen_parameters_stay_as_they_are():
    model = Tiny()
    w, frozen = model.params(), model.module[0].bias.clone()
    before = w.sha256()
    (got,) = loop.train([Job(client(model), w, SGD(batch_size=4))])
    assert w.sha256() == before != got.sha256()
    assert torch.equal(model.module[0].bias, frozen)
    assert "0.bias" not in got


@pytest.mark.parametrize("local", [SGD(batch_size=4, momentum=0.9, weight_decay=0.1), AdamW(batch_size=4)], ids=repr)
def test_only_some_tensors_move_as_if_the_others_were_constants(local):
    model, head = Tiny(), ("3.weight", "3.bias")
    w = model.params()
    job = Job(client(model), w, local, Terms(0.5, w.map(torch.ones_like) * 0.01, head))
    (got,) = loop.train([job])
    net = Tiny().module
    net[0].requires_grad_(False)
    options = {"lr": local.learning_rate, "weight_decay": local.weight_decay}
    kind = torch.optim.AdamW if isinstance(local, AdamW) else torch.optim.SGD
    optimiser = kind(net[3].parameters(), **options, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    rows = job.client.data.train
    for index in job.orders():
        optimiser.zero_grad()
        functional.cross_entropy(net(rows.tensors["features"][index]), rows.labels[index]).backward()
        with torch.no_grad():
            for name, p in zip(head, net[3].parameters(), strict=True):
                p.grad += job.terms.mu * (p - w[name]) + 0.01
        optimiser.step()
    assert torch.equal(got["0.weight"], w["0.weight"])
    torch.testing.assert_close(got["3.weight"], net[3].weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got["3.bias"], net[3].bias.detach(), rtol=1e-5, atol=1e-6)
    assert all(p.requires_grad for p in model.live().values())
    assert not torch.equal(
        loop.train([Job(client(model), w, local)])[0]["0.weight"], w["0.weight"]
    )  # the next moves all


def test_the_trainer_of_a_full_head_leaves_partial_training_to_the_loop():
    model = load_model(ModelSpec("features"), classes=("a", "b", "c"), kind="features", feature_dim=4)
    assert scheduler.trainer_for(model, SGD()) is heads.train
    assert scheduler.trainer_for(model, SGD(), ("head.bias",)) is loop.train
    w = model.params()
    got = scheduler.train(Job(client(model), w, SGD(batch_size=4), Terms(only=("head.bias",))))
    assert torch.equal(got["head.weight"], w["head.weight"])
    assert not torch.equal(got["head.bias"], w["head.bias"])


def test_by_autograd_the_loop_trains_what_compiled_loops_could():
    model = load_model(ModelSpec("features"), classes=("a", "b", "c"), kind="features", feature_dim=4)
    job = Job(client(model), model.params(), SGD(learning_rate=0.5, batch_size=4))
    assert scheduler.compiles(model, job.local)
    assert not scheduler.compiles(model, SGD(warmup=0.1))
    compiled, (expected,) = scheduler.train(job), loop.train([job])
    with scheduler.by_autograd():
        assert scheduler.train(job).sha256() == expected.sha256()
    assert scheduler.train(job).sha256() == compiled.sha256() != expected.sha256()
    assert (compiled - expected).norm() < 1e-4 * (expected - job.w).norm()
