"""The built-in set "digits": 1,797 handwritten digits of 8 x 8 pixels (UCI, Alpaydin and Kaynak), from scikit-learn."""

from __future__ import annotations

import numpy as np

from fedfm.data.scikit_files import scikit_file
from fedfm.data.table import Table


def read() -> Table:
    """Table of images (1797, 8, 8, 1) uint8, scaled from 0..16 to 0..255; no row is marked as test."""
    numbers = np.loadtxt(scikit_file("datasets/data/digits.csv.gz"), delimiter=",")  # (N, 64 pixels and the digit)
    images = np.rint(numbers[:, :-1].reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    labels = numbers[:, -1].astype(np.int64)
    return Table("image", images, labels, tuple("0123456789"), np.full(len(labels), "train"), source="digits")
