"""A client's round of DP-SGD: fedfm compared with Opacus, one backward pass for each row, and training without privacy.

    python benchmarks/dp_sgd.py

In turn, on one thread: fedfm's private local training, Opacus' ``GradSampleModule`` and ``DPOptimizer`` where it is
installed, a loop of one backward pass for each row, and steps of the same batches without clipping and noise. Batches
are Poisson samples of the same rate. fedfm's time includes its coins and noise from a ChaCha20 stream, and the hashes
by which it checks what has moved; Opacus draws from torch's generator, since its secure mode needs a package that no
longer exists. Ratios are of CPU seconds, the others' over fedfm's.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import common
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedfm.core import tasks
from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.data.table import Table
from fedfm.models.families import Parts
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.preprocessors import Tools
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.privacy.dp_sgd import DescentPlan
from fedfm.training import SGD, private
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client

CLASSES = tuple(map(str, range(10)))
BATCH = 32
CLIP, Z = 1.0, 1.0
DRAW = np.random.default_rng(0)


class Convolutions(nn.Module):
    """A small network that Opacus supports: group norm, no loose parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 64)
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.GroupNorm(8, b), nn.ReLU())
            for a, b in pairwise(widths)
        ]
        self.blocks, self.out = nn.Sequential(*blocks), nn.Linear(widths[-1], len(CLASSES))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(pixel_values).mean((2, 3)))  # type: ignore[no-any-return]


def head(n: int) -> tuple[Model, Rows]:
    """A head on 192 features."""
    spec = ModelSpec("features", adaptation=AdaptationSpec("head"))
    x = torch.from_numpy(DRAW.normal(size=(n, 192))).float()
    return load_model(spec, classes=CLASSES, kind="features", feature_dim=192), Rows({"features": x}, labels=labels(n))


def lora(n: int) -> tuple[Model, Rows]:
    """LoRA of the built-in transformer."""
    return vit(n, AdaptationSpec("lora", rank=4))


def whole(n: int) -> tuple[Model, Rows]:
    """All parameters of the built-in transformer; its positions are a parameter that no layer of torch owns."""
    return vit(n, AdaptationSpec("full"))


def vit(n: int, adaptation: AdaptationSpec) -> tuple[Model, Rows]:
    """The built-in transformer, and pictures."""
    model = load_model(ModelSpec("nano-vit", adaptation=adaptation), classes=CLASSES, kind="image")
    pictures = DRAW.integers(0, 256, (n, 32, 32, 3)).astype(np.uint8)
    table = Table("image", pictures, labels(n).numpy(), CLASSES, np.full(n, "train"))
    return model, model.prepare(table, np.arange(n))


def full(n: int) -> tuple[Model, Rows]:
    """All parameters of a convolutional network."""
    parts = Parts(None, (), None, None, "")
    model = Model(
        Convolutions(),
        spec=ModelSpec("mine"),
        task=tasks.find("classification"),
        classes=CLASSES,
        parts=parts,
        tools=Tools(),
        fingerprint="",
        head=None,
    )
    x = torch.from_numpy(DRAW.normal(size=(n, 3, 32, 32))).float()
    return model, Rows({"pixel_values": x}, labels=labels(n))


def gpt2(n: int) -> tuple[Model, Rows]:
    """LoRA of the built-in language model, on rows of 64 tokens."""
    spec = ModelSpec(
        "nano-gpt2", weights="random", task="language_modelling", adaptation=AdaptationSpec("lora", rank=4)
    )
    model = load_model(spec, classes=(), kind="text")
    return model, Rows({"input_ids": torch.from_numpy(DRAW.integers(0, 250, (n, 64)))})


def labels(n: int) -> torch.Tensor:
    """(n,) at random."""
    return torch.from_numpy(DRAW.integers(0, len(CLASSES), n))


def ours(model: Model, rows: Rows) -> Callable[[], Any]:
    """The client half of fedfm."""
    data, w = ClientData(lambda: rows, Rows, Rows), model.params()
    plan = DescentPlan(CLIP, 1e-5, 1, noise_multiplier=Z)

    def run() -> Any:
        client = Client("c", data, model, {}, 0, private=private.Descent(plan, data), trainer=train_client)
        client.secret = lambda name: hashlib.sha256(name.encode()).digest()
        client.write_once = lambda name, value: value
        return private.train([Job(client, w, SGD(0.1, batch_size=BATCH))])

    return run


