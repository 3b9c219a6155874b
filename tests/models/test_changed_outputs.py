"""Outputs that a tokenizer changes are said before a run, for each task that scores exact matches; and which end of a
text that is too long is lost.
"""

import json

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import tiny_seq2seq
import tiny_text
from fedfm.core import tasks
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.models import lost_words
from fedfm.models.load import load_model
from fedfm.models.preprocessors import Tools
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.models.text_metrics import Answer, compare_texts

CHANGES = "the tokenizer of the model changes the outputs of"


def bytes_tokenizer(*, lower):
    """A tokenizer of all bytes, as GPT-2's; ``lower``: it writes lower case."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    of = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    of.pre_tokenizer, of.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if lower:
        of.normalizer = normalizers.Lowercase()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=of)


EXACT, LOWER = bytes_tokenizer(lower=False), bytes_tokenizer(lower=True)


def rows(outputs):
    return Table("instruction", [("say", text) for text in outputs], None, (), np.full(len(outputs), "test"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=5))
def test_a_notice_counts_the_rows_that_no_answer_can_match(outputs):
    """The best answer is what the tokens of the output stand for; exact match compares it with the output itself."""
    assert lost_words.changed_outputs({"test": rows(outputs)}, EXACT) == []
    known = [text for text in outputs if text.strip()]
    best = [Answer((), LOWER.decode(LOWER(text)["input_ids"]), False) for text in known]
    wrong = len(known) - int(compare_texts(best, known)["exact_answers"])
    found = lost_words.changed_outputs({"test": rows(outputs)}, LOWER)
    assert [f"{CHANGES} {wrong} of {len(known)} test rows" in text for text in found] == ([True] if wrong else [])


def test_calls_of_tools_and_missing_outputs_do_not_count():
    table = rows(["", ("assistant", "A", "{}"), "b"])
    assert lost_words.changed_outputs({"test": table}, LOWER) == []


@pytest.mark.parametrize("task", ["sequence_to_sequence", "instruction"])
def test_each_task_that_scores_exact_matches_says_it(task, tmp_path):
    folder = tmp_path / "model"
    tiny_seq2seq.save_t5(folder) if task == "sequence_to_sequence" else tiny_text.save_llama(folder)
    words = tiny_seq2seq.WORDS if task == "sequence_to_sequence" else tiny_text.COMMON
    model = load_model(
        ModelSpec(str(folder), max_length=16, adaptation=AdaptationSpec("full")),
        classes=(),
        kind="sequences" if task == "sequence_to_sequence" else "instruction",
        task=task,
    )
    for change, wrong in ((str, False), (str.upper, True), (lambda text: text.replace(" ", "\n"), True)):
        path = tmp_path / "rows.jsonl"
        given_rows = [{"instruction": words[0], "output": change(f"{words[i % 6]} {words[1]}")} for i in range(12)]
        path.write_text("".join(json.dumps(row) + "\n" for row in given_rows))
        table = load_table(DataSpec(path=str(path)), seed=0, task=task)
        parts = {"training": table.take(table.rows("train")), "test": table.take(table.rows("test"))}
        found = [text for text in model.task.forewarnings(parts, model.tools) if CHANGES in text]
        assert bool(found) == wrong
        assert not wrong or "of 10 training rows and 2 of 2 test rows" in found[0]


@pytest.mark.parametrize(("side", "lost"), [("left", "beginning"), ("right", "end")])
def test_the_end_that_is_cut_is_the_tokenizers(side, lost):
    tokenizer = bytes_tokenizer(lower=False)
    tokenizer.truncation_side = side
    table = Table("text", ["a long text", "b"], None, (), np.full(2, "train"), source="rows")

    class Model:
        tools, task = Tools(tokenizer=tokenizer, max_length=4), tasks.find("classification")

    assert lost_words.notices(table, range(2), Model)[-1].endswith(f"lose their {lost}")
