"""Tools and their calls in conversations, as a chat template takes them.

A tool is a JSON schema. A message of the assistant calls tools with arguments, which rows and templates hold as an
object or as text: some templates write both, others one of them alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from fedfm.core.rows import TOOLS, Turn

CALLS = "tool_calls"
TEXT, OBJECT = "text", "object"  # forms of arguments
_WORD = "Tzxk{}q"  # stands nowhere else


def messages_of(turns: Sequence[Turn], parts: bool, arguments: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """The messages as ``apply_chat_template`` takes them, and the tools.

    Args:
        parts: whether the content of a message is a list of parts.
        arguments: the form in which the template takes arguments; "": as the row has them.
    """
    tools: list[Any] | None = None
    messages: list[dict[str, Any]] = []
    for role, content, *more in turns:
        if role == TOOLS:
            tools = json.loads(content)
            continue
        message: dict[str, Any] = {"role": role, "content": [{"type": "text", "text": content}] if parts else content}
        message |= json.loads(more[0]) if more else {}
        for call in message.get(CALLS, ()):
            of = call["function"]
            if arguments == OBJECT and isinstance(of["arguments"], str):
                of["arguments"] = json.loads(of["arguments"])
            elif arguments == TEXT and not isinstance(of["arguments"], str):
                of["arguments"] = json.dumps(of["arguments"], ensure_ascii=False)
        messages.append(message)
    return messages, tools


def has_calls(turn: Turn) -> bool:
    """Whether a message calls tools."""
    return len(turn) > 2 and CALLS in json.loads(turn[2])


def one_call(role: str, name: str, arguments: Any) -> Turn:
    """A message with one call. Its id has 9 letters, as Mistral's templates want it."""
    call = {"id": "Czxkabcde", "type": "function", "function": {"name": name, "arguments": arguments}}
    return role, "", json.dumps({CALLS: [call]})


def with_argument(turn: Turn, value: str) -> Turn:
    """The message with another argument of its last call."""
    more = json.loads(turn[2])
    more[CALLS][-1]["function"]["arguments"] = {"a": value}
    return turn[0], turn[1], json.dumps(more, ensure_ascii=False)


def with_words(turns: Sequence[Turn]) -> tuple[list[Turn], list[tuple[str, str]]]:
    """The same conversation with unique words for the names of tools, in calls, and for what tools answer.

    Returns:
        the conversation, and for each word what it stands for.
    """
    found: list[tuple[str, str]] = []

    def word(what: str) -> str:
        found.append((_WORD.format(len(found)), what))
        return found[-1][0]

    def with_name(things: Sequence[Any], what: str) -> Iterator[Any]:
        for thing in things:
            of = thing.get("function", thing)
            new = of | {"name": word(f"{what} {of['name']!r}")}
            yield thing | {"function": new} if of is not thing else new

    out: list[Turn] = []
    for turn in turns:
        role, content, *more = turn
        if role == TOOLS:
            out.append((role, json.dumps([*with_name(json.loads(content), "the tool")])))
        elif has_calls(turn):
            loaded = json.loads(more[0])
            loaded[CALLS] = [*with_name(loaded[CALLS], "the call of")]
            out.append((role, content, json.dumps(loaded)))
        elif role == "tool":
            out.append((role, word("what a tool answers,"), *more))
        else:
            out.append(turn)
    return out, found
