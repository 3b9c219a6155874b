"""Aggregations that send messages of their own (``masks``): the mean's result on every engine, after a kill, without
those who drop out; and what a mechanism spends.
"""

import json
import os
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats

import fedfm as package
from fedfm.config.experiment import Experiment
from fedfm.core.client import Update
from fedfm.core.messages import Request
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.scaffold import Scaffold
from fedfm.runtime.client import Silos
from fedfm.runtime.client_memory import DiskMemory
from fedfm.training import SGD
from masks import KEY, ROUNDS, SCALE, UPDATE, Masked, Noisy, whole
from processes import begin, experiment, fedfm, here, rounds, same, until
from small import experiment as small
from toy import Toys, federation
from toy import run as played

ROWS = {"a": [1.0, 2.0], "b": [3.0], "c": [-4.0, 0.5, 0.25]}
METHOD = FedAvg(local=SGD(learning_rate=0.1))


def tables(folder, name="Masked", run=None, method=None, **keys):
    found = small(folder, method={"name": "fedavg", "fraction": 1.0, **(method or {})}, run=run or {})
    return found | {"aggregation": {"name": f"masks:{name}", **keys}}


def order(folder, client, message):
    """Tell a client at which message it drops out; the folder of the orders."""
    (folder / "orders").mkdir(exist_ok=True)
    (folder / "orders" / client).write_text(message)
    return str(folder / "orders")


class Tap:
    """A link that keeps what comes back."""

    def __init__(self, link):
        self._link, self.replies = link, []

    @property
    def clients(self):
        return self._link.clients

    def exchange(self, requests):
        for reply in self._link.exchange(requests):
            self.replies.append((requests[0].handler, reply))
            yield reply


# --- one round, worked by hand ---------------------------------------------------------------------------------------


def test_the_sum_is_exact_and_no_reply_reveals_an_update(tmp_path):
    fed = federation(METHOD, ROWS, tmp_path, aggregator=Masked())
    fed._link = tap = Tap(fed._link)
    fed.begin(1)
    mean = fed.mean(METHOD.train, w=fed.initial)
    # By hand: one full-batch step from w = 1 on rows a_k moves w by -0.1 (1 - mean(a_k)), with the weight n_k.
    deltas = {c: torch.tensor(1.0) - torch.tensor(0.1) * (1 - torch.tensor(a).mean()) - 1 for c, a in ROWS.items()}
    sums = sum(round(len(ROWS[c]) * float(d) * SCALE) for c, d in deltas.items())
    assert float(mean["w"]) == pytest.approx(sums / SCALE / 6, abs=1e-7)
    kinds = [handler for handler, _ in tap.replies]
    assert (
        kinds
        == ["aggregate.PairwiseMasks_agree"] * 3 + ["train.FedAvg_train"] * 3 + ["aggregate.PairwiseMasks_masked"] * 3
    )
    assert [reply.value for handler, reply in tap.replies if handler.startswith("train.")] == [None] * 3
    sent = {r.client: r.value.numpy() for handler, r in tap.replies if handler.endswith("masked")}
    for client, vector in sent.items():
        kept = DiskMemory(tmp_path, client, (1, 4))[UPDATE].numpy()
        assert kept.tolist() == [len(ROWS[client]), round(len(ROWS[client]) * float(deltas[client]) * SCALE)]
        assert (abs(vector - kept) > 1 << 32).all()  # the masks of two others, of 64 bits
    assert sum(sent.values()).tolist() == [6, sums]  # and in the sum they are gone
    forms = {(c.handler.rpartition("_")[2], c.form) for c in fed.transcript.pending if c.receiver == "server"}
    assert forms == {("agree", "plain"), ("train", "plain"), ("masked", "masked")}
    assert all(c.counted for c in fed.transcript.pending)
    assert fed.cohort == ("a", "b", "c")


