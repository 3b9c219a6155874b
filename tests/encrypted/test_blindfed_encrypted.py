"""Encrypted inference of several blocks: released states against the clear, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from fedfm.encrypted.ckks.ciphertexts import Ciphertexts
from fedfm.encrypted.ckks.refresh import DistanceLedger, Masking
from fedfm.encrypted.ckks.ring import Parameters
from fedfm.encrypted.ckks.transformer_block import Packing
from fedfm.encrypted.inference import messages
from fedfm.encrypted.inference.released_states import Released
from fedfm.errors import ClientFault, InputError, Lost
from fedfm.privacy.crypto import keys
from random_student import random_model

pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')

from fedfm.encrypted.ckks import seal
from fedfm.encrypted.inference import select_states
from fedfm.encrypted.inference.key_holder import zero_out_of_range
from fedfm.encrypted.inference.model_owner import Checkpoint, KeyHolder, ModelOwner, OutOfRange
from fedfm.encrypted.inference.select_states import select_released

SAMPLES, TOKENS, D = 5, 4, 4
MODEL, ROWS, STATES = random_model(SAMPLES, TOKENS, D)
HOLDER = KeyHolder.new(TOKENS)
PUBLIC = HOLDER.public()
PROJECTION = np.linalg.qr(np.random.default_rng(0).normal(size=(D, 3)))[0].T  # orthonormal rows


class Run:
    """One batch between a holder and an owner, joined by bytes that are kept."""

    def __init__(self, kind="class", *, model=MODEL, holder=HOLDER, ledger=None):
        session, key = keys.entropy(16), keys.entropy(32)
        self.holder, self.ledger = holder, DistanceLedger() if ledger is None else ledger
        projection = PROJECTION if kind == "tokens" else None
        self.owner = ModelOwner(model, kind, PUBLIC, session, key, self.ledger, projection=projection)
        holder.begin(session, key)
        self.asked, self.answers, self.sent, self.states, self.saved = [], [], [], {}, []

    def exchange(self, message):
        self.asked.append(message)
        self.answers.append(self.holder.refresh(message))
        return self.answers[-1]

    def release(self, block, message):
        self.sent.append(message)
        self.states[block] = self.holder.decrypt_released(message, SAMPLES)

    def go(self, rows=ROWS, start=None):
        message = b"" if start else self.holder.rows(rows)
        self.owner.run(message, self.exchange, self.release, start, lambda c: self.saved.append(c.to_bytes()))
        return self


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["class", "grid", "tokens"])
def test_released_states_are_those_in_the_clear(kind):
    run = Run(kind).go()
    want = run.owner.kind.clear(STATES)
    for block in range(len(MODEL.blocks)):
        assert run.states[block].dtype == np.float32
        np.testing.assert_allclose(run.states[block], want[:, block], atol=1e-3)
    assert want.std() > 0.1


@pytest.mark.parametrize("kind", ["class", "grid", "tokens"])
def test_a_released_message_holds_nothing_else(kind):
    """All slots of its ciphertexts, opened with the holder's key: released numbers, and noise in the rest."""
    run = Run(kind)
    x = np.random.default_rng(1).normal(size=(run.owner.layout.samples, TOKENS, D))
    encrypted = HOLDER._keys.encrypt(run.owner.layout.pack(x))
    message = run.owner.release(1, Ciphertexts(encrypted.view(np.uint64), 2.0**36, run.owner.keys).at(3))
    residues, scale = run.holder._current.unpack(message, limbs=1, note=messages.NOTE.size)
    slots = HOLDER._keys.decrypt(residues, scale)
    shape = run.owner.kind
    want = shape.clear(x / MODEL.scales[1])
    np.testing.assert_allclose(shape.from_slots(slots, len(x)), want, atol=1e-3)
    flat = slots.reshape(len(slots), TOKENS, -1)[0]
    if kind == "class":  # four features fill the ciphertext; take one away
        few = replace(run.owner.kind, features=3)
        run.owner.kind = few
        part = Ciphertexts(encrypted[:3].view(np.uint64), 2.0**36, run.owner.keys)
        residues, scale = run.holder._current.unpack(run.owner.release(1, part.at(3)), limbs=1, note=messages.NOTE.size)
        flat = HOLDER._keys.decrypt(residues, scale).reshape(TOKENS, -1)
        assert np.abs(flat[:3]).max() > 0.1
        assert np.abs(flat[3]).max() < 1e-3
    if kind == "grid":  # one feature's four quadrants, each a single token here
        np.testing.assert_allclose(flat, x[:, :, 0].T / MODEL.scales[1], atol=1e-3)


