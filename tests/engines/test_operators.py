"""Who may do what at a federation of kits that was really started, with what a silo has, and what the operator has."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedfm.engines.flower import client_stub, loopback, loopback_keys
from fedfm.engines.flower.private_api import Control
from fedfm.errors import InputError
from fedfm.sites.kits import free_ports
from kit_sites import SILOS, sites
from processes import ENV, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a kit's processes are found in Linux's /proc")
PROJECT = """[project]
name = "other"
version = "1.0.0"
[tool.flwr.app]
publisher = "other"
[tool.flwr.app.components]
serverapp = "other.server:app"
clientapp = "other.client:app"
"""
CLIENT = """from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
open({mark!r}, "a").write("imported")
app = ClientApp()
@app.query()
def query(message, context):
    return Message(RecordDict({{}}), reply_to=message)
"""
SERVER = """from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    asked = [Message(RecordDict({{}}), node, "query") for node in grid.get_node_ids()]
    open({mark!r}, "w").write(" ".join(str(reply.error) for reply in grid.send_and_receive(asked, timeout=60)))
"""


def program(folder: Path) -> Path:
    """An app that is not fedfm's; its halves leave marks."""
    (folder / "other").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "other/__init__.py").write_text("")
    (folder / "other/client.py").write_text(CLIENT.format(mark=str(folder / "at-a-silo")))
    (folder / "other/server.py").write_text(SERVER.format(mark=str(folder / "at-the-server")))
    return folder


def workers(at) -> list[Path]:
    """Folders of the silos' workers that are running."""
    locks = [lock for name in SILOS for lock in (at.kits / name / ".fedfm/runs").glob("*/*/worker.lock")]
    return [lock.parent for lock in locks if client_stub.running(lock.parent)]


@contextlib.contextmanager
def impostor(at, key_of: str, name: str):
    """A SuperNode with one silo's key, whose silo.toml has another's name."""
    folder = at.folder / "impostor"
    folder.mkdir()
    shutil.copy(at.kits / key_of / "rows.npz", folder)
    text = (at.kits / key_of / "silo.toml").read_text().replace(f'name = "{key_of}"', f'name = "{name}"')
    (folder / "silo.toml").write_text(text)
    kit = at.kits / key_of
    command = ["flower-supernode", "--superlink", at.server().server, "--root-certificates", kit / "ca.crt"]
    command += ["--auth-supernode-private-key", kit / "node.key", "--host", "127.0.0.1"]
    command += ["--port", free_ports(1)[0], "--node-config", f'silo="{folder / "silo.toml"}"']
    with open(at.folder / "impostor.log", "w") as log:
        env = {**ENV, **loopback.environment(folder / "home"), "FEDFM_PARENT": str(os.getpid())}
        node = subprocess.Popen([*map(str, command)], env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, 15)
        node.wait(60)
        loopback.end_workers(folder / ".fedfm/runs")


@pytest.mark.deployment
def test_the_operator_alone_submits_silos_run_fedfms_app_alone_and_bear_their_own_names_alone(tmp_path):
    with sites(tmp_path, rounds=2) as at, contextlib.ExitStack() as open_:
        at.start()
        kit = at.server()

        def control(name: str) -> Control:
            return open_.enter_context(contextlib.closing(Control(kit.local, at.kits / name / "ca.crt")))

        operator, silo = control("server"), control("hospital-b")
        until(lambda: "hospital-b may connect" in at.logs())
        until(lambda: len(operator.online()) == 2)

        # What a silo has is not enough: neither for the control interface, nor for a task.
        app = program(tmp_path / "app")
        for call in (silo.nodes, lambda: silo.start(app), lambda: silo.register(b"", "x"), lambda: silo.stop(1)):
            with pytest.raises(
                InputError, match=r"accepts only its operator: .*hospital-b/operator\.secret is missing"
            ):
                call()
        (at.kits / "hospital-b/operator.secret").write_text("0" * 64)
        with pytest.raises(InputError, match="has another secret"):
            control("hospital-b").nodes()
        executor = ["flower-superexec", "--runtime-api-address", kit.local, "--root-certificates", "ca.crt"]
        env = {**ENV, **loopback.environment(tmp_path / "home")}
        with open(tmp_path / "rogue.log", "w") as log:
            rogue = subprocess.Popen(executor, env=env, cwd=at.kits / "hospital-b", stdout=log, stderr=log)
        open_.callback(rogue.wait)
        open_.callback(rogue.terminate)

        # Flower's own command does what the operator's folder lets it do.
        home = at.kits / "server/.fedfm/operator"
        listed = ["flwr", "supernode", "list", "server", "--format", "json"]
        for folder, works in ((home, True), (tmp_path / "empty", False)):
            if not works:
                folder.mkdir()
                shutil.copy(home / "config.toml", folder)
            env = {**ENV, **loopback.environment(folder)}
            done = subprocess.run(listed, env=env, capture_output=True, text=True, check=False)
            assert done.stdout.count('"status": "online"') == 2 * works, done.stdout + done.stderr

        # The operator's own run is taken by the server's executor; afterwards no worker stays.
        assert at.result(at.begin())["excluded"] == []
        assert (
            '"POST /v1/runtime/acquire-task HTTP/1.1" 401' in (at.kits / "server/.fedfm/logs/superlink.log").read_text()
        )
        until(lambda: not workers(at), what="a worker outlived its run")
        assert "its worker ends, since the run has ended" in (at.kits / "hospital-a/.fedfm/silo.log").read_text()

        # Even the operator brings no code to a silo.
        operator.start(app)
        until(lambda: (app / "at-the-server").exists() and (app / "at-the-server").read_text())
        assert (
            "this silo runs fedfm's own app only, and the bundle has 'other/__init__.py'"
            in (app / "at-the-server").read_text()
        )
        assert not (app / "at-a-silo").exists()

        # A node with hospital-b's key that calls itself hospital-a stops nobody, and is called hospital-b.
        at.stop("hospital-b")
        until(lambda: len(operator.online()) == 1)
        with impostor(at, "hospital-b", "hospital-a"):
            until(lambda: len(operator.online()) == 2)
            shutil.rmtree(tmp_path / "run")
            result = at.result(at.begin())
        told = json.loads((tmp_path / "run/manifest.json").read_text())
        assert told["clients"] == ["hospital-a"] == [*result["client_accuracy"]]
        why = 'its silo.toml says name = "hospital-a", but its key is registered as "hospital-b"'
        assert f"hospital-b does not take part: E_CLIENT: {why}" in told["notices"]

        # A new key takes the place of the old one.
        public = loopback_keys.write_node_key(at.kits / "hospital-b/node.key")
        (at.kits / "server/silos/hospital-b.pub").write_bytes(public)
        until(lambda: "hospital-b has a new key; its old key is no longer admitted" in at.logs())
        until(lambda: at.logs().count("hospital-b may connect") == 2)
        assert [node.name for node in operator.nodes()].count("hospital-b") == 1
