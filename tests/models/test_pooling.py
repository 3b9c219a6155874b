"""Cached features are those that the model's own classifier pools, or the model is refused."""

import pytest
import torch
import transformers as t
from test_stages import DECODER, T5, TEXT, built
from tiny_models import load, save_tokenizer, sentences

from fedfm.errors import InputError
from fedfm.models import pooling
from fedfm.models.quiet import quiet

EURO = {**DECODER, "mask_token_id": 1}
MODERN = {**TEXT, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
FAMILIES = {
    "EuroBert late": ("EuroBert", "MaskedLM", {**EURO, "classifier_pooling": "late"}, "bert"),
    "EuroBert mean": ("EuroBert", "MaskedLM", {**EURO, "classifier_pooling": "mean"}, "bert"),
    "ModernBert mean": ("ModernBert", "MaskedLM", {**MODERN, "classifier_pooling": "mean"}, "bert"),
    "Llama": ("Llama", "CausalLM", DECODER, "llama"),
    "T5": ("T5", "Seq2SeqLM", {**T5, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 3}, "bert"),
}
T5GEMMA = {**DECODER, "head_dim": 8, "sliding_window": 16}


def saved(folder, name, auto, keys, tokenizer):
    with quiet():
        module = built(name, f"AutoModelFor{auto}", keys)
        for p in module.parameters():
            if p.dim() > 1:
                p.data.mul_(5)  # so that states of two tokens differ
        module.save_pretrained(folder)
        save_tokenizer(folder, tokenizer)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_on_features_gives_the_logits_of_transformers(tmp_path, family):
    table = sentences(6)
    model = load(saved(tmp_path, *FAMILIES[family]), table, "head")
    rows = model.prepare(table, range(6))
    batch = rows.batch(range(6))
    with torch.no_grad():
        theirs = model.module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        ours = model.head(model.features(rows))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_way_of_pooling_does_not_depend_on_the_rows_or_the_heads_numbers(tmp_path):
    table = sentences(6)
    model = load(saved(tmp_path, *FAMILIES["EuroBert late"]), table, "head")
    found = pooling.way_of(model, model.head, model.prepare(table, range(6)))
    with torch.no_grad():
        model.head.weight.zero_()
    assert pooling.way_of(model, model.head, model.prepare(table, [0])) is found
    assert found is not pooling.last


def t5gemma(folder):
    both = {"encoder": T5GEMMA, "decoder": {**T5GEMMA, "cross_attention_hidden_size": 16}, "vocab_size": 64}
    special = {"pad_token_id": 0, "bos_token_id": 4, "eos_token_id": 3, "decoder_start_token_id": 4}
    return saved(folder, "T5Gemma", "Seq2SeqLM", {**both, **special}, "bert")


def test_a_model_whose_logits_depend_on_padding_has_no_features(tmp_path):
    table = sentences(6)
    model = load(t5gemma(tmp_path), table, "head")
    with pytest.raises(InputError, match="depend on the padding"):
        model.features(model.prepare(table, range(6)))


def test_logits_that_depend_on_padding_are_reported(tmp_path):
    table = sentences(6)
    model = load(t5gemma(tmp_path / "a"), table, "lora")
    assert any("padding" in text for text in pooling.of_padding(model))
    plain = load(saved(tmp_path / "b", *FAMILIES["Llama"]), table, "lora")
    assert pooling.of_padding(plain) == []


def test_logits_that_are_no_linear_map_of_one_vector_are_refused(tmp_path):
    table = sentences(6)
    model = load(saved(tmp_path, *FAMILIES["Llama"]), table, "head")
    model.module.register_forward_hook(
        lambda _, __, out: t.modeling_outputs.SequenceClassifierOutput(logits=out.logits.tanh())
    )
    with pytest.raises(InputError, match="not a linear map of one vector per row"):
        model.encode(model.prepare(table, range(6)))
