"""Run directories that were stopped anywhere, damaged, filled up or named badly."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedfm
from fedfm.core.client import Client, Update, on_client
from fedfm.core.text import safe_name
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.reports import html
from fedfm.runtime.client_memory import DiskMemory
from fedfm.runtime.population import record_error
from small import experiment
from stopping import StopAfter


@pytest.fixture
def stopped(tmp_path):
    """A run of four rounds that was stopped after the second."""
    with pytest.raises(KeyboardInterrupt):
        fedfm.run(experiment(tmp_path), tmp_path / "run", progress=StopAfter(2))
    return tmp_path / "run"


def test_a_stop_says_in_python_too_how_to_go_on(tmp_path):
    with pytest.raises(KeyboardInterrupt, match=r"committed rounds are kept; continue with fedfm.resume\('.*run'\)"):
        fedfm.run(experiment(tmp_path), tmp_path / "run", progress=StopAfter(2))


def test_a_run_says_what_it_is(stopped):
    assert repr(fedfm.load_run(stopped)) == f"<Run '{stopped}': fedavg-rows, fedavg, not finished>"
    fedfm.resume(stopped)
    assert repr(fedfm.load_run(stopped)).endswith(", finished>")


def _lines(run, name="messages.jsonl"):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def test_every_crossing_is_written_down_those_after_the_last_commit_too(tmp_path):
    """The last scores, and the models that clients keep, which are asked for at the end."""
    keeping = {"name": "ditto", "learning_rate": 0.2, "batch_size": 16}
    method = {"name": "fedbip", "rounds": 2, "fraction": 1.0, "local": keeping}
    fedfm.run(experiment(tmp_path, method=method), tmp_path / "run")
    clients = set(fedfm.load_run(tmp_path / "run").manifest["clients"])
    sent = {(m["from"], m["handler"].rpartition("_")[2]) for m in _lines(tmp_path / "run") if m["round"] == 2}
    for handler in ("train", "evaluate", "reveal"):
        assert {who for who, what in sent if what == handler} == clients | {"server"}


@pytest.mark.parametrize("torn", [False, True])
def test_a_run_that_was_stopped_after_scores_has_the_messages_of_one_that_was_not(stopped, tmp_path, torn):
    fedfm.run(experiment(tmp_path), tmp_path / "straight")
    if torn:  # and killed while it wrote the messages of round 3
        with open(stopped / "messages.jsonl", "a") as file:
            file.write(json.dumps(_lines(stopped)[-1] | {"round": 3}) + '\n{"round": 2, "fr')
    fedfm.resume(stopped)
    assert (stopped / "messages.jsonl").read_text() == (tmp_path / "straight/messages.jsonl").read_text()


def test_scores_that_were_asked_for_again_are_written_down_once(stopped, tmp_path):
    """Killed between the messages and the line of metrics."""
    fedfm.run(experiment(tmp_path), tmp_path / "straight")
    path = stopped / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    fedfm.resume(stopped)
    assert (stopped / "messages.jsonl").read_text() == (tmp_path / "straight/messages.jsonl").read_text()


@pytest.mark.parametrize("key", ["experiment", "result", "notices", "fingerprints"])
def test_a_manifest_without_what_a_run_needs_is_refused(stopped, key):
    manifest = json.loads((stopped / "manifest.json").read_text())
    (stopped / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != key}))
    with pytest.raises(InputError, match=f'"{key}" is missing'):
        fedfm.resume(stopped)


@pytest.mark.parametrize("result", [{"accuracy": 1.0}, [], "done"])
def test_a_manifest_whose_result_is_damaged_is_refused(stopped, result):
    path = stopped / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"result": result}))
    with pytest.raises(InputError, match='is damaged: "result" lacks entries'):
        fedfm.load_run(stopped)


def test_a_run_without_its_memories_does_not_go_on(stopped):
    (stopped / "private/lock").unlink()
    (stopped / "private").rmdir()
    with pytest.raises(InputError, match="private is missing"):
        fedfm.resume(stopped)


def test_half_written_files_of_a_killed_process_are_removed(stopped):
    names = (".manifest.json.x1", "checkpoint/.round-000003.safetensors.x2", ".weights.npz.x3")
    parts = [stopped / name for name in names]
    for part in parts:
        part.write_bytes(b"half")
    fedfm.resume(stopped)
    assert not any(part.exists() for part in parts)


_FULL = """
import resource, sys, fedfm
from dataclasses import replace
from pathlib import Path
from fedfm.errors import RunError
from fedfm.models import adapter_files

save = adapter_files.save

def late(*args):  # the disk is full when the models are written
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
    save(*args)

if sys.argv[2] == "full":
    adapter_files.save = late
import json, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    print(fedfm.resume(sys.argv[1])["params_sha256"])
except RunError as error:
    print(error)
