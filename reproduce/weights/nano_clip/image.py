"""Distil the small CLIP's image encoder into nano-clip's.

The teacher's embeddings of augmented views are computed once, a pass over the pictures at a time, and kept; the student
is trained on them. Both parts go on where they were interrupted.

    python image.py --teacher small_clip --data path/to/data --out runs/nano_clip
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance
from safetensors.torch import save_file
from student import SIDE, make_student, make_tokenizer
from text import imagenet_names
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, VisionTextDualEncoderModel

sys.path.insert(0, str(Path(__file__).parents[1] / "small_clip"))
from pictures import read
from zero_shot import text_embeddings

SETS = ("tiny_imagenet50", "pacs")
PARTS = ("vision_model.", "visual_projection.")
HELD = 400


@torch.no_grad()
def load_pictures(data: Path, teacher: PreTrainedModel) -> tuple[list[Image.Image], Tensor]:
    """Training pictures of all sets in one random order, and the teacher's embeddings of them as they are, (N, d).

    The embeddings come from the class token's features, which the data folder has.
    """
    pictures: list[Image.Image] = []
    goals = []
    for name in SETS:
        pictures += read(data / f"images/{name}.npz", test=False).images()
        z = np.load(data / f"features/{name}.vit_tiny.npz", allow_pickle=False)
        features = torch.from_numpy(z["feat"][~z["is_test"].astype(bool)]).float()
        goals.append(F.normalize(teacher.visual_projection(teacher.vision_model.pooler.dense(features)), dim=1))
    order = np.random.default_rng(0).permutation(len(pictures))
    return [pictures[k] for k in order], torch.cat(goals)[order]


# --- views that the teacher sees --------------------------------------------------------------------------------------
def crop(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A random rectangle, at times mirrored, turned, with changed colours, or grey; 224 x 224."""
    w, h = picture.size
    area, ratio = rng.uniform(0.3, 1), math.exp(rng.uniform(-0.29, 0.29))
    cw, ch = min(w, w * math.sqrt(area * ratio)), min(h, h * math.sqrt(area / ratio))
    x, y = rng.uniform(0, w - cw), rng.uniform(0, h - ch)
    view = picture.resize((224, 224), Image.Resampling.BICUBIC, box=(x, y, x + cw, y + ch))
    if rng.random() < 0.5:
        view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        view = change(view).enhance(rng.uniform(0.6, 1.4))
    return view.convert("L").convert("RGB") if rng.random() < 0.1 else view


def make_view(pictures: list[Image.Image], row: int, number: int) -> np.ndarray:
    """A crop of a picture, uint8 (224, 224, 3); half of the crops are mixed with one of a second picture."""
    rng = np.random.default_rng((number, row))
    view = np.array(crop(pictures[row], rng))
    if rng.random() < 0.5:
        other = np.asarray(crop(pictures[rng.integers(HELD, len(pictures))], rng))
        if rng.random() < 0.5:
            share = rng.uniform(0.5, 0.9)
            view = (share * view + (1 - share) * other).astype(np.uint8)
        else:
            side = (224 * np.sqrt(rng.uniform(0.1, 0.5))).astype(int)
            y, x = rng.integers(0, 224 - side, 2)
            view[y : y + side, x : x + side] = other[y : y + side, x : x + side]
    return view


@torch.no_grad()
def teach(teacher: PreTrainedModel, pictures: list[Image.Image], number: int) -> dict[str, np.ndarray]:
    """The student's input of one view a picture, uint8 (N, side, side, 3), and the teacher's embedding, (N, d)."""
    small, goals = [], []
    for first in range(0, len(pictures), 40):
        views = [make_view(pictures, k, number) for k in range(first, min(first + 40, len(pictures)))]
        pixels = torch.from_numpy(np.stack(views)).permute(0, 3, 1, 2) / 127.5 - 1
        with torch.autocast("cpu", torch.bfloat16):
            out = teacher.get_image_features(pixel_values=pixels).pooler_output
        goals.append(F.normalize(out.float(), dim=1))
        small += [shrink(Image.fromarray(v)) for v in views]
    return {"x": np.stack(small), "goal": torch.cat(goals).numpy()}


def shrink(picture: Image.Image) -> np.ndarray:
    """A picture at the student's size, uint8 (side, side, 3)."""
    return np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC))


# --- changes that the teacher does not see ----------------------------------------------------------------------------
def uniform(n: int, low: float, high: float) -> Tensor:
    """Draw n random numbers shaped to broadcast over (n, C, H, W)."""
    return torch.empty(n, 1, 1, 1).uniform_(low, high)


