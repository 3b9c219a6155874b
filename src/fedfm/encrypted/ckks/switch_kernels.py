"""Compiled key switching and rescaling: the algorithms of SEAL 4.1, for many ciphertexts and several keys at a time.

A polynomial c is cut into digits, its residues modulo each prime, and each digit is transformed modulo all primes. The
sum of the digits times a key encrypts P c times the key's secret, where P is the special prime; it is then divided by
P. For several rotations of one ciphertext the digits are computed once (Halevi, Shoup. Faster homomorphic linear
transformations in HElib. CRYPTO 2018).

``moduli`` are indexes of the primes. Tables of transforms are those of :class:`~fedfm.encrypted.ckks.ring.Ring`.
"""

from __future__ import annotations

import numpy as np

from fedfm.encrypted.ckks.modular_kernels import remainder, times
from fedfm.encrypted.ckks.transform_kernels import backward_row, forward_row
from fedfm.linalg.kernels.jit import compile_cached

_TOGETHER = 4  # number of ciphertexts whose digits are kept, so that a key is read less often
_PLAIN: set[str] = set()
_INT, _FLOAT = np.int64, np.float64


def _decompose(c, moduli, out, primes, roots, inverse_roots, shrink):  # type: ignore[no-untyped-def]
    """Cut c (l, N) into digits modulo all primes: out (l, l + 1, N). Centred digits halve the noise of their sums."""
    forth, forth_ratios, last, last_ratios = roots
    back, back_ratios, back_last, back_last_ratios = inverse_roots
    digit = np.empty(c.shape[1], _INT)
    for i in range(c.shape[0]):
        k = moduli[i]
        digit[:] = c[i]
        backward_row(digit, back[k], back_ratios[k], back_last[k], back_last_ratios[k], shrink[k], primes[k])
        half = primes[k] // 2
        for n in range(digit.shape[0]):
            digit[n] = digit[n] - primes[k] if digit[n] > half else digit[n]
        for j in range(out.shape[1]):
            m, target = moduli[j], out[i, j]
            q = primes[m]
            if m == k:
                target[:] = c[i]
                continue
            if q < primes[k]:
                inverse = 1.0 / _FLOAT(q)
                for n in range(digit.shape[0]):
                    target[n] = remainder(digit[n], q, inverse)
            else:
                target[:] = digit
            forward_row(target, forth[m], forth_ratios[m], last[m], last_ratios[m], q)


def _weigh_digits(digits, key, moduli, limb, out, primes):  # type: ignore[no-untyped-def]
    """Sum the digits times a key modulo one prime: digits (l, l + 1, N), key (l, 2, primes, N) -> out[:, limb]."""
    width = min(1024, digits.shape[2])
    s0, s1 = np.empty(width, _INT), np.empty(width, _INT)
    m = moduli[limb]
    q = primes[m]
    inverse = 1.0 / _FLOAT(q)
    for start in range(0, digits.shape[2], width):
        s0[:], s1[:] = 0, 0
        for i in range(digits.shape[0]):
            d = digits[i, limb, start : start + width]
            k0, k1 = key[i, 0, m, start : start + width], key[i, 1, m, start : start + width]
            for n in range(width):
                ratio = _FLOAT(d[n]) * inverse
                s0[n] += times(k0[n], d[n], ratio, q)
                s1[n] += times(k1[n], d[n], ratio, q)
        o0, o1 = out[0, limb, start : start + width], out[1, limb, start : start + width]
        for n in range(width):
            o0[n] = remainder(s0[n], q, inverse)
            o1[n] = remainder(s1[n], q, inverse)


def _divide(x, moduli, out, primes, inverses, roots, inverse_roots, shrink):  # type: ignore[no-untyped-def]
    """Divide x (l + 1, N) by its last prime, with rounding, and drop this prime: out (l, N).

    ``inverses[k, j]`` is the inverse of prime k modulo prime j.
    """
    forth, forth_ratios, last, last_ratios = roots
    back, back_ratios, back_last, back_last_ratios = inverse_roots
    count = x.shape[0] - 1
    k = moduli[count]
    q, size = primes[k], x.shape[1]
    half = q // 2
    digit, part = x[count].copy(), np.empty(size, _INT)
    backward_row(digit, back[k], back_ratios[k], back_last[k], back_last_ratios[k], shrink[k], q)
    for n in range(size):
        r = digit[n] + half
        digit[n] = r - q if r >= q else r
    for j in range(count):
        m = moduli[j]
        p = primes[m]
        inverse = 1.0 / _FLOAT(p)
        fix = half % p
        for n in range(size):
            part[n] = remainder(digit[n] - fix, p, inverse)
        forward_row(part, forth[m], forth_ratios[m], last[m], last_ratios[m], p)
        w = inverses[k, m]
        ratio = _FLOAT(w) * inverse
        source, target = x[j], out[j]
        for n in range(size):
            target[n] = remainder(times(source[n] - part[n], w, ratio, p), p, inverse)


