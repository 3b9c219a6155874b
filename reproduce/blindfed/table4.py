"""BlindFed's Table 4: trainable parameters, latency of a training step and peak memory of linear, full and ours.

    python reproduce/blindfed/table4.py .data/vit_tiny_patch16_224

The paper's counts are checked for its own model, a ViT-B/16 at 384 x 384, built without memory (the meta device): "M"
is 2^20 there, and "ours" is side adapters of rank 8 with LoSA's token mixer over all 577 tokens. Latency and memory are
measured with the given model at batch 16 on one CPU thread: each method in a process of its own, the methods in turn,
the median of the turns. A step is the forward pass, the loss, its gradient, and SGD. `linear` and `ours` need the
backbone's forward pass in the first round only: "later" is a step on what was kept of it. The table goes to
docs/results/blindfed-vit-tiny.md unless there is ``--no-page``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from page import table, write
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from fedfm.models.adapters.side_adapter import SideAdapter, release
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec

MEGA = 2**20
PRINTED = {"linear": (0.0073, 15.1, 9.39), "full": (82.1, 47.4, 18.1), "ours": (0.2536, 15.7, 9.08)}  # M, ms, GB
METHODS = ("linear", "full", "ours, class", "ours, grid", "ours, all tokens")
BATCH, STEPS, TURNS, CLASSES, RANK = 16, 4, 3, 10, 8


def count(module: nn.Module) -> int:
    """Numbers of a module."""
    return sum(p.numel() for p in module.parameters())


def papers() -> list[dict[str, Any]]:
    """The paper's counts, and those of its model by construction.

    Raises:
        SystemExit: they differ in a printed digit.
    """
    with torch.device("meta"):
        whole = ViTForImageClassification(ViTConfig(image_size=384, num_labels=CLASSES))
        blocks, tokens, width = 12, (384 // 16) ** 2 + 1, 768
        made = {"linear": nn.Linear(width, CLASSES), "full": whole}
        made["ours"] = SideAdapter(blocks, tokens, width, RANK, CLASSES)
    rows = []
    for name, module in made.items():
        numbers, printed = count(module), PRINTED[name][0]
        digits = len(str(printed).partition(".")[2])
        if round(numbers / MEGA, digits) != printed:
            raise SystemExit(f"{name}: {numbers / MEGA:.5f} M, the paper prints {printed}")
        rows.append({"ViT-B/16, 384 x 384": name, "numbers": numbers, "M = 2^20": f"{numbers / MEGA:.{digits}f}"})
        rows[-1] |= {"printed, M": str(printed), "printed, ms": PRINTED[name][1], "printed, GB": PRINTED[name][2]}
    return rows


def memory(name: str) -> int:
    """Kilobytes of this process by its status: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def one(method: str, name: str) -> dict[str, float]:
    """Parameters, seconds a picture and peak memory of one method, in this process."""
    torch.set_num_threads(1)
    before = memory("VmRSS")
    kind, _, released = method.partition(", ")
    spec = ModelSpec(name, adaptation=AdaptationSpec("full" if kind == "full" else "head"), device="cpu")
    model = load_model(spec, classes=[str(i) for i in range(CLASSES)], kind="image")
    module: Any = model.module
    config, width = module.config, module.config.hidden_size
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, 3, config.image_size, config.image_size), torch.arange(BATCH) % CLASSES
    head: nn.Module = model.head  # type: ignore[assignment]
    if kind == "full":
        trained = list(module.parameters())
        first: Callable[[], Tensor] = lambda: module(pixel_values=x).logits  # noqa: E731
        later = None
    else:
        for p in module.parameters():
            p.requires_grad_(False)
        side = config.image_size // config.patch_size
        blocks, tokens = [b for _, b in model.parts.blocks], side**2 + int(config.model_type == "vit")
        chosen = {"": None, "class": "class", "grid": "grid", "all tokens": "tokens"}[released]
        take = release(chosen, tokens, (side, side)) if chosen else None
        kept: list[Tensor] = []
        for block in blocks if take else ():
            block.register_forward_hook(lambda _, __, out: kept.append(take(out)))
        if take:
            net: nn.Module = SideAdapter(len(blocks), len(take.positions), width, RANK, CLASSES).draw(0)
        else:
            net = nn.Linear(width, CLASSES)
            head.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        trained = list(net.parameters())

        @torch.no_grad()
        def states() -> Tensor:
            kept.clear()
            module(pixel_values=x)
            return torch.stack(kept, 1) if take else kept[0]

        known = states()
        first, later = lambda: net(states()), lambda: net(known)
    rule = torch.optim.SGD(trained, lr=1e-3)

    def measure(logits: Callable[[], Tensor]) -> float:
        spent = []
        for _ in range(STEPS):
            begin = time.process_time()
            rule.zero_grad()
            F.cross_entropy(logits(), y).backward()
            rule.step()
            spent.append((time.process_time() - begin) / BATCH)
        return min(spent)

    found = {"numbers": sum(p.numel() for p in trained), "first": measure(first)}
    found["peak"] = (memory("VmHWM") - before) / MEGA
    return found | ({"later": measure(later)} if later else {})


def measure_methods(name: str) -> list[dict[str, Any]]:
    """All methods in turn."""
    turns: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    for _ in range(TURNS):
        for method, found in turns.items():
            command = [sys.executable, __file__, name, "--one", method]
            environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            out = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            found.append(json.loads(out.splitlines()[-1]))
    rows = []
    for method, found in turns.items():
        middle = {key: median(turn[key] for turn in found) for key in found[0]}
        row = {Path(name).name: method, "numbers": int(middle["numbers"]), "ms a picture": middle["first"] * 1e3}
        row |= {"later": middle["later"] * 1e3 if "later" in middle else None, "GB": middle["peak"]}
        rows.append(row)
    full = next(row for row in rows if row[Path(name).name] == "full")
    for row in rows:
        row["of full: time"], row["memory"] = row["ms a picture"] / full["ms a picture"], row["GB"] / full["GB"]
    return rows


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model"), parser.add_argument("--one", choices=METHODS)
    parser.add_argument("--no-page", action="store_true")
    a = parser.parse_args()
    if a.one:
        print(json.dumps(one(a.one, a.model)))
        return
    text = f"{table(papers())}\n\n{table(measure_methods(a.model))}"
    print(text)
    if not a.no_page:
        write("table 4", text)


if __name__ == "__main__":
    main()
