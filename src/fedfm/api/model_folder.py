"""The folder that a central training, `fedfm pretrain` or `fedfm distil`, fills with a model.

Until the end it has checkpoints of epochs and no ``config.json``. So a training that was killed resumes with the same
bits, and no program can load an unfinished model.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfm.core import new_folders, storage
from fedfm.core.locks import Lock
from fedfm.core.rows import Rows
from fedfm.core.text import to_json
from fedfm.data.table import Table
from fedfm.errors import InputError, reason_of
from fedfm.models.model import Model
from fedfm.training.update_rules import Rule
from fedfm.version import __version__

LOCK = "lock"  # file in checkpoint/
KEEP = 2  # number of checkpoints that are kept: the newest one, and one as a reserve
IN_ADVANCE = 4 << 30  # if prepared rows take more bytes, each epoch prepares its batches again


class ModelFolder:
    """The folder of one training.

    Attributes:
        about: the JSON file that records how the model was made.
        state: content of this file: ``history`` has a line for each epoch; ``result`` is None until the training ends.
    """

    def __init__(self, folder: Path, about: str, noun: str, state: dict[str, Any]) -> None:
        self.folder, self.about, self.noun, self.state = folder, folder / about, noun, state

    def write(self) -> None:
        """Write the state."""
        storage.write_atomic(self.about, to_json(self.state, indent=1).encode() + b"\n")

    def same(self, name: str, value: str) -> None:
        """Refuse to resume with other data or another model."""
        if self.state["fingerprints"].setdefault(name, value) != value:
            raise InputError(f"{self.folder}: the {name} changed since this {self.noun} began")
        self.write()

    def checkpoints(self) -> list[Path]:
        """The files of the checkpoints, oldest first."""
        return sorted((self.folder / "checkpoint").glob("epoch-*.safetensors"))

    def commit(self, epoch: int, model: Model, rule: Rule) -> None:
        """Store the state after an epoch, whose line is the last one in the history."""
        m, v = (None if x is None else x.cpu() for x in (rule.m, rule.v))
        buffers = {name: buffer.cpu() for name, buffer in _buffers(model)}
        record = {"epoch": epoch, "w": model.params(), "buffers": buffers, "m": m, "v": v, "t": rule.t}
        storage.save(self.folder / "checkpoint" / f"epoch-{epoch:06d}.safetensors", record)
        self.write()
        for path in self.checkpoints()[:-KEEP]:
            path.unlink(missing_ok=True)

    def restore(self, model: Model, rule: Rule) -> int:
        """Load model and optimiser as they were after the last finished epoch; return the number of finished epochs."""
        for path in reversed(self.checkpoints()):
            record = storage.load(path)
            if record is None or record["epoch"] > len(self.state["history"]):
                path.unlink(missing_ok=True)  # it is damaged, or its line was not written, so the epoch is repeated
                continue
            model.load(record["w"])
            for name, buffer in _buffers(model):
                buffer.copy_(record["buffers"][name])
            rule.t = record["t"]
            for mine, saved in ((rule.m, record["m"]), (rule.v, record["v"])):
                if mine is not None:
                    mine.copy_(saved)
            self.state["history"] = self.state["history"][: record["epoch"]]
            return int(record["epoch"])
        self.state["history"] = []
        return 0

    def half(self) -> Path:
        """Path of the folder for the model's files until :meth:`close`; an old folder there is removed."""
        path = self.folder / "export"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def close(self, result: dict[str, Any], temporary: tuple[str, ...]) -> dict[str, Any]:
        """Move the model's files into the folder, ``config.json`` last; write the result; remove the folders
        ``temporary``.
        """
        new_folders.move_up(self.folder / "export", self.folder)
        self.state["result"] = result
        self.write()
        for name in temporary:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        return result


@contextlib.contextmanager
def claim(
    folder: Path, about: str, noun: str, tables: dict[str, Any], threads: int, own: tuple[str, ...]
) -> Iterator[ModelFolder]:
    """Context manager: lock the folder for this process, and read or create its state.

    Args:
        noun: the key of the tables in the state, and the name of the training in messages.
        threads: number of threads; 0: one per core.
        own: files and folders that the training makes; they are removed if the input is refused before the first
            checkpoint.

    Raises:
        InputError: the folder contains something else, or another process trains in it.
    """
    work = _read_folder(folder, about, noun, tables, threads)
    if work.state["result"] is not None:
        yield work
        return
    lock = Lock(folder / "checkpoint" / LOCK)
    try:
        lock.path.parent.mkdir(parents=True, exist_ok=True)
        taken = lock.take()
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror}") from None
    if not taken:
        raise InputError(f"{folder}: another process works in this folder")
    try:
        work = _read_folder(folder, about, noun, tables, threads)  # another process may have changed the folder since
        if work.state["result"] is not None:
            storage.discard(lock.path.parent, (), lock.path)
            yield work
            return
        fresh = not work.about.exists()
        if fresh:
            work.write()
        storage.sweep(folder, about)
        try:
            yield work
        except InputError:
            if fresh and not work.checkpoints():
                storage.discard(folder, own, lock.path)
            raise
    finally:
        lock.release()


def _read_folder(folder: Path, about: str, noun: str, tables: dict[str, Any], threads: int) -> ModelFolder:
    """The state of the training in the folder, or a new state if none has begun. This changes nothing.

    Raises:
        InputError: the folder contains something else.
    """
    path = folder / about
    if path.exists():
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            same = state[noun] == tables
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} cannot be read: {reason_of(error)}; give another --out") from None
        if not same:
            raise InputError(f"{folder} contains another {noun} (see {about}); give another --out")
    else:
        if not storage.free(folder, about, ("checkpoint",), LOCK):
            raise InputError(f"{folder} exists and is not an empty folder; give another --out")
        state = {"fedfm": __version__, noun: tables, "threads": threads or os.cpu_count() or 1, "fingerprints": {}}
        state |= {"history": [], "result": None}
    return ModelFolder(folder, about, noun, state)


def _buffers(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that are not parameters, such as batch norm's counts of batches."""
    return ((name, b) for name, b in model.module.named_buffers() if name not in model.layout.slots)


def held_out(table: Table) -> np.ndarray:
    """Indices of the validation rows if the table has some; otherwise of its test rows."""
    return table.rows("val") if len(table.rows("val")) else table.rows("test")


def fits(model: Model, table: Table, index: np.ndarray) -> bool:
    """Whether the memory has room for all these rows once they are prepared."""
    if table.kind != "image" or not len(index):
        return True
    row = sum(x.nbytes for x in model.prepare(table, index[:1], most=math.inf).tensors.values())
    return row * len(index) <= IN_ADVANCE


def prepare_rows(model: Model, table: Table, index: np.ndarray) -> Rows:
    """All rows at once if the memory has room for them; otherwise rows that are prepared batch by batch."""
    return model.prepare(table, index, most=IN_ADVANCE)
