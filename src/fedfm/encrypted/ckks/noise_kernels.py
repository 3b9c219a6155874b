"""Compiled loops for fresh encryptions: small random integers from random words, and encryptions of zero."""

from __future__ import annotations

import numpy as np

from fedfm.encrypted.ckks.modular_kernels import remainder, times
from fedfm.encrypted.ckks.transform_kernels import forward_row
from fedfm.linalg.kernels.jit import compile_cached, part

HALF = 21  # number of bits in each of the two sums of an error
_PLAIN: set[str] = set()
_INT, _UINT, _FLOAT = np.int64, np.uint64, np.float64
_FIVES, _THREES, _ONES = _UINT(0x5555555555555555), _UINT(0x3333333333333333), _UINT(0x0F0F0F0F0F0F0F0F)
_EIGHTS, _SIXTEENS = _UINT(0x00FF00FF00FF00FF), _UINT(0xFFFF)


def _bits_set(w):  # type: ignore[no-untyped-def]
    """Count the bits that are 1, by sums of neighbours (Warren. Hacker's delight. 2002, section 5-1)."""
    w = w - ((w >> _UINT(1)) & _FIVES)
    w = (w & _THREES) + ((w >> _UINT(2)) & _THREES)
    w = (w + (w >> _UINT(4))) & _ONES
    w = (w & _EIGHTS) + ((w >> _UINT(8)) & _EIGHTS)
    w = w + (w >> _UINT(16))
    return (w + (w >> _UINT(32))) & _SIXTEENS


bits_set = part(_bits_set, _PLAIN)


def _errors(words, out):  # type: ignore[no-untyped-def]
    """Compute centred binomial numbers from 42 bits of each word: the difference of two sums of 21 bits."""
    mask = (_UINT(1) << _UINT(HALF)) - _UINT(1)
    for row in range(words.shape[0]):
        w, o = words[row], out[row]
        for i in range(w.shape[0]):
            o[i] = _INT(bits_set(w[i] & mask)) - _INT(bits_set((w[i] >> _UINT(HALF)) & mask))


def _ternary(words, out):  # type: ignore[no-untyped-def]
    """Compute the remainder of each word modulo three, minus one. 2^32, 2^16 and 2^8 are 1 modulo three."""
    for row in range(words.shape[0]):
        w, o = words[row], out[row]
        for i in range(w.shape[0]):
            s = (w[i] & _UINT(0xFFFFFFFF)) + (w[i] >> _UINT(32))
            s = (s & _SIXTEENS) + ((s >> _UINT(16)) & _SIXTEENS) + (s >> _UINT(32))
            s = (s & _UINT(0xFF)) + (s >> _UINT(8))
            third = (s * _UINT(683)) >> _UINT(11)  # exact for s below 2^11
            o[i] = _INT(s - _UINT(3) * third) - 1


def _encrypt(factor, noise, plus, public, out, primes, roots):  # type: ignore[no-untyped-def]
    """Encrypt polynomials under a public key.

    Args:
        factor: (rows, N), ternary.
        noise: (2, rows, N), small errors.
        plus: coefficients (rows, limbs, N), or (0, limbs, N) for encryptions of zero.
        public: (2, primes, N).
        out: (rows, 2, limbs, N).
    """
    forth, ratios, last, last_ratios = roots
    x, y = np.empty(factor.shape[1], _INT), np.empty(factor.shape[1], _INT)
    for row in range(factor.shape[0]):
        for limb in range(out.shape[2]):
            q = primes[limb]
            inverse = 1.0 / _FLOAT(q)
            x[:] = factor[row]
            forward_row(x, forth[limb], ratios[limb], last[limb], last_ratios[limb], q)
            for polynomial in range(2):
                e, k, o = noise[polynomial, row], public[polynomial, limb], out[row, polynomial, limb]
                if polynomial == 0 and plus.shape[0]:
                    p = plus[row, limb]
                    for i in range(e.shape[0]):
                        y[i] = e[i] + p[i]
                else:
                    y[:] = e
                forward_row(y, forth[limb], ratios[limb], last[limb], last_ratios[limb], q)
                for i in range(e.shape[0]):
                    o[i] = remainder(times(k[i], x[i], _FLOAT(x[i]) * inverse, q) + y[i], q, inverse)


def _encrypt_with_secret(plain, noise, second, key, out, primes, roots):  # type: ignore[no-untyped-def]
    """Encrypt polynomials under a secret key.

    Args:
        plain: coefficients (rows, limbs, N).
        noise: (rows, N), small errors.
        second: (rows, limbs, N), uniform; the second polynomials.
        key: (primes, N), the secret.
        out: (rows, 2, limbs, N).
    """
    forth, ratios, last, last_ratios = roots
    y = np.empty(plain.shape[2], _INT)
    for row in range(plain.shape[0]):
        e = noise[row]
        for limb in range(plain.shape[1]):
            q = primes[limb]
            inverse = 1.0 / _FLOAT(q)
            x, a, k = plain[row, limb], second[row, limb], key[limb]
            o0, o1 = out[row, 0, limb], out[row, 1, limb]
            for i in range(y.shape[0]):
                y[i] = x[i] + e[i]
            forward_row(y, forth[limb], ratios[limb], last[limb], last_ratios[limb], q)
            for i in range(y.shape[0]):
                o0[i] = remainder(y[i] - times(k[i], a[i], _FLOAT(a[i]) * inverse, q), q, inverse)
                o1[i] = a[i]


def _keep_below(words, mask, limit, out, found):  # type: ignore[no-untyped-def]
    """Append the words, each after ``mask``, that are below a limit to out; return the new number of entries."""
    for i in range(words.shape[0]):
        v = _INT(words[i] & mask)
        out[found] = v
        found += v < limit
        if found == out.shape[0]:
            break
    return found


errors, ternary, keep_below = (compile_cached(f, _PLAIN) for f in (_errors, _ternary, _keep_below))
encrypt, encrypt_with_secret = compile_cached(_encrypt, _PLAIN), compile_cached(_encrypt_with_secret, _PLAIN)
