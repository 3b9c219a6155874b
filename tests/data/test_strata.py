"""Largest remainders, held-out rows, thinned rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedfm.data.stratify import apportion, hold_out, quota, thin
from fedfm.seeds import generator

counts_ = st.lists(st.integers(0, 50), min_size=1, max_size=12)
groups_ = st.lists(st.integers(0, 5), min_size=1, max_size=80)


def test_quota_by_hand() -> None:
    # 10 rows for counts 5, 3, 1 of 9: 5.56, 3.33, 1.11 -> 5, 3, 1 and the one left to the remainder .56
    assert quota(np.array([5, 3, 1]), 10, generator(0)).tolist() == [6, 3, 1]
    assert quota(np.array([5, 3, 0]), 4, generator(0)).tolist() in ([2, 2, 0], [3, 1, 0])  # 2.5, 1.5: a tie
    assert quota(np.array([9, 1]), 10, generator(0), caps=np.array([4, 1])).tolist() == [4, 1]
    assert quota(np.array([0, 0]), 3, generator(0)).tolist() == [0, 0]


def test_ties_favour_nobody() -> None:
    won = sum(quota(np.ones(4, dtype=int), 1, generator(seed)) for seed in range(400))
    assert won.sum() == 400
    assert won.min() > 60


def test_apportion_by_hand() -> None:
    # 10 rows: 5.4, 3.3, 1.3 -> 5, 3, 1 and the one left to the remainder .4
    assert apportion(np.array([0.54, 0.33, 0.13]), 10, generator(0)).tolist() == [6, 3, 1]
    thirds = [apportion(np.full(3, 1 / 3), 1, generator(seed)).tolist() for seed in range(300)]
    assert min(np.sum(thirds, axis=0)) > 70  # equal remainders are drawn
    assert apportion(np.array([0.0, 1.0]), 7, generator(0)).tolist() == [0, 7]
    assert apportion(np.array([0.3, 0.7]), 0, generator(0)).tolist() == [0, 0]


@given(counts_, st.integers(0, 200), st.integers(0, 9))
def test_quota_is_within_one_of_the_proportion(counts: list[int], total: int, seed: int) -> None:
    c = np.array(counts)
    shares = quota(c, total, generator(seed))
    if c.sum() == 0:
        assert not shares.any()
        return
    assert shares.sum() == total
    assert (np.abs(shares - c * total / c.sum()) < 1).all()
    assert not shares[c == 0].any()


@given(groups_, st.floats(0.01, 0.99), st.integers(0, 9))
def test_hold_out_keeps_a_row_of_every_group(groups: list[int], fraction: float, seed: int) -> None:
    g, rows = np.array(groups), np.arange(len(groups)) * 3
    held = hold_out(g, rows, fraction, generator(seed))
    assert set(held) <= set(rows)
    assert len(set(held)) == len(held)
    assert sorted(held) == held.tolist()
    left = g[~np.isin(rows, held)]
    assert set(left) == set(groups)
    room = len(groups) - len(set(groups))
    assert len(held) == min(max(1, round(fraction * len(rows))), room) or len(rows) < 2


def test_hold_out_by_hand() -> None:
    groups = np.array([0] * 50 + [1] * 10)
    held = hold_out(groups, np.arange(60), 0.2, generator(0))
    assert np.bincount(groups[held]).tolist() == [10, 2]
    assert len(hold_out(groups, np.arange(60), 0.0, generator(0))) == 0
    assert hold_out(groups, np.arange(60), 0.2, generator(1)).tolist() != held.tolist()


@given(groups_, st.integers(1, 90), st.integers(0, 9))
def test_thin_keeps_exactly_the_limit_and_every_group(groups: list[int], limit: int, seed: int) -> None:
    g, rows = np.array(groups), np.arange(len(groups)) + 7
    kept = thin(g, rows, limit, generator(seed))
    assert len(kept) == min(limit, len(rows))
    assert len(set(kept)) == len(kept)
    if limit >= len(set(groups)):
        assert set(g[kept - 7]) == set(groups)


def test_thin_by_hand() -> None:
    groups = np.array([0] * 90 + [1] * 10 + [2])
    kept = thin(groups, np.arange(101), 20, generator(0))
    assert np.bincount(groups[kept]).tolist() == [17, 2, 1]  # 17.8, 2.0, 0.2: 18, 2, 0, and class 2 gets one of class 0
