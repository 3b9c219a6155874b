"""What `fedfm check` predicts of an encrypted batch, and what one block of it takes.

    OMP_NUM_THREADS=1 python benchmarks/encrypted_plan.py
    OMP_NUM_THREADS=1 python benchmarks/encrypted_plan.py --quick
    OMP_NUM_THREADS=1 python benchmarks/encrypted_plan.py --shape 197 192 3 16

Both in one process: the owner of a block of random weights and the holder of the rows, with every message of the masked
protocol. CPU seconds are counted for each side. `--shape` names tokens, width, heads and rows of one batch; without it
there are several, full batches and others. With 197 tokens there is a class token, and 256 places.
"""

from __future__ import annotations

import os
import time
from typing import Any

import common
import numpy as np
from encrypted_block import EXP, GELU, INVERSE, PARAMETERS, Layer, Model, random_block
from threadpoolctl import threadpool_limits

from fedfm.encrypted.ckks.refresh import DistanceLedger
from fedfm.encrypted.ckks.transformer_block import Packing
from fedfm.encrypted.inference.cost_estimate import plan
from fedfm.encrypted.inference.model_owner import KeyHolder, ModelOwner

SHAPES = [(16, 64, 4, 256), (16, 64, 4, 20), (64, 48, 3, 64), (64, 48, 3, 5), (197, 24, 3, 16), (256, 24, 3, 16)]


class Holder:
    """A holder whose seconds and bytes are counted."""

    def __init__(self, tokens: int, count: int) -> None:
        self.holder, self.seconds, self.bytes, self._count = KeyHolder.new(tokens), 0.0, 0, count

    def timed(self, work: Any, *given: Any) -> Any:
        """Count the seconds of a call, and the bytes that go in or come out."""
        start = time.process_time()
        found = work(*given)
        self.seconds += time.process_time() - start
        self.bytes += sum(len(x) for x in (*given, found) if isinstance(x, bytes))
        return found

    def refresh(self, message: bytes) -> bytes:
        """Answer a refresh."""
        return self.timed(self.holder.refresh, message)  # type: ignore[no-any-return]

    def released(self, _block: int, message: bytes) -> None:
        """Decrypt disclosed activations."""
        self.timed(self.holder.decrypt_released, message, self._count)


def measured(tokens: int, d: int, heads: int, count: int) -> dict[str, Any]:
    """One row of the table."""
    block, x, _ = random_block(d, 4 * d, heads, Packing(PARAMETERS, tokens))
    layer = Layer(dict(block.weights), heads, block.norms, EXP, INVERSE, block.inverse_scales, GELU)
    one, class_token = np.ones(1), tokens == 197
    model = Model(
        np.eye(d), np.zeros(d), np.zeros((tokens, d)), (layer,), one, 64 * one, class_token=class_token
    )
    planned = plan(model, [count], "class", parameters=PARAMETERS)
    side = Holder(tokens, count)
    public, session, key = side.holder.public(), os.urandom(16), os.urandom(32)
    owner = ModelOwner(model, "class", public, session, key, DistanceLedger())
    side.holder.begin(session, key)
    rows = side.timed(side.holder.rows, x[:count])
    before, start = side.seconds, time.process_time()
    owner.run(rows, side.refresh, side.released)
    ours = time.process_time() - start - (side.seconds - before)
    expected, theirs = planned.seconds_per_block
    return {
        "tokens": tokens,
        "width": d,
        "heads": heads,
        "rows": count,
        "of a batch": planned.batch,
        "owner, CPU s": ours,
        "planned": expected,
        "planned / owner": expected / ours,
        "client, CPU s": side.seconds,
        "planned ": theirs,
        "planned / client": theirs / side.seconds,
        "MB": side.bytes / 1e6,
        "planned / MB": planned.bytes_per_batch / side.bytes,
    }


def main() -> None:
    """Every shape."""
    shape = {"type": int, "nargs": 4, "metavar": ("TOKENS", "WIDTH", "HEADS", "ROWS"), "help": "one shape only"}
    options = common.arguments(__doc__, shape=shape)
    shapes = [tuple(options.shape)] if options.shape else SHAPES[:1] if options.quick else SHAPES
    with threadpool_limits(1):
        measured(4, 8, 2, 3)  # compiles
        rows = [measured(*shape) for shape in shapes]
    worst = max(abs(np.log(row[key])) for row in rows for key in ("planned / owner", "planned / client"))
    goals = [common.goal("largest factor between planned and measured seconds", float(np.exp(worst)), most=1.25)]
    load = f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
    common.emit("Planned and measured", [{"title": "A block, encrypted", "rows": rows}], goals, [load])


if __name__ == "__main__":
    main()
