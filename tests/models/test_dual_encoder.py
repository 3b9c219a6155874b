"""Models of two encoders against plain calls of transformers and PEFT."""

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import images, load

import fedfm
from fedfm.api.predict import predict
from fedfm.core import tasks
from fedfm.errors import InputError
from fedfm.models import dual_encoder as dual
from fedfm.models.adapter_files import save_adapter
from fedfm.models.adapter_reading import load_adapter
from fedfm.models.adapters import adaptation
from fedfm.models.adapters.experts import Expert, experts
from fedfm.models.architectures.dual_encoder import DualEncoder, Prompts, tokenise, words_of
from fedfm.models.export import export
from fedfm.models.families import find
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.multiply_accumulates import per_sample
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.tasks.zero_shot import contrastive
from fedfm.training import packed
from tiny_clip import places, tokenizer

KINDS = ("clip", "siglip", "vtde")
CLASSES = ("fox", "small_dog", "bird")
TEMPLATES = ("a photo of a {}.", "the {}")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folder of a tiny model whose weights are large enough for the classes to differ."""
    return places(tmp_path_factory)


def table(n=5, classes=CLASSES):
    return replace(images(n), classes=classes)


def model_of(path, adapt="lora", n=5, classes=CLASSES, task="zero_shot", **spec):
    adapt = AdaptationSpec(adapt, rank=2, tokens=3) if isinstance(adapt, str) else adapt
    return load(path, table(n, classes), adapt, task=task, **spec)


def plain(path):
    from transformers import AutoModel

    with quiet():
        return AutoModel.from_pretrained(path).eval()


def tokens(path, texts):
    length = {"padding": "max_length", "max_length": 24} if "siglip" in str(path) else {"padding": True}
    with quiet():
        found = tokenizer()(texts, return_tensors="pt", **length)
    return {k: found[k] for k in ("input_ids", "attention_mask")}


def prompts(template=TEMPLATES[0]):
    return [template.format(c.replace("_", " ")) for c in CLASSES]


def moved(model, seed=0):
    """Weights far from the start."""
    generator = torch.Generator().manual_seed(seed)
    return type(model.params())(
        {n: t + 0.3 * torch.randn(t.shape, generator=generator) for n, t in model.params().items()}
    )


def bias_of(clip):
    return clip.logit_bias.detach() if hasattr(clip, "logit_bias") else 0.0


class Calls:
    """Counts the calls of modules."""

    def __init__(self, *modules):
        self.n = 0
        for module in modules:
            module.register_forward_hook(self)

    def __call__(self, *_):
        self.n += 1


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(place, kind):
    path = place(kind)
    clip = plain(path)
    for adapt in ("full", "lora", "head"):
        model = model_of(path, adapt)
        rows = model.prepare(table(), range(5))
        with torch.no_grad():
            whole = clip(pixel_values=rows.tensors["pixel_values"], **tokens(path, prompts()))
        right = whole.logits_per_image - bias_of(clip)
        assert right.std(1).min() > 0.05
        torch.testing.assert_close(model.predict(model.encode(rows)), right, rtol=1e-4, atol=1e-4)


def test_both_forms_of_a_zero_shot_classifier_give_the_same_bits(place):
    a, b = (model_of(place("clip"), adapt) for adapt in ("head", "lora"))
    rows = a.prepare(table(), range(5))
    assert torch.equal(a.predict(rows), b.predict(rows))


@pytest.mark.parametrize("adapt", ["full", "head"])
def test_several_templates_give_the_direction_of_their_mean(place, adapt):
    path = place("vtde")
    model, clip = model_of(path, adapt, templates=TEMPLATES), plain(path)
    rows = model.prepare(table(), range(5))
    with torch.no_grad():
        each = [clip.get_text_features(**tokens(path, prompts(t))).pooler_output for t in TEMPLATES]
        text = F.normalize(sum(F.normalize(e, dim=-1) for e in each) / 2, dim=-1)
        image = clip.get_image_features(pixel_values=rows.tensors["pixel_values"]).pooler_output
        right = clip.logit_scale.exp() * F.normalize(image, dim=-1) @ text.T
    torch.testing.assert_close(model.predict(rows), right, rtol=1e-4, atol=1e-4)


def test_the_scale_is_at_most_100_and_never_trained(place, tmp_path):
    clip = plain(place("siglip"))
    with torch.no_grad():
        clip.logit_scale.fill_(6.0)
    clip.save_pretrained(tmp_path)
    for file in place("siglip").glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for adapt in ("full", "lora"):
        model = model_of(tmp_path, adapt)
        assert float(model.dual.scale) == pytest.approx(100.0, rel=1e-6)
        assert not any("logit" in name for name in model.names)
    assert len(model_of(tmp_path, "full").names) == len(list(clip.parameters())) - 2


@pytest.mark.parametrize(
    ("kind", "vision", "text"),
    [
        ("clip", "vision_model.encoder.layers.{}.mlp.fc{}", "text_model.encoder.layers.{}.mlp.fc{}"),
        ("siglip", "vision_model.encoder.layers.{}.mlp.fc{}", "text_model.encoder.layers.{}.mlp.fc{}"),
        ("vtde", "vision_model.layers.{}.mlp.fc{}", "text_model.encoder.layer.{}.{}.dense"),
    ],
)
def test_lora_adapts_both_maps_of_every_mlp_unscaled(place, kind, vision, text):
    model = model_of(place(kind))
    maps = ("intermediate", "output") if kind == "vtde" else (1, 2)
    right = {vision.format(i, m) for i in range(3) for m in (1, 2)} | {
        text.format(i, m) for i in range(2) for m in maps
    }
    found = {n.removeprefix("base_model.model.clip.").partition(".lora_")[0] for n in model.names}
    assert found == right
    assert model.adaptation_spec.alpha == 2.0
    top = model_of(place(kind), AdaptationSpec("lora", rank=2, layers=1))
    assert {n.partition(".lora_")[0] for n in top.names} < {n.partition(".lora_")[0] for n in model.names}
    assert len(top.names) == 8  # A and B of two maps of one layer of two encoders


def adapted_by_hand(path, model, w):
    """PEFT on transformers' own model, with the tensors w."""
    from peft import LoraConfig, get_peft_model

    names = {n.removeprefix("base_model.model.clip.").partition(".lora_")[0] for n in w}
    with quiet():
        hand = get_peft_model(plain(path), LoraConfig(r=2, lora_alpha=2, target_modules=sorted(names)))
    state = {n.replace("base_model.model.clip.", "base_model.model."): t.clone() for n, t in w.items()}
    assert not hand.load_state_dict(state, strict=False).unexpected_keys
    return hand.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_peft_and_reach_both_encoders(place, kind):
    model = model_of(place(kind))
    w = moved(model)
    hand = adapted_by_hand(place(kind), model, w)
    model.load(w)
    rows = model.prepare(table(), range(5))
    model.train_mode()
    model.loss(rows.batch(range(5))).backward()
    out = hand(pixel_values=rows.tensors["pixel_values"], **tokens(place(kind), prompts()))
    F.cross_entropy(out.logits_per_image - bias_of(hand.base_model.model), rows.labels).backward()
    right = {n: p.grad for n, p in hand.named_parameters() if p.requires_grad}
    for name, p in model.live().items():
        expected = right[name.replace(".clip.", ".")]
        assert expected.abs().max() > 1e-6
        torch.testing.assert_close(p.grad, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_top_layers_are_blocks_of_both_encoders_and_the_projections(place, kind):
    model = model_of(place(kind), AdaptationSpec("top_layers", layers=1))
    modules = {n.removeprefix("clip.") for n in model.names}
    list_ = ("vision_model.layers.2", "text_model.encoder.layer.1")
    blocks = list_ if kind == "vtde" else ("vision_model.encoder.layers.2", "text_model.encoder.layers.1")
    ends = ("vision_model.head", "text_model.head") if kind == "siglip" else ("visual_projection", "text_projection")
    own = {n for n, _ in plain(place(kind)).named_parameters()}
    assert modules == {n for n in own if n.startswith(tuple(f"{p}." for p in (*blocks, *ends)))}
    assert all(any(n.startswith(f"{p}.") for n in modules) for p in (*blocks, *ends))
    rows = model.prepare(table(), range(5))
    model.loss(rows.batch(range(5))).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.live().values())
    assert all(any(p.grad.any() for n, p in model.live().items() if n.startswith(f"clip.{b}.")) for b in blocks)


