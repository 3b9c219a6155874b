"""Read conversations with images: messages with places for images, and the images of each row.

A place is a part ``{"type": "image"}`` of a message's content, as in TRL's data sets, or ``<image>`` in a message's
text, as in LLaVA and LLaMA-Factory. In a row, the character :data:`fedfm.core.attachments.IMAGE` marks the place.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fedfm.core.attachments import IMAGE, Attachment
from fedfm.core.row_kinds import Reading
from fedfm.data import pictures
from fedfm.data.sources import _conversations
from fedfm.data.sources._attachments import attachment
from fedfm.data.sources._files import At, column
from fedfm.data.sources._sheet import Sheet
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError
from fedfm.tasks._conversation_rows import with_system_and_tools

KIND = "visual_instruction"
PLACE = "<image>"
_TEXT = ("text", "input_text", "output_text")  # types of parts
_SOURCES = ("image", "image_url", "url", "path", "base64")  # keys under which a part may have its image
_EMBEDDED = ";base64,"  # a URL with this text contains the image itself
_HOLDS = "an image"


def conversations(sheet: Sheet, spec: DataSpec, source: str, labelled: bool) -> Reading:
    """Rows (messages before the last answer, the last answer, images).

    Raises:
        InputError: a column is missing; a cell is empty or malformed; an image is missing or damaged; a row has more or
            fewer images than places for images; an answer has such a place. The message says where.
    """
    name = spec.column("messages")
    cells = column(sheet.columns, name, "data.messages", source)
    read = [_places(cell, name, sheet.at(row)) for row, cell in enumerate(cells)]
    inputs = _conversations.conversations([cell for cell, _ in read], name, sheet.at, answered=labelled)
    used = {name}
    files: list[tuple[Attachment, ...]] = [
        tuple(attachment(value, name, sheet.at(row), source, _HOLDS) for value in inside)
        for row, (_, inside) in enumerate(read)
    ]
    if (of := _image_column(sheet, spec)) is not None:
        used |= {of}
        for row, value in enumerate(sheet.columns[of]):
            found = _attachments(value, of, sheet.at(row), source)
            if found and files[row]:
                raise InputError(
                    f'{sheet.at(row)}: images are in column "{of}" and in the messages: expected one of the two'
                )
            files[row] = files[row] or found
    if not any(files):
        key, more = spec.column("images"), 'for conversations without images set model.task = "instruction"'
        raise InputError(f'{source}: no column "{key}" (data.images), and no image in column "{name}"; {more}')
    rows, notices = _with_places([(*pair, some) for pair, some in zip(inputs, files, strict=True)], name, of, sheet.at)
    made = with_system_and_tools(KIND, rows, used, sheet, spec, source)
    return Reading(KIND, made.inputs, made.used, (*notices, *_looks(files, sheet.at, source), *made.notices))


def _image_column(sheet: Sheet, spec: DataSpec) -> str | None:
    """The column of images: ``data.images``, or ``data.image`` if each row has at most one; None without either."""
    names = (spec.column("images"), spec.image)
    return next((name for name in names if name in sheet.columns), None)


def _attachments(value: Any, name: str, place: str, source: str) -> tuple[Attachment, ...]:
    """The images of one cell, which is empty, one image or a list of images."""
    if value is None or value == "":
        return ()
    found = value if isinstance(value, list | tuple) else [value]
    return tuple(attachment(_file(one, f'{place}: column "{name}"'), name, place, source, _HOLDS) for one in found)


def _places(cell: Any, name: str, place: str) -> tuple[Any, list[Any]]:
    """The messages of a cell with :data:`IMAGE` at the places of images, and the images inside the messages."""
    if not isinstance(cell, list):
        return cell, []  # the reader of conversations refuses it
    inside: list[Any] = []
    return [_message(message, i, name, place, inside) for i, message in enumerate(cell, 1)], inside


def _message(message: Any, i: int, name: str, place: str, inside: list[Any]) -> Any:
    key = "value" if isinstance(message, dict) and "content" not in message and "value" in message else "content"
    content = message.get(key) if isinstance(message, dict) else None
    if not isinstance(content, str | list):
        return message
    at = f'{place}: message {i} of column "{name}"'
    parts = content if isinstance(content, list) else [{"text": content}]
    return {**message, key: "".join(_part(part, at, inside) for part in parts)}


def _part(part: Any, at: str, inside: list[Any]) -> str:
    """A part of a message as text; its image, if it has one, is added to ``inside``."""
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind in _TEXT and isinstance(part.get("text"), str):
        if IMAGE in part["text"]:
            raise InputError(f"{at} has the character U+FFFC, which stands for an image: remove it, or write {PLACE}")
        return str(part["text"]).replace(PLACE, IMAGE)
    if kind in _conversations.PICTURES:
        values = [part[key] for key in _SOURCES if part.get(key) is not None]
        inside += [_file(values[0], at)] if values else []
        return IMAGE
    what = f'a part of type "{kind}"' if isinstance(kind, str) and kind not in _TEXT else f"the part {part!r:.40}"
    raise InputError(f'{at} has {what}: {{"type": "text", "text": ...}} or {{"type": "image"}} is expected')


def _file(value: Any, at: str) -> Any:
    """An image as a path or as its content; a web address is refused."""
    if isinstance(value, dict) and "url" in value:
        value = value["url"]
    if not isinstance(value, str):
        return value
    if value.startswith(("http://", "https://")):
        raise InputError(f"{at}: {value:.60} is an address on the web: download the image, and give its path")
    if value.startswith("data:") and _EMBEDDED in value[:60]:
        try:
            return base64.b64decode(value.partition(_EMBEDDED)[2], validate=True)
        except binascii.Error as error:
            raise InputError(f"{at}: an image in base64 cannot be read: {error}") from None
    return value.removeprefix("file://")


def _with_places(rows: list[Any], name: str, of: str | None, at: At) -> tuple[list[Any], tuple[str, ...]]:
    """The rows, each with as many places as images, and a notice if this function chose the places.

    If no message of the file has a place, the images come at the start of the user's first message, as in TRL.
    """
    counts = [sum(turn[1].count(IMAGE) for turn in said) for said, *_ in rows]
    notices: tuple[str, ...] = ()
    if of is not None and not any(counts):
        rows = [(_first(said, len(some)), output, some) for said, output, some in rows]
        counts = [len(some) for *_, some in rows]
        notices = (
            f'no message of column "{name}" has a place for an image ({{"type": "image"}} or {PLACE}): the images '
            "stand before the first message of the user",
        )
    for row, (places, (said, output, some)) in enumerate(zip(counts, rows, strict=True)):
        if _has_image(output) or any(turn[0] == _conversations.ASSISTANT and IMAGE in turn[1] for turn in said):
            raise InputError(f'{at(row)}: column "{name}" has an image in an answer, but the model answers by text')
        if places != len(some):
            where = f' in column "{of}"' if of is not None else ""
            raise InputError(
                f'{at(row)}: column "{name}" has {places} place{"s" * (places != 1)} for images, and the row has '
                f"{len(some)} image{'s' * (len(some) != 1)}{where}: expected as many images as places"
            )
    return rows, notices


def _has_image(output: Any) -> bool:
    return IMAGE in (output if isinstance(output, str) else output[-1][1])


def _first(said: Sequence[Any], count: int) -> Any:
    """The messages, with places for ``count`` images at the start of the user's first message."""
    first = next((i for i, turn in enumerate(said) if turn[0] == "user"), 0)
    return tuple((t[0], IMAGE * count + t[1], *t[2:]) if i == first else t for i, t in enumerate(said))


def _looks(files: Sequence[tuple[Attachment, ...]], at: At, source: str) -> tuple[str, ...]:
    """Notices about the images.

    Raises:
        InputError: an image is damaged.
    """
    flat = [(row, file) for row, some in enumerate(files) for file in some]
    with ThreadPoolExecutor(4) as pool:  # Pillow releases the interpreter's lock to decode
        found = list(pool.map(lambda pair: pictures.look(pair[1].source), flat))
    for (row, file), one in zip(flat, found, strict=True):
        if one.fault is not None:
            what = "an image" if isinstance(file.source, bytes) else file.source
            raise InputError(f"{at(row)}: {what}: {one.fault}")
    return pictures.notices_of(found, source)
