"""The personalised family and its baselines against numbers worked by hand."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import fedfm
from fedfm.aggregation.base import Aggregator
from fedfm.config.experiment import Experiment
from fedfm.core import tasks
from fedfm.core.client import Client, ClientData, on_client
from fedfm.core.federation import Federation
from fedfm.core.rows import Rows
from fedfm.engines.local.engine import LocalLink
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods.ditto import Ditto
from fedfm.methods.fedala import FedALA
from fedfm.methods.fedamp import FedAMP, squared_distances, weights
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.fedawa import FedAWA, softmax
from fedfm.methods.fedawa import step as awa_step
from fedfm.methods.fedper import FedPer
from fedfm.methods.fedrep import FedRep
from fedfm.methods.ldawa import LDAWA, scale
from fedfm.methods.local import LocalOnly
from fedfm.models.layers import body_and_head
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.models.wrap import wrap
from fedfm.runtime import predictions
from fedfm.runtime.client import Silos
from fedfm.runtime.evaluation import Evaluation
from fedfm.training import SGD, Proximal
from fedfm.training.personal import DittoOptimiser
from fedfm.training.scheduler import train_client
from small import checked, experiment, pictures, tiny_vit
from toy import LINKS, Toys, federation, run

# Full batches with learning rate 1 jump to the client's own mean.
JUMP = SGD(learning_rate=1.0, batch_size=8)
ROWS = {"a": [0.0], "b": [2.0, 2.0, 2.0]}


def scalar(params):
    return float(params["w"])


def scalars(models):
    return {client: scalar(w) for client, w in models.items()}


def own(fed, method, state):
    """Every client's own model, as the run's directory gets it."""
    from fedfm.core.client import each

    return fed.ask(Evaluation(method).reveal, w=each({c: method.params_for(state, c) for c in fed.clients}))


# --- Ditto ----------------------------------------------------------------------------------------------------------
def test_ditto_converges_to_its_closed_form(tmp_path):
    # Optima 0 and 2, one row each: the mean of both local models stays 1 = w. Each step of v on (v - a)^2/2 +
    # lambda/2 (v - 1)^2 shrinks its distance to v* = (a + lambda)/(1 + lambda) by 1 - eta (1 + lambda) = .8.
    method = Ditto(local=DittoOptimiser(learning_rate=0.1, epochs=5, batch_size=8, lambda_=1.0))
    fed = federation(method, {"a": [0.0], "b": [2.0]}, tmp_path)
    state = run(method, fed, 2)[-1]
    assert scalar(state) == pytest.approx(1)
    assert scalars(own(fed, method, state)) == pytest.approx({"a": 0.5 + 0.5 * 0.8**10, "b": 1.5 - 0.5 * 0.8**10})


def test_dittos_shared_model_is_that_of_fedavg(tmp_path):
    plain = SGD(learning_rate=0.3, batch_size=8)
    for fraction in (1.0, 0.5):
        ditto, fedavg = Ditto(local=plain, fraction=fraction), FedAvg(local=plain, fraction=fraction)
        states = [run(m, federation(m, ROWS, tmp_path / f"{m}"[:6] / str(fraction)), 3)[-1] for m in (ditto, fedavg)]
        assert scalar(states[0]) == scalar(states[1])


def test_ditto_takes_a_plain_optimiser_for_both_models():
    method = Ditto(local=SGD(learning_rate=0.3, epochs=4, momentum=0.9))
    assert method.local == DittoOptimiser(learning_rate=0.3, epochs=4, momentum=0.9)
    checked(method)
    assert predictions.personal(method)
    with pytest.raises(InputError, match=r'method\.local\.name: ditto takes "ditto"'):
        checked(Ditto(local=Proximal()))
    with pytest.raises(InputError, match=r"method\.local\.lambda = -1"):
        checked(Ditto(local=DittoOptimiser(lambda_=-1)))


# --- L-DAWA -----------------------------------------------------------------------------------------------------------
def test_ldawa_by_hand():
    w = Params({"x": torch.tensor([1.0, 0.0])})
    clients = [Params({"x": torch.tensor(x)}) for x in ([2.0, 0.0], [0.0, 3.0])]
    mean = sum(((scale(w_k, w, {"x"}) - w)["x"] for w_k in clients), torch.zeros(2)) / 2
    assert (w["x"] + mean).tolist() == [1, 0]


def test_ldawa_leaves_what_has_no_angle():
    w = Params({"B": torch.zeros(2, 1), "scale": torch.tensor(2.0), "mean": torch.tensor([1.0, 0.0])})
    w_k = Params({"B": torch.tensor([[3.0], [4.0]]), "scale": torch.tensor(-5.0), "mean": torch.tensor([0.0, 7.0])})
    found = scale(w_k, w, {"B", "scale"})  # "mean" is a running statistic
    assert found.sha256() == w_k.sha256()
    assert scale(w, w_k, {"B"}).sha256() == w.sha256()


def test_ldawa_turns_back_what_points_away(tmp_path):
    # From 1 the clients end at 3 and -1, with cosines 1 and -1: (3 + 1)/2, whatever their numbers of rows.
    method = LDAWA(local=JUMP)
    fed = federation(method, {"a": [3.0], "b": [-1.0, -1.0]}, tmp_path)
    assert [scalar(w) for w in run(method, fed, 1)] == [1, 2]
    assert {c.handler for c in fed.transcript.pending} == {"train.LDAWA_train"}  # the server needs the mean alone


# --- FedAWA -----------------------------------------------------------------------------------------------------------
def by_definition(w, tau, a):
    """One step of torch's own Adam on the vectors themselves."""
    logits = torch.tensor(a, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=1e-3, betas=(0.5, 0.999))
    lambda_ = torch.softmax(logits, 0)
    near = sum(p * (1 - functional.cosine_similarity(w, w + x, dim=0)) for p, x in zip(lambda_, tau, strict=True))
    mean = (lambda_[:, None] * tau).sum(0)
    (near + sum(p * (x - mean).norm() for p, x in zip(lambda_, tau, strict=True))).backward()
    optimiser.step()
    return logits.detach().numpy()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 6))
