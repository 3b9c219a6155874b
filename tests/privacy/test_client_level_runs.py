"""Whole runs under client-level privacy: their ledger, their bits, their end, and what is refused."""

import math

import pytest

import fedfm
from fedfm.audits.audit import perform
from fedfm.config.experiment import Experiment
from fedfm.core.federation import Federation
from fedfm.core.fields import check
from fedfm.errors import InputError
from fedfm.privacy.composition import Releases, epsilon_of, epsilon_of_concentrated
from fedfm.runtime import client_memory
from small import experiment as small
from stopping import StopAfter, run_stopped, stop_in_means

CLIENT = {"unit": "client", "noise_multiplier": 0.5, "clip_norm": 1.0, "delta": 1e-5}
HIDDEN = CLIENT | {"aggregator": "secagg"}
DISTRIBUTED = HIDDEN | {"mechanism": "distributed_gaussian"}


def tables(folder, privacy=CLIENT, **more):
    return small(folder, method={"fraction": 1.0}, privacy=privacy) | more


@pytest.mark.parametrize("privacy", [CLIENT, HIDDEN, DISTRIBUTED])
def test_the_ledger_states_what_the_rounds_spend(privacy, tmp_path):
    result = fedfm.run(tables(tmp_path, privacy), tmp_path / "run")
    least = epsilon_of([Releases(0.5, 4)], 1e-5)
    assert result["epsilon"] == pytest.approx(least, rel=0.1 if privacy == DISTRIBUTED else 1e-9)
    assert result["epsilon"] >= least
    ledger = fedfm.load_run(tmp_path / "run").manifest["ledger"]
    (entry,) = ledger["entries"]
    assert (entry["unit"], entry["relation"], entry["delta"]) == ("client", "add_remove", 1e-5)
    assert entry["sensitivity"] / entry["sigma"] == pytest.approx(math.sqrt(4) / 0.5)
    assert entry["epsilon"] == ledger["epsilon"] == result["epsilon"]
    assert ("not against the server" in entry["note"]) == (privacy != DISTRIBUTED)
    assert "Spent: epsilon" in (tmp_path / "run" / "report.html").read_text()


def test_nothing_about_a_client_but_the_noisy_means_is_written(tmp_path):
    fedfm.run(tables(tmp_path), tmp_path / "run")
    for line in fedfm.load_run(tmp_path / "run").metrics():
        assert line["train_loss"] is None
        assert set(line.get("client_accuracy", {}).values()) <= {None}
    assert not (tmp_path / "run" / "clients").exists()


def test_the_bits_depend_on_the_secret_alone(tmp_path, known_secrets, monkeypatch):
    found = []
    for i, run in enumerate(({"workers": 1}, {"workers": 2}, {"workers": 1, "wire": True})):
        e = tables(tmp_path)
        found.append(fedfm.run(e | {"run": e["run"] | run}, tmp_path / str(i))["params_sha256"])
    found.append(fedfm.run(tables(tmp_path, HIDDEN), tmp_path / "hidden")["params_sha256"])
    assert len(set(found)) == 1
    monkeypatch.setattr(client_memory, "entropy", lambda n: b"\x08" * n)
    assert fedfm.run(tables(tmp_path), tmp_path / "other")["params_sha256"] not in found


@pytest.mark.parametrize("after", [0, 2])
def test_a_killed_run_repeats_its_noise_and_spends_once(after, tmp_path, known_secrets, monkeypatch):
    straight = fedfm.run(tables(tmp_path), tmp_path / "straight")
    released = stop_in_means(monkeypatch, lambda seen: len(seen) == after + 1)
    run_stopped(tables(tmp_path), tmp_path / "run")
    monkeypatch.setattr(client_memory, "entropy", lambda n: b"\x08" * n)  # the secret is not drawn again
    resumed = fedfm.resume(tmp_path / "run")
    again = [sha for t, _, sha in released if t == after + 1]
    assert len(again) == 2
    assert again[0] == again[1]
    assert (resumed["params_sha256"], resumed["epsilon"]) == (straight["params_sha256"], straight["epsilon"])
    assert len(fedfm.load_run(tmp_path / "run").manifest["ledger"]["entries"]) == 1


def test_a_round_that_a_resume_releases_with_another_sum_is_spent_twice(tmp_path, monkeypatch):
    """The server dies after it has released round 2; when the run goes on, a client has gone."""
    mean, exchange, kills = Federation.mean, Federation.exchange, []

    def dying(self, *args, **kwargs):
        got = mean(self, *args, **kwargs)
        if self.round == 2 and not kills:
            kills.append(1)
            raise KeyboardInterrupt
        return got

    def without(self, kind, handler, of, *args, **kwargs):
        gone = kills and self.round == 2 and kind == "train"
        return exchange(self, kind, handler, list(of)[1:] if gone else of, *args, **kwargs)

    monkeypatch.setattr(Federation, "mean", dying)
    monkeypatch.setattr(Federation, "exchange", without)
    with pytest.raises(KeyboardInterrupt):
        fedfm.run(tables(tmp_path), tmp_path / "run")
    result = fedfm.resume(tmp_path / "run")
    assert result["epsilon"] == pytest.approx(epsilon_of([Releases(0.5, 5)], 1e-5))
    told = "round 2 was released before, with another sum; epsilon includes one more release"
    assert told in fedfm.load_run(tmp_path / "run").manifest["notices"]


