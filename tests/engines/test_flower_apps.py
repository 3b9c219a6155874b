"""The app that `fedfm app` writes, built and run by Flower's own command, which changes its settings."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

from fedfm.cli import main
from fedfm.engines.flower import bundle, loopback
from fedfm.sites.kits import free_ports
from processes import ENV, experiment, here, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a SuperLink's processes are ended by their group")


@contextlib.contextmanager
def superlink(folder: Path):
    """The SuperLink that `flwr run` would start on this machine, on ports of its own; the environment of `flwr`."""
    port, control = map(str, free_ports(2))
    ports = {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port, "FLWR_LOCAL_CONTROL_API_PORT": control}
    # Ray would wait for the cluster that a killed `ray start` had left a note about.
    env = {**ENV, **loopback.environment(folder / "home"), **ports, "RAY_ADDRESS": "local"}
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess", "--host", "127.0.0.1"]
    command += ["--control-api-address", f"127.0.0.1:{control}", "--port", port]
    with open(folder / "superlink.log", "w") as log:
        link = subprocess.Popen(command, env=env, cwd=elsewhere, stdout=log, stderr=log, start_new_session=True)

    def answers() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
        return False

    try:
        until(answers, limit=60, what=(folder / "superlink.log").read_text()[-2000:])
        yield env
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(link.pid, signal.SIGTERM)
        try:
            link.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(link.pid, signal.SIGKILL)
            link.wait()


@pytest.mark.simulation
def test_flower_builds_and_runs_the_app_with_other_settings_and_the_bits_of_a_local_run(tmp_path):
    exp = experiment(tmp_path, method='name = "fedavg"\nrounds = 5')
    assert main(["app", str(tmp_path / "app"), "--experiment", str(exp)]) == 0
    with superlink(tmp_path) as env:

        def flwr(*args: str) -> str:
            done = subprocess.run(["flwr", *args], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout + done.stderr

        flwr("build", "--app", "app")
        (built,) = tmp_path.rglob("*.fab")
        bundle.check(built.read_bytes())
        with zipfile.ZipFile(io.BytesIO(built.read_bytes())) as archive:
            assert str(tmp_path) not in archive.read("pyproject.toml").decode()
        changes = f'home="{tmp_path / "app"}" run-name="trial" method.rounds=2 set="data.limit=200"'
        told = flwr(
            *("run", "app", "--stream", "--run-config", changes),
            *("--federation-config", "num-supernodes=3 client-resources-num-cpus=1"),
        )
        command = ["flwr", "run", "app", "--stream", "--run-config", changes.replace("rounds=2", "rounds=3")]
        command += ["--federation-config", "num-supernodes=3 client-resources-num-cpus=1"]
        again = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "this run has other values of method.rounds" in again.stdout + again.stderr
    run = tmp_path / "app/runs/trial"
    assert str(run) in told
    result = json.loads((run / "manifest.json").read_text())["result"]
    assert result["rounds"] == 2
    local = here("run", exp, "--out", tmp_path / "local", "--set", "method.rounds=2", "--set", "data.limit=200")
    assert result["params_sha256"] == local["params_sha256"]
