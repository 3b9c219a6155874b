"""The averaging family against numbers worked by hand (w = 1, clients with n = 1, 3 whose optimum is a)."""

from types import SimpleNamespace

import pytest
import torch

from fedfm.core.client import POOLED
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods.centralised import Centralised
from fedfm.methods.fedadam import FedAdam
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.fedavgm import FedAvgM
from fedfm.methods.fedprox import FedProx
from fedfm.methods.fedyogi import FedYogi
from fedfm.methods.local import LocalOnly
from fedfm.methods.scaffold import Scaffold
from fedfm.methods.zero_shot import ZeroShot
from fedfm.training import SGD, Proximal
from small import checked
from toy import federation, run

# Full batches with learning rate 1 jump to the client's own mean: w_k = 0 and 2, Delta = (1 (-1) + 3 (1)) / 4 = 0.5.
ROWS = {"a": [0.0], "b": [2.0, 2.0, 2.0]}
JUMP = SGD(learning_rate=1.0, batch_size=8)


def scalar(params):
    return float(params["w"])


def test_fedavg_weights_by_rows(tmp_path):
    method = FedAvg(local=JUMP)
    states = run(method, federation(method, ROWS, tmp_path), 1)
    assert scalar(states[1]) == pytest.approx(1.5)


def test_fedavg_uniform(tmp_path):
    method = FedAvg(local=JUMP, weighting="uniform")
    assert scalar(run(method, federation(method, ROWS, tmp_path), 1)[1]) == pytest.approx(1.0)


def test_fedavg_one_small_step(tmp_path):
    # Gradient w - a = 1 and -1: w_k = 1 -+ 0.1; mean of +-0.1 with weights 1, 3 is +0.05.
    method = FedAvg(local=SGD(learning_rate=0.1, batch_size=8))
    assert scalar(run(method, federation(method, ROWS, tmp_path), 1)[1]) == pytest.approx(1.05)


@pytest.mark.parametrize("by", ["method", "optimiser"])
def test_fedprox_pulls_by_the_squared_distance(tmp_path, by):
    # Two steps of eta .5 from 1 towards a = 0 with mu = 1: v1 = 1 - .5(1 + 0) = .5; v2 = .5 - .5(.5 + (.5 - 1)) = .5.
    # An unsquared norm would pull by a constant 1: v2 = .5 - .5(.5 - 1) = .75. Client b is the mirror image: 1.5.
    local = SGD(learning_rate=0.5, batch_size=8, epochs=2)
    method = FedProx(local=local, mu=1.0)
    if by == "optimiser":
        method = FedAvg(local=Proximal(learning_rate=0.5, batch_size=8, epochs=2, mu=1.0))
    rows = {"a": [0.0]}
    assert scalar(run(method, federation(method, rows, tmp_path), 1)[1]) == pytest.approx(0.5)
    method0 = FedProx(local=local, mu=0.0)
    assert scalar(run(method0, federation(method0, rows, tmp_path), 1)[1]) == pytest.approx(0.25)


def test_fedavgm(tmp_path):
    # Learning rate 1 with the optimum moving along would change Delta; a constant Delta = .5 needs a linear loss,
    # so the clients take one step of eta on a far optimum: Delta_1 = .5 exactly, and Delta_2 from the same formula.
    method = FedAvgM(local=JUMP, server_momentum=0.9, server_learning_rate=1.0)
    states = run(method, federation(method, ROWS, tmp_path), 2)
    assert scalar(states[1].w) == pytest.approx(1.5)
    # Round 2 from 1.5: w_k = 0, 2 again, Delta = (-1.5 + 3 * .5) / 4 = 0; m = .45; w = 1.95.
    assert scalar(states[2].w) == pytest.approx(1.95)
    assert scalar(states[2].m) == pytest.approx(0.45)


class Fixed:
    """A federation whose clients always answer with the same mean update; nobody trains ``var``."""

    clients, heard = ("a",), 1
    initial = Params({"w": torch.tensor([1.0]), "var": torch.tensor([1.0])})
    model = SimpleNamespace(live=lambda: {"w": torch.zeros(1)})

    def sample(self, fraction):
        return []

    def mean(self, handler, **payload):
        delta = Params({"w": torch.tensor([0.5]), "var": torch.tensor([4.0])})
        return Params.join(y=delta, c=0.0 * delta) if "c" in payload else delta


def test_fedavgm_with_the_same_delta_twice():
    method = FedAvgM()
    first = method.step(Fixed(), method.init(Fixed()), 1)
    second = method.step(Fixed(), first, 2)
    assert (scalar(first.w), scalar(second.w)) == (pytest.approx(1.5), pytest.approx(2.45))


@pytest.mark.parametrize(
    ("method", "w"),
    [
        (FedAvgM(server_momentum=0.9, server_learning_rate=0.1), (1.05, 1.145)),  # m = .5, .95
        (FedAdam(server_learning_rate=0.1), (1.0980392, 1.0980392 + 0.1 * 0.095 / (0.0705337 + 1e-3))),  # m .05, .095
        (FedYogi(server_learning_rate=0.1), (1.0980392, 1.0980392 + 0.1 * 0.095 / (0.0707107 + 1e-3))),  # v .0025, .005
        (Scaffold(server_learning_rate=0.1), (1.05, 1.1)),
    ],
)
def test_running_statistics_are_averaged_whatever_the_servers_step_on_weights(method, w):
    # Each round the clients' mean of "var" is 4 above what they were sent: 1, 5, 9. Weights follow the method's rule.
    state = method.init(Fixed())
    for t, (weight, var) in enumerate(zip(w, (5.0, 9.0), strict=True), 1):
        state = method.step(Fixed(), state, t)
        model = method.params_for(state, "")
        assert scalar(model) == pytest.approx(weight, abs=1e-6)
        assert float(model["var"]) == pytest.approx(var)


