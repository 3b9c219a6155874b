"""LeViT keeps its biases of attention in evaluation mode: training and new weights must not meet old ones."""

import copy

import pytest
import torch
import transformers as t
from tiny_models import images, load
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from fedfm.models.first_batch import look
from fedfm.models.quiet import quiet

SIZES = {"image_size": 32, "hidden_sizes": [8, 8, 8], "depths": [1, 1, 1], "key_dim": [4, 4, 4], "num_labels": 3}


@pytest.fixture(scope="module")
def levit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("levit")
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = t.LevitForImageClassification(t.LevitConfig(**SIZES, num_attention_heads=[2, 2, 2])).train()
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.5)
        for _ in range(20):  # statistics of the batch norms
            module(pixel_values=torch.rand(16, 3, 32, 32) * 2 - 1)
        module.save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("adaptation", ["full", "top_layers"])
def test_steps_and_evaluations_in_turn_compute_with_the_newest_weights(levit, adaptation):
    table = images(6, side=32)
    model = load(levit, table, adaptation)
    rows = model.prepare(table, range(6))
    assert not look(model, rows)
    before = model.predict(rows)
    optimiser = torch.optim.SGD(model.live().values(), lr=0.5)
    for _ in range(3):
        model.train_mode()
        optimiser.zero_grad()
        model.loss(rows.batch(range(6))).backward()
        assert all(p.grad is not None for p in model.live().values())
        optimiser.step()
        with model.evaluating():  # as a method does between its batches
            model.logits(rows.batch(range(2)))
    model.eval_mode()
    fresh = copy.deepcopy(model)
    for m in fresh.module.modules():
        if hasattr(m, "attention_bias_cache"):
            m.attention_bias_cache = {}
    after = model.predict(rows)
    assert torch.equal(after, fresh.predict(rows))
    assert not torch.allclose(after, before, atol=1e-3)


def test_loaded_weights_are_those_that_predict(levit):
    table = images(6, side=32)
    model = load(levit, table, "full")
    rows, w = model.prepare(table, range(6)), model.params()
    before = model.predict(rows)
    (name,) = [n for n in w if n.endswith("stages.0.layers.0.module.attention_biases")]
    model.load(w.replace({name: w[name] + torch.randn(w[name].shape) * 5}))
    assert not torch.allclose(model.predict(rows), before, atol=1e-3)
    model.load(w)
    assert torch.equal(model.predict(rows), before)
