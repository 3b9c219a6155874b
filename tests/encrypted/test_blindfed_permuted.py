"""The paper's protocol on ciphertexts: what the holder gets, what it returns, and what is refused.

Two blocks take four CPU seconds, and the orders of a full batch as long again.
"""

from collections import Counter

import numpy as np
import pytest

from fedfm.encrypted.ckks.ciphertexts import Ciphertexts
from fedfm.encrypted.ckks.refresh import DistanceLedger
from fedfm.encrypted.ckks.ring import Parameters
from fedfm.encrypted.inference import messages
from fedfm.errors import ClientFault, InputError
from fedfm.privacy.crypto import keys
from random_student import random_model

pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')

from fedfm.encrypted.inference.cost_estimate import plan
from fedfm.encrypted.inference.key_holder import KeyHolder
from fedfm.encrypted.inference.model_owner import Checkpoint, ModelOwner
from fedfm.encrypted.inference.operation_count import count_operations
from fedfm.encrypted.inference.permuted_key_holder import PermutedKeyHolder
from fedfm.encrypted.inference.permuted_model_owner import (
    PermutedModelOwner,
    join_messages,
    order_bytes,
    orders_of,
    split_messages,
)

SAMPLES, TOKENS, CLASSES = 5, 4, 6
MODEL, ROWS, STATES = random_model(SAMPLES, TOKENS, 4, blocks=2)
RAW = STATES * MODEL.scales[:, None, None]
LABELS = np.array([0, 5, 2, 2, 1])
HOLDER = PermutedKeyHolder.new(TOKENS)
PUBLIC = HOLDER.public()
ORDERS = [np.array(o) for o in ([3, 0, 4, 1, 2], [4, 3, 2, 1, 0], [1, 2, 0, 4, 3])]


class Run:
    """One batch between a holder and an owner."""

    def __init__(self, holder=HOLDER, public=PUBLIC, orders=ORDERS, rows=ROWS, labels=LABELS):
        self.rows, self.known, self.n = rows, labels, len(rows)
        self.session, key = keys.entropy(16), keys.entropy(32)
        self.holder, self.ledger = holder, DistanceLedger()
        self.owner = PermutedModelOwner(MODEL, "class", public, self.session, key, self.ledger, orders=orders)
        holder.begin(self.session, key)
        self.states, self.labels, self.saved, self.crossed, self.sent = {}, None, [], [], []

    def refresh(self, message):
        answer = self.holder.refresh(message)
        self.crossed += [message, answer]
        return answer

    def release(self, block, message):
        self.crossed.append(message)
        if block == len(MODEL.blocks):
            self.labels = self.holder.labels_of(message, self.n, CLASSES)
            return b""
        self.states[block] = self.holder.states_of(message, self.n)
        if block + 1 == len(MODEL.blocks):
            return b""
        self.crossed.append(self.holder.encrypt_states(self.session, self.states[block]))
        return self.crossed[-1]

    def go(self, start=None):
        rows = b"" if start else self.holder.rows(self.rows)
        self.sent = [rows, self.holder.labels(self.session, self.known, CLASSES)]
        self.owner.run(
            join_messages(*self.sent), self.refresh, self.release, start, lambda c: self.saved.append(c.to_bytes())
        )
        return self


def encrypted(run, x):
    """Encrypt numbers as the states of a block are encrypted."""
    residues = HOLDER._keys.encrypt(run.owner.layout.pack(x))
    return Ciphertexts(residues.view(np.uint64), 2.0**36, run.owner.keys).at(3)


def test_a_message_with_states_holds_nothing_else():
    """All slots of its ciphertexts: states of the samples in the order, and noise in the rest, which are zero."""
    run = Run()
    x = np.random.default_rng(1).normal(size=(run.owner.layout.samples, TOKENS, 4))
    message = run.owner.permute(1, encrypted(run, x), ORDERS[0])
    residues, scale = HOLDER._current.unpack(message, limbs=1, note=messages.NOTE.size)
    slots = HOLDER._keys.decrypt_complex(residues, scale).reshape(2, TOKENS, -1)
    assert len(slots) == 2  # of four features
    want = x[ORDERS[0]].transpose(2, 1, 0)
    np.testing.assert_allclose(slots[:, :, :SAMPLES].real, want[::2], atol=1e-3)
    np.testing.assert_allclose(slots[:, :, :SAMPLES].imag, np.sqrt(2) * want[1::2], atol=1e-3)
    assert 1e-6 < np.abs(slots[:, :, SAMPLES:]).max() < 1e-3


def test_second_polynomials_say_nothing():
    run = Run()
    x = encrypted(run, np.ones((SAMPLES, TOKENS, 4)))
    (a, _), (b, _) = (
        HOLDER._current.unpack(run.owner.permute(0, x, ORDERS[0]), limbs=1, note=messages.NOTE.size) for _ in range(2)
    )
    assert (a[:, 1] == b[:, 1]).mean() < 1e-3