def meta(kind):
    import transformers as t

    if kind == "clip":  # ViT-B/16
        vision = {"patch_size": 16}
        return t.CLIPModel(t.CLIPConfig(vision_config=vision, text_config={"eos_token_id": 49407}))
    tiny = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
    mini = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    two = t.ViTConfig(**tiny), t.BertConfig(**mini)
    return t.VisionTextDualEncoderModel(t.VisionTextDualEncoderConfig.from_vision_text_configs(*two))


@pytest.mark.parametrize(
    ("kind", "adapt", "numbers"), [("clip", "lora", 153_600), ("vtde", "lora", 46_080), ("clip", "prompt", 8_192)]
)
def test_numbers_that_travel_on_models_of_full_size(kind, adapt, numbers):
    with torch.device("meta"), quiet():
        ids = torch.zeros(1, 3, 24, dtype=torch.int64)
        module = DualEncoder(meta(kind), Prompts(ids, ids, range(1, 17) if adapt == "prompt" else range(0)))
        parts = find(module, module.config.model_type)
        spec = adaptation.with_defaults(AdaptationSpec(adapt, rank=1), "zero_shot")
        new = ["context"] if adapt == "prompt" else []
        adapted = adaptation.apply(module, spec, parts, new=new, task=tasks.find("zero_shot"), seed=0)
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == numbers
    if kind == "clip" and adapt == "lora":
        assert sum(p.numel() for n, p in adapted.named_parameters() if ".lora_" not in n) == 149_620_737


