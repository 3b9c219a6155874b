"""A clipping norm that follows the clients: its cost, its limit, and complete runs."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedfm
from fedfm.aggregation._client_level import WITHIN
from fedfm.aggregation._lattice import flat_of
from fedfm.aggregation.base import Aggregator
from fedfm.aggregation.private import CentralGaussian, DistributedGaussian
from fedfm.config.experiment import Experiment
from fedfm.core.client import Client, ClientData, Update
from fedfm.core.federation import Federation
from fedfm.core.rows import Rows
from fedfm.errors import ClientFault, InputError
from fedfm.linalg.params import Params
from fedfm.privacy.clipping import AdaptiveClip
from fedfm.privacy.composition import Releases, epsilon_of
from fedfm.training.scheduler import train_client
from small import experiment as small
from stopping import run_stopped, stop_in_means
from toy import Quadratic

DELTA = 1e-5
CLIENT = {"unit": "client", "noise_multiplier": 0.5, "clip_norm": 0.1, "clip_quantile": 0.5, "delta": DELTA}
HIDDEN = CLIENT | {"aggregator": "secagg"}
DISTRIBUTED = HIDDEN | {"mechanism": "distributed_gaussian"}


def mechanism(z=1.0, start=1.0, quantile=0.5, rate=0.2, hidden=False):
    return CentralGaussian(1.0, z, DELTA, math.inf, 1, hidden, adaptive=AdaptiveClip(start, quantile, rate))


def client(clip):
    return Client(
        "c",
        ClientData(Rows, Rows, Rows),
        Quadratic(),
        {},
        0,
        secret=lambda _: bytes(32),
        scale=clip,
        trainer=train_client,
    )


class Nobody:
    clients = ()


def server():
    fed = Federation(Nobody(), model=Quadratic(), aggregator=Aggregator(), secret=lambda name: bytes(32))
    fed.begin(1)
    return fed


# --- what one client can change ---------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.floats(0.01, 100), st.floats(1, 1e5))
def test_updates_and_count_cost_what_z_states(z, clients):
    sigma_b = AdaptiveClip.count_noise(clients, z)
    z_delta = AdaptiveClip.update_noise(z, sigma_b)
    assert sigma_b >= clients / 20
    assert z <= z_delta <= z * math.sqrt(4 / 3) * (1 + 1e-9)
    # Two independent Gaussian mechanisms: mu^2 adds up (Dong, Roth, Su 2022), of sensitivity 1 and 1/2.
    assert (1 / z_delta) ** 2 + (0.5 / sigma_b) ** 2 == pytest.approx(1 / z**2, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), st.floats(1e-4, 1e4), st.floats(0.2, 30))
def test_no_client_changes_the_sum_by_more_than_the_accountant_assumes(values, clip, z):
    m, delta = mechanism(z), Params({"w": torch.tensor(values)})
    sent = m.bound(client(clip), Update(delta, 9.0, {"loss": 1.0}))
    x = flat_of(sent.delta)
    sigma_b = AdaptiveClip.count_noise(50, z)
    whitened = float(x[:-1] @ x[:-1]) / AdaptiveClip.update_noise(z, sigma_b) ** 2 + (x[-1] / sigma_b) ** 2
    assert whitened <= 1 / z**2 * (1 + 1e-9)
    assert (sent.weight, sent.metrics) == (1.0, {})
    assert x[-1] == (0.5 if math.sqrt(float(flat_of(delta) @ flat_of(delta))) <= clip else -0.5)


def test_a_lie_about_the_bit_or_the_length_counts_as_one_client():
    like = Params({"w": torch.zeros(2)}).layout
    lie = Update(Params({"w": torch.tensor([300.0, 400.0]), WITHIN: torch.tensor([1e6])}), 1.0)
    m, fed = mechanism(z=1e-9, start=2.0), server()
    got = m.release(fed, iter([lie]), None, 4, like)
    assert got["w"].tolist() == pytest.approx([2.0 * 0.6 / 4, 2.0 * 0.8 / 4], rel=1e-5)
    # The count is 1/2 + noise of deviation 4/20.
    assert abs(fed.metrics["within_clip_norm"] - (0.5 + 0.5 / 4)) < 6 * 0.2 / 4


@pytest.mark.parametrize("clip", [None, 0.0, -1.0, math.inf, math.nan])
def test_a_client_refuses_what_is_no_clip(clip):
    with pytest.raises(ClientFault, match="the clipping norm is"):
        mechanism().bound(client(clip), Update(Params({"w": torch.ones(2)}), 1.0))


def test_both_parts_have_their_noise():
    like = Params({"w": torch.zeros(40_000)}).layout
    m, z, asked, clip = mechanism(z=2.0, start=3.0), 2.0, 200.0, 3.0
    fed = server()
    got = m.release(fed, iter([]), None, asked, like)["w"]
    z_delta = AdaptiveClip.update_noise(z, 10.0)
    assert float(got.std()) == pytest.approx(z_delta * clip / asked, rel=0.02)
    shares = []
    for t in range(2, 402):
        fed.begin(t)
        m.release(fed, iter([]), None, asked, Params({"w": torch.zeros(t)}).layout)
        shares.append(fed.metrics["within_clip_norm"])
    assert np.std(shares) == pytest.approx(10.0 / asked, rel=0.15)
    assert np.mean(shares) == pytest.approx(0.5, abs=5 * 10.0 / asked / 20)


# --- where the clip goes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.8])
def test_the_clip_finds_the_quantile_of_the_norms(quantile):
    """100 clients of known norms; Algorithm 1 is computed beside, from the shares that the server notes."""
    norms = np.random.default_rng(0).lognormal(0.0, 0.7, 100)
    m, fed = mechanism(z=0.01, start=0.2, quantile=quantile), server()
    deltas = [Params({"w": torch.tensor([float(n), 0.0])}) for n in norms]
    like, expected = deltas[0].layout, 0.2
    for t in range(1, 61):
        fed.begin(t)
        (clip,) = m.message(fed).values()
        assert clip == pytest.approx(expected)
        m.release(fed, (m.bound(client(clip), Update(d, 1.0)) for d in deltas), None, 100, like)
        share = fed.metrics["within_clip_norm"]
        assert abs(share - (norms <= clip).mean()) < 6 * 5 / 100
        expected *= math.exp(-0.2 * (share - quantile))
    assert expected == pytest.approx(np.quantile(norms, quantile), rel=0.15)


# --- whole runs -------------------------------------------------------------------------------------------------------


def tables(folder, privacy=CLIENT, **more):
    return small(folder, method={"fraction": 1.0}, privacy=privacy) | more


def clips(folder):
    lines = [line for line in fedfm.load_run(folder).metrics() if line["round"]]
    return [(line["clip_norm"], line["within_clip_norm"]) for line in lines]


@pytest.mark.parametrize("privacy", [CLIENT, HIDDEN, DISTRIBUTED])
def test_a_run_shows_the_clip_of_each_round_and_spends_the_same(privacy, tmp_path):
    result = fedfm.run(tables(tmp_path, privacy), tmp_path / "run")
    least = epsilon_of([Releases(0.5, 4)], DELTA)
    assert least <= result["epsilon"] <= least * (1.1 if privacy == DISTRIBUTED else 1 + 1e-9)
    found = clips(tmp_path / "run")
    assert found[0][0] == 0.1
    for (clip, share), (then, _) in itertools.pairwise(found):
        assert then == pytest.approx(clip * math.exp(-0.2 * (share - 0.5)))
    (entry,) = fedfm.load_run(tmp_path / "run").manifest["ledger"]["entries"]
    assert "units of the round's clipping norm" in entry["composition"]
    assert entry["sensitivity"] / entry["sigma"] == pytest.approx(math.sqrt(4) / 0.5)


def test_secure_sums_have_the_bits_of_sums_in_the_clear(tmp_path, known_secrets):
    found = {fedfm.run(tables(tmp_path, p), tmp_path / str(i))["params_sha256"] for i, p in enumerate((CLIENT, HIDDEN))}
    e = tables(tmp_path)
    found.add(fedfm.run(e | {"run": e["run"] | {"workers": 2, "wire": True}}, tmp_path / "wire")["params_sha256"])
    assert len(found) == 1


def test_a_killed_run_goes_on_with_its_clip(tmp_path, known_secrets, monkeypatch):
    straight = fedfm.run(tables(tmp_path), tmp_path / "straight")
    seen = stop_in_means(monkeypatch, lambda seen: len(seen) == 3)
    run_stopped(tables(tmp_path), tmp_path / "run")
    resumed = fedfm.resume(tmp_path / "run")
    assert [t for t, *_ in seen] == [1, 2, 3, 3, 4]
    assert resumed["params_sha256"] == straight["params_sha256"]
    assert clips(tmp_path / "run") == clips(tmp_path / "straight")


@pytest.mark.proof
def test_an_adaptive_clip_works_with_secret_coins(tmp_path):
    e = small(tmp_path, method={"fraction": 0.4}, privacy=CLIENT)
    assert fedfm.run(e, tmp_path / "run")["epsilon"] == pytest.approx(epsilon_of([Releases(0.5, 4, 0.4)], DELTA))
    assert len(clips(tmp_path / "run")) == 4


def test_shares_of_the_noise_add_up_in_both_parts(tmp_path):
    m = Experiment.from_dict(tables(tmp_path, DISTRIBUTED)).aggregation.mechanism
    assert isinstance(m, DistributedGaussian)
    zeros, t, n = np.zeros(30_001, np.int64), 4, 60
    whole = sum(m._add_noise(bytes([i]) * 32, "p", zeros, n, t) for i in range(t)) * m.step
    assert whole[:-1].std() == pytest.approx(AdaptiveClip.update_noise(0.5, 3.0), rel=0.03)
    counts = [sum(m._add_noise(bytes([i]) * 32, f"{k}", zeros[:2], n, t)[-1] for i in range(t)) for k in range(500)]
    assert np.std(counts) * m.step == pytest.approx(3.0, rel=0.15)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"clip_quantile": 1.5}, r"privacy\.clip_quantile"),
        ({"clip_norm": None}, r"privacy\.clip_norm is missing"),
        ({"clip_learning_rate": 0.0}, r"privacy\.clip_learning_rate"),
        ({"mechanism": "dp_sgd", "unit": "record"}, "clips to a fixed norm"),
        ({"mechanism": "correlated_gaussian"}, "the quantile would change it"),
    ],
)
def test_contradictions_are_refused(change, said, tmp_path):
    privacy = {key: value for key, value in (CLIENT | change).items() if value is not None}
    with pytest.raises(InputError, match=said):
        Experiment.from_dict(tables(tmp_path, privacy))
