"""LoRA is merged into weights only where the layers then compute the same."""

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from fedfm.errors import InputError
from fedfm.models.merging import merge


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
