"""Whole runs with secure aggregation, on every engine, after a kill."""

import json

import numpy as np
import pytest
from safetensors.torch import load_file
from sklearn.datasets import load_digits

import fedfm as package
from fedfm.aggregation._secagg_client import Member
from fedfm.aggregation.secure import Secure
from fedfm.api.predict import predict
from fedfm.config.experiment import Experiment
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from processes import experiment, fedfm, here, same
from small import experiment as small

# --- whole runs ------------------------------------------------------------------------------------------------------


def tables(folder, privacy=None, **more):
    found = small(folder, method={"name": "fedavg", "fraction": 1.0}, run={"workers": 1})
    return found | ({"privacy": {"aggregator": "secagg", **privacy}} if privacy is not None else {}) | more


def same_model(a, b, tolerance):
    a, b = (Params(load_file(folder / "adapter" / "model.safetensors")) for folder in (a, b))
    return (a - b).norm() < tolerance * b.norm()


def test_a_run_gives_the_plain_result_whatever_runs_it(tmp_path):
    plain = package.run(tables(tmp_path), tmp_path / "plain")
    results = []
    for i, run in enumerate(({"workers": 1}, {"workers": 2}, {"workers": 1, "wire": True})):
        found = tables(tmp_path, {})
        results.append(package.run(found | {"run": found["run"] | run}, tmp_path / str(i)))
        assert same_model(tmp_path / str(i), tmp_path / "plain", 1e-5)
    assert len({r["params_sha256"] for r in results}) == 1  # the masks leave no trace
    assert results[0]["accuracy"] == plain["accuracy"]
    assert results[0]["epsilon"] is None
    assert set(results[0]["client_accuracy"].values()) == {None}
    lines = (tmp_path / "0" / "messages.jsonl").read_text().splitlines()
    train = [x for x in map(json.loads, lines) if x["to"] == "server" and x["handler"].startswith("train.")]
    assert {x["form"] for x in train} == {"masked"}
    a, b = (package.load_run(tmp_path / name).metrics() for name in ("plain", "0"))
    for x, y in zip(a[1:], b[1:], strict=True):
        assert y["train_loss"] == pytest.approx(x["train_loss"], rel=1e-5)


def test_models_that_clients_keep_stay_with_them(tmp_path):
    found = tables(tmp_path, {}, method={"name": "ditto", "rounds": 2})
    result = package.run(found, tmp_path / "run")
    lines = [json.loads(x) for x in (tmp_path / "run/messages.jsonl").read_text().splitlines()]
    assert {x["handler"] for x in lines if not x["handler"].startswith("aggregate.")} == {
        "train.Ditto_train",
        "scores.Evaluation_evaluate",
        "scores.Evaluation_evaluate_start",
    }
    assert json.loads((tmp_path / "run/manifest.json").read_text())["seen"]["smallest_sum"] == 5
    assert 0 < result["accuracy"] == result["local_accuracy"] <= 1
    assert result["params_sha256"] == result["server_sha256"]
    assert not (tmp_path / "run/clients").exists()
    with pytest.raises(InputError, match="has no model of client-00"):
        predict(tmp_path / "run", found["data"]["path"], "client-00")


def test_the_aggregation_table_has_the_settings(tmp_path):
    e = Experiment.from_dict(tables(tmp_path, {}, aggregation={"name": "secure", "clip_norm": 0.5}))
    assert e.aggregation == Secure(clip_norm=0.5)
    assert Experiment.from_dict(e.to_dict()) == e
    assert Experiment.from_dict(tables(tmp_path, {})).aggregation == Secure()
    with pytest.raises(InputError, match=r'aggregation.name = "secure": the server of method "kd" looks at single'):
        Experiment.from_dict(tables(tmp_path, method={"name": "kd"}, aggregation={"name": "secure"}))
    with pytest.raises(InputError, match=r"privacy\.unit is missing"):
        Experiment.from_dict(tables(tmp_path, {"target_epsilon": 1.0}))


def digits(folder):
    """Handwritten digits as features: 1,797 rows of 64 pixels."""
    found = load_digits()
    split = np.where(np.arange(len(found.target)) % 5 == 0, "test", "train")
    np.savez(folder / "digits.npz", x=(found.data / 16).astype(np.float32), y=found.target, split=split)
    return folder / "digits.npz"


