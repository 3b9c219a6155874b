"""Kits: one folder for the server and one for each silo, with all files that a machine needs in addition to fedfm.

``authority/`` stays on the machine that makes the kits, because its key signs the server's certificate. A second call
with the same federation file adds kits for new silos, and keeps all existing keys.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedfm.core import storage
from fedfm.core.locks import alone_in
from fedfm.engines.flower import loopback_keys
from fedfm.engines.flower.kit_manifest import FILE, NODES, SCHEMA, SERVER, Kit, load
from fedfm.engines.flower.private_api import OPERATOR
from fedfm.errors import InputError
from fedfm.sites import certificate_authority, kit_templates
from fedfm.sites.federation_config import AUTHORITY, FederationFile


def provision(federation: FederationFile, out: Path, *, renew: bool = False) -> dict[str, Any]:
    """Write the kits into ``out``; existing files are kept.

    Args:
        renew: make a new certificate for the server, with the same authority and a new key.

    Returns:
        ``out``, ``server`` (host:port), ``valid_until``, the names of the kits ``made`` and ``kept``, ``renewed``, and
        ``notices``.

    Raises:
        InputError: ``out`` has other files or another server's kits, or another process makes kits there.
    """
    _check_folder(out)
    with alone_in(out, "making kits"):
        return _write_kits(federation, out, renew)


def _write_kits(federation: FederationFile, out: Path, renew: bool) -> dict[str, Any]:
    server, made, kept = out / SERVER, list[str](), list[str]()
    old = load(server) if (server / FILE).exists() else None
    address, port = _address(federation, old, out)
    certificate_authority.create(out / AUTHORITY, federation.host)
    out.chmod(0o700)
    if old is None or renew:
        server.mkdir(mode=0o700, exist_ok=True)
        hosts = list(dict.fromkeys([federation.host, *federation.hosts, "localhost", "127.0.0.1", "::1"]))
        certificate_authority.issue(out / AUTHORITY, server, hosts, federation.days)
    kit = Kit(SERVER, address, port, federation.on_loopback, federation.proxy, server)
    if old is None:
        loopback_keys.write_secret(server / "superexec.secret")
        (server / NODES).mkdir(exist_ok=True)
        _write(kit, out, kit_templates.of_server(kit))
    if not (server / OPERATOR).exists():  # the file was lost, or the operator removed it to get a new secret
        loopback_keys.write_secret(server / OPERATOR)
    (made if old is None else kept).append(SERVER)
    ports = _ports(federation, out, port)
    for name in federation.silos:
        folder = out / name
        if (folder / FILE).exists():
            kept.append(name)
            continue
        own = Kit(name, address, next(ports), federation.on_loopback, False, folder)
        if folder.exists() and not _is_begun(own, federation):
            raise InputError(f"{folder} exists without a {FILE}: move it away, or remove the silo from silos")
        folder.mkdir(mode=0o700, exist_ok=True)
        public = loopback_keys.write_node_key(folder / "node.key")
        for place in (folder / "node.pub", server / NODES / f"{name}.pub"):
            place.write_bytes(public)
        _write(own, out, kit_templates.of_silo(own, federation))
        made.append(name)
    for name in (AUTHORITY, *made):
        # Whatever the umask is, others must not write here: anyone who can write ca.crt can pose as the server.
        for path in (out / name).rglob("*"):
            path.chmod(path.stat().st_mode & 0o755)
    rehearsal = f"{federation.host} is this machine's own address: no other machine reaches a server there"
    return {
        "out": str(out),
        "server": address,
        "valid_until": certificate_authority.validity(server / "server.pem")[1].isoformat(timespec="seconds"),
        "made": made,
        "kept": kept,
        "renewed": bool(renew and old is not None),
        "notices": [rehearsal] if federation.on_loopback else [],
    }


def render(found: dict[str, Any]) -> str:
    """Format the result of :func:`provision` as text, with the next steps."""
    out, silos = Path(found["out"]), [name for name in (*found["made"], *found["kept"]) if name != SERVER]
    lines = [f"made: {', '.join(found['made']) or 'nothing'}"]
    if found["kept"]:
        lines.append(f"kept as they were: {', '.join(found['kept'])}")
    if found["renewed"]:
        lines.append(
            f"the server's certificate is new: copy {out / SERVER} to its machine; no silo needs to do anything"
        )
    lines += [
        *found["notices"],
        f"the server's certificate is valid until {found['valid_until'][:10]}",
        "",
        f"{out / AUTHORITY}: keep it here; its key signs certificates, and no machine of the federation needs it",
        f"{out / SERVER}: copy it to the server's machine, then run {SERVER}/start.sh",
        *(
            f"{out / name}: send it to the silo so that no one else can read it, then run {name}/start.sh"
            for name in silos
        ),
        "each silo first writes into its silo.toml where its rows are",
    ]
    return "\n".join(lines)


def _check_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / SERVER / FILE).exists() and not (out / AUTHORITY).is_dir():
        raise InputError(f"{out} is not empty and has no kits; give another folder")
    out.mkdir(mode=0o700, parents=True, exist_ok=True)


def _address(federation: FederationFile, old: Kit | None, out: Path) -> tuple[str, int]:
    """Return the address (host:port) for the silos, and the port of the SuperLink."""
    host = f"[{federation.host}]" if ":" in federation.host else federation.host
    if old is not None:
        known = old.server.rpartition(":")
        if known[0] != host or federation.port not in (0, int(known[2])) or old.proxy != federation.proxy:
            raise InputError(
                f"{out / SERVER} is of the server {old.server}{' behind a proxy' * old.proxy}: make the kits of "
                "another server in another folder, since silos' kits name their server"
            )
        return old.server, old.port
    port = federation.port or free_ports(1)[0]
    inner = port
    if federation.proxy:
        inner = free_ports(1, avoid=(port,))[0] if federation.on_loopback else (18443 if port != 18443 else 18444)
    return f"{host}:{port}", inner


def _ports(federation: FederationFile, out: Path, server: int) -> Any:
    """Yield ports for the silos' processes: ports that no other kit uses and, on loopback, no other program uses."""
    used = {server, *(load(path.parent).port for path in out.glob(f"*/{FILE}"))}
    port = federation.first_port
    while True:
        if port > 65535:
            raise InputError(f"first_port = {federation.first_port}: no ports are left above it")
        if port not in used and (not federation.on_loopback or free(port)):
            yield port
        port += 1


