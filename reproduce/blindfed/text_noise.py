r"""Where the noise of an encrypted block of texts is amplified: noise is added to one stage at a time, in the clear.

    python reproduce/blindfed/text_noise.py .data/minilm_fhe ../shared/data/text/banking77.jsonl.gz

Each folded block of the student runs in float64 on its exact input. Normal noise of 1e-6 is added to one stage; the
table has the largest change of the disclosed mean over places, divided by 1e-6. The last line adds noise of ``--noise``
to the row sums of every block, and to nothing else, and carries the errors on from block to block.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import page
import torch
from text_student import rows_of, student_of, tokens_of
from torch import Tensor

from fedfm.encrypted.student.folding import fold
from fedfm.encrypted.student.text_places import embed, embedding_tables

SIGMA = 1e-6
ATTENTION = ("query", "key", "value", "scores", "powers", "sums", "inverses", "attention", "mixed")
STAGES = ("input", *ATTENTION, "norm1", "hidden", "norm2")


def block_of(block: Any, x: Tensor, real: Tensor, noise: dict[str, float]) -> Tensor:
    """Compute a folded block on x (n, T, d), as text_block_states does, with normal noise at the named stages."""
    w = {key: torch.from_numpy(np.ascontiguousarray(value)).double() for key, value in block.weights.items()}
    n, places, d = x.shape
    rng = torch.Generator().manual_seed(1)

    def at(name: str, y: Tensor) -> Tensor:
        return y + noise[name] * torch.randn(y.shape, dtype=y.dtype, generator=rng) if name in noise else y

    def linear(name: str, y: Tensor) -> Tensor:
        return y @ w[name].T + w[f"{name}_bias"]

    def heads(y: Tensor) -> Tensor:
        return y.reshape(n, places, block.heads, -1).transpose(1, 2)

    def norm(y: Tensor, which: int) -> Tensor:
        y = at(f"norm{which + 1}", y)
        return y * block.norms[which].evaluate(y.square().mean(-1, keepdim=True))

    x, mask = at("input", x), real.double()
    q, k, v = at("query", heads(linear("query", x))), heads(linear("key", x)), at("value", heads(linear("value", x)))
    k = k - k.mean(-2, keepdim=True)
    k = at("key", k + w["key_offset"].reshape(block.heads, 1, -1) if "key_offset" in w else k)
    shift = w["score_shift"][:, None, None] if "score_shift" in w else 0.0
    powers = at("powers", block.exponential.evaluate(at("scores", q @ k.transpose(-1, -2) + shift)))
    c = torch.from_numpy(block.inverse_scales)[:, None, None]
    sums = at("sums", (powers * mask[:, None, None]).sum(-1, keepdim=True) * c)
    folded = block.inverse.evaluate_folded(sums * block.inverse.fold[0]) * (c / block.inverse.start)
    weights = at("attention", powers * at("inverses", folded))
    mixed = at("mixed", weights @ (v * mask[:, None, :, None])).transpose(1, 2).reshape(n, places, d)
    z = norm(linear("residual", x) + linear("output", mixed), 0)
    hidden = at("hidden", block.gelu.evaluate(linear("up", z)))
    return norm(linear("skip", z) + linear("down", hidden), 1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("student"), parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--noise", type=float, default=5e-7, help="of the row sums, in the last line")
    a = parser.parse_args()
    model = student_of(a.student)
    folded = fold(model.module)
    ids, lengths = tokens_of(model, [row["text"] for row in rows_of(a.data, 0, 2)["test"][: a.rows]])
    x = embed(ids, lengths, embedding_tables(model.module))
    real, x = x[..., -1].bool(), x[..., :-1]
    lines: list[dict[str, Any]] = [{"noise at": name} for name in [*STAGES, f"all row sums, {a.noise:g}: error"]]
    far = x
    for number, block in enumerate(folded.blocks):
        exact = block_of(block, x, real, {})
        for line, name in zip(lines, STAGES, strict=False):
            off = block_of(block, x, real, {name: SIGMA}) - exact
            line[f"block {number + 1}"] = float(off.mean(1).abs().max()) / SIGMA
        x, far = exact, block_of(block, far, real, {"sums": a.noise})
        lines[-1][f"block {number + 1}"] = float((far - x).mean(1).abs().max()) / float(folded.scales[number])
    print(page.table(lines), flush=True)


if __name__ == "__main__":
    main()
