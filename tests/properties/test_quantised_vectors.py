"""Coded vectors: the error is what is stated and within the bound, and nothing malformed is decoded."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.core.wire import payload
from fedfm.linalg.params import Params
from fedfm.linalg.quantised import BLOCK, CODES, STEPS, can_code, code, decode


@st.composite
def matrices(draw):
    shape = draw(st.lists(st.integers(0, 40), min_size=2, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    scale = 10.0 ** draw(st.integers(-20, 12))
    return torch.from_numpy(rng.normal(size=shape) * scale * 10.0 ** rng.integers(-3, 4, shape)).float()


@st.composite
def vectors(draw):
    tensors = dict(enumerate(draw(st.lists(matrices(), min_size=1, max_size=4))))
    found = {f"m{i}": tensor for i, tensor in tensors.items()}
    found["bias"] = torch.from_numpy(np.random.default_rng(1).normal(size=5)).float()
    found["count"] = torch.tensor(7)
    return Params(found)


def blocks(x: torch.Tensor) -> list[np.ndarray]:
    flat = x.reshape(-1).double().numpy()
    return [flat[at : at + BLOCK] for at in range(0, len(flat), BLOCK)]


@settings(deadline=None, max_examples=60)
@given(vectors(), st.sampled_from(sorted(CODES)), st.booleans())
def test_the_error_is_stated_and_within_its_bound(x: Params, name: str, near: bool) -> None:
    start = Params({key: t * 0.9 if t.is_floating_point() else t for key, t in x.items()}) if near else None
    sent = code(x, name, start)
    head, pieces = payload.encode(sent.values)
    back = decode(payload.decode(head, b"".join(pieces)), sent.relative, start)
    assert back.layout is x.layout
    assert torch.equal(back["bias"], x["bias"])
    assert back["count"] == 7
    errors = []
    coded = [key for key in x if key.startswith("m")]
    for key, flag in zip(coded, sent.relative, strict=True):
        base = start[key] if flag == "1" and start is not None else torch.zeros_like(x[key])
        differences = x[key] - base  # float32, as the sender takes them
        for true, got, d, b in zip(*map(blocks, (x[key], back[key], differences, base)), strict=True):
            missed = np.abs(true - got)
            errors.append(missed)
            rounded = 2.0**-22 * (np.abs(d).max() + np.abs(b).max())  # of the subtraction and the sum
            most = np.abs(d).max() / 254 if name == "int8" else np.abs(d) / 256
            assert (missed <= most * (1 + 1e-5) + rounded).all()
    errors = np.concatenate([np.zeros(0), *errors])
    assert sent.error.count == len(errors)
    assert sent.error.largest == pytest.approx(errors.max(initial=0.0), rel=1e-5)
    if len(errors):
        assert sent.error.rms == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-4)


@settings(deadline=None, max_examples=30)
@given(matrices())
def test_bfloat16_is_rounded_to_the_nearest_even(m: torch.Tensor) -> None:
    back = decode(code(Params({"m": m}), "bfloat16").values, "0")["m"]
    bits = m.numpy().view(np.uint32).astype(np.uint64)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16  # the usual integer trick, independent of torch
    assert np.array_equal(back.numpy().view(np.uint32), even.astype(np.uint32))


def test_int8_by_hand() -> None:
    m = torch.zeros(2, BLOCK)
    m[0, :4] = torch.tensor([127.0, 2.5, 3.5, -126.6])  # a step of 1: half to even
    m[1, :2] = torch.tensor([-254.0, 1.1])  # its own step of 2
    back = decode(code(Params({"m": m}), "int8").values, "0")["m"]
    assert back[0, :4].tolist() == [127.0, 2.0, 4.0, -127.0]
    assert back[1, :2].tolist() == [-254.0, 2.0]
    assert not back[:, 4:].any()


def test_values_that_both_sides_know_are_transported_exactly() -> None:
    w = Params({"m": torch.randn(30, 20)})
    for name in CODES:
        assert torch.equal(decode(*code(w, name, w)[:2], w)["m"], w["m"])


def test_the_bytes() -> None:
    w = Params({"m": torch.randn(64, 64), "bias": torch.randn(64)})
    assert code(w, "bfloat16").values.nbytes == 2 * 4096 + 4 * 64
    assert code(w, "int8").values.nbytes == 4096 + 4 * 4096 // BLOCK + 4 * 64


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", sorted(CODES))
def test_values_that_are_not_finite_stay_so(bad: float, name: str) -> None:
    m = torch.ones(4, 4)
    m[2, 2] = bad
    assert not decode(code(Params({"m": m}), name).values, "0").is_finite()


def test_a_malformed_vector_is_refused() -> None:
    w = Params({"m": torch.randn(30, 20)})
    values, relative, _ = code(w, "int8", w)
    m, steps = values["m"], values[STEPS]
    for broken, flags, why in (
        (values, "", "which of their tensors"),
        (values, "2", "which of their tensors"),
        (values, "11", "which of their tensors"),
        (Params({"m": m}), "0", "are not"),
        (Params({"m": m.float(), STEPS: steps}), "0", "are not"),
        (Params({"m": m.bfloat16(), STEPS: steps}), "0", "are not"),
        (Params({"m": m, "n": m.bfloat16(), STEPS: steps}), "00", "are not"),
        (Params({"m": m, STEPS: steps[1:]}), "0", "steps, expected 3"),
        (Params({"m": m, STEPS: steps.double()}), "0", "steps, expected 3"),
        (Params({"other": m, STEPS: steps}), "1", "that the receiver does not have"),
        (Params({"m": m.T.contiguous(), STEPS: steps}), "1", "that the receiver does not have"),
    ):
        with pytest.raises(ValueError, match=why):
            decode(broken, flags, w)
    assert relative == "1"


def test_vectors_that_are_not_coded() -> None:
    assert not can_code(Params({"bias": torch.ones(3)}).layout)
    assert not can_code(Params({"m": torch.ones(3, 3).double()}).layout)
    assert not can_code(Params({"m": torch.ones(3, 3), "q": torch.ones(3, 3).bfloat16()}).layout)
    with pytest.raises(ValueError, match="cannot code"):
        code(Params({"bias": torch.ones(3)}), "int8")
