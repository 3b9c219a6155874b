"""Output for other programs: strict JSON, and text that cannot control a terminal."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfm.core.text import to_json, visible


def strict(text):
    """Read a text as RFC 8259 requires: NaN and infinity are errors."""

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


def expected(value):
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: expected(v) for k, v in value.items()}
    return [expected(v) for v in value] if isinstance(value, list | tuple) else value


@given(VALUES, st.booleans())
def test_written_json_is_strict_and_has_the_same_value(value, ascii):
    assert strict(to_json(value, ascii=ascii)) == expected(value)


def test_scalars_of_numpy_and_torch_are_numbers():
    value = {"a": np.float32(0.5), "b": np.float64("inf"), "c": np.int64(3), "d": torch.tensor(math.nan), "e": [1.5]}
    assert strict(to_json(value)) == {"a": 0.5, "b": None, "c": 3, "d": None, "e": [1.5]}
    assert strict(to_json({"d": torch.tensor(math.nan)})) == {"d": None}
    with pytest.raises(TypeError, match="object cannot be written as JSON"):
        to_json({"x": object(), "y": math.nan})


def test_escapes_and_control_characters_are_shown_as_codes():
    assert visible("a\N{HANGUL FILLER}\N{BRAILLE PATTERN BLANK} b") == "a\\u3164\\u2800 b"
    assert visible("\x1b[2Jc1\r\n\u202e\x9b") == "\\u001b[2Jc1\\u000d\\u000a\\u202e\\u009b"
    assert visible("H\N{LATIN SMALL LETTER O WITH DIAERESIS}pital \N{CJK UNIFIED IDEOGRAPH-5317} 1") == (
        "H\N{LATIN SMALL LETTER O WITH DIAERESIS}pital \N{CJK UNIFIED IDEOGRAPH-5317} 1"
    )
