"""The text that a chat template writes around an answer, found by rendering conversations of unique words.

Templates differ in more than their words. Some expect the text of a message as a list of parts. Some write no end token
after an answer, so that the next turn ends it. Some write an answer differently if the conversation continues: without
its reasoning, or without the token that ends the conversation. Some begin a block of reasoning in a prompt, although a
written answer does not have such a block.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

from fedfm.core.rows import TOOLS, Turn
from fedfm.errors import InputError, first_line
from fedfm.models.language.tool_calls import OBJECT, TEXT, has_calls, messages_of, one_call, with_argument, with_words

ASSISTANT = "assistant"
_NOW = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?(["'])(.*?)\1\s*\)""")
_DAY = datetime.date(2024, 7, 26)  # templates get this date as today's; it is the default of Llama 3's template
_SHOWN = 40  # number of a text's characters that a message shows
_ASK, _SAY, _MORE, _LAST = "Qzxkaone", "Azxkatwo", "Qzxkathree", "Azxkafour"
_CALL, _KEY, _VALUE = "Fzxkafive", "Kzxkasix", "Vzxkaseven"
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # these tags mark generated text; transformers uses the same pattern
# variables of a template that ``apply_chat_template`` sets itself
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize")


@dataclass(frozen=True)
class Form:
    """The text around an answer.

    Attributes:
        parts: whether the content of a message is a list of parts.
        lead: the text between the prompt and the last answer.
        tail: the text after the last answer, to the end of the conversation.
        end: text to add after the tail so that a token ends the answer; empty if the tail has such a token.
        inner: the text that ends an answer if the conversation continues.
        begun: the text at the end of a prompt that the written conversation does not have.
        arguments: the form that the template expects for the arguments of tool calls; empty if they stay as in the row.
        call_end: the same as ``end``, but for an answer that ends with a call.
    """

    parts: bool = False
    lead: str = ""
    tail: str = ""
    end: str = ""
    inner: str = ""
    begun: str = ""
    arguments: str = ""
    call_end: str = ""

    def end_of(self, turn: Turn) -> str:
        """The text to add after this answer so that a token ends it."""
        return self.call_end if has_calls(turn) else self.end


_forms: WeakKeyDictionary[Any, tuple[str, Form]] = WeakKeyDictionary()


def form_of(tokenizer: Any) -> Form:
    """The form of the tokenizer's chat template.

    Raises:
        InputError: the template does not write the messages.
    """
    template = text_of(tokenizer)
    known = _forms.get(tokenizer)
    if known is None or known[0] != template:
        known = _forms[tokenizer] = (template, _read(tokenizer))
    return known[1]


def special_ids(tokenizer: Any) -> set[int]:
    """The special tokens of a tokenizer, including those without a name such as ``eos_token``."""
    more = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return {*tokenizer.all_special_ids, *(i for i, token in more if token.special)}


def render(turns: Sequence[Turn], tokenizer: Any, **options: Any) -> str:
    """The conversation as the template writes it.

    Raises:
        InputError: the template refuses the conversation.
    """
    return str(apply(turns, tokenizer, form_of(tokenizer), tokenize=False, **options))


def apply(turns: Sequence[Turn], tokenizer: Any, form: Form, **options: Any) -> Any:
    """The result of ``apply_chat_template``.

    Raises:
        InputError: the template refuses the conversation.
    """
    from jinja2.exceptions import TemplateError

    messages, tools = messages_of(turns, form.parts, form.arguments)
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, chat_template=text_of(tokenizer), **options)
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
    ) as error:  # e.g. the template expects another kind of content
        raise InputError(f"model.template: the chat template refuses {describe(turns)}: {first_line(error)}") from None


def describe(turns: Sequence[Turn]) -> str:
    """A conversation in words: its roles and its first message."""
    messages = [turn for turn in turns if turn[0] != TOOLS]
    roles = ", ".join(turn[0] for turn in messages[:6])
    return f"a conversation of {roles} that begins with {messages[0][1][:_SHOWN]!r}"


def check_tools(turns: Sequence[Turn], tokenizer: Any) -> None:
    """Raise an InputError unless the template writes every tool, every call and every answer of a tool."""
    text_turns, words = with_words(turns)
    text = render(text_turns, tokenizer)
    if missing := [what for word, what in words if word not in text]:
        raise InputError(
            f"model.template: the chat template leaves out {missing[0]} in {describe(turns)}; take a model with a "
            "template for tools, or remove the tools from the rows"
        )


