"""Heads of families without a bias get one for methods that fit a bias."""

import pytest
import torch
from tiny_models import CLASSES, sentences, table_for

import tiny_clip
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.export import export, merge
from fedfm.models.load import load_model
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec

WITHOUT = ("llama", "mistral", "qwen2", "gpt2", "opt", "gpt_neox")  # the last two are in no table of families


def load(name, adaptation="head", table=None, **given):
    table = table or sentences()
    spec = ModelSpec(str(name), adaptation=AdaptationSpec(adaptation, rank=2), **given.pop("spec", {}))
    return load_model(spec, classes=table.classes, kind=table.kind, **{"head_bias": True, **given})


def drawn(model):
    torch.manual_seed(0)
    return Params({name: torch.randn_like(tensor) for name, tensor in model.params().items()})


@pytest.mark.parametrize("family", WITHOUT)
def test_an_added_bias_changes_no_other_parameter(folder, family):
    plain, model = load(folder(family), head_bias=False), load(folder(family))
    rows = model.prepare(sentences(), range(5))
    (weight,) = plain.names
    assert set(model.names) == {weight, weight.replace("weight", "bias")}
    assert model.added_bias
    assert not plain.added_bias
    assert model.fingerprint == plain.fingerprint
    assert torch.equal(model.params()[weight], plain.params()[weight])
    assert torch.equal(model.predict(rows), plain.predict(rows))
    assert torch.equal(model.features(rows), plain.features(rows))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", WITHOUT)
def test_logits_are_those_of_the_head_on_the_features(folder, family, dtype):
    model = load(folder(family), spec={"dtype": dtype})
    rows, w = model.prepare(sentences(), range(5)), drawn(model)
    model.load(w)
    weight, bias = model.head.weight.detach(), model.head.bias.detach()
    assert weight.dtype == bias.dtype == torch.float32
    assert bias.abs().min() > 0
    by_hand = model.features(rows) @ weight.T + bias
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(model.predict(rows), by_hand, **near)
    torch.testing.assert_close(model.predict(model.encode(rows)), by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "adaptation"), [("llama", "lora"), ("llama", "full"), ("bert", "head")])
def test_other_adaptations_and_heads_with_a_bias_stay_as_they_are(folder, family, adaptation):
    plain, model = (load(folder(family), adaptation, head_bias=given) for given in (False, True))
    assert model.params().sha256() == plain.params().sha256()
    assert not model.added_bias


def test_a_head_made_from_class_names_gets_a_bias(tmp_path):
    tiny_clip.save("clip", tmp_path)
    spec = ModelSpec(str(tmp_path), task="zero_shot", adaptation=AdaptationSpec("head"))
    plain, model = (load_model(spec, classes=("fox", "dog"), kind="image", head_bias=b) for b in (False, True))
    assert (plain.names, model.names) == (("head.weight",), ("head.weight", "head.bias"))
    assert model.fingerprint == plain.fingerprint


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_export_to_transformers_is_refused_or_has_the_same_logits(folder, tmp_path, family):
    from transformers import AutoModelForSequenceClassification

    model = load(folder(family))
    rows, w = model.prepare(sentences(), range(5)), drawn(model)
    with pytest.raises(InputError, match="has no place for it: use `fedfm predict`, or torch"):
        export(model, w, "hf", tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    with pytest.raises(InputError, match="PEFT adapter: use torch"):
        export(model, w, "peft", tmp_path / "refused")
    weight, bias = model.names
    zero = w.replace({bias: torch.zeros(len(CLASSES))})
    export(model, zero, "hf", tmp_path / "out")
    assert model.names == (weight, bias)  # the run's own model has kept it
    with quiet():
        theirs, told = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["unexpected_keys"]
    assert not told["missing_keys"]
    model.load(zero)
    with torch.no_grad():
        batch = {k: v for k, v in rows.batch(range(5)).items() if k != "labels"}
        torch.testing.assert_close(theirs.eval()(**batch).logits, model.predict(rows), rtol=1e-4, atol=1e-5)


def test_an_export_to_torch_contains_the_bias(folder, tmp_path):
    from safetensors.torch import load_file

    model = load(folder("llama"), table=table_for("llama"))
    w = drawn(model)
    export(model, w, "torch", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert torch.equal(state["score.bias"], w["score.bias"])
    merge(model, model.params()).load_state_dict(state)
