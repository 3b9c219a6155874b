"""What of a model's folder, its tools and its rows is not read, or hardly meant, is refused or said in one line."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_models import CLASSES, save

from fedfm.core import tasks
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.models import lost_words, picture_sizes, preprocessing, tokenizer_files
from fedfm.models.load import load_model
from fedfm.models.preprocessors import Tools
from fedfm.models.spec import AdaptationSpec, ModelSpec


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save("bert", tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "m")


def said(path):
    model = load_model(ModelSpec(str(path), adaptation=AdaptationSpec("head")), classes=CLASSES, kind="text")
    return "\n".join(model.notices)


def change(path, **keys):
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def stale_index(path):
    (path / "model-00001-of-00001.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')


def parts(path):
    kinds = ("Transformer", "Pooling", "Dense")
    rows = [{"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in kinds]
    (path / "modules.json").write_text(json.dumps(rows))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (
            lambda path: (path / "pytorch_model.bin").write_bytes(b"x"),
            "model.safetensors counts, and not pytorch_model.bin",
        ),
        (lambda path: (path / "model.fp16.safetensors").write_bytes(b"x"), "and not model.fp16.safetensors"),
        (stale_index, "and not model-00001-of-00001.safetensors"),
        (lambda path: change(path / "config.json", auto_map={"AutoModel": "modeling_mine.Mine"}), "modeling_mine.py"),
        (parts, "(Pooling, Dense)"),
        (lambda path: None, ""),
    ],
)
def test_other_parts_of_a_folder_are_named(copy, make, word):
    before = said(copy)
    make(copy)
    after = said(copy)
    assert (word in after and word not in before) if word else after == before


def test_a_tensor_lies_in_one_file(copy):
    weights = load_file(copy / "model.safetensors")
    names = sorted(weights)
    (copy / "model.safetensors").unlink()
    files = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    index = {"metadata": {}, "weight_map": {name: file for file, some in files.items() for name in some}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, some in files.items():
        save_file({name: weights[name] for name in some}, copy / file, {"format": "pt"})
    assert "several files" not in said(copy)
    second = {name: weights[name] + 1 for name in names[2:]}
    save_file(second, copy / "model-00002-of-00002.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"tensors in two of its files: {names[2]};"):
        said(copy)


def test_weights_of_zeros_are_named(copy):
    weights = load_file(copy / "model.safetensors")
    name = "encoder.layer.1.output.dense.weight"
    save_file(weights | {name: torch.zeros_like(weights[name])}, copy / "model.safetensors", {"format": "pt"})
    assert f"{name} of" in said(copy).replace("bert.", "")
    assert "zeros" in said(copy)


@pytest.mark.parametrize("token", ["the", None])
def test_a_token_for_the_whole_text_is_written(folder, token):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if token is not None:
        tokenizer.cls_token = token
    assert bool(tokenizer_files.cls_notice(tokenizer, "m")) == (token is not None)
    tokenizer.cls_token = "[CLS]"
    assert not tokenizer_files.cls_notice(tokenizer, "m")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, ""),
        ({"do_normalize": False, "do_rescale": False}, ""),
        ({"image_mean": [127.5] * 3, "image_std": [127.5] * 3, "do_rescale": False}, ""),
        ({"image_mean": [0.0] * 3, "image_std": [1.0] * 3}, ""),
        ({"image_mean": [0.0] * 3, "image_std": [1 / 255] * 3}, ""),  # numbers of 0..255
        ({"do_rescale": False, "image_mean": [0.5] * 3, "image_std": [0.2] * 3}, "another scale"),
        ({"rescale_factor": 1 / 255**2}, "another scale"),
        ({"image_mean": [127.5] * 3, "image_std": [127.5] * 3}, "another scale"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std"),
        ({"image_std": [float("nan")] * 3}, "image_std"),
    ],
)
def test_scales_of_image_processors(changes, word):
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    processor = ViTImageProcessorPil(size={"height": 8, "width": 8}, **changes)
    if word == "image_std":
        with pytest.raises(InputError, match=word):
            preprocessing.check_scale(processor, "m")
    else:
        assert word in " ".join(preprocessing.check_scale(processor, "m")) or not word
        assert bool(preprocessing.check_scale(processor, "m")) == bool(word)


@pytest.mark.parametrize("encoded", [False, True])
def test_pictures_of_one_client_have_the_size_of_the_others(tmp_path, encoded):
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    paths = [tmp_path / f"{i}.png" for i in range(5)]
    for i, path in enumerate(paths):
        turn = Image.Exif()
        turn[0x0112] = 6 if i == 3 else 1
        size = {3: (16, 24), 4: (32, 16)}.get(i, (24, 16))  # the fourth is 24 x 16 as it is seen
        Image.new("RGB", size).save(path, exif=turn)
    items = [path.read_bytes() if encoded else str(path) for path in paths]
    keeps = preprocessing.processor_call(ViTImageProcessorPil(do_resize=False))
    resizes = preprocessing.processor_call(ViTImageProcessorPil(size={"height": 8, "width": 8}))
    picture_sizes.check(items, np.arange(4), keeps, "rows")
    picture_sizes.check(items, np.arange(5), resizes, "rows")
    with pytest.raises(InputError, match=r"\(24 x 16\) and .* \(32 x 16\) have other sizes"):
        picture_sizes.check(items, np.arange(5), keeps, "rows")


def _model(tools):
    return SimpleNamespace(tools=tools, task=tasks.find("classification"))


@pytest.mark.parametrize(
    ("texts", "word"),
    [
        (["the quick fox", "a dog"], ""),
        (["the Fuchs", "ein Hund"], "75% of the tokens"),
        (["the quick fox " * 4, "a dog"], "1 of 2 rows of rows have more than 8 tokens"),
        (["the quick brown fox jumps a", "dog"], ""),  # 8 with both ends
    ],
)
def test_words_that_a_model_does_not_read(folder, texts, word):
    import transformers

    tools = Tools(tokenizer=transformers.AutoTokenizer.from_pretrained(folder), max_length=8)
    table = Table("text", texts, None, (), np.full(len(texts), "train"), source="rows")
    found = lost_words.notices(table, range(len(texts)), _model(tools))
    assert [word in text for text in found] == ([True] if word else [])


def test_tags_are_no_words_that_a_model_reads(folder):
    import transformers

    from fedfm.data.doubts import doubts

    def notices(words, tags):
        table = Table("tagged", [(words, tags)] * 2, None, (), np.full(2, "train"), source="rows")
        return "\n".join([*lost_words.notices(table, range(2), _model(tools)), *doubts(table, "label")])

    tools = Tools(tokenizer=transformers.AutoTokenizer.from_pretrained(folder), max_length=8)
    assert not notices(("the", "fox"), ("Fuchs", "null"))
    found = notices(("Fuchs", "null"), ("the", "fox"))
    assert "tokens of 2 rows of rows are unknown" in found
    assert "tables write an empty cell" in found