def test_memories_are_those_of_the_round_and_call(tmp_path):
    """A round that is asked again finds what it found the first time, at the client and at the server."""
    fed = federation(METHOD, ROWS, tmp_path, aggregator=Masked())
    results = []
    for _ in range(2):
        fed.begin(1)
        results.append(fed.mean(METHOD.train, w=fed.initial).sha256())
        assert KEY in DiskMemory(tmp_path, "a", (1, 2))
        assert UPDATE not in DiskMemory(tmp_path, "a", (1, 2))  # what was kept in the second call
        assert UPDATE in DiskMemory(tmp_path, "a", (1, 3))
    assert results[0] == results[1]


@pytest.mark.parametrize(("message", "asked"), [("agree", 2), ("train", 2), ("masked", 3)])
def test_a_client_that_drops_out_is_named_and_left_out_of_the_sum(message, asked, tmp_path):
    orders = order(tmp_path, "b", message)
    fed = federation(METHOD, ROWS, tmp_path / "a", aggregator=Masked(orders))
    without = federation(METHOD, {c: ROWS[c] for c in "ac"}, tmp_path / "b", aggregator=Masked())
    found, expected = played(METHOD, fed, 2), played(METHOD, without, 2)
    assert found[-1].sha256() == expected[-1].sha256()
    assert [(e.round, e.client, e.code) for e in fed.excluded] == [(1, "b", "E_EXCEPTION"), (2, "b", "E_EXCEPTION")]
    assert f"gone at {message}" in fed.excluded[0].reason
    ends = [c for c in fed.transcript.pending if c.round == 1 and c.handler.endswith("masked") and c.sender == "server"]
    assert len(ends) == (3 + 2 if message == "masked" else asked)  # asked once more, among those who are left
    assert fed.heard == 2


def test_too_few_that_are_left_end_the_run_with_a_clear_message(tmp_path):
    orders = order(tmp_path, "a", "masked")
    order(tmp_path, "b", "masked")
    fed = federation(METHOD, ROWS, tmp_path / "a", aggregator=Masked(orders))
    with pytest.raises(RunError, match="round 1: 1 client is left, and the sum of one hides nothing"):
        played(METHOD, fed, 1)
    fed = federation(METHOD, ROWS, tmp_path / "b", aggregator=Masked(orders), min_clients=2)
    with pytest.raises(RunError, match=r"1 of 3 clients gave a valid reply to aggregate\.PairwiseMasks_masked"):
        played(METHOD, fed, 1)


def test_a_reply_of_another_length_is_left_out(tmp_path, monkeypatch):
    honest = Masked().transport.__class__.masked
    wrong = lambda self, client, keys: honest(self, client, keys)[: 1 if client.id == "b" else None]  # noqa: E731
    monkeypatch.setattr(Masked().transport.__class__, "masked", _like(honest, wrong))
    fed = federation(METHOD, ROWS, tmp_path, aggregator=Masked())
    played(METHOD, fed, 1)
    assert [(e.client, e.code) for e in fed.excluded] == [("b", "E_SHAPE")]


def _like(handler, other):
    """``other`` with the marks and annotations of a handler."""
    other.__name__, other.__annotations__ = handler.__name__, handler.__annotations__
    other.__dict__.update(handler.__dict__)
    return other


def test_a_method_that_reads_how_many_were_in_the_mean_gets_that_number(tmp_path):
    """SCAFFOLD's |S|/K: those whose update arrived, not those who answered the last message."""
    method = Scaffold(local=SGD(learning_rate=0.1))
    orders = order(tmp_path, "b", "train")
    fed = federation(method, ROWS, tmp_path / "a", aggregator=Masked(orders))
    plain = federation(method, ROWS, tmp_path / "b", attack=_failing("b"))
    a, b = played(method, fed, 3)[-1], played(method, plain, 3)[-1]
    assert float(a.x["w"]) == pytest.approx(float(b.x["w"]), abs=1e-6)
    assert float(a.c["w"]) == pytest.approx(float(b.c["w"]), abs=1e-6)


def _failing(name):
    def run(fn, client, payload):
        if client.id == name:
            raise ConnectionError("gone")
        return fn(client, **payload)

    return run


