"""MLflow: a run in the store that ``MLFLOW_TRACKING_URI`` names, or else in ``mlflow/`` of the run directory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from fedfm.runtime.run_directory import Run
from fedfm.runtime.trackers.tracker import Tracker, figures, models, settings

KEY = "fedfm.run"  # tag by which a resumed run finds its MLflow run
_BATCH, _TEXT = (
    1000,
    500,
)  # largest numbers of entries in a request, and of characters in a parameter, that every store accepts


class MLflow(Tracker):
    """Logs parameters, metrics by round, the result as metrics, and the models' folders as tags."""

    extra: ClassVar[str] = "mlflow"

    def __init__(self) -> None:
        # Switch off telemetry; this must happen before the import.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        self._client_of, self._metric, self._param, self._tag = MlflowClient, Metric, Param, RunTag
        self._client: Any = None
        self._id = ""

    def start(self, run: Run, done: int) -> int:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # Without a server the store is a folder, which needs no further package.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.path / "mlflow").resolve().as_uri()
        self._client = self._client_of(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedfm")
        experiment = self._client.get_experiment_by_name(name)
        of = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        key = f"{run.manifest['created']} {run.experiment.name} {run.experiment.run.seed}"
        found = self._client.search_runs([of], f"tags.`{KEY}` = '{key}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return max((m.step for m in self._client.get_metric_history(self._id, "seconds")), default=-1)
        made = self._client.create_run(of, run_name=run.experiment.name, tags={KEY: key})
        self._id = made.info.run_id
        params = [self._param(k, v[:_TEXT]) for k, v in settings(run).items()]
        for i in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[i : i + 100])
        return -1

    def log(self, t: int, figures: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, t) for name, value in figures.items()]
        for i in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._id, metrics=metrics[i : i + _BATCH])

    def finish(self, run: Run, result: Mapping[str, Any] | None) -> None:
        if result is None:
            self._client.set_terminated(self._id, "KILLED")
            return
        self.log(int(result["rounds"]), {f"result/{k}": v for k, v in figures(result).items()})
        links = models(run, result) | {"params_sha256": str(result["params_sha256"])}
        self._client.log_batch(self._id, tags=[self._tag(k, v) for k, v in links.items()])
        self._client.log_text(self._id, json.dumps(dict(result), indent=1), "result.json")
        self._client.set_terminated(self._id, "FINISHED")
