"""Which combinations of parameters `make test` runs."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers import LONG, cover, mark


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_each_value_occurs_and_no_more_combinations_than_the_values_of_all_parameters(sizes):
    product = [dict(enumerate(c)) for c in itertools.product(*map(range, sizes))]
    chosen = cover(product)
    for parameter, size in enumerate(sizes):
        assert {product[i][parameter] for i in chosen} == set(range(size))
    assert len(chosen) == max(sizes)


@pytest.mark.parametrize("name", ["proof", "simulation", "deployment"])
def test_a_long_test_in_a_file_that_the_checks_do_not_read_is_refused(name, tmp_path):
    """As one whose mark another module has made."""
    assert f"'{LONG.pattern}'" in (Path(__file__).parents[2] / ".ci/run").read_text()
    item = SimpleNamespace(path=tmp_path / "test_it.py", get_closest_marker=lambda asked: asked == name)
    item.path.write_text("from elsewhere import long\n@long\ndef test(): ...\n")
    with pytest.raises(pytest.UsageError, match=r"test_it.py: .ci/run finds long tests"):
        mark([item])
    item.path.write_text(f"@pytest.mark.{name}\ndef test(): ...\n")
    mark([item])
