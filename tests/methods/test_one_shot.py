"""The one-round baselines against numbers worked by hand, on features of two dimensions and three classes."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedfm
from fedfm.aggregation.base import Aggregator
from fedfm.core.client import Client, ClientData
from fedfm.core.federation import Federation
from fedfm.core.rows import Rows
from fedfm.engines.local.engine import LocalLink
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods import _one_shot as shared
from fedfm.methods.average import Average
from fedfm.methods.ccvr import CCVR, draw, pool
from fedfm.methods.dsfl import DSFL, largest
from fedfm.methods.ensemble import Ensemble
from fedfm.methods.fedbe import FedBE, gaussian, sample
from fedfm.methods.fedfed import FedFed, Labelled, others, sensitive
from fedfm.methods.fedkt import FedKT, consistent_votes, majority
from fedfm.methods.fedncm import FedNCM, nearest_mean
from fedfm.methods.kd import KD, distillation
from fedfm.models.load import load_model
from fedfm.models.spec import ModelSpec
from fedfm.runtime.client import Silos
from fedfm.training import SGD
from fedfm.training.fit_head import NOBODY, HeadSpec, fit_rows
from fedfm.training.local_job import mini_batches
from fedfm.training.scheduler import train_client
from small import checked, experiment, features
from toy import LINKS, run

CLASSES = ("ant", "bee", "cow")
# a: two ants and a bee; b: three bees. Nobody has a cow.
ROWS = {
    "a": ([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]], [0, 0, 1]),
    "b": ([[0.0, 4.0], [1.0, 3.0], [-1.0, 3.0]], [1, 1, 1]),
}


def tensor(x):
    return torch.tensor(x, dtype=torch.float32)


def head(w, b):
    return Params({"head.weight": tensor(w), "head.bias": tensor(b)})


class Silo:
    """Clients by name, with their features and labels."""

    def __init__(self, rows, dim):
        self.model = load_model(ModelSpec("features"), classes=CLASSES, kind="features", feature_dim=dim)
        self.client_model = self.model
        self._rows = {c: Rows({"features": tensor(x)}, labels=torch.tensor(y)) for c, (x, y) in rows.items()}

    @property
    def clients(self):
        return sorted(self._rows)

    def data(self, client):
        return ClientData(lambda: self._rows[client], Rows, Rows)


def federation(method, tmp_path, rows=ROWS):
    silos = Silos(method, Aggregator(), Silo(rows, len(next(iter(rows.values()))[0][0])), memory=tmp_path)
    LINKS.append(LocalLink(silos))
    return Federation(LINKS[-1], model=silos.population.model, aggregator=Aggregator())


def after(method, tmp_path, rounds=1, rows=ROWS):
    return run(method, federation(method, tmp_path, rows), rounds)[-1]


def random_rows(seed=0, clients=3, n=12, dim=3):
    rng = np.random.default_rng(seed)
    return {
        f"c{k}": (rng.normal(size=(n + k, dim)).round(3).tolist(), rng.integers(0, 3, n + k).tolist())
        for k in range(clients)
    }


# --- what they share --------------------------------------------------------------------------------------------------


def test_heads_as_one_vector_come_back_in_order():
    heads = [head([[k, 0.0], [0.0, k], [1.0, 1.0]], [k, 0.0, NOBODY]) for k in range(12)]
    back = list(shared.each_head(shared.as_heads(*heads)))
    assert [float(b[0]) for _, b in back] == list(range(12))
    assert all(torch.equal(w, h["head.weight"]) for (w, _), h in zip(back, heads, strict=True))


def test_an_unseen_class_counts_as_zero_where_heads_are_averaged():
    w = shared.zeros_for_unseen(head([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]], [-5.0, 6.0, NOBODY]))
    assert w["head.bias"].tolist() == [-5.0, 6.0, 0.0]
    assert w["head.weight"].tolist() == [[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]


def test_mini_batches_visit_every_row_once_an_epoch():
    batches = [*map(torch.from_numpy, mini_batches(7, 3, 2, seed=1))]
    assert [len(b) for b in batches] == [3, 3, 1, 3, 3, 1]
    epochs = [torch.cat(batches[:3]), torch.cat(batches[3:])]
    assert [sorted(e.tolist()) for e in epochs] == [list(range(7))] * 2
    assert epochs[0].tolist() != epochs[1].tolist()


@pytest.mark.parametrize("method", [Ensemble, Average, FedBE, FedNCM, KD, FedKT])
def test_one_shot_methods_refuse_other_numbers_of_rounds(method):
    checked(method(rounds=0))
    with pytest.raises(InputError, match="takes one round"):
        checked(method(rounds=2))


@pytest.mark.parametrize(
    "method",
    [
        Ensemble(combine="vote"),
        FedNCM(distance="l1"),
        CCVR(covariance="spherical"),
        CCVR(virtual=0),
        FedBE(draws=-1),
        FedBE(members="mean"),
        FedBE(members="sampled", draws=0),
        KD(temperatures=()),
        KD(temperatures=(0.0,)),
        KD(alpha=1.5),
        KD(learning_rate=0.0),
        FedKT(public=0.0),
        FedKT(subsets=0),
        DSFL(keep=0.0),
        FedFed(rank=0),
        FedFed(noise=-1.0),
        Average(head=HeadSpec(l2=-1.0)),
    ],
)
def test_senseless_settings_are_refused(method):
    with pytest.raises(InputError, match=r"method\."):
        checked(method)


def test_a_model_of_which_more_than_a_head_is_trained_is_refused(tmp_path):
    tables = {
        "data": {"name": "digits", "limit": 60, "partition": {"clients": 2}},
        "model": {"name": "nano-vit", "adaptation": {"name": "lora"}},
        "method": {"name": "average"},
        "run": {"workers": 1},
    }
    with pytest.raises(InputError, match='takes "head" only'):
        fedfm.run(tables, tmp_path / "run")


# --- ensemble, average, FedBE -----------------------------------------------------------------------------------------


def ensemble_logits(method, heads, x):
    model = load_model(ModelSpec("features"), classes=CLASSES, kind="features", feature_dim=2)
    return method.logits(model, shared.as_heads(*heads), Rows({"features": tensor(x)}))


def test_ensemble_by_hand():
    # At x = (1, 0): p_1 = softmax(ln 6, ln 3, ln 1) = .6, .3, .1; p_2 = softmax(ln 1, ln 8, ln 1) = .1, .8, .1.
    heads = [
        head([[np.log(6), 0], [np.log(3), 0], [0, 0]], [0, 0, 0]),
        head([[0, 0], [np.log(8), 0], [0, 0]], [0, 0, 0]),
    ]
    x = [[1.0, 0.0]]
    largest_p = ensemble_logits(Ensemble(), heads, x).exp()
    mean_p = ensemble_logits(Ensemble(combine="mean"), heads, x).exp()
    torch.testing.assert_close(largest_p, tensor([[0.6, 0.8, 0.1]]))
    torch.testing.assert_close(mean_p, tensor([[0.35, 0.55, 0.1]]))
    torch.testing.assert_close(ensemble_logits(FedBE(), heads, x).exp(), mean_p)


def test_a_head_of_one_class_has_no_say_while_another_has_seen_two():
    certain = head([[0, 0], [0, 0], [0, 0]], [NOBODY, NOBODY, 0])
    other = head([[1, 0], [0, 1], [0, 0]], [0, 0, NOBODY])
    assert ensemble_logits(Ensemble(), [certain, other], [[3.0, 0.0], [0.0, 3.0]]).argmax(1).tolist() == [0, 1]
    assert ensemble_logits(Ensemble(), [certain], [[3.0, 0.0]]).argmax(1).tolist() == [2]


def test_the_ensemble_is_the_clients_heads(tmp_path):
    state = after(Ensemble(), tmp_path)
    for (w, b), (x, y) in zip(shared.each_head(state), ROWS.values(), strict=True):
        expected = fit_rows(tensor(x), torch.tensor(y), 3)
        torch.testing.assert_close((w, b), expected)
        assert [float(v) == NOBODY for v in b] == [c not in y for c in range(3)]


def test_average_weights_by_rows(tmp_path):
    rows = random_rows()
    w = after(Average(), tmp_path, rows=rows)
    sizes = np.array([12, 13, 14])
    fits = [fit_rows(tensor(x), torch.tensor(y), 3) for x, y in rows.values()]
    expected = sum(n * f[0] for n, f in zip(sizes, fits, strict=True)) / sizes.sum()
    torch.testing.assert_close(w["head.weight"], expected, rtol=1e-5, atol=1e-6)


def test_average_of_classes_that_a_client_lacks(tmp_path):
    # b has bees only: W_b = 0 and its only bias is 0, so that the mean is half of a's head.
    w = after(Average(), tmp_path)
    w_a, b_a = fit_rows(tensor(ROWS["a"][0]), torch.tensor(ROWS["a"][1]), 3)
    w_b, b_b = fit_rows(tensor(ROWS["b"][0]), torch.tensor(ROWS["b"][1]), 3)
    torch.testing.assert_close(w["head.weight"], (w_a + w_b) / 2)
    torch.testing.assert_close(w["head.bias"], torch.stack([b_a[0] / 2, (b_a[1] + b_b[1]) / 2, tensor(0.0)]))


def test_the_gaussian_of_heads_by_hand():
    # Weights 1 and 3, values 0 and 4: mean 3, variance (1 * 9 + 3 * 1) / 4 = 3.
    one, two = (Params({"w": tensor([v, 1.0])}) for v in (0.0, 4.0))
    mu, variance = gaussian([(1.0, one), (3.0, two)])
    assert mu["w"].tolist() == [3.0, 1.0]
    assert variance["w"].tolist() == [3.0, 0.0]
    drawn = torch.stack([sample(mu, variance, seed)["w"] for seed in range(3000)])
    assert float(drawn[:, 0].mean()) == pytest.approx(3.0, abs=0.1)
    assert float(drawn[:, 0].var()) == pytest.approx(3.0, rel=0.1)
    assert (drawn[:, 1] == 1.0).all()


def test_fedbe_holds_clients_mean_and_draws(tmp_path):
    heads = list(shared.each_head(after(FedBE(draws=4), tmp_path / "be")))
    average = after(Average(), tmp_path / "average")
    assert len(heads) == 2 + 1 + 4
    torch.testing.assert_close(heads[2], (average["head.weight"], average["head.bias"]))
    sampled = list(shared.each_head(after(FedBE(draws=4, members="sampled"), tmp_path / "sampled")))
    assert len(sampled) == 4
    for (w, b), (same_w, same_b) in zip(sampled, heads[3:], strict=True):
        assert torch.equal(w, same_w)
        assert torch.equal(b, same_b)


# --- FedNCM, CCVR -----------------------------------------------------------------------------------------------------


def test_fedncm_by_hand(tmp_path):
    # Ants (1,0), (3,0): mu = (2,0). Bees (0,2), (0,4), (1,3), (-1,3): mu = (0,3). Euclidean W = 2 mu, b = -||mu||^2.
    w = after(FedNCM(), tmp_path / "euclidean")
    assert w["head.weight"].tolist() == [[4.0, 0.0], [0.0, 6.0], [0.0, 0.0]]
    assert w["head.bias"].tolist()[:2] == [-4.0, -9.0]
    assert float(w["head.bias"][2]) < NOBODY
    # Halfway, at (1, 1.5), both distances are sqrt(1 + 2.25): the logits are equal.
    z = torch.nn.functional.linear(tensor([1.0, 1.5]), w["head.weight"], w["head.bias"])
    assert float(z[0]) == float(z[1])
    w = after(FedNCM(distance="cosine"), tmp_path / "cosine")
    assert w["head.weight"].tolist() == [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    assert w["head.bias"].tolist() == [0.0, 0.0, NOBODY]


def test_nearest_mean_is_the_nearest_of_the_means():
    rng = np.random.default_rng(3)
    x, mu = torch.from_numpy(rng.normal(size=(50, 4))), torch.from_numpy(rng.normal(size=(6, 4)) * 30)
    n = torch.from_numpy(rng.integers(1, 9, 6)).double()
    w, b = nearest_mean(n / 7, n[:, None] * mu / 7, "euclidean")
    assert torch.equal((x @ w.T + b).argmax(1), torch.cdist(x, mu).argmin(1))


def sums_of(rows, method):
    parts = [method._sums(tensor(x), torch.tensor(y), 3) for x, y in rows.values()]
    return [sum(part[key] for part in parts) for key in ("count", "total", "second")]


def test_ccvr_pools_exactly_by_hand():
    # Ants: mean (2,0), variance ((1-2)^2 + (3-2)^2) / 1 = 2, 0. Bees: x 0,0,1,-1 -> 2/3; y 2,4,3,3 -> 2/3.
    count, mu, sigma = pool(*sums_of(ROWS, CCVR()))
    assert count.tolist() == [2, 4, 0]
    assert mu.tolist() == [[2, 0], [0, 3], [0, 0]]
    torch.testing.assert_close(sigma.float(), tensor([[2, 0], [2 / 3, 2 / 3], [0, 0]]))


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_ccvr_pools_to_the_covariance_of_all_rows(offset):
    rows = {c: ((np.array(x) + offset).tolist(), y) for c, (x, y) in random_rows().items()}
    x = np.concatenate([tensor(x).double().numpy() for x, _ in rows.values()])
    y = np.concatenate([y for _, y in rows.values()])
    expected = torch.from_numpy(np.stack([np.cov(x[y == c].T) for c in range(3)]))
    _, mu, sigma = pool(*sums_of(rows, CCVR(covariance="full")))
    torch.testing.assert_close(sigma, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mu, torch.from_numpy(np.stack([x[y == c].mean(0) for c in range(3)])))
    diagonal = pool(*sums_of(rows, CCVR()))[2]
    torch.testing.assert_close(diagonal, torch.diagonal(expected, dim1=1, dim2=2), rtol=1e-4, atol=1e-6)


def test_ccvr_pools_as_equations_3_and_4_print():
    rows = random_rows(seed=2)
    n, mean, cov = [], [], []
    for x, y in rows.values():
        of = tensor(x).double().numpy()[np.array(y) == 1]
        n.append(len(of)), mean.append(of.mean(0)), cov.append(np.cov(of.T))
    total = sum(n)
    mu = sum(k * m for k, m in zip(n, mean, strict=True)) / total
    sigma = sum((k - 1) * c + k * np.outer(m, m) for k, m, c in zip(n, mean, cov, strict=True))
    sigma = (sigma - total * np.outer(mu, mu)) / (total - 1)
    torch.testing.assert_close(pool(*sums_of(rows, CCVR(covariance="full")))[2][1], torch.from_numpy(sigma))


def test_ccvr_keeps_the_head_if_noise_leaves_no_class_any_rows(monkeypatch):
    from fedfm.methods import ccvr

    sums = Params({"count": -torch.ones(2), "total": torch.ones(2, 3), "second": torch.ones(2, 3)})
    monkeypatch.setattr(ccvr, "total_of", lambda *args, **payload: sums)
    monkeypatch.setattr(ccvr, "check_total", lambda *args: None)
    said, w = list[str](), Params({"head.weight": torch.zeros(2, 3)})
    fed = SimpleNamespace(model=SimpleNamespace(classes=("a", "b"), feature_dim=3), notice=said.append)
    assert CCVR().step(fed, w, 1) is w
    assert "noise leaves no class any rows" in said[0]


def test_ccvr_draws_from_the_stated_mixture():
    mu, sigma = torch.tensor([1.0, -2.0]).double(), torch.tensor([[4.0, 2.0], [2.0, 1.0]]).double()  # singular
    z = draw(mu, sigma, 20000, seed=0)
    torch.testing.assert_close(z.mean(0), mu, atol=0.05, rtol=0)
    torch.testing.assert_close(torch.cov(z.T), sigma, atol=0.15, rtol=0)
    z = draw(mu, torch.tensor([9.0, 0.0]).double(), 20000, seed=0)
    assert float(z[:, 0].std()) == pytest.approx(3.0, rel=0.03)
    assert (z[:, 1] == -2.0).all()


def test_ccvr_calibrates_last(tmp_path):
    method = CCVR(rounds=3, local=SGD(learning_rate=0.1))
    states = run(method, federation(method, tmp_path), 3)
    assert all(float(w["head.bias"][2]) != NOBODY for w in states[:3])  # FedAvg
    assert float(states[3]["head.bias"][2]) == NOBODY  # retrained: nobody has a cow
    once = after(CCVR(), tmp_path / "once")
    x = tensor(ROWS["a"][0] + ROWS["b"][0])
    assert torch.nn.functional.linear(x, *shared.tensors_of(once)).argmax(1).tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.proof
def test_ccvr_calibrates_the_head_of_a_model_with_lora(tmp_path):
    tables = {
        "data": {"name": "digits", "limit": 150, "partition": {"name": "dirichlet", "alpha": 0.1, "clients": 3}},
        "model": {"name": "nano-vit", "adaptation": {"name": "lora"}},
        "method": {"name": "ccvr", "rounds": 2, "local": {"learning_rate": 0.05}},
        "run": {"workers": 1},
    }
    calibrated = fedfm.run(tables, tmp_path / "ccvr")
    plain = fedfm.run(tables | {"method": tables["method"] | {"name": "fedavg"}}, tmp_path / "fedavg")
    assert calibrated["accuracy"] > plain["accuracy"] + 0.1


# --- KD, FedKT --------------------------------------------------------------------------------------------------------


def test_distillation_by_hand():
    # z = 0, 0 and teacher ln 9, 0: at T = 1 KL(.9, .1 || .5, .5) = .9 ln 1.8 + .1 ln .2; labels: ln 2.
    z, target, y = torch.zeros(1, 2), torch.tensor([[float(np.log(9)), 0.0]]), torch.tensor([1])
    kl = 0.9 * np.log(1.8) + 0.1 * np.log(0.2)
    assert float(distillation(z, y, target, 1.0, 1.0)) == pytest.approx(kl, rel=1e-5)
    assert float(distillation(z, y, target, 1.0, 0.25)) == pytest.approx(0.75 * np.log(2) + 0.25 * kl, rel=1e-5)
    # T = 2 halves the logits: teacher .75, .25; times T^2 = 4.
    soft = 4 * (0.75 * np.log(1.5) + 0.25 * np.log(0.5))
    assert float(distillation(z, y, target, 2.0, 1.0)) == pytest.approx(soft, rel=1e-5)


def test_a_pure_student_becomes_its_teacher(tmp_path):
    # alpha = 1: b's labels do not count any more, and its rows span the plane; the teacher alone is the run of a alone.
    rows = {"a": random_rows(dim=2)["c0"], "b": random_rows(dim=2)["c1"]}
    method = KD(learning_rate=0.05, alpha=1.0, temperatures=(5.0,), local_epochs=20, epochs=400)
    student = after(method, tmp_path / "both", rows=rows)
    teacher = after(method, tmp_path / "a", rows={"a": rows["a"]})
    local = after(method, tmp_path / "b", rows={"b": rows["b"]})
    x = tensor(rows["b"][0])
    p, q, r = (torch.softmax(x @ w.T + b, 1) for w, b in map(shared.tensors_of, (student, teacher, local)))
    torch.testing.assert_close(p, q, atol=0.02, rtol=0)
    assert float((r - q).abs().max()) > 0.1


@pytest.mark.parametrize("val", [True, False])
def test_the_temperature_is_chosen_on_rows_that_do_not_train(monkeypatch, val):
    x, y = torch.eye(2).repeat(10, 1), torch.tensor([0, 1] * 10)
    right, wrong = (torch.eye(2), torch.zeros(2)), (1 - torch.eye(2), torch.zeros(2))
    trained = []

    def train(self, head, x, y, epochs, seed, target, T):
        trained.append(len(x))
        return right if T == 5.0 else wrong

    monkeypatch.setattr(KD, "_train", train)
    rows = Rows({"features": x}, labels=y)
    model = load_model(ModelSpec("features"), classes=CLASSES[:2], kind="features", feature_dim=2)
    client = Client(
        "a", ClientData(lambda: rows, lambda: rows if val else Rows(), Rows), model, {}, 0, trainer=train_client
    )
    assert KD()._choose(client, wrong, x, y, x) == 5.0
    assert trained == [20 if val else 16] * 3


def test_kd_passes_one_head_along_the_chain(tmp_path):
    method = KD(local_epochs=2, epochs=2)
    fed = federation(method, tmp_path)
    payloads = []
    ask = fed.ask
    fed.ask = lambda handler, **kw: payloads.append((kw["of"], kw["teacher"])) or ask(handler, **kw)
    run(method, fed, 1)
    assert [(of, len(teacher[of[0]])) for of, teacher in payloads] == [(["a"], 0), (["b"], 1)]


def test_votes_by_hand():
    said = [torch.tensor([0, 1, 2]), torch.tensor([0, 2, 2]), torch.tensor([1, 2, 0])]
    assert majority(said, 3).tolist() == [0, 2, 2]
    # Two clients of two students, three rows. Client 1 agrees on rows 0 and 1, client 2 on rows 1 and 2.
    said = torch.tensor([[[0, 1, 1], [0, 1, 2]], [[1, 2, 2], [0, 2, 2]]])
    assert consistent_votes(said, 3).tolist() == [[2, 0, 0], [0, 2, 2], [0, 0, 2]]


def test_fedkt_shares_only_the_public_part(tmp_path):
    rows = random_rows(n=20)
    fed = federation(FedKT(public=0.25), tmp_path, rows)
    fed.begin(1)
    given = fed.ask(FedKT(public=0.25).publish)
    assert {c: len(x) for c, x in given.items()} == {"c0": 5, "c1": 6, "c2": 6}  # ceil of 5, 5.25, 5.5
    for client, x in given.items():
        own = {tuple(r) for r in tensor(rows[client][0]).tolist()}
        assert {tuple(r) for r in x.tolist()} <= own


def test_fedkt_with_one_teacher_and_everything_public_imitates_the_client(tmp_path):
    # One client, one partition, one subset: the teacher is the client's head, and the result agrees with it.
    rows = {"a": random_rows(n=40)["c0"]}
    w = after(FedKT(public=1.0, partitions=1, subsets=1), tmp_path, rows=rows)
    x, y = tensor(rows["a"][0]), torch.tensor(rows["a"][1])
    teacher = torch.nn.functional.linear(x, *fit_rows(x, y, 3)).argmax(1)
    student = torch.nn.functional.linear(x, *shared.tensors_of(w)).argmax(1)
    assert float((teacher == student).float().mean()) > 0.95


# --- DSFL, FedFed -----------------------------------------------------------------------------------------------------


def test_dsfl_keeps_the_largest():
    assert largest(tensor([1.0, -4.0, 0.5, 3.0, -2.0]), 0.5).tolist() == [0.0, -4.0, 0.0, 3.0, -2.0]  # ceil(2.5) = 3
    assert largest(tensor([1.0, -4.0]), 1.0).tolist() == [1.0, -4.0]


@pytest.mark.parametrize("feedback", [True, False])
def test_dsfl_remembers_what_it_did_not_send(tmp_path, feedback):
    """Compared with a loop of its own: full batches from w, the largest third of change plus residual is applied."""
    rows = {"a": random_rows()["c0"]}
    method = DSFL(rounds=3, keep=1 / 3, feedback=feedback, local=SGD(learning_rate=0.5, batch_size=64))
    states = run(method, federation(method, tmp_path, rows), 3)
    x, y = tensor(rows["a"][0]), torch.tensor(rows["a"][1])
    w, b = (states[0][n].clone().requires_grad_() for n in ("head.weight", "head.bias"))
    residual = torch.zeros(12)
    for state in states[1:]:
        gradients = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ w.T + b, y), (w, b))
        delta = residual * feedback - 0.5 * torch.cat([g.reshape(-1) for g in gradients])
        sent = torch.where(delta.abs() >= delta.abs().sort().values[-4], delta, 0.0)
        residual = delta - sent
        w, b = ((t + s).detach().requires_grad_() for t, s in ((w, sent[:9].view(3, 3)), (b, sent[9:])))
        torch.testing.assert_close((state["head.weight"], state["head.bias"]), (w.detach(), b.detach()))
    assert method.details(states[-1], None) == {"sparse_bytes_per_update": 8 * 4}


def test_the_sensitive_part_by_hand():
    # q keeps the first coordinate: x_s is the second.
    encode, decode = tensor([[1.0, 0.0]]), tensor([[1.0], [0.0]])
    assert sensitive(encode, decode, tensor([[3.0, 5.0]])).tolist() == [[0.0, 5.0]]


def test_others_rows_only_and_as_many_as_ones_own():
    part = {"a": 3, "b": 2, "c": 4}
    held = {c: Labelled(torch.full((n, 2), float(i)), torch.full((n,), i)) for i, (c, n) in enumerate(part.items())}
    given = others(held, "a", 2, seed=0)
    assert len(given.y) == 3
    assert 0 not in given.y.tolist()
    assert torch.equal(given.x[:, 0].long(), given.y)
    assert len(others(held, "stranger", 2, seed=0).y) == 0
    assert others({"a": held["a"]}, "a", 2, seed=0).x.shape == (0, 2)


def test_fedfed_keeps_the_features_that_distinguish_the_classes(tmp_path):
    """Dimension 0 is large and says nothing, dimension 1 is the class: q learns to take dimension 0 away."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 120)
    x = np.stack([rng.normal(size=120) * 3, (2 * y - 1) + rng.normal(size=120) * 0.1], 1)
    rows = {"a": (x[:60].tolist(), y[:60].tolist()), "b": (x[60:].tolist(), y[60:].tolist())}
    method = FedFed(rank=1, distillation_rounds=10, distillation_epochs=10, noise=0.0)
    state = after(method, tmp_path, rows=rows)
    x_s, own = state.shared["a"].x, tensor(rows["a"][0])
    kept = x_s.square().sum(0) / own.square().sum(0)
    assert float(kept[0]) < 0.1
    assert float(kept[1]) > 0.5
    assert torch.equal(state.shared["a"].y, torch.tensor(rows["a"][1]))


