"""``fedfm survey``: from an experiment for training to figures, whatever its method and protection."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import fedfm
import small
from fedfm.cli.entry import main
from fedfm.core.toml_text import to_toml
from fedfm.errors import InputError

SHARED = Path(__file__).parents[3] / "shared" / "data"
RECORD = {"unit": "record", "target_epsilon": 4.0, "delta": 1e-6}


class Told(fedfm.Progress):
    def __init__(self):
        self.texts = []

    def notice(self, text):
        self.texts.append(text)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "exp.toml"
    tables = small.experiment(tmp_path)
    tables["data"]["partition"] = {"name": "by_column", "column": "domain"}
    path.write_text(to_toml(tables))
    return path


def test_the_command_prints_figures_and_writes_them(file, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["survey", str(file), "--out", str(out), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    kept = json.loads((out / "survey.json").read_text())
    assert {key: found[key] for key in kept} == kept
    with np.load(tmp_path / "rows.npz") as rows:
        train = rows["split"] == "train"
        assert kept["counts"]["targets"]["counts"] == np.bincount(rows["y"][train]).tolist()
        assert kept["by_silo"]["n"]["rows"] == (rows["domain"][train] == "n").sum()
    assert len(kept["features"]["mean"]) == kept["features"]["dimension"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["result"]["details"]["survey"]["risks"] == kept["risks"]
    assert "mean" not in manifest["result"]["details"]["survey"]["features"]
    page = (out / "report.html").read_text()
    assert "What the silos hold" in page
    assert "Drift between silos" in page
    assert not (out / "adapter").exists()
    assert not [n for n in manifest["notices"] if "did not change" in n or "accuracy" in n]


def test_the_text_names_each_risk_with_its_figure(file, tmp_path, capsys):
    assert main(["survey", str(file), "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "3 silos with 192 training rows; counts below 10 are hidden" in said
    assert "small silos: rows / silos = 64 (below 100)" in said
    assert "each client's reply (tell)" in said


@pytest.mark.parametrize("command", ["predict", "export", "join", "worth", "audit"])
def test_other_commands_refuse_the_run_in_one_line(file, tmp_path, capsys, command):
    out = str(tmp_path / "run")
    assert main(["survey", str(file), "--out", out]) == 0
    rows, more = str(tmp_path / "rows.npz"), ["--to", "torch", "--out", str(tmp_path / "x")]
    words = {"predict": [rows], "export": more, "join": [rows], "audit": ["--attack", "model_membership"]}
    capsys.readouterr()
    assert main([command, out, *words.get(command, [])]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "figures and no model" in last


@pytest.mark.parametrize(
    ("privacy", "asked", "epsilon", "delta", "form"),
    [
        (None, {}, None, None, "plain"),
        (None, {"epsilon": 2.0}, 2.0, 1e-5, "plain"),
        (RECORD, {}, 4.0, 1e-6, "plain"),
        (RECORD | {"mechanism": "dp_sgd", "clip_norm": 1.0}, {}, 4.0, 1e-6, "plain"),
        ({"aggregator": "secagg"}, {}, None, None, "masked"),
        ({"aggregator": "secagg"}, {"epsilon": 2.0, "delta": 1e-4}, 2.0, 1e-4, "masked"),
    ],
)
def test_the_experiment_s_protection_is_the_survey_s(file, tmp_path, privacy, asked, epsilon, delta, form):
    tables = small.experiment(tmp_path) | ({"privacy": privacy} if privacy else {})
    found = fedfm.survey(tables, tmp_path / "run", **asked)
    assert (found["epsilon"], found["delta"]) == (epsilon, delta)
    ledger = json.loads((tmp_path / "run/manifest.json").read_text())["ledger"]
    assert ledger["epsilon"] == epsilon
    lines = [json.loads(line) for line in (tmp_path / "run/messages.jsonl").read_text().splitlines()]
    assert {line["form"] for line in lines if line["handler"].startswith(("train.S", "query.S"))} >= {form}
    assert {line["form"] for line in lines if line["to"] == "server" and "Survey" in line["handler"]} == {form}
    assert ("by_silo" in found) == (privacy is None and not asked)


def test_settings_that_only_training_needs_are_left_out_with_a_notice(file, tmp_path):
    told = Told()
    changes = {
        "run.patience": 2,
        "data.val_fraction": 0.1,
        "aggregation.name": "median",
        "attack.name": "sign_flip",
        "attack.fraction": 0.3,
    }
    found = fedfm.survey(file, tmp_path / "run", changes=changes, progress=told)
    assert found["silos"] == 3
    (text,) = [t for t in told.texts if "left out" in t]
    for word in ("[attack]", "median", "run.patience"):
        assert word in text


def test_a_reference_is_compared_if_one_model_made_both(file, tmp_path):
    first = fedfm.survey(file, tmp_path / "one")
    again = fedfm.survey(file, tmp_path / "two", reference=tmp_path / "one" / "survey.json")
    assert again["features"]["from_reference"]["distance"] == pytest.approx(0.0, abs=1e-12)
    kept = json.loads((tmp_path / "one" / "survey.json").read_text())
    kept["features"]["mean"] = [v + 0.3 for v in kept["features"]["mean"]]
    (tmp_path / "far.json").write_text(json.dumps(kept))
    far = fedfm.survey(file, tmp_path / "three", reference=tmp_path / "far.json")
    expected = 0.09 * first["features"]["dimension"] / first["features"]["variance"]
    assert far["features"]["from_reference"]["distance"] == pytest.approx(expected)
    assert "drift from the reference" in [risk["risk"] for risk in far["risks"]]
    kept["model"]["fingerprint"] = "0" * 64
    (tmp_path / "other.json").write_text(json.dumps(kept))
    told = Told()
    other = fedfm.survey(file, tmp_path / "four", reference=tmp_path / "other.json", progress=told)
    assert "from_reference" not in other["features"]
    assert any("another model computed its features" in text for text in told.texts)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"changes": {"method.min_count": 0}}, "min_count"),
        ({"changes": {"privacy.unit": "client", "privacy.target_epsilon": 1.0}}, "--epsilon"),
        ({"changes": {"privacy.unit": "record", "privacy.noise_multiplier": 1.0}}, "--epsilon"),
        ({"epsilon": -1.0}, "target_epsilon"),
        ({"reference": "absent.json"}, "--reference absent.json"),
        ({"changes": {"method.rounds": 3}}, "one round"),
    ],
)
def test_wrong_input_gets_one_line_and_no_run(file, tmp_path, change, says):
    with pytest.raises(InputError, match=says) as error:
        fedfm.survey(file, tmp_path / "run", **change)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_model_that_stays_at_the_server_is_refused(tmp_path):
    tables = small.experiment(tmp_path)
    del tables["model"]
    tables["method"] = {"name": "blindfed", "foundation": "nano-vit-fhe"}
    with pytest.raises(InputError, match='"blindfed" keeps the model at the server'):
        fedfm.survey(tables, tmp_path / "run")


def test_a_survey_loads_no_trainer(file, tmp_path):
    code = "import sys; from fedfm.cli import main; main(sys.argv[1:]); print([m for m in sys.modules if m in "
    code += "('fedfm.training.loop', 'fedfm.methods.fedavg', 'fedfm.aggregation._secagg', 'flwr', 'ray')])"
    words = [sys.executable, "-c", code, "survey", str(file), "--out", str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.proof
@pytest.mark.skipif(not (SHARED / "images/pacs.npz").exists(), reason="needs ../shared/data/images/pacs.npz")
def test_pacs_by_domains_drifts_in_features_and_not_in_classes(tmp_path):
    script = [sys.executable, "export.py", "pacs", str(tmp_path / "pacs.npz"), "--as", "npz", "--limit", "400"]
    subprocess.run(script, cwd=SHARED, check=True, env={"PYTHONDONTWRITEBYTECODE": "1"})
    tables = {
        "data": {"path": str(tmp_path / "pacs.npz"), "partition": {"name": "by_column", "column": "domain"}},
        "model": {"name": "nano-vit", "adaptation": {"name": "head"}},
        "method": {"name": "fedavg"},
        "run": {"workers": 1},
    }
    found = fedfm.survey(tables, tmp_path / "run")
    assert found["features"]["within_classes"]["adjusted"] > 0.1
    assert found["risks"][0]["risk"] == "drift of features"
    assert max(found["by_silo"], key=lambda k: found["by_silo"][k]["features"]) == "sketch"


@pytest.mark.proof
@pytest.mark.skipif(not (SHARED / "text/banking77.jsonl.gz").exists(), reason="needs ../shared/data/text/banking77")
def test_banking77_of_few_classes_a_silo_is_skewed(tmp_path):
    script = [sys.executable, "export.py", "banking77", str(tmp_path / "b.csv"), "--as", "csv", "--limit", "1500"]
    subprocess.run(script, cwd=SHARED, check=True, env={"PYTHONDONTWRITEBYTECODE": "1"})
    tables = {
        "data": {"path": str(tmp_path / "b.csv"), "partition": {"name": "dirichlet", "alpha": 0.1, "clients": 10}},
        "model": {"name": "nano-gpt2", "weights": "random", "task": "classification", "adaptation": {"name": "head"}},
        "method": {"name": "fedavg"},
        "privacy": {"aggregator": "secagg"},
        "run": {"workers": 1},
    }
    found = fedfm.survey(tables, tmp_path / "run")
    number = found["counts"]["targets"]["effective_groups"]
    assert number["silo"] < 0.5 * number["all"]
    assert "skew of targets" in [risk["risk"] for risk in found["risks"]]


@pytest.mark.release
@pytest.mark.deployment
def test_a_super_link_gives_the_same_file(tmp_path):
    pytest.importorskip("flwr")
    tables = small.experiment(tmp_path)
    tables["data"]["partition"] = {"name": "by_column", "column": "domain"}
    for engine in ("local", "deployment"):
        fedfm.survey(tables, tmp_path / engine, changes={"run.engine": engine, "run.workers": 0})
    assert (tmp_path / "local/survey.json").read_bytes() == (tmp_path / "deployment/survey.json").read_bytes()


@pytest.mark.release
@pytest.mark.simulation
def test_ray_gives_the_same_file(file, tmp_path):
    pytest.importorskip("ray")
    for engine in ("local", "simulation"):  # in processes of their own, which Ray's processes do not outlive
        words = [
            sys.executable,
            "-m",
            "fedfm",
            "survey",
            str(file),
            "--engine",
            engine,
            "--out",
            str(tmp_path / engine),
        ]
        subprocess.run(words, check=True, capture_output=True)
    assert (tmp_path / "local/survey.json").read_bytes() == (tmp_path / "simulation/survey.json").read_bytes()


def test_a_survey_that_was_stopped_is_finished_by_resume(file, tmp_path):
    """Silos answer once: nobody could survey them again for the figures that were not written."""
    from fedfm.api import survey_figures

    fedfm.survey(file, tmp_path / "whole", progress=fedfm.Progress())
    patch = pytest.MonkeyPatch()
    patch.setattr(survey_figures, "finish", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fedfm.survey(file, tmp_path / "half", progress=fedfm.Progress())
    patch.undo()
    assert not (tmp_path / "half" / "survey.json").exists()
    fedfm.resume(tmp_path / "half", progress=fedfm.Progress())
    assert (tmp_path / "half" / "survey.json").read_bytes() == (tmp_path / "whole" / "survey.json").read_bytes()
    details = [fedfm.load_run(tmp_path / name).manifest["result"]["details"]["survey"] for name in ("half", "whole")]
    assert details[0] == details[1]