@pytest.mark.parametrize(
    ("method", "sums"),
    [
        ({"name": "fedavg", "fraction": 0.6, "rounds": 3}, 3),
        ({"name": "ccvr", "rounds": 2, "fraction": 0.6}, 2),
        ({"name": "fedncm"}, 1),
        ({"name": "scaffold", "rounds": 2}, 2),
        ({"name": "fedpft", "pooled": True, "covariance": "spherical", "components": 1}, 1),
    ],
    ids=lambda x: x["name"] if isinstance(x, dict) else "",
)
def test_methods_give_the_plain_result_on_digits(method, sums, tmp_path, known_secrets):
    """Also with a part of the clients a round; keys are agreed once for all sums."""
    data = {"path": str(digits(tmp_path)), "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 5}}
    private = {"unit": "record", "target_epsilon": 8.0, "delta": 1e-5} if "pooled" in method else None
    found = []
    for aggregator in ("plain", "secagg"):
        privacy = {"aggregator": aggregator, **(private or {})}
        known = {"data": data, "model": {"name": "features"}, "method": method, "privacy": privacy}
        if aggregator == "plain" and private is None:
            del known["privacy"]
        found.append(package.run(known | {"run": {"workers": 1}}, tmp_path / aggregator))
    plain, hidden = found
    assert hidden["accuracy"] == pytest.approx(plain["accuracy"], abs=0.02)
    assert hidden["accuracy"] > 0.5
    lines = (tmp_path / "secagg" / "messages.jsonl").read_text().splitlines()
    up = [x for x in map(json.loads, lines) if x["to"] == "server" and x["counted"]]
    assert {x["form"] for x in up if x["handler"].startswith("train.")} == {"masked"}
    assert sum(x["handler"] == "aggregate.SecAgg_keys" for x in up) == 5
    assert sum(x["handler"] == "aggregate.SecAgg_unmask" for x in up) == 5 * sums
    assert not any(x["handler"] == "aggregate.SecAgg_consent" for x in up)


@pytest.mark.proof
def test_a_payload_that_differs_by_client_is_no_other_model(tmp_path):
    """FedPer's clients get the first head in the first round that they are in, and nothing later; LoRA's tensors."""
    data = {"name": "digits", "limit": 60, "partition": {"name": "iid", "clients": 4}}
    model = {"name": "nano-vit", "adaptation": {"name": "lora", "rank": 2}}
    method = {"name": "fedper", "rounds": 2, "fraction": 0.75, "local": {"epochs": 1}}
    found = {"data": data, "model": model, "method": method, "run": {"workers": 1}}
    results = [
        package.run(found | more, tmp_path / name)
        for name, more in (("plain", {}), ("secagg", {"privacy": {"aggregator": "secagg"}}))
    ]
    assert results[1]["excluded"] == results[0]["excluded"]
    losses = [[m["train_loss"] for m in package.load_run(tmp_path / n).metrics()[1:]] for n in ("plain", "secagg")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_killed_run_resumes_with_new_masks_to_the_same_bits(tmp_path, monkeypatch):
    straight = package.run(tables(tmp_path, {}), tmp_path / "straight")
    transport, calls, masked = type(Secure().transport), [], []
    reveal, protect = Member.reveal, transport.protect

    def dying(self, client, *what):
        calls.append(client.id)
        if len(calls) == 8:  # in round 2: all masked updates have left, some shares too
            raise KeyboardInterrupt
        return reveal(self, client, *what)

    def noting(self, client, update):
        masked.append((client.id, update.delta.sha256(), sent := protect(self, client, update)))
        return sent

    monkeypatch.setattr(transport, "protect", noting)
    monkeypatch.setattr(Member, "reveal", dying)
    with pytest.raises(KeyboardInterrupt):
        package.run(tables(tmp_path, {}), tmp_path / "broken")
    assert [m["round"] for m in package.load_run(tmp_path / "broken").metrics()] == [0, 1]
    resumed = package.resume(tmp_path / "broken")
    for key in ("params_sha256", "accuracy", "rounds", "excluded"):
        assert resumed[key] == straight[key], key
    again = {}
    for client, update, sent in masked:
        again.setdefault((client, update), []).append(sent.body)
    twice = [bodies for bodies in again.values() if len(bodies) == 2]
    assert len(twice) == len({client for client, _, _ in masked})
    assert not any((a == b).any() for a, b in twice)


# --- Flower ----------------------------------------------------------------------------------------------------------

PRIVACY = '[privacy]\naggregator = "secagg"'


@pytest.mark.release
def test_the_same_bits_under_flowers_simulation(tmp_path):
    exp = experiment(tmp_path, method='name = "fedavg"\nrounds = 2', run=PRIVACY)
    simulated = fedfm("run", exp, "--out", tmp_path / "simulated", "--engine", "simulation")
    same(simulated, here("run", exp, "--out", tmp_path / "local"))


@pytest.mark.deployment
def test_the_same_bits_on_a_superlink(tmp_path):
    exp = experiment(tmp_path, method='name = "fedavg"\nrounds = 2', run=PRIVACY)
    deployed = here("run", exp, "--out", tmp_path / "deployed", "--engine", "deployment")
    same(deployed, here("run", exp, "--out", tmp_path / "local"))
