"""Train nano-vit, the built-in vision backbone of fedfm, from scratch on a CPU.

Two augmented views of every image are classified into the 20 classes of CIFAR-10 and Fashion-MNIST and pulled together
by a contrastive loss, and the pooled feature must give back an 8x8 thumbnail of its view. One view keeps its colours;
the other is often turned into an edge map, a silhouette or a low-resolution copy, so that the features follow shapes
rather than textures.

    python train.py --data path/to/images --out runs/nano_vit --epochs 65 [--resume]
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import IJepaConfig, IJepaModel

SETS = ("cifar10", "fashion_mnist")
PREPROCESSOR = {
    # AutoImageProcessor takes the Pillow backend of this class where torchvision is not installed.
    "image_processor_type": "ViTImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"height": 32, "width": 32},
    "resample": 2,  # bilinear
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


# --- data -------------------------------------------------------------------------------------------------------------
def read_images(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read a mosaic npz into images uint8 [N, H, W, C], labels [N] and is_test [N].

    ``blob[offsets[i]:offsets[i + 1]]`` is one lossless WebP sheet of ``tiles x tiles`` images, row-major.
    """
    z = np.load(path, allow_pickle=False)
    meta, blob, off = json.loads(str(z["meta"])), z["blob"], z["offsets"]
    n, h, w, c, t = (meta[k] for k in ("n", "height", "width", "channels", "tiles"))
    out = np.empty((n, h, w, c), np.uint8)
    for k in range(len(off) - 1):
        sheet = Image.open(io.BytesIO(blob[off[k] : off[k + 1]].tobytes())).convert("L" if c == 1 else "RGB")
        tiles = np.asarray(sheet).reshape(t, h, t, w, c).swapaxes(1, 2).reshape(-1, h, w, c)
        out[k * t * t : (k + 1) * t * t] = tiles[: n - k * t * t]
    return out, z["label"].astype(np.int64), z["is_test"].astype(bool)


def to_rgb32(x: np.ndarray) -> Tensor:
    """uint8 [N, H, W, C] -> uint8 [N, 3, 32, 32] by the same Pillow resize that the shipped preprocessor does."""
    rows = [Image.fromarray(im.squeeze()).convert("RGB").resize((32, 32), Image.Resampling.BILINEAR) for im in x]
    return torch.from_numpy(np.stack([np.asarray(im) for im in rows])).permute(0, 3, 1, 2).contiguous()


