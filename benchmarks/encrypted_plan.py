"""What `fedfm check` predicts of an encrypted batch, and what its blocks take.

    OMP_NUM_THREADS=1 python benchmarks/encrypted_plan.py
    OMP_NUM_THREADS=1 python benchmarks/encrypted_plan.py --quick
    OMP_NUM_THREADS=1 python benchmarks/encrypted_plan.py --shape 197 192 3 16

Both in one process: the owner of two blocks of random weights and the holder of the rows, with every message of the
masked protocol. CPU seconds are counted for each side and block. The first block includes the system's clearing of
memory that the process has not used before; the prediction is compared with the second. `--shape` names tokens, width,
heads and rows of one batch; without it there are several, full batches and others. With 197 tokens there is a class
token, and 256 places.
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
    """A holder whose seconds and bytes are counted, and the owner's seconds until each disclosure."""

    def __init__(self, tokens: int, count: int) -> None:
        self.holder, self.seconds, self.bytes, self._count = KeyHolder.new(tokens), 0.0, 0, count
        self.blocks: list[tuple[float, float]] = []  # CPU seconds of both sides, and of this side, after each block

    def measure(self, work: Any, *given: Any) -> Any:
        """Count the seconds of a call, and the bytes that go in or come out."""
        start = time.process_time()
        found = work(*given)
        self.seconds += time.process_time() - start
        self.bytes += sum(len(x) for x in (*given, found) if isinstance(x, bytes))
        return found

    def refresh(self, message: bytes) -> bytes:
        """Answer a refresh."""
        return self.measure(self.holder.refresh, message)  # type: ignore[no-any-return]

    def decrypt(self, _block: int, message: bytes) -> None:
        """Decrypt disclosed activations."""
        self.measure(self.holder.decrypt_released, message, self._count)
        self.blocks.append((time.process_time(), self.seconds))


def measure_shape(tokens: int, d: int, heads: int, count: int) -> dict[str, Any]:
    """One row of the table."""
    block, x, _ = random_block(d, 4 * d, heads, Packing(PARAMETERS, tokens))
    layer = Layer(dict(block.weights), heads, block.norms, EXP, INVERSE, block.inverse_scales, GELU)
    ones, token = np.ones(2), tokens == 197
    model = Model(np.eye(d), np.zeros(d), np.zeros((tokens, d)), (layer, layer), ones, 64 * ones, class_token=token)
    planned = plan(model, [count], "class", parameters=PARAMETERS)
    side = Holder(tokens, count)
    public, session, key = side.holder.public(), os.urandom(16), os.urandom(32)
    owner = ModelOwner(model, "class", public, session, key, DistanceLedger())
    side.holder.begin(session, key)
    rows = side.measure(side.holder.rows, x[:count])
    start, before = time.process_time(), side.seconds
    owner.run(rows, side.refresh, side.decrypt)
    (first, client_first), (second, client_second) = side.blocks
    owners = first - start - (client_first - before), second - first - (client_second - client_first)
    expected, theirs = planned.seconds_per_block
    return {
        "tokens, width, heads": f"{tokens}, {d}, {heads}",
        "rows": f"{count} of {planned.batch}",
        "owner, block 1": owners[0],
        "block 2": owners[1],
        "planned": expected,
        "planned / block 2": expected / owners[1],
        "client, block 1": client_first - before,
        "its block 2": client_second - client_first,
        "planned ": theirs,
        "planned / its block 2": theirs / (client_second - client_first),
        "MB": side.bytes / 1e6,
        "planned / MB": planned.bytes_per_batch / side.bytes,
    }


def main() -> None:
    """Every shape."""
    shape = {"type": int, "nargs": 4, "metavar": ("TOKENS", "WIDTH", "HEADS", "ROWS"), "help": "one shape only"}
    options = common.arguments(__doc__, shape=shape)
    shapes = [tuple(options.shape)] if options.shape else SHAPES[:1] if options.quick else SHAPES
    with threadpool_limits(1):
        measure_shape(4, 8, 2, 3)  # compiles
        rows = [measure_shape(*shape) for shape in shapes]
    worst = max(abs(np.log(row[key])) for row in rows for key in ("planned / block 2", "planned / its block 2"))
    goals = [common.goal("largest factor between planned and measured seconds", float(np.exp(worst)), most=1.25)]
    load = f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
    common.emit("Planned and measured", [{"title": "A block, encrypted", "rows": rows}], goals, [load])


if __name__ == "__main__":
    main()
