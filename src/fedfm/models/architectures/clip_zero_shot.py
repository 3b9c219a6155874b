"""CLIP as a zero-shot classifier: class names become a linear head.

Learning Transferable Visual Models From Natural Language Supervision. Radford et al. ICML 2021. Section 3.1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ZeroShotClassifier(nn.Module):
    """logits = scale * cosine(image, text of the class).

    The features are image embeddings of norm 1; the head's weight is scale times the text embeddings of norm 1. The
    head can be trained like any linear classifier.

    Args:
        clip: a model of two encoders; its text encoder is dropped.
        weight: the head's weight (C, d).
    """

    base_model_prefix = ""  # PEFT reads it from every module with a transformers configuration

    def __init__(self, clip: Any, weight: Tensor) -> None:
        super().__init__()
        self.config = clip.config
        self.vision_model = clip.vision_model
        siglip = clip.config.model_type == "siglip"  # its vision model returns vectors of the common space
        self.visual_projection = nn.Identity() if siglip else clip.visual_projection
        dtype = clip.logit_scale.dtype
        self.head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=dtype)
        with torch.no_grad():
            self.head.weight.copy_(weight)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(b, 3, H, W) -> logits (b, C)."""
        image = self.vision_model(pixel_values=pixel_values).pooler_output  # (b, d)
        return self.head(F.normalize(self.visual_projection(image), dim=-1))  # type: ignore[no-any-return]
