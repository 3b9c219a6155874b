"""BlindFed's two protocols on one batch of encrypted pictures: nano-vit-fhe, as many rows as a ciphertext holds.

    OMP_NUM_THREADS=1 python benchmarks/blind_protocols.py
    OMP_NUM_THREADS=1 python benchmarks/blind_protocols.py --quick

The rows are scikit-learn's handwritten digits. Owner and holder are two sides of one process and exchange bytes. All
times are CPU seconds on one core. An error is that of a state, divided by its block's scale, against the same
polynomials in the clear. --quick computes only the first two blocks.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import common
import numpy as np
import torch
from threadpoolctl import threadpool_limits

from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.encrypted.ckks.refresh import DistanceLedger
from fedfm.encrypted.inference.model_owner import KeyHolder, ModelOwner
from fedfm.encrypted.inference.permuted_key_holder import PermutedKeyHolder
from fedfm.encrypted.inference.permuted_model_owner import PermutedModelOwner, join_messages
from fedfm.encrypted.student.conversion import block_states, fold
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec

ROWS = 256


class Link:
    """Counts the bytes that the two sides exchange, and the holder's seconds."""

    def __init__(self) -> None:
        self.seconds, self.up, self.down, self.begun = 0.0, 0, 0, time.process_time()

    def carry(self, work: Callable[..., Any], message: bytes) -> Any:
        """Bring a message to the holder, and return its answer."""
        start = time.process_time()
        found = work(message)
        self.seconds += time.process_time() - start
        self.down += len(message)
        self.up += len(found) if isinstance(found, bytes) else 0
        return found

    def row(self, name: str, keys: bytes, error: float) -> dict[str, Any]:
        """A row of the table: seconds, megabytes and error."""
        owner = time.process_time() - self.begun - self.seconds
        return {
            "protocol": name,
            "owner, s a row": owner / ROWS,
            "holder, s a row": self.seconds / ROWS,
            "to the owner, MB a row": self.up / ROWS / 1e6,
            "to the holder, MB a row": self.down / ROWS / 1e6,
            "evaluation keys, MB": len(keys) / 1e6,
            "largest error": error,
        }


def run_masked(model: Any, x: np.ndarray, states: np.ndarray) -> dict[str, Any]:
    """The default protocol, which releases means."""
    holder, session, key = KeyHolder.new(x.shape[1]), os.urandom(16), os.urandom(32)
    public, found = holder.public(), list[np.ndarray]()
    owner = ModelOwner(model, "grid", public, session, key, DistanceLedger())
    holder.begin(session, key)
    link = Link()
    rows = link.carry(lambda _: holder.rows(x), b"")

    def release(block: int, message: bytes) -> None:
        found.append(link.carry(lambda m: holder.decrypt_released(m, len(x)), message))

    owner.run(rows, lambda message: link.carry(holder.refresh, message), release)
    want = owner.kind.clear(states / model.scales[:, None, None])
    return link.row("masked, grid", public, float(np.abs(np.stack(found, 1) - want).max()))


def run_permuted(model: Any, x: np.ndarray, states: np.ndarray) -> dict[str, Any]:
    """The paper's protocol, which releases all tokens in secret orders."""
    holder, session, key = PermutedKeyHolder.new(x.shape[1]), os.urandom(16), os.urandom(32)
    public, found, blocks = holder.public(), list[np.ndarray](), len(model.blocks)
    rng = np.random.default_rng(0)
    pi = [rng.permutation(len(x)) for _ in range(blocks + 1)]
    owner = PermutedModelOwner(model, "grid", public, session, key, DistanceLedger(), orders=pi)
    labels = rng.integers(10, size=len(x))
    holder.begin(session, key)
    link = Link()
    rows = link.carry(lambda _: join_messages(holder.rows(x), holder.labels(session, labels, 10)), b"")

    def turn(message: bytes) -> bytes:
        found.append(holder.states_of(message, len(x)))
        return holder.encrypt_states(session, found[-1]) if len(found) < blocks else b""

    def release(block: int, message: bytes) -> Any:
        if block < blocks:
            return link.carry(turn, message)
        came = link.carry(lambda m: holder.labels_of(m, len(x), 10), message)
        if not np.array_equal(came, labels[pi[-1]]):
            raise SystemExit("labels came back in another order")
        return b""

    owner.run(rows, lambda message: link.carry(holder.refresh, message), release)
    off = [np.abs(f - states[pi[b], b]).max() / model.scales[b] for b, f in enumerate(found)]
    return link.row("permuted", public, float(max(off)))


def main() -> None:
    options = common.arguments(__doc__)
    table = load_table(DataSpec(name="digits"), seed=0)
    whole = load_model(
        ModelSpec("nano-vit-fhe", adaptation=AdaptationSpec("head")), classes=table.classes, kind="image"
    )
    pixels = whole.prepare(table, range(ROWS)).tensors["pixel_values"]
    model = fold(whole.module)
    with torch.no_grad():
        states, x = block_states(whole.module, pixels).double().numpy(), model.patch(pixels).double().numpy()
    if options.quick:
        model = dataclasses.replace(model, blocks=model.blocks[:2], scales=model.scales[:2], ranges=model.ranges[:2])
        states = states[:, :2]
    with threadpool_limits(1):
        rows = [run_masked(model, x, states), run_permuted(model, x, states)]
    times, sizes = ([sum(r[k] for k in r if k.endswith(unit)) for r in rows] for unit in (", s a row", ", MB a row"))
    notes = [
        f"permuted takes {times[1] / times[0]:.2f} times the seconds and {sizes[1] / sizes[0]:.2f} times the bytes"
    ]
    common.emit(
        "Protocols of BlindFed", [{"title": f"{ROWS} rows, {len(model.blocks)} blocks", "rows": rows}], [], notes
    )


if __name__ == "__main__":
    main()
