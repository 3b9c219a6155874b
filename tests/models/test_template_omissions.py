"""Notices name the parts of rows that a chat template leaves out, for all templates that TRL knows."""

from pathlib import Path

import numpy as np
import pytest
from chats import counted, row_of, talk, tokenizer_of

from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.models import left_out
from fedfm.models.language import chat_templates, encoding

trl = pytest.importorskip("trl.chat_template_utils")
FOLDER = Path(trl.__file__).parent / "chat_templates"
FILES = sorted(FOLDER.glob("*.jinja"))
THOUGHTS = ("what an assistant says within <think>", "retold")
SAID = (("user", "what is up"), ("assistant", "<think>\nlambda\n</think>\n\nthe sky"), ("user", "and down"))
ANSWER = "<think>\nkappa nu\n</think>\n\nthe ground"


def fitted(path):
    tokenizer = tokenizer_of(path.read_text(encoding="utf-8"))
    chat_templates.fit(tokenizer, None, {})
    return tokenizer


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_notice_counts_exactly_what_the_tokens_lack(path):
    tokenizer = fitted(path)
    try:
        row = chat_templates.encode_row(SAID, ANSWER, None, tokenizer)
    except InputError:  # in the template's words, or since the rest depends on the answer
        return
    found = left_out.count([(SAID, ANSWER)], None, tokenizer)
    text = tokenizer.decode(row.ids)
    lacks = not all(word in text for word in ("lambda", "kappa", "nu"))
    # Each answer follows the tokens with which the model is asked for it.
    prompts = [tokenizer.decode(chat_templates.prompt_tokens(said, None, tokenizer)) for said in (SAID[:1], SAID)]
    answers = [part for part in counted(row.ids, row.counts, tokenizer) if part.strip()]
    assert "the sky" in answers[0]
    assert "the ground" in answers[1]
    retold = not all(text.startswith(prompt) for prompt in prompts)
    assert (found[THOUGHTS[0]] == 1, found[THOUGHTS[1]] == 1) == (lacks, retold)
    assert set(found) <= set(THOUGHTS)


def test_a_text_next_to_calls_is_reported():
    rows = [row_of(talk(content="let me look")), row_of(talk()), row_of(talk(content="well"))]
    dropped = left_out.count(rows, None, fitted(FOLDER / "llama3_1.jinja"))
    assert dropped["what an assistant says next to calls of tools"] == 2
    assert not left_out.count(rows, None, fitted(FOLDER / "qwen2_5.jinja"))


ROLES = "{% for m in messages if m['role'] in ('user', 'assistant') %}{{ m['role'] }}: {{ m['content'] }}<eos>"
ASKS = "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
THINKS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'].split('</think>')[-1] }}<eos>"


@pytest.mark.parametrize(
    ("template", "row", "told"),
    [
        (ROLES, ((("system", "be kind"), ("user", "a")), "b"), ["what a system says"]),
        (ROLES, ((("developer", "user"), ("user", "user")), "user"), ["what a developer says"]),  # words elsewhere, too
        (ROLES, ("a", "b"), []),
        (ROLES, ("a", ""), []),
        (THINKS, ("a", "<think>b</think>b"), ["what an assistant says within <think>"]),
        (THINKS, ("a", "b", "<think>c</think> b"), ["what an assistant says within <think>"]),  # the worse answer
        (THINKS, ("1 < 2 [a] <b>c</b>?", "<div>b</div>"), []),
        (THINKS, ("a </think> b", "c"), ["what a user says"]),
        (ROLES.replace("m['content']", "m['content'][:30]"), ("a word " * 20, "b"), ["what a user says"]),
    ],
)
def test_words_that_a_template_drops_are_found_wherever_else_they_stand(template, row, told):
    tokenizer = tokenizer_of(template + ASKS)
    assert sorted(left_out.count([row], None, tokenizer)) == told
    assert not left_out.count([row], chat_templates.TEXTS["plain"], tokenizer) or not isinstance(row[0], str)


def test_a_notice_counts_the_rows_of_each_part():
    tokenizer = tokenizer_of(THINKS + ASKS)
    rows = [("a", "<think>b</think>c"), ("a", "c"), ("a", "<think>d</think>c")]
    table = Table("instruction", rows, None, (), np.full(3, "train"))
    parts = {
        name: (encoding.template_losses(table, index, tokenizer, None), len(index))
        for name, index in (("training", [0, 1]), ("test", [2]))
    }
    assert left_out.notices(parts) == [
        "the chat template leaves out what an assistant says within <think> in 1 of 2 training rows and 1 of 1 test "
        "rows, so it is neither trained nor read: set another model.template, or remove it from the rows"
    ]
