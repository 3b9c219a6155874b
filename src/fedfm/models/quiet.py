"""Suppresses notices of libraries on the user's terminal."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

# PEFT imports bitsandbytes if it is installed. bitsandbytes then warns about a CPU kernel that fedfm does not use, and
# about rounding in 8-bit products.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager: transformers logs only errors and draws no progress bars; its settings are restored."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # Extensions that SWIG has built raise this warning at import.
            warnings.filterwarnings("ignore", message="builtin type .* has no __module__ attribute")
            # PEFT 0.21 uses the old name of the attribute in transformers 5.
            warnings.filterwarnings(
                "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
            )
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
