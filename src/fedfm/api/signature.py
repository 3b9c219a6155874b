"""``signature.json``: an Ed25519 signature over the SHA-256 of every file of a run or of an exported model.

The signature covers all files except itself and ``private/``, which is never shared. The signed bytes are
``signature.json`` without its last entry: ``json.dumps(body, indent=1)``, in the encoding of
:func:`fedfm.privacy.crypto.keys.encode`.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedfm.core import storage
from fedfm.core.text import from_json, to_json, visible
from fedfm.errors import InputError
from fedfm.privacy.crypto import keys
from fedfm.runtime.run_directory import Run
from fedfm.runtime.runs_below import no_run, runs_in

FILE, VERSION = "signature.json", 1
_PURPOSE = "fedfm signature of a folder"
_FIELDS = ("version", "signed", "key", "files")  # entries of the signed body, in this order


@dataclass(frozen=True)
class Verified:
    """The result of :func:`verify`.

    Attributes:
        fingerprint: fingerprint of the key that signed, in the form of :func:`fingerprint`.
        signed: time of the signature, by the signer's clock.
        trusted: why the key is trusted. ``"pinned"``: the caller gave it. ``"own"``: it is this user's
            :func:`default_key`. None: it is not trusted.
        genuine: whether this key signed ``signature.json`` itself.
        pinned_other: whether the caller gave a different key.
        holds, changed, missing, added: names of unchanged, changed, missing and added files; the signature does not
            cover an added file.
    """

    fingerprint: str
    signed: str
    trusted: str | None
    genuine: bool
    pinned_other: bool
    holds: tuple[str, ...]
    changed: tuple[str, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def intact(self) -> bool:
        """Whether the folder is unchanged since it was signed, by any key."""
        return self.genuine and not (self.changed or self.missing or self.added)

    @property
    def key_known(self) -> bool:
        """Whether the key is the one that the caller gave, or if the caller gave none, this user's key."""
        return self.trusted is not None

    @property
    def valid(self) -> bool:
        """Whether the folder is unchanged since a known key signed it."""
        return self.intact and self.key_known

    def to_dict(self) -> dict[str, Any]:
        """The values for JSON."""
        return {"valid": self.valid, "intact": self.intact, "key_known": self.key_known, **asdict(self)}


