"""Handle rows without activations, because an argument of one of the model's polynomials left its interval.

Rows that are unlike the model's auxiliary ones are found before they are encrypted
(:mod:`~fedfm.encrypted.student.input_limits`), since they could make their batch overflow. Other rows are found by
their activations. Training and validation skip both kinds. Test rows are kept, with zeros as
their activations: the model gives no answer for them, and they count as wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedfm.core.client import Client
from fedfm.core.rows import Rows
from fedfm.encrypted.student.input_limits import beyond
from fedfm.errors import E_NONFINITE, ClientFault
from fedfm.models.adapters.side_adapter import STATES, with_numbers

_NAMED = 5  # number of rows that a message names


def replace_unlike(pixels: Tensor, limits: Mapping[str, float]) -> tuple[Tensor, list[str]]:
    """Replace pictures (n, 3, H, W) beyond the limits by the first other one, or by grey if there is none.

    A batch is as large with them as without. The caller drops what comes back for them.

    Returns:
        The pictures, and for each which limits it exceeds; "" for those that are unchanged.
    """
    reasons = beyond(pixels, limits)
    fine = torch.tensor([not reason for reason in reasons])
    if fine.all():
        return pixels, reasons
    other = pixels[fine][0] if fine.any() else torch.zeros_like(pixels[0])
    return torch.where(fine[:, None, None, None], pixels, other), reasons


def within_limits(states: Tensor, pixels: Tensor, limits: Mapping[str, float]) -> Tensor:
    """Return states (n, ...), with zeros for rows whose pictures (n, 3, H, W) are beyond the limits."""
    fine = torch.tensor([not reason for reason in beyond(pixels, limits)], dtype=torch.bool)
    return torch.where(fine.view(-1, *[1] * (states.dim() - 1)), states, 0.0)


def describe_unlike(reasons: Sequence[str], names: Sequence[str]) -> str:
    """Say which rows were not encrypted, and why; empty if all were.

    Args:
        reasons: as :func:`replace_unlike` returns them.
        names: what each row is called.
    """
    found = [f"{name} ({reason})" for name, reason in zip(names, reasons, strict=True) if reason]
    if not found:
        return ""
    more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return (
        f"{len(found)} of {len(reasons)} rows are not encrypted, since they are beyond the limits of the server's "
        f"model, where its polynomials may overflow: {'; '.join(found[:_NAMED])}{more}"
    )


def exclude_rows(client: Client, parts: Mapping[str, Rows]) -> tuple[dict[str, Rows], dict[str, Tensor]]:
    """Remove rows that overflowed, except test rows, which get zeros as their states.

    Returns:
        The remaining rows of each part, and for each part a mask (n,) that is true for rows with finite states.

    Raises:
        ClientFault: no training row is left.
    """
    found, finite = dict[str, Rows](), {part: with_numbers(rows.tensors[STATES]) for part, rows in parts.items()}
    for part, rows in parts.items():
        if finite[part].all():
            found[part] = rows
        elif part == "test":
            states = rows.tensors[STATES] * finite[part][:, None, None, None]
            found[part] = Rows({STATES: states}, labels=rows.labels)
        else:
            found[part] = rows.take(finite[part].nonzero().flatten())
    lost = {part: int((~mask).sum()) for part, mask in finite.items()}
    if any(lost.values()):
        counts = ", ".join(f"{n} of {len(finite[part])} {part} rows" for part, n in lost.items() if n)
        client.log(f"{counts} left the intervals or the limits of the server's model, so they have no activations")
    if lost["train"] and not len(found["train"]):
        raise ClientFault(E_NONFINITE, "all training rows left the intervals or the limits of the server's model")
    return found, finite
