"""The column of system messages, which some data sets in ShareGPT's or Alpaca's form have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedfm.data.sources._files import At
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError

_SYSTEM = ("system", "developer")
_OTHER = "system_prompt"  # the name of this column in OpenOrca
_DEFAULT = "system"
_FEW = 2  # a system prompt has more words than this


def system_column(columns: Mapping[str, Sequence[Any]], spec: DataSpec) -> str | None:
    """The name of the column of system messages; None if there is none, or if all its cells are empty."""
    key = spec.column("system")
    names = (key, *((_OTHER,) if key == _DEFAULT else ()))
    found = next((name for name in names if name in columns), None)
    return found if found is not None and any(not _empty(value) for value in columns[found]) else None


def with_system(rows: Sequence[tuple[Any, ...]], values: Sequence[Any], name: str, at: At) -> list[tuple[Any, ...]]:
    """Put each row's system message before its other messages.

    Args:
        rows: for each row its prompt and answers.
        values: the cells of the column of system messages, each a text or empty.

    Raises:
        InputError: a cell is not a text, or a conversation begins with a different system message.
    """
    found: list[tuple[Any, ...]] = []
    for row, ((said, *answers), value) in enumerate(zip(rows, values, strict=True)):
        if _empty(value):
            found.append((said, *answers))
            continue
        other = f"if the column holds something else, set data.system to another name than {name!r}"
        if not isinstance(value, str):
            raise InputError(
                f'{at(row)}: column "{name}" holds {type(value).__name__} {value!r:.40}: text is expected; {other}'
            )
        turns = (("user", said),) if isinstance(said, str) else said
        if turns[0][0] not in _SYSTEM:
            turns = (("system", value), *turns)
        elif turns[0][1].strip() != value.strip():
            raise InputError(
                f'{at(row)}: column "{name}" and the first message are different system messages: keep one; {other}'
            )
        found.append((turns, *answers))
    return found


def notice(values: Sequence[Any], name: str, source: str) -> str:
    """A notice that the column is read as system messages; it asks for a check if no cell has more than two words."""
    line = f'column "{name}" of {source} is read as the system message of each row (data.system)'
    said = [value.split() for value in values if not _empty(value)]
    if max(map(len, said), default=0) > _FEW:
        return line
    return (
        f'{line}: no cell has more than {_FEW} words, such as "{" ".join(said[0])}"; if it holds something else, set '
        f"data.system to another name than {name!r}"
    )


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())
