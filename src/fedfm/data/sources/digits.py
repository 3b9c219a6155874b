"""The built-in set "digits": 1,797 handwritten digits of 8 x 8 pixels (UCI, Alpaydin and Kaynak), from scikit-learn."""

from __future__ import annotations

import numpy as np

from fedfm.data.table import Table


def read() -> Table:
    """Pictures (1797, 8, 8, 1) uint8, scaled from 0..16 to 0..255; no row is marked as test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]  # (N, 8, 8, 1)
    labels = digits.target.astype(np.int64)
    return Table("image", images, labels, tuple("0123456789"), np.full(len(labels), "train"), source="digits")
