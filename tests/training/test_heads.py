"""Heads by compiled loops: a client's bits are its own, and agree with a plain PyTorch loop within rounding."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fedfm.core import tasks
from fedfm.core.client import Client, ClientData, Terms
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.training import SGD, Adam, AdamW, Proximal, cached_head, heads
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client

NAMES = ("head.weight", "head.bias")
OPTIMISERS = [
    SGD(learning_rate=0.3),
    SGD(learning_rate=0.1, momentum=0.9),
    SGD(learning_rate=0.1, weight_decay=0.1),
    SGD(learning_rate=0.1, momentum=0.5, weight_decay=0.01),
    Adam(learning_rate=0.01),
    Adam(learning_rate=0.01, weight_decay=0.1),
    AdamW(learning_rate=0.01, weight_decay=0.1),
]


def model(d, c):
    return SimpleNamespace(
        names=NAMES, head=torch.nn.Linear(d, c), adaptation="head", task=tasks.find("classification")
    )


def draw(rng, c, d, scale=1.0):
    """Parameters of a head, in an order that is not the alphabet's."""
    shapes = {"head.weight": (c, d), "head.bias": (c,)}
    return Params({n: torch.from_numpy(rng.normal(size=s) * scale).float() for n, s in shapes.items()})


def jobs(local, sizes, d, c, *, mu=0.0, corrected=False, seed=0, one_start=True):
    rng = np.random.default_rng(seed)
    shared, net, out = draw(rng, c, d, 0.1), model(d, c), []
    for k, n in enumerate(sizes):
        x = torch.from_numpy(rng.normal(size=(n, d))).float()
        rows = Rows({"features": x}, labels=torch.from_numpy(rng.integers(0, c, n)))
        client = Client(
            f"c{k}", ClientData(lambda rows=rows: rows, Rows, Rows), net, {}, seed * 1000 + k, trainer=train_client
        )
        correction = draw(rng, c, d, 0.01) if corrected else None
        out.append(Job(client, shared if one_start else draw(rng, c, d, 0.1), local, Terms(mu, correction)))
    return out


@settings(max_examples=120, deadline=None)
@given(
    local=st.sampled_from(OPTIMISERS),
    batch=st.integers(1, 40),
    epochs=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 60), min_size=2, max_size=20),
    d=st.integers(1, 70),
    c=st.integers(2, 30),
    mu=st.sampled_from([0.0, 0.5]),
    corrected=st.booleans(),
    one_start=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_a_cohort_gives_each_client_the_bits_it_gets_alone(
    local, batch, epochs, sizes, d, c, mu, corrected, one_start, seed
):
    local = type(local)(**{**vars(local), "batch_size": batch, "epochs": epochs})
    todo = jobs(local, sizes, d, c, mu=mu, corrected=corrected, seed=seed, one_start=one_start)
    alone, losses = [], []
    for job in todo:
        alone += heads.train([job])
        losses.append(job.client.metrics["loss"])
    together = heads.train(todo)
    for job, a, b, loss in zip(todo, alone, together, losses, strict=True):
        assert a.sha256() == b.sha256()
        assert job.client.metrics["loss"] == loss


@pytest.mark.parametrize(("d", "c", "batch"), [(384, 77, 32), (192, 10, 10), (385, 77, 100), (31, 3, 7)])
@pytest.mark.parametrize("epochs", [1, 5])
def test_the_bits_hold_at_the_sizes_of_real_heads_and_for_every_chunk(d, c, batch, epochs):
    todo = jobs(SGD(learning_rate=0.1, batch_size=batch, epochs=epochs), [100, 3, 57, 100, 100, 1, 32, 99, 100], d, c)
    alone = [heads.train([job])[0].sha256() for job in todo]
    for width in (2, 3, 9):
        got = [p for i in range(0, 9, width) for p in heads.train(todo[i : i + width])]
        assert [p.sha256() for p in got] == alone
    assert [p.sha256() for p in heads.train(todo[::-1])] == alone[::-1]


