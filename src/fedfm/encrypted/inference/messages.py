"""Constants that key holder and model owner share: parameter sets, numbers of primes, notes and checkpoints."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np

from fedfm.encrypted.ckks import modular_kernels
from fedfm.encrypted.ckks.ring import SLOW_LINK, Parameters, Residues
from fedfm.errors import E_FORMAT, E_VERSION, ClientFault, InputError, Lost

SETS = (Parameters(), SLOW_LINK)  # append new sets: keys contain the index of their parameter set
FLOORS = (3, 4)  # for each set, number of primes at a refresh; 10^5 refreshes then spend a distance of at most 2^-40
RELEASE_LIMBS = 2  # number of primes of a block's states before a disclosure; the disclosed values have one fewer
SECRET, PUBLIC = b"FFHS", b"FFHP"  # marks at the start of keys
_OPENING = struct.Struct("<4sBI")  # mark, index of the parameter set, number of tokens
NOTE = struct.Struct("<BHHd")  # kind, block, features, largest magnitude
PERMUTED_STATES, LABELS = 16, 17  # kinds of notes that occur only in the "permuted" protocol
_CHECKPOINT = struct.Struct("<4sBHIBd")  # mark, parameters, blocks, count, primes, scale


def number_of(parameters: Parameters) -> int:
    """Return the index of a parameter set.

    Raises:
        InputError: the parameters are not one of :data:`SETS`.
    """
    if parameters not in SETS:
        raise InputError("the encryption parameters must be Parameters() or SLOW_LINK")
    return SETS.index(parameters)


def parameters_of(ring: int) -> Parameters:
    """Return the parameter set of the ring with this degree."""
    return next(parameters for parameters in SETS if parameters.degree == ring)


def floor_of(parameters: Parameters) -> int:
    """Return the number of primes that ciphertexts have when they are refreshed."""
    return FLOORS[number_of(parameters)]


def rows_limbs(parameters: Parameters) -> int:
    """Return the number of primes of encrypted rows; the last one is narrow, and the embedding's rescaling drops it."""
    return max(n for n in range(1, parameters.limbs + 1) if not parameters.wide(n))


def make_header(mark: bytes, parameters: Parameters, tokens: int) -> bytes:
    """Make the header of serialised keys."""
    return _OPENING.pack(mark, number_of(parameters), tokens)


def parse_header(mark: bytes, data: bytes) -> tuple[Parameters, int, bytes]:
    """Parse the header of :func:`make_header`; return parameters, tokens and the rest of the bytes.

    Raises:
        ClientFault: the bytes begin with another header.
    """
    if len(data) < _OPENING.size:
        raise ClientFault(E_FORMAT, "keys are cut off")
    found, number, tokens = _OPENING.unpack_from(data)
    if found != mark:
        raise ClientFault(E_FORMAT, "these bytes are not keys")
    if number >= len(SETS):
        raise ClientFault(E_VERSION, "the other side uses other encryption parameters")
    return SETS[number], tokens, data[_OPENING.size :]


@dataclass(frozen=True)
class Checkpoint:
    """The states after some blocks, encrypted under the client's key; a later session continues from here.

    Attributes:
        blocks: number of completed blocks, whose activations are disclosed already.
        scale: scale of the ciphertexts.
        residues: (d, 2, primes, N).
    """

    blocks: int
    scale: float
    residues: Residues
    parameters: Parameters

    def to_bytes(self) -> bytes:
        """Serialise the checkpoint, with a checksum against damage. Only the owner reads it."""
        count, _, limbs, _ = self.residues.shape
        bits = np.array(self.parameters.bits[:limbs], np.int64)
        words = np.empty((count, 2, int(bits.sum()) * self.parameters.degree // 64), np.uint64)
        modular_kernels.pack_rows(np.ascontiguousarray(self.residues), bits, words)
        number = number_of(self.parameters)
        head = _CHECKPOINT.pack(b"FFBC", number, self.blocks, count, limbs, self.scale)
        body = head + words.astype("<u8").tobytes()
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, data: bytes) -> Checkpoint:
        """Load a checkpoint from the bytes of :meth:`to_bytes`.

        Raises:
            Lost: the bytes are damaged.
        """
        body, check = data[:-32], data[-32:]
        if len(body) < _CHECKPOINT.size or hashlib.sha256(body).digest() != check:
            raise Lost("a checkpoint of encrypted states is damaged; remove it, and its batch starts again")
        mark, number, blocks, count, limbs, scale = _CHECKPOINT.unpack_from(body)
        if mark != b"FFBC" or number >= len(SETS):
            raise Lost("a checkpoint of encrypted states is of another version; remove it, and its batch starts again")
        parameters = SETS[number]
        bits = np.array(parameters.bits[:limbs], np.int64)
        words = np.frombuffer(body, "<u8", -1, _CHECKPOINT.size).astype(np.uint64).reshape(count, 2, -1)
        out = np.empty((count, 2, limbs, parameters.degree), np.int64)
        primes = np.array(parameters.primes[:limbs], np.int64)
        if not modular_kernels.unpack_rows(words, bits, out, primes):
            raise Lost("a checkpoint of encrypted states is damaged; remove it, and its batch starts again")
        return cls(blocks, scale, out, parameters)
