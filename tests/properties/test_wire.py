"""The wire: what goes in comes out, its size is known beforehand, and nothing malformed gets through or crashes."""

import dataclasses
import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm import codec, wire
from fedfm.conform import match
from fedfm.engines.flower import round_trip, serialised_nbytes
from fedfm.errors import ClientFault
from fedfm.federation import Update
from fedfm.params import Params

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    return torch.from_numpy(rng.integers(-50, 50, size=shape)).abs().to(dtype)


params = st.dictionaries(st.text(max_size=8), tensors(), max_size=4).map(Params)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
)
trees = st.recursive(
    st.one_of(scalars, tensors(), params),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)


def same(a, b):
    if isinstance(a, Params):
        return a.layout is b.layout and all(torch.equal(a[n], b[n]) for n in a)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@settings(max_examples=300, deadline=None)
@given(trees)
def test_round_trip_and_size(value):
    head, pieces = wire.encode(value)
    data = b"".join(pieces)
    assert wire.size(value) == (len(head), len(data))
    assert same(value, wire.decode(head, data))


@settings(max_examples=60, deadline=None)
@given(trees)
def test_flower_delivers_it_and_weighs_what_we_say(value):
    record = codec.to_record(codec.envelope(3, 1, value))
    assert serialised_nbytes(record) == codec.nbytes(codec.envelope(3, 1, value))
    assert same(value, codec.from_record(round_trip(record))["body"])


