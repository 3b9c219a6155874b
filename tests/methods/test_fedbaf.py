"""FedBaF against numbers worked by hand, and what it promises: no foundation weight and no alpha leaves the server."""

import dataclasses
import math
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedfm
from fedfm.aggregation.base import Aggregator
from fedfm.core import tasks
from fedfm.core.client import ClientData
from fedfm.core.federation import Federation
from fedfm.core.method import with_model
from fedfm.core.rows import Rows
from fedfm.engines.local.engine import LocalLink
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import Params
from fedfm.methods.centralised import Centralised
from fedfm.methods.ditto import Ditto
from fedfm.methods.fedadam import FedAdam
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.fedavgm import FedAvgM
from fedfm.methods.fedbaf import fedbaf
from fedfm.methods.fedbaf.fedbaf import FedBaF
from fedfm.methods.fedbaf.matching import Match, Matching
from fedfm.methods.fedbaf.pull import Piece
from fedfm.methods.fedprox import FedProx
from fedfm.methods.fedyogi import FedYogi
from fedfm.methods.scaffold import Scaffold
from fedfm.methods.weight_init import WeightInit
from fedfm.runtime.client import Silos
from fedfm.runtime.file_integrity import read_secret
from fedfm.training import SGD
from small import checked
from stopping import run_stopped, stop_in_steps

BASES = [FedAvg(), FedProx(mu=0.01), FedAdam(server_learning_rate=0.1), FedYogi(), FedAvgM(), Scaffold()]


class Points:
    """Trainable w in R^P; the loss of a row a is ||w - a||^2 / 2, so that one full step at rate 1 lands on the mean."""

    task, classes, kernels, adaptation = tasks.find("regression"), (), "exact", "full"

    def __init__(self, w):
        self.module = nn.ParameterDict({"w": nn.Parameter(torch.tensor(w))})
        self.names = ("w",)
        self.layout = self.params().layout

    def params(self):
        return Params({"w": self.module["w"]})

    def load(self, w):
        with torch.no_grad():
            self.module["w"].copy_(w["w"])

    def live(self):
        return {"w": self.module["w"]}

    def loss(self, batch):
        return ((self.module["w"] - batch["a"]) ** 2).sum(-1).mean() / 2

    def train_mode(self): ...

    def eval_mode(self): ...


class Silo:
    """Clients with rows that a test may change between rounds."""

    def __init__(self, w, rows):
        self.model, self.rows = Points(w), rows
        self.client_model = self.model

    @property
    def clients(self):
        return sorted(self.rows)

    def data(self, client):
        def rows():
            return Rows({"a": torch.tensor(self.rows[client], dtype=torch.float32)})

        return ClientData(rows, Rows, Rows)


def federation(method, w, rows, folder, pre, key=b"k" * 32):
    """A federation of points whose server has a foundation model ``pre``."""
    silo = Silo(w, rows)
    link = LocalLink(Silos(method, Aggregator(), silo, memory=folder))
    fed = Federation(link, model=silo.model, secret=lambda name: key, aggregator=Aggregator())
    line = Match("w", (len(w),), (len(w),), (len(w),), "same shape")
    matching = Matching((line,), {"w": Piece((len(w),), torch.tensor(pre))})
    method._last_matching[:] = [weakref.ref(silo.model), matching]
    return fed, silo


def go(method, w, rounds, folder, pre, key=b"k" * 32):
    """Server models after 0, 1, ... rounds; ``rounds`` gives each round's rows by client."""
    fed, silo = federation(method, w, rounds[0], folder, pre, key)
    fed.begin(0)
    state = method.init(fed)
    out = [method.params_for(state, "")["w"]]
    for t, rows in enumerate(rounds, 1):
        silo.rows = rows
        fed.begin(t)
        state = method.step(fed, state, t)
        out.append(method.params_for(state, "")["w"])
    return out, fed


STEP = SGD(learning_rate=1.0, batch_size=100)
ROUNDS = [{"a": [(6.0, 4.0)], "b": [(2.0, 4.0)] * 3}, {"a": [(1.0, 3.0)], "b": [(5.0, 3.0)] * 3}]


