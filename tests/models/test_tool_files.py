"""Contradictions between the files of a tokenizer, an image processor or the generation and other files or classes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CLASSES, images, load, prose, save, sentences
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from fedfm.core.libraries import refuse
from fedfm.errors import InputError
from fedfm.models import pooling, preprocessing, processor_files, tokenizer_files, unknown_keys
from fedfm.models.export import export
from fedfm.models.preprocessing import check_scale

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "The", "the", "fox", "FOX", "f", "##ox", "b", "##1", "##2")
BERT = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
PUBLISHED = {  # keys of published tokenizer files that their classes do not read
    *("name_or_path", "special_tokens_map_file", "tokenizer_file", "do_basic_tokenize", "never_split", "legacy"),
    *("use_default_system_prompt", "sp_model_kwargs", "spaces_between_special_tokens", "max_length", "stride"),
    *("truncation_strategy", "pad_to_multiple_of", "pad_token_type_id", "max_model_input_sizes", "errors", "use_fast"),
    *("boi_token", "eoi_token", "eot_token", "sop_token", "image_token", "add_eos", "vocab_size", "trim_offsets"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "is_local", "backend", "full_tokenizer_file", "model_specific"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    return {name: save(name, place / name) for name in ("bert", "vit", "llama", "gpt2", "opt")}


@pytest.fixture
def copy(folders, tmp_path):
    return lambda name: shutil.copytree(folders[name], tmp_path / name)


def change(path, drop=(), **keys):
    table = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in table.items() if k not in drop} | keys))


def notices_for(folder, rows, **spec):
    return "\n".join(load(folder, rows, "lora", **spec).notices)


# --- tokenizers -------------------------------------------------------------------------------------------------------


def cased(folder, kind, **settings):
    """A tokenizer whose file keeps capitals, under a class of transformers."""
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind} | BERT | settings))
    return folder


@pytest.mark.parametrize(
    ("kind", "settings", "differs"),
    [
        ("BertTokenizer", {}, True),
        ("BertTokenizer", {"do_lower_case": False}, False),
        ("DistilBertTokenizer", {}, True),
        ("PreTrainedTokenizerFast", {}, False),
    ],
)
def test_a_class_that_splits_texts_otherwise_than_the_file_is_reported(tmp_path, kind, settings, differs):
    _, _, notices = tokenizer_files.read(cased(tmp_path / "t", kind, **settings), "m")
    assert bool(notices) == differs
    assert "reads 'The fox' as ['the', 'fox'], and its tokenizer.json says ['The', 'fox']" in "".join(notices) or not (
        differs
    )


@pytest.mark.parametrize(
    ("drop", "keys", "word"),
    [
        ("pad_token", {"pad_tokn": "[PAD]"}, '"pad_token" is absent and counts as None'),
        ("-", {"padding_sied": "left"}, "\"padding_side\" is absent and counts as 'right'"),
        ("model_max_length", {"model_max_lenght": 5}, '"model_max_length" is absent'),
        ("bos_token", dict.fromkeys(sorted(PUBLISHED), "the"), ""),
    ],
)
def test_a_misspelt_key_of_a_tokenizer_is_reported(copy, drop, keys, word):
    from transformers import AutoTokenizer

    folder = copy("bert")
    change(folder / "tokenizer_config.json", [drop], **keys)
    found = "\n".join(unknown_keys.of_tokenizer(folder, AutoTokenizer.from_pretrained(folder)))
    assert word in found if word else not found


def test_two_files_that_name_other_special_tokens_are_reported(copy):
    folder = copy("bert")
    change(folder / "special_tokens_map.json", pad_token={"content": "[PAD]"}, unk_token="[UNK]")
    assert "differ" not in notices_for(folder, sentences())
    change(folder / "special_tokens_map.json", pad_token={"content": "[UNK]"})
    assert "differ: pad_token '[PAD]' and '[UNK]' ('[UNK]' is used)" in notices_for(folder, sentences())


@pytest.mark.parametrize(("rows", "told_"), [(30, False), (94, False), (99, True), (4000, True)])
def test_a_tokenizer_of_another_model_is_reported_by_its_size(rows, told_):
    assert bool(tokenizer_files.of_another_model(range(30), rows, "m")) == told_
    assert not tokenizer_files.of_another_model(range(50295), 51200, "phi-2")
    assert tokenizer_files.of_another_model(range(30522), 50265, "bert's in a roberta")


@pytest.mark.parametrize("stated", [2, None, 50])
def test_a_classifier_pads_with_the_token_by_which_it_finds_the_end(copy, stated):
    folder = copy("llama")
    change(folder / "tokenizer_config.json", ["pad_token"])
    change(folder / "config.json", pad_token_id=stated)
    tokenizer = load(folder, sentences(), "lora").tools.tokenizer
    assert tokenizer.pad_token == ("[CLS]" if stated == 2 else "[SEP]")
    assert load(folder, prose(), "lora").tools.tokenizer.pad_token == "[SEP]"  # its end token


def test_another_padding_in_the_configuration_is_reported_as_the_cause(copy):
    folder = copy("llama")
    change(folder / "config.json", pad_token_id=7)
    model = load(folder, sentences(), "lora")
    (notice,) = pooling.of_padding(model)
    assert (
        "depend on the padding after it (pad_token_id of its config.json is 7, and its tokenizer pads with 0)" in notice
    )


@pytest.mark.parametrize("name", ["bert", "gpt2", "opt"])
def test_an_exported_classifier_pads_texts_as_in_training(copy, name, tmp_path):
    import transformers as t

    folder = copy(name)
    change(folder / "tokenizer_config.json", padding_side="left")
    model = load(folder, sentences(), "lora")
    out = export(model, model.params(), "hf", tmp_path / "out")
    rows = model.prepare(sentences(), range(5))
    tokenizer, module = t.AutoTokenizer.from_pretrained(out), t.AutoModelForSequenceClassification.from_pretrained(out)
    batch = tokenizer(sentences().inputs, padding=True, return_tensors="pt")
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        assert torch.allclose(module.eval()(**batch).logits, model.predict(rows), atol=1e-5)


def test_an_exported_language_model_pads_prompts_as_its_tokenizer_did(copy, tmp_path):
    import transformers as t

    folder = copy("llama")
    change(folder / "tokenizer_config.json", padding_side="left")
    model = load(folder, prose(), "lora")
    assert t.AutoTokenizer.from_pretrained(export(model, model.params(), "hf", tmp_path / "out")).padding_side == "left"


@pytest.mark.parametrize(
    ("files", "config", "word"),
    [
        ({}, None, ""),
        ({"chat_template.jinja": "{{ messages }}"}, None, ""),
        ({"chat_template.jinja": "{{ messages }}\n"}, "{{ messages }}", ""),
        (
            {"chat_template.jinja": "{{ messages }}"},
            "{{ bos_token }}",
            "different chat templates: chat_template.jinja is used",
        ),
        (
            {"chat_template.json": "{}"},
            None,
            "has no chat template that a tokenizer reads, but it has chat_template.json",
        ),
        (
            {"chat-templat.jinja": "{{ messages }}"},
            None,
            "has no chat template that a tokenizer reads, but it has chat-templat.jinja",
        ),
        ({"chat_template.json": "{}"}, "{{ bos_token }}", ""),
    ],
)
def test_chat_templates_that_do_not_count_are_reported(copy, files, config, word):
    from transformers import AutoTokenizer

    folder = copy("llama")
    for name, text in files.items():
        (folder / name).write_text(text)
    if config is not None:
        change(folder / "tokenizer_config.json", chat_template=config)
    found = "".join(tokenizer_files.templates(folder, AutoTokenizer.from_pretrained(folder), "m"))
    assert word in found if word else not found


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({}, ""),
        ({"size": {"height": 32, "width": 32}}, "images become 32 x 32 pixels"),
        ({"do_normalize": False}, "do_normalize = false in its preprocessor_config.json"),
        ({"do_rescale": False}, "another scale"),
        ({"rescale_factor": 1 / 127.5}, "another scale"),
        ({"rescale_factor": 1 / 256}, ""),
    ],
)
def test_doubtful_values_of_an_image_processor_are_reported(copy, keys, word):
    folder = copy("vit")
    change(folder / "preprocessor_config.json", **keys)
    found = notices_for(folder, images())
    assert word in found if word else not found


def test_a_mean_of_other_channels_is_refused(copy):
    folder = copy("vit")
    change(folder / "preprocessor_config.json", image_mean=[0.5] * 4, image_std=[0.5] * 4)
    with pytest.raises(InputError, match="images have 3 channels, so expected 3 numbers"):
        load(folder, images(), "lora")


def test_two_files_of_an_image_processor_are_compared(copy):
    folder = copy("vit")
    table = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": table}))
    assert not processor_files.notices(folder, None)
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": table | {"image_mean": [0.0] * 3}}))
    assert "they differ: image_mean [0.5, 0.5, 0.5] and [0.0, 0.0, 0.0]" in notices_for(folder, images())
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": {"image_maen": [0.0] * 3}}))
    assert '"image_maen" in its processor_config.json' in notices_for(folder, images())


@pytest.mark.proof
def test_processors_of_all_families_have_a_usual_scale():
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    kinds = {names.get("pil") for names in IMAGE_PROCESSOR_MAPPING_NAMES.values() if isinstance(names, dict)}
    tried = 0
    for name in sorted(kinds - {None}):
        try:
            processor = getattr(transformers, name)()
        except (AttributeError, ImportError, TypeError, ValueError):
            continue  # it needs more than defaults
        assert not check_scale(processor, name), name
        tried += 1
    assert tried > 20


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool])
def test_integer_weights_without_their_scales_are_refused(copy, dtype):
    folder = copy("bert")
    weights, name = load_file(folder / "model.safetensors"), "encoder.layer.0.output.dense.weight"
    save_file(weights | {name: (100 * weights[name]).to(dtype)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=rf"not floating-point numbers: {name} \("):
        load(folder, sentences(), "lora")


def test_a_weight_of_one_number_is_reported(copy):
    folder = copy("bert")
    weights, name = load_file(folder / "model.safetensors"), "encoder.layer.0.output.dense.weight"
    save_file(weights | {name: torch.full_like(weights[name], 0.5)}, folder / "model.safetensors", {"format": "pt"})
    assert f"{name} of" in notices_for(folder, sentences()).replace("bert.", "")
    assert "nothing but 0.5, in each place" in notices_for(folder, sentences())


def test_an_output_map_of_its_own_counts_and_is_reported(copy, tmp_path):
    folder = copy("gpt2")  # tied by default
    weights = load_file(folder / "model.safetensors")
    assert "output map" not in notices_for(folder, prose())
    own = torch.randn_like(weights["transformer.wte.weight"])
    save_file(weights | {"lm_head.weight": own}, folder / "model.safetensors", {"format": "pt"})
    model = load(folder, prose(), "lora")
    assert "has an output map that differs from its embedding" in "\n".join(model.notices)
    out = export(model, model.params(), "hf", tmp_path / "out")
    assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], own)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


def test_an_adapter_in_a_folder_inside_is_reported(copy):
    folder = copy("bert")
    (folder / "mine").mkdir()
    (folder / "mine" / "adapter_config.json").write_text("{}")
    assert "has adapters of PEFT in folders inside (mine), which are not read" in notices_for(folder, sentences())


@pytest.mark.parametrize(
    ("saved", "order", "word"),
    [
        (("north", "south", "west"), [0, 1, 2], ""),
        (("west", "north", "south"), [1, 2, 0], ""),
        (("LABEL_0", "LABEL_1", "LABEL_2"), [0, 1, 2], "are without names; they are taken as north, south, west"),
        (("cat", "dog", "cow"), [0, 1, 2], "are cat, dog, cow; they are taken as north, south, west"),
    ],
)
def test_the_outputs_of_a_kept_head_are_the_classes_of_its_names(tmp_path, saved, order, word):
    import transformers as t

    from fedfm.models.load import load_model
    from fedfm.models.spec import AdaptationSpec, ModelSpec

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = t.ViTConfig(**sizes, image_size=16, patch_size=8, id2label=dict(enumerate(saved)))
    module = t.ViTForImageClassification(config)
    module.save_pretrained(tmp_path)
    t.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    spec = ModelSpec(str(tmp_path), adaptation=AdaptationSpec("full"))
    model = load_model(spec, classes=CLASSES, kind="image", keep_head=True)
    assert torch.equal(model.module.classifier.weight, module.classifier.weight[order])
    found = [text for text in model.notices if "outputs of the head" in text]
    assert word in "".join(found)
    assert bool(found) == bool(word)


# --- two encoders -----------------------------------------------------------------------------------------------------


@pytest.fixture
def clip(tmp_path):
    import tiny_clip

    return tiny_clip.save("clip", tmp_path / "clip")


def test_classes_that_a_tokenizer_reads_as_one_are_reported(clip):
    found = notices_for(clip, images(), task="zero_shot")
    assert '3 of 3 names of classes as the same tokens, such as "north" and "south"' in found


def test_an_end_token_that_no_text_has_is_refused(clip):
    from fedfm.models.load import load_model
    from fedfm.models.spec import AdaptationSpec, ModelSpec

    spec = ModelSpec(str(clip), task="zero_shot", adaptation=AdaptationSpec("lora"))
    assert not load_model(spec, classes=("fox", "dog"), kind="image").notices
    table = json.loads((clip / "config.json").read_text())
    change(clip / "config.json", text_config=table["text_config"] | {"eos_token_id": 30})
    with pytest.raises(InputError, match=r"same vector for different names .* is 30, expected the token that its"):
        load_model(spec, classes=("fox", "dog"), kind="image")


def test_prompts_of_classes_are_padded_on_the_right(clip):
    from fedfm.models.load import load_model
    from fedfm.models.spec import AdaptationSpec, ModelSpec

    change(clip / "tokenizer_config.json", padding_side="left")
    spec = ModelSpec(str(clip), task="zero_shot", adaptation=AdaptationSpec("lora"))
    model = load_model(spec, classes=("fox", "small dog"), kind="image")
    assert model.dual.attention_mask[0, 0].tolist()[0] == 1


def test_notices_of_the_text_encoders_tokenizer_are_kept(clip):
    change(clip / "tokenizer_config.json", ["pad_token"], pad_tokn="[PAD]")
    assert '"pad_tokn" in its tokenizer_config.json' in notices_for(clip, images(), task="zero_shot")


@pytest.mark.parametrize("steps", ["(a+)+$", "(a|aa)+$", "(.*a){20}b"])
def test_a_regular_expression_of_a_tokenizer_that_needs_too_many_steps_is_refused_soon(steps):
    """Such an expression takes exponential time; its library gives up after ten million steps, with no Exception."""
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(steps), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[UNK]")
    assert len(preprocessing.texts(["a"], tokenizer, 8)) == 1
    with pytest.raises(InputError, match=r"^model\.name: the tokenizer gives up on a text of the rows: .*retry-limit"):
        preprocessing.texts(["a" * 60 + "c"], tokenizer, 8)
    with pytest.raises(InputError, match=r"^here: PanicException: Onig"), refuse("here"):
        tokenizer("a" * 60 + "c")
