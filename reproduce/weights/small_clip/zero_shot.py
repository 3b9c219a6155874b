"""Zero-shot accuracy of a VisionTextDualEncoderModel folder on the test rows of several picture sets.

python zero_shot.py --data path/to/data --model small_clip
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from pictures import read
from PIL import Image
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    VisionTextDualEncoderModel,
)
from transformers.image_processing_utils import BaseImageProcessor

SETS = ("cifar10", "cifar10_official_test_jpeg", "pacs", "tiny_imagenet50", "fashion_mnist", "brain_mri")


def words_of(name: str) -> str:
    """A class name as a prompt says it."""
    return name.replace("_", " ").lower()


@torch.no_grad()
def image_embeddings(
    model: PreTrainedModel, processor: BaseImageProcessor, images: Sequence[Image.Image], batch: int = 50
) -> Tensor:
    """Embeddings (N, d) of the pictures, not normalised."""
    out = []
    for first in range(0, len(images), batch):
        pixels = processor(images[first : first + batch], return_tensors="pt")["pixel_values"]
        out.append(model.get_image_features(pixel_values=pixels).pooler_output)
    return torch.cat(out)


@torch.no_grad()
def text_embeddings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, names: Sequence[str], templates: Sequence[str]
) -> Tensor:
    """Mean over the templates of the normalised embeddings of the prompts, (C, d)."""
    mean = torch.zeros(len(names), model.config.projection_dim)
    for template in templates:
        tokens = tokenizer([template.format(words_of(n)) for n in names], padding=True, return_tensors="pt")
        mean += F.normalize(model.get_text_features(**tokens).pooler_output, dim=1) / len(templates)
    return mean


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, required=True, help="folder with images/")
    p.add_argument("--model", type=Path, required=True, help="folder with config.json and model.safetensors")
    p.add_argument("--sets", nargs="+", default=list(SETS))
    p.add_argument("--limit", type=int, help="at most so many pictures of each set, drawn at random")
    p.add_argument("--templates", nargs="+", default=["a photo of a {}."])
    p.add_argument("--threads", type=int, default=1)
    a = p.parse_args()
    torch.set_num_threads(a.threads)

    model = VisionTextDualEncoderModel.from_pretrained(a.model).eval()
    tokenizer, processor = AutoTokenizer.from_pretrained(a.model), AutoImageProcessor.from_pretrained(a.model)
    print(f"{a.model}: {model.num_parameters():,} parameters, {model.dtype}, templates {a.templates}")
    print("| test rows | zero-shot accuracy % | chance % | seconds |\n|---|---|---|---|")
    for name in a.sets:
        rows = read(a.data / f"images/{name}.npz", test=True)
        rows = rows[np.random.default_rng(0).permutation(len(rows.y))[: a.limit]]
        began = time.perf_counter()
        names = F.normalize(text_embeddings(model, tokenizer, rows.classes, a.templates), dim=1)
        guess = (image_embeddings(model, processor, rows.images()) @ names.T).argmax(1).numpy()
        hit = 100 * (guess == rows.y)
        parts = [f"{d} {hit[rows.domain == k].mean():.1f}" for k, d in enumerate(rows.domains)]
        seconds = time.perf_counter() - began
        words = f"{name}, {len(hit):,} pictures" + (f" ({', '.join(parts)})" if parts else "")
        print(f"| {words} | {hit.mean():.1f} | {100 / len(rows.classes):.1f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
