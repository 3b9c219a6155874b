"""Real data sets, written in the formats of users, are read back unchanged."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfm.data.load import load_table
from fedfm.data.partition import deal
from fedfm.data.spec import DataSpec, PartitionSpec

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
pytestmark = pytest.mark.skipif(
    not (SHARED / "data" / "export.py").exists(),
    reason=f"{SHARED}/data/export.py, which writes the real sets, is absent",
)


def export(name: str, kind: str, dest: Path, *options: str) -> str:
    command = [sys.executable, str(SHARED / "data" / "export.py"), name, str(dest), "--as", kind, *options]
    subprocess.run(command, check=True)
    return str(dest)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SHARED / "data"))
    return importlib.import_module("load")


@pytest.mark.proof
def test_texts_come_back(tmp_path: Path, load: Any) -> None:
    rows = load.jsonl("banking77")
    tables = [load_table(DataSpec(path=export("banking77", k, tmp_path / f"a.{k}")), seed=0) for k in ("csv", "jsonl")]
    for table in tables:
        assert table.inputs == [row["text"] for row in rows]
        assert table.labels is not None
        assert [table.classes[i] for i in table.labels] == [row["label_name"] for row in rows]
        assert table.labels.tolist() == [row["label"] for row in rows]
        assert table.split.tolist() == [row["split"] for row in rows]


def test_instructions_come_back(tmp_path: Path, load: Any) -> None:
    rows = load.jsonl("flan8_dataset1")
    spec = DataSpec(
        path=export("flan8_dataset1", "jsonl", tmp_path / "a.jsonl"),
        partition=PartitionSpec("by_column", column="client"),
    )
    table = load_table(spec, seed=0, task="instruction")
    assert table.inputs == [(row["instruction"], row["output"]) for row in rows]
    data = deal(table, spec, seed=0)
    assert [(len(c.train), len(c.test)) for c in data.clients.values()] == [(300, 200)] * 8


def test_pictures_come_back_from_npz(tmp_path: Path, load: Any) -> None:
    whole = load.images("fashion_mnist")
    table = load_table(DataSpec(path=export("fashion_mnist", "npz", tmp_path / "a.npz")), seed=0)
    assert np.array_equal(table.inputs, whole["x"])
    assert table.labels is not None
    assert table.labels.tolist() == whole["y"].tolist()
    assert table.classes == tuple(whole["classes"])
    assert table.split.tolist() == whole["split"].tolist()


def test_pictures_come_back_from_a_folder(tmp_path: Path) -> None:
    by = PartitionSpec("by_column", column="domain")
    spec = DataSpec(path=export("pacs", "folder", tmp_path / "pacs", "--limit", "60", "--size", "16"), partition=by)
    table = load_table(spec, seed=0)
    assert table.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    assert len(table.rows("test")) == 560
    assert len(table.rows("train")) == pytest.approx(60, abs=7)
    assert table.labels is not None
    for path, label, split in zip(table.inputs, table.labels, table.split, strict=True):
        assert Path(path).parts[-3:-1] == (split, table.classes[label])
    data = deal(table, spec, seed=0)
    assert list(data.clients) == ["art_painting", "cartoon", "photo", "sketch"]
    assert sum(len(c.test) for c in data.clients.values()) == 560


@pytest.mark.proof
def test_features_come_back(tmp_path: Path, load: Any) -> None:
    feat = load.features("pacs.vit_tiny")
    spec = DataSpec(
        path=export("pacs.vit_tiny", "features", tmp_path / "a.npz"),
        partition=PartitionSpec("by_column", column="domain", clients=24),
    )
    table = load_table(spec, seed=0)
    assert np.array_equal(table.inputs, feat["feat"].astype(np.float32))
    assert (table.split == "test").tolist() == feat["is_test"].astype(bool).tolist()
    data = deal(table, spec, seed=0)
    assert len(data.clients) == 24
    assert all(len(c.test) > 15 for c in data.clients.values())
    assert sum(len(c.test) for c in data.clients.values()) == len(data.test)
    assert json.dumps(sorted(data.clients)[:2]) == '["art_painting-0", "art_painting-1"]'
