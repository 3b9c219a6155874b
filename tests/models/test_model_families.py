"""The properties that every family of models must have."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import IMAGE, OTHER_IMAGE, OTHER_TEXT, TEXT, load, table_for

from fedfm.errors import InputError
from fedfm.models.families import FAMILIES, default_targets, find, unwrap
from fedfm.models.layers import layers
from fedfm.models.spec import AdaptationSpec

EVERY = (*IMAGE, *TEXT)
LORA = tuple(f for f in EVERY if f != "mobilenet_v2")
BLOCKS = {"resnet": 2, "mobilenet_v2": 16}


@pytest.mark.parametrize("family", EVERY)
def test_the_head_on_features_gives_the_logits_of_the_complete_model(folder, family):
    table = table_for(family)
    model = load(folder(family), table, "head")
    rows = model.prepare(table, range(5))
    encoded = model.encode(rows)
    assert encoded.tensors["features"].shape == (5, model.head.in_features)
    assert encoded.labels.tolist() == [0, 1, 2, 0, 1]
    torch.testing.assert_close(model.predict(encoded), model.predict(rows), rtol=1e-4, atol=1e-5)
    assert set(model.live()) == set(model.names)
    assert all("weight" in n or "bias" in n for n in model.names)
    assert len(model.names) == (1 if family in ("gpt2", "llama") else 2)


@pytest.mark.parametrize("family", EVERY)
def test_loss_is_the_mean_cross_entropy_and_reaches_every_trainable_tensor(folder, family):
    table = table_for(family)
    model = load(folder(family), table, "lora" if family in LORA else "top_layers")
    batch = model.prepare(table, range(5)).batch(range(5))
    model.train_mode()
    loss = model.loss(batch)
    naive = -torch.stack([F.log_softmax(z, -1)[y] for z, y in zip(model.logits(batch), batch["labels"], strict=True)])
    assert loss.item() == pytest.approx(naive.mean().item(), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in model.live().values())
    assert all(p.grad is None for n, p in model.module.named_parameters() if n not in model.names)


@pytest.mark.parametrize("family", EVERY)
def test_blocks_are_the_states_from_the_embedding_to_the_last_layer(folder, family):
    table = table_for(family, 3)
    model = load(folder(family), table, "head")
    outputs = model.blocks(model.prepare(table, range(3)))
    assert len(outputs) == 1 + BLOCKS.get(family, 3)
    assert all(b.dim() == 3 and len(b) == 3 for b in outputs)
    if family not in BLOCKS:
        assert len({b.shape for b in outputs}) == 1
        assert outputs[0].shape[-1] == 16


@pytest.mark.parametrize(
    ("family", "after"),
    [("vit", 2), ("bert", 2), ("gpt2", 2), ("llama", 2), ("resnet", 1)],  # final norm or pooler, and the head
)
def test_layers_are_the_blocks_and_the_modules_before_the_first(folder, family, after):
    model = load(folder(family), table_for(family), "full")
    found, blocks = layers(model, "layer"), [path for path, _ in model.parts.blocks]
    assert list(found) == ["embeddings", *blocks, *list(found)[1 + len(blocks) :]]
    assert len(found) == 1 + len(blocks) + after
    assert [n for names in found.values() for n in names] == [n for n in model.names if n in model.live()]
    assert all(n.startswith(f"{path}.") for path in blocks for n in found[path])


def test_without_trained_blocks_every_module_is_a_layer(folder):
    model = load(folder("vit"), table_for("vit"), "head")
    assert list(layers(model, "layer")) == ["classifier"]


@pytest.mark.parametrize("family", ["vit", "bert", "gpt2"])
def test_blocks_are_the_hidden_states_of_transformers(folder, family):
    table = table_for(family, 3)
    model = load(folder(family), table, "head")
    rows = model.prepare(table, range(3))
    batch = rows.batch(range(3))
    with torch.no_grad():
        states = model.module(
            **{k: v for k, v in batch.items() if k != "labels"}, output_hidden_states=True
        ).hidden_states
    for ours, theirs in list(zip(model.blocks(rows), states, strict=True))[:-1]:  # GPT-2's last has passed the norm
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("family", EVERY)
def test_parts_are_found_by_the_table_and_in_most_families_without_it(folder, family):
    table = table_for(family)
    module = unwrap(load(folder(family), table, "head").module)
    by_table, guessed = find(module, family), find(module, "never heard of")
    assert by_table.embedding is not None
    assert by_table.head == guessed.head
    if family not in ("resnet",):  # its stages are a ModuleList of Sequentials
        assert [p for p, _ in by_table.blocks] == [p for p, _ in guessed.blocks]


@pytest.mark.parametrize("family", ["bert", "roberta", "llama", "gpt2"])
def test_lora_adapts_the_default_targets_of_peft(folder, family):
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as table_of_peft

    model = load(folder(family), table_for(family), "head")
    assert list(default_targets(model.parts)) == table_of_peft[family]


@pytest.mark.parametrize("family", LORA)
def test_lora_starts_at_the_foundation_model(folder, family):
    table = table_for(family)
    plain, adapted = load(folder(family), table, "head"), load(folder(family), table, "lora")
    rows = plain.prepare(table, range(5))
    torch.testing.assert_close(adapted.predict(rows), plain.predict(rows))
    assert adapted.fingerprint == plain.fingerprint
    assert any("lora_A" in n for n in adapted.names)
    assert any("modules_to_save" in n for n in adapted.names)


@pytest.mark.each_value
@pytest.mark.parametrize("adaptation", ["head", "lora", "top_layers"])
@pytest.mark.parametrize("family", [*OTHER_IMAGE, *OTHER_TEXT])
def test_models_outside_the_table_work_by_a_search_of_their_modules(folder, family, adaptation):
    assert family not in FAMILIES
    table = table_for(family)
    model = load(folder(family), table, adaptation)
    rows = model.prepare(table, range(5))
    model.loss(rows.batch(range(5))).backward()
    assert all(p.grad is not None for p in model.live().values())
    torch.testing.assert_close(model.predict(model.encode(rows)), model.predict(rows), rtol=1e-4, atol=1e-5)
    if family == "albert":
        with pytest.raises(ValueError, match="more than once"):
            model.blocks(rows)
    else:
        assert len(model.blocks(rows)) == (3 if family in OTHER_IMAGE else 4)  # two blocks


@pytest.mark.parametrize("targets", [(), ("reduce_1x1.convolution",)])
def test_mobilenet_refuses_lora(folder, targets):
    with pytest.raises(InputError, match=r"model\.adaptation\.targets.*use top_layers, head or full"):
        load(folder("mobilenet_v2"), table_for("mobilenet_v2"), AdaptationSpec("lora", rank=2, targets=targets))


def test_every_tested_family_is_in_the_table():
    assert set(EVERY) <= FAMILIES.keys()
