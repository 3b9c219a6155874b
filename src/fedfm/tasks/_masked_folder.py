"""Read folders of images and masks as columns: ``train/images``, ``train/masks``, ``test/images`` and so on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedfm.core.text import listing
from fedfm.data.sources import _file_folder, images, tables
from fedfm.data.sources._files import visible_entries
from fedfm.data.sources._sheet import Sheet
from fedfm.data.sources._splits import SPLIT_NAMES, joined_splits, other_marks, with_test
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError, close

IMAGES, MASKS = "images", "masks"
_ENDINGS = ("", "_mask", "-mask")  # a mask has the name of its image, followed by one of these
_LAYOUT = "expected train/images, train/masks, test/images, test/masks, or images and masks alone"


def sheet(path: Path, spec: DataSpec, labelled: bool) -> Sheet | None:
    """The columns of images, masks, splits and folders, and the columns of metadata files; None if ``path`` has tables.

    Args:
        spec: names of the columns.
        labelled: False for rows to predict: the images may be at any depth, and masks are not read.

    Raises:
        InputError: there are no images, an image has no mask, or a mask has no image.
    """
    if tables.files_of(path):
        return None
    homes = dict(_homes(path))
    if not homes:
        if not labelled:
            return _file_folder.sheet(path, spec, spec.image, "image", labelled=False)
        raise InputError(f"{path} has no folders {IMAGES} and {MASKS}: {_LAYOUT}")
    image_in, mask_in = spec.image, spec.column("mask")
    columns: dict[str, list[Any]] = {key: [] for key in (image_in, mask_in, "split", "folder")}
    strange: list[str] = []
    for home, split in homes.items():
        masks = _by_stem(home / MASKS, strange) if labelled else {}
        found = _files(home / IMAGES, strange)
        if not found:
            raise InputError(f"{home / IMAGES} has no images: {_LAYOUT}")
        for image in found:
            inside = image.relative_to(home / IMAGES)
            columns[image_in].append(str(image.absolute()))
            columns[mask_in].append(str(_mask_of(home / MASKS / inside, masks, image).absolute()) if labelled else "")
            # In some data sets, the folders of splits are inside ``images`` and ``masks``.
            below = SPLIT_NAMES.get(inside.parts[0].lower()) if len(inside.parts) > 1 and split is None else None
            columns["split"].append(split or below)
            columns["folder"].append("/".join(inside.parts[bool(below) : -1]))
        if rest := sorted(str(file) for files in masks.values() for file in files):
            raise InputError(
                f"{rest[0]} has no image of this name in {home / IMAGES}{_more(rest)}: add it, or remove the mask"
            )
    files = [Path(file) for file in columns[image_in]]
    return _sheet(path, homes, columns, files, strange, spec)


def _sheet(
    path: Path,
    homes: Mapping[Path, str | None],
    columns: dict[str, list[Any]],
    files: list[Path],
    strange: list[str],
    spec: DataSpec,
) -> Sheet:
    notices = [*joined_splits({home.name: split for home, split in homes.items()}, str(path))]
    if not any(columns["folder"]):
        del columns["folder"]
    marks = columns.pop("split")
    if all(marks):
        columns[spec.split], more = with_test(marks, str(path))
        notices += more
    elif any(marks):
        lost = files[marks.index(None)]
        raise InputError(f"{lost} is in no folder of a split, but other images are: put it into train, val or test")
    meta = images.metadata(path.absolute(), [home.absolute() for home in homes], files)
    if all(marks):
        notices += other_marks(meta.get(spec.split), marks, spec.split, str(path))
    columns |= {key: cells for key, cells in meta.items() if key not in columns}
    notices += _file_folder.left_out(path, strange, "image")
    return Sheet(columns, lambda row: str(files[row]), tuple(notices))


def _homes(path: Path) -> Iterator[tuple[Path, str | None]]:
    """Each folder that has ``images``, and the folder's split; the split of ``path`` itself is None."""
    folders = [p for p in visible_entries(path) if p.is_dir()]
    named = [p for p in folders if p.name.lower() in SPLIT_NAMES and (p / IMAGES).is_dir()]
    if named and (path / IMAGES).is_dir():
        raise InputError(f"{path} has the folder {IMAGES} and {listing(p.name for p in named)}, too: {_LAYOUT}")
    if (path / IMAGES).is_dir():
        yield path, None
    for folder in named:
        yield folder, SPLIT_NAMES[folder.name.lower()]
    if named:
        for folder in folders:
            if folder not in named:
                raise InputError(
                    f"{folder} is next to {listing(p.name for p in named)} and is not a split with a folder {IMAGES}"
                    f"{close(folder.name, SPLIT_NAMES)}"
                )


def _files(folder: Path, strange: list[str]) -> list[Path]:
    """The images below a folder, sorted; names of other files are added to ``strange``."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: {_LAYOUT}")
    return _file_folder.files_below(folder, "image", strange)


def _by_stem(folder: Path, strange: list[str]) -> dict[Path, list[Path]]:
    """The masks below a folder, by path without suffix."""
    found: dict[Path, list[Path]] = {}
    for file in _files(folder, strange):
        found.setdefault(file.with_suffix(""), []).append(file)
    return found


def _mask_of(place: Path, masks: dict[Path, list[Path]], image: Path) -> Path:
    """Remove an image's mask from ``masks`` and return it.

    Args:
        place: the path of a mask that has the image's own name.
    """
    stem = place.with_suffix("")
    for ending in _ENDINGS:
        files = masks.pop(stem.with_name(stem.name + ending), [])
        if len(files) > 1:
            raise InputError(f"{image} has {len(files)} masks, {listing(file.name for file in files)}: keep one")
        if files:
            return files[0]
    near = close(stem.name, [of.name for of in masks])
    raise InputError(f"{image} has no mask {stem.name}.png in {place.parent}{near}: add it, or remove the image")


def _more(files: list[str]) -> str:
    return f" (the first of {len(files)} such masks)" if len(files) > 1 else ""
