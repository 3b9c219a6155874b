"""CKKS with keys that SEAL makes, through ``tenseal.sealapi``. Only this module imports TenSEAL.

The client makes all keys, and only the client has the secret key (:class:`ClientKeys`). The server gets the other keys
as bytes and computes with them (:class:`ServerKeys`). Both classes represent ciphertexts as residues
(:mod:`~fedfm.encrypted.ckks.ciphertexts`).

SEAL checks little: it decrypts with a wrong key, and accepts a ciphertext with a flipped bit. So bytes from outside
always go through :mod:`~fedfm.encrypted.ckks.wire` first.
"""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfm.encrypted.ckks import encoding, noise_kernels, zero_encryptions
from fedfm.encrypted.ckks.ciphertexts import Ciphertexts, Refresh
from fedfm.encrypted.ckks.key_switching import KeySwitching
from fedfm.encrypted.ckks.ring import Parameters, Residues, Ring
from fedfm.errors import InputError, MissingExtra, RunError
from fedfm.privacy.crypto import keys

_SIZE_AT, _DATA_AT = 13 * 8, 14 * 8  # offsets of a ciphertext's data in SEAL 4.1's object
_MAGIC, _HEADER = (
    0xA15E,
    "<HBBBBHQ",
)  # header of SEAL's streams: mark, size of the header, version (2), compression, 0, length
_KEYS = "<4sQQQ"  # mark, sizes of the public, relinearisation and Galois keys


@lru_cache(maxsize=1)
def _seal() -> Any:
    """Import SEAL's operations.

    Raises:
        MissingExtra: TenSEAL is not installed.
    """
    try:
        from tenseal import sealapi
    except ImportError:
        raise MissingExtra('encrypted inference needs TenSEAL: pip install "fedfm[encrypted]"') from None
    return sealapi


@lru_cache(maxsize=4)
def ring_of(parameters: Parameters) -> Ring:
    """Return the ring of these parameters; its tables are computed only once."""
    return Ring(parameters)


class _Library:
    """A SEAL context whose ciphertexts are read and made as residues."""

    def __init__(self, parameters: Parameters) -> None:
        s = _seal()
        self.s, self.parameters = s, parameters
        settings = s.EncryptionParameters(s.SCHEME_TYPE.CKKS)
        settings.set_poly_modulus_degree(parameters.degree)
        settings.set_coeff_modulus([s.Modulus(q) for q in parameters.primes])
        self.context = s.SEALContext(settings, True, s.SEC_LEVEL_TYPE.TC128)
        if not self.context.parameters_set():  # SEAL itself raises no error for invalid parameters
            raise InputError(f"SEAL refuses these parameters: {self.context.parameters_error_message()}")
        self.evaluator = s.Evaluator(self.context)
        self.ids: dict[int, list[int]] = {}
        data = self.context.first_context_data()
        while data is not None:
            self.ids[len(list(data.parms().coeff_modulus()))] = list(data.parms_id())
            data = data.next_context_data()
        self.direct = False

    def check_access(self, encryptor: Any) -> None:
        """Check whether residues can be accessed by a pointer; if not, later calls use streams, which are slower."""
        ciphertext = self.s.Ciphertext(self.context)
        encryptor.encrypt_zero(self.ids[2], ciphertext)
        self._version = self._stream_version(ciphertext)
        self.direct = _pointer_fits(ciphertext)

    def empty(self) -> Any:
        """Make a SEAL ciphertext without content."""
        return self.s.Ciphertext(self.context)

    def read(self, ciphertext: Any) -> Residues:
        """Return a copy of the ciphertext's residues, (polynomials, primes, N)."""
        shape = (ciphertext.size(), ciphertext.coeff_modulus_size(), ciphertext.poly_modulus_degree())
        if self.direct:
            return _view(ciphertext).copy()
        numbers = ciphertext.dyn_array()
        return np.array([numbers.at(i) for i in range(numbers.size())], np.uint64).view(np.int64).reshape(shape)

    def read_key(self, parts: Sequence[Any]) -> Residues:
        """Return a key for key switching, (digits, 2, primes, N)."""
        return np.stack([self.read(part.data()) for part in parts])

    def _from_stream(self, residues: Residues, scale: float) -> Any:
        polynomials, limbs, degree = residues.shape
        numbers = np.ascontiguousarray(residues, "<i8").tobytes()
        inner = struct.pack("<Q", residues.size) + numbers
        inner = struct.pack(_HEADER, _MAGIC, 16, *self._version, 0, 0, 16 + len(inner)) + inner
        body = struct.pack("<4Q", *self.ids[limbs]) + struct.pack("<BQQQdQ", 1, polynomials, degree, limbs, scale, 1)
        header = struct.pack(_HEADER, _MAGIC, 16, *self._version, 0, 0, 16 + len(body) + len(inner))
        ciphertext = self.empty()
        load(ciphertext, header + body + inner, self.context)
        return ciphertext

    @staticmethod
    def _stream_version(ciphertext: Any) -> tuple[int, int]:
        _, _, major, minor, *_ = struct.unpack_from(_HEADER, dump(ciphertext))
        return major, minor


