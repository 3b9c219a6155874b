"""Random changes of training images, by name. Evaluation and features use the unchanged images.

``crop``: a margin in the mean colour, an eighth of the image's side, is added. Then a part of the original size is cut
out at a random place (He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385, Section 4.2: 4 pixels
of 32). ``flip``: the image is mirrored left to right with probability 1/2.

The changes of a row in an epoch depend on the client's seed of this round, the epoch and the row's index. So they are
the same on every engine, after a resume, and for every batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm import seeds
from fedfm.core.rows import Rows

PIXELS = "pixel_values"
_MARGIN = 8  # a crop's margin is the image's side divided by this


class Views:
    """The random views of one client's images in one epoch.

    Args:
        names: names of the changes.
        n: number of the client's rows.
        seed: seed of the client in this round.
        epoch: number of the epoch: 0, 1, ...
    """

    def __init__(self, names: Sequence[str], n: int, seed: int, epoch: int) -> None:
        draws = {name: seeds.generator(seed, "augment", name, epoch) for name in names}
        self._mirrored = draws["flip"].random(n) < 0.5 if "flip" in draws else None
        self._place = draws["crop"].random((n, 2)) if "crop" in draws else None

    def __call__(self, x: Tensor, index: np.ndarray) -> Tensor:
        """Changed copies of the images x (b, 3, H, W) of the rows ``index`` (b,)."""
        if self._mirrored is not None:
            mirrored = torch.from_numpy(self._mirrored[index])[:, None, None, None]
            x = torch.where(mirrored, x.flip(-1), x)
        if self._place is not None:
            x = _crop(x, self._place[index])
        return x


def _crop(x: Tensor, place: np.ndarray) -> Tensor:
    """Crop each image of x (b, 3, H, W). ``place`` (b, 2): the crop's corner, from 0 to 1 of its possible range."""
    height, width = x.shape[-2:]
    dy, dx = height // _MARGIN, width // _MARGIN
    room = np.array([2 * dy + 1, 2 * dx + 1])
    wide = F.pad(x, (dx, dx, dy, dy))  # pixels are normalised: 0 is the mean colour
    corners = np.minimum((place * room).astype(np.int64), room - 1).tolist()
    return torch.stack([wide[i, :, top : top + height, left : left + width] for i, (top, left) in enumerate(corners)])


def views(rows: Rows, orders: Sequence[np.ndarray], seed: int, epochs: int) -> Iterator[tuple[Rows, np.ndarray]]:
    """Yield (rows, indexes into them) for each batch of all epochs; deferred images are computed, then changed."""
    steps = len(orders) // max(epochs, 1)
    drawn, last = None, -1
    for step, (index, part) in enumerate(zip(orders, rows.parts(orders), strict=True)):
        if rows.augment:
            if step // steps != last:
                last = step // steps
                drawn = Views(rows.augment, len(rows), seed, last)
            assert drawn is not None  # noqa: S101 - the first step draws
            part = replace(part, tensors=part.tensors | {PIXELS: drawn(part.tensors[PIXELS], index)})
        yield part, np.arange(len(index))
