"""FedNova and a median as a newcomer wrote them, with these tests, from docs/how-to/add-a-method.md alone."""

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import ClassVar

import newcomer
import numpy as np
import pytest
from safetensors.numpy import load_file

import fedfm
from fedfm import Client, Federation, Params, Update, on_client
from fedfm.cli import main
from fedfm.errors import InputError, RunError

RECORD: list[dict] = []  # one entry a round, written by the server half in this process


def arrays(p: Params) -> dict[str, np.ndarray]:
    return {name: p[name].detach().cpu().numpy().astype(np.float64) for name in p}


@dataclass(frozen=True)
class RecordedNova(newcomer.FedNova):
    """FedNova that also asks for the plain changes of the same round."""

    asks: ClassVar[tuple[str, ...]] = ("plain",)

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        plain = fed.ask(self.plain, of=fed.clients, w=w)
        after = super().step(fed, w, t)
        RECORD.append(
            {
                "before": arrays(w),
                "after": arrays(after),
                "metrics": dict(fed.metrics),
                "delta": [arrays(u.delta) for u in plain.values()],
                "rows": [u.weight for u in plain.values()],
            }
        )
        return after

    @on_client
    def plain(self, client: Client, w: Params) -> Update:
        return Update(self.local(client, w) - w, len(client.data.train), {})


@dataclass(frozen=True)
class RecordedMedian(newcomer.Median):
    asks: ClassVar[tuple[str, ...]] = ("train", "plain")

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        plain = fed.ask(self.plain, of=fed.clients, w=w)
        after = super().step(fed, w, t)
        RECORD.append({"before": arrays(w), "after": arrays(after), "delta": [arrays(u.delta) for u in plain.values()]})
        return after

    @on_client
    def plain(self, client: Client, w: Params) -> Update:
        return Update(self.local(client, w) - w, len(client.data.train), {})


EXPERIMENT = Path(__file__).with_name("newcomer.toml")
UNEQUAL = {
    "data.partition": {"name": "dirichlet", "clients": 3, "alpha": 1.0},
    "method.local": {"name": "sgd", "batch_size": 8, "epochs": 2},
}


def run(tmp_path, method, name="r", **extra):
    RECORD.clear()
    experiment = fedfm.Experiment.load(EXPERIMENT, {"method.name": method, "run.workers": 1, **extra.pop("over", {})})
    return fedfm.run(experiment, tmp_path / name)


def weights(tmp_path, name):
    return load_file(tmp_path / name / "adapter" / "model.safetensors")


def test_fednova_against_numpy(tmp_path):
    run(tmp_path, "test_newcomer_methods:RecordedNova", over=UNEQUAL)
    assert len(RECORD) == 2
    for r in RECORD:
        n = np.array(r["rows"], dtype=np.float64)
        p = n / n.sum()
        tau = np.array([2 * ceil(k / 8) for k in n], dtype=np.float64)
        assert len(set(tau)) > 1, "the test needs clients with different tau"
        tau_eff = float(p @ tau)
        assert r["metrics"]["tau"] == pytest.approx(tau_eff, rel=1e-6)
        differs = False
        for name, before in r["before"].items():
            d = sum(pk * delta[name] / tk for pk, tk, delta in zip(p, tau, r["delta"], strict=True))
            np.testing.assert_allclose(r["after"][name], before + tau_eff * d, rtol=1e-5, atol=1e-6)
            fedavg = before + sum(pk * delta[name] for pk, delta in zip(p, r["delta"], strict=True))
            differs |= not np.allclose(r["after"][name], fedavg, rtol=1e-5, atol=1e-6)
        assert differs, "not FedAvg"


@pytest.mark.proof
def test_fednova_is_fedavg_where_rows_are_equal(tmp_path):
    equal = {"data.limit": 150, "method.local": {"name": "sgd", "batch_size": 8, "epochs": 2}}
    run(tmp_path, "test_newcomer_methods:RecordedNova", "recorded", over=equal)
    assert len(set(RECORD[0]["rows"])) == 1
    nova = run(tmp_path, "newcomer:FedNova", "nova", over=equal)
    average = run(tmp_path, "fedavg", "fedavg", over=equal)
    a, b = weights(tmp_path, "nova"), weights(tmp_path, "fedavg")
    assert a.keys() == b.keys()
    assert a
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6)
    assert nova["accuracy"] == pytest.approx(average["accuracy"])


