"""Read instructions, conversations and preferences from columns.

A conversation is a list of messages {"role": ..., "content": ...}. It is split into the last answer and the messages
before it. So a conversation of two messages is read like a pair of instruction and output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedfm.data.invisible import is_blank
from fedfm.data.sources import _tools
from fedfm.data.sources._files import At, column
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError, close, quote_names

if TYPE_CHECKING:
    from fedfm.core.rows import Asked, Output, Turn  # imported here, since its module loads torch

ASSISTANT = "assistant"
PICTURES = ("image", "image_url", "input_image")  # types of the parts of a message that are images
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
# Other names of roles, as in ShareGPT's form, in lower case -> our names
_ALSO = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "ai", _tools.CALLING), ASSISTANT),
    **dict.fromkeys(("function", "observation", "ipython", "function_response", "tool_response"), "tool"),
}
# Alpaca's mark of an instruction without an input, "<noinput>", and other spellings of it
_NOTHING = re.compile(r"<\s*no[\s_-]*input\s*>", re.IGNORECASE)
_PERHAPS = re.compile(
    r"no[\s_-]*input|n[/.]?a\.?|none|null|nil|nan|empty|-+|\.+", re.IGNORECASE
)  # probably means empty
_LIKE = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'

Columns = Mapping[str, Sequence[Any]]


def conversations(values: Sequence[Any], name: str, at: At, *, answered: bool) -> list[tuple[Asked, Output]]:
    """Return for each conversation (the messages before the last answer, the last answer).

    Args:
        answered: whether a conversation must end with an answer; else a missing answer is "".

    Raises:
        InputError: a cell is not a list of messages, or the order of messages is invalid.
    """
    found: list[tuple[Asked, Output]] = []
    for row, value in enumerate(values):
        turns = _turns(value, name, at(row))
        if turns[-1][0] == ASSISTANT:
            found.append((turns[:-1], _last(turns)))
        elif answered:
            raise InputError(
                f'{at(row)}: column "{name}" ends with an unanswered message of the {turns[-1][0]}: end with '
                "the assistant's, or remove the row"
            )
        else:
            found.append((turns, ""))
    return found


def pairs(columns: Columns, spec: DataSpec, source: str, at: At, *, answered: bool) -> list[tuple[Asked, Output]]:
    """Return (instruction, output) of each row; an ``input`` is added below its instruction, as in Alpaca's form.

    Instruction and output may also be lists of messages: the prompt, and the assistant's answer.

    Args:
        answered: whether each row must have an output; else a missing output is "".

    Raises:
        InputError: a column is missing, or a cell is empty or has another form.
    """
    asked = column(columns, spec.column("instruction"), "data.instruction", source)
    nothing = [None] * len(asked)
    inputs = columns.get(spec.column("input"), nothing)
    outputs = (
        column(columns, spec.column("output"), "data.output", source)
        if answered
        else columns.get(spec.column("output"), nothing)
    )
    found: list[tuple[Asked, Output]] = []
    for row, (said, more, output) in enumerate(zip(asked, inputs, outputs, strict=True)):
        where = at(row)
        for name, value in ((spec.column("instruction"), said), (spec.column("output"), output)):
            if value is not None and not isinstance(value, str | list):
                raise InputError(
                    f'{where}: column "{name}" holds {type(value).__name__} {value!r:.40}: text is expected'
                )
            if value is None and (answered or name == spec.column("instruction")):
                raise InputError(f'{where}: column "{name}" is empty: fill it, or remove the row')
        whole = _with_input(_parse_prompt(said, spec.column("instruction"), where), more, spec.column("input"), where)
        if answered or isinstance(output, list):
            found.append(_after(whole, _answer(output, spec.column("output"), where)))
        else:
            found.append((whole, output or ""))
    return found


def _with_input(asked: Asked, more: Any, name: str, where: str) -> Asked:
    """The instruction with its input, if there is one, below it."""
    if more is None or (isinstance(more, str) and (not more.strip() or _NOTHING.fullmatch(more.strip()))):
        return asked
    if not isinstance(more, str):
        raise InputError(f'{where}: column "{name}" holds {type(more).__name__} {more!r:.40}: text is expected')
    if not isinstance(asked, str):
        raise InputError(
            f'{where}: an input (data.input = "{name}") needs an instruction that is a text, not a list of messages'
        )
    from fedfm.core.rows import INPUT  # imported here, since its module loads torch

    return asked + INPUT + more


def doubts_of_inputs(columns: Columns, spec: DataSpec, source: str) -> tuple[str, ...]:
    """A notice about inputs such as "none", which probably mark an empty cell but are read as texts."""
    name = spec.column("input")
    cells = [v.strip() for v in columns.get(name, ()) if isinstance(v, str)]
    asked = columns.get(spec.column("instruction"), ())
    pairs = zip(asked, columns.get(name, ()), strict=False)
    same = sum(isinstance(a, str) and isinstance(b, str) and a.strip() == b.strip() != "" for a, b in pairs)
    if same > len(asked) / 2:
        return (
            f'column "{name}" of {source} repeats the instruction in {same} of {len(asked)} rows, but a prompt has '
            "instruction and input: where there is no input, leave the cell empty",
        )
    found = [text for text in cells if _PERHAPS.fullmatch(text)]
    if not found:
        return ()
    return (
        f'column "{name}" of {source} holds "{found[0]}" or the like in {len(found)} rows, which is read as a text '
        "below the instruction: where there is no input, leave the cell empty",
    )


def _after(asked: Asked, answer: str | tuple[Turn, ...]) -> tuple[Asked, Output]:
    """A row (prompt, answer); if the answer is a list, all messages except the last are added to the prompt."""
    if isinstance(answer, str):
        return asked, answer
    said = (("user", asked),) if isinstance(asked, str) else asked
    if len(answer) == 1:
        return asked, _last(answer)
    return (*said, *answer[:-1]), _last(answer)


def _last(turns: tuple[Turn, ...]) -> Output:
    """The last message as an answer: its content, or the complete message if it has further fields."""
    return turns[-1:] if len(turns[-1]) > 2 else turns[-1][1]


def preferences(
    columns: Columns, spec: DataSpec, source: str, at: At
) -> tuple[list[tuple[Asked, Output, Output]], tuple[str, ...]]:
    """Return ((prompt, better answer, worse answer) of each row, notices).

    Answers are texts, or lists that end with the assistant's message. Without a prompt column, a row has two complete
    conversations, whose common beginning is the prompt.

    Raises:
        InputError: a column is missing, or a cell is empty or has another form.
    """
    names, prompt_name = (spec.column("chosen"), spec.column("rejected")), spec.column("prompt")
    chosen = column(columns, spec.column("chosen"), "data.chosen", source)
    rejected = column(columns, spec.column("rejected"), "data.rejected", source)
    nothing = [None] * len(chosen)
    prompts, inputs = columns.get(spec.column("prompt"), nothing), columns.get(spec.column("input"), nothing)
    found, alike = [], 0
    for row, (prompt, more, *answers) in enumerate(zip(prompts, inputs, chosen, rejected, strict=True)):
        where = at(row)
        both = [_answer(a, name, where) for a, name in zip(answers, names, strict=True)]
        asked = None if prompt is None else _parse_prompt(prompt, prompt_name, where)
        asked = None if asked is None else _with_input(asked, more, spec.column("input"), where)
        good, bad = both
        if not isinstance(good, str) or not isinstance(bad, str):
            asked, good, bad = _split(asked, good, bad, spec, where)
        elif asked is None:
            raise InputError(
                f'{where}: no prompt (data.prompt = "{prompt_name}"): the answers are texts without a question'
            )
        alike += good == bad or (isinstance(good, str) and isinstance(bad, str) and good.split() == bad.split())
        found.append((asked, good, bad))
    note = f"in {alike} of {len(found)} rows, {names[0]} and {names[1]} are the same answer: such rows teach nothing"
    return found, (note,) if alike else ()


def prompts(columns: Columns, spec: DataSpec, source: str, at: At) -> list[tuple[Asked, Output]]:
    """Prompts for a model trained on preferences: from preferences, prompts, conversations or instructions.

    Raises:
        InputError: the file has none of these columns; a cell is empty, or has another form.
    """
    if spec.column("chosen") in columns and spec.column("rejected") in columns:
        return [(asked, "") for asked, _, _ in preferences(columns, spec, source, at)[0]]
    if spec.column("messages") in columns and spec.column("prompt") not in columns:
        return conversations(columns[spec.column("messages")], spec.column("messages"), at, answered=False)
    other = spec.column("instruction") in columns and spec.column("prompt") not in columns
    name, key = (spec.column("instruction"), "data.instruction") if other else (spec.column("prompt"), "data.prompt")
    asked = column(columns, name, key, source)
    inputs = columns.get(spec.column("input"), [None] * len(asked)) if other else [None] * len(asked)
    pairs = zip(asked, inputs, strict=True)
    return [
        (_with_input(_parse_prompt(said, name, at(row)), more, spec.column("input"), at(row)), "")
        for row, (said, more) in enumerate(pairs)
    ]


def _parse_prompt(value: Any, name: str, where: str) -> Asked:
    """Check a prompt, which is a text or a list of messages, and return it."""
    if not isinstance(value, str):
        return _turns(value, name, where)
    if is_blank(value):
        raise InputError(f'{where}: column "{name}" is empty: fill it, or remove the row')
    return value


def _answer(value: Any, name: str, where: str) -> str | tuple[Turn, ...]:
    """Check an answer, which is a text or a list of messages that ends with the assistant's, and return it."""
    if isinstance(value, str):
        if is_blank(value):
            raise InputError(f'{where}: column "{name}" is empty: fill it, or remove the row')
        return value
    turns = _turns(value, name, where, first=True)
    if turns[-1][0] != ASSISTANT:
        raise InputError(
            f'{where}: column "{name}" ends with a message of the {turns[-1][0]}: the assistant\'s is expected'
        )
    return turns


