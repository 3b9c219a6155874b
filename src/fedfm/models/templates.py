"""How an instruction or a conversation and its answers are written for a language model.

A template is a text with ``{instruction}``, after which the answer follows, or the tokenizer's own chat template. A
text is also written as a chat template, which writes conversations, and which an export carries: whoever loads it asks
in the form that was trained.

Of a conversation the loss counts what the assistant says. A chat template may mark that itself (``{% generation %}``);
else it is what each answer adds to the text before it.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fedfm.core.rows import Asked, Turn
from fedfm.errors import InputError, close, first_line

TEXTS = {
    "plain": "{instruction}\n",
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:\n"
    ),
}
CHAT = "chat"
ASSISTANT = "assistant"
_PLACE = "{instruction}"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers finds them
_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_DAY = datetime.date(2024, 7, 26)  # what templates take for today, as Llama 3's does by itself
_SHOWN = 40  # characters of a text in a message
_RIGHT = 'set model.template = "alpaca" or a text with {instruction}, or mark answers with {% generation %}'


@dataclass(frozen=True)
class Written:
    """One row.

    Attributes:
        ids: tokens of all that was said and of the answer.
        counts: for each token whether the loss counts it.
        start: where the last answer begins.
    """

    ids: list[int]
    counts: list[bool]
    start: int


def text_of(template: str | None, tokenizer: Any) -> str | None:
    """The text with ``{instruction}``; None: the tokenizer's chat template.

    Args:
        template: a name, a text, or None for the tokenizer's chat template if it has one, else "plain".

    Raises:
        InputError: neither a name nor a text with ``{instruction}``, or "chat" without a chat template.

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
    """The same as a chat template (Jinja), with the tokens that the tokenizer adds by itself.

    What a system says has no place in the text: it is a line of its own.
    """
    before, after = (json.dumps(part) for part in text.split(_PLACE))
    empty = tokenizer("")["input_ids"]
    first = "{{ bos_token }}" if empty and empty[0] == tokenizer.bos_token_id else ""
    asked = "{{ " + before + " + m['content'] + " + after + " }}"
    answered = "{{ m['content']" + (" + eos_token" if tokenizer.eos_token_id is not None else "") + " }}"
    told = "{% elif m['role'] == 'system' %}{{ m['content'] + " + json.dumps("\n") + " }}"
    turns = "{% for m in messages %}{% if m['role'] == 'assistant' %}" + answered + told + "{% else %}" + asked
    return first + turns + "{% endif %}{% endfor %}"


def asked(said: Asked, text: str | None, tokenizer: Any) -> list[int]:
    """Tokens of the prompt, after which the answer begins.

    Raises:
        InputError: the chat template refuses the conversation.
    """
    if isinstance(said, str) and text is not None:
        return list(tokenizer(text.replace(_PLACE, said))["input_ids"])
    return _tokens(_render(_turns(said), tokenizer, add_generation_prompt=True), tokenizer)


def written(said: Asked, output: str, text: str | None, tokenizer: Any) -> Written:
    """A row of what was said and its answer, with the token that ends it; of a blank answer the prompt alone.

    Raises:
        InputError: the chat template refuses the conversation, or no tokens are the answer's.
    """
    if not output.strip():
        prompt = asked(said, text, tokenizer)
        return Written(prompt, [False] * len(prompt), len(prompt))
    if isinstance(said, str) and text is not None:
        prompt = asked(said, text, tokenizer)
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        answer = [*tokenizer(output, add_special_tokens=False)["input_ids"], *eos]
        return Written(prompt + answer, [False] * len(prompt) + [True] * len(answer), len(prompt))
    turns = (*_turns(said), (ASSISTANT, output))
    if _MARKS.search(_of(tokenizer)):
        ids, counts = _marked(turns, tokenizer)
    else:
        ids, counts = _by_prefixes(turns, tokenizer)
    last = max((i for i, counted in enumerate(counts) if counted), default=None)
    if last is None:
        raise InputError(f"model.template: the chat template leaves no token to the assistant in {_named(turns)}")
    start = next((i + 1 for i in range(last, -1, -1) if not counts[i]), 0)
    return Written(ids, counts, start)


def _of(tokenizer: Any) -> str:
    """The chat template, with one day for today: a row is the same on every day, hence the bits of a run."""
    return _NOW.sub(lambda found: json.dumps(_DAY.strftime(found[2])), tokenizer.get_chat_template())


def _turns(said: Asked) -> tuple[Turn, ...]:
    return (("user", said),) if isinstance(said, str) else said


def _marked(turns: Sequence[Turn], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Tokens, and those that the template marks as generated."""
    found = _applied(turns, tokenizer, return_dict=True, return_assistant_tokens_mask=True)
    return list(found["input_ids"]), [bool(x) for x in found["assistant_masks"]]


def _by_prefixes(turns: Sequence[Turn], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Tokens, and those that the answers add: the text up to an answer, less the text that asks for it."""
    whole, spans = _render(turns, tokenizer), []
    for i, (role, _) in enumerate(turns):
        if role == ASSISTANT:
            before = _render(turns[:i], tokenizer, add_generation_prompt=True)
            upto = _render(turns[: i + 1], tokenizer) if i + 1 < len(turns) else whole
            _check_prefix(before, upto, "a question otherwise once it is answered", turns)
            _check_prefix(upto, whole, "an answer otherwise once more is said", turns)
            spans.append((len(before), len(upto)))
    return _within(whole, spans, tokenizer)


def _within(text: str, spans: Sequence[tuple[int, int]], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Tokens of a text, and those with a character in one of the spans [start, end)."""
    if not getattr(tokenizer, "is_fast", False):  # it does not tell where its tokens stand
        edges = [0, *(place for span in spans for place in span), len(text)]
        pieces = [_tokens(text[a:b], tokenizer) if b > a else [] for a, b in pairwise(edges)]
        counts = [i % 2 == 1 for i, piece in enumerate(pieces) for _ in piece]
        return [token for piece in pieces for token in piece], counts
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    counts = [any(a < end and b > start for start, end in spans) for a, b in found["offset_mapping"]]
    return list(found["input_ids"]), counts


def _tokens(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _render(turns: Sequence[Turn], tokenizer: Any, **options: Any) -> str:
    return str(_applied(turns, tokenizer, tokenize=False, **options))


def _applied(turns: Sequence[Turn], tokenizer: Any, **options: Any) -> Any:
    from jinja2.exceptions import TemplateError

    messages = [{"role": role, "content": text} for role, text in turns]
    try:
        return tokenizer.apply_chat_template(messages, chat_template=_of(tokenizer), **options)
    except (TemplateError, TypeError) as error:  # TypeError: it expects another content
        raise InputError(f"model.template: the chat template refuses {_named(turns)}: {first_line(error)}") from None


def _check_prefix(part: str, whole: str, how: str, turns: Sequence[Turn]) -> None:
    """Raise an InputError if the whole does not begin with the part; it quotes where they part."""
    if whole.startswith(part):
        return
    at = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
    raise InputError(
        f"model.template: this chat template writes {how}, so that no tokens are the answer's: "
        f"{part[at : at + _SHOWN]!r} becomes {whole[at : at + _SHOWN]!r} in {_named(turns)}; {_RIGHT}"
    )


def _named(turns: Sequence[Turn]) -> str:
    """A conversation in words, by its roles and its first message."""
    return f"a conversation of {', '.join(role for role, _ in turns[:6])} that begins with {turns[0][1][:_SHOWN]!r}"