@pytest.mark.parametrize("kind", KINDS)
def test_written_prompts_are_read_next_to_a_learned_context(place, kind):
    model = model_of(place(kind), "prompt", templates=TEMPLATES)
    model.load(moved(model))
    with torch.no_grad():
        each = [plain(place(kind)).get_text_features(**tokens(place(kind), prompts(t))) for t in TEMPLATES]
    right = F.normalize(sum(F.normalize(out.pooler_output, dim=-1) for out in each), dim=-1)
    torch.testing.assert_close(model.written_texts(), right, rtol=1e-4, atol=1e-5)
    assert (model.dual.texts() - right).norm() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_learned_context_stands_between_the_start_and_the_name(place, kind):
    model = model_of(place(kind), "prompt")
    assert model.names == ("context.weight",)
    w = moved(model)
    model.load(w)
    clip, unused = plain(place(kind)), [20, 21, 22]
    with torch.no_grad():  # three words that no text has get the context as their embeddings
        clip.text_model.get_input_embeddings().weight[unused] = w["context.weight"]
    ends = tokens(place(kind), [f"{c.replace('_', ' ')}." for c in CLASSES])
    n = {k: v[:, :1] for k, v in ends.items()}, {k: v[:, 1:] for k, v in ends.items()}
    ids = torch.cat([n[0]["input_ids"], torch.tensor([unused] * 3), n[1]["input_ids"]], 1)
    mask = torch.cat([n[0]["attention_mask"], torch.ones(3, 3, dtype=torch.int64), n[1]["attention_mask"]], 1)
    if kind == "siglip":
        ids, mask = ids[:, :24], mask[:, :24]
    rows = model.prepare(table(), range(5))
    whole = clip(pixel_values=rows.tensors["pixel_values"], input_ids=ids, attention_mask=mask)
    right = whole.logits_per_image - bias_of(clip)
    torch.testing.assert_close(model.predict(rows), right.detach(), rtol=1e-4, atol=1e-4)

    words = clip.text_model.get_input_embeddings()
    words.weight.grad = None
    F.cross_entropy(right, rows.labels).backward()
    model.loss(rows.batch(range(5))).backward()
    torch.testing.assert_close(model.dual.context.weight.grad, words.weight.grad[unused], rtol=1e-3, atol=1e-6)


