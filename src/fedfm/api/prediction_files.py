"""The file that ``fedfm predict --out`` writes: the result of :func:`fedfm.api.predict.predict`, row by row."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from fedfm.core import storage
from fedfm.core.text import to_json
from fedfm.errors import InputError, RunError
from fedfm.models.user import language

_NOT_BY_ROW = ("classes", "warnings", "ids", "files")  # keys of a result whose lists are not predictions
_BEGINS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # of a formula, also as full-width characters
FORMATS = (".json", ".jsonl", ".csv", ".npz")


def check_out(out: Path) -> None:
    """Check a path before :func:`write`.

    Raises:
        InputError: its suffix is unknown, its folder does not exist or cannot be written, or the file exists already.
    """
    if out.suffix not in FORMATS:
        raise InputError(f"--out {out}: expected a name that ends in {', '.join(FORMATS)}")
    if out.exists():
        raise InputError(f"--out {out} exists; give another")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}")
    if not os.access(out.parent, os.W_OK):
        raise InputError(f"--out {out}: {out.parent} cannot be written; give another place")


def write(result: Mapping[str, Any], out: Path) -> str:
    """Write a result. ``.json`` gets all of it, ``.jsonl`` and ``.csv`` get one line per row, and
    ``.npz`` gets one array per column.

    In ``.csv`` a text that a spreadsheet would take for a formula gets an apostrophe before it: names of classes,
    answers and ids are other people's.

    Returns:
        A sentence about such texts; empty without any.

    Raises:
        InputError: another process has written the file since, or a column is not an array.
        RunError: the file cannot be written.
    """
    rows, text, marked = _lines(result), io.StringIO(newline=""), 0
    if out.suffix == ".csv":
        rows = [_flat(row) for row in rows]
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines: list[list[Any]] = [names, *([row.get(name) for name in names] for row in rows)]
        marked = sum(map(_is_formula, chain.from_iterable(lines)))
        csv.writer(text).writerows([f"'{x}" if _is_formula(x) else x for x in line] for line in lines)
    elif out.suffix != ".npz":
        things = [result] if out.suffix == ".json" else rows
        text.writelines(f"{to_json(thing)}\n" for thing in things)
    if out.suffix == ".npz":
        from fedfm.api.prediction_arrays import to_npz

        content = to_npz(rows, out)
    else:
        content = text.getvalue().encode("utf-8", "backslashreplace")
    try:
        _write_new(out, content)
    except FileExistsError:
        raise InputError(f"--out {out} exists; give another") from None
    except OSError as error:
        raise RunError(f"--out {out}: cannot be written: {storage.why(error)}") from None
    if not marked:
        return ""
    return f"{out}: {marked} texts that a spreadsheet would compute begin with an apostrophe; .jsonl has them unchanged"


def _is_formula(cell: Any) -> bool:
    """Whether a spreadsheet would take a text for a formula; a number is none."""
    if not isinstance(cell, str) or not cell.lstrip().startswith(_BEGINS):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False


def _write_new(path: Path, data: bytes) -> None:
    """Write a file that must not exist: only one of several processes succeeds, and no reader sees a partial file.

    Raises:
        FileExistsError: the file exists.
        OSError: the file cannot be written; no part of it is left.
    """
    temporary = path.parent / f".{path.name}.{os.urandom(4).hex()}"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without links, e.g. on a USB stick
            with open(path, "xb"):
                os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _lines(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One record per row: its index in the file, from 0; its id or file, if it has one; and its prediction."""
    names: Any = [{"id": name} for name in result["ids"]] if "ids" in result else repeat({})
    files: Any = [{"file": name} for name in result["files"]] if "files" in result else repeat({})
    if "losses" in result:
        return [{"row": i, **line} for i, line in enumerate(language.lines(result))]
    if "answers" in result:
        cut, rows = set(result["cut"]), enumerate(zip(names, files, result["answers"], strict=False))
        return [{"row": i, **name, **file, "answer": answer, "cut": i in cut} for i, (name, file, answer) in rows]
    if "outputs" in result:
        outputs = (row if isinstance(row, Mapping) else dict(enumerate(row)) for row in result["outputs"])
        return [{"row": i, **{str(k): x for k, x in row.items()}} for i, row in enumerate(outputs)]
    if "predictions" not in result:
        return by_row(result)
    if not result["predictions"]:
        return [{key: result[key] for key in ("loss", "perplexity")}]
    found = enumerate(zip(names, files, result["predictions"], result["probabilities"], strict=False))
    return [
        {"row": i, **name, **file, "prediction": label, "probability": max(p) if p else None}
        for i, (name, file, label, p) in found
    ]


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """The cells of a row, with a column ``key.name`` for each entry of a dict; a list is written as JSON."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": x for name, x in value.items()}
        else:
            found[key] = to_json(value) if isinstance(value, list) else value
    return found


def by_row(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Records from all lists that have an entry for each row, for a task without class predictions."""
    lists = {key: value for key, value in result.items() if isinstance(value, list) and key not in _NOT_BY_ROW}
    n = max(map(len, lists.values()), default=0)
    names = {one: result[many] for one, many in (("id", "ids"), ("file", "files")) if many in result}
    kept = names | {key: value for key, value in lists.items() if len(value) == n}
    return [{"row": i, **{key: value[i] for key, value in kept.items()}} for i in range(n)]
