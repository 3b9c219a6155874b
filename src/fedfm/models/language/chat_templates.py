"""Writes an instruction, or a conversation, and its answers as text for a language model.

A template is either a text with ``{instruction}``, which the answer follows, or the tokenizer's own chat
template. A text is also converted into a chat template, which writes conversations and goes into exports. So a prompt
to an exported model has the same form as in training.

Prompt and answer are tokenised as one text. In a conversation the loss counts the assistant's text and the token that
ends it. A chat template may mark this text itself (``{% generation %}``). Otherwise each answer is written as if it
were the last one, and the loss counts what the answer adds to the text before it
(see :mod:`fedfm.models.language.chat_form`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedfm.core.rows import INPUT, Asked, Output, Turn, blank, has_tools
from fedfm.errors import InputError, close
from fedfm.models.language.chat_form import (
    ASSISTANT,
    MARKS,
    Form,
    apply,
    check_tools,
    describe,
    form_of,
    render,
    replace_content,
    special_ids,
    split_prompt_start,
    template_of,
    with_settings,
)

TEXTS = {
    "plain": "{instruction}\n",
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:\n"
    ),
}
# Templates with a different introduction for an instruction with an input.
_WITH_INPUT = {
    TEXTS["alpaca"]: TEXTS["alpaca"].replace(
        "a task. Write", "a task, paired with an input that provides further context. Write"
    )
}
CHAT = "chat"
_PLACE = "{instruction}"
_PAIR = 2
_SHOWN = 40  # number of a text's characters that a message shows
_RIGHT = 'set model.template = "alpaca" or a text with {instruction}, or mark answers with {% generation %}'


@dataclass(frozen=True)
class Written:
    """The tokens of one row.

    Attributes:
        ids: tokens of the prompt and of the answer.
        counts: for each token, whether the loss counts it.
        start: index of the first token of the last answer.
    """

    ids: list[int]
    counts: list[bool]
    start: int


def text_of(template: str | None, tokenizer: Any) -> str | None:
    """The text with ``{instruction}``; None stands for the tokenizer's chat template.

    Args:
        template: a name, a text, or None for the tokenizer's chat template if it has one, else "plain".

    Raises:
        InputError: the template is neither a name nor a text with ``{instruction}``, or it is "chat" and the tokenizer
            has no chat template.

    Example:
        >>> text_of("Q: {instruction} A: ", None)
        'Q: {instruction} A: '
    """
    has = getattr(tokenizer, "chat_template", None)
    if template is None:
        return None if has else TEXTS["plain"]
    if template == CHAT:
        if not has:
            raise InputError('model.template = "chat": the tokenizer has no chat template; expected "alpaca" or a text')
        return None
    text = TEXTS.get(template, template)
    if text.count(_PLACE) != 1:
        near = close(template, [*TEXTS, CHAT])
        raise InputError(
            f"model.template = {template!r}: expected {', '.join([*TEXTS, CHAT])}, or a text with one {_PLACE}{near}"
        )
    return text


def as_chat_template(text: str, tokenizer: Any) -> str:
    """A chat template (Jinja) that writes what the text writes, and the tokens that the tokenizer adds by itself.

    The text has no place for a system message, so a system message becomes a separate line.
    """
    before, after = (json.dumps(part) for part in text.split(_PLACE))
    if (other := _WITH_INPUT.get(text)) is not None:
        paired = json.dumps(other.partition(_PLACE)[0])
        before = f"({paired} if {json.dumps(INPUT)} in m['content'] else {before})"
    empty = tokenizer("")["input_ids"]
    first = "{{ bos_token }}" if empty and empty[0] == tokenizer.bos_token_id else ""
    asked = "{{ " + before + " + m['content'] + " + after + " }}"
    answered = "{{ m['content']" + (" + eos_token" if tokenizer.eos_token_id is not None else "") + " }}"
    system = "{% elif m['role'] == 'system' %}{{ m['content'] + " + json.dumps("\n") + " }}"
    turns = "{% for m in messages %}{% if m['role'] == 'assistant' %}" + answered + system + "{% else %}" + asked
    return first + turns + "{% endif %}{% endfor %}"


def fit(tokenizer: Any, text: str | None, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Give the tokenizer this run's chat template, which exports also get; returns notices about it.

    Args:
        text: from :func:`text_of`.
        settings: variables of the tokenizer's own chat template.

    Raises:
        InputError: a variable or its value is wrong, or the template does not write the messages.
    """
    if text is not None:
        tokenizer.chat_template = as_chat_template(text, tokenizer)
        return ()
    if settings:
        tokenizer.chat_template = with_settings(template_of(tokenizer), settings)
    template, begun = split_prompt_start(tokenizer)
    if not begun:
        return ()
    tokenizer.chat_template = template
    return (
        f"model.template: the chat template's prompt ends with {begun!r}, which its written answers do not have: the "
        "model is trained and prompted without this text, and the template of an export does not have it",
    )


