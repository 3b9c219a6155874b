"""LoRA's linear maps as one product, beside PEFT's own forward and backward pass."""

import pytest
import torch
import torch.nn.functional as F

from fedfm.models.adapters.merged import merge
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec


def model_of(dropout=0.0):
    adaptation = AdaptationSpec("lora", rank=3, alpha=5, dropout=dropout)
    model = load_model(
        ModelSpec("nano-vit", weights="random", adaptation=adaptation), classes=["a", "b", "c"], kind="image"
    )
    draw = torch.Generator().manual_seed(0)
    model.load(model.params().map(lambda x: x + 0.1 * torch.randn(x.shape, generator=draw)))
    model.train_mode()
    return model


def outcome(model, x):
    """Logits of these pictures, and the gradients of the trained tensors."""
    torch.manual_seed(0)
    logits = model.module(x)
    logits = logits if isinstance(logits, torch.Tensor) else logits.logits
    live = model.live()
    return logits, dict(
        zip(live, torch.autograd.grad(F.cross_entropy(logits, torch.tensor([0, 2])), live.values()), strict=True)
    )


@pytest.mark.parametrize("only", [None, "lora_A", "lora_B"])
def test_output_and_gradients_are_pefts(only):
    model = model_of()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    for name, p in model.live().items():
        p.requires_grad_(only is None or only in name)
    expected, grads = outcome(model, x)
    with merge(model):
        found, mine = outcome(model, x)
    assert not torch.equal(found, expected)  # rounding shows that it is another computation
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert mine.keys() == grads.keys() != set()
    for name in grads:
        torch.testing.assert_close(mine[name], grads[name], rtol=1e-3, atol=1e-6, msg=name)
    assert torch.equal(outcome(model, x)[0], expected)


def test_active_dropout_is_left_to_peft():
    model = model_of(dropout=0.4)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    expected, grads = outcome(model, x)
    with merge(model):
        found, mine = outcome(model, x)
    assert torch.equal(found, expected)
    assert all(torch.equal(mine[n], grads[n]) for n in grads)
