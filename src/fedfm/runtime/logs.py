"""The two logs of a run directory: JSON Lines, appended, cut back to the last commit when a run goes on.

``metrics.jsonl`` gets a line when a committed round has been evaluated, ``messages.jsonl`` the round's crossings just
before its commit. A record that was damaged on the disk is shown as far as it goes, and :func:`gaps` says what is
missing of it: nothing that a run computes depends on the logs, but for ``run.patience``, which reads validation losses.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fedfm.core import storage
from fedfm.errors import InputError

METRICS, MESSAGES = "metrics.jsonl", "messages.jsonl"
_NAMED = 5  # lines, or spans of rounds, that are named one by one


def append(path: Path, text: str) -> int:
    """Add lines; returns the file's length.

    Raises:
        RunError: the disk is full, or not writable.
    """
    try:
        with open(path, "ab") as file:
            file.write(to_bytes(text))
            return file.tell()
    except OSError as error:
        raise storage.not_written(path, error) from error


def to_bytes(text: str) -> bytes:
    """UTF-8. What has no place in it, as in names of files that were none, stands as JSON's escape."""
    return text.encode("utf-8", "backslashreplace")


def lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None, bool]]:
    """(number from 1, its object or None where it is damaged, whether it has an end) of the lines that are not empty.

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
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and type(found.get("round")) is int else None


def rounds(path: Path) -> list[dict[str, Any]]:
    """The whole lines of ``metrics.jsonl``: without damaged ones, and without a torn last one."""
    return [found for _, found, ended in lines(path) if found is not None and ended]


def best_round(found: Sequence[Mapping[str, Any]]) -> int | None:
    """The first round with the lowest validation loss; None where there is none."""
    return min(losses)[1] if (losses := val_losses(found)) else None


def val_losses(found: Sequence[Mapping[str, Any]]) -> list[tuple[float, int]]:
    """(validation loss, round) of the trained rounds that have one.

    The start is left out: its even guesses may lose less than an accurate model that is too sure of itself.
    """
    return [(m["val_loss"], m["round"]) for m in found if m["round"] and m.get("val_loss") is not None]


def cut(folder: Path, record: Mapping[str, Any] | None) -> list[str]:
    """Bring the logs back to a commit, or to none; returns what is missing of them up to there.

    Damaged lines stay where they are: somebody may know what stood there.
    """
    last, length = (-1, 0) if record is None else (record["round"], record["messages"])
    found = gaps(folder, last - 1)
    if record is not None:
        size = _size(folder / MESSAGES)
        if size < length:
            found.append(f"{MESSAGES} has lost {length - size} of {length} bytes that were committed")
    judged = any(line["round"] == last for line in rounds(folder / METRICS))
    _cut_messages(folder / MESSAGES, length, last, judged)
    _cut_metrics(folder / METRICS, last)
    return found


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _cut_messages(path: Path, length: int, last: int, judged: bool) -> None:
    """What judged the last round's models stays, if its metrics are there. A file that does not end a line where the
    commit was has been changed since: of it the lines up to the last round stay.
    """
    if not path.exists():
        return
    with open(path, "rb") as file:
        if not _ends_line(file, length):
            file.seek(0)
            kept = [line for line in file if (found := _object(line)) is None or found["round"] <= last]
            storage.write_atomic(path, b"".join(line.removesuffix(b"\n") + b"\n" for line in kept))
            return
        file.seek(length)
        for line in file if judged else ():
            found = _object(line)
            if not line.endswith(b"\n") or found is None or found["round"] != last:
                break
            length += len(line)
    if path.stat().st_size > length:
        os.truncate(path, length)


def _ends_line(file: BinaryIO, length: int) -> bool:
    file.seek(max(length - 1, 0))
    return not length or file.read(1) == b"\n"


def _cut_metrics(path: Path, last: int) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    kept = [line for line in whole.splitlines(keepends=True) if (m := _object(line)) is None or m["round"] <= last]
    if (text := b"".join(kept)) != data:
        storage.write_atomic(path, text)


def gaps(folder: Path, last: int, finished: Mapping[str, Any] | None = None) -> list[str]:
    """What is missing of the logs, a sentence each.

    Args:
        last: the last round of which a line must be there; -1: none.
        finished: the result of a run that has come to its end: all it sent must be there, too.
    """
    return [*gaps_of_metrics(folder / METRICS, last, finished), *_gaps_of_messages(folder / MESSAGES, finished)]


def gaps_of_metrics(path: Path, last: int, finished: Mapping[str, Any] | None = None) -> list[str]:
    """The same of ``metrics.jsonl`` alone."""
    found = list(lines(path))
    damaged = [number for number, line, ended in found if line is None and (ended or finished)]
    known = {line["round"] for _, line, ended in found if line is not None and (ended or finished)}
    missing = [t for t in range(last + 1) if t not in known]
    said = _damaged(METRICS, damaged)
    if missing:
        said.append(f"{METRICS} has no line of {_spans(missing)}")
    return said


def _gaps_of_messages(path: Path, finished: Mapping[str, Any] | None) -> list[str]:
    damaged = []
    up = down = 0
    for number, line, ended in lines(path):
        if line is None:
            damaged += [number] if ended or finished else []
        elif line.get("counted") is not False and isinstance(line.get("bytes"), int):
            up, down = (up + line["bytes"], down) if line.get("to") == "server" else (up, down + line["bytes"])
    said = _damaged(MESSAGES, damaged)
    if finished is not None:
        told = [(way, sent, finished.get(f"bytes_{way}")) for way, sent in (("up", up), ("down", down))]
        short = [f"{way} {sent} of {total}" for way, sent, total in told if isinstance(total, int) and sent < total]
        if short:
            said.append(f"{MESSAGES} does not list all messages: bytes {', '.join(short)}")
    return said


def _damaged(name: str, numbers: Sequence[int]) -> list[str]:
    if not numbers:
        return []
    shown = ", ".join(map(str, numbers[:_NAMED]))
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return [f"{name} has {'a damaged line' if len(numbers) == 1 else 'damaged lines'}: {shown}{more}"]


def _spans(numbers: Sequence[int]) -> str:
    """Rounds in order, as spans: round 3; rounds 1 to 4 and 6."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    said = [str(a) if a == b else f"{a} to {b}" for a, b in spans[:_NAMED]]
    more = sum(b - a + 1 for a, b in spans[_NAMED:])
    said += [f"{more} more"] if more else []
    text = " and ".join([", ".join(said[:-1]), said[-1]]) if len(said) > 1 else said[0]
    return f"round{'s' if len(numbers) > 1 else ''} {text}"
