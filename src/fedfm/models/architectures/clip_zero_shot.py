"""CLIP as a classifier of pictures by the names of the classes.

Learning Transferable Visual Models From Natural Language Supervision. Radford et al. ICML 2021. Section 3.1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ZeroShotClassifier(nn.Module):
    """logits = scale * cosine(image, text of the class).

    The features are the image embeddings of norm 1, the head's weight is scale times the text embeddings of norm 1: a
    linear classifier that starts from the class names and can be trained like any other.

    Args:
        clip: a ``CLIPModel``; its text encoder is not kept.
        texts: (C, p), norm 1.
    """

    base_model_prefix = ""  # PEFT asks for it wherever it finds a transformers configuration

    def __init__(self, clip: Any, texts: Tensor) -> None:
        super().__init__()
        self.config = clip.config
        self.vision_model = clip.vision_model
        self.visual_projection = clip.visual_projection
        self.head = nn.Linear(texts.shape[1], texts.shape[0], bias=False, dtype=texts.dtype)
        with torch.no_grad():
            self.head.weight.copy_(clip.logit_scale.detach().float().exp() * texts.float())

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(b, 3, H, W) -> logits (b, C)."""
        image = self.vision_model(pixel_values=pixel_values).pooler_output  # (b, d)
        return self.head(F.normalize(self.visual_projection(image), dim=-1))  # type: ignore[no-any-return]


def text_embeddings(clip: Any, tokenizer: Any, prompts: list[str]) -> Tensor:
    """(C, p), norm 1."""
    was = clip.training
    clip.eval()
    batch = tokenizer(prompts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        out = clip.get_text_features(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    clip.train(was)
    texts = out if isinstance(out, Tensor) else out.pooler_output
    return F.normalize(texts.float(), dim=-1).to(texts.dtype)
