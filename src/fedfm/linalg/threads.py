"""On one thread: bits must not depend on the machine, and threads that wait for each other cost more than they give on
matrices of a client's size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


def one_thread() -> AbstractContextManager[Any]:
    """Within it NumPy's and SciPy's BLAS compute on one thread; torch's are its own."""
    return _controller().limit(limits=1, user_api="blas")  # type: ignore[no-any-return]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Within it torch computes on so many threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def _controller() -> Any:
    """Of the libraries that are loaded; looking for them takes milliseconds."""
    import scipy.linalg  # noqa: F401 - its LAPACK has to be among them
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