def test_other_slots_of_a_grid_are_zero():
    """A grid has 16 tokens and one feature: one slot of each quadrant is released."""
    shape = Released("grid", 16, 1)
    x = np.random.default_rng(2).normal(size=(1, 16, 1))
    sums = np.zeros(16)
    for j, factors in shape.weights().items():
        sums += np.roll(factors[0] * x[0, :, 0], -j)
    np.testing.assert_allclose(sums[[0, 2, 8, 10]], shape.clear(x)[0, 1:, 0])
    assert not sums[[1, 3, 4, 5, 6, 7, 9, 11, 12, 13, 14, 15]].any()
    np.testing.assert_allclose(shape.from_slots(sums[None], 1), shape.clear(x))


@pytest.mark.parametrize(("class_token", "most"), [(True, 1), (False, 8)], ids=["a class token", "a mean"])
def test_a_plaintext_is_encoded_once_however_many_features_use_it(class_token, most, monkeypatch):
    """Eight tokens and 11 features: a full ciphertext and a part of one."""
    layout, kind = Packing(Parameters(), 8), Released("class", 8, 11, class_token=class_token)
    client = seal.ClientKeys(layout.parameters)
    server = seal.ServerKeys(layout.parameters, client.public(layout.rotations), floor=3)
    x = np.random.default_rng(3).normal(size=(layout.samples, 8, 11))
    encoded, encode = [], select_states.encode_slots

    def counted(values, *others):
        encoded.append(len(values))
        return encode(values, *others)

    monkeypatch.setattr(select_states, "encode_slots", counted)
    rows = Ciphertexts(client.encrypt(layout.pack(x)).view(np.uint64), 2.0**36, server).at(messages.RELEASE_LIMBS)
    found = select_released(rows, kind, layout, 2.0, 4.0)
    assert sum(encoded) == most
    slots = client.decrypt(found.residues, found.scale)
    np.testing.assert_allclose(kind.from_slots(slots, len(x)), kind.clear(x) / 2, atol=1e-3)
    assert np.abs(slots.reshape(2, 8, -1)[1, 3:]).max() < 1e-3  # nothing but the last three features


def test_the_second_polynomial_says_nothing_of_the_weights():
    run = Run()
    x = Ciphertexts(HOLDER._keys.encrypt(np.ones((D, 4096))).view(np.uint64), 2.0**36, run.owner.keys).at(3)
    (a, _), (b, _) = (
        run.holder._current.unpack(run.owner.release(0, x), limbs=1, note=messages.NOTE.size) for _ in range(2)
    )
    bare = select_released(x.at(2), run.owner.kind, run.owner.layout, 1.0, 1.0).residues
    assert (a[:, 1] == b[:, 1]).mean() < 1e-3
    assert (a[:, 1] == bare[:, 1]).mean() < 1e-3


