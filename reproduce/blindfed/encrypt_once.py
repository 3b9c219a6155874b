"""A student on one batch of encrypted pictures, block by block, against the student in the clear.

    python reproduce/blindfed/encrypt_once.py .data/vit_tiny_fhe .data/cifar10.npz --head .data/vit_tiny_patch16_224

Two processes: the holder of the rows and the owner of the model, joined by bytes, one core each. Every refresh goes
through the holder. The pictures are the data's first test rows, as many as a ciphertext takes. After each block the
encrypted states are opened here with the holder's key and compared with those of the module in float64; a real owner
could not. ``--head`` names the model whose classifier reads the student's features. A killed run continues from the
folder ``--work``; ``--so-far`` shows its blocks. ``--blocks`` sets the number of blocks. The tables replace those in
docs/results/blindfed-vit-tiny.md between the marks that end with ``--mark``, unless ``--no-page`` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from page import table, write
from torch import Tensor

from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.encrypted.ckks.refresh import DistanceLedger
from fedfm.encrypted.inference.cost_estimate import plan
from fedfm.encrypted.inference.model_owner import Checkpoint, KeyHolder
from fedfm.encrypted.inference.released_states import Released
from fedfm.encrypted.inference.worker_pool import EncryptedBatch, run_all
from fedfm.encrypted.student import conversion
from fedfm.encrypted.student.folding import block_states, fold
from fedfm.models import derived_modules
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.spec import AdaptationSpec, ModelSpec

TICK = os.sysconf("SC_CLK_TCK")


class Watch:
    """The holder, and what every block costs and gives.

    Args:
        want: (n, L, T, d), the states in the clear; they are released over ``scales`` (L,).
        work: folder of the checkpoint, the key and the lines so far.
    """

    def __init__(
        self, holder: KeyHolder, rows: np.ndarray, want: np.ndarray, scales: np.ndarray, shape: Released, work: Path
    ) -> None:
        self.holder, self._rows, self._want, self._scales = holder, rows, want, scales
        self._shape, self._work = shape, work
        self.lines: list[dict[str, Any]] = read(work / "lines.json", [])
        self.last = np.zeros(0)
        self._new()

    def _new(self) -> None:
        self._began, self._owner, self._client = time.monotonic(), (0.0, 0.0), 0.0
        self._bytes = self._refreshes = 0
        self._released = 0.0

    def rows(self, job: EncryptedBatch) -> bytes:
        self.holder.begin(job.session, job.key)
        if job.start is not None:
            return b""
        begin = time.process_time()
        message = self.holder.rows(self._rows)
        save(self._work / "rows.json", {"bytes": len(message), "seconds": time.process_time() - begin})
        self._new()
        return message

    def refresh(self, job: EncryptedBatch, message: bytes) -> bytes:
        begin = time.process_time()
        if not any(self._owner):
            self._owner = spent_by_child()
        answer = self.holder.refresh(message)
        self._client += time.process_time() - begin
        self._bytes += len(message) + len(answer)
        self._refreshes += 1
        return answer

    def release(self, job: EncryptedBatch, block: int, message: bytes) -> None:
        self._bytes += len(message)
        got = self.holder.decrypt_released(message, len(self._rows))
        want = self._shape.clear(self._want[:, block]) / self._scales[block]
        self._released = float(np.abs(got - want).max())

    def save(self, job: EncryptedBatch, checkpoint: bytes) -> None:
        seconds = time.monotonic() - self._began
        own, system = (now - then for now, then in zip(spent_by_child(), self._owner, strict=True))
        kept = Checkpoint.from_bytes(checkpoint)
        slots = self.holder._keys.decrypt(kept.residues, kept.scale)  # the comparison, not the protocol
        self.last = self.holder.layout.unpack(slots, len(self._rows))
        want = self._want[:, kept.blocks - 1]
        off = self.last - want
        line = {
            "block": kept.blocks,
            "owner CPU s": own + system,
            "the system's": system,
            "client CPU s": self._client,
            "wall s": seconds,
            "refreshes": self._refreshes,
            "MB a picture": self._bytes / self.holder.layout.samples / 1e6,
            "largest state": float(np.abs(want).max()),
            "rms state": float(np.sqrt((want**2).mean())),
            "largest error": float(np.abs(off).max()),
            "rms error": float(np.sqrt((off**2).mean())),
            "largest error released": self._released,
        }
        self.lines.append(line)
        print(json.dumps({k: round(v, 6) for k, v in line.items()}), flush=True)
        save(self._work / "lines.json", self.lines)
        (self._work / "checkpoint").write_bytes(checkpoint)
        self._new()


def spent_by_child() -> tuple[float, float]:
    """CPU seconds of the owner's process so far: its own, and the system's for it."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended
        if int(fields[1]) == os.getpid():
            return int(fields[11]) / TICK, int(fields[12]) / TICK
    return 0.0, 0.0


