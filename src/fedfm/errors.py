"""Errors: invalid input, a run that cannot continue, a client that fails."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class FedfmError(Exception):
    """Base class of all errors that fedfm raises. The command line prints them without a traceback (exit 1)."""


class InputError(FedfmError, ValueError):
    """The user's input is invalid. The message names the place, the fault and what would be right (exit 2).

    The message is for people; programs read the fields.

    Attributes:
        key: the invalid key with its tables, as ``a.b.c``; "" if only the message contains it.
        owners: values of the table's ``name`` with which the key would be allowed, if the present value forbids it.
        allowed: the accepted values in words, e.g. "a table"; "" if the key itself is not accepted.
        more: further faults that were found together with this one, in the order in which they were found.
    """

    def __init__(
        self,
        text: object = "",
        *,
        key: str = "",
        owners: Sequence[str] = (),
        allowed: str = "",
        more: Sequence[InputError] = (),
    ) -> None:
        super().__init__(text)
        self.key, self.owners, self.allowed = key, tuple(owners), allowed
        self.more: tuple[InputError, ...] = tuple(more)

    @property
    def all(self) -> tuple[InputError, ...]:
        """This fault, and those in ``more``."""
        return (self, *self.more)

    def reason(self) -> str:
        """The message without the key at its beginning."""
        text = str(self)
        return text[len(self.key) :].removeprefix(":").strip() if self.key and text.startswith(self.key) else text

    def move(self, key: str) -> InputError:
        """The same fault reported for ``key``; the message names this key instead of the old one."""
        text = str(self)
        rest = text[len(self.key) :] if self.key and text.startswith(self.key) else f": {text}"
        kind = Absent if isinstance(self, Absent) else InputError
        return kind(f"{key}{rest}", key=key, owners=self.owners, allowed=self.allowed, more=self.more)


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C's ends the process, which cleans up as after Ctrl-C (exit 128 + ``number``)."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Absent(InputError):
    """A required key is absent."""


class NoColumn(InputError):
    """A file has no column of a name that the task needs. ``missing`` is the part of the message that says so."""

    def __init__(self, missing: str, found: str, *, key: str = "") -> None:
        super().__init__(f"{missing}; {found}", key=key)
        self.missing = missing


class FaultyFile(InputError):
    """A file is invalid. The message has a line for each fault, with the file's name.

    Attributes:
        found: the faults.
    """

    def __init__(self, text: str, found: Sequence[InputError]) -> None:
        super().__init__(text, key=found[0].key if found else "")
        self.found = tuple(found)


class Faults:
    """Collects faults in the input, so that all of them are refused together.

    Example:
        >>> faults = Faults()
        >>> for text in ("1", "x", "y"):
        ...     with faults:
        ...         if not text.isdigit():
        ...             raise InputError(f"{text} is not a number")
        >>> try:
        ...     faults.refuse()
        ... except InputError as error:
        ...     print(error, *error.more, sep="; ")
        x is not a number; y is not a number
    """

    def __init__(self) -> None:
        self.found: list[InputError] = []

    def add(self, error: InputError) -> None:
        """Collect a fault, and those in its ``more``."""
        self.found += error.all

    def say(self, text: str, *, key: str = "", owners: Sequence[str] = (), allowed: str = "") -> None:
        """Collect a fault with this text; the other arguments are the fields of :class:`InputError`."""
        self.found.append(InputError(text, key=key, owners=owners, allowed=allowed))

    def refuse(self) -> None:
        """Raise the first fault, with the others as its ``more``; do nothing if there are no faults.

        Raises:
            InputError: there is a fault.
        """
        if self.found:
            first, *rest = self.found
            first.more = tuple(rest)
            raise first from None

    def __enter__(self) -> Faults:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        """Collect the error that the block raises, if it is an :class:`InputError`."""
        if isinstance(error, InputError):
            self.add(error)
        return isinstance(error, InputError)


class Lost(InputError):
    """A file that cannot be made again is damaged or missing. The message names the file (exit 2)."""


class RunError(FedfmError, RuntimeError):
    """The run cannot continue (e.g. too few clients, a full disk). All committed rounds are kept (exit 1)."""


class NotWritten(RunError):
    """A file could not be written: the disk is full or read-only. The message names the file (exit 1)."""


class MissingExtra(FedfmError, ImportError):
    """An optional dependency is missing. The message names the extra that installs it."""


class ClientFault(FedfmError):
    """A client failed or sent an invalid reply. It is excluded from the round, and the run continues.

    Attributes:
        code: one of the ``E_...`` codes below, stable across releases.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason


class RowsRefused(ClientFault):
    """The client refuses because of its rows. No other refusal depends on rows."""

    def __init__(self, reason: str) -> None:
        super().__init__(E_REFUSED, reason)


