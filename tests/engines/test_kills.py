"""Killed workers: their tasks are repeated with the same bits; a client that kills its own worker is excluded."""

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fedfm.core.client import Client, Update, on_client
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.scaffold import Scaffold
from fedfm.runtime.client_memory import DiskMemory
from fedfm.training import SGD
from processes import begin, experiment, fedfm, rounds, same, until
from toy import federation, run

ROWS = {f"c{i}": [float(i), float(i * i), 1.0][: 1 + i % 3] for i in range(9)}
linux = pytest.mark.skipif(sys.platform != "linux", reason="a process's children are found in Linux's /proc")


def ordered(where: str) -> None:
    """Die if a file says so, once."""
    try:
        os.unlink(where)
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Killed(Scaffold):
    """Scaffold, whose clients have memories; a file that names a client and a moment kills the worker that is there."""

    orders: str = field(default="", metadata={"help": "folder of the orders"})

    @on_client
    def train(self, client: Client, x: Params, c: Params) -> Update:
        ordered(f"{self.orders}/{client.id}-before")
        update = super().train(client, x, c)
        ordered(f"{self.orders}/{client.id}-after")
        return update


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.proof
def test_the_task_of_a_killed_worker_is_repeated_with_the_same_result(tmp_path, monkeypatch, workers, seed):
    """Before the client begins, when its memory has changed, and when its memory is written but nothing is sent."""
    commit = DiskMemory.commit

    def then_die(self):
        commit(self)
        ordered(f"{orders}/{self._client}-committed")

    monkeypatch.setattr(DiskMemory, "commit", then_die)
    rng, found, kills = random.Random(seed), [], 0
    for killed in (False, True):
        orders = tmp_path / f"orders-{killed}"
        orders.mkdir()
        method = Killed(local=SGD(batch_size=2), orders=str(orders))
        fed = federation(method, ROWS, tmp_path / str(killed), workers=workers)
        state = method.init(fed)
        for t in range(1, 16):
            if killed:
                for client in rng.sample(sorted(ROWS), 2):
                    (orders / f"{client}-{rng.choice(['before', 'after', 'committed'])}").touch()
                    kills += 1
            fed.begin(t)
            state = method.step(fed, state, t)
            assert not list(orders.iterdir())  # every order was followed
        assert fed.excluded == []
        found.append((method.params_for(state, "").sha256(), fed.transcript.bytes_up, fed.transcript.bytes_down))
        fed._link.close()
    assert kills == 30
    assert found[0] == found[1]


@dataclass(frozen=True)
class Deadly(FedAvg):
    """Clients whose name says so kill their worker each time."""

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        if client.id.startswith("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(client, w)


@pytest.mark.proof
def test_a_client_that_kills_its_worker_is_left_out_and_takes_nobody_along(tmp_path):
    method = Deadly(local=SGD())
    rows = {"dies": [0.0], **ROWS}
    fed = federation(method, rows, tmp_path / "a", workers=2, timeout=60)
    state = run(method, fed, 5)[-1]
    assert [(e.round, e.client, e.code) for e in fed.excluded] == [(t, "dies", "E_DIED") for t in range(1, 6)]
    assert "so did a second one: signal 9 (SIGKILL, likely out of memory)" in fed.excluded[0].reason
    fed._link.close()
    without = federation(method, ROWS, tmp_path / "b", workers=2)
    assert run(method, without, 5)[-1]["w"] == state["w"]
    without._link.close()


@linux
@pytest.mark.release
def test_workers_killed_at_random_moments_change_no_bit_of_a_run(tmp_path):
    exp = experiment(tmp_path, method='name = "scaffold"\nrounds = 10\nlocal = { epochs = 4 }', run="workers = 2")
    straight = fedfm("run", exp, "--out", tmp_path / "straight")
    out, rng, kills = tmp_path / "killed", random.Random(5), 0
    running = begin("run", exp, "--out", out)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    until(lambda: rounds(out) >= 1 or running.poll() is not None)
    while running.poll() is None:
        before = rounds(out)
        time.sleep(rng.uniform(0, 0.05))
        try:
            os.kill(int(rng.choice(children.read_text().split())), signal.SIGKILL)
        except (OSError, IndexError):  # the run is over
            break
        kills += 1
        until(lambda before=before: rounds(out) > before + 1 or running.poll() is not None)  # one a round at most
    text, error = running.communicate(timeout=300)
    assert running.returncode == 0, error[-2000:]
    assert kills >= 2  # as many as the machine's speed lets in
    result = json.loads(text.strip().splitlines()[-1])
    assert result["excluded"] == []
    same(straight, result)
