"""What a polynomial student does with pictures unlike its auxiliary ones, and which of them its client turns away.

    python blindfed/odd_pictures.py .data/vit_tiny_fhe_224 .data/tiny_imagenet50.npz --sets .data/pacs.npz

In the clear. A picture *overflows* if a state of a block exceeds the range that the owner sends with it, or is no
number: on ciphertexts such a row has no activations, and its batch may overflow. It is *turned away* if it is beyond
the student's limits (:mod:`fedfm.encrypted.student.input_limits`), so that a client does not encrypt it. The pictures
are test rows of the data, changed, and noise from a seed. ``--sets`` counts the rows that are turned away among
300 of each set, as they are. The tables go to docs/results/blindfed-vit-tiny.md, unless there is ``--no-page``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from page import table, write
from PIL import Image

from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.encrypted.student.folding import block_states, fold
from fedfm.encrypted.student.input_limits import beyond, limits_of, measure_detail
from fedfm.models.images import Chosen
from fedfm.models.images import pixels as pixels_of
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.spec import AdaptationSpec, ModelSpec

SIDE = 224  # pixels
ROWS, AT_ONCE = 300, 50  # rows of a set, and those that are prepared at once
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
    "a tenth of white noise": lambda x, rng: 0.9 * x + 0.1 * rng.random(x.shape),
    "a twentieth of white noise": lambda x, rng: 0.95 * x + 0.05 * rng.random(x.shape),
    "a fiftieth of white noise": lambda x, rng: 0.98 * x + 0.02 * rng.random(x.shape),
    "noise of 8 pixels": lambda x, rng: np.repeat(np.repeat(rng.random((SIDE // 8, SIDE // 8, 3)), 8, 0), 8, 1),
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
    parser.add_argument("--rows", type=int, default=4, help="pictures of each kind")
    parser.add_argument("--sets", nargs="*", default=[])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--no-page", action="store_true")
    a = parser.parse_args()
    data = load_table(DataSpec(path=a.data), seed=0, task="classification")
    tests = data.rows("test")
    chosen = tests[np.linspace(0, len(tests) - 1, a.rows).astype(int)]
    photographs = [Image.fromarray(data.inputs[i]).convert("RGB").resize((SIDE, SIDE)) for i in chosen]
    spec = ModelSpec(a.student, adaptation=AdaptationSpec("full"), device="cpu")
    model = load_model(spec, classes=data.classes, kind="image")
    ranges, limits = torch.from_numpy(fold(model.module).ranges), limits_of(model.module)
    lines: list[dict[str, Any]] = []
    for kind in a.only:
        changed = []
        for number, photograph in enumerate(photographs):
            rng = np.random.default_rng([number, *kind.encode()])
            x = np.clip(KINDS[kind](np.asarray(photograph, float) / 255, rng), 0, 1)
            changed.append(Image.fromarray((255 * x).astype(np.uint8)))
        pixels = model.tools.image(changed)
        with torch.no_grad():
            states = block_states(model.module, pixels).flatten(2).abs().amax(2)
        over = ~(states <= ranges)  # (n, L)
        lost = over.any(1)
        away = torch.tensor([bool(reason) for reason in beyond(pixels, limits)])
        found = {"pictures": kind, "number": a.rows, "overflow": int(lost.sum()), "turned away": int(away.sum())}
        found |= {"overflow and not turned away": int((lost & ~away).sum())}
        found |= {"overflow first in block": int(over[lost].int().argmax(1).min()) + 1 if lost.any() else None}
        lines.append(found)
        print(found, flush=True)
    print(table(lines))
    if not a.no_page:
        write("odd pictures", table(lines))
    if a.sets:
        text = table([turned_away(path, model, limits) for path in a.sets])
        print(text)
        if not a.no_page:
            write("turned away", text)


def turned_away(path: str, model: Model, limits: dict[str, float]) -> dict[str, Any]:
    """How many rows of a set are beyond the limits."""
    where = DataSpec(path=path) if Path(path).suffix else DataSpec(name=path)
    data = load_table(where, seed=0, task="classification")
    index = np.linspace(0, len(data) - 1, min(ROWS, len(data))).astype(int)
    found: dict[str, Any] = {"set": Path(path).name.removesuffix(".npz"), "rows": len(index), "turned away": 0}
    most = dict.fromkeys(limits, 0.0)
    for part in np.split(index, range(AT_ONCE, len(index), AT_ONCE)):
        pixels = pixels_of(Chosen(data.inputs, part), model.tools.image)
        found["turned away"] += sum(bool(reason) for reason in beyond(pixels, limits))
        for name, x in measure_detail(pixels).items():
            most[name] = max(most[name], float(x.max()) / limits[name])
    return found | {f"largest {name}, of its limit": x for name, x in most.items()}


if __name__ == "__main__":
    main()