class TestByHand:
    def test_two_rounds(self, tmp_path, monkeypatch):
        draws = {0: 0.0, 1: 1.5 / math.sqrt(2) - 1}
        monkeypatch.setattr(fedbaf, "_uniform", lambda key, at, name: draws[int(at.split("\x1f")[0])])
        w, fed = go(FedBaF(foundation="x", local=STEP), (5.0, 0.0), ROUNDS, tmp_path, (-3.0, 6.0))
        torch.testing.assert_close(w[1], torch.tensor([0.0, 5.0]))
        torch.testing.assert_close(w[2], torch.tensor([1.0, 30 / 7]))
        assert fed.memory["reference"]["length"] == pytest.approx(math.sqrt(0.8))

    def test_fedadam_first_and_then_the_mixture(self, tmp_path, monkeypatch):
        monkeypatch.setattr(fedbaf, "_uniform", lambda key, at, name: 0.0)
        base = FedAdam(server_learning_rate=0.1)
        alone, _ = go(FedBaF(base=base, psi=0.0, foundation="x", local=STEP), (5.0, 0.0), ROUNDS[:1], tmp_path, (0, 0))
        torch.testing.assert_close(alone[1], torch.tensor([4.9004975, 0.0997506]), atol=1e-6, rtol=0)
        mixed, _ = go(FedBaF(base=base, foundation="x", local=STEP), (5.0, 0.0), ROUNDS[:1], tmp_path, (-3.0, 6.0))
        torch.testing.assert_close(mixed[1], (alone[1] + torch.tensor([-3.0, 6.0])) / 2)  # a_0 = psi U = 1

    @pytest.mark.parametrize(
        ("term", "weighting", "expected"),
        [
            ("none", "size", (3.0, 4.0)),
            ("inside", "size", (3.2, 3.6)),  # .9 (3, 4) + .1 (5, 0)
            ("inside", "uniform", (4.1, 3.6)),
            ("literal", "uniform", (4.2, 3.2)),  # (4, 4) - .1 ((1, 4) + (-3, 4))
        ],
    )
    def test_the_readings_of_fedproxs_line_8(self, tmp_path, term, weighting, expected):
        base = FedProx(mu=0.1, server_term=term, weighting=weighting)
        w, _ = go(FedBaF(base=base, psi=0.0, foundation="x", local=STEP), (5.0, 0.0), ROUNDS[:1], tmp_path, (0, 0))
        torch.testing.assert_close(w[1], torch.tensor(expected))
        with pytest.raises(InputError, match=r"literal.*expected method.weighting"):
            checked(FedProx(server_term="literal"))

    def test_fedadams_moments_never_see_the_mixture(self, tmp_path):
        base = FedAdam(server_learning_rate=0.1)
        states = []
        for psi in (0.0, 1.0):
            method = FedBaF(base=base, psi=psi, foundation="x", local=STEP)
            fed, _ = federation(method, (5.0, 0.0), ROUNDS[0], tmp_path, (-3.0, 6.0))
            fed.begin(0)
            state = method.init(fed)
            fed.begin(1)
            states.append(method.step(fed, state, 1))
        assert torch.equal(states[0].m["w"], states[1].m["w"])
        assert torch.equal(states[0].v["w"], states[1].v["w"])
        assert not torch.equal(states[0].x["w"], states[1].x["w"])


