"""Read Parquet files, including files of the Hugging Face Hub with images and class names inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedfm.data.arrow_texts import ArrowPictures
from fedfm.data.pictures import ListedPictures
from fedfm.data.sources._files import content_of
from fedfm.data.sources._sheet import Sheet, without_nulls
from fedfm.errors import InputError


def sheet_of(data: bytes, path: Path) -> Sheet:
    """The sheet of a Parquet file; messages count rows from 1. Images stay encoded, in Arrow's memory.

    Raises:
        InputError: the file is not a Parquet file, or is damaged.
    """
    import pyarrow
    import pyarrow.parquet

    if not data.startswith(b"PAR1"):
        raise InputError(f"{path} holds {content_of(data)}, not a Parquet file: rename it, or save it as Parquet")
    try:
        table = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data)).read()
        names = list(table.column_names)  # decoded inside of "try", since names in a damaged file may not be UTF-8
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path} is damaged or cut short ({str(error).splitlines()[0]}): write it again") from None
    for name in names:
        if names.count(name) > 1:
            raise InputError(f'{path}: column "{name}" occurs {names.count(name)} times: names must differ')
    try:
        columns = {name: _values(table.column(name), path) for name in names}
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: a string column holds bytes that are not UTF-8 ({error})") from None
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise InputError(f"{path} is damaged ({str(error).splitlines()[0]}): write it again") from None
    class_names, notices = _class_names(table.schema.metadata, path)
    return Sheet(columns, lambda i: f"{path}, row {i + 1}", notices, names=class_names)


def _values(column: Any, path: Path) -> Sequence[Any]:
    """The values of a column; images stay in Arrow's memory."""
    import pyarrow
    import pyarrow.compute

    kind = column.type
    if pyarrow.types.is_struct(kind) and {kind.field(i).name for i in range(kind.num_fields)} == {"bytes", "path"}:
        encoded = pyarrow.compute.struct_field(column, "bytes")
        if encoded.null_count == column.null_count:
            return ArrowPictures(encoded)
        items = ((v or {}) for v in column.to_pylist())  # some images are paths relative to the file
        found = (v.get("bytes") or (str(path.parent / v["path"]) if v.get("path") else None) for v in items)
        return ListedPictures(found)
    if pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind):
        first = next((chunk[0].as_py() for chunk in column.chunks if len(chunk)), None)
        if first is not None and content_of(first).endswith("image"):
            return ArrowPictures(column)
    plain: list[Any] = column.to_pylist()
    return [without_nulls(value) for value in plain] if pyarrow.types.is_nested(kind) else plain


def _class_names(metadata: Any, path: Path) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return ({column: class names}, notices), from the metadata that the library "datasets" writes."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        kinds = {column: kind for column, kind in features.items() if isinstance(kind, dict)}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}, ()  # metadata of another program
    found, notices = dict[str, tuple[str, ...]](), list[str]()
    for column, kind in kinds.items():
        if isinstance(inner := kind.get("feature"), dict):  # a list of classes
            kind = inner
        if kind.get("_type") != "ClassLabel" or not (names := kind.get("names")):
            continue
        try:
            found[column] = _in_order(names)
        except (KeyError, TypeError, ValueError):
            notices.append(
                f'{path}: the class names of column "{column}" are not numbered 0, 1, ... and are not read: '
                f"{json.dumps(names, ensure_ascii=False):.80}"
            )
    return found, tuple(notices)


def _in_order(names: Any) -> tuple[str, ...]:
    """Class names in the order of their numbers.

    Args:
        names: a list of names, a dict {number: name} as in data set cards of the Hub, or a dict {name: number}.

    Raises:
        KeyError, TypeError, ValueError: the numbers are not 0, 1, ...
    """
    if isinstance(names, dict) and all(type(number) is int for number in names.values()):
        names = {number: name for name, number in names.items()}
    if isinstance(names, dict):
        by_number = {int(number): name for number, name in names.items()}
        names = [by_number[number] for number in range(len(by_number))]
    return tuple(map(str, names))
