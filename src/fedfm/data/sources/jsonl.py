"""JSON lines, plain or gzip-compressed: one object on each line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedfm.data.sources._files import decode, gunzip, read_bytes
from fedfm.data.sources._tabular import to_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError


def read(path: Path, spec: DataSpec, *, task: str | None = None, labelled: bool = True) -> Table:
    """Table of a .jsonl or .jsonl.gz file; a missing key of a row is None.

    Raises:
        InputError: not UTF-8, a line that is not a JSON object, or as of ``to_table``.
    """
    data = read_bytes(path, "a JSON lines file")
    if path.suffix.lower() == ".gz":
        data = gunzip(data, path)
        if not data:
            raise InputError(f"{path} is empty once decompressed: JSON lines are expected")
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    # Not splitlines(): it would also cut at U+2028 and other marks that JSON allows inside strings.
    for number, line in enumerate(decode(data, path, "JSON lines").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise InputError(
                f'{path}, line {number}: not JSON ({why}): one object a line, such as {{"text": "...", "label": "..."}}'
            ) from None
        if not isinstance(row, dict):
            raise InputError(
                f"{path}, line {number}: a JSON {type(row).__name__}, not an object: "
                'one object a line, such as {"text": "...", "label": "..."}'
            )
        rows.append(row)
        lines.append(number)
    keys = dict.fromkeys(key for row in rows for key in row)
    if not keys:
        raise InputError(f"{path} holds {len(rows)} objects without any key")
    columns = {key: [row.get(key) for row in rows] for key in keys}
    return to_table(
        columns, spec, source=str(path), at=lambda i: f"{path}, line {lines[i]}", task=task, labelled=labelled
    )
