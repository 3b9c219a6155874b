"""A run's stored files (secrets, memories, checkpoints, logs) that are truncated, altered, missing or unfinished."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

import fedfm
from fedfm.audits.audit import perform
from fedfm.cli import main
from fedfm.config.experiment import Experiment
from fedfm.core import storage
from fedfm.core.wire import codec, payload
from fedfm.engines.flower import client_stub
from fedfm.engines.flower.client_host import of_folder
from fedfm.errors import InputError, Lost, RunError
from fedfm.reports import html, read
from fedfm.runtime import file_integrity
from fedfm.runtime.client_memory import DiskMemory, secret
from small import experiment, pictures, tiny_vit
from stopping import StopAfter

ROUNDS = 6


def fedala(folder, **changes):
    return experiment(folder, method={"name": "fedala", "rounds": ROUNDS}, **changes)


def fedbaf(folder, base="fedavg"):
    path = folder / "pictures.npz"
    if not path.exists():
        pictures(folder)
    vit = str(tiny_vit(folder))
    local = {"learning_rate": 0.05, "batch_size": 16}
    return {
        "data": {"path": str(path), "partition": {"name": "iid", "clients": 3}},
        "model": {"name": vit, "weights": "random", "adaptation": {"name": "full"}},
        "method": {"name": "fedbaf", "foundation": vit, "rounds": ROUNDS, "base": {"name": base}, "local": local},
        "run": {"workers": 1},
    }


TABLES = {
    "fedala": fedala,
    "scaffold": lambda folder: experiment(folder, method={"name": "scaffold", "rounds": ROUNDS}),
    "fedbaf": fedbaf,
    "fedbaf on fedadam": lambda folder: fedbaf(folder, "fedadam"),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """For each method: (a run that was stopped after its fourth round, the parameters with which it ends)."""
    made = {}

    def of(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
            with pytest.raises(KeyboardInterrupt):
                fedfm.run(TABLES[name](folder), folder / "run", progress=StopAfter(4))
            shutil.copytree(folder / "run", folder / "straight")
            made[name] = folder / "run", fedfm.resume(folder / "straight")["params_sha256"]
        return made[name]

    return of


@pytest.fixture
def copy(stopped, tmp_path):
    """A copy of such a run, to be hurt, and the parameters."""

    def of(name):
        run, straight = stopped(name)
        shutil.copytree(run, tmp_path / "run")
        return tmp_path / "run", straight

    return of


def flip(path, at=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


HURT = {
    "flipped": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
}


def tree(folder):
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def refused(capsys, run, path):
    """Exit 2, one line that names the file, and the run is as it was."""
    before = tree(run)
    capsys.readouterr()
    assert main(["resume", str(run)]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert str(path) in said
    assert f"fedfm resume {run} --accept-loss" in said
    assert tree(run) == before


def accepted(capsys, run, path):
    """It goes on, and whoever looks at the run is told."""
    assert main(["resume", str(run), "--accept-loss", "--format", "json"]) == 0
    out = capsys.readouterr()
    name = str(path.relative_to(run))
    result = json.loads(out.out.splitlines()[-1])
    assert name in {mark["file"] for mark in result["lost"]}
    assert fedfm.load_run(run).manifest["lost"] == result["lost"]
    assert f"{name} {result['lost'][0]['how']}" in out.err
    assert fedfm.resume(run)["lost"] == result["lost"]
    assert f"{name} {result['lost'][0]['how']}" in html.write(run).read_text()
    assert any(name in text for text in read.read(run).missing)
    return result


KINDS = {
    "a client's newest memory": ("fedala", "private/memory/client-01/r*.safetensors", -1),
    "a client's older memory": ("fedala", "private/memory/client-01/r*.safetensors", 0),
    "a client's control variate": ("scaffold", "private/memory/client-01/r*.safetensors", -1),
    "a client's list": ("fedala", "private/memory/+kept/client-01/list", 0),
    "the server's memory": ("fedbaf", "private/server/r*.safetensors", -1),
    "the server's secret": ("fedbaf", "private/server/alpha.secret", 0),
    "the server's list": ("fedbaf", "private/+kept/server/list", 0),
}


def some(names):
    """(name, how): each name flipped and missing, and hurt in one of the other ways, so that each way has its names."""
    ways = [how for how in HURT if how not in ("flipped", "missing")]
    return [(name, how) for i, name in enumerate(names) for how in ("flipped", "missing", ways[i % len(ways)])]


@pytest.mark.sample(
    "a client's newest memory-flipped",
    "a client's older memory-missing",
    "a client's control variate-emptied",
    "a client's list-cut",
    "the server's memory-short",
    "the server's secret-missing",
    "the server's list-cut",
)
@pytest.mark.parametrize(("what", "how"), some(KINDS))
def test_damaged_and_missing_files_are_refused_unless_the_loss_is_accepted(copy, capsys, what, how):
    name, pattern, which = KINDS[what]
    run, _ = copy(name)
    path = sorted(run.glob(pattern))[which]
    HURT[how](path)
    refused(capsys, run, path)
    accepted(capsys, run, path)


@pytest.mark.parametrize("name", ["fedala", "fedbaf"])
@pytest.mark.parametrize("folder", ["private/memory", "private/+kept", "private/server", "private/memory/client-00"])
def test_a_folder_that_is_gone_is_missed(copy, capsys, name, folder):
    run, _ = copy(name)
    if not (run / folder).exists():
        pytest.skip("this method keeps nothing there")
    shutil.rmtree(run / folder)
    assert main(["resume", str(run)]) == 2
    assert "is missing" in capsys.readouterr().err


@pytest.mark.sample("fedala")
@pytest.mark.parametrize("name", ["fedala", "fedbaf", "fedbaf on fedadam"])
def test_flip_whatever_lies_below_private_the_run_is_refused(copy, capsys, name):
    run, _ = copy(name)
    files = [path for path in (run / "private").rglob("*") if path.is_file() and path.stat().st_size]
    for path in files:
        flip(path)
    assert main(["resume", str(run)]) == 2
    assert main(["resume", str(run), "--accept-loss"]) == 0
    capsys.readouterr()


@pytest.mark.sample("fedala-flipped", "scaffold-missing", "fedbaf on fedadam-cut")
@pytest.mark.parametrize(("name", "how"), some(TABLES))
def test_one_of_two_checkpoints_is_enough_and_none_is_refused(copy, capsys, name, how):
    run, straight = copy(name)
    older, newest = sorted(run.rglob("round-*.safetensors"))
    shutil.copytree(run, run.parent / "b")
    HURT[how](older)
    assert fedfm.resume(run)["params_sha256"] == straight
    run = run.rename(run.parent / "a")
    shutil.copytree(run.parent / "b", run.parent / "c")
    run = run.parent / "b"
    HURT[how](run / newest.relative_to(run.parent / "run"))
    assert fedfm.resume(run)["params_sha256"] == straight
    word = "missing" if how == "missing" else "damaged"
    assert f"{newest.name} was {word}: the run continues after round 3" in fedfm.load_run(run).manifest["notices"]
    assert "lost" not in fedfm.resume(run)
    run = run.parent / "c"
    for path in run.rglob("round-*.safetensors"):
        HURT[how](path)
    refused(capsys, run, run / newest.relative_to(run.parent / "run"))
    assert fedfm.resume(run, accept_loss=True)["params_sha256"] == straight


@pytest.mark.parametrize("at", range(0, 79))
def test_a_secret_of_which_a_byte_changed_or_the_rest_is_gone_is_no_secret(tmp_path, at):
    key = secret(tmp_path, "north", "noise")
    path = tmp_path / "north/noise.secret"
    whole = path.read_bytes()
    assert (len(key), len(whole)) == (32, 79)
    flip(path, at)
    with pytest.raises(Lost, match=r"noise\.secret is damaged: put back a copy"):
        secret(tmp_path, "north", "noise")
    path.write_bytes(whole[:at])
    with pytest.raises(Lost, match=r"noise\.secret is damaged"):
        secret(tmp_path, "north", "noise")
    path.unlink()
    with pytest.raises(Lost, match=r"noise\.secret is missing"):
        secret(tmp_path, "north", "noise")
    path.write_bytes(whole)
    assert secret(tmp_path, "north", "noise") == key


def test_an_older_version_never_stands_in_for_one_that_is_lost(tmp_path):
    for t in (1, 2, 3):
        memory = DiskMemory(tmp_path, "north", (t, 1))
        memory["x"] = t
        memory.commit()
    newest = tmp_path / "north/r0000003c00001.safetensors"
    assert DiskMemory(tmp_path, "north", (3, 1))["x"] == 2  # the round once more: what it has left is not looked at
    data = newest.read_bytes()
    flip(newest)
    with pytest.raises(Lost, match=r"r0000003c00001.safetensors is damaged"):
        DiskMemory(tmp_path, "north", (4, 1)).get("x")
    shutil.rmtree(tmp_path / "north")
    with pytest.raises(Lost, match=r"r0000003c00001.safetensors is missing"):
        DiskMemory(tmp_path, "north", (4, 1)).get("x")
    (tmp_path / "north").mkdir()
    newest.write_bytes(data)
    assert DiskMemory(tmp_path, "north", (4, 1))["x"] == 3


# --- kills -----------------------------------------------------------------------------------------------------------


def fedpft(folder):
    tables = experiment(folder) | {"privacy": {"unit": "record", "target_epsilon": 100.0, "delta": 1e-5}}
    return tables | {"method": {"name": "fedpft", "components": 1}}


KILLED = {
    "memories": lambda folder: experiment(folder, method={"name": "fedala", "rounds": 3, "fraction": 1.0}),
    "a server's secret and memory": lambda folder: fedbaf(folder) | {"run": {"workers": 1, "evaluate_every": 3}},
    "clients' secrets": fedpft,
}


def _run_and_die(tables, out, calls):
    """Run in a child that SIGKILL ends at the nth replacement or removal of a file; returns how it ended."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    try:
        left, replace, unlink = [calls], os.replace, os.unlink

        def counted(function):
            def call(*args, **kwargs):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        os.replace, os.unlink, file_integrity.write_list = (
            counted(replace),
            counted(unlink),
            counted(file_integrity.write_list),
        )
        fedfm.run(tables, out)
    finally:
        os._exit(0)


