"""Pretraining: central training of a foundation model on one data set, into a folder that experiments can name.

Mini-batch training of all parameters with the client optimisers of runs, without augmentation of pictures and with the
model's own dropout off, as everywhere in fedfm. The folder has transformers' format: ``config.json``,
``model.safetensors``, the image processor or the tokenizer, the class names; ``pretrain.json`` records how the model
was made. Until the end it holds checkpoints of epochs and no ``config.json``: a killed pretraining resumes with the
same bits, and no program can load an unfinished model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfm import seeds
from fedfm.core import storage
from fedfm.core.rows import Batch, Rows
from fedfm.core.text import to_json
from fedfm.data.load import load_table
from fedfm.data.table import Table, fingerprint
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import Params, sha256_of
from fedfm.linalg.threads import torch_threads
from fedfm.models.architectures import tokenizer
from fedfm.models.model import Model
from fedfm.runtime.pretrain_spec import Pretraining
from fedfm.runtime.progress import EpochProgress
from fedfm.training.loop import Flat, flat_of
from fedfm.training.update_rules import Rule
from fedfm.version import __version__

ABOUT = "pretrain.json"
KEEP = 2  # checkpoints: the newest, and a fallback
IN_ADVANCE = 4 << 30  # largest number of bytes of rows that are prepared once; else each epoch prepares its batches
_OURS = (ABOUT, "checkpoint", "start", "export")


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
    fresh = not (Path(out) / ABOUT).exists()
    with _claim(Path(out), what) as work:
        try:
            return work.go(watcher)
        except InputError:
            if fresh and not work.checkpoints():
                storage.discard(work.folder, _OURS)
            raise
        finally:
            watcher.finished()


@contextlib.contextmanager
def _claim(folder: Path, what: Pretraining) -> Iterator[_Work]:
    """Lock the folder for this process, and read or begin its state."""
    about = folder / ABOUT
    if about.exists():
        try:
            state = json.loads(about.read_text(encoding="utf-8"))
            same = state["pretraining"] == what.to_dict()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{about} cannot be read: {error}; give another --out") from None
        if not same:
            raise InputError(f"{folder} holds another pretraining (see {ABOUT}); give another --out")
    else:
        if not storage.free(folder, ABOUT):
            raise InputError(f"{folder} is there and is not an empty folder; give another --out")
        threads = what.spec.threads or os.cpu_count() or 1
        state = {"fedfm": __version__, "pretraining": what.to_dict(), "threads": threads, "fingerprints": {}}
        state |= {"history": [], "result": None}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: cannot be made: {error.strerror}") from None
        _write(about, state)
    if state["result"] is not None:
        yield _Work(folder, what, state)
        return
    (folder / "checkpoint").mkdir(exist_ok=True)
    with open(folder / "checkpoint" / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{folder}: another process is pretraining here") from None
        storage.sweep(folder, ABOUT)
        yield _Work(folder, what, state)


def _write(path: Path, state: Mapping[str, Any]) -> None:
    storage.write_atomic(path, to_json(state, indent=1).encode() + b"\n")


class _Work:
    """One pretraining in its folder."""

    def __init__(self, folder: Path, what: Pretraining, state: dict[str, Any]) -> None:
        self.folder, self.what, self.state = folder, what, state

    def go(self, watcher: EpochProgress) -> dict[str, Any]:
        """Train from the newest undamaged checkpoint to the end."""
        if self.state["result"] is not None:
            return dict(self.state["result"])
        began = time.perf_counter()
        with torch_threads(self.state["threads"]):  # one model trains, so all cores are its own
            table = load_table(self.what.data, seed=self.what.spec.seed, task=self.what.model.task)
            model = self._model(table)
            self._same("data", fingerprint(table))
            self._same("model", model.fingerprint)
            held = table.rows("val") if len(table.rows("val")) else table.rows("test")
            rows, judged = _prepared(model, table, table.rows("train")), model.prepare(table, held)
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
            if table.kind not in ("passages", "text", "instruction"):
                raise InputError(f"pretrain.vocabulary_size: the data are of kind {table.kind}, expected text")
            start = self.folder / "start"
            if not start.exists():
                pieces = [table.inputs[i] for i in table.rows("train")]
                texts = (t for piece in pieces for t in ((piece,) if isinstance(piece, str) else piece))
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

    def _same(self, name: str, value: str) -> None:
        """Refuse to resume on other data or with another model."""
        if self.state["fingerprints"].setdefault(name, value) != value:
            raise InputError(f"{self.folder}: the {name} changed since this pretraining began")
        _write(self.folder / ABOUT, self.state)

    def _train(self, model: Model, rows: Any, judged: Rows, watcher: EpochProgress, began: float) -> None:
        spec, n = self.what.spec, len(rows)
        done, rule, flat = self._restore(model)
        watcher.started(spec.local.epochs, done, -(-n // spec.local.batch_size))
        spent = self.state["history"][-1]["seconds"] if done else 0.0
        for epoch in range(done + 1, spec.local.epochs + 1):
            rule.local = dataclasses.replace(spec.local, learning_rate=self.what.rate(epoch))
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
            line: dict[str, Any] = {"epoch": epoch, "learning_rate": rule.local.learning_rate, "train_loss": total / n}
            line |= {key: scores.get(key) for key in ("accuracy", "loss", "perplexity")}
            line["seconds"] = round(spent + time.perf_counter() - began, 3)
            self.state["history"].append(line)
            self._commit(epoch, model, rule)
            watcher.epoch(line)

    def _commit(self, epoch: int, model: Model, rule: Rule) -> None:
        m, v = (None if x is None else x.cpu() for x in (rule.m, rule.v))
        buffers = {name: buffer.cpu() for name, buffer in _buffers(model)}
        record = {"epoch": epoch, "w": model.params(), "buffers": buffers, "m": m, "v": v, "t": rule.t}
        storage.save(self.folder / "checkpoint" / f"epoch-{epoch:06d}.safetensors", record)
        _write(self.folder / ABOUT, self.state)
        for path in self.checkpoints()[:-KEEP]:
            path.unlink(missing_ok=True)

    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted((self.folder / "checkpoint").glob("epoch-*.safetensors"))

    def _restore(self, model: Model) -> tuple[int, Rule, Flat]:
        """(number of finished epochs, the optimiser, the vectors that it updates)."""
        flat = flat_of(model)
        rule = Rule(self.what.spec.local, flat.p)
        for path in reversed(self.checkpoints()):
            record = storage.load(path)
            if record is None or record["epoch"] > len(self.state["history"]):
                path.unlink(missing_ok=True)  # damaged, or its line was not written: the epoch is repeated
                continue
            model.load(record["w"])
            for name, buffer in _buffers(model):
                buffer.copy_(record["buffers"][name])
            rule.t = record["t"]
            for mine, saved in ((rule.m, record["m"]), (rule.v, record["v"])):
                if mine is not None:
                    mine.copy_(saved)
            self.state["history"] = self.state["history"][: record["epoch"]]
            return int(record["epoch"]), rule, flat
        self.state["history"] = []
        return 0, rule, flat

    def _finish(self, model: Model) -> dict[str, Any]:
        """Write the model's files, ``config.json`` last, and the result; remove temporary files."""
        from fedfm.models.export import export

        w: Params = model.params()
        half = self.folder / "export"
        shutil.rmtree(half, ignore_errors=True)
        export(model, w, "hf", half)
        for path in sorted(half.iterdir(), key=lambda p: p.name == "config.json"):
            os.replace(path, self.folder / path.name)
        last = self.state["history"][-1]
        result = {
            "folder": str(self.folder),
            "epochs": last["epoch"],
            "parameters": sum(p.numel() for p in model.module.parameters()),
            **{key: last[key] for key in ("accuracy", "loss", "perplexity", "train_loss", "seconds")},
            "params_sha256": sha256_of({"": w}),
        }
        self.state["result"] = result
        _write(self.folder / ABOUT, self.state)
        for name in ("checkpoint", "start", "export"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        return result


def _buffers(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that are no parameters, e.g. batch norm's counters of batches."""
    return ((name, b) for name, b in model.module.named_buffers() if name not in model.layout.slots)


@dataclass(frozen=True)
class _Lazy:
    """Rows that are prepared batch by batch."""

    model: Model
    table: Table
    index: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, index: np.ndarray) -> Batch:
        return self.model.prepare(self.table, self.index[index]).batch(range(len(index)))


def _prepared(model: Model, table: Table, index: np.ndarray) -> Rows | _Lazy:
    """All rows at once if they fit, else batch by batch."""
    if table.kind == "image" and len(index):
        row = sum(x.numel() * x.element_size() for x in model.prepare(table, index[:1]).tensors.values())
        if row * len(index) > IN_ADVANCE:
            return _Lazy(model, table, index)
    return model.prepare(table, index)
