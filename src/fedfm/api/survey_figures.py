"""The figures of a finished survey: its risks, who could read what, and the distance from other rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.core import storage
from fedfm.core.text import to_json
from fedfm.reports import html
from fedfm.reports.read import read as read_files
from fedfm.reports.readers import readers
from fedfm.reports.survey_rules import distance_from, risks_of
from fedfm.runtime.progress import Progress
from fedfm.runtime.run_directory import Run

FILE = "survey.json"


def finish(path: Path, before: Mapping[str, Any] | None, progress: Progress) -> dict[str, Any]:
    """Write the figures of a finished survey; also of one that was stopped and resumed.

    Args:
        before: the figures of other rows; None if nothing is compared.

    Returns:
        The result of :func:`survey`.
    """
    run = Run.open(path)  # on a SuperLink another process has written it
    made, result = run.experiment, run.manifest["result"]
    found = json.loads(run.state(made.method.state_type).found)
    mine = run.manifest["fingerprints"]["model"]
    if before is not None and "features" in found:
        _compare(found, before, mine, progress)
    privacy = made.privacy
    found |= {
        "risks": risks_of(found),
        "epsilon": result["epsilon"],
        "delta": privacy.delta if privacy is not None and result["epsilon"] is not None else None,
        "model": {"name": made.model.name, "fingerprint": mine},
        "readable": dict(readers(read_files(run.path), False)[:2]),
    }
    storage.write_atomic(run.path / FILE, to_json(found).encode())
    with run.lock(wait=True):
        run.manifest["result"]["details"]["survey"] = without_mean(found)
        run.write_manifest()
    html.renew(run.path)
    return {"run": str(run.path), **found}


def complete(path: Path, progress: Progress) -> None:
    """Write the figures of a survey that was stopped before it had them."""
    if not (path / FILE).exists():
        finish(path, None, progress)


def without_mean(found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures without the mean of features, a number for each of up to thousands of dimensions."""
    about = found.get("features")
    return dict(found) if about is None else {**found, "features": {k: v for k, v in about.items() if k != "mean"}}


def _compare(found: dict[str, Any], before: Mapping[str, Any], fingerprint: str, progress: Progress) -> None:
    """Add the distance from the reference to the figures, if one model computed both features."""
    if before["fingerprint"] != fingerprint or len(before["features"]["mean"]) != found["features"]["dimension"]:
        progress.notice(f"{before['path']} is not compared: another model computed its features; survey both with one")
        return
    distance = distance_from(found["features"], before["features"])
    found["features"]["from_reference"] = {"path": before["path"], "distance": distance}
