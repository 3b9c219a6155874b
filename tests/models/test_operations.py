"""Multiply-accumulates against hand-written sums, and against torch's own counter where it counts them."""

import pytest
import torch
from tiny_models import images, load, prose, vectors

from fedfm.core.rows import Rows
from fedfm.models.multiply_accumulates import Costs, Macs, per_sample, rounds_to
from fedfm.models.wrap import wrap


def one(model, table, n=1):
    return per_sample(model, model.prepare(table, range(n)))


def test_a_vit_by_hand():
    tokens, d, hidden = 16, 128, 256
    layer = 4 * tokens * d * d + 2 * tokens * d * hidden + 2 * tokens * tokens * d  # projections, mlp, attention
    body, head = tokens * (3 * 8 * 8) * d + 8 * layer, d * 3
    table = images(side=32)
    assert one(load("nano-vit", table, "full"), table) == Macs(body + head, 0)
    assert one(load("nano-vit", table, "head"), table) == Macs(head, body)  # features are computed once
    lora = tokens * 2 * 8 * 2 * (d + d)  # rank 2 on queries and values of 8 layers
    assert one(load("nano-vit", table, "lora"), table) == Macs(body + head + lora, 0)


def test_a_language_model_by_hand_at_the_median_length():
    table = prose()
    model = load("nano-gpt2", table, "full", weights="random", max_length=40)
    rows = model.prepare(table, range(4))
    n, d = sorted(len(t) for t in rows.tokens)[len(rows.tokens) // 2], 64
    layer = n * (d * 3 * d + d * d + 2 * d * 4 * d) + 2 * n * n * d
    assert per_sample(model, rows) == Macs(2 * layer + n * d * 257, 0)


def test_convolutions_as_torch_counts_them():
    from torch.utils.flop_counter import FlopCounterMode

    table = images(side=32)
    model = load("preact-resnet-small", table, "full", weights="random")
    rows = model.prepare(table, [0])
    with FlopCounterMode(display=False) as counter:
        model.logits(rows.batch([0]))
    assert per_sample(model, rows) == Macs(counter.get_total_flops() // 2, 0)


def test_heads_on_vectors_and_no_rows():
    table = vectors(d=4)
    model = load("features", table, "head")
    assert one(model, table) == Macs(4 * 3, 0)
    assert one(model, table, 0) is None


def test_tmac_by_hand():
    costs = Costs.of(Macs(100, 7), epochs=5, samples=[10, 20, 60])
    assert costs.macs_per_client_round == 5 * 20 * 100
    # T E m n MACs with T = 3, m = 2; the backbone once for a, b, c.
    cohorts = [("a", "b"), ("a", "c"), ("b", "c")]
    assert costs.tmac(cohorts) == 3 * 5 * 2 * 20 * 100 + 3 * 20 * 7
    assert costs.tmac([]) == 0


def test_rounds_to_a_target():
    line = [(0, 0.2), (1, None), (2, 0.6), (3, 0.7)]
    assert [rounds_to(t, line) for t in (0.1, 0.5, 0.65, 0.9)] == [0, 2, 3, None]
    assert rounds_to(0.5, [(1, float("nan"))]) is None


@pytest.mark.parametrize("adaptation", ["full", "head"])
def test_counting_leaves_the_model_as_it_was(adaptation):
    table = images(side=32)
    model = load("nano-vit", table, adaptation)
    before = model.params().sha256()
    one(model, table)
    assert model.params().sha256() == before
    assert not model.module.training


@pytest.mark.parametrize("shapes", [("baddbmm", (2, 3, 5), (2, 3, 4), (2, 4, 5)), ("addmm", (3, 5), (3, 4), (4, 5))])
def test_a_product_counts_alike_however_its_factors_are_given(shapes):
    """BLOOM gives them by name."""
    name, *sizes = shapes
    bias, a, b = (torch.ones(size) for size in sizes)
    words = ("batch1", "batch2") if name == "baddbmm" else ("mat1", "mat2")

    class Net(torch.nn.Module):
        def __init__(self, named):
            super().__init__()
            self.w, self.named = torch.nn.Parameter(torch.zeros(1)), named

        def forward(self, features):
            call = getattr(bias, name)
            return call(**dict(zip(words, (a, b), strict=True))) if self.named else call(a, b)

    found = [per_sample(wrap(Net(named), lambda m, b: None), Rows({"features": torch.zeros(1, 1)})) for named in (1, 0)]
    assert found == [Macs(a.numel() * b.shape[-1], 0)] * 2