def test_fedfed_noise_has_the_stated_size(tmp_path):
    rows = {"a": random_rows(n=2000)["c0"]}
    theta = Params({"encode": torch.zeros(1, 3), "decode": torch.zeros(3, 1)})
    method = FedFed(noise=0.5)
    fed = federation(method, tmp_path, rows)
    fed.begin(1)
    x_p, x = fed.ask(method.share, theta=theta)["a"].x, tensor(rows["a"][0])  # q = 0: x_s = x
    assert float((x_p - x).std()) == pytest.approx(0.5 * float(x.square().mean().sqrt()), rel=0.03)


# --- all of them ------------------------------------------------------------------------------------------------------


def accuracy(folder, name, alpha):
    if not (folder / "rows.npz").exists():
        features(folder, n=1500, d=3)
    tables = experiment(folder, data={"partition": {"name": "dirichlet", "alpha": alpha, "clients": 20}})
    tables["method"] = {"name": name}
    return fedfm.run(tables, folder / f"{name}{alpha}")["accuracy"]


def test_statistics_do_not_mind_how_rows_are_dealt_and_averages_do(tmp_path):
    got = {(m, a): accuracy(tmp_path, m, a) for m in ("fedncm", "ccvr", "average") for a in (100.0, 0.05)}
    for name in ("fedncm", "ccvr"):
        assert abs(got[name, 100.0] - got[name, 0.05]) < 0.02
        assert got[name, 0.05] > got["average", 0.05]
    assert got["average", 100.0] > got["average", 0.05] + 0.02