"""


@pytest.mark.proof
def test_a_full_disk_at_the_final_models_is_reported_and_nothing_is_lost(stopped, tmp_path):
    straight = fedfm.run(experiment(tmp_path), tmp_path / "straight")["params_sha256"]

    def go(how):
        command = [sys.executable, "-c", _FULL, str(stopped), how]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return done.stdout.strip()

    assert "the disk is full; what was committed before is kept" in go("full")
    assert go("free") == straight


def test_names_that_are_too_long_for_a_file_get_one_of_their_own():
    names = [
        "\N{CJK UNIFIED IDEOGRAPH-5317}" * 60,
        "\N{CJK UNIFIED IDEOGRAPH-5317}" * 60 + "x",
        "x" * 300,
        "\ud800",
        "x",
    ]
    found = [safe_name(name) for name in names]
    assert len(set(found)) == len(names)
    assert max(map(len, found)) <= 255
    assert safe_name("x" * 255) == "x" * 255
    assert "+" not in safe_name("a+" * 100)[:100]  # no name of a client's own reads like a shortened one


def test_a_client_with_a_very_long_name_keeps_its_model_and_its_memory(tmp_path):
    tables = experiment(tmp_path, method={"name": "fedbip", "rounds": 2})
    rows = dict(np.load(tmp_path / "rows.npz"))
    rows["domain"] = np.where(rows["domain"] == "n", "\N{CYRILLIC SMALL LETTER ES}" * 70, rows["domain"])
    np.savez(tmp_path / "rows.npz", **rows)
    tables["data"]["partition"] = {"name": "by_column", "column": "domain"}
    fedfm.run(tables, tmp_path / "run")
    assert len(list((tmp_path / "run/clients").glob("*/adapter"))) == 3


def test_text_that_is_no_unicode_is_logged_as_an_escape(tmp_path, stopped):
    """As the name of a file that is not UTF-8, in an exception's text."""
    name = os.fsdecode(b"/data/\xff.csv")
    record_error(stopped, "north", f"no such file: {name}")
    assert "udcff" in (stopped / "private/errors.log").read_text()
    run = fedfm.load_run(stopped)
    run.log({"round": 2, "excluded": [{"reason": name}]})
    assert run.metrics()[-1]["excluded"] == [{"reason": name}]
    run.manifest["notices"] = [name]
    run.write_manifest()
    assert fedfm.load_run(stopped).manifest["notices"] == [name]


LINKS = ("messages.jsonl", "metrics.jsonl", "private/lock", "private/errors.log", "adapter/model.safetensors")


@pytest.mark.parametrize("name", LINKS)
def test_nothing_is_written_through_a_link(stopped, tmp_path, name):
    victim, path = tmp_path / "thesis.txt", stopped / name
    victim.write_text("years of work\n" * 1000)  # longer than the logs: they are cut as well as written
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    with pytest.raises(InputError, match=f"{path.name} is a link: the run would write to"):
        fedfm.resume(stopped)
    assert victim.read_text() == "years of work\n" * 1000


def test_a_client_s_folder_that_is_a_link_is_refused_and_checkpoints_may_lie_elsewhere(stopped, tmp_path):
    straight = fedfm.run(experiment(tmp_path), tmp_path / "straight")["params_sha256"]
    (tmp_path / "elsewhere").mkdir()
    (stopped / "clients").mkdir()
    (stopped / "clients/client-00").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="client-00 is a link"):
        fedfm.resume(stopped)
    assert not list((tmp_path / "elsewhere").iterdir())
    (stopped / "clients/client-00").unlink()
    (stopped / "checkpoint").rename(tmp_path / "disk")
    (stopped / "checkpoint").symlink_to(tmp_path / "disk")
    assert fedfm.resume(stopped)["params_sha256"] == straight


def test_a_report_is_not_written_through_a_link(stopped, tmp_path):
    fedfm.resume(stopped)
    (tmp_path / "thesis.txt").write_text("years of work")
    for name in ("report.html", ".report.html.part"):
        (stopped / name).unlink(missing_ok=True)
        (stopped / name).symlink_to(tmp_path / "thesis.txt")
    assert "<html" in html.write(stopped).read_text()
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_private_is_its_owners_alone(stopped):
    assert Path(stopped / "private").stat().st_mode & 0o077 == 0


