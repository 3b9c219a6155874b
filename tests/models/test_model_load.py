import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from tiny_models import CLASSES, images, load, minilm, prose, real, sentences, table_for, vectors

from fedfm.core.fields import check
from fedfm.errors import InputError
from fedfm.models.load import load_model
from fedfm.models.locate import locate
from fedfm.models.metrics import evaluate
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.models.weight_fingerprint import fingerprint


@pytest.mark.proof
def test_importing_the_loader_imports_no_library():
    rooms = "fedfm.models.load, fedfm.models.export, fedfm.models.metrics, fedfm.models.wrap"
    heavy = ["transformers", "peft", "PIL", "fedfm.data.load"]
    code = f"import sys, {rooms}; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


def test_same_seed_same_bits_other_seed_other_bits(folder):
    table = images()
    a, b, c = (load(folder("vit"), table, "lora", seed=s) for s in (3, 3, 4))
    assert a.params().sha256() == b.params().sha256() != c.params().sha256()
    assert a.fingerprint == b.fingerprint == c.fingerprint
    assert a.names == b.names
    assert torch.equal(a.predict(a.prepare(table, range(5))), b.predict(b.prepare(table, range(5))))


def test_loading_does_not_use_or_change_the_global_generator(folder):
    table = images()
    torch.manual_seed(1)
    first = load(folder("roberta"), sentences(), "lora").params().sha256()
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    second = load(folder("roberta"), sentences(), "lora").params().sha256()
    load(folder("vit"), table, "lora", weights="random")
    load("nano-vit", table, "lora")
    assert first == second
    assert torch.equal(state, torch.random.get_rng_state())


def test_random_weights_derive_from_the_seed(folder):
    table = images()
    a, b, c = (load(folder("vit"), table, "head", seed=s, weights="random") for s in (0, 0, 1))
    pretrained = load(folder("vit"), table, "head")
    assert a.fingerprint == b.fingerprint
    assert len({a.fingerprint, c.fingerprint, pretrained.fingerprint}) == 3
    assert a.params().sha256() == pretrained.params().sha256()  # the head does not depend on the backbone


def test_fingerprint_sees_every_weight_and_the_configuration(folder):
    model = load(folder("vit"), images(), "head")
    state, config = model.module.state_dict(), model.module.config.to_diff_dict()
    print_ = fingerprint(state, config, ["classifier"])
    assert print_ == model.fingerprint
    name = "vit.layers.1.attention.q_proj.weight"
    assert fingerprint(state | {name: state[name] + 1e-6}, config, ["classifier"]) != print_
    assert fingerprint(state, config | {"layer_norm_eps": 0.5}, ["classifier"]) != print_
    assert fingerprint(state | {"classifier.bias": torch.ones(3)}, config, ["classifier"]) == print_
    assert fingerprint(state, config | {"_name_or_path": "elsewhere"}, ["classifier"]) == print_


def test_params_and_load_are_inverse(folder):
    model = load(folder("bert"), sentences(), "lora")
    w = model.params()
    assert w.layout is model.layout
    assert tuple(w) == model.names
    model.load(2.0 * w + 1.0 * w)
    assert (model.params() - 3.0 * w).norm() == 0
    model.load(w)
    assert model.params().sha256() == w.sha256()
    live = model.live()
    with torch.no_grad():
        next(iter(live.values())).add_(1)
    assert model.params().sha256() != w.sha256()  # live tensors are the model's own
    assert w[model.names[0]].equal(w[model.names[0]].clone())


def test_load_refuses_other_names_shapes_and_dtypes():
    table = vectors()
    model = load("features", table)
    w = model.params()
    with pytest.raises(KeyError, match=r"head\.bias"):
        model.load(w.only(["head.weight"]))
    with pytest.raises(ValueError, match=r"head\.weight"):
        model.load(type(w)({"head.weight": torch.zeros(3, 9), "head.bias": torch.zeros(3)}))
    with pytest.raises(ValueError, match="float64"):
        model.load(type(w)({"head.weight": torch.zeros(3, 4).double(), "head.bias": torch.zeros(3)}))


def test_features_are_a_linear_softmax():
    table = vectors()
    model = load("features", table)
    assert model.adaptation == "head"
    assert model.names == ("head.weight", "head.bias")
    rows = model.prepare(table, [4, 1])
    assert model.encode(rows) is rows
    w = model.params()
    expected = torch.from_numpy(table.inputs[[4, 1]]) @ w["head.weight"].T + w["head.bias"]
    torch.testing.assert_close(model.predict(rows), expected)
    assert model.features(rows).equal(torch.from_numpy(table.inputs[[4, 1]]))


