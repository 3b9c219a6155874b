"""Handle rows whose activations overflowed, because an argument of one of the model's polynomials left its interval.

Training and validation skip these rows. Test rows that overflowed are kept, with zeros as their activations.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedfm.core.client import Client
from fedfm.core.rows import Rows
from fedfm.errors import E_NONFINITE, ClientFault
from fedfm.models.adapters.side_adapter import STATES, with_numbers


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
        client.log(f"{counts} left the intervals of the server's model, so they have no activations")
    if lost["train"] and not len(found["train"]):
        raise ClientFault(E_NONFINITE, "all training rows left the intervals of the server's model")
    return found, finite
