"""A federation's file: the server's address and the silos. ``fedfm provision`` makes the kits from this file.

server = "fed.example.org:8443"         # port 0 on loopback means a free port
silos = ["hospital-a", "hospital-b"]
classes = ["benign", "malignant"]       # as the federation agreed, in order
models = ["bert-small"]                 # models that the silos load, in addition to the built-in ones
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfm.config.faults import read_all
from fedfm.config.toml import build, read
from fedfm.core.fields import check as check_fields
from fedfm.core.fields import setting
from fedfm.core.text import NAME, NAME_WORDS, alike
from fedfm.data.class_names import check_list
from fedfm.engines.flower.kit_manifest import SERVER
from fedfm.errors import Faults

PORT = 8443  # default port of a server
_HOST = r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?)"
_THIS_NETWORK = ipaddress.IPv4Network("0.0.0.0/8")
AUTHORITY = "authority"  # folder of the keys that sign certificates


@dataclass(frozen=True)
class FederationFile:
    """The settings in a federation's file."""

    server: str = setting(
        "",
        f"host:port at which the silos reach the server; port 0 on loopback means a free port [port {PORT}]",
        required=True,
        pattern=rf"{_HOST}(:\d{{1,5}})?",
        words='a host and a port, e.g. "fed.example.org:8443"',
    )
    silos: tuple[str, ...] = setting(
        (),
        "the silos' names",
        required=True,
        least=1,
        pattern=NAME,
        words=f"a list of names, each of {NAME_WORDS}",
    )
    classes: tuple[str, ...] | None = setting(None, "class names as the federation agreed, in order [each silo's own]")
    models: tuple[str, ...] = setting((), "folders and hub ids that the silos load, in addition to the built-in models")
    allow: tuple[str, ...] = setting(
        ("mean", "scores"),
        "the value of allow in the silos' new files: mean, reply, scores, reveal",
        choices=("mean", "reply", "scores", "reveal"),
    )
    days: int = setting(365, "days for which the server's certificate is valid", ge=1, le=3650)
    hosts: tuple[str, ...] = setting(
        (), "further names and addresses of the server, for its certificate", pattern=_HOST, words="host names"
    )
    proxy: bool = setting(False, "the server listens only on loopback, behind NGINX with the server kit's nginx.conf")
    first_port: int = setting(9194, "first port of the silos' own processes, on loopback", ge=1024, le=65000)

    @property
    def host(self) -> str:
        """The server's host, without brackets."""
        return self._split()[0]

    @property
    def port(self) -> int:
        """The server's port; 0 means any free port."""
        return self._split()[1]

    @property
    def on_loopback(self) -> bool:
        """Whether the server and all silos are on one machine."""
        address = _address(self.host)
        return _is_local_name(self.host) if address is None else address.is_loopback

    def _split(self) -> tuple[str, int]:
        host, colon, port = self.server.rpartition(":")
        if not colon or self.server.endswith("]"):
            host, port = self.server, str(PORT)
        return host.strip("[]"), int(port)


def load(path: Path) -> FederationFile:
    """Read a federation's file.

    Raises:
        InputError: the file is absent, not TOML, or has a wrong key or value.
    """
    table = read(path, {}, 'a federation\'s file has server = "host:port" and silos = ["hospital-a", ...]')
    return read_all(path, table, _read)


def _read(table: Mapping[str, Any]) -> FederationFile:
    found: FederationFile = build(FederationFile, table, "")
    check_fields(found, "")
    faults = Faults()
    for key, text in _faults(found):
        faults.say(text, key=key)
    with faults:
        check_list(found.classes or (), "classes")
    faults.refuse()
    return found


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a host's text means. Short forms that systems accept ("0", "127.1") are valid, too."""
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(host)
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        return mapped or found
    with contextlib.suppress(OSError):
        return ipaddress.IPv4Address(socket.inet_aton(host))
    return None


def _is_local_name(host: str) -> bool:
    name = host.lower()
    return name in ("localhost", "localhost.localdomain") or name.endswith(".localhost")


def _unreachable(host: str) -> str:
    """Return the reason why no silo can connect to a host; "" if the host may be reachable."""
    address = _address(host)
    if address is None:
        return ""
    if address.is_unspecified or address in _THIS_NETWORK:
        return "an address for listening, not for connecting"
    if address.is_multicast or address == ipaddress.IPv4Address("255.255.255.255"):
        return "an address of many machines"
    if address.is_reserved and not address.is_loopback:
        return "an address of no machine"
    if address.version == 6 and address.is_link_local:
        return "an address that means another machine in each network"
    return ""


def _faults(found: FederationFile) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each fault that the fields' own bounds do not find."""
    if not found.silos:
        yield "silos", 'silos is missing: expected a list of names, e.g. ["hospital-a", "hospital-b"]'
    lower = [alike(name) for name in found.silos]  # some file systems ignore case
    for name in sorted({name for name in lower if lower.count(name) > 1}):
        yield "silos", f'silos: "{name}" is there twice; each silo needs its own name'
    for name in (SERVER, AUTHORITY):
        if name in lower:
            yield "silos", f'silos: "{name}" is the name of another folder in the output; give the silo another name'
    for key, host in (("server", found.host), *(("hosts", host.strip("[]")) for host in found.hosts)):
        if why := _unreachable(host):
            yield key, f'{key}: {host} is {why}; expected the address to which silos connect, e.g. "fed.example.org"'
    if found.port > 65535:
        yield "server", f'server = "{found.server}": expected a port of at most 65535'
    if found.port == 0 and not found.on_loopback:
        yield (
            "server",
            f'server = "{found.server}": free ports of that machine are unknown here; expected "{found.host}:{PORT}"',
        )
    if found.first_port + len(found.silos) > 65536:
        yield "first_port", f"first_port = {found.first_port}: {len(found.silos)} silos need ports up to 65535"
