"""Tokens in one array against tuples of tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from fedfm.core.rows import Rows
from fedfm.core.tokens import Tokens

lists = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5), min_size=1, max_size=6)


@given(lists, st.data())
def test_tokens_equal_the_tensors_from_which_they_were_made(rows: list[list[int]], data: st.DataObject) -> None:
    plain, tokens = [torch.tensor(row) for row in rows], Tokens.of(rows)
    assert all(a.equal(b) and a.dtype == torch.int64 for a, b in zip(plain, tokens, strict=True))
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=8))
    part, chosen = tokens.take(index), [plain[i] for i in index]
    assert part.to_padded(9).equal(pad_sequence(chosen, batch_first=True, padding_value=9))
    assert part.concatenate().equal(torch.cat(chosen))
    assert [t.tolist() for t in part[1:]] == [t.tolist() for t in chosen[1:]]
    ends = data.draw(st.lists(st.integers(0, 5), min_size=len(index), max_size=len(index)))
    assert [t.tolist() for t in part.cut(ends)] == [t[:e].tolist() for t, e in zip(chosen, ends, strict=True)]


def test_chunks_of_lists_and_of_tensors_make_the_same() -> None:
    lists = [[[1, 2], [3]], [], [[4], [5, 6, 7]]]
    flat = [row for chunk in lists for row in chunk]
    for tokens in (Tokens.gather(lists), Tokens.of(map(torch.tensor, flat))):
        assert [t.tolist() for t in tokens] == flat
        assert tokens.flat.dtype == np.int32
    assert len(Tokens.gather([])) == 0


def test_parts_are_joined_as_their_rows_stand() -> None:
    parts = [Tokens.of([[1, 2], [3], [4]]).take([2, 0]), Tokens.of([]), Tokens.of([[5]])]
    together = Tokens.joining(parts)
    assert [t.tolist() for t in together] == [[4], [1, 2], [5]]
    assert together.flat.dtype == np.int32


def test_a_token_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"token 4294967296 does not fit into 32 bits"):
        Tokens.of([[1], [2**32]])


def test_a_part_of_the_rows_shares_their_array() -> None:
    rows = Rows(tokens=tuple(torch.arange(1, n) for n in (5, 9, 3)), pad=0)
    part = rows.take([2, 0])
    assert part.tokens is not None
    assert rows.tokens is not None
    assert part.tokens.flat is rows.tokens.flat
    batch = rows.batch([2, 0])
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert part.tokens.nbytes == 4 * 6 + 2 * 16
