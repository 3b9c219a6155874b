"""LoRA of two encoders as PEFT's files: each variant's adapter computes on transformers' own model what was trained."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from test_dual_encoder import KINDS, bias_of, model_of, moved, plain, prompts, table, tokens

import fedfm
from fedfm.errors import InputError
from fedfm.models.adapter_reading import load_adapter
from fedfm.models.export import export
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec
from tiny_clip import pictures, places

FIRST = {"vtde": "text_model.encoder.layer.0.intermediate.dense"}  # a module that is adapted by default
LAST = {"vtde": "vision_model.layers.2.mlp.fc2"}
OPTIONS = {
    "a name's alpha": {"alpha_pattern": {"fc1": 9.0}},
    "a path's alpha": {"alpha_pattern": {"clip.FIRST": 9.0, "LAST": 3.0}},
    "without a name": {"exclude_modules": ("fc2",)},
    "without a path": {"exclude_modules": ("clip.FIRST",)},
    "alpha and without": {"exclude_modules": ("clip.FIRST",), "alpha_pattern": {"clip.LAST": 5.0}, "rslora": True},
    "ranks": {"rank_pattern": {"clip.FIRST": 3, "LAST": 1}},
    "all maps": {"targets": ("all-linear",), "rank_pattern": {"LAST": 3}, "dora": True},
    "B alone": {"name": "ffa_lora", "alpha_pattern": {"clip.FIRST": 5.0}},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return places(tmp_path_factory)


def spec(kind: str, options: dict) -> AdaptationSpec:
    first = FIRST.get(kind, "text_model.encoder.layers.0.mlp.fc1")
    last = LAST.get(kind, "vision_model.encoder.layers.2.mlp.fc2")
    found = {}
    for key, value in options.items():
        if isinstance(value, dict):
            value = {k.replace("FIRST", first).replace("LAST", last): v for k, v in value.items()}
        elif isinstance(value, tuple):
            value = tuple(v.replace("FIRST", first) for v in value)
        found[key] = value
    return AdaptationSpec(**({"name": "lora", "rank": 2} | found))


@pytest.mark.sample("a path's alpha-siglip", "without a name-vtde", "ranks-clip")
@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_peft_and_transformers_compute_what_was_trained(place, tmp_path, kind, name):
    from peft import PeftModel

    model = model_of(place(kind), spec(kind, OPTIONS[name]))
    w = moved(model)
    rows = model.prepare(table(), range(5))
    start = model.predict(rows)
    export(model, w, "peft", tmp_path / "peft")
    export(model, w, "hf", tmp_path / "hf")
    assert load_adapter(model, tmp_path / "peft").sha256() == w.sha256()
    model.load(w)
    expected = model.predict(rows)
    assert (expected - start).abs().max() > 0.05
    with quiet(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys")  # all that PEFT says of such modules
        theirs = PeftModel.from_pretrained(plain(place(kind)), str(tmp_path / "peft")).eval()
        both = (theirs, theirs.get_base_model()), (plain(tmp_path / "hf"),) * 2
    for other, clip in both:
        with torch.no_grad():
            whole = other(pixel_values=rows.tensors["pixel_values"], **tokens(place(kind), prompts()))
        torch.testing.assert_close(expected, whole.logits_per_image - bias_of(clip), rtol=1e-4, atol=1e-4)


def test_a_run_is_exported_with_its_alphas_and_predicts_alike(place, tmp_path: Path):
    from peft import PeftModel
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    data = pictures(tmp_path / "rows.npz")
    adaptation = {
        "name": "lora",
        "rank": 2,
        "alpha_pattern": {"clip.vision_model.encoder.layers.2.mlp.fc2": 9.0},
        "exclude_modules": ["clip.text_model.encoder.layers.0.mlp.fc1"],
        "rank_pattern": {"fc1": 3},
    }
    tables = {
        "data": {"path": str(data), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": str(place("clip")), "task": "zero_shot", "adaptation": adaptation},
        "method": {"name": "fedavg", "rounds": 1, "local": {"learning_rate": 0.5, "batch_size": 8}},
        "run": {"workers": 1, "seed": 3},
    }
    fedfm.run(tables, tmp_path / "run")
    said = torch.tensor(fedfm.predict(tmp_path / "run", data)["probabilities"])
    fedfm.export(tmp_path / "run", "peft", tmp_path / "peft")
    fedfm.export(tmp_path / "run", "hf", tmp_path / "hf")
    classes = json.loads((tmp_path / "peft" / "fedfm.json").read_text())["classes"]
    texts = [f"a photo of a {name.replace('_', ' ')}." for name in classes]
    with quiet():
        pixels = ViTImageProcessorPil.from_pretrained(tmp_path / "peft")(list(np.load(data)["x"]), return_tensors="pt")
        two = PeftModel.from_pretrained(plain(place("clip")), str(tmp_path / "peft")).eval(), plain(tmp_path / "hf")
    for other in two:
        with torch.no_grad():
            found = other(pixel_values=pixels["pixel_values"], **tokens(place("clip"), texts)).logits_per_image
        torch.testing.assert_close(found.softmax(-1), said, rtol=1e-4, atol=1e-5)


def test_a_map_that_its_owner_reads_without_calling_it_is_no_target(place):
    """SigLIP's pooling is torch's MultiheadAttention: LoRA on its last map would do nothing, until it is merged."""
    inside = "vision_model.head.attention.out_proj"
    model = model_of(place("siglip"), AdaptationSpec("lora", targets=("all-linear",)))
    assert not any(inside in name for name in model.names)
    assert any("layers.0.self_attn.out_proj" in name for name in model.names)
    with pytest.raises(InputError, match=f"reads the weight of clip.{inside} .*add clip.{inside} to exclude_modules"):
        model_of(place("siglip"), AdaptationSpec("lora", targets=("out_proj",)))
    excluded = AdaptationSpec("lora", targets=("out_proj",), exclude_modules=("head.attention.out_proj",))
    assert model_of(place("siglip"), excluded).names == tuple(n for n in model.names if "out_proj" in n)
