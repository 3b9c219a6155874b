"""Compare a recovered model with the true one by features, a linear probe and scores."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedfm import seeds
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.runtime.partitioned import Partitioned

TESTED, FITTED, PASSAGES = (
    300,
    400,
    8,
)  # numbers of test rows, of rows to fit the probe, and of a language model's passages
RIDGE = 1e-3  # ridge penalty, as a fraction of the mean variance of the features


class Ability(NamedTuple):
    """Scores of one model on this run's rows.

    Attributes:
        cosine: mean over test rows of the cosine between the model's centred features and the true model's; for a
            language model, logits take the place of features.
        probe: accuracy of a linear classifier on the features, fitted to clients' training rows; None without classes.
        accuracy, perplexity: scores of the model itself; None if the server mixes only some trainable entries.
    """

    cosine: float
    probe: float | None
    accuracy: float | None
    perplexity: float | None


class Fidelity:
    """Evaluates models on rows of an experiment.

    Args:
        population: the models are scored on its test rows, and the probe is fitted to its training rows.
        true: the true model.
        complete: whether the server mixes all trainable entries. Then ``true`` is the foundation model itself.
    """

    def __init__(self, population: Partitioned, true: Params, *, complete: bool, seed: int) -> None:
        self._population, self._model, self._complete = population, population.model, complete
        rng = seeds.generator(seed, "audit", "fidelity")
        test = population.federated.test
        if not len(test):
            test = np.concatenate([c.test for _, c in sorted(population.federated.clients.items())])
        train = np.concatenate([c.train for _, c in sorted(population.federated.clients.items())])
        tested, fitted = (PASSAGES, 0) if population.model.is_language_model else (TESTED, FITTED)
        self._test = population.rows(np.sort(rng.permutation(test)[:tested]))
        self._train = population.rows(np.sort(rng.permutation(train)[:fitted]))
        self._true_model = true

    @cached_property
    def _true(self) -> Tensor:
        return _center(self._features(self._true_model, self._test))

    def ability(self, w: Params) -> Ability:
        """Score a model with these parameters. If its features are constant, the cosine is 0."""
        scores: dict[str, Any] = {}
        if self._complete:
            self._model.load(w)
            scores = self._model.evaluate(self._test)
        features = self._features(w, self._test)
        cosine = float(torch.nn.functional.cosine_similarity(_center(features), self._true, dim=1).mean())
        return Ability(cosine, self._probe(w, features), scores.get("accuracy"), scores.get("perplexity"))

    def _probe(self, w: Params, tested: Tensor) -> float | None:
        """Accuracy of a ridge regression from standardised features to one-hot classes, in float64."""
        if self._train.labels is None or self._test.labels is None or self._model.head is None:
            return None
        x, z = (features.double().numpy() for features in (self._features(w, self._train), tested))
        middle, scale = x.mean(0), x.std(0) + 1e-12
        x, z = (x - middle) / scale, (z - middle) / scale
        y = np.eye(len(self._model.classes))[self._train.labels.numpy()]
        right = x.T @ (y - y.mean(0))
        beta = np.linalg.solve(x.T @ x + RIDGE * len(x) * np.eye(x.shape[1]), right)
        return float(((z @ beta + y.mean(0)).argmax(1) == self._test.labels.numpy()).mean())

    def _features(self, w: Params, rows: Rows) -> Tensor:
        """Features (n, d); for a language model the logits (tokens, V)."""
        self._model.load(w)
        if self._model.head is not None:
            x: Tensor = self._model.features(rows)
            return x
        logits: Tensor = self._model.predict(rows)
        return logits.reshape(-1, logits.shape[-1])


def _center(x: Tensor) -> Tensor:
    x = x.double()
    return x - x.mean(0)
