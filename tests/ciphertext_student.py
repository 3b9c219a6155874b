"""A student small enough to compute on ciphertexts in tests: 4 tokens, 2 blocks, width 8, random weights.

``ciphertext_student.json`` holds its polynomials, measured on noisy pictures of one colour.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

SIDE = 16


def folder(where: Path) -> Path:
    """The student's folder; made once."""
    import transformers
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    from fedfm.models.quiet import quiet

    out = where / "tiny-student"
    if out.exists():
        return out
    with quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        config = transformers.IJepaConfig(**shape, image_size=SIDE, patch_size=8, initializer_range=0.15)
        module = transformers.IJepaModel(config)
        patches = module.embeddings.patch_embeddings.projection
        module.embeddings.position_embeddings -= module.embeddings.position_embeddings.mean(-1, keepdim=True)
        for linear in (patches, *(m for b in module.layers for m in (b.attention.o_proj, b.mlp.fc2))):
            for tensor in (linear.weight, linear.bias):  # the mean over features that LayerNorm subtracts
                tensor -= tensor.mean(0, keepdim=True)
        module.config.fedfm_polynomials = json.loads(Path(__file__).with_suffix(".json").read_text())
        module.save_pretrained(out)
    ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(out)
    return out
