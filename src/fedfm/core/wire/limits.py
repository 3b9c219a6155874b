"""Limits of a message, checked before anything is built from it.

A head beyond the limits is refused after one scan of its characters. Any other head is parsed in less than 50 ms.
"""

from __future__ import annotations

import numpy as np

from fedfm.errors import E_FORMAT, E_SIZE, ClientFault
from fedfm.linalg.params import Layout

MAX_BYTES = 4 << 30  # bytes of one payload's data, in addition to VECTORS parameter vectors of the receiver's model
VECTORS = 16  # parameter vectors allowed in one message; methods send up to three
MAX_HEAD = 2 << 20  # characters of a message's head: enough for names and shapes of 16,384 tensors
MAX_VALUES = 65 << 10  # values and keys of a head: enough for 16,384 matrices, or for 33,000 named numbers or texts
MAX_NODES = 1 << 12  # values that are built one by one; numbers or texts of one list or mapping are built together
MAX_ARRAYS = 1 << 10  # tensors and Params in a message; to send more tensors, put them into one Params
MAX_TENSORS = 1 << 14  # tensors of one Params
MAX_DEPTH = 32

_MAX_LISTS = 2 * MAX_TENSORS + MAX_NODES  # each tensor of a Params is a list that contains the list of its shape

_COMMA, _COLON, _QUOTE, _OPEN, _CLOSE, _OBJECT, _LIST = (ord(c) for c in ',:"[]{[')
_TEXT = np.frombuffer(b'"s":', np.uint8)
_UPPER = 0xDF  # this mask turns braces into brackets


def room(layout: Layout | None) -> int:
    """Largest number of bytes in a message to a party whose model has this layout; None means a party without a model.

    Example:
        >>> room(None) == MAX_BYTES
        True
    """
    return MAX_BYTES + (0 if layout is None else VECTORS * layout.nbytes)


def check_size(head: str, data: int, most: int | None = None) -> None:
    """Refuse a message that is too large.

    Args:
        data: number of bytes of the message's data, which exclude the head.
        most: largest number of these bytes, from :func:`room`; None means a party without a model.

    Raises:
        ClientFault: E_SIZE.
    """
    most = MAX_BYTES if most is None else most
    if len(head) > MAX_HEAD or data > most:
        raise ClientFault(
            E_SIZE,
            f"a message with {len(head)} characters of head and {data} bytes of data is over the limit: "
            f"expected at most {MAX_HEAD} and {most}",
        )


def count_keys(head: str) -> int:
    """Total number of keys in the JSON objects of a head, counted without parsing and without recursion.

    Raises:
        ClientFault: E_SIZE, more values and keys than :data:`MAX_VALUES`, or more objects or lists than a head
            within the limits can have; E_FORMAT, nested deeper than :data:`MAX_DEPTH`.
    """
    if "\\" in head:  # an escaped quote does not end a text
        head = head.replace("\\\\", "").replace('\\"', "")
    text = np.frombuffer(head.encode("utf-8", "replace") + bytes(len(_TEXT)), np.uint8)
    within = np.bitwise_xor.accumulate(text == _QUOTE)  # true at a text's opening quote and inside the text
    raw = text * ~within
    keys = int(np.count_nonzero(raw == _COLON))
    if (values := int(np.count_nonzero(raw == _COMMA)) + 1 + keys) > MAX_VALUES:
        raise ClientFault(E_SIZE, f"a head of {values} values and keys: expected at most {MAX_VALUES}")
    kind = raw & _UPPER
    step = (kind == _OPEN).view(np.int8) - (kind == _CLOSE).view(np.int8)
    if step[step != 0].cumsum(dtype=np.int32).max(initial=0) > MAX_DEPTH:
        raise ClientFault(E_FORMAT, f"nested deeper than {MAX_DEPTH}")
    # A value has at most two JSON objects, {"m":{...}}. Texts, {"s":"..."}, do not count, since they are built
    # together.
    opens = np.flatnonzero(raw == _OBJECT)
    texts = int(np.count_nonzero((text[opens[:, None] + np.arange(1, 1 + len(_TEXT))] == _TEXT).all(1)))
    if (objects := len(opens) - texts) > 2 * MAX_NODES:
        raise ClientFault(E_SIZE, f"a head of {objects} objects: expected at most {2 * MAX_NODES}")
    if (lists := int(np.count_nonzero(raw == _LIST))) > _MAX_LISTS:
        raise ClientFault(E_SIZE, f"a head of {lists} lists: expected at most {_MAX_LISTS}")
    return keys
