"""A tiny SegFormer with random weights, and images of bright squares and discs with their masks."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

SIDE = 32
NAMES = ("background", "square", "disc")


def save(folder, classes=2, side=SIDE, **settings):
    """Write the model and its image processor; returns the folder."""
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 22):
        pytest.importorskip("torchvision", reason="before transformers 5.22 SegFormer's image processor needs it")
    from transformers import SegformerConfig, SegformerForSemanticSegmentation, SegformerImageProcessorPil

    from fedfm.models.quiet import quiet

    sizes = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 1, 2]}
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        config = SegformerConfig(**sizes, decoder_hidden_size=16, num_labels=classes, **settings)
        SegformerForSemanticSegmentation(config).save_pretrained(folder)
        SegformerImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)
    return Path(folder)


def drawn(rng, side=SIDE, kinds=2):
    """(pixels uint8 (side, side, 3), numbers uint8 (side, side)): a square is red (1), a disc is green (2)."""
    numbers, y, x = np.zeros((side, side), np.uint8), *np.mgrid[:side, :side]
    for kind in range(1, kinds + 1):
        r, (a, b) = side // 6, rng.integers(side // 5, side - side // 5, 2)
        inside = (abs(y - a) <= r) & (abs(x - b) <= r) if kind == 1 else (y - a) ** 2 + (x - b) ** 2 <= r * r
        numbers[inside] = kind
    colours = np.array([[40, 40, 40], [220, 60, 60], [60, 220, 60]])
    pixels = colours[numbers] + rng.integers(-20, 20, (side, side, 3))
    return np.clip(pixels, 0, 255).astype(np.uint8), numbers


def folder(path, counts, side=SIDE, kinds=2, seed=0):
    """A folder with ``images`` and ``masks`` for each split of ``counts``; "" for a folder without splits."""
    rng = np.random.default_rng(seed)
    for split, n in counts.items():
        for name in ("images", "masks"):
            (Path(path) / split / name).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            pixels, numbers = drawn(rng, side, kinds)
            Image.fromarray(pixels).save(Path(path) / split / "images" / f"{i:03d}.png")
            Image.fromarray(numbers).save(Path(path) / split / "masks" / f"{i:03d}.png")
    return Path(path)
