"""A ready twin's intervals measured again on other rows, without training.

A twin that was made of photographs meets drawings: their arguments leave the intervals, and features are no numbers.
With some drawings its owner gives it wider intervals. The weights stay, and so does what is learned on its features.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fedfm.api.model_folder import ModelFolder, held_out
from fedfm.core.rows import Batch
from fedfm.data.table import Table
from fedfm.encrypted.student import conversion
from fedfm.encrypted.student.distil_rows import AT_ONCE, MEASURED
from fedfm.encrypted.student.distil_spec import DistilSpec
from fedfm.encrypted.student.distillation_loss import Taps, save
from fedfm.encrypted.student.interval_table import table_of
from fedfm.encrypted.student.recalibrate import widen
from fedfm.encrypted.student.scores import outputs, outside
from fedfm.errors import InputError
from fedfm.linalg.params import sha256_of
from fedfm.models import families
from fedfm.models.model import Model
from fedfm.runtime.progress import EpochProgress

_SIZES = ("scale", "range", "largest")  # of a block's entry, besides its polynomials


def measure_again(
    place: ModelFolder, spec: DistilSpec, table: Table, twin: Model, watcher: EpochProgress
) -> dict[str, Any]:
    """Widen a twin's intervals where the training rows need it, and write the twin into the folder.

    Intervals only grow. Those of 1 / x and 1 / sqrt(x) grow to the ratio that their polynomials allow.

    Returns:
        ``folder``, ``epochs`` (0), ``parameters``, ``measured`` (rows), ``seconds``, ``params_sha256``, and ``blocks``
        as of a distillation. On held-out rows: ``judged`` (their number), ``accuracy`` (None with a new head),
        ``outside``, and ``without_numbers`` (rows whose features are no numbers), the last three also with ``_before``.

    Raises:
        InputError: epochs, tokens or pictures are asked for that only a training makes.
    """
    began = time.perf_counter()
    _check(spec, twin)
    index, held = table.rows("train")[:MEASURED], held_out(table)
    config: Any = families.unwrapped(twin.module).config
    known = getattr(config, conversion.KEY)
    entries = [{k: v for k, v in block.items() if k not in _SIZES} for block in known["blocks"]]

    def batches() -> Iterator[Batch]:
        for start in range(0, len(index), AT_ONCE):
            part = index[start : start + AT_ONCE]
            yield twin.prepare(table, part).batch(range(len(part)))

    taps = Taps(twin)
    watcher.started(1, 0, len(entries))
    before = _scores(taps, table, held)
    entries = widen(taps, entries, known["kind"], batches, keep=True, tick=watcher.step)
    after = _scores(taps, table, held)
    shares = [outside([block]) for block in taps.functions]  # of the held-out rows
    new = table_of(taps, entries, known["kind"], batches, after["outside"])
    for block, old in zip(new["blocks"], known["blocks"], strict=True):
        block["scale"] = old["scale"]  # heads are trained on features over it
        block |= {name: max(block[name], old[name]) for name in ("range", "largest")}
    setattr(config, conversion.KEY, new)
    save(twin, place.half(), new_head=bool(twin.new))
    result = {
        "folder": str(place.folder),
        "epochs": 0,
        "parameters": sum(p.numel() for p in twin.module.parameters()),
        "measured": len(index),
        "judged": len(held),
        **after,
        **{f"{name}_before": value for name, value in before.items()},
        "blocks": [
            {"depth": conversion.depth(block), "outside": share, **entry}
            for block, share, entry in zip(taps.functions, shares, entries, strict=True)
        ],
        "seconds": round(time.perf_counter() - began, 3),
        "params_sha256": sha256_of({"": twin.params()}),
    }
    return place.close(result, ("checkpoint", "export"))


def _check(spec: DistilSpec, twin: Model) -> None:
    if any(spec.epochs):
        raise InputError(
            f"model.name: {twin.spec.name!r} is a twin already; with distil.epochs = [0, 0, 0] its intervals are "
            "measured again on these rows, without training"
        )
    if spec.image_size is not None or not spec.class_token or spec.views > 1:
        raise InputError(
            "a twin that is measured again keeps its tokens and sees rows as they are: drop distil.image_size, "
            "distil.class_token and distil.views"
        )


def _scores(taps: Taps, table: Table, held: np.ndarray) -> dict[str, Any]:
    """Figures on held-out rows."""
    conversion.forget(taps.model.module)
    logits, features, labels = outputs(taps, taps.model.prepare(table, held), len(held))
    finite = torch.isfinite(features).all(1)
    right = finite & (logits.argmax(1) == labels)
    return {
        "accuracy": None if taps.model.new else float(right.double().mean()),
        "outside": outside(taps.functions),
        "without_numbers": int((~finite).sum()),
    }
