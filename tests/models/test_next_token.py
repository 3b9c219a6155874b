"""Losses of language models without the logits of tokens that do not count."""

import pytest
import torch
from tiny_models import load, prose
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fedfm.core.rows import Rows
from fedfm.models.language import next_token
from fedfm.models.load import load_model
from fedfm.models.preprocessing import IGNORE
from fedfm.models.spec import AdaptationSpec, ModelSpec


def rows_of(starts: bool) -> Rows:
    torch.manual_seed(0)
    tokens = tuple(torch.randint(5, 30, (n,)) for n in (9, 3, 14, 6))
    return Rows({"answer_start": torch.tensor([4, 2, 11, 5])} if starts else {}, tokens=tokens, pad=0)


@pytest.mark.parametrize("starts", [False, True], ids=["texts", "answers"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_loss_and_gradient_are_those_of_all_logits(folder, monkeypatch, family, starts):
    model = load(folder(family), prose(), "lora")
    with torch.no_grad():
        for p in model.live().values():
            p.normal_(std=0.3)  # LoRA's B starts at zero, and so would A's gradient
    batch, live = rows_of(starts).batch(range(4)), list(model.live().values())
    logits = model.logits(batch)
    expected = functional.cross_entropy(*model.flat(logits, batch), ignore_index=IGNORE)
    gradient = torch.autograd.grad(expected, live)
    monkeypatch.setattr(next_token, "FEW", 0)
    loss = model.loss(batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for got, want in zip(torch.autograd.grad(loss, live), gradient, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    found, targets = next_token.logits_and_targets(model, batch)
    assert len(found) == len(targets) == model.count_targets(batch)


class Largest(TorchDispatchMode):
    """The most numbers of a tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, x.numel())
        return out


def test_a_wide_vocabulary_is_scored_in_pieces():
    options = {"vocab_size": 20_000, "n_embd": 8, "n_layer": 1, "n_head": 1}
    spec = ModelSpec("nano-gpt2", weights="random", options=options, adaptation=AdaptationSpec("lora", rank=2))
    model = load_model(spec, classes=(), kind="passages")
    torch.manual_seed(0)
    rows = Rows(tokens=tuple(torch.randint(1, 20_000, (64,)) for _ in range(64)), pad=0)
    with Largest() as seen:
        scores = model.evaluate(rows)
    assert seen.most <= next_token.MOST < 64 * 64 * 20_000
    with torch.no_grad():
        each = [functional.cross_entropy(*model.flat(model.logits(b), b)).item() for b in rows.batches(8)]
    assert scores["loss"] == pytest.approx(sum(each) / 8, rel=1e-5)
    assert scores["tokens"] == 64 * 63
