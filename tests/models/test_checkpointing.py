"""Gradient checkpointing computes each block twice, and changes only the memory that a run needs."""

import pytest
import torch
from tiny_models import images, load, sentences, table_for

from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.models.export import merge
from fedfm.training import SGD, loop, private
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client


def train(model, table):
    rows = model.prepare(table, range(4))
    client = Client("a", ClientData(lambda: rows, Rows, Rows), model, {}, 5, trainer=train_client)
    passes = []
    block = model.parts.blocks[1][1]
    first = next(m for m in block.modules() if type(m).__name__ in ("Linear", "Conv1D"))
    hook = first.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    (w,) = loop.train([Job(client, model.params(), SGD(learning_rate=0.3, batch_size=4))])
    hook.remove()
    return w, len(passes)


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["vit", "bert", "distilbert", "gpt2", "llama"])
@pytest.mark.parametrize("adaptation", ["lora", "full"])
def test_blocks_are_computed_twice_with_the_same_result(folder, family, adaptation):
    table = table_for(family)
    plain, once = train(load(folder(family), table, adaptation), table)
    model = load(folder(family), table, adaptation, gradient_checkpointing=True)
    again, twice = train(model, table)
    assert (once, twice) == (1, 2)
    assert (again - plain).norm() <= 1e-6 * (plain - load(folder(family), table, adaptation).params()).norm()
    assert not any("forward" in vars(m) for m in model.module.modules())  # a copy would call the original


def test_an_export_after_training_has_the_trained_weights(folder):
    table = images()
    model = load(folder("vit"), table, "lora", gradient_checkpointing=True)
    w, _ = train(model, table)
    model.load(w)
    rows = model.prepare(table, range(4))
    whole = merge(model, w)
    with torch.no_grad():
        torch.testing.assert_close(
            whole(rows.tensors["pixel_values"]).logits, model.predict(rows), atol=1e-5, rtol=1e-5
        )


def test_gradient_checkpointing_without_effect_is_refused(folder):
    with pytest.raises(InputError, match="no gradient passes the blocks"):
        load(folder("vit"), images(), "head", gradient_checkpointing=True)
    model = load(folder("bert"), sentences(), "lora", gradient_checkpointing=True)
    with pytest.raises(InputError, match="drop gradient_checkpointing"):
        private.fits(model)


def test_attention_by_name(folder):
    found = [load(folder("vit"), images(), "lora", attention=a) for a in ("eager", "sdpa")]
    assert [m.module.config._attn_implementation for m in found] == ["eager", "sdpa"]
    rows = found[0].prepare(images(), range(4))
    torch.testing.assert_close(found[0].predict(rows), found[1].predict(rows), atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match=r"model\.attention"):
        load(folder("vit"), images(), "lora", attention="flash_attention_2")
