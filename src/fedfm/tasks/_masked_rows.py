"""Read images with masks from columns, and prepare them for a model.

A row is (image, mask, names). Image and mask are attachments; ``names`` has the name of each class number, and is () if
classes have no names. A row to predict is (image,).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.attachments import Attachment
from fedfm.core.row_kinds import Reading
from fedfm.core.rows import Rows
from fedfm.core.text import listing
from fedfm.data import pictures
from fedfm.data.class_names import names_of
from fedfm.data.sources._attachments import attachments
from fedfm.data.sources._files import column
from fedfm.data.sources._sheet import Sheet, each_once
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError, reason_of
from fedfm.models import deferred_rows
from fedfm.models.images import Pictures
from fedfm.models.preprocessing import IGNORE
from fedfm.models.preprocessors import Tools
from fedfm.tasks import _mask_files
from fedfm.tasks._mask_files import MaskLook

NAMES = "classes.json"
_VOID = 255  # usually marks ignored pixels; it is a class only if the file of names has more than 255 names
_BINARY = {0, _VOID}
_UNNAMED = 64  # largest number of classes without names; more are probably shades of grey
_THREADS = 4


def read(sheet: Sheet, spec: DataSpec, source: str, labelled: bool) -> Reading:
    """Rows from the columns of images and masks; each file is opened once, to check it.

    Raises:
        InputError: a file is missing or damaged, a mask and its image differ in size, or a number of a mask is
            not a class.
    """
    image_in, mask_in = spec.image, spec.column("mask")
    given = column(sheet.columns, image_in, "data.image", source)
    images = attachments(list(given), image_in, sheet.at, source, "an image")
    if not labelled:
        looks = _looks([(image, None) for image in images], sheet)
        said = pictures.notices_of((of.image for of in looks), source)
        return Reading("masked", [(image,) for image in images], frozenset({image_in, mask_in}), said)
    given = column(sheet.columns, mask_in, "data.mask", source)
    masks = attachments(list(given), mask_in, sheet.at, source, "a mask")
    looks = _looks(list(zip(images, masks, strict=True)), sheet)
    names, notices = _names(source), [*pictures.notices_of((of.image for of in looks), source)]
    notices += _palettes(looks, masks, source)
    if n := sum(of.turned for of in looks):
        notices.append(
            f"{n} of {len(looks)} images of {source} are turned by their EXIF orientation, and their masks have none "
            "and stay: if the masks were drawn on the images as they are stored, they do not fit; save the images "
            "without EXIF data"
        )
    present = {number for of in looks for number in of.numbers}
    if present == _BINARY:
        raise InputError(
            f"{source}: all masks hold only 0 and {_VOID}, and {_VOID} usually marks pixels that do not count: save "
            f"the second class as 1 (mask // {_VOID})"
        )
    if n := sum(set(of.numbers) == _BINARY for of in looks):
        notices.append(
            f"{n} of {len(looks)} masks of {source} hold only 0 and {_VOID}, and {_VOID} usually marks pixels that do "
            f"not count: if it is a class there, save it with the number that it has in the other masks"
        )
    classes = names or _number_classes(present - {_VOID}, source, notices)
    for i, of in enumerate(looks):
        if wrong := [number for number in of.numbers if number >= len(classes) and number != _VOID]:
            raise InputError(
                f"{sheet.at(i)}: the mask {masks[i]} holds the number {wrong[0]}, and {NAMES} names the classes 0 to "
                f"{len(classes) - 1}"
            )
    if names and (missing := [name for number, name in enumerate(names) if number not in present]):
        notices.append(f"{source}: no mask has a pixel of {listing(missing, 4)}")
    rows = [(image, mask, names) for image, mask in zip(images, masks, strict=True)]
    return Reading("masked", rows, frozenset({image_in, mask_in}), tuple(notices), classes)


def _looks(files: list[tuple[Attachment, Attachment | None]], sheet: Sheet) -> list[MaskLook]:
    with ThreadPoolExecutor(_THREADS) as pool:  # Pillow releases the interpreter's lock when it decodes
        looks = list(pool.map(lambda of: _mask_files.look(*of), files))
    wrong = [i for i, of in enumerate(looks) if of.fault]
    if wrong:
        more = f" (the first of {len(wrong)} such rows)" if len(wrong) > 1 else ""
        place, fault = sheet.at(wrong[0]), looks[wrong[0]].fault
        raise InputError(f"{fault}{more}" if place in fault else f"{place}: {fault}{more}")
    return looks


def _palettes(looks: Sequence[MaskLook], masks: Sequence[Attachment], source: str) -> list[str]:
    """A notice if palettes of masks give one number several colours: then the number may stand for several classes."""
    first: dict[int, int] = {}  # for each number, the first mask with a colour for it
    for i, of in enumerate(looks):
        for number, colour in of.colours.items():
            before = first.setdefault(number, i)
            if (other := looks[before].colours[number]) != colour:
                return [
                    f"{source}: the number {number} has the colour {other} in the palette of {masks[before]} and "
                    f"{colour} in that of {masks[i]}: the numbers are read, and not the colours; if the colours are "
                    "the classes, save all masks with one palette"
                ]
    return []


def _names(source: str) -> tuple[str, ...]:
    """The names in the file ``classes.json`` of the data's folder; () if there is no such file.

    The file is a list of names, or an object that maps each number to a name, as a configuration's ``id2label`` does.

    Raises:
        InputError: the file has another form.
    """
    home = Path(source) if Path(source).is_dir() else Path(source).parent
    path = home / NAMES
    if not Path(source).exists() or not path.is_file():
        return ()
    wanted = 'expected a list of names, or {"0": "background", "1": ...}'
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=each_once)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {reason_of(error)}; {wanted}") from None
    if isinstance(found, Mapping):
        numbers = {key: name for key, name in found.items() if key != str(_VOID)}
        if set(numbers) != {str(i) for i in range(len(numbers))}:
            raise InputError(f"{path}: its numbers are {listing(numbers, 4)}, not 0 to {len(numbers) - 1}; {wanted}")
        found = [numbers[str(i)] for i in range(len(numbers))]
    if not isinstance(found, list) or not found or not all(isinstance(name, str) for name in found):
        raise InputError(f"{path}: {wanted}")
    return names_of(found, str(path))


def _number_classes(present: set[int], source: str, notices: list[str]) -> tuple[str, ...]:
    """The class names if no file gives any: the numbers from 0 to the largest in the masks.

    Raises:
        InputError: most of these numbers are in no mask, or there are too many.
    """
    if not present:
        raise InputError(f"{source}: all masks hold only {_VOID}, which marks pixels that do not count")
    largest = max(present)
    missing = [number for number in range(min(largest, _mask_files.LARGEST)) if number not in present]
    shown = ", ".join(map(str, sorted(present)[:5])) + (", ..." if len(present) > 5 else "")
    if largest > _mask_files.LARGEST or len(missing) > len(present) or len(present) > _UNNAMED:
        raise InputError(
            f"{source}: the masks hold {len(present)} numbers, {shown}, up to {largest}: classes are numbered 0, 1, 2 "
            f"and so on; if these are shades of grey or single objects, save classes instead, else name each in {NAMES}"
        )
    if missing:
        notices.append(
            f"{source}: no mask has the number {', '.join(map(str, missing[:4]))}: such a class is not learnt"
        )
    return tuple(str(number) for number in range(largest + 1))


def shuffle(rows: Table, rng: np.random.Generator) -> Table:
    """The rows, each with the mask of a random row."""
    order = rng.permutation(len(rows))
    return replace(rows, inputs=[(rows.inputs[i][0], *rows.inputs[j][1:]) for i, j in enumerate(order.tolist())])


def forewarnings(parts: Mapping[str, Table], ignored: int) -> list[str]:
    """Notices about classes that only test rows have, and about ignored pixels."""
    counts = {name: _pixels(part, ignored) for name, part in parts.items()}
    found = list[str]()
    there = {name: {key for key in of if key is not None} for name, of in counts.items()}
    if alone := sorted(there.get("test", set()) - there.get("training", set())):
        found.append(
            f"only test masks have pixels of {listing(alone, 4)}: no client can learn what no training mask has"
        )
    training = counts.get("training", Counter())
    if training and len(there["training"]) == 1:
        only = min(there["training"])
        found.append(f'all pixels of the training masks are of "{only}": there is nothing to distinguish')
    if left_out := training[None]:
        found.append(
            f"{100 * left_out / training.total():.3g} % of the pixels of training masks are {ignored} "
            "(model.ignore_index) and do not count"
        )
    return found


def _pixels(part: Table, ignored: int) -> Counter[str | None]:
    """The number of pixels of each class; the key None stands for ignored pixels."""
    with ThreadPoolExecutor(_THREADS) as pool:
        counts = list(pool.map(lambda row: np.unique(_mask_files.read(row[1]), return_counts=True), part.inputs))
    total: Counter[str | None] = Counter()
    for (_, _, names), (numbers, of) in zip(part.inputs, counts, strict=True):
        for number, n in zip(numbers.tolist(), of.tolist(), strict=True):
            total[None if number == ignored else number_to_name(number, names)] += n
    return total


def presence(table: Table, classes: Sequence[str], ignored: int) -> np.ndarray:
    """1 where a row's mask has a pixel of a class, else 0: (n, C)."""
    found = np.zeros((len(table), len(classes)))
    code = {name: c for c, name in enumerate(classes)}
    for i, (_, mask, names) in enumerate(table.inputs):
        for number in np.unique(_mask_files.read(mask)).tolist():
            if number != ignored:
                found[i, code[number_to_name(number, names)]] = 1.0
    return found