def test_an_attack_changes_the_update_and_not_the_aggregations_messages(tmp_path):
    found = tables(tmp_path) | {"attack": {"name": "scaled_update", "fraction": 0.4, "factor": 3.0}}
    plain = found | {"aggregation": {"name": "mean"}}
    results = [package.run(t, tmp_path / str(i)) for i, t in enumerate((found, plain))]
    assert results[0]["attackers"] == results[1]["attackers"] != []
    assert results[0]["excluded"] == []
    assert results[0]["accuracy"] == pytest.approx(results[1]["accuracy"], abs=0.03)


# --- whole runs ------------------------------------------------------------------------------------------------------


def test_a_run_gives_the_means_result_and_the_same_bits_whatever_runs_it(tmp_path):
    links = ({"workers": 1}, {"workers": 2}, {"workers": 1, "wire": True})
    results = [package.run(tables(tmp_path, run=run), tmp_path / str(i)) for i, run in enumerate(links)]
    assert len({r["params_sha256"] for r in results}) == 1
    assert len({(r["bytes_up"], r["bytes_down"], r["accuracy"]) for r in results}) == 1
    mean = package.run(tables(tmp_path) | {"aggregation": {"name": "mean"}}, tmp_path / "mean")
    assert results[0]["accuracy"] == mean["accuracy"]
    a, b = (Params(load_file(tmp_path / name / "adapter" / "model.safetensors")) for name in ("0", "mean"))
    assert (a - b).norm() < 1e-5 * b.norm()
    assert [m["excluded"] for m in package.load_run(tmp_path / "0").metrics()] == [[]] * (mean["rounds"] + 1)


def test_a_run_that_was_killed_between_two_messages_resumes_to_the_same_bits(tmp_path, monkeypatch):
    found = tables(tmp_path, method={"rounds": 4}, run={"workers": 1})
    straight = package.run(found, tmp_path / "straight")
    transport = type(Masked().transport)
    asked = transport.masked
    calls = []

    def dying(self, client, keys):
        calls.append(client.id)
        if len(calls) == 2 * len(keys) - 1:  # in round 2: all keep updates, some have sent theirs, none is committed
            raise KeyboardInterrupt
        return asked(self, client, keys)

    monkeypatch.setattr(transport, "masked", _like(asked, dying))
    with pytest.raises(KeyboardInterrupt):
        package.run(found, tmp_path / "broken")
    assert [m["round"] for m in package.load_run(tmp_path / "broken").metrics()] == [0, 1]
    resumed = package.resume(tmp_path / "broken")
    for key in ("params_sha256", "accuracy", "client_accuracy", "bytes_up", "bytes_down", "rounds", "excluded"):
        assert resumed[key] == straight[key], key
    for name in ("straight", "broken"):  # the server's own state: a round that was asked twice counts once
        assert DiskMemory(tmp_path / name / "private", "server", (5, 0))[ROUNDS] == 4


def test_a_run_names_clients_that_dropped_out_between_the_messages(tmp_path):
    found = tables(tmp_path, orders=order(tmp_path, "client-01", "masked"), method={"rounds": 2})
    result = package.run(found, tmp_path / "run")
    assert {(e["round"], e["client"], e["code"]) for e in result["excluded"]} == {
        (1, "client-01", "E_EXCEPTION"),
        (2, "client-01", "E_EXCEPTION"),
    }
    lines = [json.loads(x) for x in (tmp_path / "run" / "messages.jsonl").read_text().splitlines()]
    assert {x["form"] for x in lines if x["to"] == "server" and x["handler"].endswith("_masked")} == {"masked"}


def test_a_method_without_a_mean_is_refused(tmp_path):
    with pytest.raises(InputError, match="takes no mean"):
        Experiment.from_dict(tables(tmp_path, method={"name": "local"}), imports=True)


# --- mechanism -------------------------------------------------------------------------------------------------------