def test_fedawas_step_is_that_of_adam_on_its_objective(seed, K):
    rng = np.random.default_rng(seed)
    w, tau, a = rng.normal(size=9), rng.normal(size=(K, 9)), rng.uniform(0, 1, K)
    G = (x := np.vstack([w, tau])) @ x.T
    expected = by_definition(torch.from_numpy(w), torch.from_numpy(tau), a)
    np.testing.assert_allclose(awa_step(a, G, 1e-3), expected, atol=1e-9)
    assert not np.allclose(expected, a, atol=1e-4)


def test_fedawas_step_without_slopes():
    for tau in (np.zeros((3, 2)), np.ones((3, 2)), np.ones((1, 2))):  # none moved; all moved alike; one client
        G = (x := np.vstack([[1.0, 2.0], tau])) @ x.T
        a = np.full(len(tau), 1 / len(tau))
        np.testing.assert_allclose(awa_step(a, G, 1e-3), a, atol=1e-12)
    assert np.isfinite(awa_step(np.array([0.5, 0.5]), np.diag([0.0, 1.0, 1.0]), 1e-3)).all()  # from w = 0


def test_a_round_of_fedawa_takes_the_weights_before_the_step(tmp_path):
    # n_k/n = 1/4, 3/4; clients end at 0 and 2.
    method = FedAWA(local=JUMP)
    states = run(method, federation(method, ROWS, tmp_path), 2)
    lambda_ = softmax(np.array([0.25, 0.75]))
    assert scalar(states[1].w) == pytest.approx(2 * lambda_[1])
    np.testing.assert_allclose(
        np.abs(np.array([states[1].a[c] - x for c, x in (("a", 0.25), ("b", 0.75))])), 1e-3, 1e-4
    )
    assert scalar(states[2].w) == pytest.approx(2 * softmax(np.array([states[1].a["a"], states[1].a["b"]]))[1])


def test_fedawa_keeps_the_logits_of_the_absent(tmp_path):
    method = FedAWA(local=JUMP, fraction=0.5)
    states = run(method, federation(method, {**ROWS, "c": [1.0], "d": [4.0, 4.0]}, tmp_path), 4)
    for before, after in itertools.pairwise(states):
        assert set(before.a) <= set(after.a)
        assert len({c for c in after.a if after.a[c] != before.a.get(c)}) == 2  # half of the four clients took part


