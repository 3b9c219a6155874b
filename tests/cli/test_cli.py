"""The command line end to end, as a user types it."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from central import call
from fedfm import load_run
from fedfm.cli import main
from fedfm.cli.help import EXAMPLES
from fedfm.cli.parser import build
from fedfm.config.experiment import Experiment
from fedfm.config.toml import to_toml
from fedfm.core.messages import Excluded
from fedfm.core.wire import payload
from fedfm.data.class_names import class_name
from fedfm.errors import InputError
from fedfm.reports.page import save
from fedfm.runtime.progress_bar import Bar
from fedfm.runtime.run_directory import Run
from fedfm.training import BY_NAME
from processes import rounds as rounds_in
from small import experiment, features, pictures, tiny_vit


def toml(folder, **changes):
    path = folder / "exp.toml"
    path.write_text(to_toml(experiment(folder, **changes)))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of a head on feature vectors."""
    folder = tmp_path_factory.mktemp("finished")
    assert main(["run", str(toml(folder)), "--out", str(folder / "run"), "--format", "json"]) == 0
    return folder / "run"


def test_run_prints_one_json_object_with_the_contracts_fields(tmp_path, capsys):
    code, out, _ = call(capsys, "run", toml(tmp_path), "--out", tmp_path / "r", "--format", "json")
    assert code == 0
    result = json.loads(out.strip().splitlines()[-1])
    assert len(out.strip().splitlines()) == 1
    for key in [
        "run",
        "method",
        "engine",
        "seed",
        "rounds",
        "seconds",
        "accuracy",
        "global_accuracy",
        "local_accuracy",
        "client_accuracy",
        "balanced_accuracy",
        "macro_f1",
        "loss",
        "perplexity",
        "bytes_up",
        "bytes_down",
        "epsilon",
        "params_sha256",
        "excluded",
        "details",
    ]:
        assert key in result
    assert result["rounds"] == 4
    assert result["epsilon"] is None
    assert set(result["client_accuracy"]) == {f"client-0{i}" for i in range(5)}
    assert 0.5 < result["accuracy"] <= 1
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert manifest["result"] == result
    assert (tmp_path / "r" / "report.html").stat().st_size > 5000
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 5
    assert oct((tmp_path / "r" / "private").stat().st_mode)[-3:] == "700"


def test_bytes_are_those_of_the_messages(finished):
    lines = [json.loads(line) for line in (finished / "messages.jsonl").read_text().splitlines()]
    result = json.loads((finished / "manifest.json").read_text())["result"]
    counted = [m for m in lines if m["counted"]]
    assert sum(m["bytes"] for m in counted if m["to"] == "server") == result["bytes_up"]
    assert sum(m["bytes"] for m in counted if m["from"] == "server") == result["bytes_down"]
    assert {m["handler"] for m in counted} == {"train.FedAvg_train"}
    assert {m["handler"] for m in lines} == {"train.FedAvg_train", "scores.Evaluation_evaluate"}


def test_set_and_engine_change_keys(tmp_path, capsys):
    args = ("--set", "method.rounds=1", "--set", "method.name=fedprox", "--set", "method.mu=0.5")
    code, out, _ = call(capsys, "run", toml(tmp_path), *args, "--out", tmp_path / "r", "--format", "json")
    assert code == 0
    result = json.loads(out)
    assert (result["method"], result["rounds"]) == ("fedprox", 1)
    assert json.loads((tmp_path / "r/manifest.json").read_text())["experiment"]["method"]["mu"] == 0.5


def test_attacks_and_aggregations_are_listed_shown_checked_and_run(tmp_path, capsys):
    tables = {"attack": {"name": "sign_flip", "fraction": 0.2}, "aggregation": {"name": "trimmed_mean", "trim": 0.3}}
    exp = toml(tmp_path, method={"name": "fedavg", "fraction": 1.0}, **tables)
    code, out, _ = call(capsys, "check", exp)
    assert code == 0
    assert '[attack]\nname = "sign_flip"\nfraction = 0.2' in out
    assert '[aggregation]\nname = "trimmed_mean"\ntrim = 0.3' in out
    for kind, names in (("attacks", "label_shuffle"), ("aggregation", "krum"), ("tasks", "multi_label")):
        code, out, _ = call(capsys, "list", kind)
        assert (code, names in out, "rates" in out) == (0, True, False)
    for name, words in (
        ("label_shuffle", ("[attack]", "intensity = 1", "arXiv:")),
        ("krum", ("byzantine = 1", "f, largest number of attackers")),
    ):
        code, out, _ = call(capsys, "show", name)
        assert code == 0
        assert all(word in out for word in words)
    code, out, _ = call(capsys, "run", exp, "--out", tmp_path / "r", "--format", "json")
    assert (code, len(json.loads(out)["attackers"])) == (0, 1)
    code, _, err = call(capsys, "run", exp, "--set", "attack.name=sign_flop", "--out", tmp_path / "x")
    assert (code, 'did you mean "sign_flip"' in err, "Traceback" in err) == (2, True, False)
    code, _, err = call(capsys, "run", exp, "--set", "aggregation={name='krum', byzantine=3}", "--out", tmp_path / "x")
    assert (code, "needs 9 updates per round" in err, (tmp_path / "x").exists()) == (2, True, False)


def test_a_run_is_never_overwritten(finished, tmp_path, capsys):
    code, _, err = call(capsys, "run", toml(tmp_path), "--out", finished)
    assert code == 2
    assert "fedfm resume" in err
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("x")
    code, _, err = call(capsys, "run", toml(tmp_path), "--out", other)
    assert code == 2
    assert (other / "thesis.txt").exists()


def test_resume_of_a_finished_run_prints_its_result_again(finished, capsys):
    code, out, _ = call(capsys, "resume", finished, "--format", "json")
    assert code == 0
    assert json.loads(out) == json.loads((finished / "manifest.json").read_text())["result"]


def test_a_moved_run_says_where_it_is_now(finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "moved")
    code, out, _ = call(capsys, "resume", tmp_path / "moved", "--format", "json")
    assert code == 0
    assert json.loads(out)["run"] == str(tmp_path / "moved")
    code, out, _ = call(capsys, "resume", tmp_path / "moved")
    assert f"report: {tmp_path / 'moved' / 'report.html'}" in out


