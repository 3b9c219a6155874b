"""A client leaves a finished run: the new run equals one without the client, and an audit tests the certificate."""

import functools
import json
import shutil

import numpy as np
import pytest

import fedfm
from fedfm.api.leave import find_client, leave, was_asked
from fedfm.audits import shadow_runs
from fedfm.audits.audit import perform
from fedfm.cli import main
from fedfm.config.experiment import Experiment
from fedfm.config.registry import available
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import Params
from fedfm.runtime.run_directory import Run
from small import experiment

QUIET = fedfm.Progress()
CLIENT_NOISE = {"mechanism": "gaussian", "unit": "client", "target_epsilon": 8.0, "delta": 1e-3, "clip_norm": 1.0}
RECORD_NOISE = {"mechanism": "gaussian", "unit": "record", "target_epsilon": 8.0, "delta": 1e-3}
INDEPENDENT = ("analytic", "average", "ccvr", "ensemble", "fedbe", "fedncm", "fedpft", "ghofl")


@pytest.fixture(autouse=True)
def _no_shadow_runs(request, monkeypatch):
    """The attack by the loss takes no time; one test attacks by shadow runs."""
    if "attack" not in request.node.name:
        monkeypatch.setattr(shadow_runs, "BUDGET", 0.0)


def one_round(folder, name, **changes):
    tables = experiment(folder, **changes)
    tables["method"] = {"name": name, **changes.get("method", {})}
    return tables


def ran(tables, out):
    fedfm.run(tables, out, progress=QUIET)
    return out


def without(tables, *names):
    return {**tables, "data": {**tables["data"], "without": list(names)}}


def sha_of(path):
    return Run.open(path).manifest["result"]["params_sha256"]


def test_every_method_of_one_round_with_own_messages_is_known():
    found = []
    for name in available("methods"):
        try:
            tables = {"data": {"name": "digits"}, "model": {"name": "nano-vit"}, "method": {"name": name}}
            method = Experiment.from_dict(tables).method
        except InputError:  # it needs keys of its own, or another model
            continue
        if method.traits.independent_messages:
            found.append(name)
    assert sorted(found) == sorted(INDEPENDENT)


@pytest.mark.sample("analytic", "ensemble", "fedpft")
@pytest.mark.parametrize("name", INDEPENDENT)
def test_the_rest_has_the_bits_of_a_run_without_the_client(tmp_path, name):
    tables = one_round(tmp_path, name)
    first = ran(tables, tmp_path / "run")
    found = leave(first, "client-02", tmp_path / "rest", progress=QUIET)
    assert found["exact"] is True
    assert sha_of(tmp_path / "rest") == sha_of(ran(without(tables, "client-02"), tmp_path / "again")) != sha_of(first)
    assert Run.open(tmp_path / "rest").manifest["clients"] == ["client-00", "client-01", "client-03", "client-04"]


def test_a_client_that_only_one_of_the_two_runs_left_out_makes_the_result_no_exact_one(tmp_path, monkeypatch):
    """Another client dies while the others answer again."""
    from fedfm.methods.analytic import Analytic

    first, sums = ran(one_round(tmp_path, "analytic"), tmp_path / "run"), Analytic.sums

    @functools.wraps(sums)
    def failing(self, client, *args, **kwargs):
        if client.id == "client-03":
            raise MemoryError
        return sums(self, client, *args, **kwargs)

    class Told(fedfm.Progress):
        def notice(self, text):
            told.append(text)

    told = []
    monkeypatch.setattr(Analytic, "sums", failing)
    found = leave(first, "client-02", tmp_path / "rest", progress=Told())
    assert (found["exact"], found["how"]) == (False, "retrained")
    assert Run.open(tmp_path / "rest").manifest["departures"][-1]["how"] == "retrained"
    assert any('"client-03" left out of only one of the two runs' in text for text in told)


