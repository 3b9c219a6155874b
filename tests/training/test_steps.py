"""Parts of a batch, clipping and schedules, against PyTorch's own and against the complete batch."""

import numpy as np
import pytest
import torch
from test_loop import Tiny, client
from torch.nn import functional

import fedfm
from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.models.wrap import wrap
from fedfm.training import SGD, Adam, loop
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client
from stopping import StopAfter, run_stopped

STEPS = 6  # 11 rows in batches of 4, two epochs


def by_torch(rounds, schedule=None, norm=None):
    """Parameters after so many rounds of two epochs, by PyTorch's optimiser, schedule and clipping."""
    net = Tiny().module
    optimiser = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.3)
    rate = schedule(optimiser) if schedule else None
    for _ in range(rounds):
        c = client(Tiny())
        for index in Job(c, Tiny().params(), SGD(batch_size=4, epochs=2)).orders():
            rows = c.data.train
            optimiser.zero_grad()
            functional.cross_entropy(net(rows.tensors["features"][index]), rows.labels[index]).backward()
            if norm:
                torch.nn.utils.clip_grad_norm_(net.parameters(), norm)
            optimiser.step()
            if rate:
                rate.step()
    return dict(net.named_parameters())


def by_loop(rounds, **settings):
    model = Tiny()
    w, local = model.params(), SGD(learning_rate=0.3, batch_size=4, epochs=2, **settings)
    for t in range(1, rounds + 1):
        c = client(model)
        c.span = ((t - 1) / rounds, t / rounds)
        w = loop.train([Job(c, w, local)])[0]
    return w


def same(w, expected):
    for name, tensor in w.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rounds", [1, 3])
def test_cosine_and_linear_are_torchs_over_all_rounds(rounds):
    total = rounds * STEPS
    cosine = by_torch(rounds, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=total))
    same(by_loop(rounds, schedule="cosine"), cosine)
    linear = by_torch(rounds, lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, total))
    same(by_loop(rounds, schedule="linear"), linear)


@pytest.mark.parametrize(
    ("rounds", "falls"), [(1, [3, 5]), (3, [9, 15])]
)  # from half and four fifths of 6 and 18 steps
def test_steps_are_torchs_falls_to_a_tenth(rounds, falls):
    by_falls = by_torch(rounds, lambda o: torch.optim.lr_scheduler.MultiStepLR(o, falls, gamma=0.1))
    same(by_loop(rounds, schedule="steps"), by_falls)


def test_the_warm_up_rises_and_then_the_schedule_falls():
    local = SGD(learning_rate=2.0, warmup=0.5, schedule="linear")
    rates = [local.rate(i / 8, (i + 1) / 8) for i in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 1.5, 1.0, 0.5])
    flat = SGD(learning_rate=2.0, warmup=0.25)
    assert [flat.rate(i / 8, (i + 1) / 8) for i in range(8)] == pytest.approx([1.0] + [2.0] * 7)
    by_steps = by_torch(1, lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: min(1.0, (i + 1) / 3)))
    same(by_loop(1, warmup=0.5), by_steps)


@pytest.mark.parametrize("norm", [0.05, 0.5, 100.0])
def test_clipping_is_torchs(norm):
    same(by_loop(2, max_grad_norm=norm), by_torch(2, norm=norm))


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_parts_of_a_batch_add_up_to_it(size):
    same(by_loop(2, micro_batch=size), by_torch(2))


def test_parts_weigh_by_their_tokens():
    """A language model's loss is a mean over tokens: rows of unequal length must not count alike."""
    spec = ModelSpec("nano-gpt2", weights="random", adaptation=AdaptationSpec("lora", rank=2))
    model = load_model(spec, classes=(), kind="passages")
    rng = np.random.default_rng(0)
    tokens = tuple(torch.from_numpy(rng.integers(1, 60, n)) for n in (3, 17, 5, 29, 2, 11, 7))
    rows, w, found, losses = Rows(tokens=tokens, pad=0), model.params(), [], []
    for size in (0, 1, 3):
        c = Client("c", ClientData(lambda: rows, Rows, Rows), model, {}, 1, trainer=train_client)
        found.append(loop.train([Job(c, w, SGD(learning_rate=0.5, batch_size=4, micro_batch=size))])[0])
        losses.append(c.metrics["loss"])
    moved = (found[0] - w).norm()
    assert moved > 1e-3
    for w_k in found[1:]:
        assert (w_k - found[0]).norm() < 1e-4 * moved
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-5)