def _split(asked: Asked | None, good: Any, bad: Any, spec: DataSpec, where: str) -> tuple[Asked, Output, Output]:
    """(prompt, better answer, worse answer) from two lists of messages that differ only in the last message."""
    prompt_name = spec.column("prompt")
    names = '"{}" and "{}"'.format(spec.column("chosen"), spec.column("rejected"))
    if isinstance(good, str) or isinstance(bad, str):
        raise InputError(f"{where}: columns {names} hold a text and a list of messages: expected the same form in both")
    if good[:-1] != bad[:-1]:
        raise InputError(
            f"{where}: columns {names} differ in more than the last message: only the last answers may differ"
        )
    before: tuple[Turn, ...] = good[:-1]
    if asked is None:
        if not before:
            raise InputError(
                f'{where}: no prompt (data.prompt = "{prompt_name}"): columns {names} hold only the answers'
            )
        asked = before
    elif before and before != asked and not (isinstance(asked, str) and before[-1][1] == asked):
        raise InputError(f'{where}: columns {names} begin differently from column "{prompt_name}"')
    elif before:
        asked = before
    return asked, _last(good), _last(bad)


def _turns(value: Any, name: str, where: str, *, first: bool = False) -> tuple[Turn, ...]:
    """The messages of one cell; ``first``: whether the first message may be the assistant's."""
    if not isinstance(value, list):
        what = "nothing" if value is None else "text" if isinstance(value, str) else f"{type(value).__name__}"
        hint = " (jsonl and parquet hold lists)" if isinstance(value, str) else ""
        raise InputError(f'{where}: column "{name}" holds {what}: messages are expected, {_LIKE}{hint}')
    turns = tuple(_turn(message, i, name, where) for i, message in enumerate(value, 1))
    if not turns:
        raise InputError(f'{where}: column "{name}" holds no message: {_LIKE} is expected')
    if turns[0][0] == ASSISTANT and not first:
        raise InputError(f'{where}: column "{name}" begins with the assistant\'s message, which answers nothing')
    return turns


