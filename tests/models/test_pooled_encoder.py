"""Image encoders for which transformers has no classifier."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from test_stages import VISION, built
from tiny_models import images, load
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from fedfm.api.model_card import how_to_load
from fedfm.errors import InputError
from fedfm.models.architectures.pooled_encoder import CLASS_TOKEN, MEAN, POOLER
from fedfm.models.export import export
from fedfm.models.head_inputs import UNIT_NORM
from fedfm.models.quiet import quiet

ENCODERS = {
    "DINOv3ViT": ({**VISION, "num_register_tokens": 2}, POOLER),
    "ViTMAE": (VISION, CLASS_TOKEN),
    "CLIPVision": (VISION, POOLER),
    "SiglipVision": (VISION, POOLER),
    "VitDet": ({**VISION, "pretrain_image_size": 32}, MEAN),
    "DINOv3ConvNext": ({"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1]}, POOLER),
}


def saved(folder, name, keys):
    with quiet():
        built(name, "AutoModel", keys).save_pretrained(folder)
        ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ENCODERS)
def test_a_new_head_reads_the_encoders_pooled_output(tmp_path, name):
    keys, pooling = ENCODERS[name]
    table = images()
    model = load(saved(tmp_path, name, keys), table, "head")
    assert any(pooling in text for text in model.notices)
    assert set(model.names) == {"classifier.weight", "classifier.bias"}
    rows = model.prepare(table, range(5))
    torch.testing.assert_close(model.predict(model.encode(rows)), model.predict(rows), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.features(rows)[2:3], model.features(rows.take([2])), rtol=0, atol=0)


def test_features_are_the_encoders_own(tmp_path):
    from transformers import AutoModel

    table = images()
    model = load(saved(tmp_path, "DINOv3ViT", ENCODERS["DINOv3ViT"][0]), table, "head")
    rows = model.prepare(table, range(5))
    with torch.no_grad():
        theirs = AutoModel.from_pretrained(tmp_path).eval()(pixel_values=rows.batch(range(5))["pixel_values"])
    torch.testing.assert_close(model.features(rows), theirs.pooler_output, rtol=1e-4, atol=1e-5)


def test_a_masked_autoencoder_sees_the_complete_image(tmp_path):
    table = images()
    model = load(saved(tmp_path, "ViTMAE", VISION), table, "head")
    embedded = []
    model.module.encoder.embeddings.register_forward_hook(lambda _, __, out: embedded.append(out[0]))
    rows = model.prepare(table, range(2))
    model.predict(rows)
    model.predict(rows)
    assert embedded[0].shape == (2, 1 + 16, 16)  # class token and all patches
    assert torch.equal(*embedded)


@pytest.mark.parametrize("adaptation", ["lora", "top_layers", "full"])
def test_all_adaptations_train_and_export_as_tensors(tmp_path, adaptation):
    table = images()
    model = load(saved(tmp_path / "m", "DINOv3ViT", ENCODERS["DINOv3ViT"][0]), table, adaptation)
    model.loss(model.prepare(table, range(3)).batch(range(3))).backward()
    idle = {name for name, p in model.live().items() if p.grad is None}
    assert idle <= {"encoder.embeddings.mask_token"}
    w = model.params()
    export(model, w, "torch", tmp_path / "x")
    tensors = load_file(tmp_path / "x" / "model.safetensors")
    assert tensors["classifier.weight"].shape == (3, 16)
    assert json.loads((tmp_path / "x" / "fedfm.json").read_text())["head_reads"] == POOLER
    for to in ("hf", "peft"):
        with pytest.raises(InputError, match="use torch"):
            export(model, w, to, tmp_path / to)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_code_of_an_export_scales_the_inputs_of_its_head(tmp_path, dtype):
    table = images()
    model = load(saved(tmp_path / "m", "ViTMAE", VISION), table, "head", dtype=dtype)
    export(model, model.params(), "torch", tmp_path / "x", head_takes=UNIT_NORM)
    assert str(tmp_path) not in (tmp_path / "x" / "encoder" / "config.json").read_text()
    text = "\n".join(how_to_load(model, "torch", tmp_path / "x"))
    assert f"The head takes {UNIT_NORM}." in text
    code, names = text.partition("```python")[2].partition("```")[0], {}
    exec(code.replace("FOLDER", str(tmp_path / "x")), names)
    rows = model.prepare(table, range(5))
    units = torch.nn.functional.normalize(model.features(rows))
    expected = model.head(units.to(model.head.weight.dtype)).float()
    pictures = [Image.fromarray(x) for x in table.inputs]
    pixels = names["processor"](pictures, return_tensors="pt")["pixel_values"]
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.1, "atol": 0.02}
    with torch.no_grad():
        found = names["model"](pixels.to(model.head.weight.dtype)).float()
    torch.testing.assert_close(found, expected, **close)


def test_an_encoder_without_a_vector_for_each_picture_is_refused(tmp_path):
    with pytest.raises(InputError, match="gives no vector for each image"):
        load(saved(tmp_path, "PixtralVision", VISION), images(), "head")


def test_an_encoder_is_compared_with_another_as_a_foundation(tmp_path):
    from fedfm.models.saved_modules import as_saved

    saved(tmp_path, "DINOv3ViT", ENCODERS["DINOv3ViT"][0])
    model = load(tmp_path, images(), "full")
    module, kind, new = as_saved(str(tmp_path), model.module)
    assert kind == "dinov3_vit"
    assert new == {"classifier.weight", "classifier.bias"}
    state = model.module.state_dict()
    assert state.keys() == module.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items() if name not in new)
