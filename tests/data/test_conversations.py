"""Conversations and preferences in files: the rows of good files, and the refusals of bad ones."""

from __future__ import annotations

import hashlib
import io

import numpy as np
import pytest

from fedfm.data.load import load_table
from fedfm.data.rows_to_predict import read_inputs
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table, contents, fingerprint
from fedfm.errors import InputError
from small import jsonl


def turns_of(*texts, system=""):
    """Messages of user and assistant in turns."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def read(path, rows, task=None, **keys):
    return load_table(DataSpec(path=str(jsonl(path / "rows.jsonl", rows)), test_fraction=0, **keys), seed=0, task=task)


TALK = turns_of("hi", "hello", "who", "me", system="be kind")


def test_a_conversation_is_what_was_said_and_the_last_answer(tmp_path):
    table = read(tmp_path, [{"messages": TALK, "site": "a"}, {"messages": turns_of("x", "y"), "site": "b"}])
    assert table.kind == "instruction"
    before = (("system", "be kind"), ("user", "hi"), ("assistant", "hello"), ("user", "who"))
    assert table.inputs == [(before, "me"), ((("user", "x"),), "y")]
    assert table.columns["site"].tolist() == ["a", "b"]
    assert list(contents(table.inputs[0])) == ["be kind", "hi", "hello", "who", "me"]


def test_parquet_and_another_name(tmp_path):
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"talk": [TALK, turns_of("x", "y")]}), out)
    (tmp_path / "rows.parquet").write_bytes(out.getvalue())
    spec = DataSpec(path=str(tmp_path / "rows.parquet"), messages="talk", test_fraction=0)
    rows = [{"messages": TALK}, {"messages": turns_of("x", "y")}]
    assert load_table(spec, seed=0, task="instruction").inputs == read(tmp_path, rows).inputs


def test_instructions_come_first_where_a_file_has_both(tmp_path):
    table = read(tmp_path, [{"instruction": "a", "output": "b", "messages": TALK}])
    assert table.inputs == [("a", "b")]


def test_rows_to_predict_may_end_with_the_users_turn(tmp_path):
    path = jsonl(tmp_path / "new.jsonl", [{"messages": turns_of("hi")}, {"messages": TALK}])
    table = read_inputs(path, DataSpec(path="x"), kind="instruction")
    assert table.inputs == [((("user", "hi"),), ""), read(tmp_path, [{"messages": TALK}]).inputs[0]]


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (turns_of("hi"), r'line 1: column "messages" ends with an unanswered message of the user'),
        ([], "holds no message"),
        (None, "holds nothing: messages are expected"),
        ("hello", r"holds text: messages are expected.*jsonl and parquet hold lists"),
        (["hi"], "message 1 of column .messages. is str"),
        ([{"from": "human", "text": "hi"}], r'message 1.*is dict\s+with "from", "text": messages are expected'),
        ([{"role": "humn", "content": "a"}, *turns_of("a", "b")], r"message 1.*is of role 'humn': expected one of"),
        ([{"role": "assistan", "content": "a"}], r'did you mean "assistant"'),
        ([{"role": "user", "content": ["a"]}], "message 1.*holds list .*text is expected"),
        ([{"role": "user", "content": " "}, *turns_of("a", "b")], "message 1.* is empty"),
        ([{"role": "user", "content": "a", "weight": 1}], 'has "weight", which is not read'),
        ([{"role": "assistant", "content": "a"}], "begins with the assistant's message"),
    ],
)
def test_invalid_conversations_are_refused_with_their_place(tmp_path, cell, says):
    with pytest.raises(InputError, match=says):
        read(tmp_path, [{"messages": cell, "i": 1}], "instruction")


TRIPLE = ("the sky", "is blue", "is green")


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"prompt": "the sky", "chosen": "is blue", "rejected": "is green"}, "the sky"),
        ({"prompt": turns_of("the sky"), "chosen": "is blue", "rejected": "is green"}, (("user", "the sky"),)),
        (
            {
                "prompt": turns_of("the sky"),
                "chosen": [{"role": "assistant", "content": "is blue"}],
                "rejected": [{"role": "assistant", "content": "is green"}],
            },
            (("user", "the sky"),),
        ),
        (
            {"chosen": turns_of("the sky", "is blue"), "rejected": turns_of("the sky", "is green")},
            (("user", "the sky"),),
        ),
        (
            {
                "prompt": "the sky",  # as in ultrafeedback_binarized
                "chosen": turns_of("the sky", "is blue", system="be brief"),
                "rejected": turns_of("the sky", "is green", system="be brief"),
            },
            (("system", "be brief"), ("user", "the sky")),
        ),
    ],
)
def test_preferences_in_every_form(tmp_path, row, asked):
    table = read(tmp_path, [row])
    assert table.kind == "preference"
    assert table.inputs == [(asked, "is blue", "is green")]
    assert table.notices == ()
    prompts = read_inputs(jsonl(tmp_path / "new.jsonl", [row]), DataSpec(path="x"), kind="preference")
    assert (prompts.kind, prompts.inputs) == ("instruction", [(asked, "")])


def test_equal_answers_are_reported(tmp_path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": c} for c in "bcc"]
    assert read(tmp_path, rows).notices == (
        "in 1 of 3 rows, chosen and rejected are the same answer: such rows teach nothing",
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"chosen": "a", "rejected": "b"}, 'no prompt .data.prompt = "prompt".: the answers are texts'),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, 'column "prompt" is empty'),
        ({"prompt": "p", "chosen": " ", "rejected": "b"}, 'column "chosen" is empty'),
        ({"prompt": "p", "chosen": "a", "rejected": None}, 'column "rejected" holds nothing'),
        ({"prompt": "p", "chosen": turns_of("p", "a"), "rejected": "b"}, "a text and a list of messages"),
        ({"chosen": turns_of("p", "a"), "rejected": turns_of("q", "b")}, "differ in more than the last message"),
        (
            {"prompt": "q", "chosen": turns_of("p", "a"), "rejected": turns_of("p", "b")},
            'differently from column "prompt"',
        ),
        ({"chosen": turns_of("p"), "rejected": turns_of("p", "b")}, "ends with a message of the user: the assistant's"),
        ({"chosen": turns_of("p", "a")}, 'no column "rejected" .data.rejected.'),
    ],
)
def test_invalid_preferences_are_refused_with_their_place(tmp_path, row, says):
    with pytest.raises(InputError, match=says):
        read(tmp_path, [row], "preference")


def test_texts_are_pointed_to_the_task_of_their_columns(tmp_path):
    with pytest.raises(InputError, match=r'it has preferences: set model.task = "preference"'):
        read(tmp_path, [{"prompt": "p", "chosen": "a", "rejected": "b"}], "classification")
    with pytest.raises(
        InputError, match=r'no column "instruction" .*it has preferences: set model.task = "preference"'
    ):
        read(tmp_path, [{"prompt": "p", "chosen": "a", "rejected": "b"}], "instruction")


def by_hand(kind, inputs, splits):
    """The fingerprint of unlabelled rows as releases without conversations computed it."""
    digest = hashlib.sha256()
    for text in [kind, str(len(inputs)), *(t for row in inputs for t in row), "unlabelled", "\0", *splits]:
        digest.update(len(text.encode()).to_bytes(8, "little") + text.encode())
    return digest.hexdigest()


def test_the_fingerprint_of_pairs_stays_and_turns_are_part_of_it():
    def print_of(*inputs, kind="instruction"):
        return fingerprint(Table(kind, list(inputs), None, (), np.full(len(inputs), "train")))

    assert print_of(("a", "b"), ("c", "d")) == by_hand("instruction", [("a", "b"), ("c", "d")], ["train"] * 2)
    talks = [((("user", "a"), ("assistant", "b"), ("user", "c")), "d"), ((("user", "e"),), "f")]
    moved = [((("user", "a"),), "assistant"), *talks[1:]]
    others = [(("user", "a"),), ((("system", "a"), ("assistant", "b"), ("user", "c")), "d")]
    assert len({print_of(*talks), print_of(*moved), print_of(talks[0]), print_of((others[1]), talks[1])}) == 4
