"""Tools in conversations: the column of their schemas, and the calls in the messages."""

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
}  # keys of a message that are read in addition to role and content
_LIKE_CALL = '{"type": "function", "function": {"name": "...", "arguments": {...}}}'
_LIKE_TOOL = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'


def with_tools(rows: Sequence[tuple[Any, ...]], values: Sequence[Any], name: str, at: At) -> list[tuple[Any, ...]]:
    """Put the tools of the cells before the rows' messages.

    Args:
        rows: for each row its prompt and answers.
        values: cells, each a list of schemas, such a list in JSON, or nothing.

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
    """The schemas of one cell; empty for nothing."""
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
    """A value; a text in JSON is parsed."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError:
        return value


def calls_in(content: Any, at: str) -> list[Any]:
    """The calls in a message whose content is JSON.

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
                f"{at} calls {of['name']!r:.40} with arguments {of.get('arguments')!r:.40}: an object is expected, or "
                "one in JSON"
            )
        found.append(call if of is not call else {"type": "function", "function": of})
    return found
