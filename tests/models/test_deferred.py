"""Pictures that batches decode: the bits of pictures that were prepared at once, and less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training import SGD, loop, packed
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client

N = 40


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    """Picture files of several sizes."""
    root, rng = tmp_path_factory.mktemp("rows") / "set", np.random.default_rng(0)
    for i in range(N):
        folder = root / "train" / ("cat", "dog")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (30 + i % 7, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03d}.png")
    return load_table(DataSpec(path=str(root), test_fraction=0.0), seed=0)


def model_of(adaptation: str) -> Model:
    spec = ModelSpec("nano-vit", device="cpu", adaptation=AdaptationSpec(adaptation, rank=2))
    return load_model(spec, classes=("cat", "dog"), kind="image")


def both(model: Model, table: Table) -> tuple[Rows, Rows]:
    """The rows at once, and deferred."""
    whole, deferred = (model.prepare(table, range(N), most=most) for most in (None, 1000))
    assert whole.tensors["pixel_values"].shape == (N, 3, 32, 32)
    assert not deferred.tensors
    assert deferred.names == {"pixel_values"}
    assert len(deferred) == N
    assert deferred.labels.equal(whole.labels)
    return whole, deferred


def trained(model: Model, rows: Rows, trainer: Any, batch_size: int = 16) -> Any:
    client = Client("a", ClientData(lambda: rows, Rows, Rows), model, {}, seed=3, trainer=train_client)
    return trainer([Job(client, model.params(), SGD(0.1, epochs=1, batch_size=batch_size))])[0]


@pytest.mark.proof
@pytest.mark.parametrize("loaders", [0, 2])
def test_deferred_pictures_have_the_bits_of_prepared_ones(table: Table, loaders: int) -> None:
    for adaptation in ("lora", "head"):
        model = model_of(adaptation)
        model.loaders = loaders
        whole, deferred = both(model, table)
        assert model.predict(deferred).equal(model.predict(whole))
        assert deferred.take([5, 3]).batch([1])["pixel_values"].equal(whole.batch([3])["pixel_values"])
        if adaptation == "head":
            assert model.features(deferred).equal(model.features(whole))
            assert model.encode(deferred).tensors["features"].equal(model.encode(whole).tensors["features"])
    for trainer in (loop.train, packed.train):
        model = model_of("lora")
        model.loaders = loaders
        whole, deferred = both(model, table)
        first = model.params()
        expected = trained(model, whole, trainer)
        model.load(first)
        assert trained(model, deferred, trainer).sha256() == expected.sha256() != first.sha256()


def test_packed_training_without_its_cache_has_the_same_bits(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfm.training.packed.prefix.CAP", 0)
    model = model_of("lora")
    whole, deferred = both(model, table)
    first = model.params()
    expected = trained(model, whole, packed.train)
    model.load(first)
    assert trained(model, deferred, packed.train).sha256() == expected.sha256()
    assert model.predict(deferred).equal(model.predict(whole))


def test_a_loader_draws_nothing_from_the_global_generator(table: Table) -> None:
    model = model_of("lora")
    deferred = both(model, table)[1]
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    list(deferred.batches(32))
    assert torch.rand(3).equal(expected)


@pytest.mark.parametrize("loaders", [0, 1])
def test_a_picture_that_is_gone_is_named(table: Table, loaders: int, tmp_path: Path) -> None:
    model = model_of("lora")
    model.loaders = loaders
    paths = [*table.inputs[:3], str(tmp_path / "gone.png")]
    rows = model.prepare(Table("image", paths, None, (), np.full(4, "train")), range(4), most=1)
    with pytest.raises(InputError, match=r"^.*gone\.png: not readable as an image \([^\n]*\)$"):
        list(rows.batches(2))


def test_rows_of_arrays_are_deferred_too(table: Table) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (9, 8, 8, 1), dtype=np.uint8)
    grey = Table("image", pixels, np.zeros(9, int), ("cat", "dog"), np.full(9, "train"))
    model = model_of("lora")
    whole, deferred = (model.prepare(grey, [8, 1, 4], most=most) for most in (None, 1))
    assert deferred.compute().tensors["pixel_values"].equal(whole.tensors["pixel_values"])
