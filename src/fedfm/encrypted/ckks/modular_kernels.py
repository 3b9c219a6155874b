"""Compiled loops over residues: sums, products, matrix products in float64 pieces.

Residues are int64 in [0, q) for primes q below 2^50. Quotients are computed in float64 and have an error of at most
one: the product of two residues, divided by q, is below 2^50, and three roundings with a relative error of 2^-53 change
it by less than 1/2.
Arrays of residues have the shape (..., primes, N); the functions here expect (rows, primes, N).
"""

from __future__ import annotations

import numpy as np

from fedfm.linalg.kernels.jit import compile_cached, part

LARGEST = 1 << 50  # primes are below this
_PLAIN: set[str] = set()  # fastmath options: none, since relaxed arithmetic could make a quotient wrong by two
_INT, _UINT, _FLOAT = np.int64, np.uint64, np.float64


def _reduce(r, q):  # type: ignore[no-untyped-def]
    """Reduce a number from [-q, 2 q) to [0, q)."""
    r = r + q if r < 0 else r
    return r - q if r >= q else r


def _times(v, w, ratio, q):  # type: ignore[no-untyped-def]
    """Return the product of v and w modulo q, in [-q, 2 q); ``ratio`` is w / q."""
    return v * w - _INT(_FLOAT(v) * ratio) * q


def _remainder(r, q, inverse):  # type: ignore[no-untyped-def]
    """Return the remainder modulo q of any int64 with a magnitude below 2^62."""
    r = r - _INT(np.floor(_FLOAT(r) * inverse)) * q
    return reduce(r, q)


reduce, times, remainder = part(_reduce, _PLAIN), part(_times, _PLAIN), part(_remainder, _PLAIN)


def _add(a, b, sign, out, primes):  # type: ignore[no-untyped-def]
    for row in range(a.shape[0]):
        for limb in range(a.shape[1]):
            q = primes[limb]
            x, y, o = a[row, limb], b[row, limb], out[row, limb]
            if sign > 0:
                for i in range(x.shape[0]):
                    r = x[i] + y[i]
                    o[i] = r - q if r >= q else r
            else:
                for i in range(x.shape[0]):
                    r = x[i] - y[i]
                    o[i] = r + q if r < 0 else r


def _subtract_from(a, b, primes):  # type: ignore[no-untyped-def]
    """Subtract b (rows, primes, N) from the first polynomials of a (rows, 2, primes, N), in place."""
    for row in range(a.shape[0]):
        for limb in range(b.shape[1]):
            q, x, y = primes[limb], a[row, 0, limb], b[row, limb]
            for i in range(x.shape[0]):
                r = x[i] - y[i]
                x[i] = r + q if r < 0 else r


def _add_turned(a, b, units, sign, primes):  # type: ignore[no-untyped-def]
    """Add ``sign`` u b to a, in place, where u = X^(N/2): a, b (rows, primes, N); ``units`` is i modulo each prime.

    In evaluation form u is i in the first half of the values, whose roots have exponents 1 modulo 4, and -i in the
    other half.
    """
    half = a.shape[2] // 2
    for row in range(a.shape[0]):
        for limb in range(a.shape[1]):
            q = primes[limb]
            for start in (0, half):
                w = units[limb] if (start == 0) == (sign > 0) else q - units[limb]
                ratio = _FLOAT(w) / _FLOAT(q)
                x, y = a[row, limb, start : start + half], b[row, limb, start : start + half]
                for i in range(half):
                    r = x[i] + reduce(times(y[i], w, ratio, q), q)
                    x[i] = r - q if r >= q else r


def _unpair(x, y, units, out, primes):  # type: ignore[no-untyped-def]
    """Compute x + y, then (y - x) u of the first rows: x, y (rows, primes, N), out (up to 2 rows, primes, N)."""
    half, rows = x.shape[2] // 2, x.shape[0]
    for row in range(rows):
        for limb in range(x.shape[1]):
            q, a, b, o = primes[limb], x[row, limb], y[row, limb], out[row, limb]
            for i in range(a.shape[0]):
                r = a[i] + b[i]
                o[i] = r - q if r >= q else r
            if rows + row >= out.shape[0]:
                continue
            for start in (0, half):
                w = q - units[limb] if start else units[limb]
                ratio = _FLOAT(w) / _FLOAT(q)
                c, d, p = a[start : start + half], b[start : start + half], out[rows + row, limb, start : start + half]
                for i in range(half):
                    p[i] = reduce(times(d[i] - c[i], w, ratio, q), q)


