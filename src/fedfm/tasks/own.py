"""The task of a user's own module, which defines its loss and outputs; no experiment file can name this task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from fedfm.core.metric_names import METRICS
from fedfm.tasks.task import RowKind, Scores, Task


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
    figures: ClassVar[tuple[str, ...]] = (METRICS,)
    sums: ClassVar[tuple[str, ...]] = ("rows", *row_means.values())

    def join_scores(self, parts: Sequence[Mapping[str, Any]]) -> Scores:
        """As for every task; figures of a Trainer have no sums, so they become means over clients, weighted by rows."""
        found, known = super().join_scores(parts), [part for part in parts if part.get("n") and part.get(METRICS)]
        if known:
            from fedfm.models.user.trainer_figures import join

            found[METRICS] = join([(part["n"], part[METRICS]) for part in known])
        return found

    def remarks(self, figures: Mapping[str, Any]) -> list[str]:
        failed = [client for client, found in (figures.get(f"client_{METRICS}") or {}).items() if found is None]
        if not failed:
            return []
        return [f"compute_metrics fails on the test rows of {', '.join(failed)}: their figures are null"]