@pytest.mark.proof
def test_a_killed_run_goes_on_in_another_session_with_new_masks(monkeypatch):
    made, hide = [], Masking.hide

    def kept(self, x):
        hidden, mask = hide(self, x)
        made.append(mask.key)
        return hidden, mask

    monkeypatch.setattr(Masking, "hide", kept)
    order = []
    ledger = DistanceLedger(keep=lambda entry: order.append(("kept", entry.ciphertexts)))
    first = Run(ledger=ledger)
    release = first.release

    def killed(block, message):
        if block:
            raise KeyboardInterrupt
        release(block, message)

    first.release = killed
    exchange = first.exchange
    first.exchange = lambda message: order.append(("sent", ledger.ciphertexts)) or exchange(message)
    with pytest.raises(KeyboardInterrupt):
        first.go()
    # The ledger is kept before its message is sent, each time.
    assert [what for what, _ in order] == ["kept", "sent"] * (len(order) // 2)
    assert all(a[1] == b[1] for a, b in zip(order[::2], order[1::2], strict=True))
    spent = DistanceLedger(spent=ledger.spent, ciphertexts=ledger.ciphertexts)
    again = KeyHolder.from_bytes(HOLDER.to_bytes())
    second = Run(holder=again, ledger=spent).go(start=Checkpoint.from_bytes(first.saved[-1]))
    want = second.owner.kind.clear(STATES)
    assert set(second.states) == {1}
    np.testing.assert_allclose(second.states[1], want[:, 1], atol=1e-3)
    assert len(set(made)) == len(made) > 40
    assert spent.spent > ledger.spent


def test_damaged_checkpoints_and_foreign_ones_are_refused():
    run = Run()
    encrypted = HOLDER._keys.encrypt(np.zeros((D, 4096)))[:, :, :3]
    data = Checkpoint(1, 2.0**36, np.ascontiguousarray(encrypted), run.owner.layout.parameters).to_bytes()
    assert np.array_equal(Checkpoint.from_bytes(data).residues, encrypted)
    for bad in (data[:-1], data + b"0", bytes([data[0] ^ 1]) + data[1:], data[:100]):
        with pytest.raises(Lost, match="damaged"):
            Checkpoint.from_bytes(bad)
    other = Checkpoint(1, 2.0**36, encrypted[:2], run.owner.layout.parameters)
    with pytest.raises(InputError, match="another model"):
        run.owner.run(b"", run.exchange, run.release, other)


ALTERED = {
    "truncated": (lambda m: m[:-1], "altered|cut off"),
    "cut to nothing": (lambda m: m[:50], "cut off"),
    "trailing": (lambda m: m + b"0", "altered"),
    "altered": (lambda m: m[:5000] + bytes([m[5000] ^ 1]) + m[5001:], "altered"),
    "another session": (lambda m: m[:7] + bytes(16) + m[23:], "not open"),
}


@pytest.mark.parametrize("name", ALTERED)
def test_the_holder_refuses_before_it_decrypts(name, monkeypatch):
    change, reason = ALTERED[name]
    run = Run()
    monkeypatch.setattr(HOLDER._keys, "decrypt_polynomials", None)  # nothing may be computed
    run.owner.link = run.owner.keys.refresh = None
    message = run.owner._channel.pack(np.ones((1, 2, 3, 8192), np.int64), 2.0**36)
    with pytest.raises(ClientFault, match=reason):
        run.holder.refresh(change(message))
    with pytest.raises(ClientFault, match=reason):
        run.holder.decrypt_released(change(message), 1)


def test_the_holder_refuses_other_levels_counts_and_repetitions(monkeypatch):
    run = Run()
    one = np.ones((1, 2, 3, 8192), np.int64)
    with pytest.raises(ClientFault, match="4 primes came, 3 were expected"):
        run.holder.refresh(run.owner._channel.pack(np.ones((1, 2, 4, 8192), np.int64), 2.0**36))
    run = Run()
    message = run.owner._channel.pack(one, 2.0**36)
    run.holder.refresh(message)
    with pytest.raises(ClientFault, match="message 1 came, 2 was expected"):
        run.holder.refresh(message)
    zero = one.copy()
    zero[:, 1] = 0
    with pytest.raises(ClientFault, match="without a key"):
        run.holder.refresh(run.owner._channel.pack(zero, 2.0**36))
    run = Run()
    note = messages.NOTE.pack(0, 0, 8, 1.0)  # eight features are two ciphertexts
    with pytest.raises(ClientFault, match="expected 2"):
        run.holder.decrypt_released(run.owner._channel.pack(one[:, :, :1], 2.0**36, note=note), 1)
    run = Run()
    note = messages.NOTE.pack(9, 0, 4, 1.0)
    with pytest.raises(ClientFault, match="unknown kind"):
        run.holder.decrypt_released(run.owner._channel.pack(one[:, :, :1], 2.0**36, note=note), 1)


def test_the_owner_refuses_rows_before_it_computes(monkeypatch):
    monkeypatch.setattr("fedfm.encrypted.inference.model_owner.linear", None)  # nothing may be computed
    rows = {}
    for name in ("short", "whole", "scale", "level"):
        run = Run()
        channel = run.holder._current
        x = HOLDER._keys.encrypt(np.ones((2 if name == "short" else 3, 4096)))
        limbs = 3 if name == "level" else 4
        rows[name] = run, channel.pack(x[:, :, :limbs], 2.0 ** (30 if name == "scale" else 36))
    reasons = {"short": "2 ciphertexts came, 3 were", "scale": "of scale", "level": "3 primes came, 4 were"}
    for name, reason in reasons.items():
        run, message = rows[name]
        with pytest.raises(ClientFault, match=reason):
            run.owner.run(message, run.exchange, run.release)
    run, message = rows["whole"]
    for change, reason in ((lambda m: m[:-9], "altered"), (lambda m: m + b"0", "altered")):
        with pytest.raises(ClientFault, match=reason):
            run.owner.run(change(message), run.exchange, run.release)
    with pytest.raises(ClientFault, match=r"another session|another key"):
        Run().owner.run(message, run.exchange, run.release)  # rows of another session


def test_the_owner_refuses_an_answer_that_is_repeated():
    run = Run()

    def repeated(message):
        return run.answers[0] if run.answers else Run.exchange(run, message)

    run.exchange = repeated
    with pytest.raises(ClientFault, match="message 2 came, 3 was expected"):
        run.go()
    assert not run.states


def test_keys_are_checked():
    keys_for = lambda public, model=MODEL: ModelOwner(model, "class", public, bytes(16), bytes(32), DistanceLedger())  # noqa: E731
    for bad, reason in (
        (PUBLIC[:5], "cut off"),
        (b"0000" + PUBLIC[4:], "not keys"),
        (PUBLIC[:4] + b"\x09" + PUBLIC[5:], "other encryption parameters"),
        (PUBLIC[:-100], "not public keys"),
        (PUBLIC + b"0", "not public keys"),
        (PUBLIC[:4] + b"\x01" + PUBLIC[5:], "not public keys"),
    ):
        with pytest.raises(ClientFault, match=reason):
            keys_for(bad)
    with pytest.raises(ClientFault, match="the keys are for 4 tokens, but the model has 8"):
        keys_for(PUBLIC, random_model(1, 8, blocks=1)[0])


def test_another_key_shows_in_the_range():
    """Released states under another holder's key are numbers far beyond what the model can give."""
    run = Run()
    other = KeyHolder.new(TOKENS)
    other._channels = HOLDER._channels
    x = Ciphertexts(HOLDER._keys.encrypt(np.ones((D, 4096))).view(np.uint64), 2.0**36, run.owner.keys).at(3)
    with pytest.raises(OutOfRange, match=r"block 1 are up to .*or the keys are wrong"):
        other.decrypt_released(run.owner.release(0, x), SAMPLES)


def test_a_row_out_of_range_is_zeros():
    run = Run()
    x = np.ones((3, TOKENS, D))
    x[1] *= 1.5 * MODEL.ranges[0]
    encrypted = HOLDER._keys.encrypt(run.owner.layout.pack(x))
    message = run.owner.release(0, Ciphertexts(encrypted.view(np.uint64), 2.0**36, run.owner.keys).at(3))
    states = run.holder.decrypt_released(message, 3)
    assert not states[1].any()
    assert np.abs(states[[0, 2]]).min() > 0
    nothing = np.full((2, 1, 1), np.nan)
    with pytest.raises(OutOfRange, match="nan"):
        zero_out_of_range(nothing, 1.0, 0)
    assert not zero_out_of_range(nothing, 1.0, 1).any()  # a batch that overflowed later


def test_kinds_that_a_model_does_not_allow():
    with pytest.raises(InputError, match="square grid"):
        Released("grid", 8, 4)
    with pytest.raises(InputError, match="expected one of class, grid, tokens"):
        Released("all", 4, 4)
    with pytest.raises(InputError, match="projection belongs"):
        Released("tokens", 4, 4)
    with pytest.raises(InputError, match="begin one"):
        KeyHolder.new(TOKENS).rows(ROWS)
    first = Released("class", 4, 2, class_token=True)
    x = np.random.default_rng(0).normal(size=(2, 4, 2))
    np.testing.assert_array_equal(first.clear(x)[:, 0], x[:, 0])
