"""The three ways in which something goes wrong, and who is told."""

from __future__ import annotations

import difflib
from typing import Any


class FedfmError(Exception):
    """Base of every error that fedfm raises on purpose; the command line prints it without a traceback (exit 1)."""


class InputError(FedfmError, ValueError):
    """What the user gave is wrong: the message says where, what, and what would be right (exit 2)."""


class Lost(InputError):
    """What was kept, and cannot be made again, is damaged or missing: the message names the file (exit 2)."""


class RunError(FedfmError, RuntimeError):
    """The run cannot go on (too few clients, a full disk): everything committed is kept (exit 1)."""


class MissingExtra(FedfmError, ImportError):
    """An optional dependency is absent: the message names the extra that installs it."""


class ClientFault(FedfmError):
    """A client failed or sent what it must not: it is left out of the round, and the run goes on.

    Attributes:
        code: one of the ``E_...`` codes below, stable across releases.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason


E_EXCEPTION = "E_EXCEPTION"  # the handler raised
E_TIMEOUT = "E_TIMEOUT"  # no reply in time
E_DIED = "E_DIED"  # the process is gone
E_REFUSED = "E_REFUSED"  # the silo's policy does not allow the handler
E_EXPERIMENT = "E_EXPERIMENT"  # the site does not run this experiment; why, its own log says
E_FORMAT = "E_FORMAT"  # not a payload of this wire format
E_FIELD = "E_FIELD"  # a field is missing, unknown or of the wrong type
E_TENSORS = "E_TENSORS"  # tensor names differ from those asked for
E_SHAPE = "E_SHAPE"
E_DTYPE = "E_DTYPE"
E_NONFINITE = "E_NONFINITE"  # NaN or infinity
E_NORM = "E_NORM"  # finite, and larger than anything that was computed from data
E_WEIGHT = "E_WEIGHT"  # negative, zero, absurd
E_SIZE = "E_SIZE"  # larger than the limit
E_ROUND = "E_ROUND"  # a reply for another round
E_DUPLICATE = "E_DUPLICATE"
E_CLIENT = "E_CLIENT"  # a reply from somebody who was not asked
E_READONLY = "E_READONLY"  # the handler wrote into what it was sent: a defect of the method, which stops the run
E_LOST = "E_LOST"  # what the client keeps between messages is damaged or missing
E_VERSION = "E_VERSION"  # the site runs another fedfm or another model


def first_line(error: BaseException, most: int = 160) -> str:
    """Of an exception's text, at most so many characters; asking for it may fail: the code is somebody else's."""
    try:
        return str(error).partition("\n")[0][:most]
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        return f"its text cannot be read ({type(failure).__name__})"


def listed(options: Any) -> str:
    """Names in quotes, sorted."""
    return ", ".join(f'"{o}"' for o in sorted(options))


def close(value: str, options: Any) -> str:
    """What to add to a message: `(did you mean "x"?)`, where something is close."""
    near = difflib.get_close_matches(str(value), list(options), 1)
    return f' (did you mean "{near[0]}"?)' if near else ""