class ServerKeys:
    """The server's keys for one client: the client's public, relinearisation and Galois keys. They cannot decrypt.

    Attributes:
        floor: number of primes that ciphertexts must keep; 1 if there is no refresh.
        refresh: asks the client for fresh ciphertexts.

    Raises:
        InputError: the bytes are not keys for these parameters.
    """

    def __init__(self, parameters: Parameters, keys: bytes, *, floor: int = 1, refresh: Refresh | None = None) -> None:
        self.parameters, self.ring, self.floor, self.refresh = parameters, ring_of(parameters), floor, refresh
        self._library = library = _Library(parameters)
        s = library.s
        public, relinearisation, galois = s.PublicKey(), s.RelinKeys(), s.GaloisKeys()
        try:
            mark, *sizes = struct.unpack_from(_KEYS, keys)
            if mark != b"FFK1" or sum(sizes) + struct.calcsize(_KEYS) != len(keys) or not all(sizes):
                raise ValueError
            at = struct.calcsize(_KEYS)
            for key, size in zip((public, relinearisation, galois), sizes, strict=True):
                load(key, keys[at : at + size], library.context)
                at += size
        except (struct.error, ValueError, RuntimeError):
            raise InputError("these bytes are not public keys for these parameters") from None
        library.check_access(s.Encryptor(library.context, public))
        self._public = library.read(public.data())
        rotated = {2 * k + 1: parts for k, parts in enumerate(galois.data()) if parts}
        self._switching = KeySwitching(
            self.ring,
            library.read_key(relinearisation.data()[0]),
            {element: library.read_key(parts) for element, parts in rotated.items()},
        )
        if not self._switching.has(2 * parameters.degree - 1):
            raise InputError("the key of the conjugation is missing")

    def zeros(self, count: int, limbs: int, plus: Residues | None = None) -> Residues:
        """Return fresh encryptions of zero under the client's public key, (count, 2, limbs, N).

        With coefficients ``plus`` (count, limbs, N) they are encryptions of these.
        """
        return zero_encryptions.public_encryptions(self._public, count, limbs, self.ring, plus)

    def encrypt(self, values: NDArray[np.floating[Any]], limbs: int | None = None) -> Ciphertexts:
        """Encrypt real slots (count, N / 2) under the public key."""
        limbs = self.parameters.limbs if limbs is None else limbs
        plain = encoding.encode(np.asarray(values, np.float64), self.parameters.scale, self.parameters.degree)
        out = self.zeros(len(plain), limbs, encoding.modulo(plain, limbs, self.ring))
        return Ciphertexts(out.view(np.uint64), self.parameters.scale, self)

    def relinearise(self, x: Ciphertexts) -> Ciphertexts:
        """Reduce three polynomials to two."""
        if x.limbs.shape[1] == 2:
            return x
        return Ciphertexts(self._switching.relinearise(x.residues).view(np.uint64), x.scale, self)

    def relinearise_and_rescale(self, x: Ciphertexts) -> Ciphertexts:
        """Do both for each ciphertext in turn, which gives the same residues in less time."""
        if x.limbs.shape[1] == 2:
            return self.rescale(x)
        scale = x.scale / self.parameters.primes[x.level]
        return Ciphertexts(self._switching.relinearise(x.residues, drop=True).view(np.uint64), scale, self)

    def rescale(self, x: Ciphertexts) -> Ciphertexts:
        """Divide by the last prime, and drop this prime."""
        if not x.level:
            raise InputError("no level is left for a rescaling")
        scale = x.scale / self.parameters.primes[x.level]
        return Ciphertexts(self._switching.rescale(x.residues).view(np.uint64), scale, self)

    def conjugate(self, x: Ciphertexts) -> Ciphertexts:
        """Conjugate the slots."""
        found = self._switching.rotations(x.residues, [2 * self.parameters.degree - 1])[0]
        return Ciphertexts(found.view(np.uint64), x.scale, self)

    def can_rotate(self, steps: int) -> bool:
        """Whether the client sent the key for this rotation, or it needs none."""
        return self._switching.has(galois_element(steps, self.parameters.degree))

    def rotations(self, x: Ciphertexts, steps: Sequence[int]) -> Ciphertexts:
        """Rotate the slots by each of several steps: (count,) -> (len(steps) * count,), step by step.

        The value of slot i + step moves to slot i. Several steps of one call cost less than several calls.

        Raises:
            InputError: the client did not send a key for one of the rotations.
        """
        slots, degree = self.parameters.slots, self.parameters.degree
        if missing := [step for step in steps if not self.can_rotate(step)]:
            raise InputError(f"there is no key for a rotation by {missing[0] % slots} slots")
        found = self._switching.rotations(x.residues, [galois_element(step, degree) for step in steps])
        return Ciphertexts(found.reshape(-1, *found.shape[2:]).view(np.uint64), x.scale, self)


