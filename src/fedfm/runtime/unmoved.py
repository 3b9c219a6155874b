"""Notices about trained tensors that did not change in a complete run, because no row gave them a gradient.

Training itself does not report such tensors. The gradient may be zero on all rows, e.g. if a tensor belongs to an
expert that no row chooses, or to attention that short rows do not need. The start values are stored as checksums, since
a copy would take as much memory as the trained tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

from fedfm.linalg.params import Params, to_bytes
from fedfm.models.adapters.lora_names import pairs
from fedfm.models.first_batch import notice_of_idle
from fedfm.models.model import Model

_NAMED = 2  # largest number of tensors that a notice names


def checksums(w: Params) -> dict[str, int]:
    """Return the CRC-32 of each tensor's bytes."""
    return {name: zlib.crc32(to_bytes(tensor.cpu().contiguous())) for name, tensor in w.items() if tensor.numel()}


def notices(model: Model, start: Mapping[str, int], models: Iterable[Params], known: Iterable[str]) -> list[str]:
    """Return a notice about tensors that are unchanged in all final models.

    Args:
        start: checksums of the model before the first round.
        models: the final models; if one of them has other tensors than the trained ones, there is no notice.
        known: earlier notices of the run; tensors that are named there are not named again.
    """
    still, seen = set(start), False
    for w in models:
        if set(w) != set(model.names):
            return []
        seen, now = True, checksums(w)
        still = {name for name in still if now[name] == start[name]}
        if not still:
            return []
    if not seen or not still:
        return []
    told, first = [], _behind_zero(model, start, still)
    if first:
        told.append(
            f"{_count(first, start)}: {_few(first)}. They are LoRA's factors whose partner starts at zero: their first "
            "gradient comes in a client's second step, and is small. More rounds, more local epochs or smaller batches "
            "train them"
        )
    names = [name for name in model.names if name in still and name not in first]
    if names and notice_of_idle(names, len(start)) not in known:
        told.append(f"{_count(names, start)}, as if the rows gave them no gradient: {_few(names)}")
    return told


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
