"""The plan of an encrypted run against a run."""

import math
import mmap
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from fedfm.encrypted.ckks.refresh import DistanceLedger
from fedfm.encrypted.ckks.ring import SLOW_LINK, Parameters
from fedfm.errors import InputError
from fedfm.privacy.crypto import keys
from random_student import random_model

pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')

from fedfm.encrypted.inference import operation_seconds
from fedfm.encrypted.inference.cost_estimate import plan
from fedfm.encrypted.inference.model_owner import KeyHolder, ModelOwner
from fedfm.encrypted.inference.operation_count import count_operations

TOKENS, D = 4, 4


@pytest.mark.parametrize(
    "parameters",
    [
        pytest.param(Parameters(), id="8192", marks=pytest.mark.proof),
        pytest.param(SLOW_LINK, id="16384", marks=pytest.mark.release),
    ],
)
def test_a_run_does_what_was_planned(parameters, monkeypatch):
    """Operations, refreshes, messages, bytes, distance, and states within 1e-3 of the clear, at both rings."""
    model, rows, states = random_model(3, TOKENS, D, blocks=1)
    holder = KeyHolder.new(TOKENS, parameters)
    public, session, key, ledger = holder.public(), keys.entropy(16), keys.entropy(32), DistanceLedger()
    owner, found = ModelOwner(model, "class", public, session, key, ledger), Counter()
    for name in ("relinearise_and_rescale", "rescale"):
        call = getattr(owner.keys, name)

        def count(x, name=name, call=call):
            found[name.split("_")[0], x.level + 1] += len(x)
            return call(x)

        setattr(owner.keys, name, count)
    for name, kind in {"tensor": "product", "outer": "term", "weave": "weigh"}.items():
        call = getattr(owner.keys.ring, name)

        def multiply(a, b, *others, kind=kind, call=call):
            each = math.prod(others[0][:3]) if kind == "term" else len(a)
            found[kind, a.shape[2]] += each * a.shape[1] // 2  # for each two polynomials
            call(a, b, *others)

        monkeypatch.setattr(owner.keys.ring, name, multiply)
    turn = owner.keys.rotations

    def rotations(x, steps):
        found["decompose", x.level + 1] += len(x)
        found["rotate", x.level + 1] += len(x) * sum(step % (parameters.degree // 2) != 0 for step in steps)
        return turn(x, steps)

    conjugated = owner.keys.conjugate

    def conjugate(x):
        found.update({("decompose", x.level + 1): len(x), ("rotate", x.level + 1): len(x)})
        return conjugated(x)

    owner.keys.rotations, owner.keys.conjugate = rotations, conjugate
    holder.begin(session, key)
    crossed, messages = [], []

    def exchange(message):
        answer = holder.refresh(message)
        messages.extend((message, answer))
        crossed.append(len(message) + len(answer))
        return answer

    def release(block, message):
        crossed.append(len(message))
        got = holder.decrypt_released(message, 3)
        np.testing.assert_allclose(got, owner.kind.clear(states)[:, block], atol=1e-3)

    sent = holder.rows(rows)
    owner.run(sent, exchange, release)
    want = count_operations(model.blocks[0], TOKENS, parameters, first=True, released=owner.kind)
    # Refreshes add and transform polynomials as well, but are not counted by operation.
    assert found == {key: n for key, n in want.operations.items() if key[0] not in ("add", "affine", "encode")}
    monkeypatch.undo()
    made = plan(model, [3], "class", parameters=parameters)
    assert ledger.ciphertexts == sum(want.refreshes) == made.refreshed
    assert ledger.spent == pytest.approx(made.statistical_distance, rel=0.02)
    assert made.messages == len(messages) + 2
    assert made.wide + made.narrow == len(messages) // 2
    assert made.bytes_per_batch == pytest.approx(sum(crossed) + len(sent), rel=0.001)
    assert made.bytes_per_sample == made.bytes_per_batch / 3
    assert made.key_bytes == pytest.approx(len(public), rel=0.01)
    assert made.security_bits == 128
    assert made.depth == 2 * (2 + 7) + 2 + 4 + (2 + 5) + 3 + (2 + 1)
    assert made.seconds == pytest.approx(sum(made.seconds_per_block))
    assert f"degree {parameters.degree}" in made.table()
    assert made.to_dict()["ring_dimension"] == parameters.degree


def test_insecure_parameters_and_too_many_rows_are_refused():
    with pytest.raises(InputError, match="less than 128-bit security"):
        Parameters(8192, (43, 36, 36, 36, 36), 43)
    model, *_ = random_model(3, TOKENS, D, blocks=1)
    with pytest.raises(InputError, match="encrypt fewer rows"):
        plan(model, [10**12], "class")


@pytest.mark.parametrize(("growing", "turns"), [(0, 1), (1, 3), (4, 2)])
def test_calls_that_get_new_memory_are_not_planned(growing, turns, monkeypatch):
    """By a clock that counts calls: the system clears memory for the first ones; one that always gets more counts."""
    kept, clock = [], [0.0]
    monkeypatch.setattr(operation_seconds, "time", SimpleNamespace(process_time=lambda: clock[0]))

    def work(limit):
        grows = len(kept) < limit
        if grows:
            kept.append(mmap.mmap(-1, 8 << 20))  # not from the heap, which may have freed memory
            kept[-1].write(bytes([1]) * (8 << 20))
        clock[0] += 1.0 if grows else 0.25

    assert operation_seconds._measure_seconds(lambda: work(growing + 1), 1, turns) == 0.25  # one call warms up
    assert len(kept) == growing + 1
    assert operation_seconds._measure_seconds(lambda: work(10**6), 2, 1) == 0.5