def disturb(x: Tensor) -> Tensor:
    """Turn, shift, zoom, mirror and recolour a little; some rows lose detail (20 to 40 pixels a side), some a patch."""
    n = len(x)
    r = torch.empty(4, n).uniform_(-1, 1)
    angle, zoom = r[0] * math.radians(12), torch.exp(r[1] * 0.15)
    flip = torch.where(torch.rand(n) < 0.5, -1.0, 1.0)
    cos, sin = torch.cos(angle) * zoom, torch.sin(angle) * zoom
    theta = torch.stack(
        [torch.stack([flip * cos, -sin, r[2] * 0.1], 1), torch.stack([flip * sin, cos, r[3] * 0.1], 1)], 1
    )
    x = F.grid_sample(x, F.affine_grid(theta, list(x.shape), False), padding_mode="reflection", align_corners=False)
    coarse, side = torch.rand(n) < 0.4, int(torch.randint(20, 41, ()))
    low = F.interpolate(x[coarse], size=(side, side), mode="bicubic", antialias=True)
    x[coarse] = F.interpolate(low, size=(SIDE, SIDE), mode="bicubic")
    mean = x.mean((1, 2, 3), keepdim=True)
    x = (mean + (x - mean) * uniform(n, 0.8, 1.2) + uniform(n, -0.15, 0.15)).clamp(-1, 1)
    y0, x0, size = (torch.randint(low, high, (n, 1)) for low, high in ((0, SIDE), (0, SIDE), (8, 28)))
    line = torch.arange(SIDE)
    patch = ((line >= y0) & (line < y0 + size))[:, None, :, None] & ((line >= x0) & (line < x0 + size))[
        :, None, None, :
    ]
    return torch.where(patch & (uniform(n, 0, 1) < 0.2), uniform(n, -1, 1), x)


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--teacher", type=Path, required=True)
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--views", type=int, default=1, help="crops of each picture that the teacher sees")
    p.add_argument("--epochs", type=int, default=12, help="passes over all views")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--threads", type=int, default=1)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    a.out.mkdir(parents=True, exist_ok=True)

    teacher = VisionTextDualEncoderModel.from_pretrained(a.teacher, attn_implementation="eager").eval()
    pictures, goals = load_pictures(a.data, teacher)
    parts = [{"x": np.stack([shrink(picture) for picture in pictures]), "goal": goals.numpy()}]
    for number in range(1, a.views + 1):
        path = a.out / f"views{number}.npz"
        if not path.exists():
            began = time.perf_counter()
            made = teach(teacher, pictures, number)
            np.savez(path.with_suffix(".part.npz"), **made)
            os.replace(path.with_suffix(".part.npz"), path)
            print(f"views {number}: {len(pictures)} pictures, {time.perf_counter() - began:.0f} s", flush=True)
        parts.append(dict(np.load(path)))
    held_x, held_goal = (torch.from_numpy(parts[0][k][:HELD]) for k in ("x", "goal"))
    x, goal = (torch.from_numpy(np.concatenate([part[k][HELD:] for part in parts])) for k in ("x", "goal"))

    names = imagenet_names(a.data)
    classes = F.normalize(
        text_embeddings(teacher, AutoTokenizer.from_pretrained(a.teacher), names, ["a photo of a {}."]), dim=1
    )
    scale = teacher.logit_scale.exp().item()
    model = make_student(teacher, make_tokenizer(names))
    model.set_attn_implementation("eager")
    trained = [q for n, q in model.named_parameters() if n.startswith(PARTS)]
    opt = torch.optim.AdamW(trained, a.lr, weight_decay=0.05)
    state, first = a.out / "image_state.pt", 0
    if state.exists():
        kept = torch.load(state, weights_only=True)
        model.load_state_dict(kept["model"])
        opt.load_state_dict(kept["opt"])
        first = kept["epoch"]
    print(f"# {len(x):,} views; {vars(a)}", flush=True)

    def embed(pixels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.normalize(model.get_image_features(pixel_values=pixels).pooler_output.float(), dim=1)

    def read_pixels(rows: Tensor) -> Tensor:
        return rows.permute(0, 3, 1, 2) / 127.5 - 1

    steps = len(x) // a.batch
    for epoch in range(first, a.epochs):
        torch.manual_seed(epoch)  # a resumed run sees the same rows and changes as an unbroken one
        began, sums = time.perf_counter(), torch.zeros(2)
        for i, rows in enumerate(torch.randperm(len(x))[: steps * a.batch].split(a.batch)):
            done = (epoch + i / steps) / a.epochs
            for group in opt.param_groups:
                group["lr"] = a.lr * min(1, 20 * done + 1 / steps) * 0.5 * (1 + math.cos(math.pi * done))
            out = embed(disturb(read_pixels(x[rows])))
            aim = goal[rows]
            near = F.kl_div(
                F.log_softmax(scale * out @ classes.T, 1), F.softmax(scale * aim @ classes.T, 1), reduction="batchmean"
            )
            apart = (1 - (out * aim).sum(1)).mean()
            opt.zero_grad()
            (near + 3 * apart).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            opt.step()
            sums += torch.stack([near.detach(), apart.detach()]) / steps
        with torch.no_grad():
            cosine = (embed(read_pixels(held_x)) * held_goal).sum(1).mean()
        kept = {"model": model.state_dict(), "opt": opt.state_dict(), "epoch": epoch + 1}
        torch.save(kept, state.with_suffix(".part"))
        os.replace(state.with_suffix(".part"), state)
        seconds = time.perf_counter() - began
        line = (
            f"image epoch {epoch + 1}/{a.epochs} kl {sums[0]:.3f} cosine {1 - sums[1]:.3f} held-out cosine {cosine:.3f}"
        )
        print(f"{line} {steps * a.batch / seconds:.0f} views/s {seconds:.0f} s", flush=True)
    save_file(
        {n: q.detach().contiguous() for n, q in model.state_dict().items() if n.startswith(PARTS)},
        a.out / "image.safetensors",
    )


if __name__ == "__main__":
    main()