def text_of(tokenizer: Any) -> str:
    """The chat template with a fixed date in place of today's, so that rows and a run's bits are the same every day.

    Raises:
        InputError: the template computes the form of the date, so that the date cannot be fixed.
    """
    text = _NOW.sub(lambda found: json.dumps(_DAY.strftime(found[2])), template_of(tokenizer))
    if (at := text.find("strftime_now(")) >= 0:
        raise InputError(
            f"model.template: the chat template writes today's date by {text[at : at + _SHOWN]!r}, so that rows would "
            'differ from day to day: write the form of the date as a text, such as strftime_now("%d %B %Y")',
            key="model.template",
        )
    return text


def about_date(tokenizer: Any) -> str:
    """A sentence for the README of an export whose chat template writes today's date; "" for other templates."""
    if getattr(tokenizer, "chat_template", None) is None or not _NOW.search(template_of(tokenizer)):
        return ""
    return (
        f"The chat template writes today's date. In training it wrote {_DAY:%d %B %Y} on every day, as `fedfm predict` "
        "does, so prompts of another day differ from those of the training in their date."
    )


def template_of(tokenizer: Any) -> str:
    """The chat template. If the tokenizer has a separate one for tools, the result joins the two."""
    usual: str = tokenizer.get_chat_template()
    of_tools = tokenizer.get_chat_template(tools=[])
    if of_tools == usual:
        return usual
    of_tools, usual = (text.removesuffix("\n") for text in (of_tools, usual))  # Jinja drops the last line break
    return f"{{% if tools %}}{of_tools}{{% else %}}{usual}{{% endif %}}"


def replace_content(turns: Sequence[Turn], i: int, tokenizer: Any) -> str:
    """The template's text after the content of turn ``i``, or after its calls, in the complete conversation.

    To find this text, a unique word replaces the content, or an argument of the last call.

    Raises:
        InputError: the template does not write that turn.
    """
    called = has_calls(turns[i])
    shown = with_argument(turns[i], _SAY) if called else (turns[i][0], _SAY)
    _, found, after = render([*turns[:i], shown, *turns[i + 1 :]], tokenizer).partition(_SAY)
    if not found:
        raise InputError(f"model.template: the chat template leaves out an answer of {describe(turns)}")
    if not called:
        return after
    alone = render([*turns[:i], shown], tokenizer).partition(_SAY)[2]
    return after.removeprefix(
        alone.removesuffix(form_of(tokenizer).tail)
    )  # the text that closes the call belongs to the answer


def with_settings(template: str, settings: Mapping[str, Any]) -> str:
    """The template with its own variables set, as ``apply_chat_template(**settings)`` would set them.

    The values are written into the template, so that training, predictions and an export share them.

    Raises:
        InputError: ``apply_chat_template`` sets this variable itself, or a template cannot express the value.

    Example:
        >>> with_settings("{{ x }}", {"x": True})
        '{% set x = true %}{{ x }}'
    """
    for name in settings:
        if not name.isidentifier() or name in _GIVEN:
            raise InputError(f"model.chat_template_kwargs.{name}: expected the name of a variable of the chat template")
    return "".join(f"{{% set {name} = {_literal(value)} %}}" for name, value in settings.items()) + template


def split_prompt_start(tokenizer: Any) -> tuple[str, str]:
    """(the chat template without the text that only its prompts have, that text).

    Such a text begins a block of reasoning, e.g. ``<think>``, which a written answer does not have. Rows of questions
    and answers have no reasoning, so the text is removed. Training and predictions then have the same prompts.
    """
    template, turns = template_of(tokenizer), [("user", _ASK), (ASSISTANT, _SAY)]
    try:
        form = form_of(tokenizer)
        prompt = str(apply(turns[:1], tokenizer, form, tokenize=False, add_generation_prompt=True))
        whole = str(apply(turns, tokenizer, form, tokenize=False))
    except InputError:  # encoding the rows will report which conversation the template refuses
        return template, ""
    begun = prompt[_common(prompt, whole) :]
    if not begun or _ASK not in prompt.removesuffix(begun):
        return template, ""
    inside = template.removesuffix("\n")  # Jinja drops the last line break
    last = f"written[:-{len(begun)}] if add_generation_prompt and written.endswith({_literal(begun)}) else written"
    shown = f"{{% set written %}}{inside}{{% endset %}}{{{{ {last} }}}}"
    if MARKS.search(template):  # transformers counts the positions of these marks from the start of a block
        shown = f"{{% if add_generation_prompt %}}{shown}{{% else %}}{inside}{{% endif %}}"
    return shown, begun