def test_a_folder_of_a_run_that_was_killed_as_it_began_is_free(tmp_path):
    for name in ("checkpoint", "private"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run/.manifest.json.x1").write_text("{")
    assert fedfm.run(experiment(tmp_path), tmp_path / "run")["rounds"] == 4
    assert not (tmp_path / "run/.manifest.json.x1").exists()
    (tmp_path / "other/private").mkdir(parents=True)
    (tmp_path / "other/private/diary").write_text("mine")
    with pytest.raises(InputError, match="is not an empty folder"):
        fedfm.run(experiment(tmp_path), tmp_path / "other")


@pytest.mark.parametrize("inner", ["inner", "private/inner", "checkpoint/../inner"])
def test_no_run_is_made_inside_another(inner, stopped, tmp_path):
    before = sorted(stopped.rglob("*"))
    with pytest.raises(InputError, match="is inside the run"):
        fedfm.run(experiment(tmp_path), stopped / inner)
    assert sorted(stopped.rglob("*")) == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_round_whose_state_is_not_finite_is_not_committed(tmp_path, monkeypatch, bad):
    """The run stops and says which round; the round before stands, whole, and a resume goes on from it."""
    straight = fedfm.run(experiment(tmp_path), tmp_path / "straight")["params_sha256"]
    step = FedAvg.step

    def broken(self, fed, w, t):
        out = step(self, fed, w, t)
        if t == 3:
            name = list(out)[-1]
            out = out.replace({name: out[name].index_fill(0, torch.tensor([1]), bad)})
        return out

    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "step", broken)
        with pytest.raises(RunError, match=r"round 3: the server's state .*; round 2 stays committed"):
            fedfm.run(experiment(tmp_path), tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run/checkpoint").iterdir())[-1] == "round-000002.safetensors"
    assert fedfm.resume(tmp_path / "run")["params_sha256"] == straight
    assert not any("damaged" in n for n in fedfm.load_run(tmp_path / "run").manifest["notices"])


def test_one_client_of_finite_numbers_does_not_end_a_run(tmp_path, monkeypatch):
    """Entries of 3e38 beside the largest weight: it is left out of every round, and the run ends as without it."""
    train, bad = FedAvg.train, "client-02"

    def absurd(self, client: Client, w: Params) -> Update:
        update = train(self, client, w)
        if client.id == bad:
            return replace(update, delta=update.delta.map(lambda x: torch.full_like(x, 3e38)), weight=1e9)
        return update

    absurd.__name__ = "train"
    on_client(absurd)
    monkeypatch.setattr(FedAvg, "train", absurd)
    result = fedfm.run(experiment(tmp_path, method={"fraction": 1.0}), tmp_path / "run")
    assert {(e["client"], e["code"]) for e in result["excluded"]} == {(bad, "E_NORM")}
    assert len(result["excluded"]) == result["rounds"]
    assert result["accuracy"] > 0.5


def test_metrics_that_overflow_are_null_in_strict_json_and_cost_no_checkpoint(tmp_path, monkeypatch):
    """Two clients tell a loss of 1e308: each is a number, their sum is none."""
    train = FedAvg.train

    def loud(self, client: Client, w: Params) -> Update:
        update = train(self, client, w)
        return replace(update, metrics=update.metrics | {"loss": 1e308})

    loud.__name__ = "train"
    on_client(loud)
    monkeypatch.setattr(FedAvg, "train", loud)
    with pytest.raises(KeyboardInterrupt):
        fedfm.run(experiment(tmp_path), tmp_path / "run", progress=StopAfter(2))
    result = fedfm.resume(tmp_path / "run")
    assert result["rounds"] == 4
    assert not result["excluded"]

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    for name in ("manifest.json", "metrics.jsonl", "messages.jsonl"):
        text = (tmp_path / "run" / name).read_text()
        for line in [text] if name == "manifest.json" else text.splitlines():
            json.loads(line, parse_constant=refuse)
    assert [line["train_loss"] for line in _lines(tmp_path / "run", "metrics.jsonl")][1:] == [None] * 4
    assert not any("damaged" in n for n in fedfm.load_run(tmp_path / "run").manifest["notices"])


def test_a_clients_memory_keeps_numbers_that_are_not_finite(tmp_path):
    """The best loss so far begins at infinity: the version that holds it is read again, not the one before."""
    for t, best in ((1, 3.0), (2, float("inf"))):
        memory = DiskMemory(tmp_path, "a", (t, 1))
        memory["best"] = best
        memory.commit()
    assert DiskMemory(tmp_path, "a", (3, 1))["best"] == float("inf")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_users_umask_decides_who_reads_a_run(tmp_path, umask, mode):
    """What is written atomically is as any other file; what is private is its owner's alone."""
    before = os.umask(umask)
    try:
        fedfm.run(experiment(tmp_path, method={"name": "scaffold"}), tmp_path / "run")
    finally:
        os.umask(before)
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]
    private = {p for p in files if "private" in p.relative_to(tmp_path / "run").parts}
    assert {p.stat().st_mode & 0o777 for p in private} == {0o600}
    models = {p for p in files if p.name == "model.safetensors"}  # the library that writes them makes them 0600
    assert {p.stat().st_mode & 0o777 for p in set(files) - private - models} == {mode}
    names = {p.name for p in files}
    assert {"manifest.json", "metrics.jsonl", "messages.jsonl", "round-000004.safetensors"} <= names
    assert not [name for name in names if name.startswith(".")]
