"""Pretraining: central training of a foundation model on one data set, into a folder that experiments can name.

All parameters are trained in mini-batches, with the client optimisers of runs. Images are not augmented, and the
model's own dropout is off, as everywhere in fedfm. The folder has the format of transformers: ``config.json``,
``model.safetensors``, the image processor or the tokenizer, and the class names. ``pretrain.json`` records how the
model was made. Until the end the folder has checkpoints of epochs and no ``config.json``. So a pretraining that was
killed resumes with the same bits, and no program can load an unfinished model.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.api.central_training import CentralWork
from fedfm.api.model_folder import held_out, prepare_rows
from fedfm.api.pretrain_spec import Pretraining
from fedfm.core import tasks
from fedfm.core.libraries import refuse
from fedfm.core.rows import Rows
from fedfm.data.load import load_table
from fedfm.data.table import Table, contents
from fedfm.errors import InputError
from fedfm.linalg.params import Params, sha256_of
from fedfm.models.architectures import tokenizer
from fedfm.models.model import Model
from fedfm.runtime.progress import EpochProgress
from fedfm.training.loop import flat_of
from fedfm.training.update_rules import Rule

ABOUT = "pretrain.json"


@refuse("model.name: a library fails on this model and these rows")
def pretrain(
    what: str | Path | Mapping[str, Any] | Pretraining, out: str | Path, *, watcher: EpochProgress | None = None
) -> dict[str, Any]:
    """Train a model and write its folder. A second call with the same arguments resumes a pretraining that was killed.

    Args:
        what: a TOML file, nested tables, or a :class:`Pretraining`.
        out: the folder; it does not exist, is empty, or was begun by this pretraining.

    Returns:
        ``folder``, ``epochs``, ``parameters``, ``train_loss``, ``seconds``, ``params_sha256``; ``accuracy``, ``loss``
        and ``perplexity`` of the last epoch on the held-out rows. These are the source's validation rows if it has
        some, or else its test rows; they are not used to select anything.

    Raises:
        InputError: tables, data or model are invalid, or the folder contains something else.
        RunError: the loss is NaN or infinite.
    """
    return _PretrainWork.make(what, out, watcher)


class _PretrainWork(CentralWork[Pretraining]):
    """One pretraining and its folder."""

    kind = Pretraining
    about = ABOUT
    temporary = ("checkpoint", "start")

    def run(self) -> dict[str, Any]:
        table = load_table(self.what.data, seed=self.what.spec.seed, task=self.what.model.task)
        model = self._model(table)
        self.same(table, model)
        rows, judged = prepare_rows(model, table, table.rows("train")), model.prepare(table, held_out(table))
        if not len(rows):
            raise InputError(f"{table.source}: no training rows are left")
        self._train(model, rows, judged)
        return self._finish(model)

    def _model(self, table: Table) -> Model:
        """The model before training. With ``vocabulary_size`` it is the named architecture with a new tokenizer."""
        from fedfm.models.hub import architecture
        from fedfm.models.load import load_model

        spec, model = self.what.spec, self.what.model
        if spec.vocabulary_size is not None:
            if table.kind != "text" and tasks.row_kind(table.kind) is None:
                raise InputError(f"pretrain.vocabulary_size: the data are of kind {table.kind}, expected text")
            start = self.folder / "start"
            if not start.exists():
                pieces = [table.inputs[i] for i in table.rows("train")]
                texts = (t for piece in pieces for t in contents(piece))
                made = tokenizer.train(texts, spec.vocabulary_size, spec.vocabulary)
                half = self.folder / ".start"
                shutil.rmtree(half, ignore_errors=True)
                architecture(model, made).save_pretrained(half)
                made.save_pretrained(half)
                os.replace(half, start)
            model = dataclasses.replace(model, name=str(start), options=None)
        dim = table.inputs.shape[1] if table.kind == "features" else None
        loaded = load_model(model, classes=table.classes, kind=table.kind, seed=spec.seed, feature_dim=dim)
        if not hasattr(loaded.module, "save_pretrained"):
            raise InputError(
                f'model.name = "{model.name}": pretraining writes folders for transformers, but this is not a model '
                f"of transformers"
            )
        return loaded

    def _train(self, model: Model, rows: Rows, judged: Rows) -> None:
        spec, n = self.what.spec, len(rows)
        flat = flat_of(model)
        rule = Rule(spec.local, flat.p, flat.places(model.no_weight_decay))
        done = self.restore(model, rule)
        self.watcher.started(spec.local.epochs, done, -(-n // spec.local.batch_size))
        cure = "lower pretrain.local.learning_rate and give another --out"
        for epoch in range(done + 1, spec.local.epochs + 1):
            rule.eta = self.what.rate(epoch)
            mean = self.epoch(
                epoch, n, spec.local.batch_size, model, flat, rule, lambda index, _: model.loss(rows.batch(index)), cure
            )
            scores = model.evaluate(judged)
            line: dict[str, Any] = {"epoch": epoch, "learning_rate": rule.eta, "train_loss": mean}
            self.commit(line | {key: scores.get(key) for key in ("accuracy", "loss", "perplexity")}, model, rule)

    def _finish(self, model: Model) -> dict[str, Any]:
        """Write the model's files, and the result."""
        from fedfm.models.export import export

        w: Params = model.params()
        export(model, w, "hf", self.place.half())
        last = self.state["history"][-1]
        result = {
            "folder": str(self.folder),
            "epochs": last["epoch"],
            "parameters": sum(p.numel() for p in model.module.parameters()),
            **{key: last[key] for key in ("accuracy", "loss", "perplexity", "train_loss", "seconds")},
            "params_sha256": sha256_of({"": w}),
        }
        return self.close(result)