class TestTau:
    def test_a_round_that_does_not_move_mixes_nothing_and_is_no_reference(self, tmp_path):
        still = {"a": [(5.0, 0.0)], "b": [(5.0, 0.0)]}
        w, fed = go(FedBaF(foundation="x", local=STEP), (5.0, 0.0), [still, *ROUNDS], tmp_path, (-3.0, 6.0))
        torch.testing.assert_close(w[1], torch.tensor([5.0, 0.0]))
        assert fed.memory["reference"]["t"] == 1
        assert w[2][0] < 3.0 - 1e-3  # pulled away from w' = (3, 4)

    def test_a_zero_vector_mixes_nothing(self, tmp_path):
        w, fed = go(FedBaF(foundation="x", local=STEP), (0.0, 0.0), ROUNDS[:1], tmp_path, (-3.0, 6.0))
        torch.testing.assert_close(w[1], torch.tensor([3.0, 4.0]))
        assert "reference" not in fed.memory

    def test_a_single_round_is_pulled_by_between_psi_and_two_psi(self, tmp_path):
        for psi in (0.1, 1.0):
            for key in (b"1" * 32, b"2" * 32, b"3" * 32):
                method = FedBaF(psi=psi, foundation="x", local=STEP)
                w, _ = go(method, (5.0, 0.0), ROUNDS[:1], tmp_path, (-3.0, 6.0), key)
                a = float((w[1][0] - 3.0) / (-3.0 - w[1][0]))
                assert psi - 1e-5 <= a <= 2 * psi + 1e-5

    def test_the_cap_holds_and_the_printed_one_grows(self, tmp_path, monkeypatch):
        monkeypatch.setattr(fedbaf, "_uniform", lambda key, at, name: 0.0)
        rounds = [{"a": [(5.0, 0.5)]}, {"a": [(-5.0, 0.0)]}]  # round 1 turns the model around
        pulls = {}
        for cap in ("reference", "none"):
            w, _ = go(FedBaF(cap=cap, foundation="x", local=STEP), (5.0, 0.0), rounds, tmp_path, (0.0, 100.0))
            pulls[cap] = float(w[2][1] / (100.0 - w[2][1]))
        assert pulls["reference"] == pytest.approx(1 / math.sqrt(2), rel=1e-4)  # 2 psi sqrt(1/2) is the bound
        assert pulls["none"] > 1.4  # the pull of the printed line

    def test_the_first_round_alone(self, tmp_path):
        w, _ = go(FedBaF(harden="first_round", foundation="x", local=STEP), (5.0, 0.0), ROUNDS, tmp_path, (-3.0, 6.0))
        assert not torch.allclose(w[1], torch.tensor([3.0, 4.0]))
        torch.testing.assert_close(w[2], torch.tensor([4.0, 3.0]))

    def test_an_aggregate_that_is_not_finite_stops_the_run(self, tmp_path, monkeypatch):
        method = FedBaF(foundation="x", local=STEP)
        fed, _ = federation(method, (5.0, 0.0), ROUNDS[0], tmp_path, (-3.0, 6.0))
        monkeypatch.setattr(FedAvg, "step", lambda self, fed, w, t: w * math.inf)
        fed.begin(1)
        with pytest.raises(RunError, match="not finite"):
            method.step(fed, fed.initial, 1)


@pytest.mark.parametrize("base", BASES, ids=lambda b: type(b).__name__)
class TestEveryBase:
    def test_psi_zero_is_the_base_bit_for_bit(self, base, tmp_path):
        local = SGD(learning_rate=0.3, epochs=2, batch_size=1)
        plain = dataclasses.replace(base, local=local)
        _, silo = federation(FedBaF(base=base, foundation="x", local=local), (5.0, 0.0), ROUNDS[0], tmp_path, (1, 1))
        alone = Federation(
            LocalLink(Silos(plain, Aggregator(), silo, memory=tmp_path / "b")),
            model=silo.model,
            aggregator=Aggregator(),
        )
        states = []
        for method, f in ((FedBaF(base=base, psi=0.0, foundation="x", local=local), None), (plain, alone)):
            if f is None:
                f, _ = federation(method, (5.0, 0.0), ROUNDS[0], tmp_path / "a", (1.0, 1.0))
            f.begin(0)
            state = method.init(f)
            for t in (1, 2, 3):
                f.begin(t)
                state = method.step(f, state, t)
            states.append(method.params_for(state, ""))
        assert torch.equal(states[0]["w"], states[1]["w"])

    def test_mixing_pulls_towards_the_foundation_model(self, base, tmp_path):
        ends = []
        for psi in (0.0, 1.0):
            method = FedBaF(base=base, psi=psi, foundation="x", local=SGD(learning_rate=0.3, batch_size=100))
            w, _ = go(method, (5.0, 0.0), ROUNDS, tmp_path / str(psi), (-3.0, 6.0))
            ends.append(float((w[-1] - torch.tensor([-3.0, 6.0])).norm()))
        assert ends[1] < ends[0]


