"""Pre-activation ResNets against the paper's formula, architectures without weights, options."""

import json

import pytest
import torch
import torch.nn.functional as F
from tiny_models import CLASSES, images, load, prose, save_tokenizer, sentences

from fedfm.errors import InputError
from fedfm.methods.fedbaf.matching import match
from fedfm.models.export import export
from fedfm.models.load import load_model
from fedfm.models.locate import BUILT_IN
from fedfm.models.spec import AdaptationSpec, ModelSpec

SMALL = {"widths": [4, 6], "blocks": [1, 2], "image_size": 8}


def small(seed=0, adaptation="full", **options):
    return load("preact-resnet-small", images(side=8), adaptation, seed, weights="random", options={**SMALL, **options})


def by_hand(w, x):
    """The network of ``SMALL`` written out with its tensors, in evaluation: He et al., Figure 1 (b)."""

    def bn(name, x):
        mean, var, scale, shift = (
            w[f"{name}.{k}"][:, None, None] for k in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 1e-5).sqrt() * scale + shift

    x = F.conv2d(x, w["stem.weight"], padding=1)
    for name, stride in (("sections.0.0", 1), ("sections.1.0", 2), ("sections.1.1", 1)):
        h = bn(f"{name}.bn1", x).clamp(min=0)
        shortcut = F.conv2d(h, w[f"{name}.shortcut.weight"], stride=stride) if f"{name}.shortcut.weight" in w else x
        y = F.conv2d(h, w[f"{name}.conv1.weight"], stride=stride, padding=1)
        x = shortcut + F.conv2d(bn(f"{name}.bn2", y).clamp(min=0), w[f"{name}.conv2.weight"], padding=1)
    return bn("bn", x).clamp(min=0).mean((2, 3)) @ w["fc.weight"].T + w["fc.bias"]


def stirred(model):
    """The model with every tensor, also the running statistics, away from its first value."""
    torch.manual_seed(3)
    model.load(model.params().map(lambda t: t + 0.1 * torch.rand_like(t)))
    return model


def test_the_forward_pass_is_the_papers():
    model = stirred(small())
    rows = model.prepare(images(side=8), range(5))
    expected = by_hand(dict(model.params()), rows.tensors["pixel_values"])
    torch.testing.assert_close(model.predict(rows), expected, rtol=1e-4, atol=1e-5)


def test_table_2_has_its_size():
    model = load("preact-resnet", images(side=32), "full", weights="random")
    size = 3 * 64 * 9 + 2 * 512 + 512 * 3 + 3  # stem, last norm, fc
    before = 64
    for c in (64, 128, 256, 512):
        size += 2 * before + before * c * 9 + 2 * c + c * c * 9 + (before * c if before != c else 0)
        size += 2 * (2 * c + c * c * 9)
        before = c
    assert sum(p.numel() for p in model.module.parameters()) == size
    assert [path for path, _ in model.parts.blocks] == [f"sections.{s}.{i}" for s in range(4) for i in range(2)]
    shapes = [tuple(b.shape) for b in model.blocks(model.prepare(images(side=32), [0]))]
    assert shapes == [(1, 1024, 64)] * 3 + [(1, 256, 128)] * 2 + [(1, 64, 256)] * 2 + [(1, 16, 512)] * 2
    assert model.head is model.module.fc
    assert model.parts.embedding is model.module.stem


def test_a_saved_folder_is_read_again_with_its_statistics(tmp_path):
    model = stirred(small())
    folder = export(model, model.params(), "hf", tmp_path / "net")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "fedfm_preact_resnet"
    again = load(folder, images(side=8), "full")
    for name, tensor in model.params().items():
        # The head is new for every task.
        assert torch.equal(again.params()[name], tensor) == (not name.startswith("fc.")), name
    other = load_model(
        ModelSpec(str(folder), adaptation=AdaptationSpec("full")), classes=("a", "b", "c", "d"), kind="image"
    )
    assert other.params()["fc.weight"].shape == (4, 6)
    assert torch.equal(other.params()["bn.running_var"], model.params()["bn.running_var"])
    assert other.predict(other.prepare(images(side=8), []).take([])).shape[0] == 0


