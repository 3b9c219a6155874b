"""A folded block by its definition, in NumPy."""

import numpy as np
import torch


def by_definition(block, x):
    """One block in NumPy, from its matrices and the recipes alone: (n, T, d) -> (n, T, d)."""

    def value(polynomial, v):
        a, b = polynomial.fold
        return polynomial.evaluate_folded(torch.from_numpy(a * v + b)).numpy()

    def norm(v, polynomial):
        return v * value(polynomial, (v * v).mean(-1, keepdims=True))

    def linear(name, v):
        return v @ block.weights[name].T + block.weights[f"{name}_bias"]

    y = norm(x, block.norms[0])
    q, k, v = (linear(name, y) for name in ("query", "key", "value"))
    size, heads = x.shape[-1] // block.heads, []
    for h in range(block.heads):
        at = slice(h * size, (h + 1) * size)
        keys = k[..., at]
        places = 1 << (keys.shape[1] - 1).bit_length()
        if block.centred_keys:  # over the places, where the first tokens count twice
            keys = keys - np.concatenate([keys, keys[:, : places - keys.shape[1]]], 1).mean(1, keepdims=True)
        keys = keys + (block.weights["key_offset"][at] if "key_offset" in block.weights else 0.0)
        shift = block.weights["score_shift"][h] if "score_shift" in block.weights else 0.0
        powers = value(block.exponential, np.einsum("ntd,nsd->nts", q[..., at], keys) + shift)
        c = block.inverse_scales[h]
        inverses = block.inverse.evaluate_folded(torch.from_numpy(powers.sum(-1, keepdims=True) * c)).numpy()
        inverses = inverses * c / block.inverse.start
        heads.append((powers * inverses) @ v[..., at])
    z = x + linear("output", np.concatenate(heads, -1))
    y = norm(z, block.norms[1])
    out = z + linear("down", value(block.gelu, linear("up", y)))
    return out + linear("skip", y) if "skip" in block.weights else out


def states_by_definition(folded, x):
    tokens = folded.patch(x).numpy() @ folded.embedding.T + folded.bias + folded.positions
    out = []
    for block in folded.blocks:
        tokens = by_definition(block, tokens)
        out.append(tokens)
    return np.stack(out, 1)
