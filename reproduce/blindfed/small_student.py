"""A student of one block, with the 197 tokens and three heads of ViT-tiny but of width 24, for one encrypted block.

    python blindfed/small_student.py .data/vit_197
    python blindfed/encrypt_once.py .data/vit_197/student .data/vit_197/rows.npz --mark " of 197 tokens"

With ``--width 192`` it is a block of ViT-tiny's own shape.
The weights are random, the rows are pictures by formula, and the polynomials are fitted to them without training. So
the scores and attention weights are as many ciphertexts as in a block of ViT-tiny, and the linear maps are smaller.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from fedfm.encrypted.student import interval_table
from fedfm.encrypted.student.direct_conversion import convert
from fedfm.encrypted.student.distillation_loss import Distiller, Recipe, save
from fedfm.encrypted.student.drawn_pictures import drawn_pictures
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.spec import AdaptationSpec, ModelSpec

SIDE, ROWS, TESTS = 56, 60, 20
SHAPE = {"num_hidden_layers": 1, "num_attention_heads": 3}
SPREAD = 0.15  # deviation of what is added to the first weights, so that blocks do something


def main() -> None:
    """Write the model, its rows and its student."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path), parser.add_argument("--width", type=int, default=24)
    a = parser.parse_args()
    out, shape = a.out, SHAPE | {"hidden_size": a.width, "intermediate_size": 4 * a.width}
    start = out / "start"
    torch.manual_seed(3)
    module = transformers.ViTModel(transformers.ViTConfig(**shape, image_size=SIDE, patch_size=4))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(SPREAD * torch.randn(parameter.shape))
    module.save_pretrained(start)
    ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(start)
    drawn = drawn_pictures(SIDE, 0, ROWS)
    split = np.array(["train"] * (ROWS - TESTS) + ["test"] * TESTS)
    x, y = np.stack([np.asarray(p.resize((SIDE, SIDE))) for p in drawn]), np.arange(ROWS) % 2
    np.savez(out / "rows.npz", x=x, y=y, classes=np.array(["a", "b"]), split=split)
    teacher, student = whole(start), whole(start)
    distiller = Distiller(teacher, student, Recipe(), new_head=True)
    batch = {"pixel_values": student.tools.image(drawn)}
    distiller.put(convert(distiller.student, lambda: [batch]))
    interval_table.finish(distiller, lambda: [batch], 0.0)
    save(student, out / "student", new_head=True)


def whole(folder: Path) -> Model:
    """The model of a folder, all of it trainable."""
    spec = ModelSpec(str(folder), adaptation=AdaptationSpec("full"))
    return load_model(spec, classes=("a", "b"), kind="image", keep_head=True)


if __name__ == "__main__":
    main()