def _nano(*a, **k):
    return ModelSpec("nano-vit", adaptation=AdaptationSpec(*a, **k))


@pytest.mark.parametrize(
    ("spec", "where", "right"),
    [
        (ModelSpec(""), "model.name", "nano-vit"),
        (ModelSpec("nano-vit", weights="trained"), "model.weights", '"pretrained" or "random"'),
        (ModelSpec("nano-vit", task="classification2"), "model.task", 'did you mean "classification"'),
        (ModelSpec("nano-vit", dtype="float8"), "model.dtype", "float32"),
        (ModelSpec("nano-vit", max_length=1), "model.max_length", "at least 2"),
        (_nano("lara"), "model.adaptation.name", 'did you mean "lora"'),
        (_nano("lora", rank=0), "model.adaptation.rank", "a whole number from 1 to 65536"),
        (_nano("lora", alpha=-1.0), "model.adaptation.alpha", "a finite number above 0"),
        (_nano("lora", dropout=1.0), "model.adaptation.dropout", r"a number in \[0, 1\)"),
        (_nano("top_layers", layers=0), "model.adaptation.layers", "at least 1"),
        (ModelSpec("nano-vit", device="tpu9"), "model.device", "cuda"),
    ],
)
def test_values_out_of_bounds_are_refused_with_place_and_remedy(spec, where, right):
    with pytest.raises(InputError, match=rf"{where}.*({right})"):
        check(spec, "model")


@pytest.mark.parametrize(
    ("spec", "table", "where", "right"),
    [
        (ModelSpec("nano-vot"), images(), "model.name", 'did you mean "nano-vit"'),
        (ModelSpec("/no/such/folder"), images(), "model.name", "a folder, a hub id"),
        (ModelSpec("nobody/nothing-xyz"), images(), "model.name", "hub id.*HF_HUB_OFFLINE is set"),
        (ModelSpec("features"), images(), "model.name", "a model that reads them"),
        (ModelSpec("nano-vit"), vectors(), "model.name", '"features"'),
        (ModelSpec("nano-vit"), sentences(), "model.name", "reads images"),
        (ModelSpec("nano-vit", task="instruction"), images(), "model.task", "kind instruction"),
        (ModelSpec("nano-vit", task="zero_shot"), images(), "model.name", "CLIP"),
        (ModelSpec("nano-vit", device="tpu9"), images(), "model.device", "cuda"),
        (_nano("lora", layers=9), images(), "model.adaptation.layers", "8 blocks"),
        (_nano("lora", targets=("kw",)), images(), "model.adaptation.targets", "k_proj"),
    ],
)
def test_wrong_specifications_are_refused_with_place_and_remedy(spec, table, where, right):
    with pytest.raises(InputError, match=rf"{where}.*({right})") as caught:
        load_model(spec, classes=table.classes, kind=table.kind, feature_dim=4)
    assert "\n" not in str(caught.value)


def test_folders_without_a_safe_model_are_refused(folder, tmp_path):
    with pytest.raises(InputError, match="no config"):
        load(tmp_path, images())
    (tmp_path / "config.json").write_text((folder("vit") / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(InputError, match=r"pytorch_model\.bin.*expected model\.safetensors"):
        load(tmp_path, images())
    load(tmp_path, images(), "head", weights="random")  # needs no weights
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path, images())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path, images())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t9"}))
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path, images())
    with pytest.raises(InputError, match="of type 'gpt2', which reads text: it does not fit data of kind image"):
        load(folder("gpt2"), images())
    other = tmp_path / "weights.bin"
    other.write_bytes(b"")
    with pytest.raises(InputError, match="is a file"):
        locate(str(other))


def test_classification_needs_classes():
    with pytest.raises(InputError, match=r"data\.label"):
        load_model(ModelSpec("nano-vit"), classes=(), kind="image")


