"""Scores of a user's module on rows: the user's loss, the accuracy of a classifier, and a Trainer's own figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.metric_names import METRICS
from fedfm.core.rows import Rows
from fedfm.models.batches import batch_of
from fedfm.models.memory_budget import in_halves, warn
from fedfm.models.metrics import nothing, scores

if TYPE_CHECKING:
    from fedfm.models.user.scored_module import ScoredModule
    from fedfm.models.user.trainer_figures import TrainersFigures
    from fedfm.models.wrap import WrappedModel


def scores_of(
    given: ScoredModule, model: WrappedModel, rows: Rows, size: int, classes: int, figures: TrainersFigures | None
) -> dict[str, Any]:
    """Scores as in :func:`fedfm.models.metrics.evaluate`, with the user's loss, which is a mean over rows.

    Args:
        size: largest number of rows in a batch.
        classes: number of logits of a classifier; 0 for other modules.
        figures: what computes ``metrics``, the Trainer's own figures; None if the Trainer has none.
    """
    if not len(rows):
        return nothing()

    def sums(size: int) -> tuple[float, list[Tensor], list[Tensor], Any]:
        total, outputs, targets = 0.0, [], []
        collected = None if figures is None else figures.collect()
        for start in range(0, len(rows), size):
            index = range(start, min(start + size, len(rows)))
            batch = batch_of(model.device, rows, index)
            if collected is None:
                loss, logits = given.outcome(given.module, batch)
            else:
                loss, logits = collected.add(batch, last=index.stop == len(rows), classes=classes)
            total += float(loss) * len(index)
            if classes:
                outputs.append(logits.float().cpu())
                targets.append(batch["labels"].cpu().long())
        return total, outputs, targets, collected

    with torch.random.fork_rng(devices=[]), model.evaluating():
        (total, outputs, targets, collected), _ = in_halves(given.at_once(min(size, len(rows))), sums, warn)
    found = scores(torch.cat(outputs), torch.cat(targets)) if classes else nothing(len(rows))
    own = {} if collected is None else {METRICS: collected.figures_or_none()}
    known = np.isfinite(total)
    found |= {"loss": total / len(rows) if known else None, "rows": len(rows), "loss_of_rows": total if known else None}
    return found | own
