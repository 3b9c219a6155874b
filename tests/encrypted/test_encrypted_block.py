"""A transformer block under encryption, with its refreshes as messages, against the same block in numpy."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from fedfm.encrypted.ckks.ciphertexts import Ciphertexts
from fedfm.encrypted.ckks.refresh import Masking, least_limbs
from fedfm.encrypted.ckks.remote_refresh import RemoteRefresh, answer_refresh, encrypt_message
from fedfm.encrypted.ckks.ring import Parameters
from fedfm.encrypted.ckks.transformer_block import EncryptedBlock, Packing
from fedfm.encrypted.ckks.wire import Channel
from fedfm.errors import ClientFault, InputError, RunError

pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')

from fedfm.encrypted.ckks import seal
from random_student import apply

PARAMETERS, BOUND = Parameters(), 32.0
LAYOUT = Packing(PARAMETERS, 4)
FLOOR = least_limbs(PARAMETERS, 10**4, BOUND)
CLIENT = seal.ClientKeys(PARAMETERS)
PUBLIC = CLIENT.public(LAYOUT.rotations)
D, M, HEADS, TOKENS = 4, 6, 2, 4


@dataclass
class Square:
    """a u^2 + c of u = x + b."""

    a: float
    b: float
    c: float
    fold: tuple[float, float] = (1.0, 0.0)

    def evaluate_folded(self, u):
        return (u + self.b).square() * self.a + self.c


@dataclass
class Steps:
    """A polynomial given by its recipe."""

    evaluate_folded: object
    fold: tuple[float, float]


def newton(u):
    """1 / sqrt(u) near 1: two steps from a line."""
    y = u * -0.5 + 1.5
    for _ in range(2):
        y = y * 1.5 + u * -0.5 * y * y.square()
    return y


def goldschmidt(u):
    minus = u * -1
    a, b = minus + 2.0, minus + 1.0
    for _ in range(3):
        b = b.square()
        a = a * (b + 1.0)
    return a


def squared(u, again=lambda u: u.square(), last=lambda u: u.square()):
    """((u^2 + 1/2)^2)^2, u = (x / 4 + 1) / sqrt 2: exp by T_2(x / 4)^4."""
    return last(again(again(u) + 0.5))


NORM, EXP = Steps(newton, (1.0, 0.0)), Steps(squared, (0.25 / math.sqrt(2), 1 / math.sqrt(2)))
INVERSE, GELU = Steps(goldschmidt, (1.0, 0.0)), Square(0.25, 1.0, 0.1, (0.9, 0.2))


def weights(seed=0):
    rng = np.random.default_rng(seed)
    shapes = dict.fromkeys(("query", "key", "value", "output"), (D, D)) | {"up": (M, D), "down": (D, M)}
    made = {name: rng.normal(0, 0.5, shape) for name, shape in shapes.items()}
    made |= {f"{name}_bias": rng.normal(0, 0.2, shape[0]) for name, shape in shapes.items()}
    made["output"], made["output_bias"] = 0.3 * made["output"], 0.3 * made["output_bias"]  # variances stay near one
    for name in ("output", "down", "output_bias", "down_bias"):
        made[name] = made[name] - made[name].mean(0)
    return made


def clear(x, w, centred=True, tokens=TOKENS):
    """The block by its definition, with softmax weights of polynomials: (samples, tokens, d) -> the same, scales."""

    def norm(v):
        return v * apply(NORM, (v**2).mean(-1, keepdims=True))

    def heads(v):
        return v.reshape(*v.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)

    y = norm(x)
    q, k, v = (heads(y @ w[name].T + w[f"{name}_bias"]) for name in ("query", "key", "value"))
    if centred:
        k = k - np.concatenate([k, k[:, :, : tokens - x.shape[1]]], 2).mean(axis=2, keepdims=True)  # over the places
    if "key_offset" in w:
        k = k + w["key_offset"].reshape(HEADS, 1, -1)
    e = apply(EXP, q @ k.transpose(0, 1, 3, 2) + w.get("score_shift", np.zeros(HEADS))[:, None, None])
    sums = e.sum(-1, keepdims=True)
    scales = 2 / (sums.min((0, 2, 3)) + sums.max((0, 2, 3)))
    c = scales[None, :, None, None]
    p = e * apply(INVERSE, sums * c) * c
    z = x + (p @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ w["output"].T + w["output_bias"]
    return z + apply(GELU, norm(z) @ w["up"].T + w["up_bias"]) @ w["down"].T + w["down_bias"], scales


def rows(samples=LAYOUT.samples, tokens=TOKENS):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(samples, tokens, D))
    x -= x.mean(-1, keepdims=True)
    return x / x.std(-1, keepdims=True) * rng.uniform(0.85, 1.15, (samples, tokens, 1))


class Session:
    """Client and server of one session, connected by bytes."""

    def __init__(self, bound=BOUND, layout=LAYOUT, public=PUBLIC):
        self.layout = layout
        self.here, self.there = (Channel(PARAMETERS, bytes(32), bytes(16), side) for side in ("client", "server"))
        self.server = seal.ServerKeys(PARAMETERS, public, floor=FLOOR)
        self.server.refresh = self.refresh = RemoteRefresh(Masking(bound), self.there, self.answer)

    def answer(self, message):
        return answer_refresh(CLIENT, self.here, message, FLOOR)

    def send(self, x):
        message = encrypt_message(CLIENT, self.here, self.layout.pack(x))
        residues, scale = self.there.unpack(message, limbs=PARAMETERS.limbs, count=D, scale=PARAMETERS.scale)
        return Ciphertexts(residues.view(np.uint64), scale, self.server)


def block(**changes):
    scales = np.array([0.13, 0.16])
    return replace(EncryptedBlock(LAYOUT, HEADS, weights(), (NORM, NORM), EXP, INVERSE, scales, GELU), **changes)


@pytest.mark.proof
@pytest.mark.parametrize("centred", [True, pytest.param(False, marks=pytest.mark.proof)])
def test_a_block_gives_what_it_gives_in_the_clear(centred):
    session, x = Session(), rows(700)
    want, scales = clear(x, weights(), centred)
    got = block(centred_keys=centred, inverse_scales=scales)(session.send(x))
    slots = CLIENT.decrypt(got.residues, got.scale)
    assert 0.5 < want.std() < 2
    np.testing.assert_allclose(LAYOUT.unpack(slots, 700), want, atol=1e-3)
    ledger = session.refresh.masking.ledger
    assert ledger.spent < 2.0**-40
    assert 40 < ledger.ciphertexts < 80
    assert session.refresh.bytes_up / session.refresh.bytes_down == pytest.approx(175 / 230, rel=0.01)


@pytest.mark.proof
@pytest.mark.parametrize("centred", [True, False])
def test_copies_of_tokens_fill_the_places_and_change_nothing(centred):
    """Three tokens in four places; the fourth is a copy of the first and has to weigh nothing."""
    layout = Packing(PARAMETERS, 3)
    session, x = Session(layout=layout), rows(700, 3)
    want, scales = clear(x, weights(), centred)
    got = block(layout=layout, centred_keys=centred, inverse_scales=scales)(session.send(x))
    slots = CLIENT.decrypt(got.residues, got.scale)
    np.testing.assert_allclose(layout.unpack(slots, 700), want, atol=1e-3)
    whole = Packing(PARAMETERS, 4).unpack(slots, 700)
    np.testing.assert_allclose(whole[:, 3], whole[:, 0], atol=1e-3)  # the copy stays one
    four = Session()
    block(inverse_scales=scales)(four.send(rows(700)))
    spent = [s.refresh.masking.ledger.ciphertexts for s in (session, four)]
    assert spent[0] == spent[1]  # the mask takes no refresh


@pytest.mark.proof
@pytest.mark.parametrize("centred", [True, False])
def test_scores_have_the_offsets_of_keys_and_the_shifts_of_heads(centred):
    w = weights() | {"key_offset": np.array([0.4, -0.3, 0.2, 0.5]), "score_shift": np.array([0.3, -0.2])}
    session, x = Session(), rows(700)
    want, scales = clear(x, w, centred)
    got = block(weights=w, centred_keys=centred, inverse_scales=scales)(session.send(x))
    slots = CLIENT.decrypt(got.residues, got.scale)
    np.testing.assert_allclose(LAYOUT.unpack(slots, 700), want, atol=1e-3)
    assert np.abs(want - clear(x, weights(), centred)[0]).max() > 0.01


@pytest.mark.proof
def test_the_tokens_of_a_vit_at_224_pixels():
    """197 tokens in 256 places, 16 samples in a ciphertext."""
    layout = Packing(PARAMETERS, 197)
    session, x = Session(layout=layout, public=CLIENT.public(layout.rotations)), rows(16, 197)
    want, scales = clear(x, weights(), tokens=256)
    got = block(layout=layout, inverse_scales=scales)(session.send(x))
    np.testing.assert_allclose(layout.unpack(CLIENT.decrypt(got.residues, got.scale), 16), want, atol=1e-3)


def test_any_number_of_tokens_has_places():
    layout = Packing(PARAMETERS, 197)
    assert (layout.places, layout.samples, layout.baby) == (256, 16, 16)
    x = np.random.default_rng(0).normal(size=(2, 197, 3))
    packed = layout.pack(x)
    assert np.array_equal(layout.unpack(packed, 2), x)
    assert packed[1, 197 * 16] == x[0, 0, 1]
    assert packed[1, 255 * 16 + 1] == x[1, 58, 1]
    assert layout.rotations == Packing(PARAMETERS, 256).rotations


def test_rows_are_packed_by_token_and_sample():
    x = rows(3)
    packed = LAYOUT.pack(x)
    assert packed.shape == (D, PARAMETERS.slots)
    assert packed[2, 3 * LAYOUT.samples + 1] == x[1, 3, 2]
    assert packed[2, 3 * LAYOUT.samples + 7] == x[0, 3, 2]  # missing samples
    assert np.array_equal(LAYOUT.unpack(packed, 3), x)
    assert Packing(PARAMETERS, 16).rotations == {256 * k for k in (1, 2, 3, 4, 8, 12, -4, -8, -12)}


def test_an_altered_answer_ends_the_block():
    session = Session()
    answer = session.answer

    def altered(message):
        data = bytearray(answer(message))
        data[5000] ^= 1
        return bytes(data)

    session.refresh._exchange = altered
    with pytest.raises(ClientFault, match="altered"):
        block()(session.send(rows(2)))


def test_a_run_beyond_its_distance_ends_before_it_sends():
    session = Session(bound=2.0**20)
    session.refresh.masking.ledger.spent = 2.0**-40
    with pytest.raises(RunError, match="statistical distance"):
        block()(session.send(rows(2)))
    assert session.refresh.bytes_down == 0


def test_wrong_shapes_are_refused():
    with pytest.raises(InputError, match="4097 tokens: expected 1 to 4096"):
        Packing(PARAMETERS, 4097)
    with pytest.raises(InputError, match="4096 places of tokens: a block needs two slots for each"):
        block(layout=Packing(PARAMETERS, 2049))
    with pytest.raises(InputError, match="up to 1024 samples of 4 tokens"):
        LAYOUT.pack(np.zeros((2, 5, D)))
    with pytest.raises(InputError, match="expected up of shape"):
        block(weights=weights() | {"up": np.zeros((M, D + 1))})
    with pytest.raises(InputError, match="heads"):
        block(heads=3)
    with pytest.raises(InputError, match="one per feature"):
        block()(Session().send(rows(1))[:2])
