"""Sparsely activated LoRA of FedMS: when a layer is unfrozen (equation 5, Figure 2), and which rows decide this."""

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

HELD_OUT = 0.1  # fraction of the training rows that is held out to decide when a layer is unfrozen
FEWEST = 20  # with fewer training rows none are held out, and the accuracy on the training rows decides


def next_k(q: deque[float], a: float, k: int, threshold: float, deepest: int) -> int:
    """The number K of unfrozen layers after the accuracy ``a`` was measured (equation 5).

    K grows by one, up to ``deepest``, if the queue ``q`` is full and ``a`` exceeds the queue's mean by less than
    ``threshold``.
    """
    full = len(q) == q.maxlen
    return min(k + 1, deepest) if full and a - sum(q) / len(q) < threshold else k


def split(client: Client) -> tuple[Rows, Rows]:
    """The rows for training, and the rows on which accuracy decides when a layer is unfrozen.

    The deciding rows are the client's validation rows. A client without validation rows holds out a fixed tenth of its
    training rows. With fewer than 20 training rows it uses all of them for both purposes.
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
    """A copy of the client with these training rows; the copy shares the client's memory and metrics."""
    return dataclasses.replace(client, data=ClientData(lambda: rows, Rows, Rows))


def clock(model: Model) -> float:
    """The time in seconds, after the device has finished its work. It shows how much time frozen layers save."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
