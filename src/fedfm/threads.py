"""BLAS on one thread: bits must not depend on the machine, and threads that wait for each other cost more than they
give on matrices of a client's size.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any


def one_thread() -> AbstractContextManager[Any]:
    """Within it NumPy's and SciPy's BLAS compute on one thread; torch's threads are the engine's to set."""
    return _controller().limit(limits=1, user_api="blas")  # type: ignore[no-any-return]


@functools.cache
def _controller() -> Any:
    """Of the libraries that are loaded; looking for them takes milliseconds."""
    import scipy.linalg  # noqa: F401 - its LAPACK has to be among them
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
