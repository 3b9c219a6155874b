"""The values of nested tables by the keys that lead to them, and tables as the text of TOML."""

from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.core.toml_text import leaves, put, to_key, to_toml

KEYS = st.text("ab_", min_size=1, max_size=3)  # no dots: put splits a key at them
VALUES = st.one_of(st.booleans(), st.integers(-9, 9), st.text("xy.", max_size=3), st.lists(st.integers(0, 9)))
TABLES = st.recursive(
    st.dictionaries(KEYS, VALUES, min_size=1, max_size=3),
    lambda inner: st.dictionaries(KEYS, st.one_of(VALUES, inner), min_size=1, max_size=3),
    max_leaves=6,
)


@given(TABLES)
def test_putting_the_leaves_makes_the_same_tables(tables: dict[str, Any]) -> None:
    made: dict[str, Any] = {}
    for keys, value in leaves(tables):
        put(made, ".".join(keys), value)
    assert made == tables


def test_a_name_with_a_dot_is_one_key() -> None:
    assert list(leaves({"budgets": {"clinic.north": {"rows": 1}}, "rate": None})) == [
        (("budgets", "clinic.north", "rows"), 1),
        (("rate",), None),
    ]


# Names of clients, classes and columns: also rare Chinese characters, emoji and control codes.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.sampled_from(
    ["\x7f", "\U00020bb7", "=\n[x]"]
)
ANY = TEXTS | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.floats(allow_nan=False)
DEEP = st.recursive(
    ANY, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)


@settings(max_examples=200)
@given(st.dictionaries(TEXTS, DEEP, max_size=4), TEXTS)
def test_tables_are_the_same_after_writing_and_reading(tables: dict[str, Any], key: str) -> None:
    assert tomllib.loads(to_toml(tables)) == tables
    assert tomllib.loads(f"{to_key(key)} = 1") == {key: 1}
