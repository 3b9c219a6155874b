"""nano-clip's forward pass in numpy, from the safetensors file alone, as a check of what transformers computes.

python by_hand.py --model path/to/nano_clip
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from scipy.special import erf
from transformers import AutoTokenizer

PROMPTS = ("a photo of a dog.", "a drawing of a guitar.")
Weights = dict[str, np.ndarray]


def picture(k: int) -> np.ndarray:
    """A made-up picture, uint8 (80, 80, 3): stripes (k = 0) or rings (k = 1) in three colours."""
    y, x = np.mgrid[:80, :80]
    waves = [(2 + c) * x + 3 * y if k == 0 else (x - 40) ** 2 // (c + 3) + (y - 30) ** 2 // 5 for c in range(3)]
    return np.stack([v % 256 for v in waves], -1).astype(np.uint8)


def linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """A layer with bias."""
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def norm(w: Weights, name: str, x: np.ndarray, eps: float) -> np.ndarray:
    """Layer normalisation over the last axis."""
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    """The exact GELU."""
    return x * (1 + erf(x / np.sqrt(2))) / 2


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int) -> np.ndarray:
    """Softmax attention of (T, d) to (T, d)."""
    q, k, v = (m.reshape(len(m), heads, -1).swapaxes(0, 1) for m in (q, k, v))  # (heads, T, d / heads)
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    share = np.exp(scores - scores.max(-1, keepdims=True))
    return (share / share.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(q.shape[1], -1)


def image_embedding(w: Weights, pixels: np.ndarray) -> np.ndarray:
    """The normalised embedding of a picture uint8 (80, 80, 3), which needs no resizing."""
    x = (pixels / 127.5 - 1).reshape(5, 16, 5, 16, 3).transpose(0, 2, 4, 1, 3).reshape(25, -1)  # row-major patches
    e = "vision_model.embeddings"
    kernel = w[f"{e}.patch_embeddings.projection.weight"].reshape(192, -1)
    x = x @ kernel.T + w[f"{e}.patch_embeddings.projection.bias"]
    x = np.concatenate([w[f"{e}.cls_token"][0], x]) + w[f"{e}.position_embeddings"][0]
    for k in range(5):
        b = f"vision_model.encoder.layer.{k}"
        n = norm(w, f"{b}.layernorm_before", x, 1e-6)
        q, key, v = (linear(w, f"{b}.attention.attention.{p}", n) for p in ("query", "key", "value"))
        x = x + linear(w, f"{b}.attention.output.dense", attention(q, key, v, 3))
        n = norm(w, f"{b}.layernorm_after", x, 1e-6)
        x = x + linear(w, f"{b}.output.dense", gelu(linear(w, f"{b}.intermediate.dense", n)))
    x = linear(w, "vision_model.pooler.dense", norm(w, "vision_model.layernorm", x, 1e-6)[0])
    x = x @ w["visual_projection.weight"].T
    return x / np.linalg.norm(x)


def text_embedding(w: Weights, ids: list[int]) -> np.ndarray:
    """The normalised embedding of the tokens of one prompt."""
    e = "text_model.embeddings"
    x = w[f"{e}.word_embeddings.weight"][ids] + w[f"{e}.position_embeddings.weight"][: len(ids)]
    x = norm(w, f"{e}.LayerNorm", x + w[f"{e}.token_type_embeddings.weight"][0], 1e-12)
    for k in range(3):
        b = f"text_model.encoder.layer.{k}"
        q, key, v = (linear(w, f"{b}.attention.self.{p}", x) for p in ("query", "key", "value"))
        a = linear(w, f"{b}.attention.output.dense", attention(q, key, v, 4))
        x = norm(w, f"{b}.attention.output.LayerNorm", x + a, 1e-12)
        h = linear(w, f"{b}.output.dense", gelu(linear(w, f"{b}.intermediate.dense", x)))
        x = norm(w, f"{b}.output.LayerNorm", x + h, 1e-12)
    x = np.tanh(linear(w, "text_model.pooler.dense", x[0])) @ w["text_projection.weight"].T
    return x / np.linalg.norm(x)


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, required=True)
    a = p.parse_args()
    w = {name: x.astype(np.float64) for name, x in load_file(a.model / "model.safetensors").items()}
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    texts = np.stack([text_embedding(w, tokens) for tokens in ids])
    images = np.stack([image_embedding(w, picture(k)) for k in range(2)])
    print("tokens", ids)
    print("logits", (np.exp(w["logit_scale"]) * images @ texts.T).round(4).tolist())


if __name__ == "__main__":
    main()