def prompt_tokens(said: Asked, text: str | None, tokenizer: Any) -> list[int]:
    """Tokens of the prompt, after which the answer begins.

    Raises:
        InputError: the chat template refuses the conversation.
    """
    if isinstance(said, str) and text is not None:
        return _open(list(tokenizer(_fill(text, said))["input_ids"]), tokenizer)
    if has_tools(said):
        check_tools(_turns(said), tokenizer)
    return _tokens(render(_turns(said), tokenizer, add_generation_prompt=True), tokenizer)


def answer_of(generated: str, text: str | None, tokenizer: Any, *, special: bool = False) -> str:
    """A generated answer without the text that the template writes before every answer, e.g. an empty ``<think>``.

    Args:
        special: whether the text contains special tokens.
    """
    if text is not None or not (lead := form_of(tokenizer).lead):
        return generated
    shown = tokenizer.decode(_tokens(lead, tokenizer), skip_special_tokens=not special).strip()
    bare = generated.lstrip()
    return bare[len(shown) :].lstrip() if shown and bare.startswith(shown) else generated


def encode_row(said: Asked, output: Output, text: str | None, tokenizer: Any) -> Written:
    """The tokens of a row: prompt, answer and the token that ends the answer; for a blank answer only the prompt.

    Raises:
        InputError: the chat template refuses the conversation, or no tokens belong to the answer.
    """
    if blank(output):
        prompt = prompt_tokens(said, text, tokenizer)
        return Written(prompt, [False] * len(prompt), len(prompt))
    if isinstance(said, str) and isinstance(output, str) and text is not None:
        prompt_text = _fill(text, said)
        ids, counts = _within(prompt_text + output, [(len(prompt_text), None)], tokenizer, special=True)
        if tokenizer.eos_token_id is not None:
            ids, counts = [*ids, tokenizer.eos_token_id], [*counts, True]
    else:
        turns = (*_turns(said), *(((ASSISTANT, output),) if isinstance(output, str) else output))
        if has_tools(turns):
            check_tools(turns, tokenizer)
        ids, counts = (_generation_mask if MARKS.search(template_of(tokenizer)) else _by_prefixes)(turns, tokenizer)
    last = max((i for i, counted in enumerate(counts) if counted), default=None)
    if last is None:
        raise InputError(
            f"model.template: the chat template leaves no token to the assistant in {describe(_turns(said))}"
        )
    start = next((i + 1 for i in range(last, -1, -1) if not counts[i]), 0)
    return Written(ids, counts, start)


def text_of_row(turns: Sequence[Turn], tokenizer: Any) -> str:
    """The text from which a row of these messages gets its tokens; the last message is the answer.

    Raises:
        InputError: the chat template refuses the conversation.
    """
    if MARKS.search(template_of(tokenizer)):
        return render(turns, tokenizer)
    return "".join(text for text, _ in pieces_of(turns, tokenizer))


def prompts_differ(turns: Sequence[Turn], tokenizer: Any) -> bool:
    """Whether the text before an answer in training differs from the prompt that a model would get for this answer.

    Raises:
        InputError: the chat template refuses the conversation.
    """
    answers = [i for i, turn in enumerate(turns) if turn[0] == ASSISTANT]
    if len(answers) < _PAIR:
        return False
    shown = [render(turns[:i], tokenizer, add_generation_prompt=True) for i in answers]
    if MARKS.search(template_of(tokenizer)):
        whole = render(turns, tokenizer)
        return not all(whole.startswith(prompt) for prompt in shown)
    pieces = [text for text, _ in pieces_of(turns, tokenizer)]
    return any("".join(pieces[: 2 * n + 1]) != prompt for n, prompt in enumerate(shown))


def messages_of_row(said: Asked, output: Output, text: str | None) -> tuple[Turn, ...]:
    """The messages of a row that the chat template writes; () if the template is a text with ``{instruction}``."""
    if isinstance(said, str) and text is not None and isinstance(output, str):
        return ()
    answer: tuple[Turn, ...] = ((ASSISTANT, output),) if isinstance(output, str) else output
    return (*_turns(said), *(() if blank(output) else answer))


def _fill(text: str, said: str) -> str:
    """The prompt of an instruction, from a template that is a text."""
    return (_WITH_INPUT.get(text, text) if INPUT in said else text).replace(_PLACE, said)


def _turns(said: Asked) -> tuple[Turn, ...]:
    return (("user", said),) if isinstance(said, str) else said


