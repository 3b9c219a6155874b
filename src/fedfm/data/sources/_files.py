"""Functions that all sources use to read files; if content is not as expected, errors say what it is."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from fedfm.core import tasks
from fedfm.core.text import listing
from fedfm.data.invisible import escape
from fedfm.data.spec import BUILT_IN
from fedfm.errors import InputError, NoColumn, close, reason_of

T = TypeVar("T")
At = Callable[[int], str]  # index of a data row -> its name in messages, numbered as users count: "silo.csv, row 7"


def formats() -> str:
    """The forms of files and folders of rows in words, for messages."""
    return (
        f"{', '.join(('.csv', '.tsv', '.json', '.jsonl', *tasks.endings()))} or .txt (each also .gz), .parquet, .npz, "
        "an image folder, or a folder with a file for each split"
    )


_ADDED = ("__MACOSX", "__pycache__")  # a class may be called "__none__", so other such names count
_SIGNATURES = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"PAR1", "a Parquet file"),
    (b"PK\x03\x04", "a zip archive (as .npz and .xlsx files are)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"\x1f\x8b", "gzip-compressed data"),
    (b"\x93NUMPY", "a single NumPy array (.npy)"),
    (b"ARROW1", "an Arrow file"),
    (b"MATLAB 5", "arrays of MATLAB, which numpy.savez can write as an .npz"),
    (b"%PDF", "a PDF document"),
    (b"\xd0\xcf\x11\xe0", "an old Office document"),
    (b"{", "text that begins like JSON"),
)


def content_of(data: bytes) -> str:
    """A description of a file's content, from its first bytes."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "a WebP image"
    return next((words for start, words in _SIGNATURES if data.startswith(start)), "something else")


# Relative path -> the folder of the experiment's file, in which it was not found. Only messages use this.
_missed: dict[str, Path] = {}


def remember_missing(path: str, folder: Path) -> None:
    """Remember that a relative path was not found in the folder of an experiment's file."""
    _missed[path] = folder


def existing(path: str | Path, key: str = "data.path") -> Path:
    """The path if it exists; else raise an InputError with the names in its folder.

    A relative path in an experiment's file is relative to the file's folder, or else to the working directory.
    """
    given, path = str(path), Path(path).expanduser()
    try:
        if path.exists():
            return path
    except OSError as error:
        raise InputError(f'{key}: "{str(path)[:200]}" cannot be opened: {error.strerror}', key=key) from None
    where, of = "", _missed.get(given)
    if of is not None:
        where, path = ", relative to the experiment's file or to the working directory", of / path
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    try:
        names = sorted(p.name for p in parent.iterdir() if not p.name.startswith("."))
    except OSError:
        names = []
    # The first missing part of the path: b in a/b/c.csv if only a exists.
    wanted = path.parts[len(parent.parts)] if len(path.parts) > len(parent.parts) else path.name
    instead = f'"{parent}" holds {listing(names) or "nothing"}{close(wanted, names)}'
    if given in BUILT_IN:
        instead = f'the built-in set is data.name = "{given}"'
    raise InputError(f'{key}: there is no "{given}"{where}; {instead}', key=key)


def visible_entries(folder: Path) -> list[Path]:
    """The entries of a folder, sorted, without hidden ones and those that macOS and Python add."""
    return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and p.name not in _ADDED)


def read_bytes(path: Path, holds: str) -> bytes:
    """The content of a file; raises an InputError if it is empty. ``holds`` describes the expected content."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; expected {holds}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if not data:
        raise InputError(f"{path} is empty (0 bytes): {holds} is expected")
    return data


def begin(path: Path) -> bytes:
    """The first bytes of a file."""
    try:
        with path.open("rb") as file:
            return file.read(16)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def gunzip(data: bytes, path: Path) -> bytes:
    """Decompress the content of a gzip file."""
    if not data.startswith(b"\x1f\x8b"):
        raise InputError(f"{path} holds {content_of(data)}, not gzip-compressed data: remove .gz from its name")
    try:
        return gzip.decompress(data)
    except (EOFError, OSError, zlib.error) as error:
        raise InputError(f"{path} is damaged or cut short ({reason_of(error)}): compress it again") from None


def decode(data: bytes, path: Path, holds: str) -> str:
    """Decode UTF-8 bytes, or UTF-16 bytes with a byte order mark; text with a NUL character raises an InputError."""
    words = content_of(data)
    utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    if words != "something else" and data[:1] != b"{":
        raise InputError(f"{path} holds {words}, not {holds}: rename it, or save it as {holds}")
    try:
        text = data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        expected = "UTF-16, which its first bytes announce" if utf16 else "UTF-8"
        raise InputError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} at offset {error.start} is not {expected}: "
            "save the file as UTF-8"
        ) from None
    nul = text.find("\0")
    if nul >= 0:
        raise InputError(f"{path}, line {text.count(chr(10), 0, nul) + 1}: a NUL byte, so this is not {holds}")
    if not text.strip():
        raise InputError(f"{path} holds only blanks: {holds} is expected")
    return text


def str_array(values: Sequence[str]) -> np.ndarray:
    """Strings as an array (N,). If one is long, the dtype is object: a fixed width would pad all to the longest."""
    if values and max(map(len, values)) > 100:
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array
    return np.array(values, dtype=np.str_)


def column(columns: Mapping[str, T], name: str, key: str, source: str) -> T:
    """Return the named column; raise an InputError that lists the existing names if it is missing."""
    if name in columns:
        return columns[name]
    shown = [escape(known)[1:-1] for known in columns]  # a name with an invisible character looks like the wanted one
    found = listing(shown) or "none"
    hint = close(name, shown, 0.65)  # "messages" is not "image"
    set_it = f": rename it, or set {key}" if hint else f"; {key} says which column to read"
    raise NoColumn(f'{source}: no column "{name}" ({key})', f"found {found}{hint}{set_it}")