# --- FedAMP -----------------------------------------------------------------------------------------------------------
def test_fedamps_weights_by_hand():
    xi = weights(np.array([[0.0, 1.0], [1.0, 0.0]]), sigma=1.0, alpha=0.5)
    np.testing.assert_allclose(xi, [[0.8161, 0.1839], [0.1839, 0.8161]], atol=5e-5)
    np.testing.assert_allclose(xi @ [0, 1], [0.1839, 0.8161], atol=5e-5)


def test_fedamps_scale_is_the_median_squared_distance():
    d = np.array([[0.0, 1, 4], [1, 0, 9], [4, 9, 0]])
    others = np.exp(-d / 4) / 3 * (1 - np.eye(3))
    np.testing.assert_allclose(weights(d), others + np.diag(1 - others.sum(1)))
    d = np.array([[0.0, 0, 9], [0, 0, 9], [9, 9, 0]])  # two clients were never asked, so 9 is the only distance above 0
    np.testing.assert_allclose(weights(d)[0], [2 / 3 - np.exp(-1) / 3, 1 / 3, np.exp(-1) / 3])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-100, 100), min_size=2, max_size=2), min_size=1, max_size=7))
def test_fedamps_default_weights_are_means(points):
    x = np.array(points)
    xi = weights(squared_distances(x @ x.T))
    np.testing.assert_allclose(xi.sum(1), 1)
    assert (xi >= 0).all()
    assert (np.diag(xi) >= 1 / len(x) - 1e-12).all()


def test_two_rounds_of_fedamp(tmp_path):
    method = FedAMP(local=JUMP, mu=0.0, sigma=1.0, alpha=0.5)
    states = run(method, federation(method, {"a": [0.0], "b": [1.0]}, tmp_path, w=5.0), 2)
    assert scalars(states[1].u) == {"a": 5, "b": 5}
    assert scalars(states[1].w) == {"a": 0, "b": 1}
    assert scalars(method.start_models(states[2])) == pytest.approx({"a": 0.1839, "b": 0.8161}, abs=5e-5)
    np.testing.assert_allclose(method.arrays(states[2])["weights"][0], weights(1 - np.eye(2), 1.0, 0.5), atol=1e-6)


def test_fedamp_pulls_by_the_squared_distance(tmp_path):
    # Two steps of .5 from u towards a with mu = 1: v1 = (u + a)/2; v2 = v1 - .5 ((v1 - a) + (v1 - u)) = v1. From u = 5
    # the clients reach 2.5 and 3, whose squared distance is .25. Round 2 mixes them by xi = .5 e^-.25 and repeats this.
    local = SGD(learning_rate=0.5, batch_size=8, epochs=2)
    method = FedAMP(local=local, mu=1.0, sigma=1.0, alpha=0.5)
    states = run(method, federation(method, {"a": [0.0], "b": [1.0]}, tmp_path, w=5.0), 2)
    assert scalars(states[1].w) == pytest.approx({"a": 2.5, "b": 3.0})
    xi = 0.5 * math.exp(-0.25)
    assert scalars(states[2].w) == pytest.approx({"a": (2.5 + 0.5 * xi) / 2, "b": (3 - 0.5 * xi + 1) / 2})


def test_fedamp_hears_of_the_absent(tmp_path):
    method = FedAMP(local=JUMP, fraction=0.34, mu=0.0)
    fed = federation(method, {"a": [0.0], "b": [2.0], "c": [7.0]}, tmp_path)
    for before, after in itertools.pairwise(run(method, fed, 4)):
        came = [c for c in fed.clients if after.xi["xi"][0, fed.clients.index(c)].any()]
        assert len(came) == 1
        assert all(after.w[c] is before.w[c] and after.u[c] is before.u[c] for c in fed.clients if c not in came)
        row = after.xi["xi"][0, fed.clients.index(came[0])].double().numpy()
        assert (row > 0).all()
        assert scalar(after.u[came[0]]) == pytest.approx(row @ [scalar(before.w[c]) for c in fed.clients])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"alpha": 0.5}, "set method.sigma as well"),
        ({"sigma": 0.0}, r"method\.sigma = 0\.0"),
        ({"mu": -0.1}, r"method\.mu = -0\.1"),
        ({"fraction": 0.0}, r"method\.fraction"),
        ({"rounds": -1}, r"method\.rounds"),
    ],
)
def test_fedamp_refuses(keys, says):
    with pytest.raises(InputError, match=says):
        checked(FedAMP(**keys))