def _halve(x, odd, primes):  # type: ignore[no-untyped-def]
    """Subtract ``odd`` (rows, N), the remainders modulo 2, from x (rows, primes, N), and halve the result, in place."""
    for row in range(x.shape[0]):
        for limb in range(x.shape[1]):
            q, y, o = primes[limb], x[row, limb], odd[row]
            for i in range(y.shape[0]):
                r = y[i] - o[i]
                r = r + q if r < 0 else r
                y[i] = (r + (r & 1) * q) >> 1


def _affine(a, factor, shift, out, primes):  # type: ignore[no-untyped-def]
    """Multiply each of the N coefficients of a by ``factor`` (rows, primes), and add ``shift`` (rows, primes)."""
    for row in range(a.shape[0]):
        for limb in range(a.shape[1]):
            q, w, c = primes[limb], factor[row, limb], shift[row, limb]
            ratio = _FLOAT(w) / _FLOAT(q)
            x, o = a[row, limb], out[row, limb]
            for i in range(x.shape[0]):
                r = reduce(times(x[i], w, ratio, q), q) + c
                o[i] = r - q if r >= q else r


def _dyadic(a, b, c, out, primes):  # type: ignore[no-untyped-def]
    """Compute the elementwise product of a and b, plus c."""
    for row in range(a.shape[0]):
        for limb in range(a.shape[1]):
            q = primes[limb]
            inverse = 1.0 / _FLOAT(q)
            x, y, z, o = a[row, limb], b[row, limb], c[row, limb], out[row, limb]
            for i in range(x.shape[0]):
                r = reduce(times(x[i], y[i], _FLOAT(y[i]) * inverse, q), q) + z[i]
                o[i] = r - q if r >= q else r


def _tensor(a, b, out, primes):  # type: ignore[no-untyped-def]
    """Sum products of ciphertexts: a, b (terms, 2, primes, N) -> out (3, primes, N), for at most 2^10 terms."""
    width = min(1024, a.shape[3])
    s0, s1, s2 = np.empty(width, _INT), np.empty(width, _INT), np.empty(width, _INT)
    for limb in range(a.shape[2]):
        q = primes[limb]
        inverse = 1.0 / _FLOAT(q)
        for start in range(0, a.shape[3], width):
            s0[:], s1[:], s2[:] = 0, 0, 0
            for k in range(a.shape[0]):
                a0, a1 = a[k, 0, limb, start : start + width], a[k, 1, limb, start : start + width]
                b0, b1 = b[k, 0, limb, start : start + width], b[k, 1, limb, start : start + width]
                for i in range(width):
                    r0, r1 = _FLOAT(b0[i]) * inverse, _FLOAT(b1[i]) * inverse
                    s0[i] += times(a0[i], b0[i], r0, q)
                    s1[i] += times(a0[i], b1[i], r1, q) + times(a1[i], b0[i], r0, q)
                    s2[i] += times(a1[i], b1[i], r1, q)
            o0, o1, o2 = out[0, limb, start:], out[1, limb, start:], out[2, limb, start:]
            for i in range(width):
                o0[i] = remainder(s0[i], q, inverse)
                o1[i] = remainder(s1[i], q, inverse)
                o2[i] = remainder(s2[i], q, inverse)


def _outer(a, b, steps, out, primes):  # type: ignore[no-untyped-def]
    """Sum products of ciphertexts for all pairs (i, j): out[i n + j] = sum over k of a[i s + k t] b[j u + k v].

    Args:
        a, b: (.., 2, primes, N).
        steps: m, n, the number of terms (at most 2^10), s, t, u, v.
        out: (m n, 3, primes, N).
    """
    m, n, terms, s, t, u, v = steps
    width = min(256, a.shape[3])  # so that the parts of a and of one row of b stay in the cache
    s0, s1, s2 = np.empty(width, _INT), np.empty(width, _INT), np.empty(width, _INT)
    for limb in range(a.shape[2]):
        q = primes[limb]
        inverse = 1.0 / _FLOAT(q)
        for start in range(0, a.shape[3], width):
            end = start + width
            for j in range(n):
                for i in range(m):
                    s0[:], s1[:], s2[:] = 0, 0, 0
                    for k in range(terms):
                        x, y = i * s + k * t, j * u + k * v
                        a0, a1 = a[x, 0, limb, start:end], a[x, 1, limb, start:end]
                        b0, b1 = b[y, 0, limb, start:end], b[y, 1, limb, start:end]
                        for c in range(width):
                            r0, r1 = _FLOAT(b0[c]) * inverse, _FLOAT(b1[c]) * inverse
                            s0[c] += times(a0[c], b0[c], r0, q)
                            s1[c] += times(a0[c], b1[c], r1, q) + times(a1[c], b0[c], r0, q)
                            s2[c] += times(a1[c], b1[c], r1, q)
                    to = i * n + j
                    o0, o1, o2 = out[to, 0, limb, start:end], out[to, 1, limb, start:end], out[to, 2, limb, start:end]
                    for c in range(width):
                        o0[c] = remainder(s0[c], q, inverse)
                        o1[c] = remainder(s1[c], q, inverse)
                        o2[c] = remainder(s2[c], q, inverse)