def test_the_sums_of_the_rest_are_the_sums_minus_the_clients_own(tmp_path):
    from fedfm.audits.replay import open_finished, replay

    run = ran(one_round(tmp_path, "analytic"), tmp_path / "run")
    leave(run, "client-02", tmp_path / "rest", progress=QUIET)
    sent = {r.client: r.value.delta for r in replay(open_finished(run)).replies}
    C, b = (sum(u[part].numpy() for c, u in sent.items()) - sent["client-02"][part].numpy() for part in ("C", "b"))
    method, d = Run.open(run).experiment.method, len(b) - 1
    W, _ = method.solve(C, b)
    rest = Run.open(tmp_path / "rest")
    state = rest.state(method.state_type)
    weight = next(t.numpy() for name, t in state.items() if name.endswith("weight"))
    np.testing.assert_allclose(weight, W, atol=1e-6)
    assert weight.shape == (4, d)


def test_two_clients_leave_one_after_the_other(tmp_path):
    tables = one_round(tmp_path, "fedncm")
    ran(tables, tmp_path / "run")
    leave(tmp_path / "run", "client-02", tmp_path / "one", progress=QUIET)
    leave(tmp_path / "one", "client-04", tmp_path / "two", progress=QUIET)
    assert sha_of(tmp_path / "two") == sha_of(ran(without(tables, "client-02", "client-04"), tmp_path / "again"))
    assert [e["client"] for e in Run.open(tmp_path / "two").manifest["departures"]] == ["client-02", "client-04"]


def test_hidden_sums_are_summed_again_by_the_others(tmp_path):
    tables = one_round(tmp_path, "analytic") | {"privacy": {"aggregator": "secagg"}}
    ran(tables, tmp_path / "run")
    found = leave(tmp_path / "run", "client-02", tmp_path / "rest", progress=QUIET)
    assert found["exact"] is True
    assert any("secure aggregation hid" in text for text in found["not_removed"])


@pytest.mark.parametrize("name", ["analytic", "fedpft"])
def test_the_others_release_the_same_noise_and_spend_no_more(tmp_path, name):
    from fedfm.audits.replay import open_finished, replay

    tables = one_round(tmp_path, name) | {"privacy": RECORD_NOISE}
    run = ran(tables, tmp_path / "run")
    found = leave(run, "client-02", tmp_path / "rest", progress=QUIET)
    before, after = (
        {r.client: r.value for r in replay(open_finished(path)).replies} for path in (run, tmp_path / "rest")
    )
    assert repr({c: v for c, v in before.items() if c != "client-02"}) == repr(after)
    assert not list((tmp_path / "rest" / "private" / "memory").glob("client-02/*"))
    assert "rows" not in found["removed"]  # their number would be a release
    assert any("stays spent" in text for text in found["not_removed"])


def test_rounds_are_trained_again_only_if_the_user_agrees(tmp_path):
    tables = experiment(tmp_path)
    ran(tables, tmp_path / "run")
    with pytest.raises(InputError, match=r"4 rounds of 4 clients, about \d+ s .*--retrain"):
        leave(tmp_path / "run", "client-02", tmp_path / "rest", progress=QUIET)
    assert not (tmp_path / "rest").exists()
    found = leave(tmp_path / "run", "client-02", tmp_path / "rest", retrain=True, progress=QUIET)
    assert (found["exact"], found["how"]) == (False, "retrained")
    assert sha_of(tmp_path / "rest") == sha_of(ran(without(tables, "client-02"), tmp_path / "again"))