def test_fedamp_refuses_a_step_that_turns_a_models_own_weight_negative(tmp_path):
    method = FedAMP(sigma=1.0, alpha=0.6)
    checked(method)
    run(method, federation(method, ROWS, tmp_path), 1)  # 1 - .6
    with pytest.raises(InputError, match=r"method\.alpha = 0\.6: with 3 clients.*expected at most 0\.5"):
        run(method, federation(method, ROWS | {"c": [1.0]}, tmp_path / "3"), 0)


# --- FedALA -----------------------------------------------------------------------------------------------------------
def test_fedala_learns_its_mixture_in_the_second_round(tmp_path):
    # Round 1 as FedAvg's: clients end at 0 and 2, theta = 1.5. Round 2, client a: theta_hat = 1.5 W with slope 1.5 W,
    # so that W shrinks by 1 - eta 1.5^2 = .55 each pass; client b: theta_hat - 2 = -.5 W, W shrinks by 1 - .2/4 = .95.
    # After eleven passes the last ten losses deviate by less than 10, so that learning ends. theta stays 1.5.
    method = FedALA(local=JUMP, eta=0.2, threshold=10.0, share=1.0)
    fed = federation(method, ROWS, tmp_path)
    states = run(method, fed, 2)
    assert [scalar(w) for w in states] == pytest.approx([1, 1.5, 1.5])
    assert scalars(own(fed, method, states[2])) == {"a": 0, "b": 2}
    start = {"a": 1.5 * 0.55**11, "b": 2 - 0.5 * 0.95**11}
    assert scalars(kept(tmp_path, "start")) == pytest.approx(start, rel=1e-5)
    fed.begin(3)
    method.step(fed, states[2], 3)  # one pass
    start = {"a": 1.5 * 0.55**12, "b": 2 - 0.5 * 0.95**12}
    assert scalars(kept(tmp_path, "start")) == pytest.approx(start, rel=1e-5)


def kept(folder, key):
    """The value that each toy client keeps under this key."""
    from fedfm.runtime.client_memory import DiskMemory

    return {client: DiskMemory(folder, client, (999, 0))[key] for client in ROWS}


def test_fedala_learns_until_its_losses_settle(tmp_path):
    method = FedALA(local=JUMP, eta=0.2, share=1.0)  # threshold .1
    run(method, federation(method, ROWS, tmp_path), 2)
    for client, loss, shrinks in (("a", 1.5**2 / 2, 0.55), ("b", 0.5**2 / 2, 0.95)):
        losses = [loss]
        while len(losses) <= 10 or np.std(losses[-10:]) >= 0.1:
            losses.append(losses[-1] * shrinks**2)
        assert scalar(kept(tmp_path, "W")[client]) == pytest.approx(shrinks ** len(losses), rel=1e-5)
    assert len(losses) == 11  # client b; client a needs one more, because its second loss is .34


