"""Tools and their calls in conversations, in the form that a chat template expects.

A tool is a JSON schema. A message of the assistant calls tools with arguments. In rows and templates the arguments are
an object or a text. Some templates accept both, others only one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from fedfm.core.attachments import IMAGE
from fedfm.core.rows import TOOLS, Turn

CALLS = "tool_calls"
TEXT, OBJECT = "text", "object"  # forms of arguments
_WORD = "Tzxk{}q"  # occurs in no row and no template


def messages_of(turns: Sequence[Turn], parts: bool, arguments: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """The messages in the form for ``apply_chat_template``, and the tools.

    Args:
        parts: whether the content of a message is a list of parts.
        arguments: the form of arguments that the template expects; "" keeps the form of the row.
    """
    tools: list[Any] | None = None
    messages: list[dict[str, Any]] = []
    for role, content, *more in turns:
        if role == TOOLS:
            tools = json.loads(content)
            continue
        message: dict[str, Any] = {"role": role, "content": _parts(content) if parts or IMAGE in content else content}
        message |= json.loads(more[0]) if more else {}
        for call in message.get(CALLS, ()):
            of = call["function"]
            if arguments == OBJECT and isinstance(of["arguments"], str):
                of["arguments"] = json.loads(of["arguments"])
            elif arguments == TEXT and not isinstance(of["arguments"], str):
                of["arguments"] = json.dumps(of["arguments"], ensure_ascii=False)
        messages.append(message)
    return messages, tools


def _parts(content: str) -> list[dict[str, str]]:
    """The content of a message as parts: texts, and an image for each :data:`fedfm.core.attachments.IMAGE`."""
    if IMAGE not in content:
        return [{"type": "text", "text": content}]
    pieces = [piece for text in content.split(IMAGE) for piece in ({"type": "image"}, {"type": "text", "text": text})]
    return [piece for piece in pieces[1:] if piece.get("text") != ""]


def has_calls(turn: Turn) -> bool:
    """Whether a message calls tools."""
    return len(turn) > 2 and CALLS in json.loads(turn[2])


def one_call(role: str, name: str, arguments: Any) -> Turn:
    """A message with one call. Its id has 9 letters, since Mistral's templates require that."""
    call = {"id": "Czxkabcde", "type": "function", "function": {"name": name, "arguments": arguments}}
    return role, "", json.dumps({CALLS: [call]})


def with_argument(turn: Turn, value: str) -> Turn:
    """The message with another argument in its last call."""
    more = json.loads(turn[2])
    more[CALLS][-1]["function"]["arguments"] = {"a": value}
    return turn[0], turn[1], json.dumps(more, ensure_ascii=False)


def with_words(turns: Sequence[Turn]) -> tuple[list[Turn], list[tuple[str, str]]]:
    """The same conversation with unique words in place of the tools' names (also in calls) and of the tools' answers.

    Returns:
        the conversation, and (word, description of what it replaces) for each word.
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
