"""Targets whose dots may separate thousands get a notice, and decimal numbers do not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_files import loader

from fedfm.tasks._target_numbers import doubts, numbers


def separator_notices(cells):
    return [text for text in doubts([cells], [numbers(cells, "y", None)], ["y"]) if "thousands" in text]


@settings(deadline=None)
@given(st.lists(st.integers(1000, 999_999), min_size=3), st.lists(st.integers(0, 999), min_size=1))
def test_dots_between_thousands_are_doubted(large, small):
    """As German spreadsheets write whole numbers."""
    cells = [f"{n:,}".replace(",", ".") for n in (*large, *small)]
    assert len(separator_notices(cells)) == 1
    assert not separator_notices([*cells, "0.5"])
    assert not separator_notices([str(n) for n in (*large, *small)])


@settings(deadline=None)
@given(st.lists(st.floats(-900, 900), min_size=3, max_size=50))
def test_decimals_are_not_doubted(values):
    """As programs write them: with three decimals each, or as short as possible."""
    for cells in ([f"{v:.3f}" for v in values], [repr(v) for v in values], values):
        assert not separator_notices(cells)


@pytest.mark.parametrize(
    ("keys", "head"), [({"label": "y"}, "text,y,z"), ({"targets": ("z", "y")}, "text,y,z"), ({}, "text,label,z")]
)
def test_doubtful_targets_are_reported_however_they_are_named(keys, head, tmp_path):
    (tmp_path / "a.csv").write_text(
        f"{head}\n" + "".join(f"w{i},{v},{i}\n" for i, v in enumerate(["1.234", "987"] * 4))
    )
    table = loader("regression")(tmp_path / "a.csv", **keys)
    assert any("numbers such as 987 and 1.234" in text for text in table.notices)