def test_the_first_context_is_seeded_and_small(place):
    def first(seed):
        model = load_model(
            ModelSpec(str(place("clip")), task="zero_shot", adaptation=AdaptationSpec("prompt", tokens=16)),
            classes=CLASSES,
            kind="image",
            seed=seed,
        )
        return model, model.params()["context.weight"]

    (a, x), (b, y), (_, z) = first(0), first(0), first(1)
    assert torch.equal(x, y)
    assert not torch.equal(x, z)
    assert x.shape == (16, 16)
    assert float(x.std()) == pytest.approx(0.02, rel=0.2)
    assert a.fingerprint == b.fingerprint


def test_texts_are_encoded_once_an_evaluation_and_once_a_batch_of_training(place):
    model = model_of(place("clip"), n=130)
    rows, calls = model.prepare(table(130), range(130)), Calls(model.dual.clip.text_model)
    before = model.predict(rows)
    assert calls.n == 1
    model.load(moved(model))
    assert not torch.allclose(before, model.predict(rows), atol=1e-3)
    assert calls.n == 2
    for _ in range(2):
        model.loss(rows.batch(range(5)))
    assert calls.n == 4


def test_frozen_encoders_are_not_computed_again(place):
    spec = AdaptationSpec("lora", rank=2, targets=("visual_projection",))
    model = model_of(place("clip"), spec)
    calls, rows = Calls(model.dual.clip.text_model), model.prepare(table(), range(5))
    model.loss(rows.batch(range(5))).backward()
    model.predict(rows)
    assert calls.n == 0
    assert model.encode(rows) is rows

    model = model_of(place("clip"), "prompt")
    calls = Calls(model.dual.clip.vision_model)
    encoded = model.encode(rows)
    assert calls.n == 1
    torch.testing.assert_close(encoded.tensors["features"].norm(dim=1), torch.ones(5))
    torch.testing.assert_close(model.predict(encoded), model.predict(rows), rtol=1e-4, atol=1e-4)
    calls.n = 0
    model.loss(encoded.batch(range(5))).backward()
    assert calls.n == 0
    assert model.dual.context.weight.grad.any()


# --- the boundary between two experts ---------------------------------------------------------------------------------


def boundary_states(model, w, rows, k):
    """The pictures' and the prompts' states below the top k blocks, with the LoRA tensors w."""
    with dual.install(model, w) as own:
        return dual.boundary_images(own, rows, k), dual.boundary_texts(own, k)


def top(model, states, k, *, train):
    images, texts = states
    return dual.top_images(model, images, k, train=train), dual.top_texts(model, texts, k, train=train)


