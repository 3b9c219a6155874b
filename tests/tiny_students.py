"""Tiny transformers, and their students by a distillation of a second or two, as folders."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from fedfm.encrypted.student.distillation_loss import OUTPUTS, STATES, TAME, Distiller, Recipe, save
from fedfm.encrypted.student.interval_table import finish
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec

SHAPE = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
CLASSES = ("a", "b", "c")
NAMES = {"ijepa": "IJepa", "vit": "ViT", "deit": "DeiT"}


def tiny(kind: str, folder: Path, size: tuple[int, int] = (8, 8), head: bool = False) -> Path:
    """A model of patches of 4 x 4 with random weights; with ``head`` for three classes."""
    side: int | tuple[int, int] = size[0] if size[0] == size[1] else size
    config = getattr(transformers, f"{NAMES[kind]}Config")(**SHAPE, image_size=side, patch_size=4)
    config.num_labels = len(CLASSES)
    form = f"{NAMES[kind]}ForImageClassification" if head else f"{NAMES[kind]}Model"
    with quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        module = getattr(transformers, form)(config)
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
        module.save_pretrained(folder)
        ViTImageProcessorPil(size={"height": size[0], "width": size[1]}).save_pretrained(folder)
    return folder


def full(folder: Path) -> Model:
    """All its parameters trained."""
    spec = ModelSpec(str(folder), adaptation=AdaptationSpec("full"))
    return load_model(spec, classes=CLASSES, kind="image", keep_head=True)


def make_student(kind: str, folder: Path, size: tuple[int, int] = (8, 8), polynomials: str = "scaled") -> Tensor:
    """Write the student of a :func:`tiny` model; returns the rows of the distillation, (32, 3, H, W)."""
    start = tiny(kind, folder / "start", size)
    teacher, student, tamed = full(start), full(start), full(start)
    recipe = Recipe(polynomials=polynomials)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        batch = {"pixel_values": torch.randn(32, 3, *size)}
    distiller = Distiller(teacher, student, recipe, new_head=True)
    distiller.scale_class_tokens(batch)
    for stage, steps in ((TAME, 120), (STATES, 20), (OUTPUTS, 10)):
        if stage == STATES:
            student.eval_mode()
            entries = distiller.measure(lambda: [batch])
            tamed.load(student.params())
            distiller.swap(entries, tamed)
        rule = torch.optim.Adam(student.live().values(), 3e-3)
        student.train_mode()
        for _ in range(steps):
            rule.zero_grad()
            distiller.loss(stage, batch).backward()
            rule.step()
    student.eval_mode()
    finish(distiller, lambda: [batch], 0.0)
    save(student, folder, new_head=True)
    for path in start.iterdir():
        path.unlink()
    start.rmdir()
    return batch["pixel_values"]