def default_key() -> Path:
    """The user's signing key, a PEM file outside of every run."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "fedfm" / "signing.pem"


def fingerprint(public: bytes) -> str:
    """Short name of a public key of 32 bytes, which people can compare by telephone.

    Example:
        >>> fingerprint(bytes(32))[:20]
        'SHA256:66687aadf862b'
    """
    return f"SHA256:{hashlib.sha256(public).hexdigest()}"


def sign(folder: Path, key: Path | None = None) -> dict[str, Any]:
    """Sign a run, finished or not, or an exported model. An earlier signature is replaced.

    Args:
        key: PEM file of an Ed25519 private key [:func:`default_key`]. If it does not exist, it is made, with its public
            half in a file of the same name plus ``.pub``.

    Returns:
        ``signature``: path of the signature file; ``key``: path of the public half; ``fingerprint``; ``files``: how
        many files are signed.

    Raises:
        InputError: the folder is neither a run nor a model, another process works in it, a file is a link, or the key
            cannot be used.
    """
    key = default_key() if key is None else key
    if key.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"--key {key}: a private key must not be in the folder that is shared; give another place")
    with _lock(folder):
        storage.sweep(folder, FILE)
        private = _private(key)
        digests = dict(_digests(folder))
        for name, digest in digests.items():
            if digest is None:
                raise InputError(
                    f"{folder / name} is a link or not a plain file, which a signature cannot cover; remove it"
                )
        public = keys.identity_of(private)
        _write_public(key, public)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        body = {"version": VERSION, "signed": now, "key": public.hex(), "files": digests}
        text = _file(body, keys.sign(private, _PURPOSE, _signed_text(body)).hex())
        storage.write_atomic(folder / FILE, text)
    found = {"signature": str(folder / FILE), "key": str(_public_file(key)), "fingerprint": fingerprint(public)}
    return found | {"files": len(digests)}


def verify(folder: Path, key: Path | None = None) -> Verified:
    """Compare a folder with its signature. This changes nothing.

    Args:
        key: PEM file of the public key that must have signed. Without it only this user's :func:`default_key` is
            trusted: a person who can change the files can also sign them again with another key.

    Raises:
        InputError: there is no signature, a later release wrote it, or ``key`` is not a public key.
    """
    pinned = None if key is None else _public(key)
    storage.refuse_pipe(folder / FILE)
    try:
        data = (folder / FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if runs_in(folder) or not folder.exists():
            raise no_run(folder) from None
        raise InputError(f"{folder} is not signed: it has no {FILE}; `fedfm sign {folder}` writes one") from None
    body, signature = _parse(data)
    if isinstance(body["version"], int) and body["version"] > VERSION:
        raise InputError(f"{folder / FILE}: it has version {body['version']}, but this release reads up to {VERSION}")
    public, files = _bytes(body["key"]), body["files"] if isinstance(body["files"], dict) else {}
    genuine = data == _file(body, signature) and keys.verify(public, _bytes(signature), _PURPOSE, _signed_text(body))
    now = dict(_digests(folder))
    own = None
    with contextlib.suppress(OSError, InputError):
        own = _public(_public_file(default_key()))
    return Verified(
        fingerprint(public),
        str(body["signed"]),
        "pinned" if public == pinned else "own" if pinned is None and public == own else None,
        genuine,
        pinned not in (None, public),
        holds=tuple(name for name in files if now.get(name) is not None and now[name] == files[name]),
        changed=tuple(name for name in files if name in now and (now[name] is None or now[name] != files[name])),
        missing=tuple(name for name in files if name not in now),
        added=tuple(name for name in now if name not in files),
    )


def describe(found: Verified) -> str:
    """The result as text: a line for each file, and lines about the signer."""
    named = {"holds": found.holds, "changed": found.changed, "missing": found.missing, "added": found.added}
    lines = [f"{how:<8} {visible(name)}" for how, names in named.items() for name in names]
    lines.append(f"signed {visible(found.signed)} by the key {found.fingerprint}")
    if not found.genuine:
        lines.append(f"{FILE} differs from the file that the key signed, so nothing above is certain")
    if found.pinned_other:
        lines.append("This is not the key of --key.")
    elif found.trusted is None:
        lines.append("UNKNOWN KEY: anyone who changes a file can sign it again, so this verifies nothing (exit 1).")
        lines.append("Pass the signer's public key, which you received by another channel, with --key.")
    else:
        lines.append("This is your own key." if found.trusted == "own" else "This is the key of --key.")
    return "\n".join(lines)


def _lock(folder: Path) -> contextlib.AbstractContextManager[None]:
    if (folder / "manifest.json").exists() or not any(folder.glob("*.safetensors")):
        return Run.open(folder, imports=False).lock()  # a signature needs no code that the manifest names
    return contextlib.nullcontext()  # an exported model


def _digests(folder: Path) -> Iterator[tuple[str, str | None]]:
    """(name, SHA-256) of every file that the signature covers, sorted by name; None for a link or a device.

    A top-level folder may be a link to another disk; a run with such a link can also be continued.
    """
    for top in sorted(folder.iterdir()):
        if top.name in (FILE, "private"):
            continue
        if not top.is_dir():
            yield top.name, _digest(top)
            continue
        for where, folders, files in os.walk(top):
            folders.sort()
            here = Path(where)
            names = sorted([*files, *(name for name in folders if (here / name).is_symlink())])
            yield from ((str((here / name).relative_to(folder)), _digest(here / name)) for name in names)


def _digest(path: Path) -> str | None:
    if not stat.S_ISREG(path.lstat().st_mode):
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _signed_text(body: dict[str, Any]) -> bytes:
    return to_json(body, indent=1, ascii=True).encode()


def _file(body: dict[str, Any], signature: str) -> bytes:
    return to_json(body | {"signature": signature}, indent=1, ascii=True).encode() + b"\n"


def _parse(data: bytes) -> tuple[dict[str, Any], str]:
    """Body and signature of the file; a body without values if the file is not a signature file."""
    try:
        found = from_json(data)
        return {name: found[name] for name in _FIELDS}, str(found["signature"])
    except (ValueError, KeyError, TypeError):
        return dict.fromkeys(_FIELDS), ""


def _bytes(text: Any) -> bytes:
    """The bytes that lower-case hexadecimal digits represent; b"" for any other value."""
    try:
        found = bytes.fromhex(text)
    except (ValueError, TypeError):
        return b""
    return found if found.hex() == text else b""


def _public_file(key: Path) -> Path:
    return key.with_name(f"{key.name}.pub")


def _private(path: Path) -> bytes:
    """The private key in a file; if the file does not exist, a key is made.

    Raises:
        InputError: the key cannot be made, others can read it, it has a password, or it is not an Ed25519 key.
    """
    try:
        if not path.exists():
            _make(path)
        mode, data = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise InputError(f"--key {path}: {error.strerror}") from None
    if mode & 0o077:
        raise InputError(f"--key {path}: others can read this private key; `chmod 600 {path}`, or make a new one")
    try:
        found = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        found = None
    if not isinstance(found, Ed25519PrivateKey):
        raise InputError(f"--key {path}: expected an Ed25519 private key as PEM, without a password")
    return found.private_bytes_raw()


def _make(path: Path) -> None:
    """Generate a key. If two processes do so at the same time, one key is kept, and both processes use it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Ed25519PrivateKey.generate()
    pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    storage.write_atomic(temporary, made.private_bytes(*pem), 0o600)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        temporary.unlink()


def _write_public(key: Path, public: bytes) -> None:
    """Write the public half next to a key, also to one that another program made.

    Raises:
        InputError: the file has the public half of another key.
    """
    path = _public_file(key)
    if not path.exists():
        pem = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        data = Ed25519PublicKey.from_public_bytes(public).public_bytes(*pem)
        storage.write_atomic(path, data, of_run=False)
    elif _public(path) != public:
        raise InputError(f"--key {key}: {path} is the public half of another key; remove it")


def _public(path: Path) -> bytes:
    try:
        found = serialization.load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise InputError(f"--key {path}: {error.strerror}") from None
    except (ValueError, UnsupportedAlgorithm):
        found = None
    if not isinstance(found, Ed25519PublicKey):
        raise InputError(
            f"--key {path}: expected an Ed25519 public key as PEM; fedfm sign writes one next to its private key"
        )
    return found.public_bytes_raw()
