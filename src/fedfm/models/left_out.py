"""Finds the words of rows that a chat template leaves out, or shows differently in a prompt than in training.

A template may drop an answer's reasoning, text next to tool calls, or the messages of a role that it does not know. So
the check replaces each word of a row by a unique mark, and searches for the mark in the text for training.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fedfm.core.rows import TOOLS, Turn
from fedfm.errors import InputError
from fedfm.models.language.chat_form import ASSISTANT, apply, form_of
from fedfm.models.language.chat_templates import messages_of_row, prompts_differ, text_of_row
from fedfm.models.language.tool_calls import CALLS, has_calls

_TAG = re.compile(r"<(/?)([^<>\s/]+)>")
_PART = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]|[^\s<\[]+|[<\[]")  # a tag that a template may search for, or a word
_LETTER = re.compile(r"\w")
_MARK = "Wzxk{}q"  # occurs in no row and no template
_RETOLD = "retold"
Words = dict[str, tuple[str, str]]  # mark -> (the word that it replaces, the word's source, e.g. "what a user says")


def count(rows: Iterable[Sequence[Any]], template: str | None, tokenizer: Any) -> Counter[str]:
    """The number of rows for each kind of omission; the kinds are described in words.

    The key "retold" counts rows whose prompts differ from the text for training.

    Args:
        rows: for each row its messages and its answers.
        template: from :func:`fedfm.models.language.chat_templates.text_of`.

    Raises:
        InputError: the chat template refuses a row.
    """
    found: Counter[str] = Counter()
    for said, *answers in rows:
        of: set[str] = set()
        for answer in answers:
            if turns := messages_of_row(said, answer, template):
                of |= left_out(turns, tokenizer)
                of |= {_RETOLD} if prompts_differ(turns, tokenizer) else set()
        found.update(of)
    return found


def notices(parts: dict[str, tuple[Counter[str], int]]) -> list[str]:
    """Notices about the results of :func:`count`.

    Args:
        parts: (the counts, the number of rows) for "training" and for "test".
    """

    def rows(what: str) -> str:
        return " and ".join(f"{of[what]} of {n} {name} rows" for name, (of, n) in parts.items() if of[what])

    kinds = sorted({what for of, _ in parts.values() for what in of if what != _RETOLD})
    found = [
        f"the chat template leaves out {what} in {rows(what)}, so it is neither trained nor read: set another "
        "model.template, or remove it from the rows"
        for what in kinds
    ]
    if any(of[_RETOLD] for of, _ in parts.values()):
        found.append(
            f"the chat template writes earlier answers of a prompt differently from the last answer, in "
            f"{rows(_RETOLD)}: training writes all answers in the form of the last one, and a prompt "
            "writes the earlier ones in the other form"
        )
    return found


def left_out(turns: Sequence[Turn], tokenizer: Any) -> set[str]:
    """The sources of the words that a row's text lacks. The last message may be the answer or a question.

    Raises:
        InputError: the chat template refuses the conversation.
    """
    marked, words = _with_marks(turns)
    try:
        text = _text(marked, tokenizer)
    except InputError:  # the template depends on the words, so the original words stay
        text = _text(turns, tokenizer)
        return {whose for word, whose in words.values() if word not in text}
    return {whose for mark, (_, whose) in words.items() if mark not in text}


def _text(turns: Sequence[Turn], tokenizer: Any) -> str:
    if turns[-1][0] == ASSISTANT:
        return text_of_row(turns, tokenizer)
    return str(apply(turns, tokenizer, form_of(tokenizer), tokenize=False, add_generation_prompt=True))


def _with_marks(turns: Sequence[Turn]) -> tuple[list[Turn], Words]:
    """The same conversation with a mark for each word, including the arguments of calls."""
    words: Words = {}

    def mark(word: str, whose: str) -> str:
        words[key := _MARK.format(len(words))] = (word, whose)
        return key

    def strings(value: Any, whose: str) -> Any:
        if isinstance(value, str):
            return mark(value, whose) if _LETTER.search(value) else value
        if isinstance(value, dict):
            return {key: strings(v, whose) for key, v in value.items()}
        return [strings(v, whose) for v in value] if isinstance(value, list) else value

    def arguments(value: Any) -> Any:
        whose = "the arguments of a call"
        if not isinstance(value, str):
            return strings(value, whose)
        return json.dumps(strings(json.loads(value), whose), ensure_ascii=False)

    out: list[Turn] = []
    for turn in turns:
        role, content, *more = turn
        if role == TOOLS:  # check_tools checks the tools
            out.append(turn)
            continue
        called = has_calls(turn)
        shown = "".join(
            mark(part, whose) if whose else part for part, whose in _parts(role, content, next_to_calls=called)
        )
        if not called:
            out.append((role, shown, *more))
            continue
        fields = json.loads(more[0])
        for call in fields[CALLS]:
            of = call.get("function", call)
            of["arguments"] = arguments(of["arguments"])
        out.append((role, shown, json.dumps(fields, ensure_ascii=False)))
    return out, words


def _parts(role: str, content: str, *, next_to_calls: bool) -> Iterator[tuple[str, str]]:
    """The pieces of a content, each with its source; the source is "" for space and for tags of templates."""
    closed = {name for slash, name in _TAG.findall(content) if slash}
    within: list[str] = []
    end = 0
    for found in _PART.finditer(content):
        yield content[end : found.start()], ""
        part, end = found[0], found.end()
        if tag := _TAG.fullmatch(part):
            if not tag[1] and tag[2] in closed:
                within.append(tag[2])
            elif tag[1] and within and within[-1] == tag[2]:
                within.pop()
        if part[0] in "<[" or not _LETTER.search(part):
            yield part, ""
            continue
        where = f" within <{within[-1]}>" if within else " next to calls of tools" if next_to_calls else ""
        yield part, f"what {'an' if role[0] in 'aeio' else 'a'} {role} says{where}"
    yield content[end:], ""
