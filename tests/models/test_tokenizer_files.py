"""A tokenizer reads texts as its own file says, whatever the type of its model."""

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from fedfm.models import tokenizer_files

WORDS = {"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3, "w7": 4}


@pytest.fixture(params=["qwen2", "llama", "bert"])
def folder(request, tmp_path):
    """A tokenizer of whole words beside a configuration of this type."""
    made = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]")
    fast.save_pretrained(tmp_path)
    transformers.AutoConfig.for_model(request.param).save_pretrained(tmp_path)
    return tmp_path


def test_texts_are_split_as_the_file_says(folder):
    tokenizer, by, notices = tokenizer_files.read(folder, "mine")
    assert tokenizer("good w7")["input_ids"] == [2, 4]
    assert getattr(transformers, by).from_pretrained(folder)("bad")["input_ids"] == [3]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)("good w7")["input_ids"]
    assert [("a WordLevel tokenizer" in notice and by in notice) for notice in notices] == [True] * (theirs != [2, 4])
