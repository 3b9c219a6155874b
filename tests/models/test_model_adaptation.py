"""What is trainable under each adaptation: names and numbers."""

import dataclasses

import pytest
import torch
from tiny_models import images, load, prose, real, sentences

from fedfm.config.experiment import Experiment
from fedfm.errors import InputError
from fedfm.models.adapters.lora import need
from fedfm.models.export import export
from fedfm.models.spec import AdaptationSpec

L, D, C, R, F = 3, 16, 3, 2, 24  # blocks, width, classes, rank, width of the feed-forward layers
HEAD = D * C + C
BLOCK = 4 * (D * D + D) + (D * F + F) + (F * D + D) + 4 * D
PREFIX = "base_model.model."


def size(model):
    return sum(model.layout.sizes.values())


@pytest.mark.parametrize(
    ("spec", "tensors", "entries"),
    [
        (AdaptationSpec("head"), 2, HEAD),
        (AdaptationSpec("lora", rank=R), 4 * L + 2, 2 * L * 2 * D * R + HEAD),
        (AdaptationSpec("lora", rank=R, layers=1), 4 + 2, 2 * 2 * D * R + HEAD),
        (AdaptationSpec("lora", rank=R, targets=("k_proj",)), 2 * L + 2, L * 2 * D * R + HEAD),
        (AdaptationSpec("ffa_lora", rank=R), 2 * L + 2, 2 * L * D * R + HEAD),
        (AdaptationSpec("top_layers", layers=1), 16 + 2 + 2, BLOCK + 2 * D + HEAD),
        (AdaptationSpec("top_layers", layers=2), 2 * 16 + 2 + 2, 2 * BLOCK + 2 * D + HEAD),
    ],
)
def test_names_and_counts(folder, spec, tensors, entries):
    model = load(folder("vit"), images(), spec)
    assert len(model.names) == tensors
    assert size(model) == entries
    order = [n for n, p in model.module.named_parameters() if p.requires_grad]
    assert list(model.names) == order
    assert set(model.live()) == set(order)


def test_full_trains_everything(folder):
    model = load(folder("vit"), images(), "full")
    assert list(model.names) == [n for n, _ in model.module.named_parameters()]


def test_lora_names_are_those_of_peft(folder):
    model = load(folder("vit"), images(), "lora")
    assert model.names[0] == f"{PREFIX}vit.layers.0.attention.q_proj.lora_A.default.weight"
    assert model.names[-1] == f"{PREFIX}classifier.modules_to_save.default.bias"
    assert model.spec.adaptation.alpha == 4.0  # twice the rank
    scaling = {m.scaling["default"] for m in model.module.modules() if hasattr(m, "lora_A")}
    assert scaling == {2.0}


def test_restricted_lora_sits_in_the_last_blocks(folder):
    model = load(folder("gpt2"), sentences(), AdaptationSpec("lora", rank=R, layers=2))
    assert {n.split(".h.")[1].split(".")[0] for n in model.names if ".h." in n} == {"1", "2"}


def test_ffa_lora_keeps_a_at_its_first_value(folder):
    lora, ffa = (load(folder("vit"), images(), n) for n in ("lora", "ffa_lora"))
    own = dict(ffa.module.named_parameters())
    assert not any("lora_A" in n for n in ffa.names)
    for name, tensor in lora.params().items():
        assert torch.equal(own[name], tensor)


def test_language_models_train_no_head(folder):
    model = load(folder("llama"), prose(), "lora")
    assert model.head is None
    assert all("lora" in n for n in model.names)
    with pytest.raises(InputError, match="'head' needs a classification head"):
        load(folder("llama"), prose(), "head")
    with pytest.raises(ValueError, match="no linear head"):
        model.features(model.prepare(prose(), range(2)))


def test_tied_embeddings_travel_once(folder):
    model = load(folder("gpt2"), prose(), "full")
    assert "transformer.wte.weight" in model.names
    assert "lm_head.weight" not in model.names


