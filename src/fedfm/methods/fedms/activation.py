"""Sparsely activated LoRA of FedMS: when a layer wakes up (equation 5, Figure 2), and which rows decide it."""

from __future__ import annotations

import dataclasses
import time
from collections import deque

import numpy as np
import torch

from fedfm import seeds
from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.models.model import Model

HELD_OUT = 0.1  # of the training rows: they decide when a layer wakes up
FEWEST = 20  # training rows of which some are held out; with fewer, the training rows decide


def next_k(q: deque[float], a: float, k: int, threshold: float, deepest: int) -> int:
    """K after the accuracy ``a`` (equation 5): where the queue is full and a is less than ``threshold`` above its mean,
    one layer more, at most ``deepest``.
    """
    full = len(q) == q.maxlen
    return min(k + 1, deepest) if full and a - sum(q) / len(q) < threshold else k


def split(client: Client) -> tuple[Rows, Rows]:
    """(rows that are trained on, rows that decide): the client's validation rows decide, or a fixed tenth of its
    training rows; of fewer than 20, all do both.
    """
    rows, val = client.data.train, client.data.val
    if len(val):
        return rows, val
    if len(rows) < FEWEST:
        return rows, rows
    order = seeds.generator(0, "held out", client.id).permutation(len(rows))
    out = int(HELD_OUT * len(rows))
    return rows.take(np.sort(order[out:])), rows.take(np.sort(order[:out]))


def with_rows(client: Client, rows: Rows) -> Client:
    """The client with these training rows; its memory and metrics are shared."""
    return dataclasses.replace(client, data=ClientData(lambda: rows, Rows, Rows))


def clock(model: Model) -> float:
    """Seconds, when the device has done what it was given: a layer that sleeps takes no backward pass."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
