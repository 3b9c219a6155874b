"""The loss with which CLIP was trained."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def contrastive(logits: Tensor, labels: Tensor) -> Tensor:
    """CLIP's loss of a batch (Radford et al., Figure 3): each image is classified among the batch's texts, and each
    text among the batch's images. Images of one class share their text: the targets are uniform over equal labels.

    Args:
        logits: (b, C), the scaled similarities s <V, T> of the images and the texts of all classes.
        labels: (b,).
    """
    pairs = logits[:, labels]  # (b, b)
    same = (labels[:, None] == labels).to(pairs.dtype)
    targets = same / same.sum(1, keepdim=True)
    return (F.cross_entropy(pairs, targets) + F.cross_entropy(pairs.T, targets)) / 2