def _weave(a, b, out, primes):  # type: ignore[no-untyped-def]
    """Sum products with plaintexts: a (terms, 2, primes, N), b (terms, primes, N) -> out (2, primes, N)."""
    width = min(1024, a.shape[3])
    s = np.empty(width, _INT)
    for limb in range(a.shape[2]):
        q = primes[limb]
        inverse = 1.0 / _FLOAT(q)
        for polynomial in range(a.shape[1]):
            for start in range(0, a.shape[3], width):
                s[:] = 0
                for k in range(a.shape[0]):
                    x, y = a[k, polynomial, limb, start : start + width], b[k, limb, start : start + width]
                    for i in range(width):
                        s[i] += times(x[i], y[i], _FLOAT(y[i]) * inverse, q)
                o = out[polynomial, limb, start:]
                for i in range(width):
                    o[i] = remainder(s[i], q, inverse)


def _split(x, start, shift, out):  # type: ignore[no-untyped-def]
    """Cut the columns ``start``, ``start`` + 1, ... of x (rows, N) into float64 pieces of ``shift`` bits.

    The output has the shape (pieces, rows, width).
    """
    low = (_INT(1) << shift) - 1
    for row in range(x.shape[0]):
        for piece in range(out.shape[0]):
            source, target, down = x[row, start:], out[piece, row], piece * shift
            for i in range(target.shape[0]):
                target[i] = _FLOAT((source[i] >> down) & low)


def _join(products, start, shift, q, out):  # type: ignore[no-untyped-def]
    """Combine products of pieces (pieces, rows, width) modulo q, into columns of out (rows, N)."""
    inverse = 1.0 / _FLOAT(q)
    step = (_INT(1) << shift) % q
    ratio = _FLOAT(step) * inverse
    pieces = products.shape[0]
    for row in range(out.shape[0]):
        target = out[row, start:]
        for piece in range(pieces - 1, -1, -1):
            source = products[piece, row]
            if piece == pieces - 1:
                for i in range(source.shape[0]):
                    target[i] = remainder(_INT(source[i]), q, inverse)
            else:
                for i in range(source.shape[0]):
                    r = remainder(_INT(source[i]), q, inverse) + reduce(times(target[i], step, ratio, q), q)
                    target[i] = r - q if r >= q else r


def _residues(words, bits, shift, out, primes):  # type: ignore[no-untyped-def]
    """Compute the residues of integers minus ``shift`` (primes,).

    The integers are given as words of ``bits`` bits (rows, words, N), the lowest word first.
    """
    for row in range(out.shape[0]):
        for limb in range(out.shape[1]):
            q, o = primes[limb], out[row, limb]
            inverse = 1.0 / _FLOAT(q)
            step = (_INT(1) << bits) % q
            ratio = _FLOAT(step) * inverse
            top = words[row, words.shape[1] - 1]
            for i in range(o.shape[0]):
                o[i] = top[i]
            for word in range(words.shape[1] - 2, -1, -1):
                w = words[row, word]
                for i in range(o.shape[0]):
                    o[i] = times(o[i], step, ratio, q) + w[i]  # below 1.3 q + 2^bits
            for i in range(o.shape[0]):
                o[i] = remainder(o[i] - shift[limb], q, inverse)


