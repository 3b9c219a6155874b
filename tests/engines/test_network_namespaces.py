"""A server and silos in separate networks: which interfaces of the server a silo can reach."""

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kit_sites import BIN, SILOS, bits, sites
from processes import ENV, here, until

HOST = "10.99.0.1"  # of the server, in networks that only these namespaces have
ASK = """import contextlib, json, pathlib, ssl, sys, urllib.error, urllib.request
from fedfm.engines.flower.private_api import Control
from fedfm.errors import InputError
server, authority = sys.argv[1:]
def status(path):
    request = urllib.request.Request(f"https://{server}{path}", data=b"", method="POST")
    try:
        return urllib.request.urlopen(request, context=ssl.create_default_context(cafile=authority), timeout=30).status
    except urllib.error.HTTPError as error:
        return error.code
refusals = []
with contextlib.closing(Control(server, pathlib.Path(authority))) as control:
    for call in (control.nodes, lambda: control.register(b"", "x"), lambda: control.stop(1)):
        try:
            call()
        except InputError as error:
            refusals.append(str(error))
paths = ("/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet/pull-messages")
print(json.dumps([refusals, *map(status, paths)]))
"""
CONNECT = """import json, socket, sys
found = []
for port in map(int, sys.argv[2:]):
    try:
        socket.create_connection((sys.argv[1], port), timeout=20).close()
        found.append(port)
    except OSError:
        pass
print(json.dumps(found))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def may_make_networks() -> bool:
    """Whether this process may make network namespaces."""
    if shutil.which("ip") is None or shutil.which("nsenter") is None or os.geteuid():
        return False
    name = f"fedfm-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    return made and not subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False).returncode


@contextlib.contextmanager
def networks():
    """A namespace each for the server and the silos; each silo has a cable to the server, and no other."""
    names = {place: f"fedfm-{os.getpid()}-{place}" for place in ("server", *SILOS)}
    try:
        for name in names.values():
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        server = names["server"]
        ip("-n", server, "addr", "add", f"{HOST}/32", "dev", "lo")
        for n, silo in enumerate(SILOS, 1):
            ip("link", "add", f"to{n}", "netns", server, "type", "veth", "peer", "name", "cable", "netns", names[silo])
            ip("-n", server, "addr", "add", f"10.99.{n}.1/24", "dev", f"to{n}")
            ip("-n", names[silo], "addr", "add", f"10.99.{n}.2/24", "dev", "cable")
            ip("-n", server, "link", "set", f"to{n}", "up")
            ip("-n", names[silo], "link", "set", "cable", "up")
            ip("-n", names[silo], "route", "add", "default", "via", f"10.99.{n}.1")
        yield {place: ["nsenter", f"--net=/run/netns/{name}"] for place, name in names.items()}
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def listening(within: list[str]) -> list[int]:
    """All TCP ports at which a program of this namespace listens, at whatever address."""
    table = subprocess.run(
        [*within, "cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in table.stdout.splitlines() if ":" in line.split()[1]]
    return sorted({int(words[1].rpartition(":")[2], 16) for words in lines if words[3] == "0A"})


def run_code(within: list[str], code: str, *words: object) -> list:
    """What a program prints that runs in this namespace."""
    command = [*within, BIN.parent / "python", "-c", code, *words]
    done = subprocess.run([*map(str, command)], env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.release
@pytest.mark.deployment
@pytest.mark.skipif(not may_make_networks(), reason="network namespaces need root and iproute2")
def test_a_silo_reaches_only_the_servers_fleet_interface(tmp_path: Path) -> None:
    with networks() as within, sites(tmp_path, rounds=2, host=HOST, within=within) as at:
        alone = here("run", at.alone, "--out", tmp_path / "local")
        at.start()
        kit, silo = at.server(), within["hospital-b"]
        until(lambda: at.logs().count(" may connect") == 2)
        assert bits(at.result(at.begin())) == bits(alone)

        # Of all that listens at the server one port answers a silo, and silos do not answer each other.
        ports = listening(within["server"])
        assert kit.port in ports
        assert run_code(silo, CONNECT, HOST, *ports) == [kit.port]
        own = listening(within["hospital-a"])
        assert own
        assert run_code(silo, CONNECT, "10.99.1.2", *own) == []

        # At this port what a silo has opens neither the control interface nor the runtime's.
        refusals, control, runtime, fleet = run_code(silo, ASK, kit.server, at.kits / "hospital-b/ca.crt")
        assert len(refusals) == 3
        assert all("accepts only its operator" in text for text in refusals)
        assert control == runtime == 403  # the gate lets them through for the operator alone
        assert fleet == 415  # the interface is there: this is not a message
