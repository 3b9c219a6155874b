"""What a checkpoint lacks, leaves over or has in another shape is refused, but for the head of the task."""

import json
import re
import shutil

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file
from tiny_models import CLASSES, images, load, prose, save, save_tokenizer, sentences, table_for
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from fedfm.errors import InputError
from fedfm.methods.fedbaf.matching import match
from fedfm.models import heads
from fedfm.models.load import load_model
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = SIZES | {"vocab_size": 64, "max_position_embeddings": 40, "pad_token_id": 0}
PICTURE = SIZES | {"image_size": 16, "patch_size": 8}
SHORT = {"image_size": 16, "depths": [1, 1], "num_labels": 5}
HALVES = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
ENDS = {"pad_token_id": 0, "bos_token_id": 4, "eos_token_id": 3, "decoder_start_token_id": 3}
MADE = {  # class, configuration, and where the tensors lie that a classifier does not take from the file
    "masked bert": (t.BertForMaskedLM, t.BertConfig(**TEXT), "cls."),
    "bert of another task": (t.BertForTokenClassification, t.BertConfig(**TEXT, num_labels=7), "classifier."),
    "classifier": (t.BertForSequenceClassification, t.BertConfig(**TEXT, num_labels=5), "classifier."),
    "camembert": (t.CamembertForMaskedLM, t.CamembertConfig(**TEXT), "lm_head."),
    "jina": (t.JinaEmbeddingsV3ForMaskedLM, t.JinaEmbeddingsV3Config(**TEXT), "lm_head."),
    "deberta": (t.DebertaV2ForMaskedLM, t.DebertaV2Config(**TEXT), "cls."),
    "electra": (t.ElectraForPreTraining, t.ElectraConfig(**TEXT, embedding_size=8), "discriminator_predictions."),
    "eurobert": (t.EuroBertForMaskedLM, t.EuroBertConfig(**TEXT, num_key_value_heads=2), "lm_head."),
    "bare llama": (t.LlamaModel, t.LlamaConfig(**TEXT), "-"),
    "bart": (t.BartForConditionalGeneration, t.BartConfig(d_model=16, vocab_size=64, **HALVES, **ENDS), "final_"),
    "vit": (t.ViTForMaskedImageModeling, t.ViTConfig(**PICTURE), ("decoder.", "vit.embeddings.mask_token")),
    "resnet": (t.ResNetForImageClassification, t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], **SHORT), "c"),
    "swin": (t.SwinModel, t.SwinConfig(embed_dim=8, num_heads=[1, 1], window_size=2, patch_size=2, **SHORT), "-"),
}
TRIED = 6  # tensors of a family


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
            kind, config, _ = MADE[name]
            with quiet(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(5)
                kind(config).save_pretrained(folder)
            if reads(name) == "image":
                ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
            else:
                save_tokenizer(folder)
            made[name] = folder
        return made[name]

    return get


def reads(name):
    return "image" if name in ("vit", "resnet", "swin") else "text"


def classifier(folder, name, **spec):
    return load(folder, images() if reads(name) == "image" else sentences(), "full", **spec)


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def changed(folder, target, tensors, **settings):
    """A copy of a folder with other tensors, and other keys of its configuration."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | settings))
    return target


def some_of_the_base(name, tensors):
    """Every few tensors that a classifier takes from the file; counters of batches are none."""
    base = [k for k in sorted(tensors) if not k.startswith(MADE[name][2]) and "num_batches" not in k]
    return base[:: max(1, len(base) // TRIED)]


@pytest.mark.parametrize("name", MADE)
class TestAnyFamily:
    def test_the_base_is_that_of_the_file_and_the_rest_is_new(self, checkpoint, name):
        model = classifier(checkpoint(name), name)
        with quiet():
            there = MADE[name][0].from_pretrained(checkpoint(name), attn_implementation="eager").base_model.state_dict()
        base = {k.partition(".")[2]: v for k, v in model.module.state_dict().items()}
        both = base.keys() & there.keys()
        assert len(both) >= len(tensors_of(checkpoint(name))) // 2
        assert all(torch.equal(base[k], there[k]) for k in both)
        assert all(heads.bases(model.module) != ("",) for _ in both)
        inside = [new for new in model.new if any(heads.within(new, b) for b in heads.bases(model.module))]
        assert all("pooler" in new for new in inside)
        assert model.module.get_submodule(model.parts.head).out_features == len(CLASSES)

    @pytest.mark.sample("masked bert", "classifier", "bare llama", "bart", "resnet")
    def test_no_tensor_of_the_base_may_lack(self, checkpoint, name, tmp_path):
        tensors = tensors_of(checkpoint(name))
        for gone in some_of_the_base(name, tensors):
            less = changed(checkpoint(name), tmp_path, {k: v for k, v in tensors.items() if k != gone})
            with pytest.raises(InputError, match=rf"{tmp_path} lacks \d of the \d+ tensors of a \w+: [\w.]+"):
                classifier(less, name)

    @pytest.mark.sample("bert of another task", "jina", "bare llama", "vit")
    def test_no_tensor_may_have_another_shape_or_name(self, checkpoint, name, tmp_path):
        tensors = tensors_of(checkpoint(name))
        for odd in some_of_the_base(name, tensors)[::3]:
            longer = torch.zeros([n + 1 for n in tensors[odd].shape])
            with pytest.raises(
                InputError, match=r"with a shape that differs from its configuration: \S+ is \(.*, expected"
            ):
                classifier(changed(checkpoint(name), tmp_path, tensors | {odd: longer}), name)
            renamed = {k + "_" * (k == odd): v for k, v in tensors.items()}
            with pytest.raises(InputError, match=r"lacks \d of"):
                classifier(changed(checkpoint(name), tmp_path, renamed), name)

    def test_a_wrapper_is_named(self, checkpoint, name, tmp_path):
        prefix = "module." if "bert" in name else "_orig_mod."
        wrapped = {prefix + k: v for k, v in tensors_of(checkpoint(name)).items()}
        with pytest.raises(InputError, match=f"Its names are the model's names with the prefix '{prefix}'"):
            classifier(changed(checkpoint(name), tmp_path, wrapped), name)

    def test_heads_may_be_missing_or_have_another_shape(self, checkpoint, name, tmp_path):
        own = {k for k in tensors_of(checkpoint(name)) if k.startswith(MADE[name][2])}
        bare = {k: v for k, v in tensors_of(checkpoint(name)).items() if k not in own}
        model = classifier(changed(checkpoint(name), tmp_path, bare), name)
        assert model.fingerprint == classifier(checkpoint(name), name).fingerprint


def test_a_pooler_that_the_checkpoint_has_none_of_is_new_and_named(checkpoint, tmp_path):
    name = "masked bert"
    assert classifier(checkpoint(name), name).notices == (
        f"model.name: {checkpoint(name)} has no bert.pooler.dense: the model has new, untrained values there",
        f"model.name: 5 % of the parameters of {str(checkpoint(name))!r}, 323 of 5,971, are new here and untrained: "
        "bert.pooler.dense, classifier",
    )
    half = tensors_of(checkpoint(name)) | {"bert.pooler.dense.bias": torch.zeros(16)}
    with pytest.raises(InputError, match=r"lacks 1 of the \d+ tensors of a \w+: bert\.pooler\.dense\.weight"):
        classifier(changed(checkpoint(name), tmp_path, half), name)


def test_tensors_of_the_saving_class_may_not_be_missing_outside_the_base(tmp_path):
    with quiet():
        t.DebertaV2ForSequenceClassification(t.DebertaV2Config(**TEXT)).save_pretrained(tmp_path / "a")
    save_tokenizer(tmp_path / "a")
    less = {k: v for k, v in tensors_of(tmp_path / "a").items() if not k.startswith("pooler.")}
    with pytest.raises(InputError, match=r"lacks 2 of the \d+ tensors of a \w+: pooler\.dense\.bias, pooler"):
        load(changed(tmp_path / "a", tmp_path / "b", less), sentences(), "full")


def test_left_over_tensors_are_refused_inside_the_base_and_reported_outside(checkpoint, tmp_path):
    name = "classifier"
    more = tensors_of(checkpoint(name))
    with pytest.raises(InputError, match=r"has 16 tensors for which a model of its configuration has no place"):
        classifier(changed(checkpoint(name), tmp_path / "a", more, num_hidden_layers=1), name)
    more["score.weight"] = torch.zeros(2, 16)
    (notice,) = classifier(changed(checkpoint(name), tmp_path / "b", more), name).notices
    assert notice.endswith("score.weight; taken for the head of another task and left out")
    unknown = changed(checkpoint(name), tmp_path / "c", more, architectures=None)
    assert classifier(unknown, name).notices == (notice.replace(str(tmp_path / "b"), str(tmp_path / "c")),)


_MASK = torch.ones(1, 1, 40, 40)
OLD = {  # what older releases of transformers saved beside the weights
    "bert": {"bert.embeddings.token_type_ids": torch.zeros(1, 40).long(), "embeddings.version": torch.tensor([3.0])},
    "gpt2": {"h.0.attn.bias": _MASK.bool(), "h.0.attn.masked_bias": torch.tensor(-1e4)},
    "llama": {"model.layers.1.self_attn.rotary.inv_freq": torch.ones(4)},
    "swin": {"encoder.layers.0.blocks.0.attention.self.coords": torch.zeros(4, 4).long()},
}


@pytest.mark.parametrize("family", OLD)
def test_left_over_masks_counters_and_tables_are_no_weights(folder, tmp_path, family):
    table, tensors = table_for(family), tensors_of(folder(family))
    model = load(changed(folder(family), tmp_path / "a", tensors | OLD[family]), table, "lora")
    assert model.fingerprint == load(folder(family), table, "lora").fingerprint
    for name in OLD[family]:
        weight = {f"{name.rpartition('.')[0]}.weighty": torch.ones(4, 4)}
        with pytest.raises(InputError, match="weighty"):
            load(changed(folder(family), tmp_path / "b", tensors | weight), table, "lora")


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "bert"])
def test_no_pattern_of_a_class_hides_a_single_tensor_of_a_block_too_many(folder, tmp_path, family):
    table, tensors = table_for(family), tensors_of(folder(family))
    for name in sorted(n for n in tensors if re.search(r"\.0\.", n)):
        surplus = name.replace(".0.", ".9.", 1)
        path = changed(folder(family), tmp_path / surplus, tensors | {surplus: tensors[name].clone()})
        with pytest.raises(InputError, match=re.escape(surplus)):
            load(path, table, "lora")


def test_weights_that_a_pattern_hides_are_reported_and_masks_are_not(folder, tmp_path):
    draws, tensors = torch.Generator().manual_seed(0), tensors_of(folder("gpt2"))
    learned = {f"transformer.h.1.{part}.bias": torch.randn(48, generator=draws) for part in ("attn", "cross.c_attn")}
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4).tril(),
        "transformer.h.0.attn.masked_bias": torch.ones(1),
    }
    model = load(changed(folder("gpt2"), tmp_path / "a", tensors | learned | masks), prose(), "lora")
    (said,) = [text for text in model.notices if "leaves out" in text]
    assert said.endswith("has 2 tensors that a GPT2LMHeadModel leaves out: " + ", ".join(sorted(learned)))
    plain = load(changed(folder("gpt2"), tmp_path / "b", tensors | masks), prose(), "lora")
    assert not [text for text in plain.notices if "leaves out" in text or "no place" in text]


def language_model(path, hollow=False, **spec):
    adapt = AdaptationSpec("lora", rank=2)
    return load_model(ModelSpec(str(path), adaptation=adapt, **spec), classes=(), kind="passages", hollow=hollow)


@pytest.mark.parametrize("hollow", [False, True])
class TestLanguageModels:
    @pytest.mark.each_value
    @pytest.mark.parametrize("family", ["llama", "gpt2"])
    def test_no_tensor_may_be_missing_or_left_over(self, folder, family, hollow, tmp_path):
        tensors = tensors_of(folder(family))
        for gone in sorted(tensors)[::5]:
            less = changed(folder(family), tmp_path, {k: v for k, v in tensors.items() if k != gone})
            with pytest.raises(InputError, match=r"lacks [12] of the"):
                language_model(less, hollow)
        more = tensors | {k.replace(".2.", ".3."): v.clone() for k, v in tensors.items() if ".2." in k}
        with pytest.raises(InputError, match="tensors for which a model of its configuration has no place"):
            language_model(changed(folder(family), tmp_path, more), hollow)

    def test_shards_are_read_by_their_files(self, folder, hollow, tmp_path):
        shutil.copytree(folder("llama"), tmp_path, dirs_exist_ok=True)
        (tmp_path / "model.safetensors").unlink()
        with quiet():
            t.LlamaForCausalLM.from_pretrained(folder("llama")).save_pretrained(tmp_path, max_shard_size="8KB")
        assert language_model(tmp_path, hollow).fingerprint == language_model(folder("llama")).fingerprint
        index = tmp_path / "model.safetensors.index.json"
        first = tmp_path / min(json.loads(index.read_text())["weight_map"].values())
        kept = load_file(first)
        save_file(dict(list(kept.items())[1:]), first, {"format": "pt"})
        with pytest.raises(InputError, match=r"lacks 1 of"):
            language_model(tmp_path, hollow)
        first.unlink()
        with pytest.raises(InputError, match=first.name):
            language_model(tmp_path, hollow)
        shutil.copy(folder("llama") / "model.safetensors", tmp_path)  # which transformers prefers, too
        assert language_model(tmp_path, hollow).fingerprint == language_model(folder("llama")).fingerprint
        (tmp_path / "model.safetensors").unlink()
        index.write_text("{")
        with pytest.raises(InputError, match="cannot be read"):
            language_model(tmp_path, hollow)


def test_an_encoder_with_a_decoder_is_no_causal_model(tmp_path):
    shape = {"d_model": 16, "vocab_size": 64, **HALVES, **ENDS}
    for kind, config in ((t.PegasusForConditionalGeneration, t.PegasusConfig), (t.MarianMTModel, t.MarianConfig)):
        with quiet():
            kind(config(**shape)).save_pretrained(tmp_path / config.__name__)
        save_tokenizer(tmp_path / config.__name__)
        with pytest.raises(InputError, match=r"an encoder-decoder, .* needs a causal model, such as a llama"):
            language_model(tmp_path / config.__name__)


def test_a_foundation_model_must_be_complete(tmp_path):
    model = load(save("bert", tmp_path / "a"), sentences(), "full", weights="random")
    tensors = tensors_of(tmp_path / "a")
    gone = next(k for k in tensors if "layer.1.output.dense.weight" in k)
    less = changed(tmp_path / "a", tmp_path / "b", {k: v for k, v in tensors.items() if k != gone})
    with pytest.raises(InputError, match=rf"method\.foundation: {less} lacks 1 of .*: bert\.{gone}"):
        match(model, str(less))


@pytest.mark.parametrize("bits", ["nf4", "int8"])
def test_bases_to_be_quantised_must_be_complete(folder, bits, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    tensors = tensors_of(folder("llama"))
    gone = "model.layers.1.mlp.up_proj.weight"
    less = changed(folder("llama"), tmp_path, {k: v for k, v in tensors.items() if k != gone})
    with pytest.raises(InputError, match=f"lacks 1 of .*: {gone}"):
        language_model(less, quantization=bits)


class TestImageProcessors:
    def test_a_guess_is_reported(self, folder, tmp_path):
        for family in ("vit", "clip"):
            target = tmp_path / family
            shutil.copytree(folder(family), target)
            (target / "preprocessor_config.json").unlink()
            (notice,) = load(target, table_for(family), "head").notices
            assert "resized to 16 x 16 and normalised with mean [0.5, 0.5, 0.5] and standard deviation" in notice
        assert not load(target, images(), "head", weights="random").notices  # no figures were its own

    def test_a_file_that_cannot_be_read_is_refused(self, folder, tmp_path):
        shutil.copytree(folder("vit"), tmp_path, dirs_exist_ok=True)
        (tmp_path / "preprocessor_config.json").write_text("{")
        with pytest.raises(InputError, match=r"image processor of .* cannot be read: .* not a valid JSON file"):
            load(tmp_path, images(), "head")

    def test_a_missing_dependency_of_a_processor_is_named_without_its_classes(self, folder, tmp_path, monkeypatch):
        def fail(*_args, **_about):  # as transformers 5.20 of SegFormer's
            classes = "pil: SegformerImageProcessorPil, torchvision: SegformerImageProcessor"
            raise ValueError(
                f"Could not load any image processor class for {tmp_path}. The model configuration resolves to the "
                f"following image processor classes: {classes}. None of these classes could be imported. "
                "Missing optional dependencies: torchvision. Please install the missing dependencies."
            )

        shutil.copytree(folder("vit"), tmp_path, dirs_exist_ok=True)
        monkeypatch.setattr("transformers.AutoImageProcessor.from_pretrained", fail)
        with pytest.raises(InputError, match=r"cannot be read: Missing optional dependencies: torchvision\."):
            load(tmp_path, images(), "head")

    def test_a_processor_that_does_not_run_here_still_gives_its_sizes(self, folder, tmp_path, monkeypatch):
        def fail(*_args, **_about):
            raise ImportError("DINOv3ViTImageProcessor requires the Torchvision library. Read on")

        shutil.copytree(folder("vit"), tmp_path, dirs_exist_ok=True)
        own = {"image_mean": [0.1, 0.2, 0.3], "size": {"height": 16, "width": 16}}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
        monkeypatch.setattr(t.AutoImageProcessor, "from_pretrained", fail)
        (notice,) = load(tmp_path, images(), "head").notices
        assert "requires the Torchvision library): images" in notice
        assert "mean [0.1, 0.2, 0.3]" in notice


def test_a_cifar_resnet_has_no_tensors_without_a_place(tmp_path):
    from fedfm.models.architectures.resnet import CifarResNet, ResNetConfig

    state, path = CifarResNet(ResNetConfig(1, 10)).state_dict(), tmp_path / "net.safetensors"
    for tensors, why in (
        (
            state | {"layer2.0.shortcut.0.weight": torch.zeros(3)},
            r"tensors that such a network does not have \(1\), such as layer2",
        ),
        ({k: v for k, v in state.items() if k != "layer1.0.bn1.bias"}, r"it lacks tensors \(1\), such as layer1"),
        (state | {"conv1.weight": torch.zeros(3)}, "size mismatch for conv1"),
        ({f"module.{k}": v for k, v in state.items()}, "all its keys begin with 'module': save the module inside"),
    ):
        save_file(tensors, path)
        with pytest.raises(InputError, match=why):
            load(path, images(), "head")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_statistics_of_a_batch_norm_are_numbers(checkpoint, bad, tmp_path):
    tensors = tensors_of(checkpoint("resnet"))
    name = next(k for k in sorted(tensors) if k.endswith("running_var"))
    broken = tensors[name].clone()
    broken[1] = bad
    with pytest.raises(InputError, match=rf"model\.safetensors: .*{name}\[1\] is {bad}: the weights are damaged"):
        classifier(changed(checkpoint("resnet"), tmp_path, tensors | {name: broken}), "resnet")
