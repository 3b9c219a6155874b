"""The hash of rows: all that training reads of them, read anew."""

import numpy as np
import pytest
import torch
from PIL import Image

from fedfm.core.rows import Rows
from fedfm.models.images import Pictures

BASE = {"tensors": {"a": torch.arange(6.0).view(3, 2)}, "labels": torch.tensor([0, 1, 2])}


@pytest.mark.parametrize(
    "other",
    [
        {"tensors": {"a": torch.arange(6.0).view(3, 2) + 1e-6}},
        {"tensors": {"a": torch.arange(6.0).view(3, 2).double()}},
        {"tensors": {"b": torch.arange(6.0).view(3, 2)}},
        {"tensors": {"a": torch.arange(6.0).view(3, 2), "b": torch.zeros(3)}},
        {"labels": torch.tensor([0, 1, 1])},
        {"labels": None},
        {"augment": ("flip",)},
        {"pad": 1},
    ],
)
def test_other_rows_have_another_hash(other):
    assert Rows(**BASE).sha256() == Rows(**BASE).sha256() != Rows(**BASE | other).sha256()


def test_order_and_ends_of_token_rows_count():
    rows = Rows(tokens=[[1, 2, 3], [4]])
    assert rows.sha256() == rows.take([0, 1]).sha256() == Rows(tokens=[[1, 2, 3], [4]]).sha256()
    for other in (rows.take([1, 0]), rows.take([0]), Rows(tokens=[[1, 2], [3, 4]])):
        assert other.sha256() != rows.sha256()


def test_pictures_that_change_on_the_disk_change_the_hash(tmp_path):
    paths = [tmp_path / f"{i}.png" for i in range(2)]
    for i, path in enumerate(paths):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(path)

    def hashed(inputs, index=(0, 1)):
        return Rows(deferred={"pixel_values": Pictures(inputs, np.array(index), lambda p: torch.zeros(0))}).sha256()

    names = [str(path) for path in paths]
    before = hashed(names)
    assert before == hashed(paths) == hashed([path.read_bytes() for path in paths]) != hashed(names, (1, 0))
    Image.new("RGB", (4, 4), (0, 9, 0)).save(paths[1])
    assert hashed(names) != before
    pixels = np.zeros((2, 4, 4, 3), np.uint8)
    assert hashed(pixels) == hashed(pixels.copy()) != hashed(pixels + 1)
