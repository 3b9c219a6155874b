import json
from pathlib import Path

import pytest
import torch
from tiny_models import CLASSES, images, load, prose, sentences, table_for, vectors

from fedfm.errors import InputError
from fedfm.models.adapter_files import save_adapter
from fedfm.models.adapter_reading import load_adapter
from fedfm.models.export import export, merge
from fedfm.models.load import load_model
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec


def trained(model):
    """Weights far from the start."""
    torch.manual_seed(0)
    w = {n: t + 0.3 * torch.randn_like(t) for n, t in model.params().items()}
    return type(model.params())({n: t.abs() if n.endswith("running_var") else t for n, t in w.items()})


def expected(model, w, rows):
    own = model.params()
    model.load(w)
    logits = model.predict(rows)
    model.load(own)
    return logits


def arguments(model, rows):
    return {k: v for k, v in rows.batch(range(len(rows))).items() if k != "labels"}


@pytest.mark.parametrize("adaptation", ["lora", "ffa_lora", "head", "top_layers", "full"])
@pytest.mark.parametrize("family", ["vit", "bert", "resnet"])
def test_adapter_comes_back(folder, tmp_path, family, adaptation):
    table = table_for(family)
    model = load(folder(family), table, adaptation)
    own, w = model.params(), trained(model)
    save_adapter(model, w, tmp_path / "a")
    assert model.params().sha256() == own.sha256()
    assert load_adapter(model, tmp_path / "a").sha256() == w.sha256()
    about = json.loads((tmp_path / "a" / "fedfm.json").read_text())
    assert about["classes"] == list(CLASSES)
    assert about["fingerprint"] == model.fingerprint
    files = {p.name for p in (tmp_path / "a").iterdir()}
    assert ("adapter_config.json" in files) == ("lora" in adaptation)
    with pytest.raises(InputError, match="no "):
        load_adapter(model, tmp_path)


def test_adapter_of_another_model_is_refused(folder, tmp_path):
    save_adapter(load("features", vectors()), load("features", vectors()).params(), tmp_path)
    with pytest.raises(InputError, match="another model"):
        load_adapter(load(folder("vit"), images(), "head"), tmp_path)
    with pytest.raises(InputError, match="expected"):
        load_adapter(load("features", vectors(d=9)), tmp_path)


