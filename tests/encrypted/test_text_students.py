"""A BERT's polynomial student: rows of secret length, its conversion, its blocks as matrices."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertModel

from fedfm.encrypted.student import conversion
from fedfm.encrypted.student.distil import distil
from fedfm.encrypted.student.folding import fold
from fedfm.encrypted.student.text_folding import text_block_states
from fedfm.encrypted.student.text_places import embed, embedding_tables, fill_places, real_places, with_places
from fedfm.errors import InputError
from fedfm.models.adapters.side_texts import base_of, normalised_states, text_places
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from tiny_text import save_bert, texts

PLACES = 16


def load(folder):
    spec = ModelSpec(str(folder), adaptation=AdaptationSpec("head"))
    return load_model(spec, classes=("x", "y"), kind="text").module


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    save_bert(folder / "bert")
    texts(folder / "rows.jsonl")
    what = {
        "data": {"path": str(folder / "rows.jsonl")},
        "model": {"name": str(folder / "bert"), "max_length": PLACES},
        "distil": {"direct": True, "epochs": [0, 0, 0]},
    }
    return folder, distil(what, folder / "student"), load(folder / "student")


@pytest.fixture(scope="module")
def exact():
    torch.manual_seed(1)
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    config = BertConfig(**shape, vocab_size=30, max_position_embeddings=24, initializer_range=0.3)
    model = BertModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, with_places(model, 13)


def states_of(module, ids, mask):
    with torch.no_grad():
        return base_of(module)(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states


def rows_of(lengths, vocabulary=20, seed=0):
    n = torch.tensor(lengths)
    ids = torch.randint(3, vocabulary, (len(n), int(n.max())), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(ids.shape[1]) < n[:, None]).long()
    return ids * mask, mask, n


def test_a_student_has_positions_for_a_power_of_two_and_the_model_s_weights(exact):
    model, made = exact
    assert text_places(made) == made.config.max_position_embeddings == 16
    assert text_places(with_places(model, 24)) == 16  # there are no positions for 32
    assert text_places(with_places(model, 7)) == 8
    torch.testing.assert_close(
        made.embeddings.position_embeddings.weight, model.embeddings.position_embeddings.weight[:16]
    )
    with pytest.raises(InputError, match="at least 4 tokens"):
        with_places(model, 2)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_copies_in_the_padding_change_no_state(exact, lengths, seed):
    model, made = exact
    ids, mask, n = rows_of(lengths, seed=seed)
    want = states_of(model, ids, mask)
    fill_places(made)
    got = states_of(made, ids, mask)
    for level, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert ours.shape[1] == 16
        for row, length in enumerate(n.tolist()):
            torch.testing.assert_close(ours[row, :length], theirs[row, :length], rtol=1e-4, atol=1e-5)
            place = torch.arange(16) % length
            torch.testing.assert_close(ours[row], ours[row, place], rtol=1e-4, atol=1e-5, msg=f"level {level}")


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 16), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_a_row_has_the_same_states_alone_and_next_to_longer_rows(student, lengths, seed):
    module = student[2]
    ids, mask, n = rows_of(lengths, seed=seed)
    together = states_of(module, ids, mask)[-1]
    alone = states_of(module, ids[:1, : n[0]], mask[:1, : n[0]])[-1]
    torch.testing.assert_close(together[:1], alone, rtol=1e-4, atol=1e-5)


def test_a_conversion_keeps_classes_and_states(student):
    _, result, module = student
    assert result["agreement"] > 0.9
    assert result["distance"] < 0.05
    assert result["teacher_accuracy"] == pytest.approx(result["accuracy"], abs=0.1)
    assert result["outside"] <= 1e-3
    assert conversion.is_polynomial_student(module)
    assert text_places(module) == PLACES


def test_folded_blocks_compute_what_the_module_computes(student):
    module = student[2]
    folded = fold(module)
    ids, mask, n = rows_of([1, 5, 8, 13, 16])
    states = normalised_states(module, list(states_of(module, ids, mask)))
    x = embed(ids, n, embedding_tables(module))
    assert x.shape == (5, PLACES, 17)
    real = real_places(n, PLACES)
    np.testing.assert_array_equal(x[..., -1].numpy(), real.numpy())
    u = x[..., :-1]
    torch.testing.assert_close(u.float(), states[0], rtol=1e-4, atol=1e-5)
    for number, block in enumerate(folded.blocks, 1):
        u, most = text_block_states(block, u, real)
        torch.testing.assert_close(u.float(), states[number], rtol=1e-3, atol=1e-4)
        assert most <= folded.bound
        assert float(u.abs().max()) <= folded.ranges[number - 1]
        assert float(u.mean(-1).abs().max()) < 1e-9


def test_a_student_without_places_must_be_distilled_again(student):
    folder, *_ = student
    plain = load(folder / "bert")
    plain.config.fedfm_polynomials = {"outside": 0.0, "blocks": []}
    with pytest.raises(InputError, match="'bert' cannot run encrypted"):
        fold(plain)
    del plain.config.fedfm_polynomials


@pytest.mark.proof
def test_a_trained_student_folds(tmp_path):
    save_bert(tmp_path / "bert")
    texts(tmp_path / "rows.jsonl")
    what = {
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "model": {"name": str(tmp_path / "bert"), "max_length": PLACES},
        "distil": {"epochs": [4, 2, 1], "tameness": 20.0},
    }
    assert distil(what, tmp_path / "student")["epochs"] == 7
    module = load(tmp_path / "student")
    module.config.fedfm_polynomials["outside"] = 0.0
    ids, mask, n = rows_of([3, 8])
    states = normalised_states(module, list(states_of(module, ids, mask)))
    u, real = embed(ids, n, embedding_tables(module))[..., :-1], real_places(n, PLACES)
    for block in fold(module).blocks:
        u, _ = text_block_states(block, u, real)
    torch.testing.assert_close(u.float(), states[-1], rtol=1e-3, atol=1e-3)


def test_a_student_is_measured_again_on_other_texts_and_keeps_its_states(student, tmp_path):
    folder, _, module = student
    lines = (folder / "rows.jsonl").read_text().replace("river", "the of").splitlines()
    (tmp_path / "others.jsonl").write_text("\n".join(lines))
    what = {
        "data": {"path": str(tmp_path / "others.jsonl")},
        "model": {"name": str(folder / "student")},
        "distil": {"epochs": [0, 0, 0]},
    }
    result = distil(what, tmp_path / "wider")
    assert result["without_numbers"] == 0
    assert result["outside"] <= result["outside_before"] + 1e-9
    again = load(tmp_path / "wider")
    ids, mask, _ = rows_of([3, 16])
    torch.testing.assert_close(states_of(again, ids, mask)[-1], states_of(module, ids, mask)[-1], rtol=0.02, atol=0.02)
    assert fold(again).bound >= 1


def test_the_paper_s_polynomials_are_refused_before_training(student, tmp_path):
    folder, *_ = student
    what = {
        "data": {"path": str(folder / "rows.jsonl")},
        "model": {"name": str(folder / "bert")},
        "distil": {"polynomials": "paper"},
    }
    with pytest.raises(InputError, match="divide by the variance"):
        distil(what, tmp_path / "student")