def _text_of_parts(content: Any) -> Any:
    """Join content in parts, [{"type": "text", "text": ...}, ...], as templates do; return other content unchanged."""
    parts = content if isinstance(content, list) else []
    texts = [p.get("text") for p in parts if isinstance(p, dict) and p.get("type", "text") == "text"]
    if not parts or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        return content
    return "".join(map(str, texts))


def _turn(message: Any, i: int, name: str, where: str) -> Turn:
    at = f'{where}: message {i} of column "{name}"'
    if isinstance(message, dict) and {"from", "value"} <= message.keys() and "role" not in message:  # ShareGPT
        message = {"role": message["from"], "content": message["value"]} | {
            key: v for key, v in message.items() if key not in ("from", "value")
        }
    fields: dict[str, Any] = dict(message) if isinstance(message, dict) else {}
    if fields.get(_tools.CALLING) and not fields.get(_tools.CALLS):  # OpenAI's older key for a single call
        fields[_tools.CALLS] = fields.pop(_tools.CALLING)
    role, content, called = fields.get("role"), fields.get("content"), fields.get(_tools.CALLS) or ()
    if isinstance(role, str):
        if role.lower() == _tools.CALLING and not called:
            called, content = _tools.calls_in(content, at), None
        role = _ALSO.get(role.lower(), role.lower() if role.lower() in ROLES else role)
    content = _text_of_parts(content)
    if "role" not in fields or not (called or "content" in fields):
        keys = f" with {quote_names(map(str, message))}" if isinstance(message, dict) else ""
        raise InputError(f"{at} is {type(message).__name__} {keys}".rstrip() + f": messages are expected, {_LIKE}")
    more = {key: v for key, v in fields.items() if key not in ("role", "content") and v not in (None, [], {}, "")}
    read = _tools.KEYS.get(role, ()) if isinstance(role, str) else ()
    if unread := [key for key in more if key not in read]:
        expected = f"role, content{''.join(f', {key}' for key in read)}"
        raise InputError(f'{at} has "{unread[0]}", which is not read: expected {expected}')
    if role not in ROLES:
        raise InputError(f"{at} is of role {role!r:.40}: expected one of {quote_names(ROLES)}{close(str(role), ROLES)}")
    if called:
        more[_tools.CALLS] = _tools.calls_of(called, at)
        if content is None:
            more["content"], content = None, ""
    if not isinstance(content, str):
        pictured = isinstance(content, list) and any(isinstance(p, dict) and p.get("type") in PICTURES for p in content)
        other = '; for images set model.task = "visual_instruction"' if pictured else ""
        raise InputError(f"{at} holds {type(content).__name__} {content!r:.40}: text is expected{other}")
    if is_blank(content) and role in ("user", ASSISTANT) and not called:
        raise InputError(f"{at} is empty: fill it, or remove the row")
    return (role, content, json.dumps(more, ensure_ascii=False)) if more else (role, content)
