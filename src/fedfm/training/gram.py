"""Linear heads trained in the span of a client's own rows, where that is cheaper than in the space of the weights.

Plain SGD moves W only along the features x_i of the client, so that W_t = s_t W_0 + A_t^T X with one coefficient a row
and class, A_t (n, C), and s_t the product of the weight decays. A batch's logits are then

    X_b W_t^T = s_t (X_b W_0^T) + (X_b X^T) A_t,

rows of two products that are computed once, X W_0^T and the Gram matrix X X^T. A step costs b n C multiply-adds
instead of b d C twice, which pays over several epochs of fewer rows than features. The bias is one more feature
that is always 1.
"""

from __future__ import annotations

from fedfm.training.optimisers import SGD

_FIXED = 1 << 20  # multiply-adds that take as long as the calls around the products


def pays(local: SGD, n: int, classes: int, width: int) -> bool:
    """Fewer multiplications than steps on the weights; decided by what the client itself holds."""
    whole, steps = n * n * width + 2 * n * width * classes, (local.epochs - 0.5) * n * n * classes
    return whole + steps + _FIXED < 2 * local.epochs * n * width * classes
