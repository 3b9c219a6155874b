"""Encrypted inference in processes: the states of one process, clients that fail, processes that die."""

import io
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fedfm.encrypted.ckks.refresh import DistanceLedger
from fedfm.errors import E_DIED, ClientFault, InputError, RunError
from fedfm.privacy.crypto import keys
from random_student import random_model

pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')

from fedfm.encrypted.inference import framing, worker_pool
from fedfm.encrypted.inference.model_owner import Checkpoint, KeyHolder
from fedfm.encrypted.inference.model_serialization import model_bytes, model_of
from fedfm.encrypted.inference.released_states import Released
from fedfm.encrypted.inference.worker_pool import EncryptedBatch, run_all

SAMPLES, TOKENS, D = 5, 4, 4
MODEL, ROWS, STATES = random_model(2 * SAMPLES, TOKENS, D, blocks=1)
HOLDER = KeyHolder.new(TOKENS)
PUBLIC = HOLDER.public()


class Talk:
    """A client in this process; it keeps what it gets, and can be made to fail at a message."""

    def __init__(self, at_refresh=lambda job, count: None):
        self.states, self.saved, self.count, self._hook = {}, [], 0, at_refresh

    def rows(self, job):
        HOLDER.begin(job.session, job.key)
        return HOLDER.rows(ROWS[job.batch * SAMPLES :][:SAMPLES])

    def refresh(self, job, message):
        self.count += 1
        self._hook(job, self.count)
        return HOLDER.refresh(message)

    def release(self, job, block, message):
        self.states[job.batch, block] = HOLDER.decrypt_released(message, SAMPLES)

    def save(self, job, checkpoint):
        self.saved.append(Checkpoint.from_bytes(checkpoint).blocks)


def jobs(ledger, batches=2):
    return [EncryptedBatch("a", b, PUBLIC, keys.entropy(16), keys.entropy(32), ledger) for b in range(batches)]


@pytest.mark.proof
def test_two_processes_give_the_states_in_the_clear():
    talk, ledger = Talk(), DistanceLedger()
    failed = run_all(jobs(ledger), talk, 2, folded=MODEL, released="class")
    want = Released("class", TOKENS, D).clear(STATES)
    assert failed == {}
    for batch in range(2):
        np.testing.assert_allclose(talk.states[batch, 0], want[batch * SAMPLES :][:SAMPLES, 0], atol=1e-3)
    assert talk.saved == [1, 1]
    assert ledger.ciphertexts > 100
    assert 0 < ledger.spent < 2.0**-40


@pytest.mark.proof
def test_a_client_that_fails_ends_its_batch_alone():
    def fail(job, count):
        if job.batch == 0:
            raise ClientFault(E_DIED, "the process is gone")

    talk = Talk(fail)
    failed = run_all(jobs(DistanceLedger()), talk, 1, folded=MODEL, released="class")
    assert {k: f.code for k, f in failed.items()} == {("a", 0): E_DIED}
    assert set(talk.states) == {(1, 0)}


@pytest.mark.proof
def test_refreshes_of_several_batches_travel_together():
    together = []

    class Gathers(Talk):
        def refreshes(self, asked):
            together.append(len(asked))
            if len(together) == 20:  # one of them fails, the other goes on
                return [ClientFault(E_DIED, "gone"), *(self.refresh(*pair) for pair in asked[1:])]
            time.sleep(0.5 if len(together) < 20 else 0.0)  # as on a slow network
            return [self.refresh(*pair) for pair in asked]

    talk, ledger = Gathers(), DistanceLedger()
    failed = run_all(jobs(ledger, 2), talk, 2, folded=MODEL, released="class")
    (lost,) = failed.items()
    assert lost[1].code == E_DIED
    want, kept = Released("class", TOKENS, D).clear(STATES), 1 - lost[0][1]
    np.testing.assert_allclose(talk.states[kept, 0], want[kept * SAMPLES :][:SAMPLES, 0], atol=1e-3)
    assert together[:19].count(2) >= 4  # how often both wait depends on the machine; one by one it would be never


def started(monkeypatch):
    """The processes that a run starts."""
    found, start = [], subprocess.Popen

    def popen(*args, **kwargs):
        found.append(start(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(worker_pool.subprocess, "Popen", popen)
    return found


@pytest.mark.proof
def test_a_process_that_dies_ends_the_run_with_its_reason(monkeypatch):
    found = started(monkeypatch)

    def kill(job, count):
        os.kill(found[0].pid, signal.SIGKILL)

    with pytest.raises(RunError, match=r"batch 0 of client a \(exit code -9"):
        run_all(jobs(DistanceLedger(), 1), Talk(kill), 1, folded=MODEL, released="class")


@pytest.mark.proof
def test_an_interrupt_leaves_no_process(monkeypatch):
    found = started(monkeypatch)

    def interrupt(job, count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(jobs(DistanceLedger()), Talk(interrupt), 2, folded=MODEL, released="class")
    assert len(found) == 2
    assert all(process.poll() is not None for process in found)


@pytest.mark.proof
def test_a_spent_ledger_ends_the_run_before_anything_is_sent():
    talk = Talk()
    with pytest.raises(RunError, match="statistical distance"):
        run_all(jobs(DistanceLedger(spent=2.0**-40), 1), talk, 1, folded=MODEL, released="class")
    assert talk.count == 0


def test_a_model_is_the_same_after_its_bytes():
    found = model_of(model_bytes(MODEL))
    for name in ("embedding", "bias", "positions", "scales", "ranges"):
        np.testing.assert_array_equal(getattr(found, name), getattr(MODEL, name))
    assert found.bound == MODEL.bound
    for a, b in zip(found.blocks, MODEL.blocks, strict=True):
        assert (a.heads, a.norms, a.exponential, a.inverse, a.gelu) == (
            b.heads,
            b.norms,
            b.exponential,
            b.inverse,
            b.gelu,
        )
        for name in b.weights:
            np.testing.assert_array_equal(a.weights[name], b.weights[name])


def test_unknown_polynomials_are_refused():
    class Other:
        fold = (1.0, 0.0)

    from dataclasses import replace

    odd = replace(MODEL, blocks=(replace(MODEL.blocks[0], gelu=Other()),))
    with pytest.raises(InputError, match="polynomial of class Other"):
        model_bytes(odd)


@pytest.mark.proof
def test_a_worker_whose_run_was_killed_ends_without_a_word():
    request = io.BytesIO()
    framing.write(request, framing.DONE)  # no job: the worker answers that it cannot read it
    worker = subprocess.Popen(
        [sys.executable, "-m", "fedfm.encrypted.inference.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    worker.stdout.close()  # nobody reads the answer
    assert worker.communicate(request.getvalue(), timeout=60)[1] == b""
    assert worker.returncode == 0
