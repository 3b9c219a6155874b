import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import CLASSES, images, load, minilm, sentences, vectors

from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.models import preprocessing
from fedfm.models.language import encoding
from fedfm.models.quiet import quiet


def test_pixels_are_the_processors_own(folder):
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    table = images()
    model = load(folder("vit"), table, "head")
    expected = ViTImageProcessorPil.from_pretrained(folder("vit"))(list(table.inputs), return_tensors="pt")
    assert torch.equal(model.prepare(table, range(5)).tensors["pixel_values"], expected["pixel_values"])


def test_paths_are_opened_lazily_and_equal_arrays(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(preprocessing, "CHUNK", 2)
    table = images()
    paths = []
    for i, x in enumerate(table.inputs):
        Image.fromarray(x).save(tmp_path / f"{i}.png")
        paths.append(str(tmp_path / f"{i}.png"))
    paths.append(str(tmp_path / "missing.png"))
    listed = Table("image", paths, np.arange(6) % 3, CLASSES, np.full(6, "train"))
    model = load(folder("vit"), table, "head")
    rows = model.prepare(listed, [4, 0, 1])
    assert torch.equal(rows.tensors["pixel_values"], model.prepare(table, [4, 0, 1]).tensors["pixel_values"])
    with pytest.raises(InputError, match=r"missing\.png"):
        model.prepare(listed, [5])
    (tmp_path / "missing.png").write_text("no picture")
    with pytest.raises(InputError, match="not readable as an image"):
        model.prepare(listed, [5])


def test_grey_is_read_as_three_equal_channels():
    x = load("nano-vit", images(), "head").prepare(images(channels=1), range(3)).tensors["pixel_values"]
    assert torch.equal(x[:, 0], x[:, 1])
    assert torch.equal(x[:, 0], x[:, 2])


def test_no_rows(folder):
    model = load("nano-vit", images(), "head")
    rows = model.prepare(images(), [])
    assert len(rows) == 0
    assert model.predict(rows).shape == (0, 3)
    assert model.encode(rows).tensors["features"].shape == (0, 128)
    text = load(folder("bert"), sentences(), "head")
    assert len(text.prepare(sentences(), [])) == 0


def test_a_rows_features_do_not_depend_on_the_number_of_rows(folder):
    table = images(70)
    model = load("nano-vit", table, "head")
    whole = model.encode(model.prepare(table, range(70))).tensors["features"]
    assert torch.equal(model.encode(model.prepare(table, range(40))).tensors["features"], whole[:40])
    assert torch.equal(model.encode(model.prepare(table, [69])).tensors["features"][0], whole[69])


def test_texts_are_cut_and_padding_does_not_matter(folder):
    table = sentences()
    model = load(folder("bert"), table, "head", max_length=6)
    rows = model.prepare(table, range(5))
    assert max(len(t) for t in rows.tokens) == 6
    alone = torch.cat([model.predict(rows.take([i])) for i in range(5)])
    torch.testing.assert_close(model.predict(rows), alone, rtol=1e-4, atol=1e-5)
    long = load(folder("roberta"), table, "head", max_length=10_000)
    assert long.tools.max_length == 39  # 40 positions, of which RoBERTa does not use the first


def test_empty_text_is_a_row(folder):
    table = Table("text", ["", "the fox"], np.array([0, 1]), CLASSES, np.full(2, "train"))
    for family in ("bert", "gpt2"):
        model = load(folder(family), table, "head")
        assert torch.isfinite(model.predict(model.prepare(table, [0, 1]))).all()


def test_labels_are_matched_by_name(folder):
    table = vectors()
    model = load("features", table)
    other = Table("features", table.inputs, np.array([0, 1, 0, 1, 0]), ("west", "north"), table.split, source="x.npz")
    assert model.prepare(other, range(5)).labels.tolist() == [2, 0, 2, 0, 2]
    blind = Table("features", table.inputs, None, (), table.split)
    assert model.prepare(blind, range(5)).labels is None
    strange = Table("features", table.inputs, np.array([0, 1, 0, 1, 0]), ("west", "up"), table.split, source="x.npz")
    with pytest.raises(InputError, match=r"x\.npz: label 'up'"):
        model.prepare(strange, range(5))
    assert model.prepare(strange, [0, 2]).labels.tolist() == [2, 2]


def test_other_kinds_of_data_are_refused(folder):
    with pytest.raises(InputError, match="holds text"):
        load("nano-vit", images(), "head").prepare(sentences(), [0])
    with pytest.raises(InputError, match="holds images"):
        load(folder("bert"), sentences(), "head").prepare(images(), [0])


def test_minilm_tokenises_as_bert_does():
    model = load(minilm(), sentences(), "head")
    table = sentences()
    table.inputs[0] = "Hello world"
    assert model.prepare(table, [0]).tokens[0].tolist() == [101, 7592, 2088, 102]


def test_long_prompts_lose_their_beginning(folder):
    model = load(folder("llama"), Table("instruction", [("a", "b")], None, (), np.array(["train"])), "lora")
    pairs = [(" ".join("abcdefghijklmnop"), "the fox " * 20)]
    (row,), where = encoding.instructions(pairs, model.tools.tokenizer, 12, model.tools.template)
    assert len(row) == 12
    assert where["answer_start"].tolist() == [6]
    assert model.tools.tokenizer.decode(row[:6]) == "<s> l m n o p"
    assert model.tools.tokenizer.decode(row[6:]) == "the fox the fox the fox"


def test_a_processor_that_gives_more_than_pixels_is_refused(tmp_path):
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.Siglip2Config(vision_config={**sizes, "patch_size": 8, "num_patches": 16}, text_config=sizes)
    with quiet():
        config.save_pretrained(tmp_path)
        transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=16).save_pretrained(tmp_path)
    says = r"^model\.name: the image processor of .*Siglip2ImageProcessor\w*, gives the model .*spatial_shapes"
    with pytest.raises(InputError, match=says):
        load(tmp_path, images(), "head")
