"""Notices about trained tensors that did not change in a complete run, because no row gave them a gradient.

Training itself does not report such tensors. The gradient may be zero on all rows, e.g. if a tensor belongs to an
expert that no row chooses, or to attention that short rows do not need. The start values are stored as checksums, since
a copy would take as much memory as the trained tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from fedfm.linalg.params import Params, to_bytes
from fedfm.models.model import Model


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
    from fedfm.runtime.unmoved_names import notices_about

    return notices_about(model, start, still, known)
