"""Distil nano-vit into nano-vit-fhe, its student with polynomials, on one CPU thread.

The recipe is that of `fedfm distil` (fedfm.encrypted.student.distillation_loss), with two differences that a folder of
settings cannot say: the rows are augmented as nano-vit's own were, so that its features outside photographs are kept
too, and the learning rate falls within each stage.

    python distil.py --data path/to/images --out runs/nano_vit_fhe [--resume]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "nano_vit"))

from train import PREPROCESSOR, augment, load_data

from fedfm.encrypted.student import conversion
from fedfm.encrypted.student.distillation_loss import STAGES, Distiller, Recipe, save
from fedfm.models import derived_modules
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.spec import AdaptationSpec, ModelSpec

VIEWS = ((0, 0.4), (0.1, 0.3), (0.5, 0.3))  # share of edge maps and silhouettes among a view's rows, share of the batch


def nano_vit() -> Model:
    """The teacher, with a head that nobody reads."""
    spec = ModelSpec("nano-vit", adaptation=AdaptationSpec("full"), device="cpu")
    return load_model(spec, classes=("0", "1"), kind="image")


def plain(x: Tensor) -> Tensor:
    """uint8 rows as the processor gives them."""
    return x.float() / 127.5 - 1


def views(x: Tensor) -> Tensor:
    """Some rows as they are, the others augmented: random numbers come from torch's generator."""
    ends = np.cumsum([0.0] + [share for _, share in VIEWS]) * len(x)
    parts = [x[round(a) : round(b)] for a, b in pairwise(ends)]
    done = [plain(p) if not stylise else augment(p, stylise) for p, (stylise, _) in zip(parts, VIEWS, strict=True)]
    return torch.cat(done)


