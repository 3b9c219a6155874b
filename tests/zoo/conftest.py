"""Keeps what the trials find: `--zoo-results FILE` writes it, for docs/reference/models.md."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from zoo import rows
from zoo.trial import trials

LIBRARIES = ("torch", "transformers", "peft")


def pytest_addoption(parser):
    parser.addoption("--zoo-results", type=Path, help="a JSON file of what holds; trials that run replace theirs")


def pytest_terminal_summary(terminalreporter, config):
    """Write the outcomes of all trials that ran."""
    file = config.getoption("--zoo-results", None)
    reports = [report for several in terminalreporter.stats.values() for report in several]
    found = {}
    for report in reports:
        if getattr(report, "when", "") == "call" and (kept := dict(report.user_properties).get("trial")):
            family, kind, trial, outcome = kept
            found.setdefault(family, {"kind": kind, "trials": {}})["trials"][trial] = outcome
    if file is None or not found:
        return
    before = json.loads(file.read_text(encoding="utf-8"))["families"] if file.exists() else {}
    for family, about in found.items():
        earlier = before.get(family, {}).get("trials", {}) | about["trials"]
        order = [f"{task}, {by}" for task, by in trials(about["kind"])]
        about["trials"] = {trial: earlier[trial] for trial in order if trial in earlier}
    kept = {
        "versions": {name: version(name).partition("+")[0] for name in LIBRARIES},
        "families": dict(sorted((before | found).items())),
    }
    file.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def rows_folder(tmp_path_factory):
    """Files of rows for all trials."""
    return rows.write(tmp_path_factory.mktemp("rows"))
