"""A twin small enough to compute on ciphertexts in tests: 4 tokens, 2 blocks, width 8, random weights, no training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

WIDTH, BLOCKS, SIDE = 8, 2, 16


def folder(where: Path, width: int = WIDTH, blocks: int = BLOCKS) -> Path:
    """The twin's folder; made once."""
    import transformers
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    from fedfm.core.rows import Batch
    from fedfm.models.load import load_model
    from fedfm.models.quiet import quiet
    from fedfm.models.spec import AdaptationSpec, ModelSpec
    from fedfm.training import distil

    out, plain = where / "tiny-twin", where / "tiny-ijepa"
    if out.exists():
        return out
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        shape = {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": 2}
        config = transformers.IJepaConfig(
            **shape, intermediate_size=2 * width, image_size=SIDE, patch_size=8, initializer_range=0.15
        )
        transformers.IJepaModel(config).save_pretrained(plain)
    ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(plain)
    spec = ModelSpec(str(plain), adaptation=AdaptationSpec("full"))
    teacher, student, tamed = (load_model(spec, classes=("a", "b"), kind="image") for _ in range(3))
    distiller = distil.Distiller(teacher, student, distil.Recipe(), new_head=True)

    def batches() -> Iterator[Batch]:
        rng = torch.Generator().manual_seed(3)
        for _ in range(4):
            plain = torch.rand((64, 3, 1, 1), generator=rng) * 2 - 1
            noise = 0.4 * torch.randn((64, 3, SIDE, SIDE), generator=rng)
            yield {"pixel_values": (plain + noise).clamp(-1, 1)}

    distiller.swap(distiller.measure(batches), tamed)
    distiller.finish(batches)
    distil.save(student, out, new_head=True)
    return out
