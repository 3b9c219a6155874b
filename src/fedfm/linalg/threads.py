"""Limits the threads of BLAS and torch.

Results must not depend on the machine's number of cores, and products of small matrices are no faster on more threads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


def one_thread() -> AbstractContextManager[Any]:
    """Context manager: the BLAS of NumPy and SciPy uses one thread; torch's number of threads does not change."""
    return _controller().limit(limits=1, user_api="blas")  # type: ignore[no-any-return]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Context manager: torch uses ``count`` threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def _controller() -> Any:
    """The controller of the loaded BLAS libraries, kept because the search for libraries takes milliseconds."""
    import scipy.linalg  # noqa: F401 - loads its LAPACK
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