def test_a_silo_with_its_own_file_and_test_rows_leaves_with_both(tmp_path):
    tables = one_round(tmp_path, "fedncm")
    rows = np.load(tables["data"]["path"])
    names = ("north", "south", "west")
    for k, name in enumerate(names):
        np.savez(tmp_path / f"{name}.npz", **{key: v if key == "classes" else v[k::3] for key, v in rows.items()})
    tables["data"] = {"clients": {name: str(tmp_path / f"{name}.npz") for name in names}}
    ran(tables, tmp_path / "run")
    leave(tmp_path / "run", "west", tmp_path / "rest", progress=QUIET)
    del tables["data"]["clients"]["west"]
    assert sha_of(tmp_path / "rest") == sha_of(ran(tables, tmp_path / "again"))
    manifest = Run.open(tmp_path / "rest").manifest
    assert manifest["split"]["test"]["rows"] < Run.open(tmp_path / "run").manifest["split"]["test"]["rows"]
    assert perform(tmp_path / "rest", ["departure"])[0].detail["client"] == "west"
    (tmp_path / "west.npz").unlink()  # the silo takes its rows along, and everything but the attack still works
    assert "not on this machine" in perform(tmp_path / "rest", ["departure"])[0].says


def overfitted(folder):
    """A run whose model nearly knows its rows by heart: few rows of many features, and hardly a penalty."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(440, 90)).astype(np.float32), rng.integers(0, 3, 440)
    split = np.where(np.arange(440) < 120, "train", "test")
    np.savez(folder / "noise.npz", x=x, y=y, split=split, classes=np.array(["a", "b", "c"]))
    tables = one_round(folder, "analytic", method={"ridge": 0.01})
    tables["data"] = {"path": str(folder / "noise.npz"), "partition": {"name": "iid", "clients": 2}}
    return ran(tables, folder / "run")


def test_the_attack_finds_who_only_claims_a_removal(tmp_path):
    run = overfitted(tmp_path)
    found = leave(run, "client-01", tmp_path / "rest", progress=QUIET)
    assert found["membership"]["before"]["low"] > 0.6
    assert found["membership"]["after"]["low"] < 0.5 < found["membership"]["after"]["high"]
    assert perform(tmp_path / "rest", ["departure"])[0].contradicts is False
    false = claimed(run, tmp_path / "rest", tmp_path / "claimed")
    finding = perform(false, ["departure"])[0]
    assert finding.contradicts
    assert finding.low > 0.6
    assert main(["audit", str(false), "--attack", "departure"]) == 1


def claimed(run, rest, out, *, also_its_hash=True):
    """The old model under the new run's certificate, as somebody stores it who only claims the removal."""
    shutil.copytree(rest, out)
    for place in ("checkpoint", "adapter"):
        shutil.rmtree(out / place)
        shutil.copytree(run / place, out / place)
    if also_its_hash:
        false = Run.open(out)
        false.manifest["result"]["params_sha256"] = sha_of(run)
        false.write_manifest()
    return out


@pytest.mark.sample("analytic", "fedavg")
@pytest.mark.parametrize("name", ["analytic", "fedncm", "fedpft", "fedavg"])
def test_a_claim_is_refuted_where_the_model_recognises_no_row(tmp_path, name):
    tables = experiment(tmp_path) if name == "fedavg" else one_round(tmp_path, name)
    run = ran(tables, tmp_path / "run")
    leave(run, "client-02", tmp_path / "rest", retrain=True, progress=QUIET)
    recognised, again = perform(tmp_path / "rest", ["departure"])
    assert (again.name, again.verdict, again.estimate, again.contradicts) == ("departure_rerun", "holds", 0.0, False)
    bare = claimed(run, tmp_path / "rest", tmp_path / "bare", also_its_hash=False)
    with pytest.raises(InputError, match=r"not the parameters of the result in manifest\.json"):
        perform(bare, ["departure"])
    false = claimed(run, tmp_path / "rest", tmp_path / "claimed")
    recognised, again = perform(false, ["departure"])
    assert not recognised.contradicts  # the attack by rows finds nothing in such a model
    assert again.contradicts
    assert again.estimate > 0.01
    assert main(["audit", str(false), "--attack", "departure"]) == 1


