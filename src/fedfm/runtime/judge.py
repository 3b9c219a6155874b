"""Compute the metrics of a model on the global test rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.capabilities import HiddenModel, Judge, Predictor, has
from fedfm.core.client import ClientId
from fedfm.core.method import Method
from fedfm.core.transcript import MANY
from fedfm.linalg.params import Params
from fedfm.models import metrics
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.predictions import logits, personal, scores
from fedfm.training import packed

CONFUSION, _TABLED = "confusion", 50  # name of the confusion matrix, and largest number of classes for it
CLASS_COUNTS, _COUNTED = "class_counts", 1000  # name of the counts by class, and largest number of classes for them


def judge(
    population: Partitioned,
    method: Method[Any],
    ask: Callable[[Params], Mapping[ClientId, Tensor]] | None = None,
    client_scores: Callable[[Params], Mapping[ClientId, Mapping[str, Any]]] | None = None,
) -> Judge | None:
    """Return a function that computes a method's metrics on the global test rows; None if there are no such rows.

    In two cases the rows are evaluated in pieces, one for each client's test rows. This avoids computing rows twice:

    - Logits are cached (see :mod:`fedfm.training.packed.predictor`). A process that has evaluated its clients with the
      same parameters already has the logits of their pieces.
    - Scores of language models are sums over rows or tokens. An engine that has the clients' scores for these
      parameters passes them by ``client_scores``.

    All engines use the same pieces, so they compute the same bits.

    In two cases rows are computed a second time, since the clients' scores do not determine the global scores. With
    running text, each client's texts are joined and cut into blocks, which differ from the blocks of all test texts.
    The other case has class labels, several clients and no cached logits: ``balanced_accuracy`` and ``macro_f1`` are
    not means over rows, and clients do not report logits. If there is only one client, its scores are the global
    scores, except for the counts by class.

    A task that trains only some classes adds the metrics of :func:`fedfm.models.base_and_new.base_and_new`.

    Args:
        ask: returns cached logits by piece; the logits of all other pieces are computed here.
        client_scores: returns the clients' own scores for exactly these parameters; empty if there are none.
    """
    if not len(population.federated.test):
        return None

    classes = len(population.federated.table.classes)
    plain = not population.model.is_language_model and population.federated.table.labels is not None
    own_scores = (
        getattr(population.model, "scores_function", None) is not None
    )  # a user's own scores may not be means over rows
    tabled = plain and 1 < classes <= _COUNTED and not own_scores
    alike = _clients_score_alike(population, method)

    def counts(said: Tensor, labels: Tensor) -> dict[str, Any]:
        if classes <= _TABLED:
            return {CONFUSION: metrics.confusion(said, labels)}
        from fedfm.models import class_counts

        return {CLASS_COUNTS: class_counts.count(said, labels)}

    def valid_scores(w: Params) -> Mapping[ClientId, Mapping[str, Any]]:
        honest = population.attackers is None  # an attacker's scores are not used
        return client_scores(w) if client_scores is not None and alike and honest else {}

    def whole(w: Params, by_class: bool) -> dict[str, Any]:
        if not (tabled and by_class):
            found = valid_scores(w)
            if (
                len(population.clients) <= MANY
                and len(population.pieces) == 1
                and (sole := next(iter(population.pieces))) in found
            ):
                return dict(found[sole])  # one client has all rows
        if not tabled:
            return scores(method, population.model, w, population.test)
        said, labels = logits(method, population.model, w, population.test), population.test.labels
        assert labels is not None  # noqa: S101 - for mypy; it follows from tabled
        return metrics.scores(said, labels) | counts(said, labels)

    def judge_by_logits(w: Params, by_class: bool) -> dict[str, Any]:
        known = ask(w) if ask is not None else {}
        pieces = population.pieces
        parts = [known[c] if c in known else logits(method, population.model, w, population.piece(c)) for c in pieces]
        index = np.concatenate([population.federated.test[:0], *pieces.values()])
        said, labels = torch.cat(parts), population.labels(index)
        return metrics.scores(said, labels) | (counts(said, labels) if tabled else {})

    def judge_by_sums(w: Params, by_class: bool) -> dict[str, Any]:
        found, pieces = valid_scores(w), population.pieces
        parts = [found[c] if c in found else scores(method, population.model, w, population.piece(c)) for c in pieces]
        joined: dict[str, Any] = population.model.task.join_scores(parts)
        return joined

    def with_new(w: Params, by_class: bool) -> dict[str, Any]:
        from fedfm.models.base_and_new import base_and_new

        said = logits(method, population.model, w, population.test)
        labels = population.labels(population.federated.test)
        return metrics.scores(said, labels) | base_and_new(said, labels, base or 0)

    judged, base = whole, population.model.task.trained_classes
    if base is not None:
        judged = with_new
    elif by_pieces(population, method):
        judged = judge_by_logits
    elif alike and not own_scores and population.model.is_language_model and not population.trains_on_blocks:
        judged = judge_by_sums  # without joined texts, the clients' rows are the rows of the pieces

    def judge_with_trigger(w: Params, /, *, by_class: bool = True) -> dict[str, Any]:
        found = judged(w, by_class)
        attackers, triggered = population.attackers, population.trigger_rows
        if attackers is not None and triggered is not None:
            target = attackers.attack.target_of(population.federated.table.classes)
            said = logits(method, population.model, w, triggered)
            found = {**found, "attack_success": float((said.argmax(-1) == target).float().mean())}
        return found

    return judge_with_trigger


def _has_own_predictions(method: Method[Any]) -> bool:
    """Whether the method has its own way to predict, other than by the model with the method's parameters."""
    return has(method, Predictor, "logits") or has(method, Predictor, "install")


def by_pieces(population: Partitioned, method: Method[Any]) -> bool:
    """Whether :func:`judge` works piece by piece.

    It does if the model caches logits and the method's predictions depend only on these logits.
    """
    plain = not _has_own_predictions(method) and population.client_model is not None
    return plain and population.federated.table.labels is not None and packed.applies(population.model, "exact")


def _clients_score_alike(population: Partitioned, method: Method[Any]) -> bool:
    """Whether all clients score the same model, by the same computation as the server."""
    other = _has_own_predictions(method) or isinstance(method, HiddenModel) or personal(method)
    return not other and population.client_model is not None
