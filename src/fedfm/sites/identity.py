"""A silo's permanent identity, and the roster of the other silos' identities.

    identity = "silo.key"       # 64 hexadecimal digits; `fedfm silo check` creates the file, for its owner only
    roster = "roster.toml"      # or .json: for each silo, the public key that `fedfm silo check` prints at that silo

The silos agree on the roster without the server. The roster shows if the server impersonates or invents silos.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from fedfm.errors import InputError
from fedfm.runtime.rosters import Identity, key_in, roster_in


class Signer(Protocol):
    """The settings of a silo's file that concern its identity."""

    @property
    def name(self) -> str:
        """The silo's name at the server."""

    @property
    def identity(self) -> str:
        """The path of the silo's private key; if empty, the silo makes a new key for each run."""

    @property
    def roster(self) -> str:
        """The path of the file with the other silos' public keys; empty if there is no roster."""


def files(silo: Signer) -> list[Path]:
    """Return the paths of the key file and the roster that a silo's file names."""
    return [Path(text) for text in (silo.identity, silo.roster) if text]


def of(silo: Signer, *, create: bool = False) -> Identity:
    """Read the key and the roster that a silo's file names.

    Args:
        create: make a key if its file is absent.

    Raises:
        InputError: a file is absent, open to others or malformed, or the roster has another key of this silo.
    """
    if not silo.identity:
        if silo.roster:
            raise InputError("roster: without a permanent key this silo cannot be in the others' rosters; set identity")
        return Identity(None, None)
    found = Identity(key_in(Path(silo.identity), create), roster_in(Path(silo.roster)) if silo.roster else None)
    own = (found.roster or {}).get(silo.name)
    if own is not None and own.hex() != found.public:
        raise InputError(f"{silo.roster}: {silo.name} has the key {own.hex()}, but {silo.identity} has {found.public}")
    return found