def _divide_by_two(x, moduli, out, primes, inverses, roots, inverse_roots, shrink):  # type: ignore[no-untyped-def]
    """Divide x (l + 1, N) by its last two primes P and q together, with rounding, and drop both: out (l - 1, N).

    One division by P q needs l + 1 transforms, two divisions need 2 l + 1. The remainder modulo P q is a + P b: a is
    x modulo P, and b is (x - a) / P modulo q, both of least magnitude.
    """
    forth, forth_ratios, last, last_ratios = roots
    back, back_ratios, back_last, back_last_ratios = inverse_roots
    count = x.shape[0] - 2
    special, k = moduli[count + 1], moduli[count]
    large, q, size = primes[special], primes[k], x.shape[1]
    low, high, part = x[count + 1].copy(), x[count].copy(), np.empty(size, _INT)
    backward_row(
        low, back[special], back_ratios[special], back_last[special], back_last_ratios[special], shrink[special], large
    )
    backward_row(high, back[k], back_ratios[k], back_last[k], back_last_ratios[k], shrink[k], q)
    inverse, w = 1.0 / _FLOAT(q), inverses[special, k]
    ratio = _FLOAT(w) * inverse
    for n in range(size):
        low[n] = low[n] - large if low[n] > large // 2 else low[n]
        v = remainder(times(high[n] - remainder(low[n], q, inverse), w, ratio, q), q, inverse)
        high[n] = v - q if v > q // 2 else v
    for j in range(count):
        m = moduli[j]
        p = primes[m]
        inverse = 1.0 / _FLOAT(p)
        w = large % p
        ratio = _FLOAT(w) * inverse
        for n in range(size):
            part[n] = remainder(low[n] + times(high[n], w, ratio, p), p, inverse)
        forward_row(part, forth[m], forth_ratios[m], last[m], last_ratios[m], p)
        w = remainder(times(inverses[special, m], inverses[k, m], _FLOAT(inverses[k, m]) * inverse, p), p, inverse)
        ratio = _FLOAT(w) * inverse
        source, target = x[j], out[j]
        for n in range(size):
            target[n] = remainder(times(source[n] - part[n], w, ratio, p), p, inverse)


decompose, weigh_digits, divide, divide_by_two = (
    compile_cached(f, _PLAIN) for f in (_decompose, _weigh_digits, _divide, _divide_by_two)
)


def _rescale(x, moduli, out, primes, inverses, roots, inverse_roots, shrink):  # type: ignore[no-untyped-def]
    """Divide ciphertexts by their last prime: x (rows, 2, l + 1, N) -> out (rows, 2, l, N)."""
    for row in range(x.shape[0]):
        for polynomial in range(x.shape[1]):
            divide(
                x[row, polynomial],
                moduli,
                out[row, polynomial],
                primes,
                inverses,
                roots,
                inverse_roots,
                shrink,
            )


def _digit_sums(c, key, moduli, centred, sums, primes, roots, inverse_roots, shrink):  # type: ignore[no-untyped-def]
    """Sum the digits of c (l, N) times one key: sums (2, l + 1, N). Each digit is used as soon as it is transformed.

    ``centred`` is 1 for the digits of :func:`decompose`, and 0 for those of SEAL.
    """
    forth, forth_ratios, last, last_ratios = roots
    back, back_ratios, back_last, back_last_ratios = inverse_roots
    limbs, size = c.shape
    digits, digit = c.copy(), np.empty(size, _INT)
    for i in range(limbs):
        k = moduli[i]
        backward_row(digits[i], back[k], back_ratios[k], back_last[k], back_last_ratios[k], shrink[k], primes[k])
        if centred:
            source, whole, half = digits[i], primes[k], primes[k] // 2
            for n in range(size):
                source[n] = source[n] - whole if source[n] > half else source[n]
    for j in range(limbs + 1):
        m = moduli[j]
        q = primes[m]
        inverse = 1.0 / _FLOAT(q)
        s0, s1 = sums[0, j], sums[1, j]
        s0[:], s1[:] = 0, 0
        for i in range(limbs):
            if i == j:
                digit[:] = c[i]
            else:
                source = digits[i]
                for n in range(size):
                    digit[n] = remainder(source[n], q, inverse)
                forward_row(digit, forth[m], forth_ratios[m], last[m], last_ratios[m], q)
            k0, k1 = key[i, 0, m], key[i, 1, m]
            for n in range(size):
                ratio = _FLOAT(digit[n]) * inverse
                s0[n] += times(k0[n], digit[n], ratio, q)
                s1[n] += times(k1[n], digit[n], ratio, q)
        for n in range(size):
            s0[n], s1[n] = remainder(s0[n], q, inverse), remainder(s1[n], q, inverse)