def test_nano_vit_knows_its_classes_and_colours():
    model = load("nano-vit", images(), "lora")
    assert model.classes == CLASSES
    assert model.module.config.id2label == dict(enumerate(CLASSES))
    grey, colour = images(channels=1), images(channels=3)
    assert model.prepare(grey, range(5)).tensors["pixel_values"].shape == (5, 3, 32, 32)
    assert model.prepare(colour, [2]).tensors["pixel_values"].shape == (1, 3, 32, 32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("adaptation", ["head", "lora"])
def test_half_precision_trains_in_single(folder, dtype, adaptation):
    table = sentences()
    model = load(folder("bert"), table, adaptation, dtype=dtype)
    assert {str(t.dtype) for t in model.params().values()} == {"torch.float32"}
    rows = model.prepare(table, range(5))
    model.loss(rows.batch(range(5))).backward()
    exact = load(folder("bert"), table, adaptation)
    torch.testing.assert_close(model.predict(rows), exact.predict(rows), atol=0.02, rtol=0.1)


def test_full_and_half_precision_of_a_picture_model(folder):
    table = images()
    model = load(folder("vit"), table, "full", dtype="bfloat16")
    assert {t.dtype for t in model.params().values()} == {torch.float32}
    model.loss(model.prepare(table, range(5)).batch(range(5))).backward()


@pytest.mark.proof
# --- real weights -----------------------------------------------------------------------------------------------------
def test_real_vit_keeps_its_backbone():
    from safetensors.torch import load_file

    path = real("vit_tiny_patch16_224")
    table = images(3, 32)
    model = load(path, table, "head")
    saved = load_file(path / "model.safetensors")
    state = model.module.state_dict()
    old, new = "vit.encoder.layer.11.attention.attention.query.weight", "vit.layers.11.attention.q_proj.weight"
    assert torch.equal(state[new], saved[old].float())
    ours = sum(t.double().abs().sum() for n, t in state.items() if not n.startswith("classifier"))
    theirs = sum(t.double().abs().sum() for n, t in saved.items() if not n.startswith("classifier"))
    assert ours == pytest.approx(theirs)
    rows = model.prepare(table, range(3))
    assert rows.tensors["pixel_values"].shape == (3, 3, 224, 224)
    assert model.encode(rows).tensors["features"].shape == (3, 192)


def test_real_language_model_speaks_english(folder):
    path = real("stories260K-llama")
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her mom.\n"
    table = prose()
    table.inputs[:] = [text] * len(table)
    model = load(path, table, "lora")
    assert evaluate(model, model.prepare(table, range(2)))["perplexity"] < 6
    noise = "".join(np.random.default_rng(0).permutation(list(text)))
    table.inputs[:] = [noise] * len(table)
    assert evaluate(model, model.prepare(table, range(2)))["perplexity"] > 60


def test_minilm_groups_what_means_the_same():
    texts = ["my card was stolen", "somebody stole my credit card", "the weather is lovely today"]
    table = sentences(3)
    table.inputs[:] = texts
    model = load(minilm(), table, "head")
    assert len(model.parts.blocks) == 6
    f = torch.nn.functional.normalize(model.blocks(model.prepare(table, range(3)))[-1][:, 0], dim=-1)
    assert f[0] @ f[1] > f[0] @ f[2]
    assert load(minilm(), table, "lora").params().layout.nbytes < 400_000


HEADS = {  # class that wrote a checkpoint -> family of its base
    "BertForSequenceClassification": "bert",
    "RobertaForSequenceClassification": "roberta",
    "GPT2ForSequenceClassification": "gpt2",
}


@pytest.mark.each_value
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("adaptation", ["head", "lora", "full"])
def test_a_notice_states_that_a_trained_head_is_drawn_again(folder, tmp_path, kind, adaptation):
    import transformers

    base, table = folder(HEADS[kind]), sentences()
    said = "has a trained head .* with as many outputs as there are classes here: a new head replaces it"
    with quiet():
        for classes in (3, 5):
            module = getattr(transformers, kind).from_pretrained(base, num_labels=classes)
            module.save_pretrained(tmp_path / str(classes))
            transformers.AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / str(classes))
    found = [load(path, table, adaptation).notices for path in (tmp_path / "3", tmp_path / "5", base)]
    assert [sum(bool(re.search(said, text)) for text in notices) for notices in found] == [1, 0, 0]


@pytest.mark.parametrize(
    ("family", "adaptation", "rest"),
    [
        ("roberta", "head", "classifier.dense"),
        ("roberta", "lora", ""),
        ("distilbert", "head", "pre_classifier"),
        ("bert", "head", ""),
        ("vit", "head", ""),
    ],
)
def test_parts_of_a_new_head_that_are_not_trained_are_reported(folder, family, adaptation, rest):
    model = load(folder(family), table_for(family), adaptation)
    found = [text for text in model.notices if "stay random; lora" in text]
    assert len(found) == bool(rest)
    assert all(f"the new values in {rest} stay" in text for text in found)