def test_two_steps_of_fedala_entry_by_entry():
    """Compared with the formulas written out for a linear softmax of 4 features and 3 classes."""
    draw = torch.Generator().manual_seed(3)
    rows = Rows({"features": torch.randn(11, 4, generator=draw)}, labels=torch.arange(11) % 3)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model = wrap(net, lambda m, b: functional.cross_entropy(m(b["features"]), b["labels"]), head="2")
    random = lambda: Params({n: torch.randn(t.shape, generator=draw) for n, t in model.params().items()})  # noqa: E731
    theta_i, theta, top = random(), random(), ("2.weight", "2.bias")
    W = {name: torch.rand(theta[name].shape, generator=draw) for name in top}
    client = Client(
        "a",
        ClientData(lambda: rows, Rows, Rows),
        model,
        {"theta": theta_i, "W": Params(W)},
        seed=1,
        trainer=train_client,
    )
    method = FedALA(local=SGD(batch_size=64), eta=0.7, share=1.0)
    hidden = torch.tanh(rows.tensors["features"] @ theta["0.weight"].T + theta["0.bias"])  # theta has the body
    onehot = functional.one_hot(rows.labels, 3).float()
    for _ in range(2):
        found, passes = method.aggregate(client, theta)
        assert passes == 1
        hat = {n: theta_i[n] + (theta[n] - theta_i[n]) * W[n] for n in top}
        error = (torch.softmax(hidden @ hat["2.weight"].T + hat["2.bias"], 1) - onehot) / 11
        slope = {"2.weight": error.T @ hidden, "2.bias": error.sum(0)}
        W = {n: (W[n] - 0.7 * slope[n] * (theta[n] - theta_i[n])).clamp(0, 1) for n in top}
        for n in top:
            torch.testing.assert_close(client.memory["W"][n], W[n])
            torch.testing.assert_close(found[n], theta_i[n] + (theta[n] - theta_i[n]) * W[n])
        assert torch.equal(found["0.weight"], theta["0.weight"])
        assert torch.equal(found["0.bias"], theta["0.bias"])
    assert any(((x == 0) | (x == 1)).any() for x in W.values())  # some entries were clipped


def test_fedala_stops_where_w_swings_for_ever(tmp_path, monkeypatch):
    # Here W converges, but so slowly that the threshold is not met. The largest number of passes ends the loop.
    monkeypatch.setattr("fedfm.methods.fedala.MOST", 14)
    method = FedALA(local=JUMP, eta=0.01, threshold=1e-12, share=1.0)
    run(method, federation(method, ROWS, tmp_path), 2)
    assert scalar(kept(tmp_path, "W")["a"]) == pytest.approx((1 - 0.01 * 1.5**2) ** 14, rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"p": 0}, r"method\.p = 0"),
        ({"eta": 0.0}, r"method\.eta"),
        ({"share": 1.5}, r"method\.share"),
        ({"threshold": 0.0}, r"method\.threshold"),
        ({"local": DittoOptimiser()}, "its own model"),
    ],
)
def test_fedala_refuses(keys, says):
    with pytest.raises(InputError, match=says):
        checked(FedALA(**keys))


def test_fedala_refuses_more_layers_than_there_are(tmp_path):
    method = FedALA(p=2)
    with pytest.raises(InputError, match=r"method\.p = 2: the model has 1 trained layers"):
        run(method, federation(method, ROWS, tmp_path), 0)


# --- FedPer, FedRep ---------------------------------------------------------------------------------------------------
class Sum:
    """A body b and a head h, both a number: the loss of a row a is (b + h - a)^2 / 2."""

    task, classes, kernels, adaptation = tasks.find("regression"), (), "exact", "full"
    names, parts, spec = ("body.b", "head.h"), SimpleNamespace(head="head", blocks=()), SimpleNamespace()

    def __init__(self):
        b, h = (nn.ParameterDict({name: nn.Parameter(torch.zeros(1))}) for name in "bh")
        self.module = nn.ModuleDict({"body": b, "head": h})
        self.layout = self.params().layout

    def live(self):
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad}

    def params(self):
        return Params(dict(self.module.named_parameters()))

    def load(self, w):
        with torch.no_grad():
            for name, p in self.module.named_parameters():
                p.copy_(w[name])

    def loss(self, batch):
        b, h = self.module.parameters()
        return ((b + h - batch["a"]) ** 2 / 2).mean()

    def evaluate(self, rows):
        return {name: float(x) for name, x in self.params().items()}

    def train_mode(self): ...

    def eval_mode(self): ...


class Sums(Toys):
    def __init__(self, rows):
        super().__init__(rows)
        self.model = self.client_model = Sum()


def sums(method, rows, folder):
    """A federation of such models on the local engine."""
    population = Sums(rows)
    LINKS.append(LocalLink(Silos(method, Aggregator(), population, memory=folder)))
    return Federation(LINKS[-1], model=population.model, aggregator=Aggregator())


def pair(w):
    return [float(w["body.b"]), float(w["head.h"])]


TWO = {"a": [4.0], "b": [8.0, 8.0, 8.0]}
QUARTER = SGD(learning_rate=0.25, batch_size=8)