def number_to_name(number: int, names: Sequence[str]) -> str:
    """The name of the class with this number in a mask; if it has no name, the number as text."""
    return names[number] if number < len(names) else str(number)


def to_rows(part: Table, tools: Tools, classes: tuple[str, ...], ignored: int) -> Rows:
    """Rows with images and, except for rows to predict, with masks; large data are decoded batch by batch.

    Raises:
        InputError: the model reads no images, or a class of the rows is none of the model's classes.
    """
    if tools.image is None:
        raise InputError(f"{part.source or 'the data'} holds images, which the model of model.name does not read")
    every = np.arange(len(part))
    images = Pictures([row[0].source for row in part.inputs], every, tools.image, tools.loaders)
    if not len(part) or len(part.inputs[0]) == 1:
        return deferred_rows.settle(Rows(deferred={"pixel_values": images}), tools.most)
    for names in {row[2] for row in part.inputs}:
        if unknown := [name for name in names if name not in classes]:
            raise InputError(f"{part.source or 'the data'}: class {unknown[0]!r} is none of the model's classes")
    masks = MaskRows(part.inputs, every, size_of_images(tools), classes, ignored, tools.loaders)
    return deferred_rows.settle(Rows(deferred={"pixel_values": images, "targets": masks}), tools.most)


