"""Clients that take no part, as ``data.without`` names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedfm.data.spec import DataSpec
from fedfm.data.table import ClientRows
from fedfm.errors import InputError, close, quote_names


def leave_out(
    clients: Mapping[str, ClientRows], names: Sequence[str], test: np.ndarray, spec: DataSpec
) -> tuple[dict[str, ClientRows], np.ndarray]:
    """The clients that take part, with the same rows as before, and the global test rows that are left.

    With ``by_column`` or ``clients``, test rows belong to a client and leave with it. Otherwise they belong to nobody.

    Args:
        names: all clients, also those without training rows.

    Raises:
        InputError: a name is not a client's, or no client is left.
    """
    for name in spec.without:
        if name not in names:
            raise InputError(
                f'data.without: "{name}" is not a client; expected some of {quote_names(names)}{close(name, names)}',
                key="data.without",
            )
    rest = {name: rows for name, rows in clients.items() if name not in spec.without}
    if not rest:
        raise InputError("data.without: it names all clients, and nobody would take part", key="data.without")
    if spec.clients is not None or spec.partition.name == "by_column":
        gone = np.concatenate([test[:0], *(clients[name].test for name in spec.without if name in clients)])
        test = np.setdiff1d(test, gone)
    return rest, test
