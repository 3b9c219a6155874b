"""Parquet files."""

from __future__ import annotations

from pathlib import Path

from fedfm.data.sources._files import content_of, read_bytes
from fedfm.data.sources._tabular import to_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError


def read(path: Path, spec: DataSpec, *, task: str | None = None, labelled: bool = True) -> Table:
    """Table of a Parquet file; rows count from 1.

    Raises:
        InputError: not a Parquet file, or as of ``to_table``.
    """
    import pyarrow
    import pyarrow.parquet

    data = read_bytes(path, "a Parquet file")
    if not data.startswith(b"PAR1"):
        raise InputError(f"{path} holds {content_of(data)}, not a Parquet file: rename it, or save it as Parquet")
    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(data))
        names = list(table.column_names)  # decoded here: names in a damaged file may not be UTF-8
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path} is damaged or cut short ({str(error).splitlines()[0]}): write it again") from None
    for name in names:
        if names.count(name) > 1:
            raise InputError(f'{path}: column "{name}" occurs {names.count(name)} times: names must differ')
    try:
        columns = {name: table.column(name).to_pylist() for name in names}
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: a string column holds bytes that are not UTF-8 ({error})") from None
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise InputError(f"{path} is damaged ({str(error).splitlines()[0]}): write it again") from None
    return to_table(columns, spec, source=str(path), at=lambda i: f"{path}, row {i + 1}", task=task, labelled=labelled)