@pytest.mark.each_value
@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_starting_above_the_frozen_blocks_gives_the_bits_of_the_full_forward(place, kind, k):
    model = model_of(place(kind), n=32, templates=TEMPLATES)
    w_g = moved(model)
    rows = model.prepare(table(32), range(32))
    start = model.params()
    states = boundary_states(model, w_g, rows, k)
    v, t = dual.expert_features(model, w_g, rows), dual.expert_texts(model, w_g)
    assert model.params().sha256() == start.sha256()

    active = dual.active_layers(model, k)
    depths = {len(encoder) - min(k, len(encoder)) for encoder in model.parts.encoders}
    assert {int(path.rpartition(".")[2]) for path in active} >= depths
    assert len(active) == sum(min(k, len(encoder)) for encoder in model.parts.encoders)
    other = moved(model, seed=1)  # another expert, which agrees below the boundary
    w_i = type(w_g)({n: (other if any(f".{p}." in n for p in active) else w_g)[n] for n in w_g})
    for w, train in ((w_g, False), (w_i, False), (w_i, True)):
        model.load(w)
        v, t = dual.expert_features(model, w, rows), dual.expert_texts(model, w)
        found = top(model, states, k, train=train)
        assert torch.equal(found[0], v)
        assert torch.equal(found[1], t)
        assert found[0].requires_grad == found[1].requires_grad == train
    assert not torch.allclose(v, dual.expert_features(model, w_g, rows), atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_top_blocks_run_and_learn_as_in_the_full_forward(place, kind):
    model = model_of(place(kind), n=32)
    w = moved(model)
    model.load(w)
    rows = model.prepare(table(32), range(32))
    blocks = [dict(encoder) for encoder in model.parts.encoders]
    maps = [[[m for n, m in b.named_modules() if n.endswith(".base_layer")] for b in e.values()] for e in blocks]
    lower, upper = (Calls(*(m for e in maps for b in e[s] for m in b)) for s in (slice(-1), slice(-1, None)))
    states = boundary_states(model, w, rows, 1)
    assert lower.n == 2 * (2 + 1)
    assert upper.n == 0
    v, t = top(model, states, 1, train=True)
    assert lower.n == 2 * (2 + 1)
    assert upper.n == 4
    F.cross_entropy(model.dual.scale * v @ t.T, rows.labels).backward()
    found = {n: p.grad for n, p in model.live().items()}
    assert {n for n, g in found.items() if g is not None} == {
        n for n in model.names if any(f".{p}." in n for p in dual.active_layers(model, 1))
    }
    for p in model.live().values():
        p.grad = None
    model.loss(rows.batch(range(32))).backward()
    for name, grad in found.items():
        if grad is not None:
            assert grad.any()
            torch.testing.assert_close(grad, model.live()[name].grad, rtol=1e-4, atol=1e-6)


def test_dropout_is_on_in_the_top_blocks_alone(place):
    spec = AdaptationSpec("lora", rank=2, dropout=0.5)
    model = model_of(place("vtde"), spec, n=32)
    w = moved(model)
    model.load(w)
    rows = model.prepare(table(32), range(32))
    states = boundary_states(model, w, rows, 1)
    assert torch.equal(boundary_states(model, w, rows, 1)[0], states[0])
    whole = dual.expert_features(model, w, rows), dual.expert_texts(model, w)
    again = top(model, states, 1, train=False)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    torch.manual_seed(0)
    first = top(model, states, 1, train=True)
    assert all(not torch.equal(a, b) for a, b in zip(whole, first, strict=True))
    assert all(not torch.equal(a, b) for a, b in zip(top(model, states, 1, train=True), first, strict=True))
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(top(model, states, 1, train=True), first, strict=True))
    model.eval_mode()


@pytest.mark.parametrize("kind", KINDS)
def test_with_dropout_the_bits_are_those_of_an_expert_trained_in_its_top_blocks(place, kind):
    model = model_of(place(kind), AdaptationSpec("lora", rank=2, dropout=0.5), n=32)
    w = moved(model)
    model.load(w)
    rows = model.prepare(table(32), range(32))
    states, active = boundary_states(model, w, rows, 2), dual.active_layers(model, 2)
    with experts(model, {"local": Expert(trained=active)}):
        model.train_mode()
        torch.manual_seed(0)
        whole = model.logits(rows.batch(range(32)))
        torch.manual_seed(0)
        v, t = top(model, states, 2, train=True)
        assert torch.equal(F.linear(v, model.dual.scale * t), whole)
        assert whole.requires_grad
        model.eval_mode()