def test_two_rounds_of_fedper(tmp_path):
    # Round 1: body and head move from 0 by .25 (a - b - h), to 1 and 1 at client a, and to 2 and 2 at client b. The
    # body becomes (1 + 3 2)/4 = 1.75. Round 2 adds .25 1.25 = .3125 and .25 4.25 = 1.0625, so that the body becomes
    # (2.0625 + 3 2.8125)/4 = 2.625.
    method = FedPer(local=QUARTER)
    fed = sums(method, TWO, tmp_path)
    states = run(method, fed, 2)
    assert [pair(s.w) for s in states] == [[0, 0], [1.75, 0], [2.625, 0]]  # the server's head keeps its first value
    models = own(fed, method, states[2])
    assert {c: pair(w) for c, w in models.items()} == {"a": [2.0625, 1.3125], "b": [2.8125, 3.0625]}
    started = fed.ask(Evaluation(method).evaluate_start, w=method.start_models(states[2])[""], part="test")
    assert {c: list(m.values()) for c, m in started.items()} == {"a": [1.75, 1], "b": [1.75, 2]}


def test_fedpers_heads_do_not_travel(tmp_path):
    method = FedPer(local=QUARTER)
    fed = sums(method, TWO, tmp_path)
    run(method, fed, 2)
    sent = {(c.round, c.sender): c.nbytes for c in fed.transcript.pending}
    assert sent[2, "server"] < sent[1, "server"]  # the head's first value is sent once
    fedavg = FedAvg(local=QUARTER)
    whole = sums(fedavg, TWO, tmp_path / "whole")
    run(fedavg, whole, 1)
    (update,) = {c.nbytes for c in whole.transcript.pending if c.sender == "a"}
    assert sent[1, "a"] == sent[2, "a"] < update  # clients send no head


def test_a_client_of_fedper_that_was_absent_begins_with_the_first_head(tmp_path):
    method = FedPer(local=QUARTER, fraction=0.5)
    fed = sums(method, TWO, tmp_path)
    states = run(method, fed, 6)
    for before, after in itertools.pairwise(states):
        assert set(before.begun) <= set(after.begun)
    assert states[1].begun in (("a",), ("b",))
    assert states[-1].begun == ("a", "b")
    first = next(t for t, s in enumerate(states) if len(s.begun) == 2)  # the first round of the second client
    (late,) = set(states[first].begun) - set(states[first - 1].begun)
    target, body = TWO[late][0], pair(states[first - 1].w)[0]
    assert pair(states[first].w)[0] == pytest.approx(body + 0.25 * (target - body))  # its head starts at 0


def test_a_round_of_fedrep(tmp_path):
    # First the head, with a fixed body: .25 4 = 1, then + .25 3 = 1.75 (2 and 3.5 at client b). Then the body: .25 2.25
    # and .25 4.5, whose mean has equal weights.
    method = FedRep(local=QUARTER, head_epochs=2)
    fed = sums(method, TWO, tmp_path)
    state = run(method, fed, 1)[1]
    assert pair(state.w) == [(0.5625 + 1.125) / 2, 0]
    models = own(fed, method, state)
    assert {c: pair(w) for c, w in models.items()} == {"a": [0.5625, 1.75], "b": [1.125, 3.5]}