def load_data(folder: Path, n_val: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and validation rows of both sets with joint labels 0..19; ``is_test`` rows are left alone."""
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    rng = np.random.default_rng(seed)
    for k, name in enumerate(SETS):
        x, y, is_test = read_images(folder / f"{name}.npz")
        x32, y20 = to_rgb32(x[~is_test]), torch.from_numpy(y[~is_test] + 10 * k)
        order = torch.from_numpy(rng.permutation(len(x32)))
        val, train = order[:n_val], order[n_val:]
        parts.append((x32[train], y20[train], x32[val], y20[val]))
    x, y, xv, yv = (torch.cat(p) for p in zip(*parts, strict=True))
    return x, y, xv, yv


# --- augmentation: batched tensor ops on floats in [0, 1], every image with its own random numbers --------------------
def uniform(n: int, low: float, high: float) -> Tensor:
    """Draw n random numbers shaped to broadcast over [n, C, H, W]."""
    return torch.empty(n, 1, 1, 1).uniform_(low, high)


def some(n: int, p: float) -> Tensor:
    """Indices of a random subset: each of n rows with probability p."""
    return (torch.rand(n) < p).nonzero().flatten()


def random_affine(x: Tensor) -> Tensor:
    """Rotate, scale, stretch, shear, shift and mirror."""
    n = len(x)
    r = torch.empty(6, n).uniform_(-1, 1)
    angle, shear = r[0] * math.radians(25), r[1] * 0.25
    scale, stretch = torch.exp(r[2] * 0.4 - 0.12), torch.exp(r[3] * 0.2)
    flip = torch.where(torch.rand(n) < 0.5, -1.0, 1.0)
    cos, sin = torch.cos(angle), torch.sin(angle)
    sx, sy = scale * stretch, scale / stretch
    theta = torch.stack(
        [
            torch.stack([flip * cos * sx, (shear * cos - sin) * sy, r[4] * 0.25], 1),
            torch.stack([flip * sin * sx, (shear * sin + cos) * sy, r[5] * 0.25], 1),
        ],
        1,
    )
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def grey(x: Tensor) -> Tensor:
    """Luminance, one channel."""
    return (x * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)


def jitter(x: Tensor, strength: float) -> Tensor:
    """Random saturation, contrast, brightness and per-channel gain."""
    n = len(x)
    g = grey(x)
    x = g + (x - g) * uniform(n, 1 - strength, 1 + strength)
    mean = g.mean((2, 3), keepdim=True)
    x = mean + (x - mean) * uniform(n, 1 - strength, 1 + strength) + uniform(n, -0.3, 0.3) * strength
    gain = 1 + (torch.rand(n, 3, 1, 1) - 0.5) * strength
    return (x * gain).clamp(0, 1)


def edges(x: Tensor) -> Tensor:
    """Sobel magnitude with its strongest edge at 1, thickened and hardened at random like a pen drawing."""
    n = len(x)
    sobel = torch.tensor([[1.0, 2.0, 1.0], [0.0, 0.0, 0.0], [-1.0, -2.0, -1.0]])
    kernel = torch.stack([sobel, sobel.T]).unsqueeze(1)
    e = F.conv2d(F.pad(grey(x), (1, 1, 1, 1), mode="reflect"), kernel).square().sum(1, keepdim=True).sqrt()
    e = e / e.amax((2, 3), keepdim=True).clamp_min(0.05)
    thick = some(n, 0.4)
    e[thick] = F.max_pool2d(e[thick], 3, 1, 1)
    hard = torch.sigmoid((e - uniform(n, 0.2, 0.5)) * uniform(n, 8, 30))
    return torch.where(uniform(n, 0, 1) < 0.5, hard, (e * uniform(n, 1, 2)).clamp(0, 1))


def silhouette(x: Tensor) -> Tensor:
    """A soft threshold somewhere near the mean brightness."""
    g = grey(x)
    std, mean = torch.std_mean(g, (2, 3), correction=0, keepdim=True)
    return torch.sigmoid((g - mean - std * uniform(len(x), -0.7, 0.7)) * uniform(len(x), 6, 30))


def coarsen(x: Tensor) -> Tensor:
    """Throw detail away: down to 8 or 16 pixels a side and back."""
    small = F.avg_pool2d(x, 4 if torch.rand(()) < 0.5 else 2)
    return F.interpolate(small, size=x.shape[-2:], mode="bilinear", align_corners=False)


def erase(x: Tensor) -> Tensor:
    """Paint one rectangle of 6..16 pixels a side in one random grey."""
    n, side = len(x), torch.arange(32)
    inside = []
    for _ in range(2):
        size, start = torch.randint(6, 17, (n, 1)), torch.randint(-4, 28, (n, 1))
        inside.append((side >= start) & (side < start + size))
    mask = inside[0][:, None, :, None] & inside[1][:, None, None, :]
    return torch.where(mask, uniform(n, 0, 1), x)


def augment(x: Tensor, stylise: float) -> Tensor:
    """uint8 batch -> one augmented view in [-1, 1]; ``stylise`` is the share of edge maps and silhouettes."""
    n = len(x)
    x = jitter(random_affine(x.float() / 255), 0.5)
    which = torch.rand(n)
    drawn, filled = (which < stylise * 0.6), (which >= stylise * 0.6) & (which < stylise)
    for rows, redraw in ((drawn, edges), (filled, silhouette)):
        if rows.any():
            x[rows] = redraw(x[rows]).expand(-1, 3, -1, -1)
    for p, change in (
        (0.2, lambda v: grey(v).expand(-1, 3, -1, -1)),
        (0.2, lambda v: 1 - v),
        (0.2, coarsen),
        (0.25, erase),
    ):
        k = some(n, p)
        x[k] = change(x[k])
    return x * 2 - 1


# --- model ------------------------------------------------------------------------------------------------------------
def make_backbone() -> IJepaModel:
    """The nano-vit architecture with fresh weights: 32 px, 16 patches, 8 layers of width 128."""
    config = IJepaConfig(
        image_size=32, patch_size=8, hidden_size=128, num_hidden_layers=8, num_attention_heads=4, intermediate_size=256,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-6,
        attn_implementation="eager",
    )  # fmt: skip
    # Eager: the fused attention kernel's backward pass is three times slower on a CPU for 16 tokens in bfloat16.
    return IJepaModel(config)


class Net(nn.Module):
    """Backbone with the three heads that only training needs."""

    def __init__(self) -> None:
        """Fresh weights throughout."""
        super().__init__()
        self.backbone = make_backbone()
        self.classifier = nn.Linear(128, 20)
        self.thumbnail = nn.Linear(128, 64)
        self.projector = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Class logits, unit-length projections and 8x8 thumbnails from the mean token, all float32."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.training):
            tokens = self.backbone(pixel_values=x).last_hidden_state
        f = tokens.float().mean(1)
        return self.classifier(f), F.normalize(self.projector(f), dim=1), self.thumbnail(f)


def contrast(a: Tensor, b: Tensor, temperature: float = 0.2) -> Tensor:
    """Symmetric InfoNCE: each row of ``a`` should find its own row of ``b`` among the batch, and the other way."""
    sim, own = a @ b.T / temperature, torch.arange(len(a))
    return (F.cross_entropy(sim, own) + F.cross_entropy(sim.T, own)) / 2


@torch.no_grad()
def accuracy(net: Net, x: Tensor, y: Tensor) -> list[float]:
    """Validation accuracy within each set (its ten logits only), in per cent."""
    net.eval()
    logits = torch.cat([net(b.float() / 127.5 - 1)[0] for b in x.split(500)])
    out = []
    for k in range(len(SETS)):
        rows = y // 10 == k
        hit = logits[rows, 10 * k : 10 * k + 10].argmax(1) == y[rows] - 10 * k
        out.append(100 * hit.float().mean().item())
    return out


# --- checkpoints: safetensors only, written beside the target and renamed so that a crash leaves the last one ---------
def save_state(path: Path, net: Net, ema: Net, opt: torch.optim.Optimizer, epoch: int) -> None:
    """Everything needed to go on after ``epoch`` epochs; random numbers are reseeded at every epoch."""
    t = {f"net.{k}": v for k, v in net.state_dict().items()} | {f"ema.{k}": v for k, v in ema.state_dict().items()}
    for i, slot in opt.state_dict()["state"].items():
        t |= {f"opt.{i}.{k}": torch.as_tensor(v) for k, v in slot.items()}
    save_file({k: v.contiguous() for k, v in t.items()}, path.with_suffix(".tmp"), metadata={"epoch": str(epoch)})
    os.replace(path.with_suffix(".tmp"), path)


def load_state(path: Path, net: Net, ema: Net, opt: torch.optim.Optimizer) -> int:
    """Restore what ``save_state`` wrote; returns the number of epochs done."""
    with safe_open(path, "pt") as f:
        epoch, t = int(f.metadata()["epoch"]), {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
    for prefix, module in (("net.", net), ("ema.", ema)):
        module.load_state_dict({k[4:]: v for k, v in t.items() if k.startswith(prefix)})
    state: dict[int, dict[str, Tensor]] = {}
    for k, v in t.items():
        if k.startswith("opt."):
            _, i, name = k.split(".", 2)
            state.setdefault(int(i), {})[name] = v
    opt.load_state_dict({"state": state, "param_groups": opt.state_dict()["param_groups"]})
    return epoch


def save_model(folder: Path, ema: Net) -> None:
    """The headless backbone (averaged weights) and its preprocessor, as ``from_pretrained`` reads them."""
    ema.backbone.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner can read
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n")


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, required=True, help="folder with cifar10.npz and fashion_mnist.npz")
    p.add_argument("--out", type=Path, required=True, help="folder for log.txt, state.safetensors and model/")
    p.add_argument("--epochs", type=int, default=65, help="length of the learning-rate schedule")
    p.add_argument("--stop", type=int, help="end after this epoch of the schedule")
    p.add_argument("--batch", type=int, default=128, help="images a step; each gives two views")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--weight-decay", type=float, default=0.05)
    p.add_argument("--warmup", type=float, default=4, help="epochs")
    p.add_argument("--contrast", type=float, default=0.5, help="weight of the contrastive loss")
    p.add_argument("--layout", type=float, default=2.0, help="weight of the thumbnail loss")
    p.add_argument("--ema", type=float, default=0.998)
    p.add_argument("--val", type=int, default=500, help="training rows of each set kept for validation")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--resume", action="store_true")
    a = p.parse_args()

    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    a.out.mkdir(parents=True, exist_ok=True)
    x, y, xv, yv = load_data(a.data, a.val, a.seed)
    net, ema = Net(), Net().requires_grad_(False)
    ema.load_state_dict(net.state_dict())
    decay = [q for q in net.parameters() if q.ndim > 1]
    rest = [q for q in net.parameters() if q.ndim <= 1]  # biases and norms are not decayed
    opt = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], a.lr, (0.9, 0.98),
                            weight_decay=a.weight_decay, fused=True)  # fmt: skip
    state = a.out / "state.safetensors"
    first = load_state(state, net, ema, opt) if a.resume and state.exists() else 0
    steps = len(x) // a.batch
    last = min(a.stop or a.epochs, a.epochs)
    total, warm = a.epochs * steps, a.warmup * steps

    with (a.out / "log.txt").open("a" if first else "w") as log:

        def say(text: str) -> None:
            print(text, flush=True)
            log.write(text + "\n")
            log.flush()

        settings = " ".join(f"{k}={v}" for k, v in vars(a).items() if k not in ("data", "out"))
        say(f"# {len(x)} training images, {len(xv)} validation images, {steps} steps an epoch; {settings}")
        for epoch in range(first, last):
            torch.manual_seed(a.seed * 100_003 + epoch)  # makes a resumed run equal to an unbroken one
            net.train()
            began, sums = time.perf_counter(), torch.zeros(4)
            for i, rows in enumerate(torch.randperm(len(x))[: steps * a.batch].split(a.batch)):
                step = epoch * steps + i
                lr = a.lr * min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / (total - warm))))
                for group in opt.param_groups:
                    group["lr"] = lr
                views = torch.cat([augment(x[rows], 0.1), augment(x[rows], 0.5)])
                logits, z, thumb = net(views)
                ce = F.cross_entropy(logits, y[rows].repeat(2), label_smoothing=0.1)
                nce = contrast(*z.chunk(2))
                # Classes alone let the pooled feature forget where things are, which other tasks need.
                mse = F.mse_loss(thumb, F.avg_pool2d(grey(views), 4).flatten(1))
                opt.zero_grad(set_to_none=True)
                (ce + a.contrast * nce + a.layout * mse).backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                mix = min(a.ema, (step + 1) / (step + 10))  # the average forgets the start quickly
                torch._foreach_lerp_(list(ema.parameters()), list(net.parameters()), 1 - mix)
                hit = (logits.argmax(1) == y[rows].repeat(2)).float().mean()
                sums += torch.stack([ce.detach(), nce.detach(), mse.detach(), hit])
            seconds = time.perf_counter() - began
            ce_, nce_, mse_, hit_ = (sums / steps).tolist()
            line = f"epoch {epoch + 1}/{a.epochs} lr {lr:.1e} ce {ce_:.3f} nce {nce_:.3f} mse {mse_:.3f}"
            line += f" train {100 * hit_:.1f}%"
            if (epoch + 1) % 5 == 0 or epoch + 1 == last:
                line += " val " + " ".join(f"{n} {v:.1f}%" for n, v in zip(SETS, accuracy(ema, xv, yv), strict=True))
                save_state(state, net, ema, opt, epoch + 1)
                save_model(a.out / "model", ema)
            say(f"{line} {2 * steps * a.batch / seconds:.0f} views/s {seconds:.1f} s")


if __name__ == "__main__":
    main()