@pytest.mark.parametrize("n", [codec.CHUNK // 4 - 1, codec.CHUNK // 4 + 1, 3 * codec.CHUNK // 4 + 7])
def test_large_arrays_are_weighed_with_their_chunks(n):
    value = codec.envelope(1, 1, {"w": Params({"w": torch.randn(n)})})
    assert serialised_nbytes(codec.to_record(value)) == codec.nbytes(value)


def test_an_update_survives_the_wire():
    update = Update(Params({"w": torch.randn(5), "s": torch.tensor([3])}), 12, {"loss": 0.5})
    back = codec.from_record(round_trip(codec.to_record(update)), Update)
    assert same(back.delta, update.delta)
    assert (back.weight, back.metrics) == (12, {"loss": 0.5})


GOOD = Update(Params({"w": torch.ones(4, 3), "b": torch.zeros(3)}), 5.0)


def mutated(rng):
    """A valid update's message, damaged: the head as text, as a tree, or the data."""
    head, pieces = wire.encode(GOOD)
    data = bytearray(b"".join(pieces))
    kind = rng.randrange(5)
    if kind == 0:
        text = bytearray(head.encode())
        for _ in range(rng.randint(1, 4)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        return text.decode("latin-1"), bytes(data)
    if kind == 1:
        return head, bytes(data[: rng.randrange(len(data))])
    if kind == 2:
        return head, bytes(data) + rng.randbytes(rng.randint(1, 9))
    if kind == 3:  # NaN, infinity, huge numbers somewhere
        at = 4 * rng.randrange(len(data) // 4)
        data[at : at + 4] = rng.choice([b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\xff\xff"])
        return head, bytes(data)
    tree = json.loads(head)
    spot = tree["m"]
    key = rng.choice(list(spot))
    spot[key] = rng.choice(
        [
            None,
            True,
            "f",
            "i",
            "x",
            7,
            [],
            {},
            {"s": "text"},
            {"s": 5},
            {"m": {}},
            {"t": ["float32", [2**39, 2**39]]},
            {"t": ["float32", [-1]]},
            {"t": ["object", [1]]},
            {"p": [["w", "float32", [10**9]]]},
            {"p": [["w", "float32", [1]], ["w", "float32", [1]]]},
            {"p": [["w"]]},
            {"p": "w"},
            {"p": 3},
            [[[[[[[[]]]]]]]],
        ]
    )
    if rng.random() < 0.3:
        spot[rng.choice(["extra", "delta ", "Weight"])] = "f"
    return json.dumps(tree, separators=(",", ":")), bytes(data)


def valid(update):
    """What may pass: exactly the expected tensors, all finite, a sane weight."""
    match(update.delta, GOOD.delta.layout)
    return update.delta.is_finite() and 0 < update.weight <= 1e9


def test_ten_thousand_malformed_replies_are_refused_and_nothing_crashes():
    rng = random.Random(0)
    accepted = refused = 0
    for _ in range(12_000):
        head, data = mutated(rng)
        try:
            update = wire.decode(head, data, Update)
            match(update.delta, GOOD.delta.layout, "delta")
        except ClientFault as fault:
            refused += fault.code.startswith("E_")
        else:
            assert valid(update)  # some damage leaves a message that is simply another valid one
            accepted += 1
    assert refused > 8_000
    assert accepted + refused == 12_000


def test_a_bomb_is_refused_before_memory_is_taken():
    head = '{"m":{"delta":{"p":[["w","float32",[1000000,1000000]]]},"weight":"f","metrics":{"m":{}}}}'
    with pytest.raises(ClientFault, match="announced"):
        wire.decode(head, b"\0" * 100, Update)


@pytest.mark.parametrize("node", ['{{"t":["float32",{0}]}}', '{{"p":[["w","float32",{0}]]}}'])
@pytest.mark.parametrize("shape", [[0, (1 << 40) - 1, (1 << 40) - 1], [1 << 31, 1 << 31, 0]])
def test_a_shape_without_entries_that_no_tensor_has_is_refused(node, shape):
    with pytest.raises(ClientFault, match="E_FORMAT"):
        wire.decode(node.format(shape), b"")


def test_deep_nesting_is_refused():
    for depth in (40, 100_000):
        with pytest.raises(ClientFault):
            wire.decode("[" * depth + "]" * depth, b"")


@pytest.mark.parametrize(
    ("delta", "code"),
    [
        ({"w": torch.ones(4, 3)}, "E_TENSORS"),
        ({"w": torch.ones(4, 3), "b": torch.zeros(3), "c": torch.zeros(1)}, "E_TENSORS"),
        ({"b": torch.zeros(3), "w": torch.ones(4, 3)}, "E_TENSORS"),
        ({"w": torch.ones(5, 3), "b": torch.zeros(3)}, "E_SHAPE"),
        ({"w": torch.ones(3), "b": torch.zeros(3)}, "E_SHAPE"),
        ({"w": torch.ones(()), "b": torch.zeros(3)}, "E_SHAPE"),
        ({"w": torch.ones(4, 3).double(), "b": torch.zeros(3)}, "E_DTYPE"),
        ({"w": torch.ones(4, 3).to(torch.int8), "b": torch.zeros(3)}, "E_DTYPE"),
    ],
)
def test_what_differs_is_named(delta, code):
    with pytest.raises(ClientFault) as caught:
        match(Params(delta), GOOD.delta.layout)
    assert caught.value.code == code


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_absurd_weights_are_refused(weight):
    head, pieces = wire.encode({"delta": GOOD.delta, "weight": weight, "metrics": {}})
    with pytest.raises(ClientFault) as caught:
        wire.decode(head, b"".join(pieces), Update)
    assert caught.value.code in ("E_WEIGHT", "E_NONFINITE")


def test_other_values_of_flower_records_are_refused():
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    good = codec.to_record(GOOD)
    for record in (
        RecordDict(),
        RecordDict({"data": good["data"]}),
        RecordDict({"head": good["head"], "data": ArrayRecord({"packed": Array(np.ones(3))})}),
        RecordDict({"head": ConfigRecord({"json": 5}), "data": good["data"]}),
        RecordDict({"head": ConfigRecord({"json": "{}"}), "data": good["data"]}),
        None,
    ):
        with pytest.raises(ClientFault) as caught:
            codec.from_record(record, Update)
        assert caught.value.code == "E_FORMAT"


@dataclasses.dataclass(frozen=True)
class Many:
    a: int
    b: tuple[float, ...]
    c: dict[str, Params]
    d: str | None = None
    e: tuple[int, str] = (1, "x")


def test_annotations_are_enforced():
    value = Many(3, (0.5, 1.5), {"k": Params({"w": torch.ones(2)})})
    head, pieces = wire.encode(value)
    back = wire.decode(head, b"".join(pieces), Many)
    assert (back.a, back.b, back.d, back.e) == (3, (0.5, 1.5), None, (1, "x"))
    for wrong in (
        {"a": 3.0, "b": [1.0], "c": {}},
        {"a": True, "b": [1.0], "c": {}},
        {"a": 3, "b": ["x"], "c": {}},
        {"a": 3, "b": [1.0], "c": {"k": 1}},
        {"a": 3, "b": [1.0]},
        {"a": 3, "b": [1.0], "c": {}, "z": 1},
        {"a": 3, "b": [float("nan")], "c": {}},
        {"a": 3, "b": [1.0], "c": {}, "e": [1]},
        {"a": 3, "b": [1.0], "c": {}, "d": 4},
    ):
        head, pieces = wire.encode(wrong)
        with pytest.raises(ClientFault):
            wire.decode(head, b"".join(pieces), Many)


def test_what_cannot_travel_is_said():
    with pytest.raises(TypeError, match="cannot travel"):
        wire.encode(object())
    with pytest.raises(TypeError, match="text keys"):
        wire.encode({1: 2})
