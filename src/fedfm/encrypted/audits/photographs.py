"""Photographs that are rows of no client, for an audit."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from fedfm.errors import MissingExtra


def two_photographs() -> list[np.ndarray]:
    """The two photographs (H, W, 3) uint8 that scikit-learn ships, read without importing it.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    spec = find_spec("sklearn")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        images = Path(folder, "datasets", "images")
        return [np.asarray(Image.open(images / f"{name}.jpg")) for name in ("china", "flower")]
    raise MissingExtra('the audit takes photographs from scikit-learn: pip install "fedfm[encrypted]"')
