"""A causal language model's cohort as one batch: would it be faster than client by client?

    python benchmarks/causal.py

Forward and backward of LoRA on the small LLaMA, float32, one thread: a batch of one client, and one of four clients put
together, as the general loop computes them with autograd. A cohort trained as one batch could at best gain what the
larger batch gains a row; adapters of its own for each client cost on top. Where four times the rows take four times as
long there is nothing to gain, and clients are trained one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import common
import torch

from fedfm.core.rows import Rows
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec

CLIENTS = 4
LENGTHS = (64, 16)
SIZES = (8, 1)  # rows a batch of one client


def main() -> None:
    options = common.arguments(__doc__, turns={"type": int, "default": 15})
    folder = common.SHARED / "weights" / "stories260K-llama"
    if not folder.exists():
        common.skip(f"no {folder}")
    torch.set_num_threads(1)
    lora = AdaptationSpec("lora", rank=4)
    model = load_model(ModelSpec(str(folder), task="language_modelling", adaptation=lora), classes=(), kind="text")
    vocabulary = model.module.config.vocab_size
    draw = torch.Generator().manual_seed(0)

    def step(rows: int, length: int) -> Callable[[], None]:
        tokens = torch.randint(vocabulary, (rows, length), generator=draw)
        batch = Rows({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}).batch(range(rows))

        def run() -> None:
            model.loss(batch).backward()  # type: ignore[no-untyped-call]
            for p in model.live().values():
                p.grad = None

        return run

    table = []
    for length in LENGTHS:
        for size in SIZES:
            variants = {"one": step(size, length), "four": step(CLIENTS * size, length)}
            times = common.interleave(variants, 3 if options.quick else options.turns)
            gain = common.ratio(times["one"], times["four"])
            table.append(
                {
                    "tokens a row": length,
                    "rows of a client": size,
                    "one client, CPU ms": 1e3 * common.median(times["one"]),
                    "four together, CPU ms": 1e3 * common.median(times["four"]),
                    "gain of one batch at most": {k: round(CLIENTS * x, 2) for k, x in gain.items()},
                }
            )
    common.emit("Clients of a causal model, together and alone", [{"title": "Forward and backward", "rows": table}], [])


if __name__ == "__main__":
    main()