def experiment(tmp_path, local, **model):
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).random((40, 6), np.float32), y=np.arange(40) % 2)
    return {
        "data": {"path": str(tmp_path / "d.npz"), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": "features"} | model,
        "method": {"name": "fedavg", "rounds": 4, "local": {"batch_size": 8} | local},
    }


def test_a_schedule_is_kept_by_a_resumed_run(tmp_path):
    tables = experiment(tmp_path, {"schedule": "cosine", "warmup": 0.25, "max_grad_norm": 0.5})
    whole = fedfm.run(tables, tmp_path / "whole")

    run_stopped(tables, tmp_path / "again", progress=StopAfter(2))
    again = fedfm.resume(tmp_path / "again")
    assert again["params_sha256"] == whole["params_sha256"]
    plain = fedfm.run(experiment(tmp_path, {}), tmp_path / "plain")
    assert plain["params_sha256"] != whole["params_sha256"]


@pytest.mark.parametrize(
    ("local", "says"),
    [
        ({"schedule": "sometimes"}, "schedule"),
        ({"warmup": 1.0}, "warmup"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"micro_batch": -1}, "micro_batch"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, local, says):
    with pytest.raises(InputError, match=rf"method\.local\.{says}"):
        fedfm.run(experiment(tmp_path, local), tmp_path / "run")


def test_dp_sgd_takes_none_of_them(tmp_path):
    tables = experiment(tmp_path, {"schedule": "linear"})
    tables["privacy"] = {
        "mechanism": "dp_sgd",
        "unit": "record",
        "clip_norm": 1.0,
        "delta": 1e-3,
        "target_epsilon": 4.0,
    }
    with pytest.raises(InputError, match="dp_sgd"):
        fedfm.run(tables, tmp_path / "run")


def test_micro_batches_need_a_loss_over_rows():
    spec = ModelSpec("preact-resnet-small", weights="random", adaptation=AdaptationSpec("full"))
    model = load_model(spec, classes=("a", "b"), kind="image")
    with pytest.raises(InputError, match="batch norm"):
        Adam(micro_batch=4).fits(model)


class Small(Tiny):
    """It runs out of memory with more than so many rows."""

    fits, seen = 3, 0

    def loss(self, batch):
        if len(batch["labels"]) > self.fits:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")
        self.seen = max(self.seen, len(batch["labels"]))
        return super().loss(batch)


@pytest.mark.proof
def test_out_of_memory_halves_the_batch_and_says_so():
    model, said = Small(), []
    c = client(model)
    c.log = said.append
    local = SGD(learning_rate=0.3, batch_size=8, epochs=2)
    with pytest.warns(RuntimeWarning, match="rows at once"):
        (w,) = loop.train([Job(c, model.params(), local)])
    (expected,) = loop.train([Job(client(Tiny()), Tiny().params(), local)])
    same(w, dict(expected.items()))
    assert said == ["out of memory: from here on 4 rows at once", "out of memory: from here on 2 rows at once"]
    assert model.seen == 2
    model.fits = 0
    with pytest.raises(torch.OutOfMemoryError), pytest.warns(RuntimeWarning, match="rows? at once"):
        loop.train([Job(client(model), model.params(), local)])


def test_out_of_memory_in_evaluation_too():
    def loss(module, batch):
        raise AssertionError("not called")

    class Net(torch.nn.Module):
        def forward(self, features):
            if len(features) > 5:
                raise torch.OutOfMemoryError("out of memory")
            return features

    model = wrap(Net(), loss, classes=("a", "b"))
    x = torch.eye(2).repeat(4, 1)
    with pytest.warns(RuntimeWarning, match="4 rows at once"):
        assert model.predict(Rows({"features": x})).equal(x)
