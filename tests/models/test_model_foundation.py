"""Which tensors of a foundation model are mixed with which: an explicit table, checked on real families."""

import pytest
import torch
import transformers as t
from tiny_models import CLASSES, images, load, prose, save, save_tokenizer, sentences

from fedfm.errors import InputError
from fedfm.methods.fedbaf.matching import match
from fedfm.models.quiet import quiet

VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
}


def vit(folder, labels=("north", "south", "west"), **changes):
    """A ViT classifier of another depth, width or resolution."""
    names = dict(enumerate(labels))
    config = t.ViTConfig(**{**VIT, **changes}, id2label=names, label2id={v: k for k, v in names.items()})
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        t.ViTForImageClassification(config).save_pretrained(folder)
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        side = config.image_size
        ViTImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)
    return folder


def lm(folder, vocabulary=64, **changes):
    """A llama of another size."""
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = t.LlamaConfig(**{**shape, **changes}, vocab_size=vocabulary, pad_token_id=0, bos_token_id=4)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        t.LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, "llama")
    return folder


def ours(folder, table=None, **changes):
    """The federation's model, random, all of it trainable."""
    return load(vit(folder, **changes), table or images(), "full", weights="random")


def reasons(matching):
    return {m.name: m.why for m in matching.table if m.region is None}


def state(folder):
    with quiet():
        return t.ViTForImageClassification.from_pretrained(folder).state_dict()


class TestSameArchitecture:
    def test_everything_but_the_head_by_name(self, tmp_path):
        model = ours(tmp_path / "a")
        found = match(model, str(vit(tmp_path / "b")))
        assert set(reasons(found)) == {"classifier.weight", "classifier.bias"}
        assert all("not declared identical" in why for why in reasons(found).values())
        there = state(tmp_path / "b")
        for name, piece in found.pieces.items():
            assert torch.equal(piece.tensor, there[name]), name
        assert [m.name for m in found.table] == list(model.live())

    def test_the_head_where_the_labels_are_declared_identical(self, tmp_path):
        found = match(ours(tmp_path / "a"), str(vit(tmp_path / "b")), ("labels",))
        assert reasons(found) == {}
        assert torch.equal(found.pieces["classifier.weight"].tensor, state(tmp_path / "b")["classifier.weight"])

    def test_equal_shapes_are_no_declaration(self, tmp_path):
        found = match(ours(tmp_path / "a"), str(vit(tmp_path / "b", labels=("x", "y", "z"))))
        assert "classifier.weight" in reasons(found)

    def test_labels_declared_identical_of_another_number_stay_out(self, tmp_path):
        found = match(ours(tmp_path / "a"), str(vit(tmp_path / "b", labels=("x", "y", "z", "u"))), ("labels",))
        assert reasons(found)["classifier.weight"] == "labels of another shape: never sliced"

    def test_a_vit_and_a_deit_are_one_family(self, tmp_path):
        found = match(load(save("deit", tmp_path / "a"), images(), "full", weights="random"), str(vit(tmp_path / "b")))
        matched = {m.name for m in found.table if m.region}
        assert any(name.startswith("deit.") for name in matched)
        assert "deit.embeddings.distillation_token" in reasons(found)  # ViT has none


class TestOtherDepths:
    def test_a_deeper_one_block_by_block_from_the_input_on(self, tmp_path):
        found = match(ours(tmp_path / "a", num_hidden_layers=2), str(vit(tmp_path / "b", num_hidden_layers=4)))
        there = state(tmp_path / "b")
        blocks = [n for n in found.pieces if ".layers." in n or ".layer." in n]
        assert {n.split(".")[2] for n in blocks} >= {"0", "1"} or {n.split(".")[3] for n in blocks} >= {"0", "1"}
        assert all(torch.equal(found.pieces[n].tensor, there[n]) for n in blocks)

    def test_a_shallower_one_leaves_the_later_blocks(self, tmp_path):
        found = match(ours(tmp_path / "a", num_hidden_layers=4), str(vit(tmp_path / "b", num_hidden_layers=2)))
        absent = {n for n, why in reasons(found).items() if why == "the foundation model has no such tensor"}
        assert absent
        assert all("3" in n.split(".") or "2" in n.split(".") for n in absent)


