"""The wire: what goes in comes out, its size is known beforehand, and nothing malformed gets through or crashes."""

import dataclasses
import gc
import json
import time
import weakref

import fuzzing
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.core.checks import match
from fedfm.core.client import Update
from fedfm.core.wire import codec, envelope, limits, payload, reading
from fedfm.engines.flower.private_api import round_trip, serialised_nbytes
from fedfm.errors import ClientFault
from fedfm.linalg.params import Params

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
    head, pieces = payload.encode(value)
    data = b"".join(pieces)
    assert payload.size(value) == (len(head), len(data))
    assert same(value, payload.decode(head, data))


@settings(max_examples=60, deadline=None)
@given(trees)
def test_flower_delivers_a_message_with_the_predicted_size(value):
    record = codec.to_record(codec.envelope(3, 1, value))
    assert serialised_nbytes(record) == codec.weigh(value)
    assert same(value, codec.from_record(round_trip(record))["body"])


@pytest.mark.parametrize("n", [envelope.CHUNK // 4 - 1, envelope.CHUNK // 4 + 1, 3 * envelope.CHUNK // 4 + 7])
def test_large_arrays_are_weighed_with_their_chunks(n):
    value = {"w": Params({"w": torch.randn(n)})}
    assert serialised_nbytes(codec.to_record(codec.envelope(1, 1, value))) == codec.weigh(value)


def test_an_update_survives_the_wire():
    update = Update(Params({"w": torch.randn(5), "s": torch.tensor([3])}), 12, {"loss": 0.5})
    back = codec.from_record(round_trip(codec.to_record(update)), Update)
    assert same(back.delta, update.delta)
    assert (back.weight, back.metrics) == (12, {"loss": 0.5})


GOOD = Update(Params({"w": torch.ones(4, 3), "b": torch.zeros(3)}), 5.0)


@pytest.mark.sample("update", "handed", "scores", "request")
@pytest.mark.parametrize("name", fuzzing.kinds())
def test_damaged_messages_are_refused_or_valid_and_nothing_takes_long(name):
    """More of it: ``python tests/properties/fuzzing.py``."""
    found = fuzzing.fuzz(fuzzing.kinds()[name], 1500, seed=1)
    assert sum(found.refused.values()) > 1000
    assert found.accepted + sum(found.refused.values()) == 1500
    assert found.longest < 0.25  # 0.05 s on a machine that does nothing else


def test_a_bomb_is_refused_before_memory_is_taken():
    head = '{"m":{"delta":{"p":[["w","float32",[1000000,1000000]]]},"weight":"f","metrics":{"m":{}}}}'
    with pytest.raises(ClientFault, match="announced"):
        payload.decode(head, b"\0" * 100, Update)


@pytest.mark.parametrize("node", ['{{"t":["float32",{0}]}}', '{{"p":[["w","float32",{0}]]}}'])
@pytest.mark.parametrize("shape", [[0, (1 << 40) - 1, (1 << 40) - 1], [1 << 31, 1 << 31, 0]])
def test_a_shape_without_entries_that_no_tensor_has_is_refused(node, shape):
    with pytest.raises(ClientFault, match="E_FORMAT"):
        payload.decode(node.format(shape), b"")


@pytest.mark.parametrize("opens", ["[", '{"m":{"a":', '["]]]]]]",', '["\\\\","\\"]",', '[{"s":"\\\\\\""},'])
@pytest.mark.parametrize("depth", [40, 20_000])
def test_deep_nesting_is_refused_before_anything_is_built(monkeypatch, opens, depth):
    """Brackets, quotes and backslashes within texts count for nothing."""
    head = opens * depth
    monkeypatch.setattr(reading.json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(ClientFault, match="nested deeper"):
        payload.decode(head, b"")


def test_texts_may_hold_what_would_be_structure():
    for text in ("[" * 100, '"[' * 50, "\\" * 41 + "[" * 40, '{"a":1,' * 3_000, "\u00e9\U0001f600\ud800,:" * 9):
        value = {"a": text, text: [text] * 20, "b": dict.fromkeys("cdefghijkl", text)}
        head, pieces = payload.encode(value)
        assert payload.decode(head, b"".join(pieces)) == value


@pytest.mark.parametrize(
    "head",
    [
        '{"m":{"a":"f","a":"i"}}',
        '{"m":{"a":"f"},"m":{"b":"f"}}',
        '{"m":{"a":[{"s":"x","s":"y"}],"b":"f"}}',
        '{"m":{"a":{"m":{}},"a":"f"}}',
        '{"m":{"\\u0061":"f","a":"f"}}',
        '{"t":["float32",[2]],"t":["float32",[4]]}',
        '{"m":{' + '"x":"f",' * 12 + '"y":"f"}}',
    ],
)
def test_a_key_that_occurs_twice_is_refused(head):
    """Two readers of one message could take it for two."""
    for size in (8, 16, 8 * 13):
        with pytest.raises(ClientFault, match="E_FORMAT"):
            payload.decode(head, bytes(size))
    with pytest.raises(ClientFault, match="a key occurs twice"):
        reading.reader(head, False)


def _metrics(count):
    names = ",".join(f'"m{i}":"f"' for i in range(count))
    return f'{{"m":{{"delta":{{"p":[["w","float32",[1]]]}},"weight":"f","metrics":{{"m":{{{names}}}}}}}}}'


WIDE = {
    "200,000 metrics": _metrics(200_000),
    "70,000 metrics": _metrics(70_000),
    "34,000 metrics": _metrics(34_000),
    "34,000 texts": f"[{','.join([json.dumps({'s': 'text'})] * 34_000)}]",
    "9,000 empty objects": f"[{','.join(['{}'] * 9_000)}]",
    "40,000 empty lists": f"[{','.join(['[]'] * 40_000)}]",
    "70,000 empty lists": f"[{','.join(['[]'] * 70_000)}]",
    "10,000 empty parameters": f"[{','.join([json.dumps({'p': []})] * 10_000)}]",
    "a head of 3 MB": '{"s":"' + "x" * 3_000_000 + '"}',
    "a long shape": f'{{"t":["float32",[{",".join(["1"] * 70_000)}]]}}',
}


@pytest.mark.parametrize("name", WIDE)
def test_too_many_entries_are_refused_before_they_are_built(monkeypatch, name):
    head = WIDE[name]
    monkeypatch.setattr(reading.json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    begun = time.thread_time()
    with pytest.raises(ClientFault, match="E_SIZE"):
        payload.decode(head, b"", Update)
    assert time.thread_time() - begun < 0.25


@pytest.mark.parametrize(
    "head",
    [
        f"[{','.join(['[]'] * 5000)}]",
        f"[{','.join(['null', chr(34) + 'f' + chr(34)] * 3000)}]",
        f"[{','.join([json.dumps({'t': ['float32', [0]]})] * 1100)}]",
        f"[{','.join([json.dumps({'p': []})] * 1100)}]",
        f'{{"p":[{",".join(json.dumps([str(i), "int8", []]) for i in range(17_000))}]}}',
    ],
)
def test_objects_built_one_by_one_are_limited_except_in_our_own_files(head):
    with pytest.raises(ClientFault, match="E_SIZE"):
        payload.decode(head, bytes(24_000))
    assert reading.reader(head, True)


def test_a_fraction_is_refused_where_it_stands():
    with pytest.raises(ClientFault, match=r"E_FORMAT: the head is not JSON: the number 0.1 is not whole"):
        payload.decode(f"[0.1,{','.join(['1.5'] * 60_000)}]", b"")


@pytest.mark.proof
def test_messages_within_the_limits_are_decoded_in_time():
    """The largest heads that pass: numbers, texts, tensors. 50 ms on a machine that does nothing else."""
    w = Params({f"{'block.' * 8}{i}": torch.zeros(1, 1) for i in range(limits.MAX_TENSORS)})
    classes = [f"class {i}, of many" for i in range(21_841)]
    for value in (w, list(range(60_000)), dict.fromkeys(map(str, range(32_000)), 0.5), classes):
        head, pieces = payload.encode(value)
        data, taken = b"".join(pieces), []
        for _ in range(3):
            gc.collect()
            gc.freeze()
            begun = time.thread_time()
            back = payload.decode(head, data)
            taken.append(time.thread_time() - begun)
        assert same(value, back)
        assert min(taken) < 0.25


def test_a_strangers_layouts_are_not_remembered():
    """Each of another shape, they would fill the memory."""
    kept = []
    for i in range(40):
        head, pieces = payload.encode({"w": Params({f"{'n' * 70}{j}": torch.zeros(1) for j in range(900)})})
        value = payload.decode(head.replace("n" * 70, f"{'n' * 66}{i:04}"), b"".join(pieces))
        kept.append(weakref.ref(value["w"].layout))
    del value
    gc.collect()
    assert sum(ref() is not None for ref in kept) == 0


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
def test_differences_of_payloads_are_named(delta, code):
    with pytest.raises(ClientFault) as caught:
        match(Params(delta), GOOD.delta.layout)
    assert caught.value.code == code


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_absurd_weights_are_refused(weight):
    head, pieces = payload.encode({"delta": GOOD.delta, "weight": weight, "metrics": {}})
    with pytest.raises(ClientFault) as caught:
        payload.decode(head, b"".join(pieces), Update)
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
    head, pieces = payload.encode(value)
    back = payload.decode(head, b"".join(pieces), Many)
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
        head, pieces = payload.encode(wrong)
        with pytest.raises(ClientFault):
            payload.decode(head, b"".join(pieces), Many)


def test_values_that_cannot_be_sent_are_reported():
    with pytest.raises(TypeError, match="cannot be sent"):
        payload.encode(object())
    with pytest.raises(TypeError, match="text keys"):
        payload.encode({1: 2})
