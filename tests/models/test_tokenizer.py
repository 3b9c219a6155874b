import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.errors import InputError
from fedfm.models.architectures.tokenizer import END, train

TEXT = ["the cat sat on the mat\n", "the dog <unk> sat\n", "zeta alpha beta\n"]


@pytest.fixture(scope="module")
def bpe():
    return train(TEXT * 5, 280)


@settings(max_examples=60)
@given(text=st.text(max_size=60))
def test_bytes_lose_nothing(bpe, text):
    ids = bpe(text)["input_ids"]
    assert END in text or bpe.decode(ids, clean_up_tokenization_spaces=False) == text
    assert max(ids, default=0) < len(bpe)


def test_merges_shorten_and_are_no_more_than_asked_for(bpe):
    assert 257 < len(bpe) <= 280
    assert len(bpe(TEXT[0])["input_ids"]) < len(TEXT[0].encode())
    assert len(train([], 257)) == 257
    assert bpe("")["input_ids"] == []  # nothing is added
    assert bpe.pad_token_id == bpe.eos_token_id == 0


def test_words_are_the_most_frequent_and_ties_go_by_the_alphabet():
    made = train(TEXT, 6, "words")
    assert made.convert_ids_to_tokens(range(6)) == [END, "<unk>", "the", "sat", "alpha", "beta"]
    ids = made("the zeta alpha\nsat")["input_ids"]
    assert made.convert_ids_to_tokens(ids) == ["the", "<unk>", "alpha", END, "sat"]
    assert made("")["input_ids"] == []


def test_the_same_text_gives_the_same_vocabulary(tmp_path):
    for kind, size in (("bpe", 300), ("words", 8)):
        one, two = (train(TEXT, size, kind).get_vocab() for _ in range(2))
        assert one == two


@pytest.mark.parametrize(("size", "kind", "says"), [(256, "bpe", "at least 257"), (2, "words", "3"), (9, "w", "bpe")])
def test_what_makes_no_sense_is_refused(size, kind, says):
    with pytest.raises(InputError, match=says):
        train(TEXT, size, kind)
