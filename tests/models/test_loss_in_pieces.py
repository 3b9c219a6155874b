"""The training loss of a language model, a piece of the logits after the other."""

import pytest
import tiny_models
import torch
from test_next_token import rows_of
from tiny_models import load, prose
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fedfm.models.language import chunked_loss
from fedfm.models.preprocessing import IGNORE


def as_a_whole(model, batch):
    """The loss by all logits, and the gradients."""
    loss = functional.cross_entropy(*model.flat(model.logits(batch), batch), ignore_index=IGNORE)
    return loss, torch.autograd.grad(loss, list(model.live().values()))


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(chunked_loss, "PIECE", 64 * 3)  # three tokens of 64 in the vocabulary


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("starts", [False, True], ids=["texts", "answers"])
@pytest.mark.parametrize("adaptation", ["lora", "full"])  # full: GPT-2's head is its embedding
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_loss_and_gradients_are_those_of_all_logits(folder, family, adaptation, starts):
    model = load(folder(family), prose(), adaptation)
    if adaptation == "lora":
        with torch.no_grad():
            for p in model.live().values():
                p.normal_(std=0.3)  # LoRA's B starts at zero, and so would A's gradient
    batch = rows_of(starts).batch(range(4))
    expected, gradients = as_a_whole(model, batch)
    assert chunked_loss.mean_loss(model, batch) is not None
    loss = model.loss(batch) * 0.25  # a share, as of a part of a batch
    assert loss.item() == pytest.approx(0.25 * expected.item(), rel=1e-5)
    for got, want in zip(torch.autograd.grad(loss, list(model.live().values())), gradients, strict=True):
        torch.testing.assert_close(got, 0.25 * want, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("small_pieces")
def test_half_precision_rounds_the_same(folder):
    model = load(folder("llama"), prose(), "lora", dtype="bfloat16")
    batch = rows_of(False).batch(range(4))
    expected, gradients = as_a_whole(model, batch)
    loss = model.loss(batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    for got, want in zip(torch.autograd.grad(loss, list(model.live().values())), gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.02 * float(want.abs().max()))


@pytest.mark.usefixtures("small_pieces")
def test_a_model_that_changes_what_its_head_gives_takes_all_logits(tmp_path):
    """Gemma 2 bounds its logits by tanh; those of the head alone would be others."""
    import transformers as t

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = t.Gemma2Config(
        **shape, num_key_value_heads=1, head_dim=8, vocab_size=64, max_position_embeddings=40,
        final_logit_softcapping=0.5, pad_token_id=0, bos_token_id=4, eos_token_id=3,
    )  # fmt: skip
    torch.manual_seed(0)
    t.Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    tiny_models.save_tokenizer(tmp_path, "llama")
    model = load(tmp_path, prose(), "lora")
    assert model.last_layer is not None
    batch = rows_of(False).batch(range(4))
    expected, _ = as_a_whole(model, batch)
    for _ in range(2):
        assert model.loss(batch).item() == pytest.approx(expected.item(), rel=1e-5)
        assert chunked_loss.mean_loss(model, batch) is None


class Largest(TorchDispatchMode):
    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            self.most = max(self.most, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def test_no_tensor_of_a_step_has_more_numbers_than_a_piece(folder, monkeypatch):
    monkeypatch.setattr(chunked_loss, "PIECE", 64 * 14)
    model = load(folder("llama"), prose(), "lora")
    batch = rows_of(False).batch(range(4))
    with Largest() as seen:
        model.loss(batch).backward()
    others = max(4 * 14 * 24, *(p.numel() for p in model.module.parameters()))  # 24 is the width within a block
    assert seen.most <= max(64 * 14, others) < 4 * 14 * 64
