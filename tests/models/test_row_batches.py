"""Rows in the batches in which a frozen model reads them."""

import pytest
import torch

from fedfm.core.rows import Rows
from fedfm.models.row_batches import FIXED, fixed_batches


@pytest.mark.parametrize(
    ("n", "large", "sizes"),
    [
        (0, False, []),
        (1, False, [32]),
        (48, False, [32, 32]),
        (48, True, [32, 16]),
        (64, True, [32, 32]),
        (37, True, [32, 8]),
        (24, True, [24]),
        (1, True, [8]),
    ],
)
def test_the_last_batch_is_filled_with_copies(n, large, sizes):
    rows = Rows({"features": torch.arange(n, dtype=torch.float32)[:, None]})
    found = list(fixed_batches(rows, large=large))
    assert [len(batch["features"]) for batch, _ in found] == sizes
    assert [valid for _, valid in found] == [min(FIXED, n - at) for at in range(0, n, FIXED)]
    assert torch.cat([batch["features"][:valid] for batch, valid in found] or [rows.tensors["features"]]).equal(
        rows.tensors["features"]
    )
