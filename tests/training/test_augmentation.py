"""Random crops and flips: against a naive loop, the same bits everywhere, and refused where nothing would see them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedfm
from fedfm import seeds
from fedfm.config.experiment import Experiment
from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.runtime.progress import Progress
from fedfm.training import SGD
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client
from small import features, pictures, tiny_vit


def naive(x: np.ndarray, row: int, n: int, names: tuple[str, ...], seed: int, epoch: int) -> np.ndarray:
    """The picture x (3, H, W) of one row, changed pixel by pixel."""
    height, width = x.shape[1:]
    if "flip" in names and seeds.generator(seed, "augment", "flip", epoch).random(n)[row] < 0.5:
        x = x[:, :, ::-1]
    if "crop" in names:
        a, b = seeds.generator(seed, "augment", "crop", epoch).random((n, 2))[row]
        dy, dx = height // 8, width // 8
        top, left = int(a * (2 * dy + 1)) - dy, int(b * (2 * dx + 1)) - dx
        out = np.zeros_like(x)
        for i in range(height):
            for j in range(width):
                if 0 <= i + top < height and 0 <= j + left < width:
                    out[:, i, j] = x[:, i + top, j + left]
        x = out
    return x


@pytest.mark.parametrize("names", [("crop",), ("flip",), ("crop", "flip"), ("flip", "crop")])
def test_each_row_is_changed_as_its_seed_says(names: tuple[str, ...]) -> None:
    n, seed = 7, 11
    x = torch.randn(n, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    rows = Rows({"pixel_values": x}, labels=torch.arange(n), augment=names)
    client: Any = Client("a", ClientData(lambda: rows, Rows, Rows), None, {}, seed=seed, trainer=train_client)  # type: ignore[arg-type]
    seen, changed = [], 0
    for step, (part, index) in enumerate(Job(client, None, SGD(epochs=3, batch_size=3)).batches()):  # type: ignore[arg-type]
        batch = part.batch(index)
        for row, found in zip(batch["labels"].tolist(), batch["pixel_values"], strict=True):
            expected = naive(x[row].numpy(), row, n, names, seed, step // 3)
            assert found.numpy().tolist() == expected.tolist()
            changed += not found.equal(x[row])
            seen.append(row)
    assert sorted(seen) == sorted(3 * list(range(n)))
    assert changed > n
    assert rows.batch(range(n))["pixel_values"].equal(x)  # evaluation sees them as they are


def tables(folder: Path, **data: Any) -> dict[str, Any]:
    return {
        "data": {"path": str(pictures(folder, n=60)), "partition": {"name": "iid", "clients": 3}, **data},
        "model": {"name": str(tiny_vit(folder)), "adaptation": {"name": "lora", "rank": 2}},
        "method": {"name": "fedavg", "rounds": 2, "local": {"learning_rate": 0.5, "epochs": 2}},
        "run": {"workers": 1},
    }


class Stop(Progress):
    """Stops a run after its first round."""

    def round(self, line: Mapping[str, Any]) -> None:
        if line["round"] == 1:
            raise KeyboardInterrupt


@pytest.mark.proof
def test_a_run_has_the_same_bits_with_workers_wire_resume_and_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = tables(tmp_path, augment=["crop", "flip"])
    expected = fedfm.run(exp, tmp_path / "one")["params_sha256"]
    assert expected != fedfm.run(tables(tmp_path), tmp_path / "plain")["params_sha256"]
    assert fedfm.run({**exp, "run": {"workers": 2}}, tmp_path / "two")["params_sha256"] == expected
    assert fedfm.run({**exp, "run": {"workers": 1, "wire": True}}, tmp_path / "wire")["params_sha256"] == expected
    with pytest.raises(KeyboardInterrupt):
        fedfm.run(exp, tmp_path / "stopped", progress=Stop())
    assert fedfm.resume(tmp_path / "stopped")["params_sha256"] == expected
    monkeypatch.setenv("FEDFM_MEMORY", "20000")  # a client's pictures are 50 kB
    little = {**exp, "run": {"workers": 1, "loader_workers": 2}}
    assert fedfm.run(little, tmp_path / "little")["params_sha256"] == expected


def test_augmentation_is_refused_where_it_has_no_effect(tmp_path: Path) -> None:
    exp = tables(tmp_path, augment=["flip"])
    for change, message in (
        ({"data": {**exp["data"], "augment": ["blur"]}}, r'data\.augment\[0\] = "blur": expected "crop" or "flip"'),
        ({"model": {**exp["model"], "adaptation": {"name": "head"}}}, r"data\.augment: .*reads each image once"),
        ({"method": {"name": "fedala", "rounds": 1}}, r"data\.augment: the clients of method .fedala. read their im"),
    ):
        with pytest.raises(InputError, match=message):
            Experiment.from_dict({**exp, **change})
    rows = {**exp["data"], "path": str(features(tmp_path))}
    other = {**exp, "data": rows, "model": {"name": "features", "adaptation": {"name": "full"}}}
    with pytest.raises(InputError, match=r"data\.augment: it changes images, but .* contains feature vectors; drop it"):
        fedfm.run(other, tmp_path / "vectors")