def size_of_images(tools: Tools) -> tuple[int, int]:
    """Height and width of every prepared image."""
    from PIL import Image

    if tools.image is None:
        raise ValueError("there is no image processor")
    height, width = tools.image([Image.new("RGB", (16, 16))]).shape[-2:]
    return height, width


@dataclass(frozen=True)
class MaskRows:
    """The targets of rows, decoded from masks when needed; see :class:`fedfm.core.deferred.Deferred`.

    Attributes:
        rows: (image, mask, names) of each row of the table.
        index: indexes (n,) into ``rows``.
        size: height and width of the prepared images, and of the masks after resizing by nearest neighbour.
        classes: the model's classes.
        ignored: the number that marks ignored pixels in a mask.
        loaders: number of processes that compute batches in advance.
    """

    rows: Sequence[Any]
    index: np.ndarray
    size: tuple[int, int]
    classes: tuple[str, ...]
    ignored: int
    loaders: int = 0

    def __len__(self) -> int:
        return len(self.index)

    def take(self, index: np.ndarray) -> MaskRows:
        """These rows, in this order."""
        return replace(self, index=self.index[index])

    def sources(self) -> Iterator[bytes]:
        """What determines each row's targets: class names, the number that marks ignored pixels, the mask's content."""
        for i in self.index:
            _, mask, names = self.rows[i]
            yield json.dumps([names, self.ignored]).encode() + mask.content()

    def compute(self) -> Tensor:
        """The class index of each pixel, int16 (n, H, W); -100 for ignored pixels."""
        found = np.empty((len(self), *self.size), np.int16)
        for at, i in enumerate(self.index):
            found[at] = self._targets(*self.rows[i][1:])
        return torch.from_numpy(found)

    def _targets(self, mask: Attachment, names: tuple[str, ...]) -> np.ndarray:
        numbers = _mask_files.nearest(_mask_files.read(mask), self.size)
        code = {name: i for i, name in enumerate(self.classes)}
        found = np.empty(numbers.shape, np.int16)
        for number in np.unique(numbers).tolist():
            index = IGNORE if number == self.ignored else code.get(number_to_name(number, names))
            if index is None:
                raise InputError(
                    f"the mask {mask} holds the number {number}, which is not a class: pixels that do not count have "
                    f"model.ignore_index = {self.ignored}"
                )
            found[numbers == number] = index
        return found