@pytest.mark.proof
@pytest.mark.parametrize("what", KILLED)
def test_killed_before_any_file_is_put_in_its_place_a_run_goes_on_to_the_same_bits(what, tmp_path, monkeypatch):
    """Between a memory or a secret and its list, between a list and what it drops, between checkpoint and logs."""
    monkeypatch.setattr("fedfm.runtime.client_memory.entropy", lambda n: bytes(range(n)))
    tables = KILLED[what](tmp_path)
    straight = fedfm.run(tables, tmp_path / "straight")
    calls, deaths = 1, 0
    while os.WIFSIGNALED(_run_and_die(tables, out := tmp_path / f"at-{calls}", calls)):
        deaths += 1
        if (out / "manifest.json").exists():
            result = fedfm.resume(out)
            assert result["params_sha256"] == straight["params_sha256"], calls
            assert "lost" not in result
            assert read.read(out).missing == ()
            assert not any("missing" in n or "damaged" in n or "no line" in n for n in _notices(out)), calls
        calls += 2 if deaths < 10 else 7
    assert deaths >= 8


def _notices(run):
    return fedfm.load_run(run).manifest["notices"]


# --- versions before 0.2.0 --------------------------------------------------------------------------------------------


def test_a_run_without_lists_is_refused_with_the_version_that_can_resume_it(copy):
    run, _ = copy("scaffold")
    for path in run.rglob("round-*.safetensors"):
        record = storage.load(path)
        del record["kept"]
        storage.save(path, record)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"before 0\.2\.0 wrote this run"):
        fedfm.resume(run)
    assert {path: path.read_bytes() for path in before} == before