def test_states_of_some_rows(place):
    model = model_of(place("clip"), n=40)
    w = moved(model)
    model.load(w)
    rows = model.prepare(table(40), range(40))
    states = boundary_states(model, w, rows, 2)
    v, _ = top(model, (states[0][[33, 2]], states[1]), 2, train=False)
    torch.testing.assert_close(v, dual.expert_features(model, w, rows)[[33, 2]], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="at least 1"):
        boundary_states(model, w, rows, 0)
    with pytest.raises(InputError, match="needs a model of two encoders"):
        dual.need(load("nano-vit", images(side=32), "lora"))


# --- what does not go -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (("0", "1", "2"), r"data\.label: the classes are numbers \(0, 1, 2\).*name the classes in words"),
        (("fox", " ", "bird"), r"data\.label: class 1 of 3 is named \" \"; name the classes"),
        (("fox", "_", "bird"), r"data\.label: class 1 of 3"),
        (("dog", "fox", "dog"), r"data\.label: 2 classes are named \"dog\"; expected different"),
        (("small dog", "fox", "small_dog"), r"data\.label: 2 classes are named \"small dog\""),
    ],
)
@pytest.mark.parametrize("adapt", ["lora", "head", "prompt"])
def test_classes_that_a_text_encoder_cannot_tell_apart_are_refused(place, adapt, classes, message):
    with pytest.raises(InputError, match=message):
        model_of(place("clip"), adapt, classes=classes)


def test_one_class_and_numbers_among_words_are_legitimate():
    assert words_of(["fox"]) == ["fox"]
    assert words_of(["7", "new_york"]) == ["7", "new york"]


@pytest.mark.parametrize("template", ["a photo", "{} and {}", "a {0}", "a {x} of {}", ""])
def test_a_template_has_one_place_for_the_name(place, template):
    with pytest.raises(InputError, match=r"model\.templates\[1\] = .*texts with one \{\} for the class name"):
        model_of(place("clip"), templates=("a {}", template))
    with pytest.raises(InputError, match=r"model\.templates = \[\]"):
        model_of(place("clip"), templates=())


def test_prompts_that_do_not_fit_are_refused(place):
    with pytest.raises(InputError, match=r"model\.adaptation\.tokens = 30: .* expected at most 24"):
        model_of(place("clip"), AdaptationSpec("prompt", tokens=30))
    with pytest.raises(InputError, match=r"model\.templates: \"a a .* makes a prompt of 34 tokens"):
        model_of(place("clip"), templates=("a " * 29 + "{}.",))


def test_a_context_needs_class_names(place):
    with pytest.raises(InputError, match=r'"prompt" learns words before class names.*task = "zero_shot"'):
        model_of("nano-vit", "prompt", task="classification")


def test_models_without_two_encoders_are_refused(place, tmp_path):
    with pytest.raises(InputError, match=r"model\.name: .*two encoders.*'nano-vit' is of type 'ijepa'"):
        model_of("nano-vit")
    clip = plain(place("clip"))
    clip.config.save_pretrained(tmp_path)
    state = {n: t for n, t in clip.state_dict().items() if n != "text_projection.weight"}
    from safetensors.torch import save_file

    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    for file in place("clip").glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(InputError, match=r"lacks 1 of the \d+ tensors of a CLIPModel: text_projection\.weight"):
        model_of(tmp_path)


def test_context_starts_where_a_tokenizer_without_a_start_token_starts():
    from tokenizers import processors

    bare = tokenizer()
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", special_tokens=[("[SEP]", 3)]
    )
    with quiet():
        made = tokenise(bare, CLASSES, (), length=24, whole=True, context=4)
    assert made.context == range(4)
    assert made.input_ids.shape == (1, 3, 24)
    assert made.input_ids[0, 1, :9].tolist() == [13, 13, 13, 13, 9, 10, 12, 3, 0]
    assert made.attention_mask.sum(-1).tolist() == [[7, 8, 7]]