def test_a_certificate_on_an_experiment_with_the_client_is_refuted(tmp_path):
    run = Run.open(ran(one_round(tmp_path, "fedncm"), tmp_path / "run"))
    leave(run.path, "client-02", tmp_path / "rest", progress=QUIET)
    run.manifest["departures"] = Run.open(tmp_path / "rest").manifest["departures"]
    run.write_manifest()
    again = perform(run.path, ["departure"])[1]
    assert again.contradicts
    assert "still asks client-02" in again.says


def test_a_certificate_of_hidden_sums_is_checked_by_the_leavers_own_sums(tmp_path):
    """Old sums minus the leaver's own message are the new sums, to the precision of the fixed-point numbers."""
    from fedfm.audits.replay import open_finished, replay

    hidden = one_round(tmp_path, "analytic") | {"privacy": {"aggregator": "secagg"}}
    run, clear = ran(hidden, tmp_path / "run"), ran(one_round(tmp_path, "analytic"), tmp_path / "clear")
    leave(run, "client-02", tmp_path / "rest", progress=QUIET)
    before, after = (Run.open(path).state(Params) for path in (run, tmp_path / "rest"))
    own = next(r.value.delta for r in replay(open_finished(clear)).replies if r.client == "client-02")
    for part in ("C", "b"):
        np.testing.assert_allclose(before[f"sums.{part}"] - own[part], after[f"sums.{part}"], atol=1e-6)
    false = claimed(run, tmp_path / "rest", tmp_path / "claimed")
    assert perform(false, ["departure"])[1].contradicts


def test_every_client_that_left_is_audited(tmp_path):
    """A certificate on two clients is refuted by the first of them, too."""
    ran(one_round(tmp_path, "analytic"), tmp_path / "run")
    leave(tmp_path / "run", "client-02", tmp_path / "one", progress=QUIET)
    leave(tmp_path / "one", "client-04", tmp_path / "two", progress=QUIET)
    found = perform(tmp_path / "two", ["departure"])
    assert [f.name for f in found] == ["departure.client-02", "departure.client-04", "departure_rerun"]
    assert found[-1].detail["clients"] == ["client-02", "client-04"]
    assert not any(f.contradicts for f in found)
    false = Run.open(tmp_path / "run")
    false.manifest["departures"] = Run.open(tmp_path / "two").manifest["departures"]
    false.manifest["experiment"]["data"]["without"] = ["client-04"]  # the first one is still asked
    false.write_manifest()
    again = perform(tmp_path / "run", ["departure"])[-1]
    assert again.contradicts
    assert "still asks client-02." in again.says


def silos(folder, **changes):
    """Three silos with files of their own; only the third has rows of "bee"."""
    rng = np.random.default_rng(0)
    for name, classes in {"a": ["ant", "cow"], "b": ["ant", "cow"], "c": ["ant", "bee", "cow"]}.items():
        y = rng.integers(0, len(classes), 60)
        x = rng.normal(size=(60, 4)).astype(np.float32)
        split = np.where(np.arange(60) % 5 == 0, "test", "train")
        np.savez(folder / f"{name}.npz", x=x, y=y, classes=np.array(classes), split=split)
    tables = one_round(folder, changes.pop("name", "analytic"), **changes)
    return tables | {"data": {"clients": {name: str(folder / f"{name}.npz") for name in "abc"}}}


@pytest.mark.parametrize("name", ["analytic", "fedpft"])
def test_no_second_noisy_release_where_the_classes_change(tmp_path, name, monkeypatch):
    """Sums of other classes are other numbers with other noise: the others would spend epsilon twice."""
    run = ran(silos(tmp_path, name=name) | {"privacy": RECORD_NOISE}, tmp_path / "run")
    with pytest.raises(InputError, match='only c has rows of "bee"'):
        leave(run, "c", tmp_path / "rest", progress=QUIET)
    assert not (tmp_path / "rest").exists()
    monkeypatch.setattr("fedfm.api.leave._check_classes", lambda *parts: None)
    with pytest.raises(RunError, match="already released sums of different rows"):  # each client keeps its own digest
        leave(run, "c", tmp_path / "rest", progress=QUIET)