class ClientKeys:
    """All keys of one client.

    Args:
        parameters: the parameters that both sides agreed on.
        secret: an earlier value of :attr:`secret`; None to make new keys from the system's entropy.

    Raises:
        InputError: the bytes are not a secret key for these parameters.
    """

    def __init__(self, parameters: Parameters, secret: bytes | None = None) -> None:
        self.parameters, self.ring = parameters, ring_of(parameters)
        self._library = library = _Library(parameters)
        s = library.s
        if secret is None:
            self._generator = s.KeyGenerator(library.context)
            self._secret = self._generator.secret_key()
        else:
            self._secret = s.SecretKey()
            try:
                load(self._secret, secret, library.context)
            except (RuntimeError, ValueError):
                raise InputError("these bytes are not a secret key for these parameters") from None
            self._generator = s.KeyGenerator(library.context, self._secret)
        public = s.PublicKey()
        self._generator.create_public_key(public)
        self._public = dump(public)
        library.check_access(s.Encryptor(library.context, public))
        numbers = self._secret.data().dyn_array()
        words = np.array([numbers.at(i) for i in range(numbers.size())], np.uint64).view(np.int64)
        self._key: Residues = words.reshape(len(parameters.primes), parameters.degree)

    @property
    def secret(self) -> bytes:
        """The secret key as bytes, for a file that only the client can read."""
        return dump(self._secret)

    def public(self, rotations: Iterable[int] = ()) -> bytes:
        """Return the public, relinearisation and Galois keys as bytes, which the client sends to the server once.

        The Galois keys are those of the rotations and of the conjugation.
        """
        elements = {galois_element(r, self.parameters.degree) for r in rotations} | {2 * self.parameters.degree - 1}
        parts = [self._public, dump(self._generator.create_relin_keys())]
        parts.append(dump(self._generator.create_galois_keys(sorted(elements - {1}))))
        return struct.pack(_KEYS, b"FFK1", *map(len, parts)) + b"".join(parts)

    def encrypt_polynomials(self, coefficients: Residues, second: Residues | None = None) -> Residues:
        """Encrypt integer polynomials: coefficients (count, limbs, N) -> (count, 2, limbs, N).

        ``second`` (count, limbs, N) becomes the second polynomials. These are uniform values that the receiver can
        generate from a seed. The same values must never be used twice.
        """
        count, limbs, degree = coefficients.shape
        if second is None:
            second = zero_encryptions.uniform(keys.entropy(keys.KEY), count, limbs, self.parameters)
        error = zero_encryptions.errors(count, degree)
        out = np.empty((count, 2, limbs, degree), np.int64)
        noise_kernels.encrypt_with_secret(
            coefficients, error, second, self._key, out, self.ring.primes, self.ring.roots
        )
        return out

    def encrypt(self, values: NDArray[np.floating[Any]]) -> Residues:
        """Encrypt real slots (count, N / 2) as fresh ciphertexts (count, 2, limbs, N)."""
        plain = encoding.encode(np.asarray(values, np.float64), self.parameters.scale, self.parameters.degree)
        return self.encrypt_polynomials(encoding.modulo(plain, self.parameters.limbs, self.ring))

    def decrypt_polynomials(self, residues: Residues) -> Residues:
        """Decrypt to polynomials, which still contain noise: (count, 2 or 3, limbs, N) -> (count, limbs, N)."""
        out = np.ascontiguousarray(residues[:, -1])
        key = self._key_like(out)
        for polynomial in range(residues.shape[1] - 2, -1, -1):  # Horner's rule in s
            out = self.ring.dyadic(out, key, np.ascontiguousarray(residues[:, polynomial]))
        return out

    def decrypt(self, residues: Residues, scale: float) -> NDArray[np.float64]:
        """Decrypt to slots, (count, 2 or 3, limbs, N) -> (count, N / 2)."""
        return encoding.decode(encoding.to_coefficients(self.decrypt_polynomials(residues), self.ring), scale)

    def decrypt_complex(self, residues: Residues, scale: float) -> NDArray[np.complex128]:
        """Decrypt like :meth:`decrypt`, but to slots with imaginary parts."""
        return encoding.decode_complex(encoding.to_coefficients(self.decrypt_polynomials(residues), self.ring), scale)

    def _key_like(self, x: Residues) -> Residues:
        return np.ascontiguousarray(np.broadcast_to(self._key[: x.shape[1]], x.shape))