class TestTheory:
    def test_proposition_1_has_a_counterexample(self):
        u, v, a = 1.0, 2.0, 0.5
        assert abs(a) < 2 / 3  # its condition: a < 2 |u|^2 / (|v|^2 - |u|^2)
        assert abs((u + a * v) / (1 + a)) > abs(u)  # 4/3 > 1

    @settings(max_examples=200, deadline=None)
    @given(st.integers(0, 2**32 - 1), st.floats(0.0, 5.0), st.integers(1, 20))
    def test_the_exact_condition_for_one_step_to_come_nearer(self, seed, a, p):
        rng = np.random.default_rng(seed)
        u, v = rng.normal(size=(2, p))
        gap = 2 * (u @ u - u @ v) - a * (v @ v - u @ u)
        nearer = np.linalg.norm((u + a * v) / (1 + a)) < np.linalg.norm(u)
        if a > 1e-9 and abs(gap) > 1e-9:
            assert nearer == (gap > 0)

    @settings(max_examples=200, deadline=None)
    @given(st.integers(0, 2**32 - 1), st.floats(0.0, 50.0), st.integers(1, 6), st.integers(1, 20))
    def test_proposition_2_always_holds(self, seed, a, clients, p):
        rng = np.random.default_rng(seed)
        w_star = rng.normal(size=p)
        w_k = w_star + rng.normal(size=(clients, p)) * rng.uniform(0.1, 3)
        weights = rng.dirichlet(np.ones(clients))
        delta = np.linalg.norm(w_k - w_star, axis=1).max()
        direction = rng.normal(size=p)
        gamma = rng.uniform(0, 1) * delta
        w_pre = w_star + gamma * direction / np.linalg.norm(direction)
        w = (weights @ w_k + a * w_pre) / (1 + a)
        bound = (delta + a * gamma) / (1 + a)
        assert np.linalg.norm(w - w_star) <= bound * (1 + 1e-9)
        assert bound <= delta * (1 + 1e-9)


class TestHardened:
    def pulls(self, harden, tmp_path, key=b"k" * 32, **keys):
        """a_0 by coordinate, from w_1 = (w' + a p)/(1 + a) in 64 coordinates with w' = 0 exactly nowhere."""
        w0, target, pre = [1.0] * 64, [2.0, 1.0] * 32, [50.0] * 64
        method = FedBaF(harden=harden, foundation="x", local=STEP, **keys)
        w, _ = go(method, w0, [{"a": [target]}], tmp_path / harden, pre, key)
        u = torch.tensor(target)
        return ((w[1] - u) / (50.0 - w[1])).numpy()

    def test_per_tensor_and_none_draw_one_number_a_tensor(self, tmp_path):
        for harden in ("none", "per_tensor", "half"):
            a = self.pulls(harden, tmp_path)
            assert np.ptp(a) < 1e-4
            assert 1 <= a.mean() <= 2

    def test_per_coordinate_draws_are_uniform(self, tmp_path):
        a = self.pulls("per_coordinate", tmp_path)
        assert a.min() >= 1 - 1e-4
        assert a.max() <= 2 + 1e-4
        assert 0.2 < a.std() < 0.4  # sqrt(1/12) = 0.29

    def test_log_uniform_draws_span_two_decades(self, tmp_path):
        a = self.pulls("log_uniform", tmp_path)
        assert a.min() >= 0.02 - 1e-3
        assert a.max() <= 2 + 1e-3
        assert np.log(a).std() == pytest.approx(math.log(100) / math.sqrt(12), rel=0.35)

    def test_noise_once_is_the_same_in_every_round_and_afresh_is_not(self, tmp_path):
        for harden, same in (("noise_once", True), ("noise_afresh", False)):
            method = FedBaF(harden=harden, noise=1.0, foundation="x", local=STEP)
            fed, _ = federation(method, [3.0] * 200, {"a": [[4.0] * 200]}, tmp_path, [0.0] * 200)
            first, second = (method.w_pre(fed, t)["w"].tensor for t in (0, 1))
            assert torch.equal(first, second) == same
            assert float(first.std()) == pytest.approx(3.0, rel=0.2)  # one RMS of w_0
            again = FedBaF(harden=harden, noise=1.0, foundation="x", local=STEP)
            fed, _ = federation(again, [3.0] * 200, {"a": [[4.0] * 200]}, tmp_path, [0.0] * 200)
            assert torch.equal(again.w_pre(fed, 0)["w"].tensor, first)  # the key decides

    def test_noise_once_is_each_runs_own_where_one_method_serves_several(self, tmp_path):
        def method():
            return FedBaF(harden="noise_once", foundation="x", local=STEP)

        def drawn(by, key):
            fed, _ = federation(by, [3.0] * 20, {"a": [[4.0] * 20]}, tmp_path / key.hex(), [0.0] * 20, key)
            return by.w_pre(fed, 0)["w"].tensor

        shared, one, two = method(), b"1" * 32, b"2" * 32
        assert not torch.equal(drawn(shared, one), drawn(shared, two))
        assert torch.equal(drawn(shared, two), drawn(method(), two))  # as after a resume

    def test_another_key_draws_another_alpha(self, tmp_path):
        a = [self.pulls("none", tmp_path / str(i), key=bytes([i]) * 32)[0] for i in range(6)]
        assert len({round(float(x), 5) for x in a}) == 6