def _generation_mask(turns: Sequence[Turn], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """The tokens, and for each whether the loss counts it: the template marks it as generated, or it ends an answer."""
    form = form_of(tokenizer)
    found = apply(turns, tokenizer, form, return_dict=True, return_assistant_tokens_mask=True)
    ids, counts = list(found["input_ids"]), [bool(x) for x in found["assistant_masks"]]
    if not any(counts):
        return ids, counts
    special, ended = special_ids(tokenizer), False
    for i, token in enumerate(ids):
        if not counts[i] and i and counts[i - 1] and not ended:
            counts[i] = token in special  # the template's mark stops before the token that ends the answer
        ended = counts[i] and (ended or token in special)
    end = _tokens(form.end_of(turns[-1]), tokenizer)
    return ids + end, counts + [True] * len(end)


def _by_prefixes(turns: Sequence[Turn], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """The tokens, and for each token whether it belongs to an answer, which :func:`pieces_of` finds."""
    spans, size = [], 0
    pieces = pieces_of(turns, tokenizer)
    for text, counts in pieces:
        spans += [(size, size + len(text))] if counts else []
        size += len(text)
    return _within("".join(text for text, _ in pieces), spans, tokenizer)


def pieces_of(turns: Sequence[Turn], tokenizer: Any) -> list[tuple[str, bool]]:
    """(piece, whether the loss counts it) for each piece of a row's text; prompts and answers alternate."""
    whole, form = render(turns, tokenizer), form_of(tokenizer)
    pieces: list[tuple[str, bool]] = []
    at = 0  # end of the pieces in ``whole``
    for i, turn in enumerate(turns):
        if turn[0] != ASSISTANT:
            continue
        end = form.end_of(turn)
        before = render(turns[:i], tokenizer, add_generation_prompt=True)
        if i + 1 == len(turns):
            _check_prefix(before, whole, turns)
            pieces += [(whole[at : len(before)], False), (whole[len(before) :] + end, True)]
            break
        upto = render(turns[: i + 1], tokenizer)
        _check_prefix(before, upto, turns)
        if whole.startswith(upto):
            stop = len(upto)
            stop += len(end) if whole.startswith(end, stop) else 0
            pieces += [(whole[at : len(before)], False), (whole[len(before) : stop], True)]
        else:
            stop = _after(turns, i, whole, form, tokenizer)
            here = before.removesuffix(form.begun)
            _check_prefix(here, whole, turns)
            answer = upto[len(before) :].removesuffix(form.tail) + form.inner
            pieces += [(whole[at : len(here)] + before[len(here) :], False), (answer, True)]
        at = stop
    return pieces


def _after(turns: Sequence[Turn], i: int, whole: str, form: Form, tokenizer: Any) -> int:
    """The position in ``whole`` after answer ``i`` and its end text; ``whole`` has the answer in another form.

    Raises:
        InputError: the rest of the text depends on the answer.
    """
    rest = replace_content(turns, i, tokenizer)
    if not whole.endswith(rest) or not rest.startswith(form.inner):
        raise InputError(
            "model.template: if an answer changes, this chat template also changes the text after it, so that the "
            f"answer's tokens are unknown, in {describe(turns)}; {_RIGHT}"
        )
    return len(whole) - len(rest) + len(form.inner)


def _within(
    text: str, spans: Sequence[tuple[int, int | None]], tokenizer: Any, *, special: bool = False
) -> tuple[list[int], list[bool]]:
    """The tokens of a text, and for each token whether it has a character in one of the spans.

    Args:
        spans: [start, end) in characters; the end None stands for the end of the text.
        special: whether to include the tokens that the tokenizer puts before every text.
    """
    ends = [(start, len(text) if end is None else end) for start, end in spans]
    options = {} if special else {"add_special_tokens": False}
    if not getattr(tokenizer, "is_fast", False):  # a slow tokenizer does not report the positions of its tokens
        ids = list(tokenizer(text, **options)["input_ids"])
        edges = [
            (_common_length(ids, text[:a], tokenizer, options), _common_length(ids, text[:b], tokenizer, options))
            for a, b in ends
        ]
        counts = [any(a <= i < b for a, b in edges) for i in range(len(ids))]
    else:
        found = tokenizer(text, return_offsets_mapping=True, **options)
        ids = list(found["input_ids"])
        counts = [any(a < end and b > start for start, end in ends) for a, b in found["offset_mapping"]]
    kept = len(_open(ids, tokenizer)) if special else len(ids)
    return ids[:kept], counts[:kept]


def _common_length(ids: list[int], beginning: str, tokenizer: Any, options: dict[str, bool]) -> int:
    """The number of a text's first tokens that equal the tokens of its beginning."""
    part = list(tokenizer(beginning, **options)["input_ids"]) if beginning else []
    return next((i for i, (a, b) in enumerate(zip(ids, part, strict=False)) if a != b), min(len(ids), len(part)))


def _open(ids: list[int], tokenizer: Any) -> list[int]:
    """Tokens of a text without the tokens that the tokenizer puts after every text, since more text follows."""
    empty = tokenizer("")["input_ids"]
    behind = len(empty) - (1 if empty and empty[0] == tokenizer.bos_token_id else 0)
    return ids[: len(ids) - behind] if behind and ids[-behind:] == empty[-behind:] else ids


def _tokens(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _check_prefix(part: str, whole: str, turns: Sequence[Turn]) -> None:
    """Raise an InputError if ``whole`` does not begin with ``part``; the error quotes the first difference."""
    if whole.startswith(part):
        return
    at = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
    raise InputError(
        "model.template: this chat template writes a question differently once it is answered, so that the answer's "
        f"tokens are unknown: {part[at : at + _SHOWN]!r} becomes {whole[at : at + _SHOWN]!r} in {describe(turns)}; "
        f"{_RIGHT}"
    )
