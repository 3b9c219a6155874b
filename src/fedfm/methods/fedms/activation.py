"""Sparsely activated LoRA of FedMS: when a layer is unfrozen (equation 5, Figure 2), and by which rows."""

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

HELD_OUT = 0.1  # of the training rows: held out to decide when a layer is unfrozen
FEWEST = 20  # training rows; with fewer none are held out, and the training rows decide


def next_k(q: deque[float], a: float, k: int, threshold: float, deepest: int) -> int:
    """K after the accuracy ``a`` (equation 5): one more layer, at most ``deepest``, if the queue is full and a is less
    than ``threshold`` above its mean.
    """
    full = len(q) == q.maxlen
    return min(k + 1, deepest) if full and a - sum(q) / len(q) < threshold else k


def split(client: Client) -> tuple[Rows, Rows]:
    """(training rows, deciding rows): the client's validation rows decide, else a fixed tenth of its training rows;
    with fewer than 20 training rows all rows do both.
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
    """The time in seconds after the device has finished its work, to measure what frozen layers save."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
