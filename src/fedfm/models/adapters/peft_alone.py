"""Import PEFT without bitsandbytes.

If bitsandbytes is installed, PEFT imports it, and bitsandbytes imports torch's compiler. These imports take two seconds
in every command, although only a quantised base needs bitsandbytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_HIDDEN = "bitsandbytes"


@contextmanager
def peft_alone() -> Iterator[None]:
    """Context manager: PEFT finds no bitsandbytes, unless a quantised base has loaded it before."""
    if _HIDDEN in sys.modules:
        yield
        return
    from transformers.utils import is_bitsandbytes_available

    is_bitsandbytes_available()  # transformers caches the answer, so ask before bitsandbytes is hidden
    sys.modules[_HIDDEN] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[_HIDDEN]
        if "peft.import_utils" in sys.modules:
            from peft.import_utils import is_bnb_4bit_available, is_bnb_available

            is_bnb_available.cache_clear()
            is_bnb_4bit_available.cache_clear()