@pytest.mark.parametrize("kind", [FedAdam, FedYogi])
def test_adaptive(tmp_path, kind):
    # m = .1 * .5 = .05, v = .01 * .25 = .0025, sqrt(v) = .05: 1 + .1 * .05 / .051 = 1.0980392.
    method = kind(local=JUMP, server_learning_rate=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3)
    state = run(method, federation(method, ROWS, tmp_path), 1)[1]
    assert scalar(state.x) == pytest.approx(1.0980392, abs=1e-6)


@pytest.mark.parametrize(("kind", "x"), [(FedAdam, 1.0445018), (FedYogi, 1.0443249)])
def test_adaptive_from_another_start_of_the_second_moment(tmp_path, kind, x):
    # v_0 = .01: Adam v = .99 * .01 + .0025 = .0124, 1 + .005 / (.1113553 + .001); Yogi v = .01 + .0025 = .0125.
    method = kind(local=JUMP, server_learning_rate=0.1, v_0=0.01)
    state = run(method, federation(method, ROWS, tmp_path), 1)[1]
    assert scalar(state.x) == pytest.approx(x, abs=1e-6)
    with pytest.raises(InputError, match=r"method\.v_0"):
        checked(kind(v_0=-1.0))


def test_adam_and_yogi_part_in_the_second_round(tmp_path):
    # From x1 = 1.0980392: w_k = 0, 2, Delta = (-x1 + 3 (2 - x1)) / 4 = 1.5 - x1 = .4019608, Delta^2 = .1615725.
    # Adam v = .99 * .0025 + .01 * .1615725 = .004090725; Yogi v = .0025 + .01 * .1615725 = .004115725 (v < Delta^2).
    got = {}
    for kind in (FedAdam, FedYogi):
        method = kind(local=JUMP, server_learning_rate=0.1)
        got[kind] = scalar(run(method, federation(method, ROWS, tmp_path / kind.__name__), 2)[2].v)
    assert got[FedAdam] == pytest.approx(0.004090725, rel=1e-5)
    assert got[FedYogi] == pytest.approx(0.004115725, rel=1e-5)


def test_scaffold(tmp_path):
    # f_k = (w - a_k)^2 / 2, a = 0, 4, w = 1, eta_l .5, one step: y = .5, 2.5; c_k = 1, -3; w = 1.5, c = -1.
    method = Scaffold(local=SGD(learning_rate=0.5, batch_size=8))
    fed = federation(method, {"a": [0.0], "b": [4.0]}, tmp_path)
    states = run(method, fed, 2)
    assert scalar(states[1].x) == pytest.approx(1.5)
    assert scalar(states[1].c) == pytest.approx(-1.0)
    # Second round: g_k - c_k + c = 1.5 - 1 - 1 = -.5 and -2.5 + 3 - 1 = -.5: both clients reach 1.75.
    assert scalar(states[2].x) == pytest.approx(1.75)


def test_local_training_averages_nothing(tmp_path):
    method = LocalOnly(local=JUMP)
    fed = federation(method, ROWS, tmp_path)
    states = run(method, fed, 1)
    assert {c: scalar(w) for c, w in states[1].items()} == {"a": pytest.approx(0.0), "b": pytest.approx(2.0)}
    assert fed.cohort == ("a", "b")
    crossed = fed.transcript.drain()
    assert {c.receiver for c in crossed} == {"a", "b", "server"}
    assert fed.transcript.bytes_up == fed.transcript.bytes_down == 0  # listed, not counted: it sends nothing


def test_centralised_trains_on_the_rows_of_all(tmp_path):
    # Four rows 0, 2, 2, 2 in one place, in batches of 4, eta .5: w = 1 - .5 (1 - 1.5) = 1.25, then 1.25 + .125 = 1.375.
    # In batches of one row and eta 1, w is the last row drawn, which no mean of clients (1.5, or uniform 1) could be.
    pooled = {POOLED: [a for rows in ROWS.values() for a in rows]}
    method = Centralised(local=SGD(learning_rate=0.5, batch_size=4))
    states = run(method, federation(method, pooled, tmp_path / "whole"), 2)
    assert [scalar(w) for w in states] == [pytest.approx(1.0), pytest.approx(1.25), pytest.approx(1.375)]
    method = Centralised(local=SGD(learning_rate=1.0, batch_size=1))
    assert scalar(run(method, federation(method, pooled, tmp_path / "rows"), 1)[1]) in (0.0, 2.0)


def test_zero_shot_is_the_start(tmp_path):
    method = ZeroShot()
    fed = federation(method, ROWS, tmp_path)
    assert scalar(run(method, fed, method.rounds)[-1]) == 1.0
    assert fed.transcript.bytes_up == fed.transcript.bytes_down == 0
    with pytest.raises(InputError, match="trains nothing"):
        checked(ZeroShot(rounds=1))


def test_the_cohort_has_the_asked_size_and_is_drawn_without_replacement(tmp_path):
    method = FedAvg(local=JUMP, fraction=0.5)
    fed = federation(method, {f"c{i}": [float(i)] for i in range(7)}, tmp_path)
    seen = set()
    for t in range(1, 40):
        fed.begin(t)
        cohort = fed.sample(0.5)
        assert len(cohort) == len(set(cohort)) == 3
        assert list(cohort) == sorted(cohort)
        seen.update(cohort)
    assert seen == set(fed.clients)
    assert len(fed.sample(0.001)) == 1
    assert len(fed.sample(1.0)) == 7