@pytest.mark.proof
def test_a_killed_batch_goes_on_in_the_same_orders():
    first = Run()
    release = first.release

    def killed(block, message):
        if block:
            raise KeyboardInterrupt
        return release(block, message)

    first.release = killed
    with pytest.raises(KeyboardInterrupt):
        first.go()
    np.testing.assert_allclose(first.states[0], RAW[ORDERS[0], 0], atol=1e-3)
    assert first.labels is None
    second = Run(holder=PermutedKeyHolder.from_bytes(HOLDER.to_bytes()))
    second.go(start=Checkpoint.from_bytes(first.saved[-1]))
    assert set(second.states) == {1}
    np.testing.assert_allclose(second.states[1], RAW[ORDERS[1], 1], atol=1e-3)
    assert second.labels.tolist() == LABELS[ORDERS[2]].tolist()


@pytest.mark.proof
def test_replies_of_the_client_are_checked():
    def repeated(run):
        return lambda block, message: run.sent[1]

    def fewer(run):
        def answer(block, message):
            return run.holder.encrypt_states(run.session, run.holder.states_of(message, SAMPLES)[:, :, :3])

        return answer

    for made, reason in ((repeated, "message 2 came"), (fewer, "3 ciphertexts came, 4 were")):
        run = Run()
        run.release = made(run)
        with pytest.raises(ClientFault, match=reason):
            run.go()


def test_the_client_refuses_altered_messages():
    run = Run()
    x = encrypted(run, np.ones((SAMPLES, TOKENS, 4)))
    message = run.owner.permute(0, x, ORDERS[0])
    with pytest.raises(ClientFault, match="altered"):
        HOLDER.states_of(message[:-1] + bytes([message[-1] ^ 1]), SAMPLES)
    with pytest.raises(ClientFault, match="unknown kind"):
        HOLDER.labels_of(message, SAMPLES, CLASSES)
    run = Run()
    with pytest.raises(ClientFault, match="not one-hot"):  # ones everywhere are no labels
        HOLDER.labels_of(
            run.owner.permute(2, encrypted(run, np.ones((SAMPLES, TOKENS, 2))), ORDERS[0]), SAMPLES, CLASSES
        )
    run = Run()
    large = np.ones((SAMPLES, TOKENS, 4))
    large[1] *= 1.2 * MODEL.ranges[0]
    turned = HOLDER.states_of(run.owner.permute(0, encrypted(run, large), ORDERS[0]), SAMPLES)
    assert turned.any((1, 2)).tolist() == [place != 3 for place in range(SAMPLES)]  # at place 3 stands row 1


def test_orders_and_keys_are_checked():
    with pytest.raises(ClientFault, match="rotation key is missing"):
        Run(public=KeyHolder.new(TOKENS).public())
    with pytest.raises(InputError, match="expected one order more"):
        Run(orders=ORDERS[:2])
    assert all(np.array_equal(a, b) for a, b in zip(orders_of(order_bytes(ORDERS)), ORDERS, strict=True))
    assert split_messages(join_messages(b"abc", b"de")) == (b"abc", b"de")
    ModelOwner(MODEL, "class", PUBLIC, bytes(16), bytes(32), DistanceLedger())  # more keys than it needs


@pytest.mark.release
def test_a_full_batch_comes_in_its_orders_and_does_what_was_planned():
    n, rng = Parameters().slots // TOKENS, np.random.default_rng(0)
    more, labels = np.r_[np.arange(SAMPLES), rng.integers(SAMPLES, size=n - SAMPLES)], rng.integers(CLASSES, size=n)
    orders = [rng.permutation(n) for _ in range(3)]
    run, found, parameters = Run(orders=orders, rows=ROWS[more], labels=labels), Counter(), Parameters()
    for name in ("relinearise", "rescale", "rotate"):
        call = getattr(run.owner.keys, name)

        def count(x, *more, name=name, call=call):
            if not (name == "relinearise" and x.limbs.shape[1] == 2):
                found[name, x.level + 1] += len(x)
            return call(x, *more)

        setattr(run.owner.keys, name, count)
    run.go()
    for block in (0, 1):
        np.testing.assert_allclose(run.states[block], RAW[more][orders[block], block], atol=1e-3)
    assert np.array_equal(run.labels, labels[orders[2]])
    assert len(run.saved) == 1  # the last block's states are not needed again
    made = plan(MODEL, [(3, 0, 2)], "class", permuted=CLASSES)
    both_blocks = [count_operations(layer, TOKENS, parameters, n == 0, True) for n, layer in enumerate(MODEL.blocks)]
    want = sum((c.operations for c in both_blocks), Counter())
    assert want.pop(("weigh", 2)) > 0
    found["rescale", 4] -= 4  # the embedding's
    last = Counter({("rotate", 2): found["rotate", 2] - want["rotate", 2], ("rescale", 2): 1})
    assert last["rotate", 2] * 4 == want["rotate", 2]  # one pair of ciphertexts beside two of each block
    found.subtract(last)
    assert +found == want
    assert run.ledger.ciphertexts == made.refreshed
    assert made.messages == 1 + len(run.crossed)  # rows with labels
    sent = sum(map(len, run.crossed)) + sum(map(len, run.sent))
    assert made.bytes_per_batch == pytest.approx(sent, rel=0.001)
    assert made.bytes_per_sample == pytest.approx(2 * made.bytes_per_batch / 5)
    assert made.key_bytes == pytest.approx(len(PUBLIC), rel=0.01)
    assert made.batches == 2  # of the training rows and of the test rows
    assert made.refreshed < plan(MODEL, [5], "class").refreshed
