"""LoRA is merged into weights only where the layers then compute the same."""

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from fedfm.errors import InputError
from fedfm.models.merging import merge

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


class Standardised(nn.Linear):
    """Computes with its weight over its standard deviation."""

    def forward(self, x):
        return F.linear(x, self.weight / self.weight.std(), self.bias)


def adapted(layer):
    """A PeftModel of this layer, whose adapter is not zero."""
    torch.manual_seed(0)
    module = get_peft_model(nn.Sequential(layer), LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    return module.eval()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(6, 4), (3, 6)), (nn.Conv2d(3, 4, 3, stride=2), (2, 3, 9, 9))],
    ids=["map", "picture"],
)
def test_a_merged_layer_computes_the_same(layer, shape):
    module, x = adapted(layer), torch.randn(shape)
    expected = module(x)
    torch.testing.assert_close(merge(module)(x), expected, atol=1e-5, rtol=1e-4)


def test_a_layer_that_changes_its_weights_is_refused():
    with pytest.raises(InputError, match=r"LoRA cannot be merged into 0, since a Standardised .* use peft"):
        merge(adapted(Standardised(6, 4)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "layer", [nn.Linear(6, 4), nn.Conv2d(3, 4, 3), nn.Embedding(5, 4)], ids=["map", "picture", "words"]
)
def test_a_small_change_of_a_weight_of_16_bits_stays(layer, dtype):
    module = adapted(layer.to(dtype))
    of = module.base_model.model[0]
    before = of.base_layer.weight.detach().clone()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.data = 0.01 * parameter.float()
    change = of.get_delta_weight("default").float()
    found = merge(module)[0].weight - before.float()
    torch.testing.assert_close(found, change, rtol=0.01, atol=1e-7)


def decoder(**settings):
    """A tiny causal model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    module = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, **settings))
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(10)
    return module


def encoder_decoder(kind):
    """A tiny encoder-decoder, whose embeddings and output map share a weight."""
    from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 20, "d_model": 8, "pad_token_id": 0, "decoder_start_token_id": 0}
    if kind == "t5":
        return T5ForConditionalGeneration(T5Config(**sizes, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    return BartForConditionalGeneration(BartConfig(**sizes, **heads, encoder_ffn_dim=8, decoder_ffn_dim=8))


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_merged_end_leaves_the_other_end_as_it_was(target, tied):
    config = LoraConfig(r=2, target_modules=["q_proj", target], init_lora_weights=False)
    module, x = get_peft_model(decoder(tie_word_embeddings=tied), config).eval(), torch.arange(10)[None]
    expected = module(x).logits
    found = merge(module)
    torch.testing.assert_close(found(x).logits, expected, atol=1e-4, rtol=1e-4)
    assert not found.config.tie_word_embeddings  # so that a folder keeps both


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (lambda: encoder_decoder("t5"), {"target_modules": ["q", "embed_tokens"]}),
        (lambda: encoder_decoder("t5"), {"target_modules": ["q", "shared"]}),
        (lambda: encoder_decoder("bart"), {"target_modules": ["q_proj", "embed_tokens"]}),
        (decoder, {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 2]]}),
    ],
    ids=["t5", "t5-shared", "bart", "repeated-blocks"],
)
def test_an_adapted_weight_that_another_module_has_too_is_refused(make, config):
    module = get_peft_model(make(), LoraConfig(r=2, init_lora_weights=False, **config))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(InputError, match=r"LoRA adapts .*, and .* has the same weight: .* use peft"):
        merge(module)
    assert all(tensor.equal(before[name]) for name, tensor in module.state_dict().items())


def test_an_adapter_outside_the_weights_is_refused():
    from peft import PromptTuningConfig

    module = get_peft_model(decoder(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(InputError, match=r"an adapter of type PROMPT_TUNING is part of no weight.* use peft"):
        merge(module)
