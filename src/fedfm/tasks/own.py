"""The task of a user's own module, whose loss and outputs are the user's: no experiment file names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from fedfm.tasks.task import RowKind, Task


@dataclass(frozen=True)
class Own(Task):
    """Rows, loss and outputs of a Python user's module."""

    name: ClassVar[str] = "own"
    in_files: ClassVar[bool] = False
    kinds: ClassVar[tuple[str, ...]] = ("own",)
    own_kind: ClassVar[RowKind | None] = RowKind("own", "rows of your own", remote=False, wording=False)
    means_over_tokens: ClassVar[bool] = True
    loss_is_opaque: ClassVar[bool] = True
    row_means: ClassVar[Mapping[str, str]] = MappingProxyType({"accuracy": "right", "loss": "loss_of_rows"})
    sums: ClassVar[tuple[str, ...]] = ("rows", *row_means.values())