# --- beside training --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_goes_onto_transformers_own_model(place, tmp_path, kind):
    from peft import PeftModel

    model = model_of(place(kind))
    w = moved(model)
    rows = model.prepare(table(), range(5))
    export(model, w, "peft", tmp_path / "peft")
    assert load_adapter(model, tmp_path / "peft").sha256() == w.sha256()
    export(model, w, "hf", tmp_path / "hf")
    export(model, w, "torch", tmp_path / "torch")
    model.load(w)
    with quiet():
        two = PeftModel.from_pretrained(plain(place(kind)), str(tmp_path / "peft")).eval(), plain(tmp_path / "hf")
    for other in two:
        with torch.no_grad():
            whole = other(pixel_values=rows.tensors["pixel_values"], **tokens(place(kind), prompts()))
        bias = bias_of(other.get_base_model() if other is two[0] else other)
        torch.testing.assert_close(model.predict(rows), whole.logits_per_image - bias, rtol=1e-4, atol=1e-4)
    about = json.loads((tmp_path / "torch" / "fedfm.json").read_text())
    assert about["task"] == "zero_shot"
    assert about["classes"] == list(CLASSES)


def test_a_context_is_saved_and_not_exported_as_something_else(place, tmp_path):
    model = model_of(place("clip"), "prompt")
    w = moved(model)
    save_adapter(model, w, tmp_path / "a")
    assert load_adapter(model, tmp_path / "a").sha256() == w.sha256()
    export(model, w, "torch", tmp_path / "t")
    for to in ("hf", "peft"):
        with pytest.raises(InputError, match=f"--to {to}: .*use torch"):
            export(model, w, to, tmp_path / to)
    full = model_of(place("clip"), "top_layers")
    with pytest.raises(InputError, match="makes no PEFT adapter: use hf or torch"):
        export(full, full.params(), "peft", tmp_path / "p")


def test_fast_kernels_leave_two_encoders_to_the_general_loop(place):
    model = model_of(place("vtde"))
    rows = model.prepare(table(), range(5))
    assert type(model) is dual.DualModel
    assert issubclass(dual.DualModel, Model)
    assert not any(packed.applies(model, kernels) for kernels in packed.KERNELS)
    assert packed.predict(model, rows) is None


