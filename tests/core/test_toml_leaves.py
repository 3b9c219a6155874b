"""The values of nested tables, by the keys that lead to them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fedfm.core.toml_text import leaves, put

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
