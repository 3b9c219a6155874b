"""Logits by packed computation against the module, row by row; which logits are cached, and which computed again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_packed import FAMILIES, make, rows_of, start_of

from fedfm.core.rows import Rows
from fedfm.models.model import Model
from fedfm.training import packed
from fedfm.training.packed import batch, predictor, prefix
from fedfm.training.packed.predictor import batches


def module_logits(model: Model, rows: Rows) -> torch.Tensor:
    """Logits by Hugging Face's forward pass, row by row, so without padding."""
    with torch.no_grad():
        return torch.cat([model.logits(rows.batch([i])) for i in range(len(rows))])


def load_model(family: str, **options: Any) -> Model:
    model = make(family, **options)
    model.load(start_of(model))
    return model


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of rows in each computed batch."""
    seen: list[int] = []
    logits = batch.Batch.logits
    monkeypatch.setattr(batch.Batch, "logits", lambda self: seen.append(len(self.shape.lengths)) or logits(self))
    return seen


@pytest.mark.each_value
@pytest.mark.parametrize("entries", [1 << 18, 32 * 60], ids=["one batch", "many"])
@pytest.mark.parametrize("options", [{}, {"layers": 1}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_the_module(
    family: str, options: dict[str, Any], entries: int, monkeypatch: pytest.MonkeyPatch, passes: list[int]
) -> None:
    monkeypatch.setattr(predictor, "_ENTRIES", entries)
    model = load_model(family, **options)
    rows = rows_of(family, 23, np.random.default_rng(0))
    found = model.predict(rows)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert (len(passes) > 3) == (entries < 1 << 18)
    assert sum(passes) == 23
    torch.testing.assert_close(found, module_logits(model, rows), atol=1e-5, rtol=1e-5)
    unlabelled = dataclasses.replace(rows, labels=None)
    torch.testing.assert_close(model.predict(unlabelled), found, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(prefix, "CAP", 0)
    packed._known.clear()
    torch.testing.assert_close(model.predict(rows), found, atol=1e-5, rtol=1e-5)


def test_logits_are_float32_with_every_kind_of_kernels() -> None:
    model, rows = load_model("bert"), rows_of("bert", 9, np.random.default_rng(1))
    exact = model.predict(rows)
    model.kernels = "fast_bf16"
    packed._known.clear()
    assert torch.equal(model.predict(rows), exact)


def test_logits_depend_only_on_rows_and_parameters() -> None:
    model, rng = load_model("bert"), np.random.default_rng(2)
    rows, others = rows_of("bert", 11, rng), rows_of("bert", 30, rng)
    first = model.predict(rows)
    model.predict(others)
    packed._known.clear()
    model.predict(others)
    assert torch.equal(model.predict(rows), first)


def test_rows_scored_before_are_not_computed_again(passes: list[int]) -> None:
    model, rng = load_model("bert"), np.random.default_rng(3)
    rows, others = rows_of("bert", 7, rng), rows_of("bert", 5, rng)
    first = model.predict(rows)
    model.predict(others)
    assert passes == [7, 5]
    first[:] = 0  # a caller may change its copy
    model.load(model.params())  # the same values
    again = model.predict(rows)
    assert passes == [7, 5]
    torch.testing.assert_close(again, module_logits(model, rows), atol=1e-5, rtol=1e-5)
    equal = rows.take(range(7))  # a new object: the predictor does not compare contents
    assert torch.equal(model.predict(equal), again)
    assert passes == [7, 5, 7]


@pytest.mark.parametrize("what", ["trained", "layer", "embedding", "pooler"])
def test_changed_parameters_are_scored_again(what: str) -> None:
    model, rows = load_model("bert"), rows_of("bert", 7, np.random.default_rng(4))
    before = model.predict(rows)
    for name, p in model.module.named_parameters():
        with torch.no_grad():
            if what == "trained" and "lora_B" in name:
                p.add_(0.1)
            elif what == "layer" and "query.base_layer.weight" in name:
                p.data += 0.3 * torch.randn(p.shape)  # a merge of adapters writes to p.data, too
            elif what == "embedding" and "word_embeddings" in name:
                p.add_(torch.randn(p.shape))
            elif what == "pooler" and "pooler.dense.weight" in name:
                p.mul_(2)
    after = model.predict(rows)
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(after, module_logits(model, rows), atol=1e-5, rtol=1e-5)


def test_cached_logits_live_as_long_as_their_rows() -> None:
    model, rng = load_model("vit"), np.random.default_rng(5)
    rows = [rows_of("vit", 3, rng) for _ in range(4)]
    for some in rows:
        model.predict(some)
    kept = packed._known[model][False].predictor._kept
    assert len(kept) == 4
    del some
    del rows[1:]
    assert len(kept) == 1


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"name": "head"}, {"name": "full"}], ids=str)
def test_unsupported_settings_use_the_modules_forward(options: dict[str, Any]) -> None:
    model, rows = make("bert", **options), rows_of("bert", 6, np.random.default_rng(6))
    assert packed.predict(model, rows) is None
    torch.testing.assert_close(model.predict(rows), module_logits(model, rows), atol=1e-5, rtol=1e-5)


def test_rows_of_another_kind_go_through_the_module() -> None:
    model, ids = load_model("bert"), torch.randint(1, 50, (6, 8))
    rows = Rows({"input_ids": ids, "token_type_ids": torch.ones_like(ids)}, labels=torch.arange(6) % 5)
    assert packed.predict(model, rows) is None
    torch.testing.assert_close(model.predict(rows), module_logits(model, rows), atol=1e-5, rtol=1e-5)
    assert model.predict(Rows()).shape == model.predict(Rows(tokens=())).shape == (0, 5)


@given(st.lists(st.integers(1, 40), max_size=50), st.integers(1, 100))
def test_every_row_is_in_one_batch(length: list[int], tokens: int) -> None:
    lengths = np.array(length, dtype=np.int64)
    found = list(batches(lengths, tokens))
    assert sorted(np.concatenate([np.array([], dtype=np.int64), *found]).tolist()) == list(range(len(length)))
    assert all(len(index) == 1 or lengths[index].sum() <= tokens for index in found)
    for one, other in itertools.pairwise(found):  # no fewer batches are possible in this order
        assert lengths[one].sum() + lengths[other[0]] > tokens
        assert lengths[one].max() <= lengths[other].min()
