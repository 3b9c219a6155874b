"""Read tools in conversations: their schemas from a column, and the calls from the messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fedfm.data.sources._files import At
from fedfm.errors import InputError

CALLS = "tool_calls"
CALLING = "function_call"  # ShareGPT's role of a message that is only a call, in JSON
KEYS = {
    "assistant": (CALLS,),
    "tool": ("name", "tool_call_id"),
}  # role -> keys of its messages that are read in addition to role and content
_LIKE_CALL = '{"type": "function", "function": {"name": "...", "arguments": {...}}}'
_LIKE_TOOL = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'


def with_tools(rows: Sequence[tuple[Any, ...]], values: Sequence[Any], name: str, at: At) -> list[tuple[Any, ...]]:
    """Put a message with each row's tools before the row's other messages.

    Args:
        rows: for each row its prompt and answers.
        values: the cells of the column of tools, each empty, a list of schemas, or JSON text of such a list.

    Raises:
        InputError: a cell has another form.
    """
    from fedfm.core.rows import TOOLS  # imported here, since its module loads torch

    found: list[tuple[Any, ...]] = []
    for row, (said, *answers) in enumerate(rows):
        if schemas := _schemas(values[row], name, at(row)):
            said = (("user", said),) if isinstance(said, str) else said
            said = ((TOOLS, json.dumps(schemas, ensure_ascii=False)), *said)
        found.append((said, *answers))
    return found


def _schemas(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    """The list of schemas in one cell; [] for an empty cell."""
    found = _parse(value)
    if found in (None, "", [], {}):
        return []
    tools: list[Any] = [_parse(tool) for tool in found] if isinstance(found, list) else [None]
    for tool in tools:
        of = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(of, dict) or not isinstance(of.get("name"), str) or not of["name"]:
            raise InputError(
                f'{where}: column "{name}" holds {type(value).__name__} {value!r:.40}: a list of tools is expected, '
                f"each like {_LIKE_TOOL}; if the column holds something else, set data.tools to another name"
            )
    return tools


def _parse(value: Any) -> Any:
    """The parsed value if it is JSON text, None if it is blank, else the value itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError:
        return value


def calls_in(content: Any, at: str) -> list[Any]:
    """The calls in the content of a message, which is JSON text or already parsed.

    Raises:
        InputError: the content has no call.
    """
    found = _parse(content)
    calls: list[Any] = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) for call in calls):
        raise InputError(f"{at} holds {content!r:.40}: a call is expected, in JSON, {_LIKE_CALL}")
    return calls


def calls_of(value: Any, at: str) -> list[dict[str, Any]]:
    """The calls of a message, each with its function's name and arguments.

    Raises:
        InputError: a call has another form.
    """
    found = []
    for call in value if isinstance(value, list) else [value]:
        of = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(of, dict) or not isinstance(of.get("name"), str) or not of["name"]:
            raise InputError(f'{at} has "{CALLS}" {call!r:.40}: calls are expected, each like {_LIKE_CALL}')
        if not isinstance(_parse(of.get("arguments")), dict):
            raise InputError(
                f"{at} calls {of['name']!r:.40} with arguments {of.get('arguments')!r:.40}: expected an object, or "
                "an object as JSON text"
            )
        found.append(call if of is not call else {"type": "function", "function": of})
    return found
