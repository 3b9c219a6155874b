"""Read a kit's ``kit.json``, and list the silos that the server's kit admits.

A kit is a folder with the keys and certificates of the server or of one silo; ``fedfm provision`` makes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fedfm.engines.flower.private_api import OPERATOR
from fedfm.errors import InputError, reason_of

FILE = "kit.json"
NODES = "silos"  # folder of the silos' public keys in the server's kit
SCHEMA = 1
SERVER = "server"  # name of the server's kit, which no silo can have


@dataclass(frozen=True)
class Kit:
    """A kit's ``kit.json``.

    Attributes:
        name: the silo's name, or "server".
        server: host:port at which silos reach the server.
        port: in the server's kit, the port of the SuperLink; in a silo's kit, the SuperNode's port on loopback.
        loopback: whether the complete federation is on one machine.
        proxy: whether the server's process listens only on loopback, behind a proxy.
        folder: the kit's folder.
    """

    name: str
    server: str
    port: int
    loopback: bool
    proxy: bool
    folder: Path

    @property
    def serves(self) -> bool:
        """Whether this is the server's kit."""
        return self.name == SERVER

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files of a complete kit. Only the user that owns the kit can read its keys and secrets."""
        of_server = ("ca.crt", "server.pem", "server.key", "superexec.secret", OPERATOR)
        return of_server if self.serves else ("ca.crt", "node.key")

    @property
    def listens(self) -> str:
        """The address on which the SuperLink listens."""
        host = self.server.rpartition(":")[0].strip("[]")
        if self.proxy:
            return "127.0.0.1"
        if self.loopback:
            return host if ":" in host or host.startswith("127.") else "127.0.0.1"
        return "::" if ":" in host else "0.0.0.0"  # noqa: S104 - silos are on other machines; a gate protects it

    @property
    def local(self) -> str:
        """The host:port at which processes on the server's machine reach the SuperLink."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.listens, self.listens)  # noqa: S104 - only compared
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def load(folder: Path) -> Kit:
    """Read a kit.

    Raises:
        InputError: the folder has no kit, or another release wrote it.
    """
    path = folder / FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{folder}: there is no kit ({FILE} is missing); `fedfm provision` makes kits") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {reason_of(error)}") from None
    known = {"name": str, "server": str, "port": int, "loopback": bool, "proxy": bool}
    schema = manifest.pop("schema", None) if isinstance(manifest, dict) else None
    if schema != SCHEMA:
        raise InputError(
            f"{path}: its schema is {schema!r:.80}, and this fedfm reads {SCHEMA}; use the version that made the kit, "
            f"or make new kits in another folder"
        )
    if manifest.keys() != known.keys():
        wrong = sorted(manifest.keys() ^ known.keys())
        raise InputError(
            f"{path} is damaged: {wrong[0]!r:.80} is {'missing' if wrong[0] in known else 'not a key of it'}"
        )
    for key, kind in known.items():
        if type(manifest[key]) is not kind:
            raise InputError(f"{path}: {key} = {manifest[key]!r:.80} is not {kind.__name__}")
    return Kit(**manifest, folder=folder)


def silos_of(kit: Kit) -> list[str]:
    """Sorted names of the silos that the server's kit admits."""
    return sorted(path.stem for path in (kit.folder / NODES).glob("*.pub"))