@pytest.mark.each_value
@pytest.mark.parametrize("kills", [1, 2])
@pytest.mark.parametrize("halting", [False, True])
def test_rounds_that_are_begun_twice_are_spent_twice_where_clients_add_noise(kills, halting, tmp_path, monkeypatch):
    """The server dies with the sum of round 2 in its memory; after a resume the same updates get other noise."""
    sums = stop_in_means(monkeypatch, lambda seen: seen[-1][0] == 2 and [t for t, *_ in seen].count(2) <= kills)
    cost = [epsilon_of_concentrated(n / (2 * 0.5**2), 1e-5) for n in range(8)]
    budget = {"halt_at_epsilon": (cost[3] + cost[4]) / 2} if halting else {}
    run_stopped(tables(tmp_path, DISTRIBUTED | budget), tmp_path / "run")
    for _ in range(kills - 1):
        with pytest.raises(KeyboardInterrupt):
            fedfm.resume(tmp_path / "run")
    result = fedfm.resume(tmp_path / "run")
    repeats = [sha for t, _, sha in sums if t == 2]
    assert len(set(repeats)) == len(repeats)
    assert result["rounds"] == (3 - kills if halting else 4)
    assert len(sums) == result["rounds"] + kills
    assert result["epsilon"] == pytest.approx(cost[len(sums)])
    manifest = fedfm.load_run(tmp_path / "run").manifest
    (entry,) = manifest["ledger"]["entries"]
    assert entry["epsilon"] == manifest["ledger"]["epsilon"] == result["epsilon"]
    told = f"rounds that began but were not completed: {kills}; each is one more release, which epsilon includes"
    assert told in manifest["notices"]
    assert fedfm.resume(tmp_path / "run") == result


def test_a_resume_without_its_secret_is_refused(tmp_path, monkeypatch):
    run_stopped(tables(tmp_path), tmp_path / "run", progress=StopAfter(2))
    (tmp_path / "run/private/server/noise.secret").unlink()
    with pytest.raises(InputError, match=r"noise\.secret is missing"):
        fedfm.resume(tmp_path / "run")


def test_a_budget_ends_the_run_before_the_round_that_exceeds_it(tmp_path):
    result = fedfm.run(tables(tmp_path, CLIENT | {"noise_multiplier": 1.0, "halt_at_epsilon": 8.0}), tmp_path / "run")
    assert result["rounds"] == 2
    assert result["epsilon"] == pytest.approx(epsilon_of([Releases(1.0, 2)], 1e-5))
    assert result["epsilon"] <= 8.0 < epsilon_of([Releases(1.0, 3)], 1e-5)
    run = fedfm.load_run(tmp_path / "run")
    assert "ended after 2 of 4 rounds: one more would exceed privacy.halt_at_epsilon" in run.manifest["notices"]
    assert run.manifest["finished"]
    assert fedfm.resume(tmp_path / "run") == result


def test_an_experiment_states_its_privacy_again(tmp_path):
    for privacy in (CLIENT, HIDDEN, DISTRIBUTED):
        e = Experiment.from_dict(tables(tmp_path, privacy))
        again = Experiment.from_dict(e.to_dict())
        assert again == e
        assert again.aggregation.mechanism == e.aggregation.mechanism
        check(e.aggregation, "aggregation")


# --- the audit of a run -----------------------------------------------------------------------------------------------


def test_no_audit_reads_what_secure_aggregation_hides(tmp_path):
    fedfm.run(tables(tmp_path, {"aggregator": "secagg"}), tmp_path / "plain")
    with pytest.raises(InputError, match="the server saw only sums of updates"):
        perform(tmp_path / "plain", ["label_counts"])
    (finding,) = perform(tmp_path / "plain", ["update_membership"])
    assert finding.detail["sums_only"]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"unit": None}, r"privacy\.unit is missing"),
        ({"clip_norm": None}, r"privacy\.clip_norm is missing"),
        ({"delta": None}, r"privacy\.delta is missing"),
        ({"noise_multiplier": None}, "give one"),
        ({"target_epsilon": 1.0}, "both are given"),
        ({"delta": 2.0}, r"privacy\.delta"),
        ({"noise_multiplier": -1.0}, r"privacy\.noise_multiplier"),
        ({"clip_norm": 0.0}, r"privacy\.clip_norm"),
        ({"mechanism": "laplace"}, r"privacy\.mechanism"),
        ({"unit": "record"}, "no mechanism of its own"),
        ({"mechanism": "distributed_gaussian"}, "secagg"),
        ({"halt_at_epsilon": 1.0}, "one round spends"),
        ({"noise_multiplier": None, "target_epsilon": 1e-6}, "needs more noise"),
    ],
)
def test_contradictions_are_refused(change, said, tmp_path):
    privacy = {key: value for key, value in (CLIENT | change).items() if value is not None}
    with pytest.raises(InputError, match=said):
        Experiment.from_dict(tables(tmp_path, privacy))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"method": {"name": "kd"}}, "looks at replies of single clients"),
        ({"method": {"name": "fedper"}, "model": {"name": "nano-vit"}}, "its own model"),
        ({"aggregation": {"name": "median"}}, "assumes the mean"),
        ({"run": {"local_scores": True}}, "local_scores"),
    ],
)
def test_settings_that_no_noise_covers_are_refused(more, said, tmp_path):
    with pytest.raises(InputError, match=said):
        Experiment.from_dict(tables(tmp_path) | more)


@pytest.mark.parametrize(("key", "value"), [("clip_norm", 0.5), ("compact", True)])
def test_settings_of_secure_aggregation_that_contradict_are_refused(key, value, tmp_path):
    with pytest.raises(InputError, match=rf"aggregation\.{key}"):
        Experiment.from_dict(tables(tmp_path, HIDDEN, aggregation={"name": "secure", key: value}))
