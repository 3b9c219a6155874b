"""FedBip's page says the loss of its language tables' test rows before training, as rows are read today."""

from __future__ import annotations

import gzip
import importlib
import re
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

from fedfm.config.experiment import Experiment
from fedfm.data.load import load_table
from fedfm.models.load import load_model

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
PAGE = ROOT / "docs" / "results" / "fedbip.md"
TODAY = re.compile(r"(\d\.\d{3}) as rows are read today")


@pytest.mark.skipif(not SHARED.exists(), reason="needs the raw sets of ../shared/data")
def test_the_page_says_the_loss_of_todays_rows_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another reading of rows moves every figure of these tables; if this fails, run them again, or say so there."""
    monkeypatch.syspath_prepend(str(ROOT / "reproduce"))
    raw, few = tmp_path / "flan8.jsonl", tmp_path / "flan8.test40.jsonl"
    raw.write_bytes(gzip.decompress((SHARED / "text" / "flan8_dataset1.jsonl.gz").read_bytes()))
    few.write_text(importlib.import_module("sets").first_tests(raw, 40), encoding="utf-8")
    for name in ("sets", "task_sets"):
        sys.modules.pop(name, None)
    paths = {"data.path": str(few), "model.name": str(SHARED / "weights" / "stories260K-llama")}
    experiment = Experiment.load(ROOT / "reproduce" / "fedbip" / "language__fedbip.toml", paths)

    table = load_table(experiment.data, seed=0)
    model = load_model(experiment.model, classes=(), kind=table.kind)
    losses = []
    for client in range(8):
        mine = np.flatnonzero((table.columns["client"] == str(client)) & (table.split == "test"))
        losses.append(model.task.from_sums(model.task.count(model, model.prepare(table, mine)))["loss"])
    assert [f"{statistics.fmean(losses):.3f}"] == TODAY.findall(PAGE.read_text(encoding="utf-8"))