@pytest.mark.proof
def test_kill_at_any_moment_and_resume_gives_the_same_bits(tmp_path, capsys):
    tables = {"method": {"name": "scaffold", "rounds": 60, "local": {"epochs": 3}}, "run": {"workers": 2}}
    exp = toml(tmp_path, **tables)
    call(capsys, "run", exp, "--out", tmp_path / "straight")
    straight = json.loads((tmp_path / "straight/manifest.json").read_text())["result"]
    out = tmp_path / "killed"
    kills = 0
    for attempt in range(40):
        args = ["resume", str(out)] if (out / "manifest.json").exists() else ["run", str(exp), "--out", str(out)]
        process = subprocess.Popen(
            [sys.executable, "-m", "fedfm", *args],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        before = rounds_in(out)
        deadline = time.monotonic() + 300
        # The first rounds are seen, then the process dies at a moment that no one chose.
        while process.poll() is None and rounds_in(out) < before + 8 + 6 * attempt and time.monotonic() < deadline:
            time.sleep(0.005)
        if process.poll() is None:
            time.sleep(0.003 * (attempt % 7))
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        code = process.wait()
        if code == 0:
            break
    assert kills >= 2  # as many as the machine's speed lets in
    resumed = json.loads((out / "manifest.json").read_text())["result"]
    for key in ("params_sha256", "client_accuracy", "bytes_up", "bytes_down"):
        assert resumed[key] == straight[key]
    rounds = [json.loads(line)["round"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rounds == list(range(61))


@pytest.mark.proof
def test_ctrl_c_keeps_what_was_done_and_says_how_to_go_on(tmp_path, capsys):
    exp = toml(tmp_path, method={"rounds": 3000}, run={"workers": 2})
    process = subprocess.Popen(
        [sys.executable, "-m", "fedfm", "run", str(exp), "--out", str(tmp_path / "r")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    while rounds_in(tmp_path / "r") < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert f"fedfm resume {tmp_path / 'r'}" in err
    assert "Traceback" not in err
    kept = rounds_in(tmp_path / "r")
    assert kept >= 3
    code, _, _ = call(capsys, "report", tmp_path / "r")
    assert code == 0


@pytest.mark.proof
def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path, capsys):
    exp = toml(tmp_path, method={"rounds": 30})
    call(capsys, "run", exp, "--out", tmp_path / "straight")
    code = (
        "import resource, sys; from fedfm.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000)); sys.exit(main(sys.argv[1:]))"
    )
    args = [sys.executable, "-c", code, "run", str(exp), "--out", str(tmp_path / "full")]
    ended = subprocess.run(args, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "the disk is full" in ended.stderr
    assert f"fedfm resume {tmp_path / 'full'}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert 0 < rounds_in(tmp_path / "full") < 30
    code, _, _ = call(capsys, "resume", tmp_path / "full")
    assert code == 0
    results = [json.loads((tmp_path / r / "manifest.json").read_text())["result"] for r in ("straight", "full")]
    assert results[0]["params_sha256"] == results[1]["params_sha256"]


def test_a_damaged_checkpoint_is_passed_over(tmp_path, capsys):
    import fedfm
    from fedfm.runtime.run_directory import Run

    exp = experiment(tmp_path, method={"rounds": 5})
    straight = fedfm.run(exp, tmp_path / "straight")
    fedfm.run(exp, tmp_path / "hurt")
    run = Run.open(tmp_path / "hurt")
    run.manifest["result"] = None
    run.write_manifest()
    newest = sorted((tmp_path / "hurt/checkpoint").iterdir())[-1]
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    again = fedfm.resume(tmp_path / "hurt")
    assert again["params_sha256"] == straight["params_sha256"]
    notices = Run.open(tmp_path / "hurt").manifest["notices"]
    assert f"{newest.name} was damaged: the run continues after round 4" in notices


def test_a_run_without_a_complete_checkpoint_starts_over_only_on_request(tmp_path, capsys):
    from fedfm.runtime.run_directory import Run

    assert call(capsys, "run", toml(tmp_path), "--out", tmp_path / "r")[0] == 0
    run = Run.open(tmp_path / "r")
    result = run.manifest["result"]
    both = sorted((tmp_path / "r/checkpoint").iterdir())
    for path in both:
        path.write_bytes(path.read_bytes()[:-40])
    rows = tmp_path / "rows.npz"
    code, _, err = call(capsys, "predict", tmp_path / "r", rows)
    assert code == 2
    assert "put back a copy of its files, or run the experiment again" in err
    run.manifest["result"] = None
    run.write_manifest()
    before = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*.*") if path.is_file()}
    code, _, err = call(capsys, "resume", tmp_path / "r")
    assert code == 2
    assert f"{both[1]} is damaged (1 more file is lost): without a checkpoint the run starts over" in err
    assert before == {path: path.read_bytes() for path in before}
    code, _, err = call(capsys, "resume", tmp_path / "r", "--accept-loss")
    assert code == 0
    assert f"{both[1].name} and {both[0].name} were damaged: the run starts over" in err
    assert "went back" not in err
    assert Run.open(tmp_path / "r").manifest["result"]["params_sha256"] == result["params_sha256"]


def test_data_of_one_class_get_a_notice(tmp_path, capsys):
    """One client of one class is legitimate: nothing is said of it."""
    features(tmp_path, classes=1)
    code, _, err = call(capsys, "run", toml(tmp_path), "--out", tmp_path / "one")
    assert code == 0
    assert err.count('all training rows are of one class, "ant"') == 1
    two = tmp_path / "two"
    two.mkdir()
    features(two, classes=2)
    shards = {"partition": {"name": "by_class", "clients": 2, "classes_per_client": 1}}
    code, _, err = call(capsys, "run", toml(two, data=shards), "--out", two / "run")
    assert code == 0
    assert "one class" not in err


def test_two_processes_never_write_one_run(tmp_path, capsys):
    from fedfm.config.experiment import Experiment
    from fedfm.errors import InputError
    from fedfm.runtime.run_directory import Run

    run = Run.create(Experiment.from_dict(experiment(tmp_path)), tmp_path / "r")
    with run.lock(), pytest.raises(InputError, match="another process"), Run.open(tmp_path / "r").lock():
        pass


def test_a_run_of_a_later_release_is_refused(finished, tmp_path, capsys):
    manifest = json.loads((finished / "manifest.json").read_text()) | {"schema": 99}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for command in ("resume", "report"):
        code, _, err = call(capsys, command, tmp_path)
        assert code == 2
        assert "99" in err


def test_predict_and_export(finished, tmp_path, capsys):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "new.npz", x=rng.normal(size=(7, 8)).astype(np.float32))
    code, out, _ = call(capsys, "predict", finished, tmp_path / "new.npz", "--format", "json")
    assert code == 0
    result = json.loads(out)
    assert len(result["predictions"]) == 7
    assert set(result["predictions"]) <= {"ant", "bee", "cow", "dog"}
    assert all(abs(sum(p) - 1) < 1e-4 for p in result["probabilities"])
    code, _, _ = call(capsys, "export", finished, "--to", "torch", "--out", tmp_path / "out")
    assert code == 0
    from safetensors.torch import load_file

    (file,) = (tmp_path / "out").glob("*.safetensors")
    weights = load_file(file)
    x = np.load(tmp_path / "new.npz")["x"]
    logits = x @ weights["head.weight"].numpy().T + weights["head.bias"].numpy()
    assert [result["classes"][i] for i in logits.argmax(1)] == result["predictions"]
    code, _, err = call(capsys, "export", finished, "--to", "torch", "--out", tmp_path / "out")
    assert code == 2
    assert "not empty" in err


def test_predictions_of_a_folder_of_pictures_say_whose_they_are(tmp_path, capsys):
    from PIL import Image

    exp = tmp_path / "exp.toml"
    data = {"path": str(pictures(tmp_path)), "partition": {"name": "iid", "clients": 2}}
    tables = {"data": data, "model": {"name": str(tiny_vit(tmp_path))}, "method": {"name": "fedavg", "rounds": 1}}
    exp.write_text(to_toml(tables | {"run": {"workers": 1}}))
    assert call(capsys, "run", exp, "--out", tmp_path / "r")[0] == 0
    x = np.load(tmp_path / "pictures.npz")["x"]
    names = ["b/late.png", "a/x.png", "a/early.png"]
    for i, name in enumerate(names):
        (tmp_path / "new" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[i]).save(tmp_path / "new" / name)
    np.savez(tmp_path / "rows.npz", x=x[[2, 1, 0]])
    _, out, _ = call(capsys, "predict", tmp_path / "r", tmp_path / "rows.npz", "--format", "json")
    rows = json.loads(out)
    assert "files" not in rows
    _, out, _ = call(capsys, "predict", tmp_path / "r", tmp_path / "new", "--format", "json")
    found = json.loads(out)
    assert found["files"] == sorted(names)
    assert {key: found[key] for key in ("predictions", "probabilities")} == {
        key: rows[key] for key in ("predictions", "probabilities")
    }
    _, out, _ = call(capsys, "predict", tmp_path / "r", tmp_path / "new")
    assert [line.split("\t")[:2] for line in out.splitlines()] == [
        list(pair) for pair in zip(sorted(names), rows["predictions"], strict=True)
    ]


def test_vectors_of_another_width_are_refused_with_both_widths(finished, tmp_path, capsys):
    np.savez(tmp_path / "narrow.npz", x=np.zeros((5, 3), np.float32))
    code, _, err = call(capsys, "predict", finished, tmp_path / "narrow.npz")
    assert code == 2
    assert "vectors of 3 values; the model takes 8" in err


def test_a_place_that_cannot_be_written_is_named_without_a_traceback(finished, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    export, app = ("export", finished, "--to", "torch", "--out", tmp_path / "file/e"), ("app", tmp_path / "file/a")
    for words, expected in ((export, 2), (app, 1)):
        code, _, err = call(capsys, *words)
        assert code == expected
        assert f"{words[-1]}: " in err
        assert err.endswith(": Not a directory\n")
        assert err.count("\n") == 1


@pytest.mark.parametrize(("chosen", "way"), [(True, "--out"), (False, "copy {} to a folder of yours")])
def test_a_page_that_cannot_be_written_names_a_way_out(tmp_path, chosen, way):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as refused:
        save("text", tmp_path / "file" / "report.html", chosen=chosen)
    assert f"make {tmp_path / 'file'} writable, or " in str(refused.value)
    assert way.format(tmp_path / "file") in str(refused.value)


def test_predict_with_a_model_per_client(tmp_path, capsys):
    code, _, _ = call(capsys, "run", toml(tmp_path, method={"name": "local"}), "--out", tmp_path / "r")
    assert code == 0
    code, _, err = call(capsys, "predict", tmp_path / "r", tmp_path / "rows.npz")
    assert code == 2
    assert "--client" in err
    code, out, _ = call(capsys, "predict", tmp_path / "r", tmp_path / "rows.npz", "--client", "client-01")
    assert code == 0
    assert len(out.strip().splitlines()) == 240
    assert (tmp_path / "r/clients/client-01/adapter").is_dir()


def test_compare(finished, tmp_path, capsys):
    code, _, _ = call(capsys, "run", toml(tmp_path, method={"name": "centralised"}), "--out", tmp_path / "c")
    code, out, _ = call(capsys, "compare", finished, tmp_path / "c", "--out", tmp_path / "page.html")
    assert code == 0
    assert "centralised" in out
    assert (tmp_path / "page.html").read_text().lower().startswith("<!doctype html>")


def test_compare_says_that_figures_are_of_different_data(finished, tmp_path, capsys):
    other = toml(tmp_path, data={"path": str(features(tmp_path, seed=9))})
    assert call(capsys, "run", other, "--out", tmp_path / "other")[0] == 0
    page = tmp_path / "page.html"
    code, out, err = call(capsys, "compare", finished, tmp_path / "other", "--out", page)
    assert code == 0
    assert err == "fedfm: The scores are of different data: the rows (fingerprint) of other are not run's.\n"
    assert "different data" not in out
    assert "The scores are of different data" in page.read_text()
    assert call(capsys, "compare", finished, finished, "--out", page)[2] == ""
    assert "different data" not in page.read_text()


def test_seeds_give_mean_and_interval(tmp_path, capsys):
    args = ("run", toml(tmp_path), "--seeds", "0,1,2", "--out", tmp_path / "s", "--format", "json")
    code, out, _ = call(capsys, *args)
    assert code == 0
    result = json.loads(out)
    values = [r["accuracy"] for r in result["runs"]]
    figure = result["figures"]["accuracy"]
    assert figure["mean"] == pytest.approx(np.mean(values))
    from scipy import stats

    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert (figure["low"], figure["high"]) == (pytest.approx(low, abs=1e-4), pytest.approx(min(high, 1.0), abs=1e-4))
    code, out, _ = call(capsys, *args)  # again: nothing is run twice
    assert json.loads(out)["runs"] == result["runs"]
    code, out, _ = call(capsys, *args[:-2])
    assert f"reports: {tmp_path / 's'}/seed-*/report.html" in out


def test_tune_chooses_by_validation_rows(tmp_path, capsys):
    exp = toml(tmp_path, data={"val_fraction": 0.25})
    code, _, _ = call(capsys, "run", exp, "--tune", "1e-6,0.2", "--out", tmp_path / "t", "--format", "json")
    assert code == 0
    manifest = json.loads((tmp_path / "t/manifest.json").read_text())
    assert manifest["experiment"]["method"]["local"]["learning_rate"] == 0.2
    entries = manifest["ledger"]["entries"]
    assert [e["learning_rate"] for e in entries] == [1e-6, 0.2]
    assert entries[0]["val_loss"] > entries[1]["val_loss"]
    assert all(e["bytes_up"] > 0 for e in entries)
    code, _, err = call(capsys, "run", exp, "--tune", "1e-6,0.2", "--seeds", "0,1", "--out", tmp_path / "s")
    assert code == 0
    assert "learning rate 0.2 has the lowest validation loss" in err
    for seed in (0, 1):  # whoever uses the rate owes what its choice cost
        ledger = json.loads((tmp_path / f"s/seed-{seed}/manifest.json").read_text())["ledger"]
        assert [e["learning_rate"] for e in ledger["entries"]] == [1e-6, 0.2]
    code, _, err = call(capsys, "run", exp, "--tune", "0.2,0.20", "--out", tmp_path / "twice")
    assert (code, "a learning rate occurs twice" in err) == (2, True)
    code, _, err = call(capsys, "run", toml(tmp_path), "--tune", "0.1,0.2")
    assert code == 2
    assert "val_fraction" in err
    exp = toml(tmp_path, data={"val_fraction": 0.25})
    code, _, err = call(capsys, "run", exp, "--tune", "0.1,-3", "--out", tmp_path / "wrong")
    assert code == 2
    assert "method.local.learning_rate = -3.0" in err
    assert not (tmp_path / "wrong-tune").exists()  # told before the first rate was tried


def test_tune_goes_on_without_a_rate_that_diverges(tmp_path, capsys):
    exp = toml(tmp_path, data={"val_fraction": 0.25})
    code, _, err = call(capsys, "run", exp, "--tune", "1e30,0.2", "--out", tmp_path / "t", "--format", "json")
    assert code == 0
    assert "learning rate 1e+30: round 1: 0 of" in err
    manifest = json.loads((tmp_path / "t/manifest.json").read_text())
    assert manifest["experiment"]["method"]["local"]["learning_rate"] == 0.2
    first, second = manifest["ledger"]["entries"]
    assert first["val_loss"] is None
    assert "valid reply" in first["failed"]
    assert second["val_loss"] > 0
    code, _, err = call(capsys, "run", exp, "--tune", "1e30", "--out", tmp_path / "u")
    assert code == 1
    assert "no learning rate gave a validation loss" in err


def test_tune_judges_the_model_that_early_stopping_leaves(tmp_path, capsys):
    tables = {"data": {"val_fraction": 0.25}, "run": {"patience": 2}, "method": {"name": "fedavg", "rounds": 200}}
    tables["method"]["local"] = {"learning_rate": 5.0, "batch_size": 4}
    code, _, _ = call(capsys, "run", toml(tmp_path, **tables), "--tune", "4.0,5.0", "--out", tmp_path / "t")
    assert code == 0
    trials = json.loads((tmp_path / "t/manifest.json").read_text())["ledger"]["entries"]
    for trial in trials:
        lines = load_run(tmp_path / f"t-tune/rate-{trial['learning_rate']:g}").metrics()
        assert trial["val_loss"] == min(m["val_loss"] for m in lines if m["round"]) < lines[-1]["val_loss"]


def test_early_stopping_that_could_never_stop_is_refused(tmp_path, capsys):
    tables = {"data": {"val_fraction": 0.25}, "run": {"patience": 2, "evaluate_every": 0}}
    code, _, err = call(capsys, "run", toml(tmp_path, **tables), "--out", tmp_path / "r")
    assert code == 2
    assert "run.evaluate_every = 0" in err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('method.local={ name = ["sgd"] }', 'method.local.name = ["sgd"]: expected "adam'),
        ("method.local.learning_rate=inf", "method.local.learning_rate = inf: expected a finite number above 0"),
        ("method.local.weight_decay=inf", "method.local.weight_decay = inf"),
        ('model.adaptation={ name = "lora", rank = 0 }', "model.adaptation.rank = 0"),
        ('model.adaptation={ name = "lora", alpha = inf }', "model.adaptation.alpha = inf"),
        ('model.adaptation={ name = "lora", dropout = 1.5 }', "model.adaptation.dropout = 1.5"),
        ('model.adaptation={ name = "loar" }', 'did you mean "lora"'),
        ("model.task=clasification", 'model.task = "clasification"'),
        ("name=0", "name = 0"),
        ('name=""', "name = ''"),
        ('data.path=""', 'data.path = ""'),
        ("data.path=no.npz", 'data.path: there is no "no.npz"'),
        ("data.partition.name=dirichle", 'did you mean "dirichlet"'),
        ("data.partition.alpha=-1", "data.partition.alpha = -1.0"),
        ("data.partition.clients=0", "data.partition.clients = 0"),
        ("data.test_fraction=1.5", "data.test_fraction = 1.5"),
        ("model.name=./nowhere", "model.name: no folder ./nowhere"),
        ('method={ name = "fedbaf", foundation = "./nowhere" }', "method.foundation: no folder ./nowhere"),
    ],
)
def test_check_refuses_what_run_would_refuse(tmp_path, capsys, change, said):
    code, _, err = call(capsys, "check", toml(tmp_path), "--set", change)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_outputs_into_a_file_are_refused(finished, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, _, err = call(capsys, "export", finished, "--to", "torch", "--out", tmp_path / "file")
    assert (code, "is a file" in err) == (2, True)
    code, _, err = call(capsys, "app", tmp_path / "file")
    assert (code, "is a file" in err) == (2, True)


@pytest.mark.sample("fedavg", "local")
@pytest.mark.parametrize("method", ["fedavg", "local", "fedbip"])  # one model for all; a model per client
def test_early_stopping_by_validation_rows(tmp_path, capsys, method):
    tables = {"data": {"val_fraction": 0.25}, "run": {"patience": 2}, "method": {"name": method, "rounds": 200}}
    tables["method"]["local"] = {"learning_rate": 5.0, "batch_size": 4}
    code, out, err = call(capsys, "run", toml(tmp_path, **tables), "--out", tmp_path / "r", "--format", "json")
    assert code == 0
    result = json.loads(out)
    assert 2 < result["rounds"] < 200
    assert result["macro_f1"] is not None
    best = result["details"]["stopped_early"]["best_round"]
    losses = {m["round"]: m["val_loss"] for m in load_run(tmp_path / "r").metrics()}
    assert losses[best] == min(losses.values())
    assert best == result["rounds"] - 2
    assert f"stopped after round {best + 2} of 200: no validation loss was below that of round {best}" in err
    assert f"the model is that of round {best}" in err
    report = (tmp_path / "r/report.html").read_text()
    assert f"stopped early by validation rows; the model is that of round {best}" in report

    # The model of the best round is that of a run that ends there, and all that reads the run finds it.
    del tables["run"]
    tables["method"]["rounds"] = best
    code, out, _ = call(capsys, "run", toml(tmp_path, **tables), "--out", tmp_path / "s", "--format", "json")
    straight = json.loads(out)
    for key in ("params_sha256", "accuracy", "global_accuracy", "client_accuracy", "balanced_accuracy", "loss"):
        assert result[key] == straight[key]
    # The rounds that were run, and not those of the model: training alone has no messages to count.
    assert result["bytes_up"] > straight["bytes_up"] or result["method"] == "local"
    state_type = load_run(tmp_path / "r").experiment.method.state_type
    states = [load_run(tmp_path / name).state(state_type) for name in "rs"]
    heads, data = zip(*map(payload.encode, states), strict=True)
    assert heads[0] == heads[1]
    assert b"".join(data[0]) == b"".join(data[1])
    if method == "fedbip":
        assert call(capsys, "audit", tmp_path / "r")[0] == 0


def test_clients_keep_their_parts_of_the_last_rounds_model(tmp_path, capsys):
    tables = {"data": {"val_fraction": 0.25}, "run": {"patience": 2}, "method": {"name": "ditto", "rounds": 200}}
    tables["method"]["local"] = {"learning_rate": 5.0, "batch_size": 4}
    code, out, err = call(capsys, "run", toml(tmp_path, **tables), "--out", tmp_path / "r", "--format", "json")
    result = json.loads(out)
    assert code == 0
    assert result["details"]["model_of_round"] == result["rounds"] > result["details"]["stopped_early"]["best_round"]
    assert f"the model is that of round {result['rounds']}" in err


def test_the_best_round_counts_even_where_the_last_one_is_reached(tmp_path, capsys):
    tables = {"data": {"val_fraction": 0.25}, "run": {"patience": 50}, "method": {"name": "fedavg", "rounds": 40}}
    tables["method"]["local"] = {"learning_rate": 5.0, "batch_size": 4}
    exp = toml(tmp_path, **tables)
    code, out, _ = call(capsys, "run", exp, "--out", tmp_path / "r", "--format", "json")
    result, run = json.loads(out), load_run(tmp_path / "r")
    assert (code, result["rounds"]) == (0, 40)
    losses = {m["round"]: m["val_loss"] for m in run.metrics()}
    best = result["details"]["model_of_round"]
    assert losses[best] == min(losses.values())
    assert best < 40
    # Killed when that model was chosen and before it was written, it ends in the same way.
    shutil.copytree(tmp_path / "r", tmp_path / "k")
    manifest = json.loads((tmp_path / "k/manifest.json").read_text())
    (tmp_path / "k/manifest.json").write_text(json.dumps(manifest | {"result": None}))
    shutil.rmtree(tmp_path / "k/adapter")
    code, out, _ = call(capsys, "resume", tmp_path / "k", "--format", "json")
    assert code == 0
    for key in ("params_sha256", "accuracy", "details"):
        assert json.loads(out)[key] == result[key]


def test_without_the_best_rounds_checkpoint_the_last_model_stays(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fedfm.runtime.run_directory.Run.state_of", lambda *_: None)
    tables = {"data": {"val_fraction": 0.25}, "run": {"patience": 2}, "method": {"name": "fedavg", "rounds": 200}}
    tables["method"]["local"] = {"learning_rate": 5.0, "batch_size": 4}
    code, out, err = call(capsys, "run", toml(tmp_path, **tables), "--out", tmp_path / "r", "--format", "json")
    result = json.loads(out)
    assert code == 0
    best, last = result["rounds"] - 2, result["rounds"]
    assert f"the best round, {best}, is missing; the model is that of round {last}" in err
    assert result["details"]["model_of_round"] == result["rounds"]


def test_check_prints_every_default(tmp_path, capsys):
    code, out, _ = call(capsys, "check", toml(tmp_path), "--format", "json")
    assert code == 0
    checked = json.loads(out)
    assert checked["valid"]
    assert checked["experiment"]["run"]["timeout"] == 600.0
    assert checked["experiment"]["model"]["adaptation"]["name"] == "head"
    code, out, _ = call(capsys, "check", toml(tmp_path))
    import tomllib

    assert tomllib.loads(out)["run"]["seed"] == 1


def test_check_names_the_client_whose_file_is_missing(tmp_path, capsys):
    (tmp_path / "exp.toml").write_text(
        '[data]\nclients = { north = "no.csv" }\n[model]\nname = "features"\n[method]\nname = "fedavg"\n'
    )
    code, _, err = call(capsys, "check", tmp_path / "exp.toml")
    assert code == 2
    assert 'data.clients.north: there is no "no.csv"' in err


def test_more_clients_than_there_are_cannot_be_required(tmp_path, capsys):
    code, _, err = call(capsys, "run", toml(tmp_path, run={"min_clients": 6}), "--out", tmp_path / "r")
    assert code == 2
    assert "run.min_clients = 6: a round asks 3 of 5 clients" in err
    assert not (tmp_path / "r").exists()


def test_python_m_is_the_command_line():
    done = subprocess.run([sys.executable, "-m", "fedfm", "list", "attacks"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "sign_flip" in done.stdout


BASE = '[data]\nname = "digits"\n[model]\nname = "nano-vit"\n[method]\nname = "fedavg"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("this is not toml", "not TOML"),
        ("", "[data] is missing"),
        (BASE + "roundz = 3\n", 'did you mean "rounds"'),
        (BASE + 'rounds = "3"\n', "a whole number"),
        (BASE + "rounds = 3.0\n", "a whole number"),
        (BASE + "rounds = true\n", "a whole number"),
        (BASE + "rounds = -1\n", "method.rounds"),
        (BASE + "fraction = 0.0\n", "method.fraction"),
        (BASE + "fraction = nan\n", "method.fraction"),
        (BASE + '[run]\nengine = "spark"\n', '"local"'),
        (BASE + "[run]\nmin_clients = 0\n", "run.min_clients"),
        (BASE + "[run]\nseed = -1\n", "run.seed"),
        (BASE + "[runs]\nseed = 1\n", 'did you mean "run"'),
        (BASE + "[method.local]\nlearning_rate = -1.0\n", "method.local.learning_rate"),
        (BASE + '[method.local]\nname = "sgdd"\n', 'did you mean "sgd"'),
        (BASE + "[privacy]\ntarget_epsilon = 0.0\n", "privacy.target_epsilon"),
        (BASE + '[privacy]\naggregator = "secag"\n', 'did you mean "secagg"'),
        (BASE.replace('"fedavg"', '"fedvag"'), 'did you mean "fedavg"'),
        (BASE.replace('"fedavg"', '"scaffold"') + "[method.local]\nmomentum = 0.9\n", "scaffold"),
        (BASE.replace('name = "digits"', 'name = "digits"\npath = "x.csv"'), "exactly one of"),
        (BASE.replace('"nano-vit"', '"nano-vit"\ndtype = "int8"'), "model.dtype"),
        (BASE.replace('"fedavg"', '"centralised"') + '[run]\nengine = "deployment"\n', "pools"),
        (BASE.replace('"fedavg"', '"os:path"'), "os:path"),
        (BASE.replace('"fedavg"', '"no.such:Thing"'), "no.such"),
        (BASE.replace("[model]", 'partition = 5\n[model]'), "expected a table"),
        (BASE.replace("[model]", 'clients = 5\n[model]'), "partition.clients"),
    ],
)  # fmt: skip
def test_a_wrong_experiment_is_refused_with_its_place_and_leaves_nothing(tmp_path, capsys, text, words):
    path = tmp_path / "exp.toml"
    path.write_text(text)
    code, _, err = call(capsys, "run", path, "--out", tmp_path / "r")
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    assert all(f"{path}: " in line for line in err.strip().splitlines())  # a line for each fault
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            '[aggregation]\nname = "trimmed_mean"\n',
            "a robust rule compares single updates, and secure aggregation hides",
        ),
        ('method.name = "kd"', 'of method "kd" looks at single replies (learn)'),
        ('method.name = "fedpft"', 'of method "fedpft" looks at single replies (summarise)'),
        ('method.name = "local"', 'of method "local" looks at single replies (train_alone)'),
        ('method.name = "fedfed"', "looks at single replies (share)"),
        ('method.name = "zero_shot"', "sends no update that could be hidden"),
    ],
)
@pytest.mark.parametrize("command", ["check", "run"])
def test_secure_aggregation_is_refused_with_the_reason(tmp_path, capsys, command, change, why):
    path = tmp_path / "exp.toml"
    text = BASE + '[privacy]\naggregator = "secagg"\n'
    key, _, value = change.partition(" = ")
    path.write_text(text.replace('"fedavg"', value) if key == "method.name" else text + change)
    code, _, err = call(capsys, command, path, *(("--out", tmp_path / "r") if command == "run" else ()))
    assert code == 2
    assert 'privacy.aggregator = "secagg": ' in err
    assert why in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "r").exists()


def test_refusals_found_while_reading_leave_nothing(tmp_path, capsys):
    for changes in ({"data": {"path": str(tmp_path / "no.npz")}}, {"model": {"name": "/no/such/folder"}}):
        code, _, err = call(capsys, "run", toml(tmp_path, **changes), "--out", tmp_path / "r")
        assert code == 2
        assert "Traceback" not in err
        assert not (tmp_path / "r").exists()


def test_changed_data_are_refused_on_resume(tmp_path, capsys):
    from fedfm.runtime.run_directory import Run

    call(capsys, "run", toml(tmp_path), "--out", tmp_path / "r")
    run = Run.open(tmp_path / "r")
    run.manifest["result"] = None
    run.write_manifest()
    from small import features

    features(tmp_path, seed=9)
    code, _, err = call(capsys, "resume", tmp_path / "r")
    assert code == 2
    assert "data changed" in err


@pytest.mark.parametrize("command", EXAMPLES)
def test_the_help_of_every_command_has_an_example(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert f"examples:\n  fedfm {command}" in out
    assert max(map(len, out.splitlines())) <= 120


def test_help_list_and_show_print_usage(capsys):
    for args in (["--help"], ["run", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(args)
        assert stop.value.code == 0
    assert "fedfm run exp.toml" in capsys.readouterr().out
    code, out, _ = call(capsys, "list")
    assert "scaffold" in out
    assert "dirichlet" in out
    code, out, _ = call(capsys, "list", "sources")
    names = [line.split()[0] for line in out.splitlines()[1:] if line.startswith("  ")]
    assert names == [
        "csv",
        "digits",
        "hub",
        "images",
        "json",
        "jsonl",
        "npz",
        "parquet",
        "tables",
        "text",
    ]  # what a [data] can read
    code, out, _ = call(capsys, "show", "fedadam")
    assert "arXiv:2003.00295" in out
    assert "beta_2 = 0.99" in out
    assert "learning_rate = 0.1" in out
    assert f"the client optimiser: {', '.join(BY_NAME)}\n" in out
    assert '# name = "dual_adapter" also takes' in out
    for name, optimiser in {"feddpa": "dual_adapter", "ditto": "ditto", "fedprox": "sgd"}.items():
        code, out, _ = call(capsys, "show", name)
        assert f', dual_adapter\nname = "{optimiser}"\nlearning_rate' in out, "the method's own default"
    code, _, err = call(capsys, "show", "fedadm")
    assert code == 2
    assert 'did you mean "fedadam"' in err


def test_python_dash_m_is_the_command():
    answer = subprocess.run([sys.executable, "-m", "fedfm", "--version"], check=True, capture_output=True, text=True)
    assert answer.stdout.split()[0] == "fedfm"


def test_the_light_commands_import_no_heavy_library():
    code = (
        "import sys; from fedfm.cli import main; main(['list']); main(['show', 'scaffold'])\n"
        "heavy = {'torch', 'transformers', 'flwr', 'numpy', 'peft'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_help_imports_neither_the_configuration_nor_what_it_needs():
    code = (
        "import sys; from fedfm.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n"
        "    loaded = {'fedfm.config', 'dataclasses', 'importlib.resources', 'numpy'} & set(sys.modules)\n"
        "    assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("flag", [("--seeds", "-1,2"), ("--seeds=-1,2",), ("--seeds", "-1"), ("--seeds", "0.5")])
def test_seeds_are_integers_of_at_least_0(tmp_path, capsys, flag):
    code, _, err = call(capsys, "run", toml(tmp_path), *flag, "--out", tmp_path / "r")
    assert code == 2
    assert "whole numbers of at least 0" in err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("name", ["rows.npz", "pictures", "notes.csv", "letter"])
def test_data_where_an_experiment_is_expected(tmp_path, capsys, name):
    features(tmp_path)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "notes.csv").write_text("text,label\n")
    (tmp_path / "letter").write_bytes(b"\xff\xfe\x00")
    code, _, err = call(capsys, "run", tmp_path / name)
    assert code == 2
    hint = f'an experiment in TOML, whose [data] names the file: path = "{tmp_path / name}"'
    assert ("not TOML" if name == "letter" else hint) in err
    toml(tmp_path).rename(tmp_path / "exp.txt")  # a name proves nothing
    assert call(capsys, "check", tmp_path / "exp.txt")[0] == 0


def test_no_description_in_the_list_ends_in_mid_sentence(capsys):
    _, out, _ = call(capsys, "list", "methods")
    assert all(line.endswith((".", ":")) for line in out.splitlines())


def test_doctor_checks_the_installation(capsys):
    code, out, _ = call(capsys, "doctor", "--format", "json")
    assert code == 0
    report = json.loads(out)
    assert report["ok"]
    found = {c["what"]: c["found"] for c in report["checks"]}
    assert {"torch", "flower", "nano-vit"} <= found.keys()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]} <= found.keys()
    for extra, packages in project["optional-dependencies"].items():
        assert {re.match(r"[\w-]+", line)[0] for line in packages} <= set(
            re.findall(r"[\w-]+", found[f"extra {extra}"])
        )
    said = r'\d+ Gflop/s a core in float32; kernels = "fast_bf16" is \d+\.\d times as fast'
    assert re.fullmatch(rf"{said}(: do not use it here)?", found["linear maps"])


def fedbaf(folder, **method):
    """A small FedBaF experiment as a file."""
    path = folder / "baf.toml"
    tables = {
        "data": {"name": "digits", "limit": 60, "partition": {"name": "iid", "clients": 3}},
        "model": {"name": "nano-vit", "weights": "random", "adaptation": {"name": "full"}},
        "method": {"name": "fedbaf", "rounds": 1, "foundation": "nano-vit", **method},
    }
    path.write_text(to_toml(tables))
    return path


class TestFoundationModels:
    def test_check_prints_what_mixes_with_what(self, tmp_path, capsys):
        assert main(["check", str(fedbaf(tmp_path)), "--matching"]) == 0
        out = capsys.readouterr().out
        assert "same shape" in out
        assert "the foundation model has no such tensor" in out  # nano-vit ships without a head

    def test_matching_needs_a_method_with_a_foundation_model(self, tmp_path, capsys):
        path = tmp_path / "e.toml"
        path.write_text('[data]\nname = "digits"\n[model]\nname = "nano-vit"\n[method]\nname = "fedavg"\n')
        assert main(["check", str(path), "--matching"]) == 2
        assert "has no foundation model" in capsys.readouterr().err

    @pytest.mark.proof
    def test_baselines_run_too(self, tmp_path, capsys):
        out = tmp_path / "runs"
        assert main(["run", str(fedbaf(tmp_path)), "--baselines", "--out", str(out), "--format", "json"]) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert result["method"] == "fedbaf"
        assert set(result["baselines"]) == {"no-foundation", "weight-initialisation"}
        assert result["baselines"]["no-foundation"]["method"] == "fedavg"
        assert "Compared with baselines" in (out / "fedbaf/report.html").read_text()
        moved = out.rename(tmp_path / "moved")
        assert main(["report", str(moved)]) == 0
        said = capsys.readouterr().out
        names = ("fedbaf", "no-foundation", "weight-initialisation")
        places = [said.index(f"report: {moved / name}") for name in names]
        assert places == sorted(places)
        assert "Compared with baselines" in (moved / "fedbaf/report.html").read_text()
        assert main(["compare", str(moved), "--out", str(tmp_path / "page.html")]) == 0
        assert set(capsys.readouterr().out.split()) >= {"fedbaf", "fedavg", "weight_init"}
        for words in (["audit", str(moved)], ["resume", str(moved)], ["predict", str(moved), "rows.npz"]):
            assert main(words) == 2
            assert f"take one of {moved / names[0]}" in capsys.readouterr().err

    def test_a_method_without_baselines_says_so(self, tmp_path, capsys):
        path = tmp_path / "e.toml"
        path.write_text('[data]\nname = "digits"\n[model]\nname = "nano-vit"\n[method]\nname = "fedavg"\n')
        assert main(["run", str(path), "--baselines"]) == 2
        assert "has no baselines" in capsys.readouterr().err


ACTS = "\x1b[31mred\x07\N{RIGHT-TO-LEFT OVERRIDE}\nnext"


def unseen(text):
    """Characters that a terminal would act upon, but for line ends and tabs."""
    return [c for c in text if unicodedata.category(c) in ("Cc", "Cf") and c not in "\n\r\t"]


def rows_with(folder, **columns):
    """The small experiment's file with other columns."""
    rows = dict(np.load(folder / "rows.npz"))
    np.savez(folder / "rows.npz", **rows | {name: np.array(values) for name, values in columns.items()})


def test_control_characters_in_names_do_not_reach_a_terminal(tmp_path, capsys):
    exp = toml(tmp_path)
    exp.write_text('name = "mine \\u001b]0;title\\u0007"\n' + exp.read_text())
    rows_with(tmp_path, classes=[ACTS, "bee", "cow", "dog"])
    code, out, err = call(capsys, "run", exp, "--out", tmp_path / "r")
    assert code == 0
    assert "mine" in err
    assert not unseen(out + err)
    code, out, _ = call(capsys, "predict", tmp_path / "r", tmp_path / "rows.npz")
    assert code == 0
    assert not unseen(out)
    assert len(out.splitlines()) == 240  # one a row, whatever is in a name
    assert "[31mred\\u000anext\t" in out  # what nobody sees is not in the name of a class
    code, out, _ = call(capsys, "predict", tmp_path / "r", tmp_path / "rows.npz", "--format", "json")
    assert class_name(ACTS) in json.loads(out)["predictions"]


def test_control_characters_in_errors_and_notices_do_not_reach_a_terminal(tmp_path, capsys):
    exp = toml(tmp_path, data={"partition": {"name": "by_column", "column": "domain"}})
    rows_with(tmp_path, domain=np.array(["\x1b[a", "\x1b]a"])[np.arange(240) % 2])
    code, _, err = call(capsys, "run", exp, "--out", tmp_path / "r")
    assert code == 2
    assert '"\\u001b[a" and another value' in err
    assert not unseen(err)
    Bar().excluded(Excluded(1, "north", "client_error", "no\x1b[2J way\nreally"))
    assert "fedfm: round 1: north left out, client_error: no\\u001b[2J way\\u000areally" in capsys.readouterr().err


def test_the_bar_of_a_resumed_run_counts_a_round_once_if_it_is_scored_again(finished, capsys, monkeypatch):
    monkeypatch.setattr("fedfm.runtime.progress_bar.can_redraw", lambda: True)
    bar = Bar()
    bar.started(load_run(finished), 4, 2)
    for t in (2, 3, 4):  # killed between the commit of round 2 and its line
        bar.round({"round": t, "accuracy": 0.5})
    bar.finished()
    assert "4/4" in capsys.readouterr().err


def test_a_log_file_gets_whole_lines(tmp_path, capsys):
    code, _, err = call(capsys, "run", toml(tmp_path, method={"rounds": 5}), "--out", tmp_path / "r")
    assert code == 0
    assert "\r" not in err
    said = [line for line in err.splitlines() if "round" in line]
    assert [line.partition(",")[0].split(": ")[1] for line in said] == ["round 0 of 5", "round 5 of 5"]
    assert re.fullmatch(r".*: round 5 of 5, accuracy \d\.\d{3}, \d+\.\d s", said[-1])


ESCAPE = "\x1b]0;owned\x07\x1b[2Jn"  # sets a terminal's title and clears its screen


def test_names_of_clients_and_classes_do_nothing_to_a_terminal(tmp_path, capsys):
    """In notices, the bar, summaries, predictions, comparisons and errors; JSON says what they are."""
    exp = toml(tmp_path, method={"name": "fedbip", "rounds": 1})
    rows = dict(np.load(tmp_path / "rows.npz"))
    rows["classes"] = np.array([ESCAPE, "bee\nant\t1.000", "cow", "dog"])
    np.savez(tmp_path / "rows.npz", **rows)
    run, data = tmp_path / "r", tmp_path / "rows.npz"
    texts = [call(capsys, "run", exp, "--out", run), call(capsys, "predict", run, data, "--client", "client-00")]
    texts += [call(capsys, "join", run, data, "--client", ESCAPE), call(capsys, "predict", run, data)]
    texts += [call(capsys, "report", run), call(capsys, "compare", run, "--out", tmp_path / "page.html")]
    assert [code for code, _, _ in texts] == [0, 0, 2, 2, 0, 0], texts
    progress = Bar()
    progress.excluded(Excluded(1, ESCAPE, "E_EXCEPTION", "no\nfedfm: all is well"))
    texts.append((0, *capsys.readouterr()))
    for _, out, err in texts:
        assert not set(out + err) & {"\x1b", "\x07"}
    assert "\\u001b]0;owned\\u0007\\u001b[2Jn left out, E_EXCEPTION: no\\u000afedfm: all is well\n" in texts[-1][2]
    assert all(line.count("\t") == 1 for line in texts[1][1].splitlines())  # one row a row, whatever its class
    assert "]0;owned" in texts[1][1]
    assert '"\\u001b]0;owned' in texts[2][2]
    _, out, _ = call(capsys, "predict", run, data, "--client", "client-00", "--format", "json")
    assert json.loads(out)["classes"][0] == class_name(ESCAPE)
    assert "\x1b" not in out


@pytest.mark.proof
@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
@pytest.mark.parametrize("columns", [0, 100])
def test_a_terminal_shows_the_bar_even_if_it_says_that_it_has_no_columns(tmp_path, columns):
    """As in a container with a terminal that nobody gave a size."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    shown = """
from types import SimpleNamespace
from fedfm.runtime.progress_bar import Bar
bar = Bar()
bar.started(SimpleNamespace(path=None, experiment=SimpleNamespace(name="mine")), 2, 0)
bar.round({"round": 2, "accuracy": 0.5, "seconds": 1.0})
bar.finished()
"""
    subprocess.run([sys.executable, "-c", shown], stderr=theirs, check=True)
    os.close(theirs)
    text = os.read(ours, 65536).decode()
    os.close(ours)
    assert "mine: 100%" in text
    assert "2/2" in text
    assert "accuracy=0.500" in text


def test_every_command_on_a_run_names_the_runs_of_a_folder_of_runs(tmp_path, capsys):
    (tmp_path / "d").mkdir()
    for seed in (0, 1):
        Run.create(Experiment.from_dict(experiment(tmp_path)), tmp_path / "d" / f"seed-{seed}")
    (subparsers,) = (a for a in build()._actions if isinstance(a, argparse._SubParsersAction))
    of_runs = [name for name, parser in subparsers.choices.items() if any(a.dest == "run" for a in parser._actions)]
    assert {"report", "predict", "audit", "resume", "export", "join", "compare", "sign", "verify"} <= set(of_runs)
    rest = {"predict": ["rows.csv"], "join": ["rows.csv"], "export": ["--to", "torch", "--out", tmp_path / "x"]}
    rest |= {"sign": ["--key", tmp_path / "k"], "leave": ["client-0"]}
    for name in set(of_runs) - {"report", "compare"}:  # which take all runs of a folder
        code, _, err = call(capsys, name, tmp_path / "d", *rest.get(name, []))
        assert code == 2, name
        assert f"take one of {tmp_path / 'd' / 'seed-0'}, {tmp_path / 'd' / 'seed-1'}" in err, name
