"""Figures over clients are those of their rows together, against computations of others, without a model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss

from fedfm.core import tasks
from fedfm.core.rows import Rows
from fedfm.models.text_metrics import Answer, compare_texts, rouge_1
from fedfm.runtime.coarse_scores import DIGITS, coarse

ROW_TASKS = [task for task in tasks.available() if task.one_class_a_row]
SEED, CLIENTS = st.integers(0, 2**32 - 1), st.lists(st.integers(0, 3), min_size=2, max_size=40)
FEW_DIGITS = 10.0 ** (1 - DIGITS)


def dealt(holders: list[int]) -> list[np.ndarray]:
    """Rows by client; a client may have none."""
    return [np.flatnonzero(np.array(holders) == client) for client in range(4)]


@pytest.mark.parametrize("task", ROW_TASKS, ids=str)
@settings(max_examples=25, deadline=None)
@given(holders=CLIENTS, seed=SEED)
def test_of_classes(task, holders, seed):
    rng, n = np.random.default_rng(seed), len(holders)
    logits, labels = rng.normal(size=(n, 3)) * 3, rng.integers(0, 3, n)
    parts = [
        task.scores_of(None, Rows({}, labels=torch.tensor(labels[i])), torch.tensor(logits[i])) for i in dealt(holders)
    ]
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    accuracy, loss = accuracy_score(labels, logits.argmax(1)), log_loss(labels, shares, labels=[0, 1, 2])
    joined, few = task.join_scores(parts), task.join_scores([coarse(part, task) for part in parts])
    assert joined["n"] == few["n"] == n
    assert joined["accuracy"] == pytest.approx(accuracy, rel=1e-12)
    assert joined["loss"] == pytest.approx(loss, rel=1e-9)
    assert few["accuracy"] == pytest.approx(accuracy, rel=1e-12)  # what a silo tells: exact, but for the loss
    assert few["loss"] == pytest.approx(loss, rel=FEW_DIGITS, abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(holders=CLIENTS, seed=SEED)
def test_of_preferences(holders, seed):
    task, rewards = tasks.find("preference"), np.random.default_rng(seed).normal(size=(len(holders), 2))
    parts = [task.scores_of(None, Rows({"second": torch.tensor(i)}), torch.tensor(rewards[i])) for i in dealt(holders)]
    margin, joined = rewards[:, 0] - rewards[:, 1], task.join_scores(parts)
    assert joined["accuracy"] == pytest.approx((margin > 0).mean())
    assert joined["reward_margin"] == pytest.approx(margin.mean(), abs=1e-12)
    assert joined["loss"] == pytest.approx(np.log1p(np.exp(-margin)).mean())


@settings(max_examples=25, deadline=None)
@given(holders=CLIENTS, seed=SEED)
def test_of_answers_of_unequal_length(holders, seed):
    task, rng, n = tasks.find("instruction"), np.random.default_rng(seed), len(holders)
    tokens, losses = rng.integers(1, 50, n), rng.uniform(0, 200, n)
    said, right = ([" ".join(rng.choice(["a", "b", "c"], rng.integers(1, 6))) for _ in range(n)] for _ in range(2))
    cut, parts = rng.random(n) < 0.3, []
    for index in dealt(holders):
        answers = [Answer((), said[i], bool(cut[i])) for i in index]
        sums = {"tokens": int(tokens[index].sum()), "right_tokens": 0, "loss_of_tokens": float(losses[index].sum())}
        sums |= compare_texts(answers, [right[i] for i in index])
        parts.append({"n": len(index), **sums, **task.figures_of(sums)})
    for joined, exact in ((task.join_scores(parts), 1e-9), (task.join_scores([coarse(p, task) for p in parts]), 2e-3)):
        loss = losses.sum() / tokens.sum()
        assert joined["loss"] == pytest.approx(loss, rel=exact)
        assert joined["perplexity"] == pytest.approx(math.exp(loss), rel=max(exact, 2 * loss * FEW_DIGITS))
        assert joined["accuracy"] == joined["exact_match"] == pytest.approx(np.mean([*map(str.__eq__, said, right)]))
        assert joined["rouge_1"] == pytest.approx(np.mean([*map(rouge_1, said, right)]), rel=exact, abs=1e-4)
        assert joined["answers_cut"] == pytest.approx(cut.mean())


def test_every_task_that_a_file_may_name_has_sums():
    for task in tasks.available():
        assert {"accuracy", "loss", *task.figures} <= task.from_sums(dict.fromkeys(task.sums, 1.0)).keys()
        assert all(value is None for value in task.from_sums(dict.fromkeys(task.sums, 0)).values())
        assert set(task.row_means.values()) <= set(task.sums)