def _digits(x, half, products, inverses, primes):  # type: ignore[no-untyped-def]
    """Compute Garner's mixed-radix digits of x + ``half`` in place: x (rows, primes, N).

    ``products[l, k]`` is the product of the first k primes modulo prime l; ``inverses[l]`` is the inverse of
    ``products[l, l]``.
    """
    for row in range(x.shape[0]):
        for limb in range(x.shape[1]):
            q, y = primes[limb], x[row, limb]
            inverse = 1.0 / _FLOAT(q)
            last = _FLOAT(inverses[limb]) * inverse
            for i in range(y.shape[0]):
                r = y[i] + half[limb]
                y[i] = r - q if r >= q else r
            for k in range(limb):
                p, ratio, d = products[limb, k], _FLOAT(products[limb, k]) * inverse, x[row, k]
                for i in range(y.shape[0]):
                    r = y[i] - reduce(times(remainder(d[i], q, inverse), p, ratio, q), q)
                    y[i] = r + q if r < 0 else r
            for i in range(y.shape[0]):
                y[i] = reduce(times(y[i], inverses[limb], last, q), q)


def _from_digits(digits, half, products, out, primes):  # type: ignore[no-untyped-def]
    """Compute the number with these digits, minus ``half``, modulo other primes: out (rows, other primes, N)."""
    for row in range(out.shape[0]):
        for limb in range(out.shape[1]):
            q, o = primes[limb], out[row, limb]
            inverse = 1.0 / _FLOAT(q)
            for i in range(o.shape[0]):
                o[i] = q - half[limb] if half[limb] > 0 else 0
            for k in range(digits.shape[1]):
                p, ratio, d = products[limb, k], _FLOAT(products[limb, k]) * inverse, digits[row, k]
                for i in range(o.shape[0]):
                    r = o[i] + reduce(times(remainder(d[i], q, inverse), p, ratio, q), q)
                    o[i] = r - q if r >= q else r


def _pack(x, bits, out):  # type: ignore[no-untyped-def]
    """Pack residues (primes, N) into words of 64 bits; each residue of prime l takes ``bits[l]`` bits."""
    at, room, word = 0, _UINT(64), _UINT(0)
    for limb in range(x.shape[0]):
        width = _UINT(bits[limb])
        for i in range(x.shape[1]):
            v = _UINT(x[limb, i])
            word |= v << (_UINT(64) - room)
            if room <= width:
                out[at] = word
                at += 1
                word = v >> room if room < _UINT(64) else _UINT(0)
                room += _UINT(64)
            room -= width
    if room < _UINT(64):
        out[at] = word


def _unpack(words, bits, out):  # type: ignore[no-untyped-def]
    """Invert :func:`pack`."""
    bit = _UINT(0)
    for limb in range(out.shape[0]):
        width = _UINT(bits[limb])
        mask = (_UINT(1) << width) - _UINT(1)
        for i in range(out.shape[1]):
            at, off = bit >> _UINT(6), bit & _UINT(63)
            v = words[at] >> off
            if off + width > _UINT(64):
                v |= words[at + _UINT(1)] << (_UINT(64) - off)
            out[limb, i] = _INT(v & mask)
            bit += width


add, subtract_from, affine, dyadic = (compile_cached(f, _PLAIN) for f in (_add, _subtract_from, _affine, _dyadic))
add_turned, unpair, halve = (compile_cached(f, _PLAIN) for f in (_add_turned, _unpair, _halve))
tensor, outer, weave = (compile_cached(f, _PLAIN) for f in (_tensor, _outer, _weave))
split, join, residues, digits, from_digits = (
    compile_cached(f, _PLAIN) for f in (_split, _join, _residues, _digits, _from_digits)
)
pack, unpack = compile_cached(_pack, _PLAIN), compile_cached(_unpack, _PLAIN)


def _pack_rows(x, bits, out):  # type: ignore[no-untyped-def]
    """Pack the first polynomials of x (rows, polynomials, primes, N) into out (rows, sent, words)."""
    for row in range(out.shape[0]):
        for polynomial in range(out.shape[1]):
            pack(x[row, polynomial], bits, out[row, polynomial])


def _unpack_rows(words, bits, out, primes):  # type: ignore[no-untyped-def]
    """Invert :func:`pack_rows`; return whether all residues are below their primes."""
    excess = _INT(0)
    for row in range(words.shape[0]):
        for polynomial in range(words.shape[1]):
            unpack(words[row, polynomial], bits, out[row, polynomial])
            for limb in range(out.shape[2]):
                q, x = primes[limb], out[row, polynomial, limb]
                for i in range(x.shape[0]):
                    excess |= q - 1 - x[i]  # negative if x[i] >= q
    return excess >= 0


pack_rows, unpack_rows = compile_cached(_pack_rows, _PLAIN), compile_cached(_unpack_rows, _PLAIN)