@pytest.mark.parametrize("cls", [FedPer, FedRep])
def test_a_head_alone_is_refused(cls, tmp_path):
    tables = experiment(tmp_path, method={"name": cls.__name__.lower()})
    with pytest.raises(InputError, match=r'adaptation\.name = "head": method "fed\w+" takes .*"full".*"lora".*"top_l'):
        Experiment.from_dict(tables)
    tables["model"]["adaptation"] = {"name": "full"}  # of feature vectors that is a head, too
    with pytest.raises(InputError, match=r"no part of this model's body is trained.*full, lora or top_layers"):
        fedfm.run(tables, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_head_is_refused(tmp_path):
    method = FedPer()
    with pytest.raises(InputError, match="no part of this model's head is trained"):
        run(method, federation(method, ROWS, tmp_path), 0)


@pytest.mark.parametrize("adaptation", ["full", "lora", "ffa_lora", "top_layers"])
def test_the_head_of_a_classifier(adaptation, tmp_path):
    spec = ModelSpec(str(tiny_vit(tmp_path)), adaptation=AdaptationSpec(adaptation, rank=2))
    model = load_model(spec, classes=("a", "b", "c"), kind="image")
    body, head = body_and_head(model)
    assert sorted(model.params()[name].shape for name in head) == [(3,), (3, 8)]
    assert body
    assert {*body, *head} == set(model.names)
    assert not any("classifier" in name for name in body)


def test_fedrep_refuses():
    with pytest.raises(InputError, match=r"method\.head_epochs = 0"):
        checked(FedRep(head_epochs=0))


# --- all of them ------------------------------------------------------------------------------------------------------
FAMILY = (FedAMP, FedALA, FedAWA, LDAWA, Ditto)


@pytest.mark.parametrize("cls", FAMILY)
def test_one_client_trains_alone(cls, tmp_path):
    local = SGD(learning_rate=0.5, batch_size=8)
    method = cls(local=local, **({"mu": 0.0} if cls is FedAMP else {}))
    fed = federation(method, {"a": [3.0]}, tmp_path)
    state = run(method, fed, 3)[-1]  # from 1 half-way to 3 each round
    assert scalar(method.params_for(state, "a")) == pytest.approx(3 - 2 * 0.5**3)
    if cls is FedALA:
        assert scalar(own(fed, method, state)["a"]) == pytest.approx(3 - 2 * 0.5**3)


@pytest.mark.sample("fedala", "ditto", "fedrep")
@pytest.mark.parametrize("name", ["fedamp", "fedala", "fedawa", "ldawa", "ditto", "fedper", "fedrep"])
def test_lora_with_absent_clients(name, tmp_path):
    tables = experiment(tmp_path, method={"name": name, "rounds": 2, "local": {"learning_rate": 0.1, "batch_size": 16}})
    tables["data"] = {"path": str(pictures(tmp_path, 80)), "partition": {"name": "iid", "clients": 3}}
    tables["model"] = {"name": str(tiny_vit(tmp_path)), "adaptation": {"name": "lora", "rank": 2}}
    if name == "fedrep":
        tables["method"]["head_epochs"] = 2
    result = fedfm.run(tables, tmp_path / "run")  # a round asks one of three
    assert result["excluded"] == []
    assert len(result["client_accuracy"]) == 3
    personal = name not in ("fedawa", "ldawa")
    assert (tmp_path / "run" / "clients").exists() == personal
    assert ("server_accuracy" in result["details"]) == ("server_loss" in result["details"]) == personal
    for folder in (tmp_path / "run" / "clients").glob("*/adapter"):
        assert (folder / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("name", ["ditto", "fedala"])
def test_a_foundation_model_is_mixed_into_one_model_for_all(name, tmp_path):
    tables = experiment(tmp_path, method={"name": "fedbaf", "foundation": "x", "base": {"name": name}})
    with pytest.raises(InputError, match=r"method\.base"):
        Experiment.from_dict(tables)


@pytest.mark.parametrize("name", ["ditto", "local"])
def test_a_client_with_another_kind_of_model_does_not_stop_the_run(tmp_path, monkeypatch, name):
    cls, half = {"ditto": (Evaluation, "reveal"), "local": (LocalOnly, "train_alone")}[name]
    honest = getattr(cls, half)

    def lie(self, client, w):
        return Params({"other": torch.zeros(2)}) if client.id == "client-01" else honest(self, client, w)

    lie.__name__ = half
    lie.__annotations__ = honest.__annotations__ | {"return": Params}
    on_client(kind=honest.kind)(lie)
    monkeypatch.setattr(cls, half, lie)
    tables = experiment(tmp_path)
    tables["method"] = {"name": name, "rounds": 2, "local": {"learning_rate": 0.1}}
    result = fedfm.run(tables, tmp_path / "run")
    assert result["accuracy"] is not None
    assert result["global_accuracy"] is not None
    kept = {path.name for path in (tmp_path / "run" / "clients").iterdir()}
    assert ("client-01" in kept) == (name == "local")  # local: its last valid model
    if name == "local":
        assert {(e["client"], e["code"]) for e in result["excluded"]} == {("client-01", "E_TENSORS")}