class RowsChanged(RowsRefused):
    """Its rows changed since an earlier answer."""


class TooFewRows(RowsRefused):
    """Its rows are so few that an answer would disclose them."""


E_EXCEPTION = "E_EXCEPTION"  # the handler raised
E_TIMEOUT = "E_TIMEOUT"  # no reply in time
E_DIED = "E_DIED"  # the process ended
E_REFUSED = "E_REFUSED"  # the silo's policy does not allow the handler
E_EXPERIMENT = "E_EXPERIMENT"  # the silo does not run this experiment; its own log says why
E_FORMAT = "E_FORMAT"  # bytes that are not a payload of this wire format
E_FIELD = "E_FIELD"  # a field is missing, unknown or of the wrong type
E_TENSORS = "E_TENSORS"  # tensor names differ from the requested ones
E_SHAPE = "E_SHAPE"
E_DTYPE = "E_DTYPE"
E_NONFINITE = "E_NONFINITE"  # NaN or infinity
E_NORM = "E_NORM"  # finite, but larger than any result of training
E_WEIGHT = "E_WEIGHT"  # a weight that is negative, zero or out of range
E_SIZE = "E_SIZE"  # larger than the limit
E_ROUND = "E_ROUND"  # a reply for another round
E_DUPLICATE = "E_DUPLICATE"
E_CLIENT = "E_CLIENT"  # a reply from a client that was not asked, or from a node that uses another's name
E_READONLY = "E_READONLY"  # the handler wrote into its payload, which is a defect of the method and stops the run
E_LOST = "E_LOST"  # the client's secrets or memory are damaged or missing
E_HELD = "E_HELD"  # the message refers to parameters that the client no longer has; the server then sends it in full
E_VERSION = "E_VERSION"  # the client has another version of fedfm or another model

# When the client half of a method fails, the server reads only one of these sentences, which do not depend on any row.
# The details are in the silo's errors.log.
SENTENCES = {
    E_EXCEPTION: "the client half failed; see the site's errors.log",
    E_NONFINITE: "a number is NaN or infinity; see the site's errors.log",
    E_NORM: "a number is too large; see the site's errors.log",
    E_WEIGHT: "the weight is out of range; see the site's errors.log",
}
SEE_LOG = "see the site's errors.log"  # end of the sentence for all other codes
OF_NO_ROW = (E_REFUSED, E_LOST, E_READONLY)  # errors with these codes do not depend on any row


def depends_on_rows(error: BaseException) -> bool:
    """Whether a failure may depend on the client's rows.

    If so, a party that learns of the failure learns something about the rows.
    """
    if isinstance(error, ClientFault):
        return isinstance(error, RowsRefused) or error.code not in OF_NO_ROW
    return not isinstance(error, Lost)


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust gave up, e.g. tokenizers on a regular expression; such an error is no ``Exception``."""
    return type(error).__name__ == "PanicException"


def first_line(error: BaseException, most: int = 160) -> str:
    """First line with text of an exception, cut to ``most`` characters. ``str(error)`` may raise, too."""
    try:
        return str(error).strip().partition("\n")[0][:most]
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        return f"its text cannot be read ({type(failure).__name__})"


def reason_of(error: BaseException) -> str:
    """Why a file cannot be used, in words: without the number of a system's error, and without a codec's positions."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if type(error).__name__ == "JSONDecodeError":  # not by its class: a plain start need not import json
        return f"it is not JSON: {error}"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not text in {error.encoding.upper()}"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error)


def lines_of(error: BaseException, most: int = 2_000) -> list[str]:
    """The lines of an exception's text, each cut to ``most`` characters.

    For an :class:`InputError` these are the lines of all its faults; for any other exception, only the first line.
    """
    if not isinstance(error, InputError):
        return [first_line(error, most)]
    return [line[:most] for fault in error.all for line in str(fault).splitlines()]


def quote_names(options: Any) -> str:
    """The options as quoted names, sorted and joined by commas."""
    return ", ".join(f'"{o}"' for o in sorted(options))


def closest(value: object, options: Iterable[Any], least: float = 0.6) -> Any:
    """The option with the spelling closest to ``value``; None if none has at least the similarity ``least``."""
    known = {str(option).lower(): option for option in options}
    near = difflib.get_close_matches(str(value).lower(), known, 1, least)
    return known[near[0]] if near else None


def close(value: object, options: Iterable[Any], least: float = 0.6) -> str:
    """Suffix for a message: ` (did you mean "x"?)` for the closest option, or nothing."""
    option = closest(value, options, least)
    return "" if option is None else f' (did you mean "{option}"?)'
