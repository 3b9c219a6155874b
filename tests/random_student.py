"""Random pre-norm transformers of polynomials: what encrypted inference takes, and what it should give in the clear."""

import math
from dataclasses import dataclass

import numpy as np

from fedfm.encrypted.student.polynomials import Exponential, Inverse, InverseSquareRoot, Quadratic


class Clear(np.ndarray):
    """Numbers with a square."""

    def square(self):
        return self * self


def apply(polynomial, x):
    a, b = polynomial.fold
    return np.asarray(polynomial.evaluate_folded((a * x + b).view(Clear)))


@dataclass(frozen=True)
class Layer:
    weights: dict
    heads: int
    norms: tuple
    exponential: Exponential
    inverse: Inverse
    inverse_scales: np.ndarray
    gelu: Quadratic
    centred_keys: bool = True


@dataclass(frozen=True)
class Model:
    embedding: np.ndarray
    bias: np.ndarray
    positions: np.ndarray
    blocks: tuple
    scales: np.ndarray
    ranges: np.ndarray
    bound: float = 64.0
    class_token: bool = False


def random_layer(x, m, heads, rng):
    """A block whose intervals fit the tokens x (samples, T, d), and what it makes of them."""
    d = x.shape[-1]
    shapes = dict.fromkeys(("query", "key", "value", "output"), (d, d)) | {"up": (m, d), "down": (d, m)}
    w = {name: rng.normal(0, 1 / math.sqrt(shape[1]), shape) for name, shape in shapes.items()}
    w |= {f"{name}_bias": rng.normal(0, 0.1, shape[0]) for name, shape in shapes.items()}
    w["query"] /= math.sqrt(d // heads)
    for name in ("output", "down", "output_bias", "down_bias"):
        w[name] = 0.5 * (w[name] - w[name].mean(0))

    def split(v):
        return v.reshape(*v.shape[:2], heads, -1).transpose(0, 2, 1, 3)

    def fitted(v):
        variance = (v**2).mean(-1, keepdims=True)
        made = InverseSquareRoot(3, (float(variance.min()) / 1.1, float(variance.max()) * 1.1))
        return v * apply(made, variance), made

    exponential, gelu = Exponential(2, 3), Quadratic(0.2116, 0.5, 0.0705)
    y, first = fitted(x)
    q, k, v = (split(y @ w[name].T + w[f"{name}_bias"]) for name in ("query", "key", "value"))
    e = apply(exponential, q @ (k - k.mean(2, keepdims=True)).transpose(0, 1, 3, 2))
    rows = e.sum(-1, keepdims=True)
    scales = 2 / (rows.min((0, 2, 3)) / 1.1 + rows.max((0, 2, 3)) * 1.1)
    inverse, c = Inverse(4, scale=1.0), scales[None, :, None, None]
    p = e * apply(inverse, rows * c) * c
    z = x + (p @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ w["output"].T + w["output_bias"]
    y, second = fitted(z)
    out = z + apply(gelu, y @ w["up"].T + w["up_bias"]) @ w["down"].T + w["down_bias"]
    return Layer(w, heads, (first, second), exponential, inverse, scales, gelu), out


def random_model(samples, tokens=4, d=4, m=6, heads=2, blocks=2, features=3, seed=0):
    """Model, rows (samples, T, F), states (samples, L, T, d) over the blocks' scales."""
    rng = np.random.default_rng(seed)
    rows = rng.uniform(0, 1, (samples, tokens, features))
    embedding = rng.normal(0, 1 / math.sqrt(features), (d, features))
    bias, positions = rng.normal(0, 0.1, d), rng.normal(0, 1, (tokens, d))
    centre = np.eye(d) - 1 / d
    embedding, bias, positions = centre @ embedding, centre @ bias, positions @ centre
    x = rows @ embedding.T + bias + positions
    layers, states = [], []
    for _ in range(blocks):
        layer, x = random_layer(x, m, heads, rng)
        layers.append(layer)
        states.append(x)
    scales = np.array([np.sqrt((s**2).mean()) for s in states])
    ranges = np.array([1.3 * np.abs(s).max() for s in states])
    model = Model(embedding, bias, positions, tuple(layers), scales, ranges)
    return model, rows, np.stack(states, 1) / scales[:, None, None]
