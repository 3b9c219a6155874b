"""Make the keys of one deployment on loopback: the SuperLink's certificate, and a key pair for every node."""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from pathlib import Path

DAYS = 30  # a certificate's validity in days; a resumed run gets a new certificate


def write_private(path: Path, data: bytes) -> Path:
    """Write a file that only its owner can read, even while it is being written."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(data)
    return path


def write_certificates(folder: Path) -> None:
    """Write ``server.pem`` and ``server.key`` for 127.0.0.1, and ``ca.crt``, the same self-signed certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key, now = ec.generate_private_key(ec.SECP384R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedfm SuperLink")])
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=2))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .sign(key, hashes.SHA384())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    for file in ("ca.crt", "server.pem"):
        write_private(folder / file, certificate.public_bytes(pem))
    write_private(folder / "server.key", key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))


def write_node_key(path: Path) -> bytes:
    """Write a SuperNode's private key (ECDSA, P-384, OpenSSH); returns its public key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, pem = ec.generate_private_key(ec.SECP384R1()), serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    write_private(path, private)
    return key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)


def write_secret(path: Path) -> Path:
    """Write a secret that two of our own processes share."""
    return write_private(path, secrets.token_hex(32).encode())
