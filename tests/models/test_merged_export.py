"""Exports of a model whose base stays in its files: the same bytes as from the model in memory."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CLASSES, prose

from fedfm.models import merged_export
from fedfm.models.export import export
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training.sharded.group_model import load_group_model
from fedfm.training.sharded.settings import GroupSettings


def about(task):
    return {"classes": () if task == "language_modelling" else CLASSES, "kind": "text", "seed": 3}


def moved(model):
    """Weights far from the start."""
    torch.manual_seed(0)
    return model.params().map(lambda x: x + 0.3 * torch.randn_like(x))


def compare(folder, whole, other, to):
    """The files of both exports, which have to be the same."""
    w = moved(whole)
    export(whole, w, to, folder / "whole")
    export(other, w, to, folder / "other")
    names = [sorted(p.name for p in (folder / name).rglob("*")) for name in ("whole", "other")]
    assert names[0] == names[1]
    file = "adapter_model.safetensors" if to == "peft" else "model.safetensors"
    a, b = (load_file(folder / name / file) for name in ("whole", "other"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)
    for text in ("config.json", "generation_config.json", "fedfm.json"):
        if (folder / "whole" / text).exists():
            a, b = (json.loads((folder / name / text).read_text()) for name in ("whole", "other"))
            assert {**a, "sha256": None} == {
                **b,
                "sha256": None,
            }  # files of the same tensors have them in another order


@pytest.mark.sample("float32-llama-peft", "bfloat16-gpt2-hf", "float32-bert-torch", "bfloat16-bert-peft")
@pytest.mark.parametrize("to", ["peft", "hf", "torch"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_merged_as_in_memory(folder, tmp_path, family, to, dtype):
    """GPT-2 has transposed maps and a tied head; BERT has a new head, which is trained."""
    task = "classification" if family == "bert" else "language_modelling"
    spec = ModelSpec(str(folder(family)), task=task, dtype=dtype, adaptation=AdaptationSpec("lora", rank=2))
    whole, hollow = (load_model(spec, **about(task), hollow=hollow) for hollow in (False, True))
    assert hollow.slices is not None
    assert merged_export.can_stay(spec)
    start = hollow.params().sha256()
    compare(tmp_path, whole, hollow, to)
    assert hollow.params().sha256() == start
    assert all(p.untyped_storage().nbytes() <= 8 for p in hollow.slices.names)


def save_tied(llama, path):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(llama, tie_word_embeddings=True)).save_pretrained(path)
    for file in llama.glob("token*"):
        (path / file.name).write_bytes(file.read_bytes())


def test_two_values_of_a_tied_weight_are_two_weights(folder, tmp_path):
    """As in transformers, whose configuration asks for one weight, while the files have two."""
    path = tmp_path / "tied"
    save_tied(folder("llama"), path)
    state = load_file(path / "model.safetensors")
    save_file(state | {"lm_head.weight": 2 * state["model.embed_tokens.weight"]}, path / "model.safetensors")
    spec = ModelSpec(str(path), task="language_modelling", adaptation=AdaptationSpec("lora", rank=2))
    whole, hollow = (load_model(spec, **about("language_modelling"), hollow=hollow) for hollow in (False, True))
    compare(tmp_path, whole, hollow, "hf")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("targets", [("embed_tokens", "q_proj"), ("lm_head",)])
def test_embeddings_and_heads_have_a_weight_each(folder, tmp_path, targets):
    path = tmp_path / "tied"
    save_tied(folder("llama"), path)
    adaptation = AdaptationSpec("lora", rank=2, targets=targets)
    spec = ModelSpec(str(path), task="language_modelling", adaptation=adaptation)
    whole, hollow = (load_model(spec, **about("language_modelling"), hollow=hollow) for hollow in (False, True))
    compare(tmp_path, whole, hollow, "hf")
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= load_file(tmp_path / "other" / "model.safetensors").keys()


@pytest.mark.parametrize("adaptation", ["head", "top_layers", "full"])
def test_a_model_of_several_processes_is_exported_by_one(folder, tmp_path, adaptation):
    """No process is started; trained weights of the base come from the run."""
    spec = ModelSpec(str(folder("bert")), task="classification", adaptation=AdaptationSpec(adaptation))
    whole = load_model(spec, **about("classification"))
    group = load_group_model(spec, GroupSettings(2), **about("classification"))
    for to in ("hf", "torch"):
        compare(tmp_path / to, whole, group, to)


def test_a_large_model_has_several_files(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    spec = ModelSpec(str(folder("llama")), task="language_modelling", adaptation=AdaptationSpec("lora", rank=2))
    whole, hollow = (load_model(spec, **about("language_modelling"), hollow=hollow) for hollow in (False, True))
    w = moved(whole)
    hollow.load(w)
    merged_export.save(merged_export.MergedWeights(hollow, w), tmp_path, 4_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {*index["weight_map"].values()}
    assert len(files) > 2
    assert all((tmp_path / file).is_file() for file in files)
    whole.load(w)
    batch = whole.prepare(prose(), [0]).batch([0])
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path)(**batch).logits
        torch.testing.assert_close(found, whole.outputs(batch), atol=1e-5, rtol=1e-5)


def test_rounded_bases_stay_in_memory(folder):
    spec = ModelSpec(str(folder("llama")), task="language_modelling", quantization="nf4")
    assert not merged_export.can_stay(spec)
    assert not merged_export.can_stay(ModelSpec("features"))
