"""Rows of pairs: read columns of texts or images, and prepare them for an encoder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedfm.core.attachments import Attachment
from fedfm.data.invisible import is_blank
from fedfm.data.pictures import Look, Pictured, look, notices_of
from fedfm.data.sources._attachments import attachment
from fedfm.data.sources._files import column
from fedfm.data.sources._sheet import Sheet
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.tasks.task import Reading

if TYPE_CHECKING:
    import numpy as np

    from fedfm.core.rows import Rows
    from fedfm.core.tokens import Tokens
    from fedfm.models.images import Preprocess
    from fedfm.models.preprocessors import Tools

Cell = str | Attachment

NAMES = ("anchor", "positive", "negative")
IMAGES = ("anchor_pixels", "positive_pixels", "negative_pixels")  # names of the images in rows and batches
ENDS, IDS = "ends", "ids"  # tensors (n, 2 or 3): ends of a row's texts; numbers of the cells' contents
_JUDGEMENTS = frozenset(
    {"label", "labels", "score", "similarity", "similarity_score", "is_duplicate", "relevance", "gold_label"}
)
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def read(sheet: Sheet, spec: DataSpec, source: str, labelled: bool) -> Reading:
    """Rows (anchor, positive) or (anchor, positive, negative); rows to predict may be single texts or images."""
    names = [spec.column(key) for key in NAMES]
    if labelled:
        for key, name in zip(NAMES[:2], names, strict=False):
            column(sheet.columns, name, f"data.{key}", source)
        names = [name for name in names if name in sheet.columns]
    elif names[0] in sheet.columns:
        names = [name for name in names[:2] if name in sheet.columns]
    else:
        names = [name for name in (spec.text, spec.image) if name in sheet.columns][:1]
        if not names:
            column(sheet.columns, spec.column("anchor"), "data.anchor", source)
    holds_images = {name: _holds_images(sheet.columns[name]) for name in names}
    if len({*holds_images.values()}) > 1:
        (one, of), *rest = holds_images.items()
        other = next(name for name, others in rest if others != of)
        pair = (one, other) if of else (other, one)
        raise InputError(
            f'{source}: column "{pair[0]}" holds images and "{pair[1]}" texts: the columns of pairs hold only texts or '
            'only images; for images with texts of classes there is model.task = "zero_shot"'
        )
    images, looks = holds_images[names[0]], list[Look]()
    cells = [_cells(sheet, name, source, looks if images else None) for name in names]
    notices = notices_of(looks, source) + (_unread_judgements(sheet, {*names}, spec, source) if labelled else ())
    if images and not all(isinstance(sheet.columns[name], Pictured) for name in names):
        listed = " and ".join(f'"{name}"' for name in names)
        notices = (f"{source}: the cells of {listed} are read as files of images", *notices)
    return Reading("pairs", list(zip(*cells, strict=True)), frozenset(names), notices)


def _holds_images(values: Sequence[Any]) -> bool:
    """Whether the first filled cell of a column is an image: its bytes, or a path with an image's suffix."""
    if isinstance(values, Pictured):
        return True
    first = next((value for value in values if value), None)
    if isinstance(first, str):
        return first.strip().lower().endswith(_SUFFIXES) and "\n" not in first
    return isinstance(first, bytes) or (isinstance(first, Mapping) and ("bytes" in first or "path" in first))


def _unread_judgements(sheet: Sheet, used: set[str], spec: DataSpec, source: str) -> tuple[str, ...]:
    """A notice if a column seems to say which pairs belong together: rows of all values count as pairs that do."""
    for name, values in sheet.columns.items():
        judges = name.strip().lower() in _JUDGEMENTS and name not in used | {spec.partition.column}
        if judges and not isinstance(values, Pictured) and len({str(v) for v in values}) > 1:
            return (
                f'{source}: column "{name}" is not read: each row counts as a pair that belongs together, whatever '
                "this column says; leave out the rows whose texts or images do not",
            )
    return ()