def test_a_killed_departure_leaves_no_run_with_other_noise(tmp_path, monkeypatch):
    """The run can be resumed as soon as it has a manifest, and then it has the others' keys and the certificate."""
    run = ran(one_round(tmp_path, "analytic") | {"privacy": RECORD_NOISE}, tmp_path / "run")

    def killed(*parts, **more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedfm.api.leave._copy_secrets", killed)
        with pytest.raises(KeyboardInterrupt):
            leave(run, "client-02", tmp_path / "early", progress=QUIET)
    assert not (tmp_path / "early" / "manifest.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr("fedfm.api.leave.drive", killed)
        with pytest.raises(KeyboardInterrupt):
            leave(run, "client-02", tmp_path / "late", progress=QUIET)
    late = Run.open(tmp_path / "late")
    assert [entry["client"] for entry in late.manifest["departures"]] == ["client-02"]
    keys = sorted((run / "private/memory").glob("client-0[!2]/noise.secret"))
    assert [(tmp_path / "late" / key.relative_to(run)).read_bytes() for key in keys] == [k.read_bytes() for k in keys]
    assert len(keys) == 4


@pytest.mark.parametrize("at", ["drive", "leave_certificate.membership"])
def test_the_same_departure_completes_one_that_was_stopped(at, tmp_path, monkeypatch, capsys):
    """No certificate says "exact" before that has been compared, also if somebody resumes the new run."""
    run = ran(one_round(tmp_path, "analytic"), tmp_path / "run")
    leave(run, "client-02", tmp_path / "straight", progress=QUIET)

    def stop(*parts, **more):
        raise KeyboardInterrupt

    line = ["leave", str(run), "client-02", "--out", str(tmp_path / "rest")]
    with monkeypatch.context() as patch:
        patch.setattr(f"fedfm.api.leave.{at}", stop)
        assert main(line) == 130
    assert "the same command continues" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "rest")]) == 0
    assert fedfm.load_run(tmp_path / "rest").manifest["departures"][-1]["how"].startswith("unfinished")
    assert "unfinished" in (tmp_path / "rest/report.html").read_text()
    assert main(line) == 0
    certificates = [fedfm.load_run(tmp_path / name).manifest["departures"] for name in ("rest", "straight")]
    assert [[c["how"], c["membership"]] for (c,) in certificates] == [["exact", certificates[1][0]["membership"]]] * 2
    assert main(line) == 2  # a complete run is not made again
    other = ["leave", str(run), "client-01", "--out", str(tmp_path / "rest")]
    assert main(other) == 2


def test_comparisons_that_are_impossible_are_reported(tmp_path):
    said = Notices()
    found = leave(ran(silos(tmp_path), tmp_path / "run"), "c", tmp_path / "rest", progress=said)
    assert (found["membership"], found["same_test_rows"]) == (None, False)
    assert any("only c had rows of some class" in text for text in said.texts)
    assert any("different test rows" in text for text in said.texts)
    said = Notices()
    found = leave(ran(one_round(tmp_path, "analytic"), tmp_path / "two"), "client-02", tmp_path / "3", progress=said)
    assert found["same_test_rows"]
    assert not any("different test rows" in text for text in said.texts)


class Notices(fedfm.Progress):
    """Keeps the notices of a run."""

    def __init__(self):
        self.texts = []

    def notice(self, text):
        self.texts.append(text)


def sampled(tmp_path):
    """A run of two rounds of two of five clients, and a client that no round asked."""
    run = ran(experiment(tmp_path, method={"rounds": 2, "fraction": 0.4}), tmp_path / "run")
    idle = next(c for c in Run.open(run).manifest["clients"] if not was_asked(Run.open(run), c))
    return run, idle


