"""Notices that follow from the figures of a finished run."""

import math

import fedfm
import small
from fedfm.api.predict import predict
from fedfm.config.experiment import Experiment
from fedfm.runtime.after_run_checks import overfitting_notices
from fedfm.runtime.progress import Progress

EXPERIMENT = Experiment(data={"name": "digits"}, model={"name": "nano-vit"}, method={"name": "fedavg"})


def lines(losses, accuracies):
    both = zip(losses, accuracies, strict=True)
    return [{"round": t, "loss": loss, "accuracy": accuracy} for t, (loss, accuracy) in enumerate(both)]


def test_a_loss_that_rises_while_the_accuracy_falls():
    (said,) = overfitting_notices(lines([2.0, 0.5, 0.7], [0.1, 0.8, 0.7]), EXPERIMENT)
    assert "rose from 0.5 in round 1 to 0.7" in said
    assert "fell from 0.800 to 0.700" in said


def test_a_start_that_training_spoils_and_one_that_knows_nothing():
    (said,) = overfitting_notices(lines([0.5, 0.6, 0.7], [0.8, 0.7, 0.6]), EXPERIMENT)
    assert "rose from 0.5 in round 0 to 0.7, and the accuracy fell from 0.800 to 0.600" in said
    (said,) = overfitting_notices(lines([1.6, 33.0, 65.0], [0.3, 0.6, 0.5]), EXPERIMENT)
    assert "rose from 33 in round 1 to 65, and the accuracy fell from 0.600 to 0.500" in said
    assert overfitting_notices(lines([1.6, 65.0, 33.0], [0.3, 0.5, 0.6]), EXPERIMENT) == []


def test_a_loss_alone_and_noise_give_no_notice():
    assert overfitting_notices(lines([2.0, 0.5, 0.7], [0.1, 0.8, 0.8]), EXPERIMENT) == []
    assert overfitting_notices(lines([2.0, 0.5, 0.51], [0.1, 0.8, 0.7]), EXPERIMENT) == []
    assert overfitting_notices(lines([0.5, 0.7], [0.8, 0.7]), EXPERIMENT) == []
    assert overfitting_notices(lines([2.0, math.nan, 0.7], [0.1, 0.8, 0.7]), EXPERIMENT) == []


def test_predictions_that_are_all_certain(tmp_path, capsys):
    """Weights of a hundred times the size give probabilities of 1; a usual model does not."""
    tables = small.experiment(tmp_path)
    run = fedfm.run(tables, tmp_path / "run", progress=Progress())
    file = str(tmp_path / "rows.npz")
    assert predict(run["run"], file)["warnings"] == []
    far = {**tables, "method": {**tables["method"], "local": {"learning_rate": 1000.0, "batch_size": 16}}}
    run = fedfm.run(far, tmp_path / "far", progress=Progress())
    found = predict(run["run"], file)
    assert min(max(p) for p in found["probabilities"]) > 0.9995
    (said,) = found["warnings"]
    assert capsys.readouterr().err == f"fedfm: {said}\n"  # from Python, too
    predict(run["run"], file, progress=Progress())
    assert capsys.readouterr().err == ""
    assert said.startswith("all 240 predictions have probability 1.000")


def test_a_rank_above_the_layers_width_is_reported(tmp_path):
    data = {"path": str(small.pictures(tmp_path, n=40)), "partition": {"name": "iid", "clients": 2}}
    model = {"name": str(small.tiny_vit(tmp_path)), "adaptation": {"name": "lora", "rank": 9}}
    tables = {"data": data, "model": model, "method": {"name": "fedavg", "rounds": 0}, "run": {"workers": 1}}
    result = fedfm.run(tables, tmp_path / "wide", progress=Progress())
    assert any("model.adaptation.rank = 9 is above the width 8 of" in text for text in result["warnings"])
    model["adaptation"]["rank"] = 8
    assert fedfm.run(tables, tmp_path / "fits", progress=Progress())["warnings"] == []