def reference(job):
    """As anybody would write it: nn.Linear, torch.optim, cross_entropy."""
    rows, local = job.client.data.train, job.local
    net = torch.nn.Linear(*reversed(job.w["head.weight"].shape))
    net.load_state_dict({name.removeprefix("head."): tensor for name, tensor in job.w.items()})
    options = {"lr": local.learning_rate, "weight_decay": local.weight_decay}
    if isinstance(local, SGD):
        optimiser = torch.optim.SGD(net.parameters(), momentum=local.momentum, **options)
    else:
        optimiser = (torch.optim.Adam if isinstance(local, Adam) else torch.optim.AdamW)(net.parameters(), **options)
    losses = []
    for index in job.orders():
        loss = functional.cross_entropy(net(rows.tensors["features"][index]), rows.labels[index])
        optimiser.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.grad += job.terms.mu * (p - job.w[f"head.{name}"])
                if job.terms.correction is not None:
                    p.grad += job.terms.correction[f"head.{name}"]
        optimiser.step()
    return {f"head.{name}": p.detach() for name, p in net.named_parameters()}, float(np.mean(losses))


@pytest.mark.parametrize("local", OPTIMISERS, ids=repr)
@pytest.mark.parametrize(("mu", "corrected"), [(0.0, False), (0.5, False), (0.0, True), (0.5, True)])
def test_the_numbers_are_those_of_a_plain_loop(local, mu, corrected):
    local = type(local)(**{**vars(local), "batch_size": 8, "epochs": 3})
    todo = jobs(local, [20, 8, 3, 17], 12, 5, mu=mu, corrected=corrected)
    for job, got in zip(todo, heads.train(todo), strict=True):
        expected, loss = reference(job)
        assert tuple(got) == tuple(job.w)
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5)
        assert job.client.metrics["loss"] == pytest.approx(loss, rel=1e-5)


def test_clients_may_pull_with_weights_of_their_own():
    local = Proximal(learning_rate=0.1, batch_size=8)
    todo = [
        Job(j.client, j.w, j.local, Terms(mu))
        for j, mu in zip(jobs(local, [20, 20, 9], 6, 3, one_start=False), (0.1, 2.0, 0.5), strict=True)
    ]
    for job, got in zip(todo, heads.train(todo), strict=True):
        for name, tensor in reference(job)[0].items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5)


def test_rows_of_padding_change_nothing():
    """A batch of 3 rows in a batch size of 40 is the mean over 3 rows."""
    (job,) = jobs(SGD(learning_rate=0.5, batch_size=40), [3], 6, 4)
    (got,) = heads.train([job])
    expected, _ = reference(job)
    torch.testing.assert_close(got["head.weight"], expected["head.weight"], rtol=1e-5, atol=1e-6)


def test_received_parameters_are_not_overwritten():
    todo = jobs(SGD(batch_size=4), [9, 5], 3, 2)
    before, versions = todo[0].w.sha256(), [f._version for f in todo[0].w.flats.values()]
    heads.train(todo)
    assert todo[0].w.sha256() == before
    assert [f._version for f in todo[0].w.flats.values()] == versions


def test_a_client_without_rows_returns_what_it_was_sent():
    todo = jobs(SGD(batch_size=4), [0, 6], 3, 2)
    nothing, something = heads.train(todo)
    assert nothing.sha256() == todo[0].w.sha256()
    assert something.sha256() != todo[1].w.sha256()


def test_rows_without_labels_are_refused():
    (job,) = jobs(SGD(), [4], 3, 2)
    rows = Rows(job.client.data.train.tensors)
    client = Client("c", ClientData(lambda: rows, Rows, Rows), job.client.model, {}, 0, trainer=train_client)
    with pytest.raises(ValueError, match="labelled"):
        heads.train([Job(client, job.w, job.local)])


@pytest.mark.parametrize("label", [-1, 2, 1 << 40])
def test_labels_that_are_no_class_are_refused(label):
    (job,) = jobs(SGD(), [4], 3, 2)
    job.client.data.train.labels[1] = label
    with pytest.raises(ValueError, match="do not fit a head of 3x2"):
        heads.train([job])


def test_features_of_another_width_are_refused():
    (job,) = jobs(SGD(), [4], 3, 2)
    job.client.data.train.tensors["features"] = torch.zeros(4, 2)
    with pytest.raises(ValueError, match="do not fit"):
        heads.train([job])


