"""Similarity of two images: PSNR and SSIM. Images are float arrays (..., H, W, 3) in [0, 1].

Wang, Bovik, Sheikh, Simoncelli: Image quality assessment: from error visibility to structural similarity. 2004.
"""

from __future__ import annotations

import numpy as np

from fedfm.audits.inference.rates import Array

WINDOW = 7  # side of a window in pixels; all pixels of a window have the same weight
K1, K2 = 0.01, 0.03
LUMA = np.array([0.299, 0.587, 0.114])


def psnr(a: Array, b: Array) -> Array:
    """Peak signal-to-noise ratio in dB; infinite for equal images. Leading axes (...,) are broadcast.

    Example:
        >>> float(psnr(np.zeros((2, 2, 3)), np.full((2, 2, 3), 0.1)).round(6))
        20.0
    """
    with np.errstate(divide="ignore"):
        out: Array = -10 * np.log10(((a - b) ** 2).mean((-3, -2, -1)))
    return out


def ssim(a: Array, b: Array) -> Array:
    """Structural similarity of the luma, averaged over all windows inside the image; leading axes (...,) are broadcast.

    Variances and covariances are population values: sums are divided by 49, not by 48.

    Raises:
        ValueError: an image is smaller than a window.
    """
    if min(a.shape[-3:-1]) < WINDOW:
        raise ValueError(f"images of {a.shape[-3]} x {a.shape[-2]} are smaller than a window of {WINDOW}")
    x, y = a @ LUMA, b @ LUMA  # (..., H, W)
    mx, my = _mean(x), _mean(y)
    vx, vy, cov = _mean(x * x) - mx * mx, _mean(y * y) - my * my, _mean(x * y) - mx * my
    c1, c2 = K1**2, K2**2
    value = (2 * mx * my + c1) * (2 * cov + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2))
    return np.asarray(value.mean((-2, -1)))


def _mean(x: Array) -> Array:
    """The mean over each window, (..., H - 6, W - 6), from cumulative sums in both directions."""
    total = np.zeros((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 1))
    np.cumsum(np.cumsum(x, -2), -1, out=total[..., 1:, 1:])
    w = WINDOW
    area = total[..., w:, w:] - total[..., :-w, w:] - total[..., w:, :-w] + total[..., :-w, :-w]
    return np.asarray(area / w**2)
