"""Rows and a tiny model for each task, as the tests of all tasks need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_clip
import tiny_segformer
import tiny_seq2seq
import tiny_text
import tiny_vision
from fedfm.core import tasks
from small import jsonl

NAMES = tuple(task.name for task in tasks.available())
WORDS = ("small grey fish", "old bird under sky", "leaf and root", "the quiet river", "a wing near water")

MODELS = {"sequence_to_sequence": "t5"}  # of tasks that neither a LLaMA nor a BERT learns
SAVE = {"llama": tiny_text.save_llama, "bert": tiny_text.save_bert, "t5": tiny_seq2seq.save_t5}


def rows(name: str) -> list[dict[str, Any]]:
    """Rows of a task as an experiment reads them."""
    made = {
        "classification": lambda i, text: {"text": text, "label": ("fish", "bird")[i % 2]},
        "language_modelling": lambda i, text: {"text": text},
        "instruction": lambda i, text: {"instruction": text, "output": WORDS[(i + 1) % len(WORDS)]},
        "preference": lambda i, text: {"prompt": text, "chosen": f"old {text}", "rejected": "grey"},
        "multi_label": lambda i, text: {
            "text": text,
            "label": [name for name, has in (("odd", i % 2), ("third", i % 3 == 0)) if has],
        },
        "embedding": lambda i, text: {"anchor": f"{text} {WORDS[i % 3]}", "positive": f"old {text} {WORDS[i % 3]}"},
        "regression": lambda i, text: {"text": text, "label": i % 4 - 1.5},
        "segmentation": lambda i, text: {"image": f"images/{i:03d}.png", "mask": f"masks/{i:03d}.png"},
        "token_classification": lambda i, text: {
            "tokens": text.split(),
            "tags": ["B-ANIMAL" if word in ("fish", "bird") else "O" for word in text.split()],
        },
        "sequence_to_sequence": lambda i, text: {"instruction": text, "output": WORDS[(i + 1) % len(WORDS)]},
        "visual_instruction": lambda i, text: tiny_vision.one_conversation(i),
    }[name]
    return [made(i, f"{WORDS[i % len(WORDS)]} {WORDS[i % 4]}") for i in range(20)]


class Places:
    """Makes the rows and the tiny model of a task once: ``places(name)`` is (experiment's [data], [model])."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, tuple[Path, Path]] = {}

    def __call__(self, name: str) -> tuple[Path, Path]:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> tuple[Path, Path]:
        task, path = tasks.find(name), self._folder / f"{name}.jsonl"
        model = self._folder / ("llama" if task.is_language_model else MODELS.get(name, "bert"))
        if task.two_encoders:
            path, model = tiny_clip.pictures(self._folder / "pictures.npz"), self._folder / "clip"
            tiny_clip.save("clip", model)
        elif name == "segmentation":
            model = self._folder / "segformer"
            tiny_segformer.folder(self._folder, {"": 20})
            tiny_segformer.save(model)
            jsonl(path, rows(name))
        else:
            jsonl(path, rows(name))
        if task.images_in_texts:
            model = self._folder / "llava"
            tiny_vision.save_llava(model)
        if not model.exists():
            SAVE[model.name](model)
        return path, model


def tables(place: tuple[Path, Path], name: str, clients: int = 2) -> dict[str, Any]:
    """One round of LoRA on these rows."""
    path, model = place
    return {
        "data": {"path": str(path), "partition": {"name": "iid", "clients": clients}},
        "model": {"name": str(model), "task": name, "max_length": 16, "adaptation": {"name": "lora", "rank": 2}},
        "method": {"name": "fedavg", "rounds": 1, "local": {"name": "sgd", "learning_rate": 0.1, "batch_size": 8}},
        "run": {"seed": 1, "workers": 1},
    }