# --- logs ------------------------------------------------------------------------------------------------------------

LOGS = {
    "metrics gone": ("metrics.jsonl", lambda lines: None, "metrics.jsonl has no line of rounds 0 to 3"),
    "metrics emptied": ("metrics.jsonl", lambda lines: [], "metrics.jsonl has no line of rounds 0 to 3"),
    "metrics cut": ("metrics.jsonl", lambda lines: [*lines[:2], lines[2][:9]], "metrics.jsonl has no line of rounds"),
    "a hole": ("metrics.jsonl", lambda lines: [lines[0], *lines[3:]], "metrics.jsonl has no line of rounds 1 to 2"),
    "no JSON": (
        "metrics.jsonl",
        lambda lines: [lines[0], b'{"round": 1, "x\n', *lines[2:]],
        "has a damaged or edited line: 2",
    ),
    "messages gone": ("messages.jsonl", lambda lines: None, "messages.jsonl has lost"),
    "messages cut": ("messages.jsonl", lambda lines: [*lines[:3], lines[3][:9]], "messages.jsonl has lost"),
    "junk": (
        "messages.jsonl",
        lambda lines: [*lines[:2], b"\0\xff\r{\n", *lines[2:]],
        "has a damaged or edited line: 3",
    ),
}


@pytest.mark.parametrize("what", LOGS)
def test_a_damaged_log_does_not_stop_a_run_and_its_gap_stays_recorded(copy, capsys, what):
    name, damage, said = LOGS[what]
    run, straight = copy("fedala")
    lines = damage((run / name).read_bytes().splitlines(keepends=True))
    (run / name).unlink() if lines is None else (run / name).write_bytes(b"".join(lines))
    assert main(["resume", str(run), "--format", "json"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out.splitlines()[-1])["params_sha256"] == straight
    assert said in out.err
    assert any(said in notice for notice in _notices(run))
    assert said in html.write(run).read_text()
    for line in (run / name).read_bytes().splitlines(keepends=True)[5:]:  # what came after it is whole
        assert json.loads(line)
    for args in (["report", run], ["compare", run, run, "--out", run.parent / "page.html"]):
        assert main([str(a) for a in args]) == 0
        assert f"{run}: {name} " in capsys.readouterr().err
    page = (run.parent / "page.html").read_text()
    assert ("Incomplete records" in page) == (name == "metrics.jsonl")  # its figures come from no messages


@pytest.mark.sample("a hole", "messages gone")
@pytest.mark.parametrize("what", LOGS)
def test_a_finished_run_with_a_damaged_log_can_be_audited_used_and_exported(tmp_path, capsys, what):
    name, damage, _ = LOGS[what]
    run = tmp_path / "run"
    fedfm.run(experiment(tmp_path, method={"name": "fedamp", "rounds": 3}), run)
    lines = damage((run / name).read_bytes().splitlines(keepends=True))
    (run / name).unlink() if lines is None else (run / name).write_bytes(b"".join(lines))
    fedfm.resume(run)
    for args in (
        ["audit", run],
        ["report", run],
        ["predict", run, tmp_path / "rows.npz", "--client", "client-00"],
        ["export", run, "--to", "torch", "--out", tmp_path / "out", "--client", "client-00"],
    ):
        assert main([str(a) for a in args]) == 0
        if args[0] in ("audit", "report"):
            assert f"{run}: {name} " in capsys.readouterr().err


def test_early_stopping_depends_on_its_metrics_and_its_best_checkpoint(tmp_path, capsys):
    local = {"learning_rate": 5.0, "batch_size": 4}  # the loss rises soon
    tables = experiment(tmp_path, method={"rounds": 40, "local": local}, run={"patience": 30})
    tables["data"]["val_fraction"] = 0.25
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fedfm.run(tables, run, progress=StopAfter(20))
    losses = {m["round"]: m["val_loss"] for m in fedfm.load_run(run).metrics() if m["round"]}
    best = run / f"checkpoint/round-{min(losses, key=losses.get):06d}.safetensors"
    assert best not in sorted((run / "checkpoint").iterdir())[-2:], "choose settings whose best round is early"
    whole = best.read_bytes()
    flip(best)
    refused(capsys, run, best)
    best.write_bytes(whole)
    log = run / "metrics.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:5]))
    refused(capsys, run, log)
    accepted(capsys, run, log)


def test_operations_of_rounds_that_nobody_knows_are_not_summed_up(copy):
    run, _ = copy("fedala")
    (run / "metrics.jsonl").unlink()
    fedfm.resume(run)
    assert fedfm.load_run(run).manifest["ledger"]["operations"]["macs"] is None


# --- after the run ---------------------------------------------------------------------------------------------------


def test_the_model_of_a_finished_run_is_that_of_its_last_round_or_none(tmp_path, capsys):
    run = tmp_path / "run"
    fedfm.run(experiment(tmp_path), run)
    newest = sorted((run / "checkpoint").iterdir())[-1]
    flip(newest)
    for args in (["predict", run, tmp_path / "rows.npz"], ["export", run, "--to", "torch", "--out", tmp_path / "out"]):
        assert main([str(a) for a in args]) == 2
        assert f"{newest} is damaged: put back a copy" in capsys.readouterr().err
    newest.unlink()
    assert main(["predict", str(run), str(tmp_path / "rows.npz")]) == 2
    assert f"{newest} is missing: put back a copy" in capsys.readouterr().err


def test_an_audit_needs_the_secrets_and_says_what_a_run_went_on_without(tmp_path, capsys):
    run = tmp_path / "run"
    fedfm.run(fedpft(tmp_path), run)
    key = next(run.rglob("noise.secret"))
    flip(key)
    with pytest.raises(Lost, match=f"{key} is damaged: the noise of this run cannot be drawn again"):
        perform(run)


def test_a_replay_of_a_run_that_lost_its_secret_says_why_it_ends_otherwise(copy):
    run, _ = copy("fedbaf")
    (run / "private/server/alpha.secret").unlink()
    fedfm.resume(run, accept_loss=True)
    with pytest.raises(RunError, match=r"continued without private/server/alpha\.secret"):
        perform(run, ["extraction"])


# --- a silo's own machine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HURT)
def test_a_silo_refuses_for_itself_and_tells_the_server_no_path(tmp_path, how):
    text = Experiment.from_dict(fedala(tmp_path)).to_toml()
    (tmp_path / "silo.toml").write_text('name = "north"\ndata = "rows.npz"\n')
    folder = client_stub.admit({"experiment": text, "key": "run"}, {"silo": str(tmp_path / "silo.toml")}, 1)

    def send(handler, body, t):
        site, name = of_folder(folder)  # as a worker that has just been started
        head, pieces = payload.encode(codec.envelope(t, 1, body))
        return payload.decode(*site.answer(name, handler, head, b"".join(pieces)), None)

    assert "body" in send("query.hello", {"classes": ["ant", "bee", "cow", "dog"]}, 0)
    w = of_folder(folder)[0].silos.population.model.params()
    for t in (1, 2):
        assert "delta" in send("train.FedALA_train", {"w": w}, t)["body"]
    path = folder / "memory/north/r0000002c00001.safetensors"
    HURT[how](path)
    fault = send("train.FedALA_train", {"w": w}, 3)["fault"]
    assert fault["code"] == "E_LOST"
    assert str(tmp_path) not in fault["reason"]
    assert "north" not in fault["reason"]
    errors = (folder / "private/errors.log").read_text()
    assert f"{path} is {'missing' if how == 'missing' else 'damaged'}" in errors
    path.unlink(missing_ok=True)
    (folder / "memory/+kept/north/list").unlink()  # what the silo's log says
    assert "delta" in send("train.FedALA_train", {"w": w}, 3)["body"]


def test_lists_cost_no_name(tmp_path):
    """No client's folder is that of the lists, and a long name has one, too."""
    for name in ("+kept", ".kept", "x" * 300, "list"):
        memory = DiskMemory(tmp_path, name, (1, 1))
        memory["x"] = np.float64(1)
        memory.commit()
        assert DiskMemory(tmp_path, name, (2, 1))["x"] == 1
    assert len(list((tmp_path / file_integrity.LISTS).iterdir())) == 4