class TestOtherWidths:
    def test_a_wider_foundation_matches_by_its_leading_slices(self, tmp_path):
        model = ours(tmp_path / "a")
        wide = vit(tmp_path / "b", hidden_size=32, num_attention_heads=4, intermediate_size=64)
        found, there = match(model, str(wide)), state(tmp_path / "b")
        sliced = [m for m in found.table if m.why == "leading slice"]
        assert sliced
        for m in sliced:
            assert m.region == m.shape
            part = tuple(slice(n) for n in m.region)
            assert torch.equal(found.pieces[m.name].tensor, there[m.name][part])
        left = reasons(found)
        assert left["vit.embeddings.position_embeddings"] == "position table of another shape: never sliced"
        assert left["vit.embeddings.patch_embeddings.projection.weight"].startswith("input layer of another shape")

    def test_a_narrower_one_reaches_its_part_only(self, tmp_path):
        model = ours(tmp_path / "a", hidden_size=32, num_attention_heads=4, intermediate_size=64)
        found = match(model, str(vit(tmp_path / "b")))
        for m in (m for m in found.table if m.why == "leading slice"):
            assert m.region == m.source
            assert all(r <= s for r, s in zip(m.region, m.shape, strict=True))

    def test_a_first_or_last_layer_that_differs_is_left_out_with_its_bias(self, tmp_path):
        """The bias has the same shape, and fits other weights."""
        model = ours(tmp_path / "a")
        left = reasons(match(model, str(vit(tmp_path / "b", patch_size=4)), ("labels",)))
        assert left["vit.embeddings.patch_embeddings.projection.bias"].startswith("of a layer whose weight has another")
        assert "classifier.bias" not in left
        wide = vit(tmp_path / "c", hidden_size=32, num_attention_heads=4, intermediate_size=64)
        left = reasons(match(model, str(wide), ("labels",)))
        assert left["classifier.weight"] == "labels of another shape: never sliced"
        assert left["classifier.bias"].startswith("of a layer whose weight has another shape")

    def test_another_resolution_leaves_the_position_table(self, tmp_path):
        found = match(ours(tmp_path / "a"), str(vit(tmp_path / "b", image_size=32)))
        assert reasons(found)["vit.embeddings.position_embeddings"] == "position table of another shape: never sliced"

    def test_fused_projections_are_never_sliced(self, tmp_path):
        model = load(save("gpt2", tmp_path / "a"), prose(), "full", weights="random")
        config = t.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, n_positions=40, bos_token_id=4)
        with quiet():
            t.GPT2LMHeadModel(config).save_pretrained(tmp_path / "b")
        save_tokenizer(tmp_path / "b", "gpt2")
        found = match(model, str(tmp_path / "b"))
        assert "a slice would mix q, k and v" in reasons(found)["transformer.h.0.attn.c_attn.weight"]
        assert next(m for m in found.table if m.name == "transformer.h.0.mlp.c_fc.weight").why == "leading slice"


class TestLanguageModels:
    def test_vocabularies_are_matched_by_declaration(self, tmp_path):
        model = load(lm(tmp_path / "a"), prose(), "full", weights="random")
        found = match(model, str(lm(tmp_path / "b")))
        assert {"model.embed_tokens.weight", "lm_head.weight"} == set(reasons(found))
        declared = match(model, str(tmp_path / "b"), ("vocabulary",))
        assert reasons(declared) == {}

    def test_another_vocabulary_is_never_sliced(self, tmp_path):
        model = load(lm(tmp_path / "a"), prose(), "full", weights="random")
        found = match(model, str(lm(tmp_path / "b", vocabulary=96)), ("vocabulary",))
        assert reasons(found)["lm_head.weight"] == "vocabulary of another shape: never sliced"

    def test_an_encoders_words_are_its_vocabulary(self, tmp_path):
        model = load(save("bert", tmp_path / "a"), sentences(), "full", weights="random")
        found = match(model, str(save("bert", tmp_path / "b")))
        left = reasons(found)
        assert "vocabulary" in left["bert.embeddings.word_embeddings.weight"]
        assert "bert.embeddings.position_embeddings.weight" not in left


class TestBatchNorm:
    def test_running_statistics_and_counters_never_mix(self, tmp_path):
        model = load(save("resnet", tmp_path / "a"), images(), "full", weights="random")
        found = match(model, str(save("resnet", tmp_path / "b")))
        running = [n for n in model.names if "running_" in n]
        assert running
        assert not set(running) & set(found.pieces)
        assert any("normalization.weight" in n for n in found.pieces)  # the affine parameters do


class TestRefusals:
    def test_another_kind_of_model_is_refused(self, tmp_path):
        with pytest.raises(InputError, match="does not match one of type 'vit'"):
            match(ours(tmp_path / "a"), str(save("resnet", tmp_path / "b")))

    def test_a_foundation_without_common_tensors_is_refused(self, tmp_path):
        model = load(vit(tmp_path / "a"), images(), "head")
        with pytest.raises(InputError, match="no tensor matches"):
            match(model, str(vit(tmp_path / "b")))

    def test_weights_that_are_not_finite(self, tmp_path):
        with quiet():
            broken = t.ViTForImageClassification.from_pretrained(vit(tmp_path / "b"))
            with torch.no_grad():
                broken.vit.layernorm.weight[0] = float("nan")
            broken.save_pretrained(tmp_path / "b")
        with pytest.raises(InputError, match="is nan: the weights are damaged"):
            match(ours(tmp_path / "a"), str(tmp_path / "b"))

    @pytest.mark.parametrize("name", ["", "nano-vyt", "/no/such/folder"])
    def test_an_absent_foundation_is_refused(self, name, tmp_path):
        with pytest.raises(InputError, match=r"method\.foundation"):
            match(ours(tmp_path / "a"), name)

    def test_a_file_that_is_not_a_model_is_refused(self, tmp_path):
        (tmp_path / "m.safetensors").write_bytes(b"nothing")
        with pytest.raises(InputError, match=r"method\.foundation"):
            match(ours(tmp_path / "a"), str(tmp_path / "m.safetensors"))


def test_the_table_can_be_read(tmp_path):
    text = str(match(ours(tmp_path / "a"), str(vit(tmp_path / "b", hidden_size=32, num_attention_heads=4))))
    assert "leading slice" in text
    assert "vit.embeddings.cls_token" in text
    assert len(text.splitlines()) == len(ours(tmp_path / "a2").live())
    assert len(CLASSES) == 3