def batches(n: int) -> list[np.ndarray]:
    """Poisson samples of one round."""
    return [np.flatnonzero(DRAW.random(n) < BATCH / n) for _ in range(-(-n // BATCH))]


def loop(model: Model, rows: Rows) -> Callable[[], Any]:
    """One backward pass for each row."""
    live = list(model.live().values())

    def run() -> None:
        for index in batches(len(rows)):
            total = [torch.zeros_like(p) for p in live]
            for i in index:
                one = torch.autograd.grad(model.loss(rows.batch(np.array([i]))), live)
                scale = min(1.0, CLIP / float(torch.cat([g.reshape(-1) for g in one]).norm()))
                for t, g in zip(total, one, strict=True):
                    t.add_(g, alpha=scale)
            with torch.no_grad():
                for p, t in zip(live, total, strict=True):
                    p.sub_(0.1 * (t + Z * CLIP * torch.randn_like(t)) / BATCH)

    return run


def openly(model: Model, rows: Rows) -> Callable[[], Any]:
    """Without privacy: one gradient of the batch."""
    live = list(model.live().values())

    def run() -> None:
        for index in batches(len(rows)):
            if len(index):
                found = torch.autograd.grad(model.loss(rows.batch(index)), live, allow_unused=True)
                with torch.no_grad():
                    for p, g in zip(live, found, strict=True):
                        if g is not None:
                            p.sub_(g, alpha=0.1)

    return run


def opacus(model: Model, rows: Rows) -> Callable[[], Any] | None:
    """The same by Opacus; None where it is not installed."""
    try:
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer
    except ImportError:
        return None
    feature = model.adaptation == "head"
    net = model.head if feature else model.module
    assert net is not None

    def run() -> None:
        wrapped = GradSampleModule(net).train()
        sgd = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], 0.1)
        optimiser = DPOptimizer(sgd, noise_multiplier=Z, max_grad_norm=CLIP, expected_batch_size=BATCH)
        for index in batches(len(rows)):
            batch = rows.batch(index)
            optimiser.zero_grad()
            inputs = batch["features"] if feature else batch.get("pixel_values", batch.get("input_ids"))
            out = wrapped(inputs)
            out = out if isinstance(out, torch.Tensor) else out.logits
            functional.cross_entropy(*model.flat(out, batch)).backward()
            optimiser.step()
        wrapped.to_standard_module()

    return run


def main() -> None:
    """Measure; the last line is JSON."""
    options = common.arguments(__doc__)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    table, goals = [], []
    for name, make, n in (
        ("head, d = 192", head, 2000),
        ("LoRA, nano-vit", lora, 320),
        ("full, 3 convolutions", full, 640),
        ("full, nano-vit", whole, 320),
        ("LoRA, nano-gpt2", gpt2, 160),
    ):
        model, rows = make(n // 4 if options.quick else n)
        variants = {
            "fedfm": ours(model, rows),
            "Opacus": opacus(copy.deepcopy(model), rows),
            "row by row": loop(model, rows),
            "no privacy": openly(model, rows),
        }
        times = common.interleave({k: v for k, v in variants.items() if v}, 1 if options.quick else 5)
        cpu = {k: np.array([c for _, c in turns]) for k, turns in times.items()}
        line: dict[str, Any] = {"trained": name, "rows": len(rows), "fedfm, CPU s": float(np.median(cpu["fedfm"]))}
        for other in ("Opacus", "row by row", "no privacy"):
            if other in cpu:
                ratio = cpu[other] / cpu["fedfm"]
                low, middle, high = (round(float(f(ratio)), 2) for f in (np.min, np.median, np.max))
                line[f"{other} over fedfm"] = {"median": middle, "min": low, "max": high}
                if other == "Opacus":
                    goals.append(
                        {"goal": f"Opacus over fedfm, {name}", "wanted": ">= 1", "measured": middle, "met": middle >= 1}
                        | {"bound": 1}
                    )
        table.append(line)
    title = f"A client's round of DP-SGD, batches of {BATCH} expected, one thread"
    common.emit("DP-SGD", [{"title": title, "rows": table}], goals)


if __name__ == "__main__":
    main()
