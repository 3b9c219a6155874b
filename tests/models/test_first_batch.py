"""The checks of a model before its first round."""

import dataclasses

import pytest
import torch
from tiny_models import images, load, table_for

from fedfm.errors import InputError
from fedfm.models import families, first_batch


@pytest.mark.parametrize("adaptation", ["head", "lora", "top_layers"])
@pytest.mark.parametrize("family", ["vit", "bert", "gpt2", "swin", "resnet"])
def test_models_that_train_as_described_give_no_notice(folder, family, adaptation):
    table = table_for(family)
    model = load(folder(family), table, adaptation)
    assert first_batch.look(model, model.prepare(table, range(5))) == []


def test_tensors_without_a_gradient_are_named(folder):
    table = images()
    model = load(folder("dinov2"), table, "full")
    (said,) = first_batch.look(model, model.prepare(table, range(3)))
    assert said.startswith(f"1 of {len(model.live())} trained tensors")
    assert "dinov2.embeddings.mask_token" in said


def test_experts_that_two_rows_do_not_choose_are_not_named():
    names = [f"layers.{b}.experts.{e}.up.weight" for b in (0, 1) for e in range(4)]
    blocks = tuple((f"layers.{b}", torch.nn.Identity()) for b in (0, 1))

    class Described:
        parts = families.Parts(None, blocks, None, None, "")

    assert first_batch._idle(Described, names, {names[1], names[6]}) == []
    assert first_batch._idle(Described, names, {names[1]}) == names[4:]


def test_last_blocks_that_are_not_the_last_to_run_are_refused(folder):
    table = images()
    model = load(folder("swin"), table, "top_layers")
    model.parts = dataclasses.replace(model.parts, blocks=model.parts.blocks[::-1])
    with pytest.raises(InputError, match="another order"):
        first_batch.look(model, model.prepare(table, range(3)))


def test_a_last_block_that_the_loss_does_not_use_is_refused(folder):
    table = images()
    model = load(folder("vit"), table, "top_layers")
    last = model.parts.blocks[-1][1]
    last.forward = lambda x, *_, **__: x
    with pytest.raises(InputError, match=r"no gradient reaches block vit\.layers\.2"):
        first_batch.look(model, model.prepare(table, range(3)))


def test_a_look_changes_nothing(folder):
    table = images()
    model = load(folder("resnet"), table, "full")
    model.train_mode()
    before, state = model.module.state_dict(), torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in before.items()}
    modes = [m.training for m in model.module.modules()]
    first_batch.look(model, model.prepare(table, range(5)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())
    assert all(p.grad is None for p in model.module.parameters())
    assert [m.training for m in model.module.modules()] == modes
