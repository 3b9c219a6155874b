"""A client's one private release of its rows in a run."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from fedfm.core.client import Client
from fedfm.errors import RowsChanged
from fedfm.privacy import plausibility
from fedfm.privacy.noise import digest


def key_of_release(client: Client, title: str, x: NDArray[Any], y: NDArray[Any], plan: str, delta: float) -> bytes:
    """The key of the noise on a release of the rows x (n, d) and their targets y, which a client may release once.

    Args:
        title: the method's name in the messages; in lower case it names the release in the client's store.
        plan: the public part of the release.
        delta: the delta of the release, from which unlikely guarantees are noticed.

    Raises:
        RowsChanged: the client has released other rows, or by another plan, earlier in this run.
    """
    mark = digest(x, y, plan).encode()
    if client.write_once(title.lower(), mark) != mark:
        raise RowsChanged(
            f"{title}: this run has already released sums of different rows; another release would spend privacy that "
            "is not accounted. Put the rows back, or start a new run",
        )
    if notice := plausibility.of_delta(delta, len(y), "training rows of this client"):
        client.log(notice)
    return client.secret("noise")
