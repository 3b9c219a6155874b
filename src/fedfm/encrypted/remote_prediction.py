"""Predict rows at one silo with a model that stays at the server. The silo and the SuperLink run on loopback.

Between real sites, the model's owner submits the same experiment to the SuperLink, and a silo's file names the rows.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedfm.api.execute import drive, load_run
from fedfm.api.unanswered_rows import describe_unanswered
from fedfm.config.experiment import Experiment
from fedfm.core.capabilities import HiddenModel
from fedfm.core.new_folders import temporary_folder
from fedfm.errors import InputError, RunError
from fedfm.runtime.progress import Progress
from fedfm.runtime.run_directory import Run
from fedfm.sites import predictions

SILO = "holder"  # the silo's name


def asking(run: Run) -> Experiment:
    """Return the experiment in which silos predict with a finished BlindFed run.

    Raises:
        InputError: the run has another method, or it did not encrypt rows.
    """
    experiment, method = run.experiment, run.experiment.method
    if not isinstance(method, HiddenModel) or experiment.method.needs.local:
        raise InputError(
            f"{run.path}: --engine deployment needs a run of blindfed with "
            f'encryption = "ckks", but this is a run of {run.experiment.method_name}; drop --engine'
        )
    own: dict[str, Any] = dict.fromkeys(
        ("superlink", "folder", "roster", "identity")
    )  # drops the settings of other machines, since the nodes are on loopback
    return replace(
        experiment,
        name=f"{experiment.name}-predicts"[:64],
        method=replace(method, rounds=0, predict=True, trained=str(run.path.resolve())),
        run=replace(experiment.run, engine="deployment", workers=0, wire=False, min_clients=1, **own),
    )


def predict_remote(path: str | Path, file: str | Path, progress: Progress | None = None) -> dict[str, Any]:
    """Predict as :func:`fedfm.api.predict.predict` does, with the rows at a separate node and the model at the server.

    Raises:
        InputError: the run is not finished, or it cannot predict in this way, or ``file`` does not exist.
        RunError: the silo gave no predictions.
    """
    run = load_run(path)
    if run.manifest["result"] is None:
        raise InputError(f"{path} is not finished; run `fedfm resume {path}` first")
    experiment = asking(run)
    if not Path(file).expanduser().exists():
        raise InputError(f"{file}: no such file or folder; predict needs rows")
    with temporary_folder("fedfm-predict-") as folder:
        silo, rows = folder / "silo.toml", str(Path(file).expanduser().resolve())
        columns = {"text": experiment.data.text, "image": experiment.data.image}
        settings = {"name": SILO, "data": rows, "predict": rows, **columns}
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        silo.write_text("\n".join([*lines, 'allow = ["reply"]']), encoding="utf-8")
        asked = Run.create(experiment, folder / "run")
        drive(asked, progress or Progress(), fresh=True, silos={SILO: silo})
        found = predictions.report(silo)["runs"]
        if not found:
            raise RunError(f"{path}: the rows of {file} got no predictions")
        lines_of = found[-1]["predictions"]
    result: dict[str, Any] = {
        "run": str(path),
        "classes": list(run.manifest["model"]["classes"]),
        "predictions": [line["prediction"] for line in lines_of],
        "probabilities": [line["probabilities"] for line in lines_of],
    }
    if lines_of and "file" in lines_of[0] and Path(rows).is_dir():
        result["files"] = [str(Path(line["file"]).relative_to(rows)) for line in lines_of]
    return result | {"warnings": describe_unanswered(result)}
