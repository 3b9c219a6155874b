"""What `make test` takes of many combinations."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tiers import cover


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_each_value_occurs_and_no_more_combinations_than_the_values_of_all_parameters(sizes):
    product = [dict(enumerate(c)) for c in itertools.product(*map(range, sizes))]
    chosen = cover(product)
    for parameter, size in enumerate(sizes):
        assert {product[i][parameter] for i in chosen} == set(range(size))
    assert len(chosen) == max(sizes)