def test_a_mechanism_bounds_each_update_adds_its_noise_and_spends_on_the_ledger(tmp_path):
    results = [package.run(tables(tmp_path, "Noisy", run=run, method={"rounds": 3}), tmp_path / str(i))
               for i, run in enumerate(({"workers": 1}, {"workers": 2}))]  # fmt: skip
    assert results[0]["params_sha256"] == results[1]["params_sha256"]
    # Three releases of sensitivity C under noise z C are one of sensitivity sqrt(3) under noise z (Balle, Wang 2018).
    mu, epsilon = np.sqrt(3) / 2.0, results[0]["epsilon"]
    delta = stats.norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=1e-3)
    ledger = package.load_run(tmp_path / "0").manifest["ledger"]
    assert ledger["epsilon"] == epsilon
    assert [(e["unit"], e["composition"]) for e in ledger["entries"]] == [("client", f"round {t}") for t in (1, 2, 3)]
    again = package.resume(tmp_path / "0")
    assert again["epsilon"] == epsilon
    assert len(package.load_run(tmp_path / "0").manifest["ledger"]["entries"]) == 3


def test_the_mechanisms_bounded_updates_are_summed(tmp_path):
    noisy = Noisy(bound=0.05, multiplier=1e-9)
    fed = federation(METHOD, ROWS, tmp_path, aggregator=noisy)
    fed.begin(1)
    mean = fed.mean(METHOD.train, w=fed.initial)
    # Means 1.5, 3 and -13/12 of the rows: steps of 0.05, 0.2 and -0.208, of which two are cut to 0.05; uniform weights.
    assert float(mean["w"]) == pytest.approx((0.05 + 0.05 - 0.05) / 3, abs=1e-6)
    assert whole(noisy.mechanism.bound(None, _update(2.0)))[1] == pytest.approx(0.05 * SCALE, abs=1)


def _update(value):
    return Update(Params({"w": torch.tensor([value])}), 4.0)


# --- the silo's policy -----------------------------------------------------------------------------------------------


def test_an_aggregations_messages_are_part_of_the_mean(tmp_path):
    request = Request("a", "aggregate.PairwiseMasks_agree", {}, 1, 1)
    for allow, answered in ((("mean",), True), (("reply", "scores", "reveal"), False)):
        silos = Silos(METHOD, Masked(), Toys(ROWS), memory=tmp_path / str(answered), allow=allow)
        (value,) = silos.answer([request])
        assert (isinstance(value, str) and len(value) == 64) is answered
        if not answered:
            assert (value.code, value.reason) == (
                "E_REFUSED",
                'this silo\'s policy does not allow aggregate.PairwiseMasks_agree: "mean" is not in allow',
            )
        (value,) = silos.answer([request._replace(handler="query.PairwiseMasks_agree")])
        assert value.reason == "PairwiseMasks_agree answers aggregate, not query"


# --- Flower ----------------------------------------------------------------------------------------------------------

AGGREGATION = '[aggregation]\nname = "masks:Masked"'


@pytest.mark.simulation
def test_the_same_bits_under_flowers_simulation(tmp_path):
    orders = order(tmp_path, "client-02", "masked")
    exp = experiment(tmp_path, method='name = "fedavg"\nrounds = 2', run=f'{AGGREGATION}\norders = "{orders}"')
    simulated = fedfm("run", exp, "--out", tmp_path / "simulated", "--engine", "simulation")
    local = here("run", exp, "--out", tmp_path / "local")
    same(simulated, local)
    assert [(e["round"], e["client"], e["code"]) for e in simulated["excluded"]] == [
        (1, "client-02", "E_EXCEPTION"),
        (2, "client-02", "E_EXCEPTION"),
    ]


@pytest.mark.release
def test_the_same_bits_on_a_superlink_whose_server_app_was_killed(tmp_path):
    exp = experiment(tmp_path, method='name = "fedavg"\nrounds = 3', run=AGGREGATION)
    out = tmp_path / "deployed"
    running = begin("run", exp, "--out", out, "--engine", "deployment")
    until(lambda: rounds(out) >= 2 or running.poll() is not None)
    os.kill(int((out / "private" / "server.lock").read_text().split()[0]), signal.SIGKILL)
    _, error = running.communicate(timeout=300)
    assert running.returncode == 1, error[-2000:]
    deployed = fedfm("resume", out)
    same(deployed, here("run", exp, "--out", tmp_path / "local"))
    assert deployed["engine"] == "deployment"
    assert DiskMemory(out / "private", "server", (4, 0))[ROUNDS] == 3
