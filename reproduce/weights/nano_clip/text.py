"""Distil the small CLIP's text encoder into nano-clip's.

python text.py --teacher small_clip --data path/to/data --out runs/nano_clip
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from student import WORDS, make_student, make_tokenizer
from torch import Tensor
from transformers import AutoTokenizer, VisionTextDualEncoderModel

sys.path.insert(0, str(Path(__file__).parents[1] / "small_clip"))
from zero_shot import words_of

TEMPLATES = (
    "{}", "a {}", "the {}", "{}.", "a photo of a {}.", "a photo of the {}.", "a picture of a {}.",
    "a picture of the {}.", "an image of a {}.", "a drawing of a {}.", "a sketch of a {}.", "a painting of a {}.",
    "a cartoon of a {}.", "a blurry photo of a {}.", "a small photo of a {}.", "a photo of {}.",
)  # fmt: skip
KINDS = (
    "small", "big", "red", "blue", "green", "yellow", "black", "white", "brown", "old", "new", "young", "wooden",
    "metal", "toy", "wild", "round", "long", "dark", "bright", "dirty", "clean", "broken", "empty", "wet", "happy",
)  # fmt: skip
PARTS = ("text_model.", "text_projection.")


def imagenet_names(data: Path) -> list[str]:
    """The 1,000 class names of the ViT's classifier, in their order."""
    labels = json.loads((data / "weights/vit_tiny_patch16_224/config.json").read_text())["id2label"]
    return [words_of(labels[str(k)]) for k in range(len(labels))]


def make_prompts(names: list[str], pieces: list[str]) -> list[str]:
    """Class names and everyday words in all templates; vocabulary words and adjectives with nouns in some."""
    rng = random.Random(0)
    nouns = list(dict.fromkeys([*names, *WORDS]))
    words = [p for p in pieces if p.isalpha() and len(p) > 2]
    prompts = [t.format(n) for n in nouns for t in {"a photo of a {}.": 0} | dict.fromkeys(rng.sample(TEMPLATES, 8))]
    prompts += [t.format(w) for w in words for t in rng.sample(TEMPLATES, 2)]
    prompts += [rng.choice(TEMPLATES).format(f"{rng.choice(KINDS)} {rng.choice(nouns)}") for _ in range(3000)]
    return list(dict.fromkeys(prompts))


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--teacher", type=Path, required=True)
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--epochs", type=int, default=8)
    p.add_argument("--batch", type=int, default=256)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--threads", type=int, default=1)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    a.out.mkdir(parents=True, exist_ok=True)

    teacher = VisionTextDualEncoderModel.from_pretrained(a.teacher).eval()
    names = imagenet_names(a.data)
    tokenizer = make_tokenizer(names)
    tokenizer.save_pretrained(a.out / "tokenizer")
    model = make_student(teacher, tokenizer)
    prompts = make_prompts(names, sorted(tokenizer.get_vocab()))
    random.Random(1).shuffle(prompts)
    old = AutoTokenizer.from_pretrained(a.teacher)

    began = time.perf_counter()
    cache = a.out / "prompts.pt"
    if cache.exists():
        targets = torch.load(cache, weights_only=True)
    else:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            batches = [
                old(prompts[k : k + 256], padding=True, return_tensors="pt") for k in range(0, len(prompts), 256)
            ]
            targets = torch.cat([teacher.get_text_features(**b).pooler_output for b in batches])
        targets = F.normalize(targets.float(), dim=1)
        torch.save(targets, cache)
    print(f"# {len(prompts):,} prompts, teacher {time.perf_counter() - began:.0f} s; {vars(a)}", flush=True)
    where = {p: k for k, p in enumerate(prompts)}
    classes = targets[
        [where[f"a photo of a {n}."] for n in names]
    ]  # (1000, d): directions that images are compared with
    scale = teacher.logit_scale.exp().item()

    def embed(rows: Tensor) -> Tensor:
        tokens = tokenizer([prompts[k] for k in rows.tolist()], padding=True, return_tensors="pt")
        return F.normalize(model.get_text_features(**tokens).pooler_output.float(), dim=1)

    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0))
    held, train = order[:1000], order[1000:]
    trained = [q for n, q in model.named_parameters() if n.startswith(PARTS)]
    opt = torch.optim.AdamW(trained, a.lr, weight_decay=0.01)
    steps = len(train) // a.batch
    for epoch in range(a.epochs):
        began, total = time.perf_counter(), 0.0
        shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch + 1))]
        for i in range(steps):
            done = (epoch + i / steps) / a.epochs
            for group in opt.param_groups:
                group["lr"] = a.lr * min(1, 20 * done + 1 / steps) * 0.5 * (1 + math.cos(math.pi * done))
            rows = shuffled[i * a.batch : (i + 1) * a.batch]
            with torch.autocast("cpu", torch.bfloat16):
                out = embed(rows)
            goal = targets[rows]
            near = F.kl_div(
                F.log_softmax(scale * out @ classes.T, 1), F.softmax(scale * goal @ classes.T, 1), reduction="batchmean"
            )
            loss = near + 2 * (1 - (out * goal).sum(1)).mean()
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            opt.step()
            total += loss.item()
        with torch.no_grad():
            cosine = (embed(held) * targets[held]).sum(1).mean()
        seconds = time.perf_counter() - began
        print(
            f"text epoch {epoch + 1}/{a.epochs} loss {total / steps:.3f} held-out cosine {cosine:.3f} {seconds:.0f} s",
            flush=True,
        )
    save_file(
        {n: q.detach().contiguous() for n, q in model.state_dict().items() if n.startswith(PARTS)},
        a.out / "text.safetensors",
    )


if __name__ == "__main__":
    main()
