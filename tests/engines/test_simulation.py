"""The simulation engine: Flower's own simulation gives the local engine's bits, and leaves nothing behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fedfm.engines.flower.orphan_cleanup import processes_with
from processes import begin, experiment, fedfm, here, mentioning, rounds, same, until

SCAFFOLD = 'name = "scaffold"\nrounds = 2\nlocal = { learning_rate = 0.03, epochs = 2 }'
LORA = '{ name = "lora", rank = 2 }'


def rays() -> list[str]:
    return mentioning(Path("/fedfm-")) + mentioning(Path("raylet"))


def leftovers(before: set[str]) -> set[str]:
    """New files in shared memory that no process uses: those of other runs are used."""
    new = set(os.listdir("/dev/shm")) - before
    for maps in Path("/proc").glob("[0-9]*/maps") if new else ():
        with contextlib.suppress(OSError):
            text = maps.read_text()
            new = {name for name in new if f"/dev/shm/{name}" not in text}
    return new


def ends_as_a_local_run(running: subprocess.Popen, exp: Path, folder: Path) -> None:
    """A simulation that writes into ``folder / "run"`` ends with the local bits, and leaves nothing behind."""
    before = set(os.listdir("/dev/shm"))
    told, error = running.communicate(timeout=300)
    assert not processes_with(f"fedfm-ray{running.pid}-")
    assert running.returncode == 0, error[-2000:]
    simulated = json.loads(told.splitlines()[-1])
    same(simulated, here("run", exp, "--out", folder / "local"))
    assert simulated["engine"] == "simulation"
    assert (folder / "run").stat().st_mode & 0o077 == 0
    until(lambda: not leftovers(before))
    until(lambda: not mentioning(folder))


@pytest.mark.release
@pytest.mark.parametrize(
    ("method", "adaptation"),
    [
        (SCAFFOLD, '{ name = "head" }'),
        ('name = "fedpft"\ncomponents = 2\nverify = true', '{ name = "head" }'),
    ],
)
def test_same_bits_and_bytes_as_local(tmp_path, method, adaptation):
    exp = experiment(tmp_path, method=method, adaptation=adaptation)
    ends_as_a_local_run(begin("run", exp, "--out", tmp_path / "run", "--engine", "simulation"), exp, tmp_path)


@pytest.mark.release
@pytest.mark.simulation
def test_the_same_clients_attack_and_the_same_rule_withstands_them(tmp_path):
    run = '[attack]\nname = "backdoor"\nfraction = 0.4\nfactor = 2.0\n[aggregation]\nname = "median"'
    exp = experiment(tmp_path, method='name = "fedavg"\nrounds = 2', run=run)
    simulated = fedfm("run", exp, "--out", tmp_path / "simulated", "--engine", "simulation")
    local = here("run", exp, "--out", tmp_path / "local")
    same(simulated, local)
    assert len(local["attackers"]) == 1
    for key in ("attackers", "attack_success"):
        assert simulated[key] == local[key]


@pytest.mark.release
@pytest.mark.simulation
def test_a_buffer_without_the_one_that_fails_has_the_local_bits(tmp_path):
    method = f'name = "naughty:Naughty"\nrounds = 5\norders = "{tmp_path}"'
    exp = experiment(tmp_path, method=method, run="asynchronous = { buffer = 2, speeds = { client-02 = 0.3 } }")
    (tmp_path / "client-00").write_text("raise")
    simulated = fedfm("run", exp, "--out", tmp_path / "simulated", "--engine", "simulation")
    local = here("run", exp, "--out", tmp_path / "local")
    same(simulated, local)
    assert simulated["excluded"] == local["excluded"]
    assert {e["client"] for e in local["excluded"]} == {"client-00"}
    lines = [json.loads(line) for line in (tmp_path / "simulated/metrics.jsonl").read_text().splitlines()]
    assert [line["cohort"] for line in lines[1:]] == [["client-01", "client-02"]] * 5


@pytest.mark.simulation
def test_a_client_that_raises_or_dies_is_left_out_and_a_stop_ends_everything(tmp_path):
    method = f'name = "naughty:Naughty"\nrounds = 400\norders = "{tmp_path}"'
    exp = experiment(tmp_path, method=method, run="timeout = 300")
    (tmp_path / "client-00").write_text("raise")
    (tmp_path / "client-01").write_text("die")
    out = tmp_path / "run"
    running = begin("run", exp, "--out", out, "--engine", "simulation")
    until(lambda: rounds(out) >= 3 or running.poll() is not None)
    running.send_signal(signal.SIGINT)
    _, error = running.communicate(timeout=300)
    assert not processes_with(f"fedfm-ray{running.pid}-")  # at once: what is left writes into folders that are gone
    assert running.returncode == 130, error[-2000:]
    assert "client-00 left out, E_EXCEPTION: ValueError: as ordered" in error
    assert "client-01 left out" not in error  # its actor came back, and was asked once more
    assert "ValueError: as ordered" in (out / "private" / "errors.log").read_text()
    assert not mentioning(out)


@pytest.mark.simulation
@pytest.mark.skipif(sys.platform != "linux", reason="what a process has started is found in Linux's /proc")
def test_processes_of_a_killed_run_end_and_it_resumes_to_the_same_bits(tmp_path):
    exp = experiment(tmp_path, method='name = "fedavg"\nrounds = 20', adaptation=LORA)
    out = tmp_path / "run"
    running = begin("run", exp, "--out", out, "--engine", "simulation")
    until(lambda: rounds(out) >= 3 or running.poll() is not None)
    (folder,) = Path(tempfile.gettempdir()).glob(f"fedfm-ray{running.pid}-*")
    assert len(processes_with(str(folder))) > 3  # Ray's own and the clients'
    running.kill()
    running.communicate()
    until(lambda: not processes_with(str(folder)) and not folder.exists())
    assert 3 <= rounds(out) < 20
    ends_as_a_local_run(begin("resume", out), exp, tmp_path)