def test_costs_share_the_pass_over_the_names_among_a_batch(place):
    model = model_of(place("clip"), "full")
    rows = model.prepare(table(), range(5))
    d, hidden, m = 16, 24, 5  # tokens a picture
    layer = lambda t: 4 * t * d * d + 2 * t * d * hidden + 2 * t * t * d  # noqa: E731
    vision = (m - 1) * 3 * 8 * 8 * d + 3 * layer(m) + d * 12 + 3 * 12
    length = len(tokenizer()("a photo of a small dog.")["input_ids"])
    text = 3 * (2 * layer(length) + d * 12)
    assert per_sample(model, rows).training == vision + text
    assert per_sample(model, rows, 7).training == vision + -(-text // 7)
    prompt = model_of(place("clip"), "prompt")
    found = per_sample(prompt, rows, 7)
    length = 3 + len(tokenizer()("small dog.")["input_ids"])
    text = 3 * (2 * layer(length) + d * 12)
    assert (found.training, found.once) == (3 * 12 + -(-text // 7), vision - 3 * 12)


def npz(folder, classes=("fox", "dog", "bird"), n=60):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (n, 16, 16, 3)).astype(np.uint8), np.arange(n) % 3
    x[np.arange(n), :, :, y] = 255
    split = np.where(np.arange(n) % 4 == 0, "test", "train")
    named = {} if classes is None else {"classes": np.array(classes)}
    np.savez(folder / "rows.npz", x=x, y=y, split=split, **named)
    return folder / "rows.npz"


def experiment(path, data, adapt, workers, method=None):
    return {
        "data": {"path": str(data), "partition": {"name": "iid", "clients": 3}},
        "model": {"name": str(path), "task": "zero_shot", "adaptation": adapt},
        "method": method or {"name": "fedavg", "rounds": 2, "local": {"learning_rate": 0.5, "batch_size": 8}},
        "run": {"workers": workers, "seed": 3},
    }


@pytest.mark.sample("adapt1")
@pytest.mark.parametrize("adapt", [{"name": "lora", "rank": 1}, {"name": "prompt", "tokens": 4}])
def test_federated_runs_give_the_same_bits_with_any_number_of_workers(place, tmp_path, adapt):
    data, results = npz(tmp_path), []
    for workers in (1, 2):
        out = tmp_path / f"run{workers}"
        results.append(fedfm.run(experiment(place("clip"), data, adapt, workers), out))
    a, b = results
    assert a["params_sha256"] == b["params_sha256"]
    assert a["loss"] == b["loss"]
    start = fedfm.run(experiment(place("clip"), data, adapt, 1, {"name": "zero_shot"}), tmp_path / "start")
    assert a["params_sha256"] != start["params_sha256"]
    assert a["loss"] < start["loss"]
    said = predict(tmp_path / "run1", data)
    assert len(said["predictions"]) == 60
    assert set(said["predictions"]) <= {"fox", "dog", "bird"}


def test_rows_without_names_of_classes_are_refused_before_the_run(place, tmp_path):
    with pytest.raises(InputError, match=r"data\.label: the classes are numbers \(0, 1, 2\)"):
        fedfm.run(experiment(place("clip"), npz(tmp_path, None), {"name": "lora"}, 1), tmp_path / "run")


def test_the_experiment_refuses_templates_before_it_reads_anything(tmp_path):
    tables = experiment("nowhere", tmp_path / "none.npz", {"name": "lora"}, 1)
    tables["model"]["templates"] = ["a photo"]
    with pytest.raises(
        InputError, match=r"model\.templates\[0\] = \"a photo\": expected at most 512 texts with one \{\}"
    ):
        fedfm.run(tables, tmp_path / "run")


def test_alpha_of_two_encoders_is_the_rank_wherever_it_is_filled_in():
    from fedfm.config.experiment import Experiment
    from fedfm.models.adapters.lora import at_rank

    tables = experiment("x", "rows.npz", {"name": "lora", "rank": 3}, 1)
    (made := copy.deepcopy(tables))["model"].pop("task")
    assert Experiment(**tables).model.adaptation.alpha == 3
    assert Experiment(**made).model.adaptation.alpha == 6
    spec = ModelSpec("x", task="zero_shot", adaptation=AdaptationSpec("lora", rank=3))
    assert at_rank(spec, 5).adaptation.alpha == 3


def test_the_contrastive_loss_against_a_loop_over_pairs():
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 2, 2, 1, 0, 2])
    total = 0.0
    for i in range(6):
        equal = [j for j in range(6) if labels[j] == labels[i]]
        row = [float(logits[i, labels[j]]) for j in range(6)]  # picture i and the text of row j
        column = [float(logits[j, labels[i]]) for j in range(6)]  # picture j and the text of row i
        for scores in (row, column):
            norm = math.log(sum(map(math.exp, scores)))
            total += sum((norm - scores[j]) / len(equal) for j in equal) / 6
    assert float(contrastive(logits, labels)) == pytest.approx(total / 2, rel=1e-12)


def test_models_train_with_the_contrastive_loss_or_say_why_not(place):
    model = model_of(place("clip"), loss="contrastive")
    batch = model.prepare(table(), range(5)).batch(range(5))
    expected = contrastive(model.logits(batch), batch["labels"])
    assert torch.equal(model.loss(batch), expected)
    assert not torch.allclose(expected, F.cross_entropy(model.logits(batch), batch["labels"]))
    with pytest.raises(InputError, match=r'model.loss = "contrastive".*zero_shot'):
        model_of(place("clip"), "head", loss="contrastive")
    with pytest.raises(InputError, match=r'model.loss belongs to task "zero_shot"'):
        load("nano-vit", images(side=32), "lora", loss="contrastive")
