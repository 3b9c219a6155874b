"""Key files that outlive a run: a silo's own private key, and a roster with the other silos' public keys.

The silos agree on the roster without the server. The roster shows if the server impersonates or invents silos.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfm.config.faults import read_all
from fedfm.core import storage
from fedfm.core.fields import toml_value
from fedfm.core.text import NAME_WORDS, alike, is_name
from fedfm.errors import Faults, InputError, reason_of
from fedfm.privacy.crypto import keys

_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Identity:
    """The key with which a silo signs, and the other silos' keys.

    Attributes:
        key: private Ed25519 key; None if the silo makes a new key in each run.
        roster: public key of each silo in the roster; None if there is no roster.
    """

    key: bytes | None
    roster: dict[str, bytes] | None

    @property
    def public(self) -> str | None:
        """The public key as 64 hexadecimal digits; None without a private key."""
        return None if self.key is None else keys.identity_of(self.key).hex()


def key_in(path: Path, create: bool) -> bytes:
    """Read the private key in a file.

    Args:
        create: whether to make a key if the file does not exist.

    Raises:
        InputError: the file does not exist, is open to other users, or is malformed.
    """
    if create and not path.exists():
        storage.write_atomic(path, keys.entropy(keys.KEY).hex().encode() + b"\n", 0o600)
    try:
        text, mode = path.read_text(encoding="ascii").strip(), path.stat().st_mode
    except FileNotFoundError:
        raise InputError(f"identity: {path} does not exist; `fedfm silo check` creates it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"identity: {path} cannot be read: {reason_of(error)}") from None
    if mode & 0o077:
        raise InputError(f"identity: {path} is open to other users; run chmod 600 on it")
    if not _KEY.fullmatch(text):
        raise InputError(f"identity: {path} is not 64 hexadecimal digits")
    return bytes.fromhex(text)


def roster_in(path: Path) -> dict[str, bytes]:
    """Read a roster's public keys, by name.

    Raises:
        InputError: the file does not exist or is malformed; the error has a line for each mistake.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        table = json.loads(text, object_pairs_hook=_once) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"roster: {path} cannot be read: {reason_of(error)}") from None
    if not isinstance(table, dict) or not table:
        raise InputError(f'roster: {path} has no silos; add a line for each: name = "public key"')
    return read_all(f"roster: {path}", table, _keys)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict from a JSON object's pairs, unless a name occurs twice (TOML's parser itself checks this)."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _keys(table: Mapping[str, Any]) -> dict[str, bytes]:
    faults = Faults()
    names: dict[str, str] = {}
    owners: dict[str, str] = {}
    for name, key in table.items():
        if not is_name(name):
            faults.say(f"{toml_value(name)} is not a valid silo name: expected {NAME_WORDS}")
        elif not isinstance(key, str) or not _KEY.fullmatch(key):
            faults.say(f"the key of {name} is not 64 hexadecimal digits; quote names with dots")
        elif (other := names.setdefault(alike(name), name)) != name:
            faults.say(f"{other} and {name} are alike, and some file systems ignore case; give each silo its own name")
        elif (owner := owners.setdefault(key, name)) != name:
            faults.say(
                f"{owner} and {name} have the same key, so one silo would count twice; give each silo its own key"
            )
    faults.refuse()
    return {name: bytes.fromhex(key) for name, key in table.items()}
