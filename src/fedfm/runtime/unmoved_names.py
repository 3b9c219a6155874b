"""Word the notices about trained tensors that did not change; imported only if there are some."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

from fedfm.models.adapters.lora_names import pairs
from fedfm.models.first_batch import notice_of_idle
from fedfm.models.model import Model

_NAMED = 2  # largest number of tensors that a notice names


def notices_about(model: Model, start: Mapping[str, int], still: set[str], known: Iterable[str]) -> list[str]:
    """Return the notices of :func:`fedfm.runtime.unmoved.notices` about the tensors ``still``."""
    found, first = [], _behind_zero(model, start, still)
    if first:
        found.append(
            f"{_count(first, start)}: {_few(first)}. They are LoRA's factors whose partner starts at zero: their first "
            "gradient comes in a client's second step, and is small. More rounds, more local epochs or smaller batches "
            "train them"
        )
    names = [name for name in model.names if name in still and name not in first]
    if names and notice_of_idle(names, len(start)) not in known:
        found.append(f"{_count(names, start)}, as if the rows gave them no gradient: {_few(names)}")
    return found


def _behind_zero(model: Model, start: Mapping[str, int], still: set[str]) -> list[str]:
    """Return LoRA's unchanged factors of which the other factor of the pair was zero at the start, and changed."""
    found = []
    for a, b in pairs(model.names).values():
        dtype, begin, end, _ = model.layout.slots[b]
        zeros = zlib.crc32(bytes((end - begin) * dtype.itemsize))
        if a in still and b not in still and start.get(b) == zeros:
            found.append(a)
    return found


def _count(names: Sequence[str], start: Mapping[str, int]) -> str:
    return f"{len(names)} of {len(start)} trained tensors did not change during the run"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