def _literal(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(k))}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, str | bool | int | float):
        return json.dumps(value, ensure_ascii=False)
    raise InputError(f"model.chat_template_kwargs: {value!r}: expected text, numbers, true or false, lists or tables")


def _read(tokenizer: Any) -> Form:
    turns = [("user", _ASK), (ASSISTANT, _SAY), ("user", _MORE), (ASSISTANT, _LAST)]

    def text(count: int, parts: bool, **options: Any) -> str:
        try:
            return str(apply(turns[:count], tokenizer, Form(parts), tokenize=False, **options))
        except InputError:
            return ""

    fits = [parts for parts in (False, True) if _writes(text(2, parts))]
    if not fits:
        if text(2, False) or text(2, True):
            raise InputError("model.template: the chat template does not write the messages; set another template")
        return Form()  # the template refuses a question with an answer, but may accept the rows
    parts = fits[0]
    whole, prompt = text(2, parts), text(1, parts, add_generation_prompt=True)
    before, _, tail = whole.partition(_SAY)
    lead = before[len(prompt) :] if before.startswith(prompt) else ""
    more, longer = text(3, parts), text(4, parts)
    after = more.partition(_SAY)[2].partition(_MORE)[0] if _MORE in more else ""
    split = _Splitter(tokenizer)
    ends = any(piece in split.names for piece in split(tail))
    next_end = _first_end(after.removeprefix(tail), split, tokenizer) if after.startswith(tail) else ""
    end = "" if ends else next_end or (tokenizer.eos_token or "")
    shared = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(split(tail), split(after), strict=False))]
    inner = "".join(shared)
    if not any(piece in split.names for piece in shared):
        inner = _first_end(after, split, tokenizer) or inner
    begun = prompt[_common(prompt, longer) :] if longer else ""
    return Form(parts, lead, tail, end, inner, begun, *_read_calls(tokenizer, parts, end, split))


def _read_calls(tokenizer: Any, parts: bool, end: str, split: _Splitter) -> tuple[str, str]:
    """The form of the arguments of calls, and the text that ends a call.

    Args:
        end: the text that ends other answers.
    """

    def text(arguments: Any, *more: Turn) -> str:
        turns = [("user", _ASK), one_call(ASSISTANT, _CALL, arguments), *more]
        try:
            return str(apply(turns, tokenizer, Form(parts), tokenize=False))
        except InputError:
            return ""

    given = {_KEY: _VALUE}
    as_object, as_text = text(given), text(json.dumps(given))
    objects = _KEY in as_object and _VALUE in as_object and f"'{_KEY}'" not in as_object  # no dict in Python's notation
    texts = json.dumps(given) in as_text  # otherwise the text is in quotes, as a JSON string
    alike = objects == texts and (as_object == as_text or not objects)
    form = "" if alike else OBJECT if objects else TEXT
    whole = as_text if form == TEXT else as_object
    more = text(json.dumps(given) if form == TEXT else given, ("tool", _MORE))
    ends = any(piece in split.names for piece in split(whole.partition(_VALUE)[2]))
    after = more[len(whole) :] if whole and more.startswith(whole) else ""
    return form, "" if ends and not end else _first_end(after, split, tokenizer) or end


def _writes(text: str) -> bool:
    """Whether the text has question and answer, but not as lists in Python's or JSON's notation."""
    return _ASK in text and _SAY in text and not re.search(r"""["']type["']: ["']text["']""", text)


class _Splitter:
    """Splits texts at their special tokens, which stay as pieces."""

    def __init__(self, tokenizer: Any) -> None:
        self.names = {name for name in tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer))) if name}
        choices = "|".join(re.escape(name) for name in sorted(self.names, key=len, reverse=True))
        self._pattern = re.compile(f"({choices})") if choices else None

    def __call__(self, text: str) -> list[str]:
        pieces = [text] if self._pattern is None else self._pattern.split(text)
        return [piece for piece in pieces if piece]


def _first_end(text: str, split: _Splitter, tokenizer: Any) -> str:
    """The text up to its first special token, if only space precedes the token; "" if the token begins a new text."""
    at = ""
    for piece in split(text):
        at += piece
        if piece in split.names:
            return "" if piece == tokenizer.bos_token != tokenizer.eos_token else at
        if piece.strip():
            return ""
    return ""


def _common(a: str, b: str) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