@pytest.mark.parametrize("family", ["vit", "bert", "roberta", "distilbert", "gpt2", "llama", "nano-vit"])
def test_peft_loads_the_adapter(folder, tmp_path, family):
    from peft import PeftModel
    from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

    table = images() if family == "nano-vit" else table_for(family)
    model = load(family if family == "nano-vit" else folder(family), table, "lora")
    w, rows = trained(model), model.prepare(table, range(5))
    export(model, w, "peft", tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors", "fedfm.json"} <= {p.name for p in tmp_path.iterdir()}
    base = json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"]
    auto = AutoModelForImageClassification if table.kind == "image" else AutoModelForSequenceClassification
    with quiet():
        pad = {} if table.kind == "image" else {"pad_token_id": model.module.config.pad_token_id}
        plain = auto.from_pretrained(model.spec.name if Path(model.spec.name).is_dir() else base, num_labels=3, **pad)
        if family in ("roberta", "distilbert"):
            # A dense layer that the checkpoint lacks belongs to what PEFT saves, so that no base has to have it.
            assert any("dense" in n or "pre_classifier" in n for n in w)
        theirs = PeftModel.from_pretrained(plain, str(tmp_path)).eval()
    with torch.no_grad():
        logits = theirs(**arguments(model, rows)).logits
    torch.testing.assert_close(logits, expected(model, w, rows), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["vit", "bert", "roberta", "gpt2", "llama", "nano-vit"])
def test_the_folder_alone_loads_by_peft(folder, tmp_path, family, monkeypatch):
    """From another working directory, without a word on classes or on the base."""
    from peft import AutoPeftModel, AutoPeftModelForSequenceClassification
    from transformers import AutoConfig, AutoTokenizer

    table = images() if family == "nano-vit" else table_for(family)
    model = load(family if family == "nano-vit" else folder(family), table, "lora")
    w, rows = trained(model), model.prepare(table, range(5))
    monkeypatch.chdir(tmp_path)
    export(model, w, "peft", "out")
    monkeypatch.chdir("/")
    auto = AutoPeftModel if table.kind == "image" else AutoPeftModelForSequenceClassification
    with quiet():
        theirs = auto.from_pretrained(str(tmp_path / "out")).eval()
    with torch.no_grad():
        logits = theirs(**arguments(model, rows)).logits
    torch.testing.assert_close(logits, expected(model, w, rows), rtol=1e-4, atol=1e-5)
    named = dict(enumerate(CLASSES))
    assert theirs.config.id2label == AutoConfig.from_pretrained(tmp_path / "out").id2label == named
    if table.kind == "text":
        assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == model.tools.max_length
    weights = {p.name: p for p in (tmp_path / "out/base").iterdir() if "safetensors" in p.name}
    assert weights
    assert all(p.stat().st_nlink > 1 or p.is_symlink() for p in weights.values())  # no second copy on the disk


@pytest.mark.each_value
@pytest.mark.parametrize("adaptation", ["lora", "head", "full"])
@pytest.mark.parametrize("family", ["vit", "clip", "siglip", "bert", "gpt2", "mobilenet_v2"])
def test_transformers_loads_the_merged_model_from_the_folder_alone(folder, tmp_path, family, adaptation):
    from transformers import (
        AutoImageProcessor,
        AutoModelForImageClassification,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    if (family, adaptation) == ("mobilenet_v2", "lora"):
        adaptation = "top_layers"
    table = table_for(family)
    model = load(folder(family), table, adaptation)
    w, rows = trained(model), model.prepare(table, range(5))
    export(model, w, "hf", tmp_path)
    with quiet():
        if table.kind == "image":
            theirs = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
            again = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(list(table.inputs), return_tensors="pt")
            torch.testing.assert_close(again["pixel_values"], rows.tensors["pixel_values"])
        else:
            theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
            again = AutoTokenizer.from_pretrained(tmp_path)(table.inputs)["input_ids"]
            assert again == [t.tolist() for t in rows.tokens]
    assert theirs.config.id2label == dict(enumerate(CLASSES))
    assert theirs.config.label2id == {c: i for i, c in enumerate(CLASSES)}
    with torch.no_grad():
        logits = theirs(**arguments(model, rows)).logits
    torch.testing.assert_close(logits, expected(model, w, rows), rtol=1e-3, atol=1e-4)
    if family == "vit":  # only under "head" has the backbone stayed the same
        again = load_model(ModelSpec(str(tmp_path)), classes=CLASSES, kind=table.kind)
        assert (again.fingerprint == model.fingerprint) == (adaptation == "head")


def test_language_model_exports(folder, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    table = prose()
    model = load(folder("llama"), table, "lora")
    w, rows = trained(model), model.prepare(table, range(4))
    batch = arguments(model, rows)
    export(model, w, "hf", tmp_path / "hf")
    export(model, w, "peft", tmp_path / "peft")
    with quiet():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
        base = AutoModelForCausalLM.from_pretrained(folder("llama"))
        adapted = PeftModel.from_pretrained(base, str(tmp_path / "peft")).eval()
    with torch.no_grad():
        torch.testing.assert_close(whole(**batch).logits, expected(model, w, rows), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(adapted(**batch).logits, expected(model, w, rows), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # PEFT's
@pytest.mark.parametrize("target", ["wte", "lm_head"])
def test_an_adapter_on_one_of_two_tied_maps_is_merged_into_that_one(folder, tmp_path, target):
    from transformers import AutoModelForCausalLM

    table = prose()
    model = load(folder("gpt2"), table, AdaptationSpec("lora", rank=2, targets=(target,)))
    w, rows = trained(model), model.prepare(table, range(4))
    export(model, w, "hf", tmp_path)
    with quiet():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            whole(**arguments(model, rows)).logits, expected(model, w, rows), rtol=1e-3, atol=1e-4
        )
    assert not whole.config.tie_word_embeddings


@pytest.mark.parametrize("family", ["vit", "gpt2", "features"])
def test_torch_export_is_a_state_dict_with_labels(folder, tmp_path, family):
    from safetensors.torch import load_file

    table = vectors() if family == "features" else table_for(family)
    model = load(
        "features" if family == "features" else folder(family), table, None if family == "features" else "lora"
    )
    w, rows = trained(model), model.prepare(table, range(5))
    export(model, w, "torch", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert not any("lora" in n for n in state)
    assert json.loads((tmp_path / "fedfm.json").read_text())["classes"] == list(CLASSES)
    plain = merge(model, model.params())
    plain.load_state_dict(state)
    with torch.no_grad():
        out = plain(**arguments(model, rows))
    logits = out if isinstance(out, torch.Tensor) else out.logits
    torch.testing.assert_close(logits, expected(model, w, rows), rtol=1e-3, atol=1e-4)


def test_unsupported_forms_of_export_are_refused(folder, tmp_path):
    model = load(folder("bert"), sentences(), "head")
    with pytest.raises(InputError, match="use hf or torch"):
        export(model, model.params(), "peft", tmp_path)
    with pytest.raises(InputError, match="expected peft, hf or torch"):
        export(model, model.params(), "onnx", tmp_path)
    linear = load("features", vectors())
    with pytest.raises(InputError, match="use torch"):
        export(linear, linear.params(), "hf", tmp_path)
    with pytest.raises(InputError, match="PEFT adapter: use torch"):
        export(linear, linear.params(), "peft", tmp_path)
    adapted = load(folder("bert"), sentences(), "lora", weights="random")
    with pytest.raises(InputError, match="random weights, and no file has them"):
        export(adapted, adapted.params(), "peft", tmp_path)
    with pytest.raises(KeyError):
        save_adapter(model, linear.params(), tmp_path)


@pytest.mark.parametrize("adaptation", ["lora", "head"])
def test_a_distilled_deit_has_one_head_which_is_exported(tmp_path, adaptation):
    """Its checkpoint names the class with two heads, whose answer is the mean of both: only one would be trained."""
    from transformers import AutoModelForImageClassification, DeiTConfig, DeiTForImageClassificationWithTeacher

    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    with quiet():
        two = DeiTForImageClassificationWithTeacher(DeiTConfig(**shape, image_size=16, patch_size=8))
        two.save_pretrained(tmp_path / "deit")
    model = load(tmp_path / "deit", images(), adaptation)
    w, rows = trained(model), model.prepare(images(), range(5))
    export(model, w, "hf", tmp_path / "out")
    with quiet():
        theirs = AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = theirs(**arguments(model, rows)).logits
    torch.testing.assert_close(logits, expected(model, w, rows), rtol=1e-4, atol=1e-5)
    model.load(w)
    features = model.features(rows)
    torch.testing.assert_close(features @ model.head.weight.T + model.head.bias, logits, rtol=1e-4, atol=1e-5)
