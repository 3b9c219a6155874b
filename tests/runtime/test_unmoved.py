"""Tensors that a whole run leaves as they were are named at its end."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import fedfm
from small import pictures, tiny_vit

LOCAL = {"learning_rate": 0.3, "batch_size": 16}


class Sum(nn.Module):
    """Two maps, of which the second counts by a factor."""

    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.factor = nn.Linear(4, 3), nn.Linear(4, 3), factor

    def forward(self, x):
        return self.first(x) + self.factor * self.second(x)


def warnings(factor, rounds=2):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    result = fedfm.federate(
        Sum(factor),
        train=TensorDataset(x, (x[:, 0] > 0).long()),
        partition={"clients": 3},
        loss=cross_entropy,
        rounds=rounds,
        local=LOCAL,
        run={"workers": 1},
        progress=fedfm.Progress(),
    )
    return [text for text in result["warnings"] if "trained tensors did not change" in text]


@pytest.mark.parametrize("factor", [0, 1])
def test_a_gradient_of_zero_in_every_step_is_reported(factor, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = warnings(factor)
    assert len(found) == (factor == 0)
    assert all(text.startswith("2 of 4 trained tensors") and "second.weight, second.bias" in text for text in found)


@pytest.mark.parametrize(("batch_size", "rounds", "told"), [(1000, 1, True), (1000, 2, False), (8, 1, False)])
def test_factors_of_lora_behind_a_zero_are_reported_with_the_reason(batch_size, rounds, told, tmp_path):
    """B is zero at the start, so the gradient of A = (dL/dW) B^T is zero until B has changed."""
    tables = {
        "data": {"path": str(pictures(tmp_path)), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": str(tiny_vit(tmp_path)), "adaptation": {"name": "lora", "rank": 2}},
        "method": {"name": "fedavg", "rounds": rounds, "local": LOCAL | {"batch_size": batch_size}},
        "run": {"workers": 1},
    }
    result = fedfm.run(tables, tmp_path / "run", progress=fedfm.Progress())
    found = [text for text in result["warnings"] if "trained tensors did not change" in text]
    assert any(text.startswith("2 of 6") for text in found) == told  # both factors A
    assert all("lora_A" in text and "whose partner starts at zero" in text for text in found)
    assert not any("no gradient" in text or "lora_B" in text for text in found)