@pytest.mark.proof
def test_fednova_is_not_fedavg_where_steps_differ(tmp_path):
    run(tmp_path, "newcomer:FedNova", "nova", over=UNEQUAL)
    run(tmp_path, "fedavg", "fedavg", over=UNEQUAL)
    a, b = weights(tmp_path, "nova"), weights(tmp_path, "fedavg")
    assert any(not np.allclose(a[k], b[k], rtol=1e-5, atol=1e-6) for k in a)


@dataclass(frozen=True)
class Untold(newcomer.FedNova):
    """FedNova whose clients do not send what the server half reads."""

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        return Update(self.local(client, w) - w, len(client.data.train), client.metrics)


SECURE = {"aggregation.name": "secure", "aggregation.metrics": ["loss"]}
NOISE = {"privacy": {"unit": "client", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}}


@pytest.mark.parametrize(
    ("method", "over", "why"),
    [
        ("newcomer:FedNova", SECURE, 'set [aggregation] name = "secure", metrics = ["loss", "tau"]'),
        ("test_newcomer_methods:Untold", {}, "no client reported it"),
        ("test_newcomer_methods:Untold", SECURE | {"aggregation.metrics": ["tau"]}, "or its sum is 0"),
        ("newcomer:FedNova", NOISE, "under [privacy] metrics stay at the clients"),
    ],
)
def test_a_metric_that_clients_did_not_report_is_named(tmp_path, method, over, why):
    with pytest.raises(RunError) as stop:
        run(tmp_path, method, over=over)
    assert str(stop.value).startswith('round 1: fed.metrics has no "tau": ')
    assert why in str(stop.value)


@pytest.mark.proof
def test_fednova_under_secure_aggregation_with_its_metric(tmp_path):
    run(tmp_path, "newcomer:FedNova", "plain", over=UNEQUAL)
    run(tmp_path, "newcomer:FedNova", "secure", over=UNEQUAL | SECURE | {"aggregation.metrics": ["loss", "tau"]})
    a, b = weights(tmp_path, "plain"), weights(tmp_path, "secure")
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clients", [3, 4])
def test_median_against_numpy(tmp_path, clients):
    over = {**UNEQUAL, "data.partition": {"name": "iid", "clients": clients}}
    run(tmp_path, "test_newcomer_methods:RecordedMedian", over=over)
    assert len(RECORD) == 2
    for r in RECORD:
        assert len(r["delta"]) == clients
        for name, before in r["before"].items():
            median = np.median(np.stack([d[name] for d in r["delta"]]), axis=0)
            np.testing.assert_allclose(r["after"][name], before + median, rtol=1e-6, atol=1e-7)
            assert np.abs(median).max() > 1e-4


@pytest.mark.proof
@pytest.mark.parametrize("method", ["newcomer:FedNova", "newcomer:Median"])
def test_one_and_two_workers_give_the_same_bits(tmp_path, method):
    results = [run(tmp_path, method, f"w{k}", over={**UNEQUAL, "run.workers": k}) for k in (1, 2)]
    assert results[0]["params_sha256"] == results[1]["params_sha256"]


@pytest.mark.parametrize("local", [{"name": "adam"}, {"name": "proximal"}, {"name": "sgd", "momentum": 0.9}])
def test_fednova_takes_plain_sgd_only(local):
    with pytest.raises(InputError):
        fedfm.Experiment.load(EXPERIMENT, {"method.local": local})


PLAIN = """
from dataclasses import dataclass
import newcomer
from fedfm import Client, Params, Update, on_client

@dataclass(frozen=True)
class Plain(newcomer.FedNova):
    @on_client
    def train({signature}:
        return super().train(client, w)
"""


@pytest.mark.parametrize(
    ("signature", "what"),
    [
        ("self, client, w: Params) -> Update", "the parameter client"),
        ("self, client: Client, w) -> Update", "the parameter w"),
        ("self, client: Client, w: Params)", "the return value"),
    ],
)
def test_a_client_half_without_annotations_is_refused_where_it_is_defined(
    tmp_path, monkeypatch, capsys, signature, what
):
    """Engines that send messages check them by the annotations: without, one worker alone ran it."""
    (tmp_path / "plain_methods.py").write_text(PLAIN.format(signature=signature))
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["run", str(EXPERIMENT), "--set", "method.name=plain_methods:Plain", "--out", str(tmp_path / "r")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"Plain.train: {what} has no annotation" in line
    assert not (tmp_path / "r").exists()
