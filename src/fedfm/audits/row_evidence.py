"""Compute the scores by which membership attacks on a model compare single rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedfm.audits.inference.rates import Array
from fedfm.audits.inference.shadow_ratio import confidence
from fedfm.core import tasks
from fedfm.core.method import Method
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.models.model import Model
from fedfm.runtime.predictions import apply_model, logits
from fedfm.runtime.run_directory import Run

TEXT_TASKS = ("language_modelling", "instruction", "sequence_to_sequence")
BATCH = 16  # number of texts that are computed at once


def task_of(run: Run) -> str | None:
    """The name of the run's task; None if neither the experiment nor the model's kind says it."""
    kind = (run.manifest.get("model") or {}).get("kind")
    return run.experiment.model.task or (tasks.implied_task(kind).name if kind else None)


def writes_texts(run: Run) -> bool:
    """Whether the run trains a model that writes texts, and an attacker can compare single rows."""
    return task_of(run) in TEXT_TASKS and unreadable(run) is None


def unreadable(run: Run) -> str | None:
    """Why no attacker can compare single rows of this run; None if an attacker can."""
    method, task = run.experiment.method, task_of(run)
    if method.needs.model == "server":
        return "the model stays at the server, and only clients read their rows"
    if task is not None and not tasks.find(task).compared_by_row:
        known = ", ".join(tasks.names(lambda task: task.compared_by_row))
        why = f": {reason}" if (reason := tasks.find(task).mixes_rows) else ""
        return f"it compares rows of the tasks {known}, but this run's task is {task}{why}"
    return None


def no_round(run: Run) -> str | None:
    """A text that says that the run has no round, so that no row can be attacked; None if it has rounds."""
    return None if run.manifest["result"]["rounds"] else "the run has no round"


def evidence(method: Method[Any], model: Model, w: Params, rows: Rows) -> Array:
    """Scores (n,) of rows; a higher score means "trained on".

    - Rows with labels: phi = log(p_y / (1 - p_y)).
    - Texts: the negative mean loss of a token.
    - A user's module that is not a classifier: its negative loss.

    Yeom et al. (arXiv:1709.01604) compare the loss, which is a monotone function of phi.
    """
    if not len(rows):
        return np.zeros(0)
    if rows.labels is not None and not model.is_language_model:
        return confidence(logits(method, model, w, rows).numpy(), rows.labels.numpy())
    found = []
    with apply_model(method, model, w, rows) as judged, model.evaluating():
        if model.task.loss_is_opaque:
            return np.array([-float(model.loss(judged.batch([i]))) for i in range(len(judged))])
        for batch in (judged.to_padded() if judged.tokens is not None else judged).batches(BATCH):
            sums, counts = model.task.row_losses(model, batch)
            found.append(-(sums / counts.clamp(min=1)).cpu().double().numpy())
    return np.concatenate(found)


def losses(found: Array, labelled: bool) -> Array:
    """Losses (n,) from scores of :func:`evidence`; with labels they are log(1 + e^-phi)."""
    return np.asarray(np.logaddexp(0.0, -found)) if labelled else -found


def by_class(scores: Array, labels: Array | None) -> Array:
    """Scores minus the median of their class.

    The median is over members and strangers together, so it favours neither. Without labels, all rows count as one
    class.
    """
    labels = np.zeros(len(scores)) if labels is None else labels
    done = scores.copy()
    for c in np.unique(labels):
        done[labels == c] -= np.median(scores[labels == c])
    return done