class TestSettings:
    @pytest.mark.parametrize(
        ("keys", "says"),
        [
            ({}, "method.foundation is missing"),
            ({"foundation": "x", "psi": -1.0}, "method.psi"),
            ({"foundation": "x", "psi": math.nan}, "method.psi"),
            ({"foundation": "x", "psi": math.inf}, "method.psi"),
            ({"foundation": "x", "noise": math.inf}, "method.noise"),
            ({"foundation": "x", "base": Centralised()}, r"method\.base\.name: this method trains on pooled rows"),
            ({"foundation": "x", "base": Ditto()}, r"method\.base\.name: this method gives each client its own model"),
            ({"foundation": "x", "base": FedProx(mu=-1.0)}, r"method\.base\.mu = -1"),
            ({"foundation": "x", "base": FedAdam(tau=0.0)}, r"method\.base\.tau = 0"),
            ({"foundation": "x", "rounds": -1}, r"method\.rounds = -1"),
            ({"foundation": "x", "cap": "None"}, 'did you mean "none"'),
            ({"foundation": "x", "harden": "per_tenser"}, 'did you mean "per_tensor"'),
            ({"foundation": "x", "noise": 0.0}, "method.noise"),
            ({"foundation": "x", "identical": ("classes",)}, "method.identical"),
        ],
    )
    def test_refused(self, keys, says):
        with pytest.raises(InputError, match=says):
            checked(FedBaF(**keys))

    def test_a_setting_given_twice_is_refused(self):
        with pytest.raises(InputError, match=r"method\.base\.rounds: set it once"):
            FedBaF(rounds=5, base=FedProx(rounds=7))
        assert FedBaF(rounds=5, base=FedProx(rounds=5)).base == FedProx(rounds=5)

    def test_a_state_without_a_model_is_no_base(self):
        with pytest.raises(TypeError, match="holds no model"):
            with_model({"w": 1}, Params({"w": torch.ones(1)}), Params({"w": torch.ones(1)}))


def experiment(name="fedbaf", rounds=3, **method):
    keys = {"foundation": "nano-vit"} if name != "fedavg" else {}
    return {
        "data": {"name": "digits", "limit": 200, "partition": {"name": "iid", "clients": 4}},
        "model": {"name": "nano-vit", "weights": "random", "adaptation": {"name": "full"}},
        "method": {"name": name, "rounds": rounds, "local": {"learning_rate": 0.05}, **keys, **method},
        "run": {"seed": 1, "workers": 1},
    }