class Adam:
    """Adam over the student's parameters whose state is a dict of tensors."""

    def __init__(self, model: Model) -> None:
        self.live = model.live()
        self.rule = torch.optim.Adam(self.live.values(), 1e-3, (0.9, 0.98), fused=True)

    def state(self) -> dict[str, Tensor]:
        found = self.rule.state_dict()["state"]
        return {f"adam.{i}.{k}": torch.as_tensor(v) for i, slot in found.items() for k, v in slot.items()}

    def load(self, t: dict[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in t.items():
            if key.startswith("adam."):
                _, i, name = key.split(".", 2)
                state.setdefault(int(i), {})[name] = value
        self.rule.load_state_dict({"state": state, "param_groups": self.rule.state_dict()["param_groups"]})


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, required=True, help="folder with cifar10.npz and fashion_mnist.npz")
    p.add_argument("--out", type=Path, required=True, help="folder for log.txt, state.safetensors and model/")
    p.add_argument("--epochs", type=int, nargs=3, default=(8, 9, 4), help="of the stages")
    p.add_argument("--lr", type=float, nargs=3, default=(1e-3, 5e-4, 2e-5), help="first learning rates of the stages")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--tameness", type=float, default=5.0)
    p.add_argument("--penalty", type=float, default=10.0)
    p.add_argument("--rows", type=int, default=4096, help="rows, plain and augmented, that are measured")
    p.add_argument("--val", type=int, default=500, help="training rows of each set kept out, as of nano-vit")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--float32", action="store_true", help="no bfloat16 in training")
    p.add_argument("--resume", action="store_true")
    a = p.parse_args()

    torch.set_num_threads(a.threads)
    a.out.mkdir(parents=True, exist_ok=True)
    x, _, held, _ = load_data(a.data, a.val, a.seed)
    teacher, student = nano_vit(), nano_vit()
    recipe = Recipe(tuple(a.epochs), tuple(a.lr), a.batch, tameness=a.tameness, penalty=a.penalty)
    distiller = Distiller(teacher, student, recipe, new_head=True, low=not a.float32)
    adam, ends = Adam(student), np.cumsum(a.epochs)
    steps, state = len(x) // a.batch, a.out / "state.safetensors"

    def measured_rows() -> Iterator[dict[str, Tensor]]:
        """Rows for intervals: the same in each call."""
        torch.manual_seed(a.seed + 7)
        for rows in torch.randperm(len(x))[: a.rows].split(256):
            yield {"pixel_values": plain(x[rows])}
            yield {"pixel_values": augment(x[rows], 0.5)}

    def swap(entries: list[Any], tamed: dict[str, Tensor]) -> None:
        third = nano_vit()
        third.module.load_state_dict(tamed)
        distiller.swap(entries, third)

    first, tamed = 0, {}
    if a.resume and state.exists():
        with safe_open(state, "pt") as f:
            meta, t = f.metadata(), {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
        first = int(meta["epoch"])
        student.module.load_state_dict({k[2:]: v for k, v in t.items() if k.startswith("w.")})
        adam.load(t)
        tamed = {k[2:]: v for k, v in t.items() if k.startswith("t.")}
        if tamed:
            swap(json.loads(meta["entries"]), tamed)

    with (a.out / "log.txt").open("a" if first else "w") as log:

        def say(text: str) -> None:
            print(text, flush=True)
            log.write(text + "\n")
            log.flush()

        settings = " ".join(f"{k}={v}" for k, v in vars(a).items() if k not in ("data", "out"))
        say(f"# {len(x)} training images, {steps} steps an epoch; {settings}")
        for epoch in range(first, int(ends[-1])):
            stage = int(np.searchsorted(ends, epoch, side="right"))
            if epoch == ends[0]:  # the polynomials take over
                student.eval_mode()
                entries = distiller.measure(measured_rows)
                tamed = {k: v.clone() for k, v in student.module.state_dict().items()}
                swap(entries, tamed)
                (a.out / "entries.json").write_text(json.dumps(entries, indent=1))
                say(f"# swapped: {error(distiller, held)[0]}")
            if epoch in (ends[0], ends[1]):
                adam = Adam(student)
            torch.manual_seed(a.seed * 100_003 + epoch)  # makes a resumed run equal to an unbroken one
            student.train_mode()
            began, total = time.perf_counter(), 0.0
            begin, length = int(ends[stage] - a.epochs[stage]) * steps, a.epochs[stage] * steps
            for i, rows in enumerate(torch.randperm(len(x))[: steps * a.batch].split(a.batch)):
                done = (epoch * steps + i - begin) / length
                for group in adam.rule.param_groups:
                    group["lr"] = (
                        a.lr[stage]
                        * min(1, (i + 1 + epoch * steps - begin) / 50)
                        * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
                    )
                loss = distiller.loss(stage, {"pixel_values": views(x[rows])})
                adam.rule.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(adam.live.values(), 1.0)
                adam.rule.step()
                total += float(loss.detach())
            student.eval_mode()
            seconds = time.perf_counter() - began
            distance, _ = error(distiller, held)
            say(f"epoch {epoch + 1}/{ends[-1]} {STAGES[stage]} loss {total / steps:.4f} {distance} {seconds:.0f} s")
            t = {f"w.{k}": v for k, v in student.module.state_dict().items()} | adam.state()
            t |= {f"t.{k}": v for k, v in tamed.items()}
            meta = {"epoch": str(epoch + 1), "entries": json.dumps(distiller.entries)}
            save_file({k: v.contiguous().clone() for k, v in t.items()}, state.with_suffix(".tmp"), metadata=meta)
            os.replace(state.with_suffix(".tmp"), state)
        if int(ends[-1]) > ends[0]:
            distance, share = error(distiller, held)
            distiller.finish(measured_rows, share)
            save(student, a.out / "model", new_head=True)
            (a.out / "model" / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n")
            (a.out / "model" / "model.safetensors").chmod(0o644)
            say(f"# done: {distance}")


@torch.no_grad()
def error(distiller: Distiller, held: Tensor) -> tuple[str, float]:
    """Relative error of the features on held-out rows and arguments outside their intervals, in words; their share."""
    conversion.forget(distiller.student.model.module)
    mine, theirs = [], []
    for rows in plain(held).split(250):
        distiller.student({"pixel_values": rows})
        distiller.teacher({"pixel_values": rows})
        mine.append(distiller.student.features)
        theirs.append(distiller.teacher.features)
    s, t = torch.cat(mine), torch.cat(theirs)
    found = ((s - t).square().mean(0) / t.var(0)).mean()
    counts = derived_modules.violations(distiller.student.model.module).values()
    outside, total = (sum(c) for c in zip(*counts, strict=True))
    return f"held-out error {found:.4f} outside {outside}/{total}", outside / max(total, 1)


if __name__ == "__main__":
    main()