def test_a_client_that_no_round_asked_has_left_at_once(tmp_path, capsys):
    run, idle = sampled(tmp_path)
    before = sha_of(run)
    assert main(["leave", str(run), idle, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (found["exact"], found["how"], found["run"]) == (True, "not asked", str(run))
    assert found["accuracy"] == found["accuracy_before"]
    assert sha_of(run) == before
    assert Run.open(run).manifest["departures"][-1]["removed"] == {"client": idle, "rounds": 0}
    again = perform(run, ["departure"])[1]
    assert (again.verdict, again.detail["asked"]) == ("holds", False)
    assert idle in (run / "report.html").read_text().partition("Clients that left")[2]


def test_nobody_learns_from_a_certificate_whom_secret_coins_drew(tmp_path):
    """Epsilon of a run with coins is that of a reader who does not know the draw."""
    noise = {"unit": "client", "mechanism": "gaussian", "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-5}
    run = ran(experiment(tmp_path, method={"rounds": 2, "fraction": 0.3}, privacy=noise), tmp_path / "run")
    said, before = set(), (run / "manifest.json").read_bytes()
    for name in Run.open(run).manifest["clients"]:
        with pytest.raises(InputError, match="its epsilon stays spent") as error:
            leave(run, name, tmp_path / "rest", progress=QUIET)
        said.add(str(error.value).replace(name, ""))
    assert len(said) == 1
    assert (run / "manifest.json").read_bytes() == before


def test_a_client_that_was_asked_is_never_certified_as_not_asked(tmp_path):
    run, idle = sampled(tmp_path)
    asked = next(c for c in Run.open(run).manifest["clients"] if c != idle and was_asked(Run.open(run), c))
    with pytest.raises(InputError, match="--retrain"):
        leave(run, asked, tmp_path / "rest", progress=QUIET)
    false = Run.open(run)
    leave(run, idle, progress=QUIET)
    false = Run.open(run)
    false.manifest["departures"][-1]["client"] = asked
    false.write_manifest()
    assert perform(run, ["departure"])[1].contradicts
    lines = (run / "messages.jsonl").read_text().splitlines()
    (run / "messages.jsonl").write_text("\n".join(line for line in lines if '"round": 2' not in line) + "\n")
    assert was_asked(Run.open(run), idle)  # the messages of a round are gone, so nobody can know


def test_validation_rows_that_choose_the_round_count_as_asked(tmp_path):
    tables = experiment(
        tmp_path, method={"rounds": 2, "fraction": 0.4}, run={"patience": 5}, data={"val_fraction": 0.2}
    )
    run = Run.open(ran(tables, tmp_path / "run"))
    assert all(was_asked(run, client) for client in run.manifest["clients"])


def test_a_client_without_rows_leaves_nothing(tmp_path):
    tables = one_round(tmp_path, "fedncm")
    tables["data"]["partition"] = {"name": "dirichlet", "alpha": 0.01, "clients": 9}
    ran(tables, tmp_path / "run")
    clients = Run.open(tmp_path / "run").manifest["clients"]
    idle = next(name for name in (f"client-{k:02d}" for k in range(9)) if name not in clients)
    found = leave(tmp_path / "run", idle, tmp_path / "rest", progress=QUIET)
    assert found["removed"]["rows"] == 0
    assert sha_of(tmp_path / "rest") == sha_of(tmp_path / "run")


def test_the_command_line(tmp_path, capsys):
    ran(one_round(tmp_path, "fedncm"), tmp_path / "run")
    assert main(["leave", str(tmp_path / "run"), "client-2", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert found["removed"]["client"] == "client-02"
    rest = tmp_path / "run-without-client-02"
    assert found["run"] == str(rest)
    assert "client-02" in (rest / "report.html").read_text().partition("Clients that left")[2]
    export = ["export", rest, "--to", "torch", "--out", tmp_path / "exported"]
    for words in (
        ["report", rest],
        ["predict", rest, tmp_path / "rows.npz"],
        export,
        ["resume", rest],
        ["audit", rest, "--dossier"],
    ):
        assert main([str(word) for word in words]) == 0
    assert "client-02 has left (exact)" in (rest / "dossier.html").read_text()


@pytest.mark.parametrize(
    ("tables", "client", "says"),
    [
        ({"method": {"name": "fedncm"}}, "client-07", "no client of the run"),
        ({"method": {"name": "ditto", "rounds": 1}}, "client-02", "every client has its own model"),
        (
            {"method": {"name": "fedncm"}, "data": {"partition": {"name": "iid", "clients": 1}}},
            "client-00",
            "the only client",
        ),
        (
            {
                "method": {"name": "fedavg", "rounds": 1},
                "privacy": CLIENT_NOISE,
            },
            "client-02",
            "stays spent",
        ),
        (
            {"method": {"name": "fedavg"}, "attack": {"name": "sign_flip", "fraction": 0.2}},
            "client-02",
            "other attackers",
        ),
    ],
)
def test_why_a_client_cannot_leave(tmp_path, tables, client, says):
    base = experiment(tmp_path)
    base["method"] = {}
    given = {key: {**base.get(key, {}), **value} for key, value in tables.items()}
    ran({**base, **given}, tmp_path / "run")
    with pytest.raises(InputError, match=says):
        leave(tmp_path / "run", client, progress=QUIET)


def test_silos_with_their_own_machines_must_run_once_more(tmp_path):
    run = Run.open(ran(one_round(tmp_path, "fedncm"), tmp_path / "run"))
    run.manifest["split"] = None  # as in a run whose server does not know the rows
    run.write_manifest()
    others = "client-00, client-01, client-03, client-04"
    with pytest.raises(InputError, match=f"needs one more run of {others}; client-02 need not"):
        leave(tmp_path / "run", "client-02", progress=QUIET)


def test_a_deployment_on_loopback_goes_on_in_one_process(tmp_path):
    """Its clients keep their secrets below their silos' folders, and the new run must draw the same noise."""
    tables = one_round(tmp_path, "analytic") | {"privacy": RECORD_NOISE}
    run = Run.open(ran(tables, tmp_path / "run"))
    run.manifest["experiment"]["run"]["engine"] = "deployment"
    run.write_manifest()
    sites = run.path / "private" / "deployment" / "sites" / "token"
    for folder in sorted((run.path / "private" / "memory").glob("client-*")):
        (sites / folder.name / "memory").mkdir(parents=True)
        folder.rename(sites / folder.name / "memory" / folder.name)
    leave(run.path, "client-02", tmp_path / "rest", progress=QUIET)
    rest = Run.open(tmp_path / "rest")
    assert rest.experiment.run.engine == "local"
    for client in rest.manifest["clients"]:
        old = sites / client / "memory" / client / "noise.secret"
        assert (rest.path / "private" / "memory" / client / "noise.secret").read_bytes() == old.read_bytes()


def test_rows_that_changed_are_refused(tmp_path):
    tables = one_round(tmp_path, "fedncm")
    ran(tables, tmp_path / "run")
    rows = dict(np.load(tables["data"]["path"]))
    np.savez(tables["data"]["path"], **{**rows, "x": rows["x"] + 1})
    with pytest.raises(InputError, match="original rows"):
        leave(tmp_path / "run", "client-02", progress=QUIET)


def test_numbers_may_lack_zeros_and_nothing_else():
    assert find_client(["client-00", "client-10"], "client-0") == "client-00"
    assert find_client(["client-1", "client-01"], "client-1") == "client-1"
    for name in ("client-1", "client", "client-100", "silo-0"):
        with pytest.raises(InputError):
            find_client(["client-00", "client-10"], name)
