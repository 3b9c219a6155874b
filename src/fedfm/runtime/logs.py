"""The two logs of a run directory, in JSON Lines. A resume cuts them back to the last commit.

``metrics.jsonl`` gets a line when a committed round has been evaluated. ``messages.jsonl`` gets a round's messages
before its commit. Each line ends with its CRC-32, so a line that was edited later counts as damaged. If a log is
damaged, its readable lines are used, and :func:`gaps` lists the missing lines. Only ``run.patience`` depends on a log:
it reads the validation losses.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfm.core import storage
from fedfm.core.text import from_json
from fedfm.errors import InputError

METRICS, MESSAGES = "metrics.jsonl", "messages.jsonl"
_CRC = ', "crc32": "'
_TAIL = len(_CRC) + 10  # length of the end of a line: key, eight digits, quotation mark and bracket
_NAMED = 5  # largest number of lines, or of ranges of rounds, that a message lists


def append(path: Path, text: str) -> int:
    """Append JSON objects, one a line, to a log; return the file's new length.

    Raises:
        RunError: the disk is full or not writable.
    """
    try:
        with open(path, "ab") as file:
            file.write(b"".join(_add_checksum(to_bytes(line)) for line in text.split("\n") if line))
            return file.tell()
    except OSError as error:
        raise storage.not_written(path, error) from error


def _add_checksum(line: bytes) -> bytes:
    return line[:-1] + f'{_CRC}{zlib.crc32(line):08x}"}}\n'.encode()


def to_bytes(text: str) -> bytes:
    """Encode as UTF-8. Lone surrogates, e.g. from undecodable file names, become JSON escapes."""
    return text.encode("utf-8", "backslashreplace")


def lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None, bool]]:
    """Yield (number from 1, object, whether a line feed ends it) per non-empty line; a damaged line has object None.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _object(line), line.endswith(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = from_json(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or type(found.get("round")) is not int:
        return None
    if found.pop("crc32", None) is None:  # an earlier version wrote the line
        return found
    whole = line.rstrip()
    return found if _add_checksum(whole[:-_TAIL] + b"}") == whole + b"\n" else None


def messages(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the messages in the undamaged lines of ``messages.jsonl``, also those that share a line."""
    for _, line, _ in lines(path):
        if line is not None and "messages" not in line:
            yield line
        elif line is not None:
            from fedfm.core.grouped_messages import ungroup

            yield from ungroup(line)


def rounds(path: Path) -> list[dict[str, Any]]:
    """Read the lines of ``metrics.jsonl`` that are undamaged and complete."""
    return [found for _, found, ended in lines(path) if found is not None and ended]


def cut(folder: Path, record: Mapping[str, Any] | None) -> list[str]:
    """Cut the logs back to a commit, or to the start of the run. Damaged lines stay.

    Returns:
        Sentences about lost records from before this point.
    """
    last, length = (-1, 0) if record is None else (record["round"], record["messages"])
    found = gaps(folder, last - 1)
    messages = folder / MESSAGES
    size = messages.stat().st_size if messages.exists() else 0
    if size < length:
        found.append(f"{MESSAGES} has lost {length - size} of {length} bytes that were committed")
    evaluated = any(line["round"] == last for line in rounds(folder / METRICS))
    _cut_messages(messages, length, last, evaluated)
    _cut_metrics(folder / METRICS, last)
    return found


def _cut_messages(path: Path, length: int, last: int, evaluated: bool) -> None:
    """Keep the committed bytes, and the messages of the last round's evaluation if that round's metrics exist."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        file.seek(max(length - 1, 0))
        if length and file.read(1) != b"\n":  # the file was changed since, so keep its lines up to the last round
            file.seek(0)
            kept = [line for line in file if (found := _object(line)) is None or found["round"] <= last]
            storage.write_atomic(path, b"".join(line.removesuffix(b"\n") + b"\n" for line in kept))
            return
        file.seek(length)
        for line in file if evaluated else ():
            found = _object(line)
            if not line.endswith(b"\n") or found is None or found["round"] != last:
                break
            length += len(line)
    if path.stat().st_size > length:
        os.truncate(path, length)


def _cut_metrics(path: Path, last: int) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    kept = [line for line in whole.splitlines(keepends=True) if (m := _object(line)) is None or m["round"] <= last]
    if (text := b"".join(kept)) != data:
        storage.write_atomic(path, text)


def gaps(folder: Path, last: int, finished: Mapping[str, Any] | None = None) -> list[str]:
    """Return sentences about lines that are missing in the logs.

    Args:
        last: the last round that must have a line; -1 if no round must.
        finished: the result, if the run is finished; then the log must list all messages.
    """
    return [*gaps_of_metrics(folder / METRICS, last, finished), *gaps_of_messages(folder / MESSAGES, finished)]


def gaps_of_metrics(path: Path, last: int, finished: Mapping[str, Any] | None = None) -> list[str]:
    """Return the sentences of :func:`gaps` that are about ``metrics.jsonl``."""
    found = list(lines(path))
    damaged = [number for number, line, ended in found if line is None and (ended or finished)]
    known = {line["round"] for _, line, ended in found if line is not None and (ended or finished)}
    missing = [t for t in range(last + 1) if t not in known]
    said = _damage_notices(METRICS, damaged)
    if missing:
        said.append(f"{METRICS} has no line of {_spans(missing)}")
    return said


def gaps_of_messages(path: Path, finished: Mapping[str, Any] | None) -> list[str]:
    """Return the sentences of :func:`gaps` that are about ``messages.jsonl``."""
    damaged = []
    up = down = 0
    for number, line, ended in lines(path):
        if line is None:
            damaged += [number] if ended or finished else []
        elif line.get("counted") is not False and isinstance(line.get("bytes"), int):
            size = line["bytes"] * (n if isinstance(n := line.get("messages"), int) else 1)
            up, down = (up + size, down) if line.get("to") == "server" else (up, down + size)
    said = _damage_notices(MESSAGES, damaged)
    if finished is not None:
        traffic = [(way, sent, finished.get(f"bytes_{way}")) for way, sent in (("up", up), ("down", down))]
        short = [f"{way} {sent} of {total}" for way, sent, total in traffic if isinstance(total, int) and sent < total]
        if short:
            said.append(f"{MESSAGES} does not list all messages: bytes {', '.join(short)}")
    return said


def _damage_notices(name: str, numbers: Sequence[int]) -> list[str]:
    if not numbers:
        return []
    shown = ", ".join(map(str, numbers[:_NAMED]))
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return [
        f"{name} has {'a damaged or edited line' if len(numbers) == 1 else 'damaged or edited lines'}: {shown}{more}"
    ]


def _spans(numbers: Sequence[int]) -> str:
    """Format ascending round numbers as text, e.g. "round 3" or "rounds 1 to 4 and 6"."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    words = [str(a) if a == b else f"{a} to {b}" for a, b in spans[:_NAMED]]
    more = sum(b - a + 1 for a, b in spans[_NAMED:])
    words += [f"{more} more"] if more else []
    text = " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
    return f"round{'s' if len(numbers) > 1 else ''} {text}"