def softmax_regression(x, y, orders, size, w, b, eta, decay):
    """SGD as in a textbook, in float64: (weight, bias, mean of the batches' losses)."""
    x, w, b, losses = x.astype(float), w.astype(float), b.astype(float), []
    for order in orders:
        for at in range(0, len(order), size):
            rows = order[at : at + size]
            z = x[rows] @ w.T + b
            p = np.exp(z - z.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            losses.append(-np.log(p[np.arange(len(rows)), y[rows]]).mean())
            p[np.arange(len(rows)), y[rows]] -= 1
            w, b = w - eta * (p.T @ x[rows] / len(rows) + decay * w), b - eta * (p.mean(0) + decay * b)
    return w, b, np.mean(losses)


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(1, 70),
    d=st.integers(1, 90),
    c=st.integers(1, 35),
    size=st.integers(1, 80),
    epochs=st.integers(1, 4),
    decay=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 10_000),
)
def test_both_ways_of_plain_sgd_are_the_textbooks(n, d, c, size, epochs, decay, seed):
    """On the weights and in the rows' span, whichever of the two would have been chosen."""
    local = SGD(learning_rate=0.2, batch_size=size, epochs=epochs, weight_decay=decay)
    (job,) = jobs(local, [n], d, c, seed=seed)
    rows = job.client.data.train
    x, y = rows.tensors["features"].numpy(), rows.labels.numpy()
    w, b = (job.w[name].numpy() for name in NAMES)
    expected = softmax_regression(x, y, job.epochs(), size, w, b, 0.2, decay)
    for in_span in (False, True):
        got, loss = heads._plain(job, x, y, NAMES, in_span)
        np.testing.assert_allclose(got["head.weight"].numpy(), expected[0], rtol=1e-5, atol=3e-6)
        np.testing.assert_allclose(got["head.bias"].numpy(), expected[1], rtol=1e-5, atol=3e-6)
        assert loss == pytest.approx(expected[2], rel=1e-5, abs=1e-6)


def test_the_span_is_taken_where_it_has_fewer_multiplications(monkeypatch):
    local = SGD(batch_size=10, epochs=5)
    assert heads.pays_in_span(local, 100, 77, 384)
    assert not heads.pays_in_span(local, 1000, 77, 384)  # more rows than features
    assert not heads.pays_in_span(SGD(batch_size=10), 100, 77, 384)  # one epoch
    assert not heads.pays_in_span(local, 36, 10, 128)  # too small to be worth the products before
    monkeypatch.setattr(heads, "_plain", lambda job, x, y, names, in_span: (job.w, in_span))
    for changes, taken in (({}, True), ({"mu": 0.1}, False), ({"corrected": True}, False)):
        (job,) = jobs(local, [100], 384, 77, **changes)
        heads.train([job])
        assert (job.client.metrics["loss"] is True) == taken
    for other in (SGD(epochs=5, momentum=0.9), Adam(epochs=5)):  # the change of the weights is not a sum of features
        (job,) = jobs(other, [100], 384, 77)
        heads.train([job])
        assert job.client.metrics["loss"] is not True


@pytest.mark.parametrize("way", ["weights", "span", "rule"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_stay_so(way, bad):
    """A server has to be able to refuse it."""
    (job,) = jobs(SGD(batch_size=8, epochs=2), [20], 12, 5)
    rows = job.client.data.train
    x, y = rows.tensors["features"].numpy().copy(), rows.labels.numpy()
    x[7, 3] = bad
    if way == "rule":
        got, loss = heads._by_rule(job, x, y, NAMES)
    else:
        got, loss = heads._plain(job, x, y, NAMES, way == "span")
    assert not got.is_finite()
    assert not np.isfinite(loss)


def test_logits_far_apart_overflow_nothing():
    (job,) = jobs(SGD(learning_rate=0.1, batch_size=4), [8], 6, 3)
    job.client.data.train.tensors["features"].mul_(1e4)
    (got,) = heads.train([job])
    expected, loss = reference(job)
    assert got.is_finite()
    torch.testing.assert_close(got["head.weight"], expected["head.weight"], rtol=1e-4, atol=1e-3)
    assert job.client.metrics["loss"] == pytest.approx(loss, rel=1e-4)


def test_compiled_loops_train_linear_heads_only():
    assert cached_head.applies(model(3, 2))
    other = {"task": tasks.find("language_modelling")}
    changes = ({"adaptation": "lora"}, other, {"head": torch.nn.ReLU()}, {"names": ("w",)})
    for change in changes:
        assert not cached_head.applies(SimpleNamespace(**{**vars(model(3, 2)), **change}))
