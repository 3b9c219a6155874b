"""A cache on this machine's disk for rows that take long to prepare: features of a frozen backbone, tokens of texts.

Runs share the folder, so a second run reads the rows that the first run computed. A file's name is a SHA-256 of all
inputs that determine its content: the rows as read, the preprocessing, every frozen tensor, the device and the versions
of the libraries. A file is replaced in one step, so two runs may work at the same time. A file contains its own
SHA-256: if it is damaged, the rows are computed again. Features reveal as much as the rows themselves, so only the
owner can read the files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfm.core import storage
from fedfm.core.rows import Rows
from fedfm.data.table import Table
from fedfm.errors import InputError, RunError, reason_of
from fedfm.models import preprocessing
from fedfm.models.model import Model
from fedfm.models.model_kinds import is_dual_model, is_ours
from fedfm.version import __version__

FORMAT = 1
MOST = 20e9  # largest size of the folder in bytes, unless FEDFM_CACHE_GB is set
LEAST_WORK = 2 * 10**9  # features are cached only if rows times frozen parameters exceed this (1 to 2 s of one core)
LEAST_TEXTS = 20_000  # tokens are cached only for at least this many texts


def folder() -> Path | None:
    """Return the cache's folder: ``FEDFM_CACHE``, or else ``fedfm`` in ``XDG_CACHE_HOME`` or ``~/.cache``.

    The result is None if ``FEDFM_CACHE`` is set but empty.
    """
    given = os.environ.get("FEDFM_CACHE")
    if given is not None:
        return Path(given).expanduser() if given.strip() else None
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedfm"


def places() -> list[Path]:
    """Return the folders to which a run writes outside its own directory: for temporary files, and for this cache."""
    cache = folder()
    return [Path(tempfile.gettempdir()), *([] if cache is None else [cache])]


def limit() -> float:
    """Return the largest size of the folder in bytes: ``FEDFM_CACHE_GB``, or else :data:`MOST`.

    Raises:
        InputError: ``FEDFM_CACHE_GB`` is not a number of at least 0.
    """
    given = os.environ.get("FEDFM_CACHE_GB", "").strip()
    try:
        found = float(given) * 1e9 if given else MOST
    except ValueError:
        found = math.nan
    if not found >= 0:
        raise InputError(f'FEDFM_CACHE_GB = "{given}": expected a number of gigabytes, at least 0')
    return found


def trim(place: Path, most: float) -> None:
    """Remove the least recently used files of a cache folder until it has at most ``most`` bytes.

    A run that has already mapped a removed file can still use it. A run that needs it later computes the rows again. A
    file that another process removes at the same time is skipped.
    """
    found = []
    for path in place.glob("*/*.safetensors"):
        with contextlib.suppress(OSError):
            about = path.stat()
            found.append((about.st_mtime_ns, path.name, about.st_size, path))
    left = sum(size for _, _, size, _ in found)
    for _, _, size, path in sorted(found):
        if left <= most:
            return
        with contextlib.suppress(OSError):
            path.unlink()
            left -= size


class RowCache:
    """The cached rows of one model.

    Args:
        model: the model at the start of the run. Its trainable parameters do not affect the prepared rows.

    Raises:
        InputError: ``FEDFM_CACHE_GB`` is not a number.
    """

    def __init__(self, model: Model) -> None:
        self._model, self._folder, self._most = model, folder(), limit()
        self._names: dict[bytes, str] = {}

    def rows(self, table: Table, index: np.ndarray, make: Callable[[], Rows]) -> Rows:
        """Read the rows ``index`` from the disk; if they are not there, make and write them."""
        path = self.path(table, index)
        if path is None:
            return make()
        found = self._read(path, table, index)
        if found is not None:
            return found
        made = make()
        if (kept := _content_of(made)) is not None:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                storage.save(path, kept, 0o600, sync=False)
                trim(path.parents[1], self._most)
            except (OSError, RunError) as error:
                warnings.warn(f"prepared rows are not cached: {reason_of(error)}", RuntimeWarning, stacklevel=2)
                return made
            if made.tokens is not None:  # read them from the file now, so that the system can free the memory
                return self._read(path, table, index) or made
        return made

    def path(self, table: Table, index: np.ndarray) -> Path | None:
        """Return the path of these rows' file, whether or not it exists; None if such rows are not cached."""
        if self._folder is None or not len(index):
            return None
        kind = self._kind(table, len(index))
        if kind is None or self._preparation is None:
            return None
        from fedfm.runtime.row_identity import sha256_of_rows

        at = hashlib.sha256(np.ascontiguousarray(index, np.int64).data).digest()
        if at not in self._names:
            of_model = self._of_frozen if kind == "features" else ""
            parts = (FORMAT, __version__, kind, self._preparation, of_model, sha256_of_rows(table, index))
            self._names[at] = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return self._folder / kind / f"{self._names[at]}.safetensors"

    def notices(self, table: Table, parts: Sequence[np.ndarray]) -> list[str]:
        """Return a notice if an earlier run has cached some of the clients' training rows."""
        found = [path for path in (self.path(table, index) for index in parts) if path is not None and path.exists()]
        if not found:
            return []
        place = found[0].parent
        return [f"{place.name} of {len(found)} of {len(parts)} clients' training rows come from the cache {place}"]

    def _kind(self, table: Table, n: int) -> str | None:
        """Return the kind of content that is cached for n rows of the table: features, tokens or None."""
        model = self._model
        if not is_ours(model) or model.weights_overridden:
            return None
        if encodes(model):
            return "features" if table.kind in ("image", "text") and n * self._frozen_parameters >= LEAST_WORK else None
        plain = table.kind == "text" or model.task.packs(table.kind)
        return "tokens" if plain and n >= LEAST_TEXTS else None

    def _read(self, path: Path, table: Table, index: np.ndarray) -> Rows | None:
        found: Any = storage.load(path, mapped=True)
        if found is None:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # marks the file as just used, for trim()
        labels = None
        if not self._model.is_language_model:
            labels = preprocessing.labels_of(table, self._model.classes, index)
        targets = preprocessing.targets_of(table, self._model.classes, self._model.task, index)
        if "features" in found:
            return Rows({"features": found["features"], **targets}, labels=labels)
        from fedfm.core.tokens import Tokens

        tokens = Tokens.one_after_the_other(found["flat"].numpy(), found["length"].numpy())
        return Rows(targets, tokens=tokens, labels=labels, pad=found["pad"])

    @functools.cached_property
    def _preparation(self) -> str | None:
        from fedfm.runtime.row_identity import describe_preparation

        return describe_preparation(self._model)

    @functools.cached_property
    def _of_frozen(self) -> str:
        from fedfm.runtime.row_identity import sha256_of_frozen

        return sha256_of_frozen(self._model)

    @functools.cached_property
    def _frozen_parameters(self) -> int:
        return sum(p.numel() for n, p in self._model.module.named_parameters() if n not in self._model.layout.slots)


def encodes(model: Model) -> bool:
    """Whether the rows on which the model trains are features of a frozen part."""
    return model.images_fixed if is_dual_model(model) else model.adaptation == "head"


def _content_of(rows: Rows) -> dict[str, Any] | None:
    """Return the part of prepared rows that is written to the file; labels and texts are in the rows' source."""
    if set(rows.tensors) - {"targets"} == {"features"}:
        return {"features": rows.tensors["features"]}
    if rows.tokens is not None and not set(rows.tensors) - {"targets"} and not rows.token_arguments:
        return {
            "flat": rows.tokens.concatenate().int(),
            "length": torch.from_numpy(rows.tokens.length),
            "pad": rows.pad,
        }
    return None


def size(place: Path) -> tuple[int, int]:
    """Return the number of files and of bytes in a cache folder."""
    found = [path.stat().st_size for path in place.glob("*/*.safetensors")] if place.is_dir() else []
    return len(found), sum(found)
