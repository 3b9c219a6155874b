"""FedPFT under differential privacy: Theorem 4.1 of arXiv:2402.01862, corrected, or one noisy sum for all clients.

The client adds the noise, from a key that never leaves the client. With ``pooled``, the server adds the noise once. All
that the server computes from noisy sums is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm import seeds
from fedfm.core.client import MAX_WEIGHT, Client, ClientId, Update
from fedfm.core.federation import Federation
from fedfm.errors import E_FIELD, E_NORM, E_SHAPE, ClientFault, RunError
from fedfm.linalg.params import Params, layout_of
from fedfm.methods._one_release import key_of_release
from fedfm.methods._one_shot import clients_in_mean, rows_of
from fedfm.methods._sums_of_rows import check_part, why_no_sums
from fedfm.methods.fedpft.mixtures import Mixture
from fedfm.methods.fedpft.noisy_moments import Cell, release, to_gaussian
from fedfm.methods.fedpft.noisy_sums import client_sums, federation_sum, width
from fedfm.methods.fedpft.release_plan import Plan, too_noisy
from fedfm.methods.fedpft.summary import MOST, Synthetic, gaussian
from fedfm.privacy.accountant import Accountant
from fedfm.privacy.gaussian import paper_sigma
from fedfm.privacy.noise import digest, unit_rows

Drawn = Mapping[ClientId, list[tuple[int, int, Mixture]]]  # by client: (class, rows to draw, mixture)


@dataclass(frozen=True)
class Noised:
    """A client's reply under differential privacy: noisy sums of every class, including empty classes.

    Attributes:
        counts: (C,) noisy numbers of rows.
        totals: (C, d) noisy sums of unit features.
        seconds: (C, s) noisy second moments: none (spherical), the squares (diag) or the lower triangle (full).
        rows: the client's number of rows, for calibration ``paper_client``; else 0.
    """

    counts: Tensor
    totals: Tensor
    seconds: Tensor
    rows: int


# --- client half ------------------------------------------------------------------------------------------------------


def noisy_sums(client: Client, plan: Plan) -> Noised:
    """Noisy sums of every class; each class has one component."""
    x, y = (t.numpy() for t in rows_of(client))
    x = unit_rows(x)
    key = key_of_release(client, "FedPFT", x, y, f"{plan}", plan.delta)
    classes, dim = len(client.model.classes), x.shape[1]
    counts, totals = torch.zeros(classes), torch.zeros(classes, dim)
    seconds = torch.zeros(classes, plan.seconds(dim))
    for c in range(classes):
        of_class = x[y == c]
        if plan.counts_public and not len(of_class):
            continue
        cell = release(of_class, plan, key, f"{client.id}/moments/{c}", client_rows=len(y))
        counts[c], totals[c] = cell.count, torch.from_numpy(cell.total)
        if cell.second is not None:
            seconds[c] = torch.from_numpy(cell.second)
    return Noised(counts, totals, seconds, len(y) if plan.calibration == "paper_client" else 0)


def draw_rows(client: Client, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n~, d) float32 and labels (n~,) drawn from the client's noisy sums, instead of its own rows."""
    dim = client.model.feature_dim
    found = _normals(noisy_sums(client, plan), plan, len(client.model.classes), dim)
    blocks = list(Synthetic(found, 0, seeds.derive(client.seed, "own"))())
    x, y = [np.zeros((0, dim), np.float32)], [np.zeros(0, np.int64)]
    return np.concatenate(x + [b.numpy() for b, _ in blocks]), np.concatenate(y + [b.numpy() for _, b in blocks])


def exact_sums(client: Client, plan: Plan) -> Update:
    """Exact sums of every class, for a mean: the server adds noise to the sum over the federation."""
    x, y = (t.numpy() for t in rows_of(client))
    found = client_sums(unit_rows(x), y, len(client.model.classes), plan)
    return Update(Params({"sums": torch.from_numpy(found)}), 1.0)


def check_sums(update: Update, dim: int) -> None:
    """Server half: refuse one client's exact sums if no rows have them, or if their weight would scale others' sums."""
    sums = update.delta["sums"]
    parts = {"count": sums[:, 0], "total": sums[:, 1 : 1 + dim]}
    check_part(update, why_no_sums(parts | ({"second": sums[:, 1 + dim :]} if sums.shape[1] > 1 + dim else {})))


# --- server half ------------------------------------------------------------------------------------------------------


def ask_sums(fed: Federation, handler: Any, plan: Plan) -> tuple[Drawn, dict[str, Any]]:
    """Ask clients for noisy sums. Returns the Gaussians that the sums describe, and details of the run."""
    classes, dim = len(fed.model.classes), fed.model.feature_dim
    shapes = [(classes,), (classes, dim), (classes, plan.seconds(dim))]

    def check(reply: Noised) -> None:
        if [tuple(t.shape) for t in (reply.counts, reply.totals, reply.seconds)] != shapes:
            raise ClientFault(E_SHAPE, "the noisy sums have wrong shapes")
        if not 0 <= reply.rows <= MAX_WEIGHT:
            raise ClientFault(E_FIELD, f"rows = {reply.rows}: expected from 0 to {MAX_WEIGHT:g}")
        _normals(reply, plan, classes, dim)

    replies = fed.ask(handler, check=check)
    received = {client: _normals(reply, plan, classes, dim) for client, reply in replies.items()}
    kept = {(client, label) for client, found in received.items() for label, _, _ in found}
    lost = [float(r.counts[c]) for client, r in replies.items() for c in range(classes) if (client, c) not in kept]
    typical = max(1, round(sum(n for found in received.values() for _, n, _ in found) / (classes * len(replies))))
    # The replies' numbers of rows are 0 except under paper_client.
    rows = max(typical, round(sum(reply.rows for reply in replies.values()) / len(replies)))
    warnings = (too_noisy(plan, dim, typical, client_rows=rows), _guarantee_warning(plan, typical, client_rows=rows))
    return received, {
        "formula_bytes": 4 * classes * (1 + dim + plan.seconds(dim)) * len(replies),
        "cells_kept": len(kept),
        "cells": classes * len(replies),
        **_left_out(plan, lost),
        **details_of_sums(plan, typical, rows),
        "warnings": [text for text in warnings if text],
    }


