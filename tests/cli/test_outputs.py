"""Which files commands overwrite, how they report an incomplete run, and how a stopped study continues."""

import json
import shutil
from pathlib import Path

import pytest

import fedfm
from fedfm.audits.finding import refutes
from fedfm.cli import main, run_commands
from fedfm.runtime.progress_bar import Bar
from small import features


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("outputs")
    experiment = {
        "data": {"path": str(features(place)), "partition": {"name": "iid", "clients": 3}},
        "model": {"name": "features"},
        "method": {"name": "fedbip", "rounds": 2},
        "run": {"workers": 1},
    }
    fedfm.run(experiment, place / "run")
    return place / "run"


@pytest.mark.parametrize("command", [["compare", "RUN", "--out"], ["schema", "--out"]], ids=lambda c: c[0])
def test_a_page_replaces_a_page_and_nothing_else(command, run, tmp_path, capsys):
    command = [str(run) if word == "RUN" else word for word in command]
    for name, content in (("exp.toml", b"[data]\n"), ("key.pem", b"-----BEGIN"), ("x.html", b"<html>")):
        other = tmp_path / name
        other.write_bytes(content)
        assert main([*command, str(other)]) == 2
        said = capsys.readouterr()
        assert (said.out, other.read_bytes()) == ("", content)
        assert said.err.strip() == f"fedfm: --out {other} exists and is of another kind; give another path"
    own = tmp_path / "own"
    for _ in range(2):
        assert main([*command, str(own)]) == 0
    assert own.stat().st_size > 1000


def test_commands_that_need_no_model_report_that_it_is_missing(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoint")
    for command, code in (("report", 0), ("resume", 2)):
        assert main([command, str(copy)]) == code
        said = capsys.readouterr().err
        assert "the checkpoint of round 2 is missing" in said or "round-000002.safetensors is missing" in said
    assert main(["report", str(run)]) == 0
    assert "missing" not in capsys.readouterr().err


def test_a_dossier_of_a_run_that_goes_on_is_refused_in_one_line(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"result": None}))
    assert main(["audit", str(copy), "--dossier"]) == 2
    assert capsys.readouterr().err == f"fedfm: {copy} is not finished; run `fedfm resume {copy}` first\n"


class Stopped(Bar):
    """Somebody presses Ctrl-C once a round is committed."""

    def round(self, line):
        super().round(line)
        if line["round"] == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("flags", [["--seeds", "0,1"], ["--baselines"]], ids=lambda f: f[0])
def test_a_stopped_study_says_how_it_goes_on(flags, run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment = fedfm.load_run(run).experiment
    Path("exp.toml").write_text(experiment.to_toml())
    with monkeypatch.context() as stop:
        stop.setattr(run_commands, "watch", Stopped)
        assert main(["run", "exp.toml", *flags]) == 130
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "continue with" in line)
    place = line.partition("the same command and --out ")[2]
    assert Path(place).parent == Path("runs")
    assert main(["run", "exp.toml", *flags, "--out", place, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found.get("runs", found.get("baselines", ()))) >= 2


@pytest.mark.parametrize("low", [0.0, -1.0, 1e-12, 0.5])
def test_no_bound_below_zero_refutes_anything(low):
    assert refutes(low) == ("refutes no epsilon" if low <= 0 else f"refutes every epsilon below {low:.3g}")
