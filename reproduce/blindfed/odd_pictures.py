"""What a polynomial student does with pictures unlike its auxiliary ones, and which of them its client turns away.

    python blindfed/odd_pictures.py .data/vit_tiny_fhe_224 .data/tiny_imagenet50.npz

Every picture passes alone, in the clear and in float64. It is *outside* if an argument leaves its interval, and *too
large* if a state of a block exceeds the range that the owner sends with it, or is no number: on ciphertexts such a row
has no activations, and its batch may overflow. ``turned away`` counts what :mod:`fedfm.encrypted.student.input_limits`
finds before it is encrypted. The pictures are test rows of the data, changed, and noise from a seed. The table goes to
docs/results/blindfed-vit-tiny.md, unless there is ``--no-page``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from page import table, write
from PIL import Image

from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.encrypted.student import conversion
from fedfm.encrypted.student.folding import block_states, fold
from fedfm.models import derived_modules
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec

SIDE = 224
Pixels = NDArray[np.float64]  # (SIDE, SIDE, 3), 0 to 1


def _edges(x: Pixels) -> Pixels:
    grey = x.mean(-1)
    slope = np.abs(np.diff(grey, axis=0, prepend=grey[:1])) + np.abs(np.diff(grey, axis=1, prepend=grey[:, :1]))
    return np.repeat((slope < np.quantile(slope, 0.93))[..., None], 3, axis=-1).astype(float)


def _checks(size: int) -> Callable[[Pixels, np.random.Generator], Pixels]:
    def draw(_: Pixels, rng: np.random.Generator) -> Pixels:
        rows, columns = np.indices((SIDE, SIDE)) // size
        return np.repeat(((rows + columns + rng.integers(2)) % 2)[..., None], 3, axis=-1).astype(float)

    return draw


KINDS: dict[str, Callable[[Pixels, np.random.Generator], Pixels]] = {
    "photographs": lambda x, _: x,
    "inverted": lambda x, _: 1 - x,
    "contrast times 4": lambda x, _: 0.5 + 4 * (x - 0.5),
    "two levels": lambda x, _: (x > np.median(x)).astype(float),
    "line drawings": lambda x, _: _edges(x),
    "pixels in random order": lambda x, rng: rng.permutation(x.reshape(-1, 3)).reshape(x.shape),
    "a quarter white noise": lambda x, rng: np.where(rng.random(x.shape[:2])[..., None] < 0.25, rng.random(x.shape), x),
    "white noise": lambda x, rng: rng.random(x.shape),
    "black and white noise": lambda x, rng: np.repeat(rng.integers(0, 2, x.shape[:2])[..., None], 3, -1).astype(float),
    "noise of pure colours": lambda x, rng: rng.integers(0, 2, x.shape).astype(float),
    "checks of 1 pixel": _checks(1),
    "checks of 8 pixels": _checks(8),
    "black": lambda x, _: np.zeros_like(x),
    "white": lambda x, _: np.ones_like(x),
    "one colour": lambda x, rng: np.broadcast_to(rng.integers(0, 2, 3).astype(float), x.shape),
}


def main() -> None:
    """One row a kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("student"), parser.add_argument("data")
    parser.add_argument("--rows", type=int, default=8, help="pictures of each kind")
    parser.add_argument("--no-page", action="store_true")
    a = parser.parse_args()
    data = load_table(DataSpec(path=a.data), seed=0, task="classification")
    tests = data.rows("test")
    chosen = tests[np.linspace(0, len(tests) - 1, a.rows).astype(int)]
    photographs = [Image.fromarray(data.inputs[i]).convert("RGB").resize((SIDE, SIDE)) for i in chosen]
    spec = ModelSpec(a.student, adaptation=AdaptationSpec("full"), device="cpu")
    model = load_model(spec, classes=data.classes, kind="image")
    ranges = torch.from_numpy(fold(model.module).ranges)
    module: Any = model.module.double()
    lines: list[dict[str, Any]] = []
    for kind, change in KINDS.items():
        outside, large, worst, first = 0, 0, 0.0, []
        for number, photograph in enumerate(photographs):
            rng = np.random.default_rng([number, *kind.encode()])
            x = np.clip(change(np.asarray(photograph, float) / 255, rng), 0, 1)
            pixels = model.tools.image([Image.fromarray((255 * x).astype(np.uint8))]).double()
            conversion.forget(module)
            with torch.no_grad():
                states = block_states(module, pixels)[0].flatten(1).abs().amax(1)
            outside += sum(n for n, _ in derived_modules.violations(module).values()) > 0
            over = (states / ranges).nan_to_num(nan=torch.inf)
            large += bool((over > 1).any())
            worst = max(worst, float(over.max()))
            if bool((over > 1).any()):
                first.append(int((over > 1).int().argmax()) + 1)
        lines.append({"pictures": kind, "number": a.rows, "outside": outside, "too large": large, "largest state, of its range": worst, "first block":min(first,default=0)})
        print(lines[-1], flush=True)
    print(table(lines))
    if not a.no_page:
        write("odd pictures", table(lines))


if __name__ == "__main__":
    main()
