"""Pretraining: central training of a foundation model on one data set, into a folder that experiments can name.

Mini-batch training of all parameters with the client optimisers of runs, without augmentation of pictures and with the
model's own dropout off, as everywhere in fedfm. The folder has transformers' format: ``config.json``,
``model.safetensors``, the image processor or the tokenizer, the class names; ``pretrain.json`` records how the model
was made. Until the end it holds checkpoints of epochs and no ``config.json``: a killed pretraining resumes with the
same bits, and no program can load an unfinished model.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm import seeds
from fedfm.api.model_folder import ModelFolder, claim, held_out, prepared
from fedfm.api.pretrain_spec import Pretraining
from fedfm.core import tasks
from fedfm.core.libraries import refuse
from fedfm.core.rows import Rows
from fedfm.data.load import load_table
from fedfm.data.table import Table, contents, fingerprint
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import Params, sha256_of
from fedfm.linalg.threads import torch_threads
from fedfm.models.architectures import tokenizer
from fedfm.models.model import Model
from fedfm.runtime.progress import EpochProgress
from fedfm.training.loop import flat_of
from fedfm.training.update_rules import Rule

ABOUT = "pretrain.json"
_OURS = (ABOUT, "checkpoint", "start", "export")


@refuse("model.name: a library fails on this model and these rows")
def pretrain(
    what: str | Path | Mapping[str, Any] | Pretraining, out: str | Path, *, watcher: EpochProgress | None = None
) -> dict[str, Any]:
    """Train a model and write its folder; resume if a killed pretraining with the same tables began it.

    Args:
        what: a TOML file, nested tables, or a :class:`Pretraining`.
        out: the folder: absent, empty, or begun by this pretraining.

    Returns:
        ``folder``, ``epochs``, ``parameters``, ``train_loss``, ``seconds``, ``params_sha256``; ``accuracy``, ``loss``,
        ``perplexity`` of the last epoch on the held-out rows (the source's val rows if it has some, else test rows),
        which select nothing.

    Raises:
        InputError: tables, data or model are wrong, or the folder holds something else.
        RunError: the loss is NaN or infinite.
    """
    if not isinstance(what, Pretraining):
        what = Pretraining.from_dict(what) if isinstance(what, Mapping) else Pretraining.load(what)
    watcher = watcher or EpochProgress()
    with claim(Path(out), ABOUT, "pretraining", what.to_dict(), what.spec.threads, _OURS) as place:
        try:
            return _Work(place, what).go(watcher)
        finally:
            watcher.finished()


class _Work:
    """One pretraining in its folder."""

    def __init__(self, place: ModelFolder, what: Pretraining) -> None:
        self.place, self.what, self.folder, self.state = place, what, place.folder, place.state

    def go(self, watcher: EpochProgress) -> dict[str, Any]:
        """Train from the newest undamaged checkpoint to the end."""
        if self.state["result"] is not None:
            return dict(self.state["result"])
        began = time.perf_counter()
        with torch_threads(self.state["threads"]):  # one model trains, so all cores are its own
            table = load_table(self.what.data, seed=self.what.spec.seed, task=self.what.model.task)
            model = self._model(table)
            self.place.same("data", fingerprint(table))
            self.place.same("model", model.fingerprint)
            rows, judged = prepared(model, table, table.rows("train")), model.prepare(table, held_out(table))
            if not len(rows):
                raise InputError(f"{table.source}: no training rows are left")
            self._train(model, rows, judged, watcher, began)
            return self._finish(model)

    def _model(self, table: Table) -> Model:
        """The model before training; with ``vocabulary_size``, of the same configuration with a new tokenizer."""
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
                f'model.name = "{model.name}": pretraining writes transformers\' folders, this is no such model'
            )
        return loaded

    def _train(self, model: Model, rows: Any, judged: Rows, watcher: EpochProgress, began: float) -> None:
        spec, n = self.what.spec, len(rows)
        flat = flat_of(model)
        rule = Rule(spec.local, flat.p, flat.places(model.undecayed))
        done = self.place.restore(model, rule)
        watcher.started(spec.local.epochs, done, -(-n // spec.local.batch_size))
        spent = self.state["history"][-1]["seconds"] if done else 0.0
        for epoch in range(done + 1, spec.local.epochs + 1):
            rule.eta = self.what.rate(epoch)
            order = seeds.generator(spec.seed, "pretrain", epoch).permutation(n)
            total = 0.0
            model.train_mode()
            for start in range(0, n, spec.local.batch_size):
                index = order[start : start + spec.local.batch_size]
                loss: Any = model.loss(rows.batch(index))
                loss.backward()
                rule.step(flat.p, flat.g)
                flat.g.zero_()
                total += float(loss.detach()) * len(index)
                watcher.step()
            model.eval_mode()
            if not math.isfinite(total):
                raise RunError(
                    f"epoch {epoch}: the loss is no longer a number; lower pretrain.local.learning_rate and give "
                    "another --out"
                )
            scores = model.evaluate(judged)
            line: dict[str, Any] = {"epoch": epoch, "learning_rate": rule.eta, "train_loss": total / n}
            line |= {key: scores.get(key) for key in ("accuracy", "loss", "perplexity")}
            line["seconds"] = round(spent + time.perf_counter() - began, 3)
            self.state["history"].append(line)
            self.place.commit(epoch, model, rule)
            watcher.epoch(line)

    def _finish(self, model: Model) -> dict[str, Any]:
        """Write the model's files and the result."""
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
        return self.place.close(result, ("checkpoint", "start", "export"))
