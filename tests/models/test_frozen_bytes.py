"""Neither messages nor checkpoints nor clients' memories hold what is frozen: their bytes, counted on the disk."""

import json
from pathlib import Path
from typing import Any

import pytest

import fedfm
import small
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec

HEADS = 12_000  # bytes of names, shapes and what a round needs beside its vectors


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.pictures(tmp_path_factory.mktemp("pictures"), n=40)


def sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.rglob("*.safetensors")]


@pytest.mark.sample("head-fedavg", "lora-2-fedavg", "side_adapter-2-fedavg")
@pytest.mark.each_value
@pytest.mark.parametrize("method", ["fedavg", "ditto"])
@pytest.mark.parametrize(
    "adaptation",
    [
        {"name": "head"},
        {"name": "top_layers", "layers": 1},
        {"name": "lora", "rank": 2},
        {"name": "lora", "rank": 2, "dora": True},
        {"name": "ffa_lora", "rank": 2},
        {"name": "side_adapter", "rank": 2},
    ],
    ids=lambda a: "-".join(map(str, a.values())),
)
def test_only_what_is_trained_crosses_and_is_kept(
    rows: Path, tmp_path: Path, adaptation: dict[str, Any], method: str
) -> None:
    model = {"name": "nano-vit", "adaptation": adaptation}
    tables = {
        "data": {"path": str(rows), "partition": {"name": "iid", "clients": 2}},
        "model": model,
        "method": {"name": method, "rounds": 2, "local": {"learning_rate": 0.01, "batch_size": 16}},
        "run": {"workers": 1, "evaluate_every": 0},
    }
    found = fedfm.run(tables, tmp_path / "run")
    classes = ("ant", "bee", "cow", "dog")
    of = {
        name: load_model(ModelSpec("nano-vit", adaptation=a), classes=classes, kind="image")
        for name, a in (
            ("all", AdaptationSpec("head")),
            ("trained", AdaptationSpec(**adaptation)),
        )
    }
    everything = sum(p.numel() * 4 for p in of["all"].module.parameters())
    trained = of["trained"].layout.nbytes
    assert trained + HEADS < everything / 2  # else the test shows nothing
    for way in ("up", "down"):
        assert 4 * trained <= found[f"bytes_{way}"] <= 4 * (trained + HEADS)  # two clients, two rounds
    lines = (tmp_path / "run" / "messages.jsonl").read_text().splitlines()
    assert max(json.loads(line)["bytes"] for line in lines) <= 2 * trained + HEADS  # evaluation, too
    assert 0 < max(sizes(tmp_path / "run" / "checkpoint")) <= trained + HEADS
    assert all(size <= trained + HEADS for size in sizes(tmp_path / "run" / "private"))
    assert (sizes(tmp_path / "run" / "private") != []) == (method == "ditto")
