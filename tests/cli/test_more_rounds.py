"""`fedfm resume --rounds`: a finished run goes on, with the bits of a run that had the rounds from the start."""

import json

import pytest

import fedfm
from fedfm.cli import main
from fedfm.errors import InputError
from small import features


def tables(method, **local):
    return {
        "data": {"name": "digits", "limit": 120, "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 3}},
        "model": {"name": "nano-vit", "adaptation": {"name": "head"}},
        "method": {"rounds": 2, "local": {"learning_rate": 0.1} | local} | method,
        "run": {"workers": 1},
    }


@pytest.mark.proof
@pytest.mark.parametrize(
    "method", [{"name": "fedavg", "fraction": 0.7}, {"name": "scaffold"}, {"name": "fedbip"}], ids=lambda m: m["name"]
)
def test_two_and_two_rounds_are_four(tmp_path, capsys, method):
    first = fedfm.run(tables(method), tmp_path / "run")
    straight = fedfm.run(tables(method | {"rounds": 4}), tmp_path / "straight")
    assert main(["resume", str(tmp_path / "run"), "--rounds", "4", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rounds"] == 4
    keys = ("params_sha256", "accuracy", "client_accuracy", "bytes_up", "bytes_down")
    assert {key: found[key] for key in keys} == {key: straight[key] for key in keys}
    assert found["params_sha256"] != first["params_sha256"]
    assert [line["round"] for line in fedfm.load_run(tmp_path / "run").metrics()] == [0, 1, 2, 3, 4]
    notices = json.loads((tmp_path / "run/manifest.json").read_text())["notices"]
    assert "the run ended after 2 rounds, and was continued to round 4" in notices
    assert fedfm.resume(tmp_path / "run")["params_sha256"] == straight["params_sha256"]


@pytest.mark.proof
def test_runs_that_cannot_have_more_rounds_are_refused_with_the_reason(tmp_path):
    fedfm.run(tables({"name": "fedavg"}), tmp_path / "run")
    with pytest.raises(InputError, match="has 2 rounds already; expected more"):
        fedfm.resume(tmp_path / "run", rounds=2)
    fedfm.run(tables({"name": "fedavg"}, schedule="cosine"), tmp_path / "cosine")
    with pytest.raises(InputError, match="schedule"):
        fedfm.resume(tmp_path / "cosine", rounds=3)
    once = tables({}) | {"method": {"name": "fedpft"}}
    fedfm.run(once, tmp_path / "once")
    with pytest.raises(InputError, match="expected 1, it takes one round"):
        fedfm.resume(tmp_path / "once", rounds=3)
    assert fedfm.resume(tmp_path / "once")["rounds"] == 1  # it stands as it was
    private = tables({"name": "fedavg"}) | {
        "privacy": {"unit": "client", "target_epsilon": 50.0, "delta": 1e-3, "clip_norm": 1.0}
    }
    fedfm.run(private, tmp_path / "private")
    with pytest.raises(InputError, match="would exceed the run's epsilon"):
        fedfm.resume(tmp_path / "private", rounds=3)


def test_a_run_goes_on_with_rows_that_were_moved(tmp_path, capsys):
    rows, method = features(tmp_path), {"name": "fedavg", "rounds": 2}
    asked = {"data": {"path": str(rows)}, "model": {"name": "features"}, "method": method, "run": {"workers": 1}}
    straight = fedfm.run(asked, tmp_path / "straight")
    for name in ("run", "other"):
        fedfm.run(asked | {"method": method | {"rounds": 1}}, tmp_path / name)
        kept = json.loads((tmp_path / name / "manifest.json").read_text())
        kept |= {"result": None, "finished": None}
        kept["experiment"]["method"]["rounds"] = 2
        (tmp_path / name / "manifest.json").write_text(json.dumps(kept))
    moved = rows.rename(tmp_path / "moved.npz")
    with pytest.raises(InputError, match="there is no"):
        fedfm.resume(tmp_path / "run")
    args = [
        "resume",
        str(tmp_path / "run"),
        "--set",
        f"data.path={moved}",
        "--set",
        "run.timeout=9",
        "--format",
        "json",
    ]
    assert main(args) == 0
    assert json.loads(capsys.readouterr().out)["params_sha256"] == straight["params_sha256"]
    run = fedfm.load_run(tmp_path / "run")
    assert (run.experiment.data.path, run.experiment.run.timeout) == (str(moved), 9.0)
    with pytest.raises(InputError, match="is finished"):
        fedfm.resume(tmp_path / "run", changes={"run.timeout": 8.0})
    with pytest.raises(InputError, match="keeps its experiment; only these keys may change"):
        fedfm.resume(tmp_path / "other", changes={"method.rounds": 3})
    with pytest.raises(InputError, match=r"run\.timeout"):
        fedfm.resume(tmp_path / "other", changes={"run.timeout": -1})
    others = str(features(tmp_path, seed=1))
    with pytest.raises(InputError, match="the data changed since this run began"):
        fedfm.resume(tmp_path / "other", changes={"data.path": others})


@pytest.mark.proof
def test_a_model_that_the_last_round_completes_is_neither_left_early_nor_trained_on(tmp_path):
    ccvr = tables({"name": "ccvr"})
    fedfm.run(ccvr, tmp_path / "run")
    with pytest.raises(InputError, match="the last round of ccvr completed the model"):
        fedfm.resume(tmp_path / "run", rounds=4)
    ccvr["data"] |= {"val_fraction": 0.2}
    with pytest.raises(InputError, match=r"run\.patience: .*completes its model in the last round"):
        fedfm.run(ccvr | {"run": {"patience": 1}}, tmp_path / "other")
    private = {"noise_multiplier": 50.0, "delta": 1e-3, "clip_norm": 1.0, "halt_at_epsilon": 1.0}
    with pytest.raises(InputError, match=r"privacy\.halt_at_epsilon: "):
        fedfm.run(ccvr | {"privacy": private}, tmp_path / "other")
    run = fedfm.load_run(tmp_path / "run")  # one that was stopped before its last round may have more
    run.checkpoint(2).unlink()
    run.manifest |= {"result": None, "finished": None}
    run.write_manifest()
    (tmp_path / "run/metrics.jsonl").write_text(
        "".join((tmp_path / "run/metrics.jsonl").read_text().splitlines(True)[:2])
    )
    straight = fedfm.run(tables({"name": "ccvr", "rounds": 3}), tmp_path / "straight")
    assert fedfm.resume(tmp_path / "run", rounds=3)["params_sha256"] == straight["params_sha256"]