class TestRuns:
    @pytest.mark.proof
    def test_alpha_is_fresh_in_every_run_and_repeated_in_a_resumed_one(self, tmp_path, monkeypatch):
        first = fedfm.run(experiment(rounds=2), tmp_path / "a")
        second = fedfm.run(experiment(rounds=2), tmp_path / "b")
        assert first["params_sha256"] != second["params_sha256"]
        key = read_secret(tmp_path / "a/private/server/alpha.secret")
        monkeypatch.setattr("fedfm.runtime.client_memory.entropy", lambda n: key)
        third = fedfm.run(experiment(rounds=2), tmp_path / "c")
        assert third["params_sha256"] == first["params_sha256"]
        stop_in_steps(monkeypatch, FedAvg, [2])
        run_stopped(experiment(rounds=2), tmp_path / "d")
        assert fedfm.resume(tmp_path / "d")["params_sha256"] == first["params_sha256"]

    @pytest.mark.proof
    def test_the_servers_output_contains_neither_the_foundation_nor_alpha(self, tmp_path):
        result = fedfm.run(experiment(rounds=2), tmp_path / "a")
        assert result["details"]["matching"]["left_out"]
        for path in (p for p in (tmp_path / "a").rglob("*") if p.is_file()):
            if "private" in path.relative_to(tmp_path / "a").parts:
                assert path.stat().st_mode & 0o077 == 0, path
        loose = [p for p in (tmp_path / "a").rglob("*") if p.suffix in (".json", ".jsonl", ".html")]
        assert all("alpha" not in p.read_text() or p.name == "report.html" for p in loose)

    def test_moments_lie_in_private(self, tmp_path):
        fedfm.run(experiment(rounds=1, base={"name": "fedadam"}), tmp_path / "a")
        kept = tmp_path / "a/private/checkpoint"
        assert all(path.stat().st_mode & 0o077 == 0 for path in kept.iterdir())
        assert not list(tmp_path.glob("a/checkpoint/*"))

    def test_weight_initialisation_starts_from_the_foundation_model(self, tmp_path):
        fedfm.run(experiment("weight_init", rounds=0), tmp_path / "a")
        from safetensors.torch import load_file

        start = load_file(tmp_path / "a/adapter/model.safetensors")
        import importlib.resources

        there = load_file(str(importlib.resources.files("fedfm.models") / "nano_vit/model.safetensors"))
        name = next(n for n in there if n.endswith("layernorm_after.weight"))
        assert any(torch.equal(t, there[name].float()) for t in start.values() if t.shape == there[name].shape)

    def test_an_unknown_foundation_is_refused_before_the_first_round(self, tmp_path):
        with pytest.raises(InputError, match=r"method\.foundation"):
            fedfm.run(experiment(foundation="no/such-model"), tmp_path / "a")
        assert not (tmp_path / "a").exists()

    def test_an_adapters_frozen_base_is_no_secret(self, tmp_path):
        tables = experiment()
        tables["model"]["adaptation"] = {"name": "lora", "rank": 2}
        with pytest.raises(InputError, match="only an adapter can be mixed in"):
            fedfm.run(tables, tmp_path / "a")

    @pytest.mark.proof
    def test_an_adapter_mixes_with_one_of_its_rank_and_scale(self, tmp_path):
        tables = experiment("fedavg", rounds=1)
        tables["model"] = {"name": "nano-vit", "adaptation": {"name": "lora", "rank": 2}}
        fedfm.run(tables, tmp_path / "theirs")
        tables["method"] = experiment(foundation=str(tmp_path / "theirs/adapter"))["method"]
        result = fedfm.run(tables, tmp_path / "ours")
        assert result["details"]["matching"]["tensors"] > 0
        assert all("labels" in reason for reason in result["details"]["matching"]["left_out"])
        tables["model"]["adaptation"]["rank"] = 3
        with pytest.raises(InputError, match="another rank or scaling"):
            fedfm.run(tables, tmp_path / "other")


def test_weight_init_places_what_matches(tmp_path):
    method = WeightInit(foundation="x", local=STEP)
    fed, _ = federation(method, (5.0, 0.0), ROUNDS[0], tmp_path, (-3.0, 6.0))
    fed.begin(0)
    assert method.params_for(method.init(fed), "")["w"].tolist() == [-3.0, 6.0]
