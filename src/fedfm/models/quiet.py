"""Keeps the libraries' own notices off the user's terminal while fedfm calls them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within it transformers logs errors only and draws no progress bars; both are as before afterwards."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # Raised at import inside SWIG-built extensions of the libraries; nothing that a user could change.
            warnings.filterwarnings("ignore", message="builtin type .* has no __module__ attribute")
            # PEFT 0.21 asks transformers 5 by the old name of the attribute.
            warnings.filterwarnings(
                "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
            )
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
