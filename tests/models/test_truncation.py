"""The one rule of truncation: BOS stays, a cut answer has no end, all of max_length is used, no row lacks a target."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import load

from fedfm.data.table import Table
from fedfm.models.language import encoding
from fedfm.models.language.chat_templates import Written
from fedfm.models.language.truncation import cut, end_token

BOS, EOS, LINE = 1, 2, 3
TOKENIZER = SimpleNamespace(bos_token_id=BOS, all_special_ids=[BOS, EOS])


def row(prompt, answer):
    return Written(prompt + answer, [False] * len(prompt) + [True] * len(answer), len(prompt))


def made(p, a):
    """A prompt of p tokens with BOS, and an answer of a with EOS."""
    return [BOS, *range(100, 99 + p)], [*range(500, 499 + a), EOS]


@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 40))
def test_bos_stays_a_cut_answer_has_no_end_and_every_place_is_used(p, a, most):
    prompt, answer = made(p, a)
    found = cut(row(prompt, answer), most, TOKENIZER)
    assert len(found.ids) == min(p + a, most)
    head, tail = found.ids[: found.start], found.ids[found.start :]
    assert found.start >= 1
    assert tail
    assert found.counts == [False] * len(head) + [True] * len(tail)
    assert head[-1] == prompt[-1] or len(head) == 1
    if len(head) > 1:
        assert head[0] == BOS
        assert head[1:] == prompt[p - len(head) + 1 :]
    assert tail == answer[: len(tail)]  # so EOS is there only if the answer is whole
    # Neither takes from the other what it does not need.
    if len(tail) < a:
        assert len(tail) >= most // 2
    if len(head) < p:
        assert len(head) >= most // 2


def test_by_hand():
    prompt, answer = made(5, 6)  # 1 100 101 102 103 | 500 .. 504 2
    assert cut(row(prompt, answer), 8, TOKENIZER).ids == [BOS, 101, 102, 103, 500, 501, 502, 503]
    assert cut(row(prompt, answer), 10, TOKENIZER).ids == [*prompt, 500, 501, 502, 503, 504]
    assert cut(row(prompt, answer[-2:]), 4, TOKENIZER).ids == [BOS, 103, 504, EOS]
    assert cut(row([9, 8, 7], [6, 5, 4]), 4, TOKENIZER).ids == [8, 7, 6, 5]  # without BOS and EOS
    ended = cut(row(prompt, [500, 501, 502, EOS, LINE]), 7, TOKENIZER)
    assert ended.ids == [BOS, 102, 103, 500, 501, 502, EOS]


def test_earlier_answers_stay_marked():
    ids = [BOS, 10, 11, 12, EOS, 13, 14, 15, EOS]
    counts = [False, False, False, True, True, False, False, True, True]
    found = cut(Written(ids, counts, 7), 7, TOKENIZER)
    assert found.ids == [BOS, 12, EOS, 13, 14, 15, EOS]
    assert found.counts == [False, True, True, False, False, True, True]
    assert found.start == 5


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 30), st.integers(2, 30))
def test_two_answers_keep_one_prompt(p, a, b, most):
    both = [row(*made(p, n)) for n in (a, b)]
    first, second = (cut(r, most, TOKENIZER, max(a, b)) for r in both)
    assert first.ids[: first.start] == second.ids[: second.start]
    assert len(first.ids) == min(first.start + a, most)
    assert len(second.ids) == min(second.start + b, most)


def test_rows_and_prompts_of_a_model(folder):
    pairs = [("the fox " * 12, "jumps"), ("fox", "the dog " * 12)]
    model = load(folder("llama"), Table("instruction", pairs, None, (), np.full(2, "train")), "lora", max_length=8)
    tokenizer = model.tools.tokenizer
    tokens, where = encoding.instructions(pairs, tokenizer, 8, model.tools.template)
    assert [tokenizer.decode(t) for t in tokens] == [
        "<s> fox the fox the fox jumps [SEP]",
        "<s> fox the dog the dog the dog",
    ]
    assert where["answer_start"].tolist() == [6, 2]
    assert where.keys() == {"answer_start"}
    assert [tokenizer.decode(t) for t in encoding.prompts(pairs, tokenizer, 4, model.tools.template)] == [
        "<s> fox the fox",
        "<s> fox",
    ]
    table = Table("instruction", [*pairs, ("a", "b")], None, (), np.full(3, "train"))
    assert encoding.cut_rows(table, range(3), tokenizer, 8, model.tools.template) == 2
    assert encoding.cut_rows(table, [2], tokenizer, 8, model.tools.template) == 0


@pytest.mark.parametrize(("template", "token"), [("plain", "[SEP]"), ("chat", "[SEP]")])
def test_the_token_that_ends_an_answer(folder, template, token):
    table = Table("instruction", [("a", "b")], None, (), np.full(1, "train"))
    model = load(folder("llama"), table, "lora")
    model.tools.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} [SEP] fox {% endfor %}"
    found = end_token(model.tools.template if template == "plain" else None, model.tools.tokenizer)
    assert model.tools.tokenizer.decode([found]) == token