def _cells(sheet: Sheet, name: str, source: str, looks: list[Look] | None) -> list[Cell]:
    """The cells of a column; of images, the findings are added to ``looks``, which is None for texts."""
    found: list[Cell] = []
    for row, value in enumerate(sheet.columns[name]):
        place = sheet.at(row)
        if looks is not None:
            file = attachment(value, name, place, source, "an image")
            looks.append(look(file.source))
            if (fault := looks[-1].fault) is not None:
                raise InputError(f'{place}: column "{name}": {file}: {fault}')
            found.append(file)
        elif value is None or (isinstance(value, str) and is_blank(value)):
            raise InputError(f'{place}: column "{name}" is empty: fill it, or remove the row')
        elif not isinstance(value, str):
            raise InputError(f'{place}: column "{name}" holds {type(value).__name__} {value!r:.40}: text is expected')
        else:
            found.append(value)
    return found


def number_of(cell: Cell) -> int:
    """The first 64 bits of the SHA-256 of a cell's content, as a signed integer."""
    digest = bytes.fromhex(cell.sha256) if isinstance(cell, Attachment) else _sha256(cell)
    return int.from_bytes(digest[:8], "little", signed=True)


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def to_rows(part: Table, tools: Tools) -> Rows:
    """Rows for an encoder: the tokens of a row's texts one after the other, or images.

    Raises:
        InputError: the rows are texts and the model reads images, or the reverse; or only some rows have a negative.
    """
    import torch

    from fedfm.core.rows import Rows

    if len({len(row) for row in part.inputs}) > 1:
        raise InputError(
            f"{part.source or 'the data'}: some rows have a negative and others have none: fill the column, or drop it"
        )
    columns: list[Sequence[Cell]] = list(zip(*part.inputs, strict=True))
    rows = Rows({IDS: torch.tensor([[number_of(cell) for cell in row] for row in part.inputs], dtype=torch.int64)})
    if not columns:
        return rows
    source = part.source or "the data"
    if isinstance(columns[0][0], Attachment):
        if tools.image is None:
            raise InputError(
                f"{source} holds pairs of images, and the model of model.name reads texts", key="model.name"
            )
        rows = _of_images(rows, columns, tools.image)
    elif tools.tokenizer is None:
        raise InputError(f"{source} holds pairs of texts, and the model of model.name reads images", key="model.name")
    else:
        rows = _of_texts(rows, columns, tools)
    return rows


def _of_images(rows: Rows, columns: Sequence[Sequence[Cell]], image: Preprocess) -> Rows:
    """The rows with their images; images that would take too much memory are prepared when a batch is read."""
    import numpy as np

    from fedfm.core.deferred import Deferred
    from fedfm.models.images import Pictures

    tensors, deferred = dict(rows.tensors), dict[str, Deferred]()
    for name, cells in zip(IMAGES, columns, strict=False):
        files = [cell.source for cell in cells if isinstance(cell, Attachment)]
        pictures = Pictures(files, np.arange(len(files)), image)
        if pictures.exceed(None):
            deferred[name] = pictures
        else:
            tensors[name] = pictures.compute()
    return replace(rows, tensors=tensors, deferred=deferred)


def _of_texts(rows: Rows, columns: Sequence[Sequence[Cell]], tools: Tools) -> Rows:
    """The rows with the tokens of their texts, and the positions where the texts end."""
    import numpy as np
    import torch

    from fedfm.core.tokens import Tokens
    from fedfm.models import preprocessing

    pieces = [preprocessing.encode([str(c) for c in cells], tools.tokenizer, tools.max_length) for cells in columns]
    ends = torch.from_numpy(np.stack([tokens.length for tokens, _ in pieces], axis=1).cumsum(1))  # (n, 2 or 3)

    def join(parts: Sequence[Tokens]) -> Tokens:
        return Tokens.of([torch.cat([of[i] for of in parts]) for i in range(len(ends))])

    more = {name: join([other[name] for _, other in pieces]) for name in pieces[0][1]}
    pad = int(tools.tokenizer.pad_token_id or 0)
    tokens = join([of for of, _ in pieces])
    return replace(rows, tensors=rows.tensors | {ENDS: ends}, tokens=tokens, pad=pad, token_arguments=more)


def shuffle(rows: Table, rng: np.random.Generator) -> Table:
    """The rows, with the positives randomly permuted."""
    order = rng.permutation(len(rows))
    inputs = [(row[0], rows.inputs[j][1], *row[2:]) for row, j in zip(rows.inputs, order.tolist(), strict=True)]
    return replace(rows, inputs=inputs)