def test_random_weights_derive_from_the_seed_alone():
    first = small().params().sha256()
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    assert small().params().sha256() == first != small(seed=1).params().sha256()
    assert torch.equal(torch.random.get_rng_state(), state)
    w = load("preact-resnet", images(side=8), "full", weights="random").params()["sections.3.1.conv2.weight"]
    assert float(w.std()) == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)  # He et al. 2015, fan out


def test_a_deeper_and_wider_foundation_matches_by_section_and_block(tmp_path):
    big = small(widths=[8, 8, 8], blocks=[2, 2, 1])
    folder = export(big, big.params(), "hf", tmp_path / "big")
    mine = small()
    found = {m.name: m for m in match(mine, str(folder)).table}
    assert found["sections.1.1.conv2.weight"].region == (6, 6, 3, 3)
    assert found["stem.weight"].region is None  # the input layer is never sliced
    assert found["fc.weight"].region is None
    assert not any(name.startswith("sections.2") for name in found)


def test_lora_takes_the_convolutions():
    model = small(adaptation="lora")
    names = {n.partition(".lora_")[0] for n in model.names if ".lora_" in n}
    assert {n.rpartition(".")[2] for n in names} == {"conv1", "conv2", "shortcut"}


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"nano-vit", "nano-vit-fhe", "nano-clip"}))
def test_built_in_architectures_have_no_weights(name):
    table = prose() if name == "nano-gpt2" else images(side=8)
    with pytest.raises(InputError, match=r"architecture without weights: set model.weights = .random."):
        load(name, table, "full")


def test_the_language_model_reads_any_text_as_bytes():
    model = load("nano-gpt2", prose(), "full", weights="random")
    assert sum(p.numel() for p in model.module.parameters()) == 132_928
    (row,) = model.prepare(prose(1), [0]).tokens
    text = prose(1).inputs[0]
    assert len(row) == len(text.encode()) == len(text)
    assert model.tools.tokenizer.decode(row) == text
    assert model.evaluate(model.prepare(prose(), range(4)))["perplexity"] == pytest.approx(257, rel=0.05)


def test_a_configuration_alone_is_an_architecture(folder, tmp_path):
    for family, table in (("vit", images()), ("bert", sentences()), ("llama", prose())):
        bare = tmp_path / family
        bare.mkdir()
        (bare / "config.json").write_text((folder(family) / "config.json").read_text())
        if family != "vit":
            with pytest.raises(InputError, match="has no tokenizer"):
                load(bare, table, "full", weights="random")
            save_tokenizer(bare, family)
        model = load(bare, table, "full", weights="random")
        assert model.params().sha256() == load(folder(family), table, "full", weights="random").params().sha256()
        assert torch.isfinite(model.logits(model.prepare(table, range(2)).batch([0]))).all()
        with pytest.raises(InputError, match="without weights"):
            load(bare, table, "full")


def test_options_change_an_architecture():
    model = load("nano-vit", images(side=32), "full", weights="random", options={"num_hidden_layers": 2})
    assert len(model.parts.blocks) == 2
    assert small(widths=[3, 3]).params()["bn.weight"].shape == (3,)
    assert model.classes == CLASSES


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"widhts": [4]}, r"model.options.widhts: .*did you mean \"widths\""),
        ({"widths": 4}, r"model.options.widths = 4: expected something like \[16, 32, 64\]"),
        ({"widths": [4, 0]}, "model.options: widths = .* expected a list of positive integers"),
        ({"blocks": [1]}, "model.options: .*expected one value of each for every section"),
        ({"image_size": "big"}, "model.options.image_size = 'big'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, says):
    with pytest.raises(InputError, match=says):
        small(**options)


def test_options_need_random_weights_and_an_architecture(tmp_path):
    with pytest.raises(InputError, match=r"model.options: .*set weights = .random."):
        load("nano-vit", images(side=32), "full", options={"num_hidden_layers": 2})