def read(path: Path, default: Any) -> Any:
    """What :func:`save` wrote, or the default."""
    return json.loads(path.read_text()) if path.exists() else default


def save(path: Path, value: Any) -> None:
    """Write a value as JSON."""
    path.write_text(json.dumps(value, indent=1))


def features(model: Model, states: Tensor) -> Tensor:
    """The head's inputs, of the last block's states (n, T, d)."""
    norm, extra = model.parts.norm, hasattr(model.parts.embedding, "cls_token")
    y = norm(states)  # type: ignore[misc]
    return y[:, 0] if extra else y.mean(1)


def load_classifier(name: str, classes: tuple[str, ...]) -> Model:
    """Load a model with its saved head, if that head has as many classes."""
    spec = ModelSpec(name, adaptation=AdaptationSpec("full"), device="cpu")
    return load_model(spec, classes=classes, kind="image", keep_head=True)


def classifier(name: str) -> torch.nn.Linear:
    """The saved head of a model."""
    labels = json.loads((Path(name) / "config.json").read_text())["id2label"]
    model = load_classifier(name, tuple(labels[str(i)] for i in range(len(labels))))
    if model.new or model.head is None:
        raise SystemExit(f"{name} has no classifier of its own")
    return model.head.double()


def main() -> None:
    """One batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model"), parser.add_argument("data")
    parser.add_argument("--head"), parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path(".runs/encrypt_once"))
    parser.add_argument("--no-page", action="store_true"), parser.add_argument("--so-far", action="store_true")
    parser.add_argument("--blocks", type=int, help="so many blocks, from the first one")
    parser.add_argument("--mark", default="", help="what the marks of the tables end with")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    if a.so_far:
        text = table(read(a.work / "lines.json", []))
        print(text)
        if not a.no_page:
            write(f"encrypted blocks{a.mark}", text)
        return
    data = load_table(DataSpec(path=a.data), seed=0, task="classification")
    model = load_classifier(a.model, data.classes)
    matrices = fold(model.module)
    matrices = replace(matrices, blocks=matrices.blocks[: a.blocks])
    tokens = len(matrices.positions)
    key = a.work / "holder"
    holder = KeyHolder.from_bytes(key.read_bytes()) if key.exists() else KeyHolder.new(tokens)
    key.write_bytes(holder.to_bytes())
    count = min(a.rows or holder.layout.samples, holder.layout.samples)
    index = data.rows("test")[np.linspace(0, len(data.rows("test")) - 1, count).astype(int)]
    rows = model.prepare(data, index)
    pixels = rows.tensors["pixel_values"]
    module: Any = model.module.double()
    conversion.forget(module)
    with torch.no_grad():
        states = torch.cat([block_states(module, part.double()) for part in pixels.split(16)])
    outside = sum(n for n, _ in derived_modules.violations(module).values())
    planned = plan(matrices, [count], "class")
    print(planned.table(), flush=True)
    shape = Released("class", tokens, states.shape[-1], class_token=matrices.class_token)
    watch = Watch(holder, matrices.patch(pixels).double().numpy(), states.numpy(), matrices.scales, shape, a.work)
    public, ledger = holder.public(), DistanceLedger(**read(a.work / "distance.json", {}))
    ledger.keep = lambda it: save(a.work / "distance.json", {"spent": it.spent, "ciphertexts": it.ciphertexts})
    kept = a.work / "checkpoint"
    start = Checkpoint.from_bytes(kept.read_bytes()) if kept.exists() else None
    if start is None or start.blocks < len(matrices.blocks):
        job = EncryptedBatch("a", 0, public, os.urandom(16), os.urandom(32), ledger, start)
        if failed := run_all([job], watch, 1, folded=matrices, released="class"):
            raise SystemExit(str(failed))
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        save(a.work / "memory.json", max(memory, read(a.work / "memory.json", 0.0)))
    elif not len(watch.last):
        watch.last = holder.layout.unpack(holder._keys.decrypt(start.residues, start.scale), count)
    report(a, model, watch, states, planned.to_dict(), outside, len(public), ledger)


def report(
    a: argparse.Namespace,
    model: Model,
    watch: Watch,
    states: Tensor,
    planned: dict[str, Any],
    outside: int,
    key_bytes: int,
    ledger: DistanceLedger,
) -> None:
    """Both tables."""
    n, lines, rows = len(states), watch.lines, read(a.work / "rows.json", {})
    batch = watch.holder.layout.samples
    owner, client = (sum(line[f"{side} CPU s"] for line in lines) for side in ("owner", "client"))
    megabytes = sum(line["MB a picture"] for line in lines) + rows["bytes"] / batch / 1e6
    found: list[tuple[str, Any, Any]] = [
        ("pictures of the batch", n, planned["batch"]),
        ("owner, CPU s a block", owner / len(lines), planned["seconds_per_block"][0]),
        ("client, CPU s a block", client / len(lines), planned["seconds_per_block"][1]),
        ("owner and client, CPU s a picture", (owner + client) / batch, planned["seconds"] / batch),
        ("MB a picture", megabytes, planned["bytes_per_sample"] / 1e6),
        ("refreshes a block", lines[-1]["refreshes"], planned["wide"] + planned["narrow"]),
        ("refreshed ciphertexts", ledger.ciphertexts, planned["refreshed"]),
        (
            "statistical distance while all arguments are within their intervals, log2",
            float(np.log2(ledger.spent)),
            float(np.log2(planned["statistical_distance"])),
        ),
        ("evaluation keys, MB", key_bytes / 1e6, planned["key_bytes"] / 1e6),
        ("owner's process, peak GB", read(a.work / "memory.json", None), None),
        ("arguments outside their intervals", outside, None),
    ]
    if len(lines) == states.shape[1]:
        with torch.no_grad():
            want, got = (features(model, x) for x in (states[:, -1], torch.from_numpy(watch.last)))
        found += [
            ("features of the head: largest error", float((got - want).abs().max()), None),
            ("features of the head: their rms", float(want.square().mean().sqrt()), None),
        ]
    if a.head and len(lines) == states.shape[1]:
        head = classifier(a.head)
        with torch.no_grad():
            said, says = head(want), head(got)
        found += [
            ("logits: largest error", float((says - said).abs().max()), None),
            ("same class of the clear student, of all", int((says.argmax(1) == said.argmax(1)).sum()), n),
        ]
    whole = [{"": what, "measured": x, "planned": y} for what, x, y in found]
    print(table(lines), table(whole), sep="\n\n")
    save(a.work / "result.json", {"lines": lines, "whole": whole})
    if not a.no_page:
        write(f"encrypted blocks{a.mark}", table(lines))
        write(f"encrypted run{a.mark}", table(whole))


if __name__ == "__main__":
    main()
