"""Side adapters by compiled loops: the numbers of autograd, and bits that are a client's own."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.models.adapters.side_adapter import STATES, of_states
from fedfm.training import SGD, Adam, AdamW, loop, scheduler, side_adapter
from fedfm.training.local_job import Job

OPTIMISERS = [
    SGD(learning_rate=0.1),
    SGD(learning_rate=0.05, momentum=0.9, weight_decay=0.01),
    Adam(learning_rate=0.01),
    AdamW(learning_rate=0.01, weight_decay=0.1),
]
SHAPES = [(2, 1, 8, 8), (3, 5, 64, 8), (2, 5, 24, 3), (1, 16, 32, 20), (2, 1, 192, 16)]  # L, P, d, r


def jobs(shape, sizes, local, *, classes=5, mu=0.0, corrected=False, seed=0):
    """Clients with one model, and weights none of which is zero."""
    rng = np.random.default_rng(seed)
    model = of_states(*shape, [str(i) for i in range(classes)])
    model.net.draw(seed)
    drawn = {n: t + 0.2 * torch.from_numpy(rng.normal(size=t.shape)).float() for n, t in model.params().items()}
    shared, out = Params(drawn), []
    for k, n in enumerate(sizes):
        states = torch.from_numpy(rng.normal(size=(n, *shape[:3]))).float()
        rows = Rows({STATES: states}, labels=torch.from_numpy(rng.integers(0, classes, n)))
        client = Client(f"c{k}", ClientData(lambda rows=rows: rows, Rows, Rows), model, {}, seed * 1000 + k)
        correction = Params({n: 0.01 * torch.ones_like(t) for n, t in shared.items()}) if corrected else None
        out.append(Job(client, shared, local, mu, correction))
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("classes", [2, 5, 17])
def test_one_gradient_is_autograd_s_in_double_precision(shape, classes):
    local = SGD(learning_rate=1.0, batch_size=13)
    (job,) = jobs(shape, [13], local, classes=classes)
    rows, net = job.client.data.train, job.client.model.net
    (trained,) = side_adapter.train([job])
    net.load_state_dict(dict(job.w.items()))
    net = net.double()
    loss = functional.cross_entropy(net(rows.tensors[STATES].double()), rows.labels)
    loss.backward()
    for name, parameter in net.named_parameters():
        found = (job.w[name] - trained[name]).double()
        scale = float(parameter.grad.abs().max())
        assert scale > 0
        torch.testing.assert_close(found, parameter.grad, rtol=2e-4, atol=2e-6 + 2e-5 * scale, msg=name)
    assert job.client.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize("local", OPTIMISERS, ids=repr)
@pytest.mark.parametrize(("mu", "corrected"), [(0.0, False), (0.5, True)])
def test_the_numbers_are_those_of_the_loop(local, mu, corrected):
    local = type(local)(**{**vars(local), "batch_size": 8, "epochs": 3})
    todo = jobs((3, 5, 24, 4), [20, 8, 3, 17], local, mu=mu, corrected=corrected)
    expected = loop.train(todo)
    losses = [job.client.metrics["loss"] for job in todo]
    assert scheduler.trainer_for(todo[0].client.model, local) is side_adapter.train
    for found, other, job, loss in zip(side_adapter.train(todo), expected, todo, losses, strict=True):
        apart = (found - other).norm() / (other - job.w).norm()
        assert apart < 2e-4 if isinstance(local, SGD) else 5e-3  # Adam divides small gradients by their size
        assert job.client.metrics["loss"] == pytest.approx(loss, rel=1e-4)


def test_rates_of_a_schedule_are_those_of_the_loop():
    local = SGD(learning_rate=0.1, momentum=0.5, schedule="steps", batch_size=8, epochs=3)
    todo = jobs((2, 5, 24, 4), [20, 8], local)
    for job in todo:
        job.client.span = (0.0, 1.0)
    assert scheduler.trainer_for(todo[0].client.model, local) is side_adapter.train
    constant = side_adapter.train(jobs((2, 5, 24, 4), [20, 8], SGD(**{**vars(local), "schedule": "constant"})))
    for found, expected, other, job in zip(side_adapter.train(todo), loop.train(todo), constant, todo, strict=True):
        assert (found - expected).norm() < 2e-4 * (expected - job.w).norm()
        assert (found - other).norm() > 0.1 * (expected - job.w).norm()


def test_a_client_s_bits_are_its_own():
    todo = jobs((2, 5, 24, 8), [20, 1, 33, 8], SGD(learning_rate=0.1, batch_size=7, epochs=2))
    alone = [side_adapter.train([job])[0].sha256() for job in todo]
    assert [w.sha256() for w in side_adapter.train(todo[::-1])][::-1] == alone
    turned = jobs((2, 5, 24, 8), [20, 1, 33, 8], SGD(learning_rate=0.1, batch_size=7, epochs=2))
    assert [w.sha256() for w in side_adapter.train(turned)] == alone


def test_rows_that_do_not_fit_are_refused():
    (job,) = jobs((2, 1, 8, 4), [4], SGD())
    job.client.data.train.labels[0] = 5
    with pytest.raises(ValueError, match="do not fit"):
        side_adapter.train([job])
    (empty,) = jobs((2, 1, 8, 4), [0], SGD())
    assert side_adapter.train([empty])[0] is empty.w