def _left_out(plan: Plan, counts: Sequence[float]) -> dict[str, Any]:
    """The number of rows in the unused cells, estimated from their noisy counts."""
    if plan.counts_public:
        return {}  # then unused cells are empty
    return {
        "left_out_rows": max(0, round(math.fsum(counts))),
        "left_out_rows_std": plan.count_sigma * math.sqrt(len(counts)),
    }


def _guarantee_warning(plan: Plan, n: int, client_rows: int) -> str | None:
    """A warning if the noise does not give the requested guarantee; else None."""
    if plan.calibration != "paper_client":
        return None
    spent = plan.ledger_line(n, client_rows=client_rows)
    return (
        f'no epsilon is claimed: calibration "paper_client" {spent.note}; a typical client truly spends '
        f"{spent.epsilon:.3g}, and more if a class has fewer rows"
    )


def details_of_sums(plan: Plan, n: int = 1, client_rows: int = 1) -> dict[str, Any]:
    """Details of the noise of each client's own release, for a class of n rows."""
    sigma = plan.sum_sigma(n, client_rows=client_rows)
    return {"noise_std_of_sums": sigma, "times_paper_noise": paper_sigma(plan.epsilon, plan.delta, 1) / sigma}


def pool_sums(fed: Federation, handler: Any, plan: Plan) -> tuple[Drawn, dict[str, Any]]:
    """As :func:`ask_sums`, but noise is added once, to the sum over all clients: a mean of m clients has 1/m of it."""
    classes, dim = len(fed.model.classes), fed.model.feature_dim
    shape = (classes, width(plan, dim))
    mean = fed.mean(handler, like=layout_of((("sums", torch.float64, shape),)))
    clients = clients_in_mean(fed)
    sums = digest(mean["sums"].numpy(), str(clients)).encode()
    if fed.store.setdefault("fedpft", sums) != sums:
        raise RunError(
            "the federation has already released sums of other clients: a second release would spend privacy that is "
            "not accounted; start a new run"
        )
    cells = federation_sum(mean["sums"].numpy(), clients, plan, dim, fed.secret("noise"), f"sum {fed.round}")
    normals = {c: to_gaussian(cell, plan, dim) for c, cell in cells.items()}
    found = [(c, _drawable(n[0]), gaussian(*n[1:])) for c, n in normals.items() if n is not None]
    plain = fed.aggregator.transport.form == "plain"
    return {"federation": found}, {
        "formula_bytes": 8 * classes * shape[1] * fed.heard,
        "cells_kept": len(found),
        "cells": classes,
        **_left_out(plan, [cells[c].count for c, n in normals.items() if n is None]),
        "noise_std_of_sums": plan.sum_sigma(max(1, round(sum(n for _, n, _ in found) / classes))),
        "warnings": [f"the server sees the exact sums of {'every client' if plain else 'all clients together'}"],
    }


def _normals(reply: Noised, plan: Plan, classes: int, dim: int) -> list[tuple[int, int, Mixture]]:
    """Mixtures of the classes whose counts are above their noise, each with its number of rows to draw."""
    found = []
    for c in range(classes):
        if plan.counts_public and not reply.counts[c]:
            continue
        second = reply.seconds[c].double().numpy() if plan.seconds(dim) else None
        cell = Cell(float(reply.counts[c]), reply.totals[c].double().numpy(), second)
        _check_norm(cell, plan, dim, reply.rows)
        if (normal := to_gaussian(cell, plan, dim, client_rows=reply.rows)) is not None:
            found.append((c, _drawable(normal[0]), gaussian(*normal[1:])))
    return found


def _check_norm(cell: Cell, plan: Plan, dim: int, rows: int) -> None:
    """Refuse a sum that is longer than the noisy sum of n unit rows can be.

    The check assumes that n is at most 10 standard deviations above the noisy count, and that the norm of the noise is
    at most sigma (sqrt(d) + 10).
    """
    n = max(cell.count, 0.0) + 10 * plan.count_sigma
    most = n + plan.sum_sigma(max(cell.count, 1.0), client_rows=rows) * (dim**0.5 + 10)
    if not (norm := float(np.linalg.norm(cell.total))) <= most:
        raise ClientFault(E_NORM, f"a sum of at most {n:.6g} unit features has L2 norm {norm:.3g}, above {most:.3g}")


def _drawable(count: float) -> int:
    """Number of rows to draw for a noisy count."""
    return min(max(round(count), 1), MOST)


def spend(accountant: Accountant, plan: Plan, pooled: bool) -> None:
    """Add a run's release to the accountant."""
    if plan.calibration == "paper_client":
        return  # this plan guarantees nothing
    spent = plan.ledger_line()
    if pooled:
        spent = replace(spent, note="against those who see the head, not against the server, which adds the noise")
    accountant.compose(spent)
