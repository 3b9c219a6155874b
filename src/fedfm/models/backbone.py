"""A second, frozen network that computes features of the images that a dual encoder reads."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedfm.core.rows import Rows
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.models.dual_encoder import DualModel
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.spec import AdaptationSpec, ModelSpec


class Backbone:
    """A frozen image classifier without its head, in evaluation mode.

    Args:
        name: a built-in model, a folder or a hub id.
        device: the device on which it runs.

    Raises:
        InputError: there is no such model, or it does not classify images.
    """

    def __init__(self, name: str, device: str) -> None:
        spec = ModelSpec(name, adaptation=AdaptationSpec("head"), device=device)
        self.model: Model = load_model(spec, classes=("0", "1"), kind="image", task="classification")
        if self.model.head is None:
            raise InputError(f"{name!r} has no features before a head; name an image classifier such as a ResNet")
        self.width: int = self.model.head.in_features

    def features(self, rows: Rows, of: DualModel) -> Tensor:
        """Features (n, width), float32, on the CPU, of rows that were prepared for the model ``of``."""
        processor = of.tools.processor
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (processor.image_mean, processor.image_std))
        x = np.concatenate([self._bytes(batch["pixel_values"], mean, std) for batch in rows.batches(256)])
        n = len(rows)
        table = Table("image", x, np.zeros(n, int), ("0", "1"), np.full(n, "train"), source="pictures")
        return self.model.encode(self.model.prepare(table, range(n))).tensors["features"].float()

    @staticmethod
    def _bytes(pixels: Tensor, mean: Tensor, std: Tensor) -> np.ndarray:
        """Prepared images (b, 3, H, W) -> uint8 (b, H, W, 3)."""
        seen = (pixels.float() * std + mean).clamp(0, 1)
        return (255 * seen).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


@lru_cache(maxsize=1)
def backbone(name: str, device: str) -> Backbone:
    """The :class:`Backbone`, loaded once per process."""
    return Backbone(name, device)