def galois_element(steps: int, degree: int) -> int:
    """Return the Galois element of the automorphism that rotates by ``steps`` slots."""
    return pow(3, steps % (degree // 2), 2 * degree)


def dump(thing: Any) -> bytes:
    """Serialise one of SEAL's objects to bytes."""
    with tempfile.TemporaryFile() as file:
        thing.save(_path(file))
        file.seek(0)
        return file.read()


def load(thing: Any, data: bytes, context: Any) -> None:
    """Load the bytes of :func:`dump` into an object; SEAL checks that the content matches the context.

    Raises:
        ValueError, RuntimeError: the content does not match.
    """
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        thing.load(context, _path(file))


def _path(file: Any) -> str:
    """Return a path for an unnamed file: SEAL opens files by path, and secrets should not leave a file behind."""
    path = f"/proc/self/fd/{file.fileno()}"
    if not os.path.exists(path):
        raise RunError("encrypted inference needs /proc, through which it passes keys to SEAL without a named file")
    return path


def _pointer_fits(ciphertext: Any) -> bool:
    """Whether the object has the expected memory layout: its size and some values are those that SEAL returns."""
    try:
        count = ciphertext.size() * ciphertext.coeff_modulus_size() * ciphertext.poly_modulus_degree()
        base = ctypes.c_void_p.from_address(id(ciphertext) + 16).value or 0
        if ctypes.c_uint64.from_address(base + _SIZE_AT).value != count:
            return False
        flat = _view(ciphertext).reshape(-1)
        places = range(0, count, max(count // 257, 1))
        return all(int(flat[i]) == ciphertext[i] for i in places) and not flat.ctypes.data % 8
    except (ValueError, TypeError):
        return False


def _view(ciphertext: Any) -> Residues:
    """Return a view of the residues in SEAL's memory; it is valid while the ciphertext exists and keeps its shape."""
    base = ctypes.c_void_p.from_address(id(ciphertext) + 16).value or 0
    address = ctypes.c_uint64.from_address(base + _DATA_AT).value
    shape = (ciphertext.size(), ciphertext.coeff_modulus_size(), ciphertext.poly_modulus_degree())
    if ctypes.c_uint64.from_address(base + _SIZE_AT).value != shape[0] * shape[1] * shape[2]:
        raise RunError("a ciphertext of SEAL does not have the expected memory layout")
    view: Residues = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int64)), shape=shape)
    return view