def free(port: int) -> bool:
    """Whether a port on loopback is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_ports(count: int, avoid: Sequence[int] = ()) -> list[int]:
    """Return ``count`` different free ports on loopback."""
    probes, found = [], list[int]()
    try:
        while len(found) < count:
            probe = socket.socket()
            probes.append(probe)
            probe.bind(("127.0.0.1", 0))
            if (port := int(probe.getsockname()[1])) not in avoid:
                found.append(port)
    finally:
        for probe in probes:
            probe.close()
    return found


def _is_begun(kit: Kit, federation: FederationFile) -> bool:
    """Whether a folder has only files of this kit, because an earlier call was stopped before the kit was complete."""
    names = {"node.key", "node.pub", "ca.crt", *kit_templates.of_silo(kit, federation)}
    return all(path.name in names or path.name.startswith(f".{FILE}.") for path in kit.folder.iterdir())


def _write(kit: Kit, out: Path, files: dict[str, str]) -> None:
    """Write the files of a kit; ``kit.json`` is written last, so that a kit with this file is complete."""
    (kit.folder / "ca.crt").write_bytes((out / AUTHORITY / "ca.crt").read_bytes())
    for name, text in files.items():
        path = kit.folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if name.endswith(".sh") else 0o644)
    manifest = {"schema": SCHEMA} | {key: value for key, value in asdict(kit).items() if key != "folder"}
    storage.write_atomic(kit.folder / FILE, json.dumps(manifest, indent=1).encode() + b"\n")