def test_an_ensemble_is_served(tmp_path):
    """What it predicts for a file is what it was judged by."""
    tables = experiment(tmp_path)
    tables["method"] = {"name": "ensemble"}
    result = fedfm.run(tables, tmp_path / "run")
    from fedfm.api.predict import export, predict

    told = predict(tmp_path / "run", tmp_path / "rows.npz")
    stored = np.load(tmp_path / "rows.npz")
    test = stored["split"] == "test"
    right = np.array(told["predictions"])[test] == stored["classes"][stored["y"][test]]
    assert right.mean() == pytest.approx(result["accuracy"])
    with pytest.raises(InputError, match="not a single model"):
        export(tmp_path / "run", "torch", tmp_path / "out")


@pytest.mark.parametrize(
    ("method", "who"),
    [
        ({"name": "ensemble"}, "client-00: a head"),
        ({"name": "fedbe"}, "client-00: a head"),
        ({"name": "average"}, "100.0% of the clients' heads, by weight"),
        ({"name": "fedkt"}, "client-00: 12 heads"),
        ({"name": "fedkt"}, "server: a head"),
        ({"name": "ccvr"}, "server: a head"),
        ({"name": "fedpft"}, "server: a head"),
        ({"name": "fedpft", "topology": "chain"}, "client-00: a head"),
    ],
)
def test_a_head_that_did_not_converge_is_a_notice_of_the_run(method, who, tmp_path):
    table = {"name": "dirichlet", "alpha": 1e6, "clients": 3}
    heard = {}
    for iterations in (1, 200):
        settings = experiment(tmp_path, data={"partition": table}) | {
            "method": method | {"head": {"iterations": iterations}}
        }
        out = tmp_path / f"run-{iterations}"
        fedfm.run(settings, out)
        heard[iterations] = json.loads((out / "manifest.json").read_text())["notices"]
    said = [notice for notice in heard[1] if notice.startswith(f"{who} did not converge: after 1 iterations")]
    assert len(said) == 1
    assert float(re.search(r"the gradient is (\S+) times its norm at zero", said[0])[1]) > 1e-8
    assert not any("converge" in notice for notice in heard[200])
