"""A federation's own certificate authority; its key signs only the server's certificate."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedfm.engines.flower.loopback_keys import write_private
from fedfm.errors import InputError, reason_of

YEARS = 10  # number of years for which the authority is valid; a certificate that it signs ends earlier
_SKEW = datetime.timedelta(hours=2)  # a certificate's validity begins before its creation, since clocks differ


def create(folder: Path, name: str) -> bool:
    """Make an authority's ``ca.key`` (mode 0600) and ``ca.crt`` in a folder; return False if the folder has both.

    Raises:
        InputError: the folder has only one of the two files.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    there = [(folder / file).exists() for file in ("ca.key", "ca.crt")]
    if all(there):
        return False
    if any(there):
        missing = "ca.key" if there[1] else "ca.crt"
        raise InputError(f"{folder / missing} is missing: put back a copy, or give another folder for new keys")
    key, now = ec.generate_private_key(ec.SECP384R1()), datetime.datetime.now(datetime.UTC)
    subject = _name(f"fedfm authority of {name}"[:64])
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_pair(folder / "ca.key", _pem(key), folder / "ca.crt", _public(certificate))
    return True


def issue(folder: Path, out: Path, hosts: Sequence[str], days: int) -> datetime.datetime:
    """Write ``server.pem`` and ``server.key`` (mode 0600) for these hosts, signed by the folder's authority.

    Returns:
        The end of the certificate's validity.

    Raises:
        InputError: the authority cannot be read.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    try:
        signer: Any = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{folder}: the authority's key cannot be read: {reason_of(error)}") from None
    key, now = ec.generate_private_key(ec.SECP384R1()), datetime.datetime.now(datetime.UTC)
    end = min(now + datetime.timedelta(days=days), authority.not_valid_after_utc)
    certificate = (
        x509.CertificateBuilder(authority.subject, _name(hosts[0][:64]), key.public_key(), x509.random_serial_number())
        .not_valid_before(max(now - _SKEW, authority.not_valid_before_utc))
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA384())
    )
    _write_pair(out / "server.key", _pem(key), out / "server.pem", _public(certificate))
    return end


def _write_pair(private: Path, key: bytes, public: Path, certificate: bytes) -> None:
    """Write a key and its certificate. If the disk is full, both old files stay, since a key needs its certificate."""
    fresh = {path: path.with_name(f".{path.name}") for path in (private, public)}
    try:
        write_private(fresh[private], key)
        fresh[public].write_bytes(certificate)
        for path, new in fresh.items():
            os.replace(new, path)
    finally:
        for new in fresh.values():
            new.unlink(missing_ok=True)


def validity(path: Path) -> tuple[datetime.datetime, datetime.datetime]:
    """Return the first and the last moment of a certificate's validity.

    Raises:
        InputError: the file is missing or contains no certificate.
    """
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no certificate: {reason_of(error)}") from None
    return certificate.not_valid_before_utc, certificate.not_valid_after_utc


def _name(text: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        return x509.DNSName(text)


def _usage(*, signs: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    plain = serialization.NoEncryption()
    return bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))


def _public(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return bytes(certificate.public_bytes(serialization.Encoding.PEM))
