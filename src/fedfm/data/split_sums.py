"""Counts of the rows of very many clients: sums, sizes, and a sample of clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedfm.data.table import PARTS, ClientRows, FederatedData

SAMPLE = 40  # clients with counts of their own


def sums(data: FederatedData, sizes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The entries ``sums`` and ``sample`` of a split, in place of ``clients`` in :func:`fedfm.data.partition.summary`.

    Args:
        sizes: each client's numbers of rows (K, 3) for train, val and test, as the client uses them, in order of names.

    Returns:
        ``sums``: the number of ``clients``, and for each part ``rows``, ``by_class`` (None without labels), ``least``,
        ``median``, ``most`` and ``sizes``, the number of clients by number of rows. ``sample``: the counts of clients
        that are spread evenly over the names.
    """
    labels, classes = data.table.labels, len(data.table.classes)

    def by_class(rows: np.ndarray) -> list[int] | None:
        return None if labels is None else np.bincount(labels[rows], minlength=classes).tolist()

    def part_sums(part: str, n: np.ndarray) -> dict[str, Any]:
        by_size = {str(k): int(c) for k, c in zip(*np.unique(n, return_counts=True), strict=True)}
        about = {"least": int(n.min()), "median": float(np.median(n)), "most": int(n.max())}
        return {"rows": int(n.sum()), "by_class": by_class(data.all_rows(part)), **about, "sizes": by_size}

    def client_counts(rows: ClientRows, n: np.ndarray) -> dict[str, Any]:
        of = {part: getattr(rows, part) for part in PARTS}
        return {part: {"rows": int(k), "by_class": by_class(of[part])} for part, k in zip(PARTS, n, strict=True)}

    counts, names = np.asarray(sizes), sorted(data.clients)
    shown = np.unique(np.linspace(0, len(names) - 1, SAMPLE).round().astype(int))
    return {
        "sums": {"clients": len(names), **{part: part_sums(part, counts[:, i]) for i, part in enumerate(PARTS)}},
        "sample": {names[k]: client_counts(data.clients[names[k]], counts[k]) for k in shown},
    }
