import pytest
import torch
import torch.nn.functional as F
from tiny_models import CLASSES, images, load

from fedfm.errors import InputError
from fedfm.models.architectures.clip_zero_shot import ZeroShotClassifier
from fedfm.models.export import export
from fedfm.models.quiet import quiet


def test_logits_are_scaled_cosines_of_transformers_own_embeddings(folder):
    from transformers import AutoTokenizer, CLIPModel

    model = load(folder("clip"), images(), "head", task="zero_shot")
    rows = model.prepare(images(), range(5))
    with quiet():
        clip = CLIPModel.from_pretrained(folder("clip")).eval()
        tokens = AutoTokenizer.from_pretrained(folder("clip"))([f"a photo of a {c}." for c in CLASSES], padding=True, return_tensors="pt")  # fmt: skip # noqa: E501
    with torch.no_grad():
        whole = clip(
            pixel_values=rows.tensors["pixel_values"], **{k: tokens[k] for k in ("input_ids", "attention_mask")}
        )
    torch.testing.assert_close(model.predict(rows), whole.logits_per_image, rtol=1e-4, atol=1e-4)
    assert isinstance(model.module, ZeroShotClassifier)


def test_features_are_unit_vectors_and_the_head_can_be_trained(folder):
    model = load(folder("clip"), images(), "head", task="zero_shot")
    assert model.names == ("head.weight",)
    rows = model.prepare(images(), range(5))
    features = model.features(rows)
    torch.testing.assert_close(features.norm(dim=-1), torch.ones(5))
    torch.testing.assert_close(model.predict(model.encode(rows)), model.predict(rows), rtol=1e-4, atol=1e-4)
    scale = model.params()["head.weight"].norm(dim=-1)
    torch.testing.assert_close(scale, torch.full((3,), 1 / 0.07), rtol=1e-2, atol=0.1)
    assert F.cosine_similarity(features[:1], model.head.weight).abs().max() <= 1.0001


def test_blocks_are_those_of_the_pictures(folder, tmp_path):
    model = load(folder("clip"), images(), "head", task="zero_shot")
    assert len(model.parts.blocks) == 3
    assert len(model.blocks(model.prepare(images(), range(2)))) == 4
    with pytest.raises(InputError, match="transformers has no class for a zero-shot classifier: use torch"):
        export(model, model.params(), "hf", tmp_path)
    export(model, model.params(), "torch", tmp_path)


def test_the_class_names_are_part_of_the_model(folder):
    table = images()
    other = type(table)("image", table.inputs, table.labels, ("east", *CLASSES[1:]), table.split)
    for adaptation in ("head", "lora"):
        a, b = (load(folder("clip"), t, adaptation, task="zero_shot") for t in (table, other))
        assert a.fingerprint != b.fingerprint