digit_sums = compile_cached(_digit_sums, _PLAIN)


def _rotate(  # type: ignore[no-untyped-def]
    x, keys, which, places, at, moduli, out, primes, inverses, roots, inverse_roots, shrink
):
    """Apply several automorphisms to each ciphertext. The digits of a single one are not kept.

    Args:
        x: (rows, 2, l, N).
        keys: (all keys, digits, 2, primes, N).
        which: (S,), the keys to use.
        places: (S, N), the place of each entry of the result in the sum.
        at: (S,), the indexes of the results in ``out``.
        moduli: the indexes of the l primes and of the special prime.
        out: (S or more, rows, 2, l, N).
    """
    rows, _, limbs, size = x.shape
    single = which.shape[0] == 1
    together = 1 if single else min(_TOGETHER, rows)
    digits = np.empty((together, limbs, limbs + 1, size), _INT)
    sums = np.empty((together, 2, limbs + 1, size), _INT)
    done = np.empty((limbs, size), _INT)
    for start in range(0, rows, together):
        count = min(together, rows - start)
        for r in range(count):
            if single:
                digit_sums(x[start, 1], keys[which[0]], moduli, 1, sums[0], primes, roots, inverse_roots, shrink)
            else:
                decompose(x[start + r, 1], moduli, digits[r], primes, roots, inverse_roots, shrink)
        for s in range(which.shape[0]):
            place = places[s]
            for limb in range(0 if single else limbs + 1):
                for r in range(count):
                    weigh_digits(digits[r], keys[which[s]], moduli, limb, sums[r], primes)
            for r in range(count):
                for polynomial in range(2):
                    divide(sums[r, polynomial], moduli, done, primes, inverses, roots, inverse_roots, shrink)
                    for j in range(limbs):
                        q, a, o = primes[moduli[j]], done[j], out[at[s], start + r, polynomial, j]
                        if polynomial == 0:
                            b = x[start + r, 0, j]
                            for n in range(size):
                                v = a[n] + b[n]
                                a[n] = v - q if v >= q else v
                        for n in range(size):
                            o[n] = a[place[n]]


def _relinearise(x, key, moduli, out, drop, primes, inverses, roots, inverse_roots, shrink):  # type: ignore[no-untyped-def]
    """Reduce three polynomials to two: x (rows, 3, l, N), key (digits, 2, primes, N) -> out (rows, 2, l, N).

    If ``drop`` is 1, divide the result by its last prime as well: out (rows, 2, l - 1, N).
    """
    limbs, size = x.shape[2:]
    sums, done = np.empty((2, limbs + 1, size), _INT), np.empty((limbs, size), _INT)
    special = primes[moduli[limbs]]
    for row in range(x.shape[0]):
        digit_sums(x[row, 2], key, moduli, 0, sums, primes, roots, inverse_roots, shrink)
        for polynomial in range(2):
            target = out[row, polynomial]
            if drop:  # P times the polynomial is added before the division
                for j in range(limbs):
                    q, a, b = primes[moduli[j]], sums[polynomial, j], x[row, polynomial, j]
                    w, inverse = special % q, 1.0 / _FLOAT(q)
                    ratio = _FLOAT(w) * inverse
                    for n in range(size):
                        a[n] = remainder(a[n] + times(b[n], w, ratio, q), q, inverse)
                divide_by_two(sums[polynomial], moduli, target, primes, inverses, roots, inverse_roots, shrink)
            else:
                divide(sums[polynomial], moduli, done, primes, inverses, roots, inverse_roots, shrink)
                for j in range(limbs):
                    q, a, b, o = primes[moduli[j]], done[j], x[row, polynomial, j], target[j]
                    for n in range(size):
                        v = a[n] + b[n]
                        o[n] = v - q if v >= q else v


rescale, rotate, relinearise = (compile_cached(f, _PLAIN) for f in (_rescale, _rotate, _relinearise))