def test_an_unknown_adaptation_is_refused(folder):
    with pytest.raises(InputError, match="prompt"):
        load(folder("vit"), images(), "prompt")


@pytest.mark.parametrize(
    ("name", "family", "targets", "layers", "says"),
    [
        ("lora", "vit", ("layernorm_before",), None, "LayerNorm, which lora cannot adapt: it has fc1, fc2, k_proj"),
        ("lora", "vit", ("classifier",), None, "classifier is a new module and trained without LoRA"),
        ("lora", "vit", ("",), None, "no module '' in this model"),
        ("lora", "vit", ("projection",), 1, r"none of projection is in the last 1 of 3 blocks"),
        ("lora", "gpt2", ("nope",), None, "it has c_attn, c_fc, c_proj"),
        ("ffa_lora", "bert", ("word_embeddings",), None, "is of type Embedding, which ffa_lora cannot"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(folder, name, family, targets, layers, says):
    spec = AdaptationSpec(name, rank=R, targets=targets, layers=layers)
    with pytest.raises(InputError, match=rf"model\.adaptation\.targets: .*{says}"):
        load(folder(family), images() if family == "vit" else sentences(), spec)


def adapted_map(model, end):
    """(input, output) of an adapted map with B drawn anew, and the module."""
    module = next(m for n, m in model.module.named_modules() if n.endswith(end) and hasattr(m, "lora_A"))
    torch.manual_seed(1)
    with torch.no_grad():
        module.lora_B["default"].weight.normal_()
        x = torch.randn(4, D)
        return x, module(x), module


@pytest.mark.parametrize(
    ("options", "scale"), [({"dora": True}, 4.0 / R), ({"rslora": True}, 4.0 / R**0.5), ({}, 4.0 / R)]
)
def test_dora_and_rslora_compute_what_their_papers_say(folder, options, scale):
    """DoRA, equation 5: m (W_0 + s B A) / ||W_0 + s B A||, norms by row; rsLoRA, equation 1: s = alpha / sqrt(r)."""
    model = load(folder("vit"), images(), AdaptationSpec("lora", rank=R, alpha=4.0, **options))
    x, y, module = adapted_map(model, "layers.1.attention.q_proj")
    W, bias = module.base_layer.weight, module.base_layer.bias
    V = W + scale * module.lora_B["default"].weight @ module.lora_A["default"].weight
    if "dora" in options:
        V = W.norm(dim=1, keepdim=True) * V / V.norm(dim=1, keepdim=True)  # m starts at the norms of W_0
        assert sum("magnitude" in name for name in model.names) == 2 * L
    torch.testing.assert_close(y, x @ V.T + bias, rtol=1e-4, atol=1e-5)


def test_all_linear_maps_but_the_head(folder):
    for family, maps in (("vit", 6 * L), ("roberta", 6 * L), ("gpt2", 4 * L)):
        table = images() if family == "vit" else sentences()
        model = load(folder(family), table, AdaptationSpec("lora", rank=R, targets=("all-linear",)))
        assert len([n for n in model.names if "lora_A" in n]) == maps
    tables = {"model": {"name": "nano-vit", "adaptation": {"name": "lora", "targets": "all-linear"}}}
    tables |= {"data": {"name": "digits"}, "method": {"name": "fedavg"}}
    assert Experiment.from_dict(tables).model.adaptation.targets == ("all-linear",)
    tables["model"]["adaptation"]["targets"] = "all"
    with pytest.raises(InputError, match=r"model\.adaptation\.targets"):
        Experiment.from_dict(tables)


def test_a_rank_for_each_kind_of_map(folder):
    spec = AdaptationSpec("lora", rank=R, targets=("q_proj", "fc2"), rank_pattern={"fc2": 5})
    model = load(folder("vit"), images(), spec)
    ranks = {n.split(".lora_A")[0].split(".")[-1]: model.layout.slots[n][3][0] for n in model.names if "lora_A" in n}
    assert ranks == {"q_proj": R, "fc2": 5}
    for key in ("fc1", "q_proj.fc2"):
        spec = AdaptationSpec("lora", rank=R, targets=("q_proj", "fc2"), rank_pattern={"fc2": 5, key: 3})
        said = f"rank_pattern: no adapted module's name ends with '{key}': the names end with fc2"
        with pytest.raises(InputError, match=said):
            load(folder("vit"), images(), spec)


@pytest.mark.each_value
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("expression", ["(.*.*.*)*x", "fc[12]", "fc2$", "a|b", ""])
def test_an_expression_in_place_of_a_name_is_refused_and_never_tried(key, expression):
    """PEFT compiles these keys, and an expression can take longer than any run."""
    with pytest.raises(InputError, match=rf"model\.adaptation\.{key} = .*not expressions"):
        load("nano-vit", images(), AdaptationSpec("lora", rank=R, **{key: {expression: 3}}))
    with pytest.raises(InputError, match="at most 512"):
        load("nano-vit", images(), AdaptationSpec("lora", rank=R, **{key: {f"fc{i}": 3 for i in range(513)}}))


def test_alphas_exclusions_and_the_start_are_pefts(folder, tmp_path):
    """The exported adapter, which PEFT loads onto the folder, gives the model's logits."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    from fedfm.models.quiet import quiet

    spec = AdaptationSpec(
        "lora",
        rank=R,
        alpha=4.0,
        targets=("all-linear",),
        rank_pattern={"key": 3},
        alpha_pattern={"value": 9.0, "layer.1.attention.self.query": 1.5},
        exclude_modules=("intermediate.dense", "layer.0.output.dense"),
        init_lora_weights="gaussian",
    )
    model = load(folder("roberta"), sentences(), spec)
    plain = load(folder("roberta"), sentences(), dataclasses.replace(spec, init_lora_weights="default"))
    a = [n for n in model.names if "lora_A" in n]
    assert len(a) == 6 * L - L - 1
    assert not any("intermediate" in n for n in a)
    assert not any(torch.equal(model.params()[n], plain.params()[n]) for n in a)
    scales = {
        n: m.scaling["default"] for n, m in model.module.named_modules() if hasattr(m, "scaling") and "query" in n
    }
    assert sorted(set(scales.values())) == pytest.approx(sorted({1.5 / R, 4.0 / R}))
    with torch.no_grad():
        torch.manual_seed(3)
        for p in model.live().values():
            p.add_(0.3 * torch.randn(p.shape))
    rows = model.prepare(sentences(), range(5))
    expected = model.predict(rows)
    export(model, model.params(), "peft", tmp_path / "peft")
    base = AutoModelForSequenceClassification.from_pretrained(folder("roberta"), num_labels=len(model.classes))
    with quiet():
        theirs = PeftModel.from_pretrained(base, str(tmp_path / "peft")).eval()
    batch = rows.to_padded().batch(range(5))
    with torch.no_grad():
        found = theirs(**{k: v for k, v in batch.items() if k != "labels"}).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alpha_pattern": {"nosuch": 2.0}}, "alpha_pattern: no adapted module's name ends with 'nosuch'"),
        ({"exclude_modules": ("fc1",)}, "exclude_modules: no target's name ends with 'fc1'"),
        ({"exclude_modules": ("q_proj", "v_proj")}, "leaves no module to adapt"),
        (
            {"exclude_modules": ("layers.0.attention.q_proj",), "alpha_pattern": {"layers.0.attention.q_proj": 2.0}},
            "alpha_pattern: no adapted",
        ),
        ({"bias": "all"}, "it trains biases of the base, which must"),
        ({"bias": "lora_only"}, "it trains biases of the base, which must"),
        ({"init_lora_weights": "pissa"}, "moves a part of the base's weights"),
        ({"init_lora_weights": "olora"}, "moves a part of the base's weights"),
        ({"init_lora_weights": "eva"}, "reads rows before the start"),
        ({"init_lora_weights": "random"}, "B starts at random"),
    ],
)
def test_targets_without_a_module_and_changes_of_the_base_are_refused(folder, options, words):
    with pytest.raises(InputError, match=words):
        load(folder("vit"), images(), AdaptationSpec("lora", rank=R, **options))


def test_the_starts_of_peft_in_a_file():
    tables = {"model": {"name": "nano-vit", "adaptation": {"name": "lora"}}}
    tables |= {"data": {"name": "digits"}, "method": {"name": "fedavg"}}
    for value, text in ((True, "default"), ("gaussian", "gaussian"), (False, "random")):
        tables["model"]["adaptation"]["init_lora_weights"] = value
        assert Experiment.from_dict(tables).model.adaptation.init_lora_weights == text


@pytest.mark.parametrize(
    "options", [{"dora": True}, {"rslora": True}, {"rank_pattern": {"q_proj": 3}}, {"alpha_pattern": {"q_proj": 3.0}}]
)
def test_methods_that_multiply_factors_refuse_variants(folder, options):
    with pytest.raises(InputError, match="drop dora, rslora, rank_pattern and alpha_pattern"):
        need(load(folder("vit"), images(), AdaptationSpec("lora", rank=R, **options)))


def test_new_modules_are_left_out_of_targets(folder):
    # The pooler came with a head that this checkpoint does not have: "dense" means those of the blocks.
    model = load(folder("roberta"), sentences(), AdaptationSpec("lora", rank=R, targets=("dense",)))
    adapted = {n for n in model.names if "lora_A" in n}
    assert len(adapted) == 3 * L
    assert not any("classifier" in n for n in adapted)


def test_the_foundation_models_own_dropout_stays_off(folder, tmp_path):
    import json
    import shutil

    shutil.copytree(folder("bert"), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["hidden_dropout_prob"] > 0
    table = sentences()
    plain = load(tmp_path / "m", table, "lora")
    rows = plain.prepare(table, range(5)).batch(range(5))
    plain.train_mode()
    assert torch.equal(plain.logits(rows), plain.logits(rows))
    dropping = load(tmp_path / "m", table, AdaptationSpec("lora", rank=R, dropout=0.5))
    with torch.no_grad():  # B = 0 at the start hides the dropout
        for name, p in dropping.live().items():
            if "lora_B" in name:
                p.fill_(0.5)
    dropping.train_mode()
    assert not torch.equal(dropping.logits(rows), dropping.logits(rows))
    dropping.predict(dropping.prepare(table, range(5)))
    assert not torch.equal(dropping.logits(rows), dropping.logits(rows))  # predict gives the mode back
    dropping.eval_mode()
    assert torch.equal(dropping.logits(rows), dropping.logits(rows))


def test_batch_norms_statistics_travel_under_full_only(folder):
    table = images(8)
    full, head = load(folder("resnet"), table, "full"), load(folder("resnet"), table, "head")
    assert any(n.endswith("running_mean") for n in full.names)
    assert not any("running" in n for n in full.live())
    assert not any("running" in n for n in head.names)
    rows = full.prepare(table, range(8)).batch(range(8))
    before = full.params()
    full.eval_mode()
    full.logits(rows)
    assert full.params().sha256() == before.sha256()
    full.train_mode()
    full.logits(rows)
    moved = [n for n in full.names if not torch.equal(full.params()[n], before[n])]
    assert moved
    assert all("running" in n for n in moved)
    full.load(before)
    assert full.params().sha256() == before.sha256()


@pytest.mark.proof
def test_lora_learns_on_the_real_resnet():
    table = images(12)
    model = load(real("cifar10_resnet20.safetensors"), table, "lora")
    rows = model.prepare(table, range(12)).batch(range(12))
    optimiser = torch.optim.Adam(list(model.live().values()), lr=0.005)
    first = model.loss(rows).item()
    model.train_mode()
    for _ in range(20):
        optimiser.zero_grad()
        model.loss(rows).backward()
        optimiser.step()
    assert model.loss(rows).item() < 0.7 * first
