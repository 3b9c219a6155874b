"""Agreement on keys (X25519), derivation (HKDF-SHA-256), encryption (ChaCha20-Poly1305), signatures (Ed25519).

All keys are 32 raw bytes. A context is a sequence of text, bytes and integers; :func:`encode` gives different
bytes for different contexts.
"""

from __future__ import annotations

import hashlib
import os

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY, SIGNATURE = 32, 64  # bytes
SEALED = 28  # bytes that :func:`seal` adds
_NONCE = 12
_P = 2**255 - 19  # both curves are over this field

entropy = os.urandom  # tests replace it

Context = str | bytes | int


def encode(*context: Context) -> bytes:
    """A context as bytes: kind, length and content of each part."""
    out = bytearray()
    for part in context:
        kind = type(part).__name__[0].encode()
        data = part if isinstance(part, bytes) else str(part).encode()
        out += kind + len(data).to_bytes(8, "little") + data
    return bytes(out)


def derive(secret: bytes, *context: Context) -> bytes:
    """A key for one purpose, which the context names, derived from a uniform secret."""
    return HKDF(SHA256(), KEY, None, encode(*context)).derive(secret)


def public_of(private: bytes) -> bytes:
    """Public half of a key for :func:`agree`."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, *context: Context) -> bytes:
    """The key that two clients share. Each computes it from its own private half and the other's public half.

    Raises:
        ValueError: the public half is a point of small order, with which the result would be public.
    """
    shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return derive(shared, *context)


def exchange_of(private: bytes) -> bytes:
    """The key for :func:`agree` that belongs to a key for :func:`sign` (RFC 8032, section 5.1.5)."""
    return hashlib.sha512(private).digest()[:KEY]


def exchange_public_of(identity: bytes) -> bytes:
    """Public half of :func:`exchange_of`, from the public half of the key for :func:`sign`: u = (1 + y) / (1 - y), the
    birational map of RFC 7748, section 4.1.

    Raises:
        ValueError: the identity is the neutral point, which has no u.
    """
    y = int.from_bytes(identity, "little") & ((1 << 255) - 1)
    return ((1 + y) * pow(1 - y, -1, _P) % _P).to_bytes(KEY, "little")


def seal(key: bytes, data: bytes, *context: Context) -> bytes:
    """Encrypt ``data``. The context is authenticated, but the result does not contain it."""
    nonce = entropy(_NONCE)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, data, encode(*context))


def unseal(key: bytes, sealed: bytes, *context: Context) -> bytes:
    """The inverse of :func:`seal`.

    Raises:
        ValueError: key or context differ from those of :func:`seal`, or the data were changed.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:_NONCE], sealed[_NONCE:], encode(*context))
    except InvalidTag:
        raise ValueError("encrypted data do not fit their key and context") from None


def identity_of(private: bytes) -> bytes:
    """Public half of a key for :func:`sign`."""
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def sign(private: bytes, *context: Context) -> bytes:
    """The signature of a context (64 bytes)."""
    return Ed25519PrivateKey.from_private_bytes(private).sign(encode(*context))


def verify(public: bytes, signature: bytes, *context: Context) -> bool:
    """Whether this identity signed this context."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, encode(*context))
    except (InvalidSignature, ValueError):
        return False
    return True
