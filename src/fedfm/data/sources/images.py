"""Read image folders in the layout of Hugging Face's ``imagefolder``.

Images are in ``train/<class>/*.png`` and ``test/<class>/*.png`` (also ``val``), or just in ``<class>/*.png``.
Any of these folders may have a file ``metadata.csv``, ``metadata.jsonl`` or ``metadata.parquet``. Its column
``file_name`` has the images' paths relative to its folder. It may have further columns; a label column replaces the
class folders.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from fedfm.core import tasks
from fedfm.core.text import listing
from fedfm.data import picture_forms
from fedfm.data.pictures import SUFFIXES, Look, look, notices_of
from fedfm.data.sources import tables
from fedfm.data.sources._endings import FILES
from fedfm.data.sources._files import column, visible_entries
from fedfm.data.sources._sheet import Sheet
from fedfm.data.sources._splits import SPLIT_NAMES, joined_splits, other_marks, with_test
from fedfm.data.sources._tabular import UNLABELLED, labels_of, others, refuse_absent, split_of
from fedfm.data.sources._unread import notices_of_marks
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.data.task_rows import row_task
from fedfm.errors import InputError, close

_SCANS = (".dcm", ".dicom", ".ima", ".nii", ".nii.gz")
_MASKS = ("mask", "segm", "annot", "label", "ground")  # beginnings of names of folders with masks
_MASK = re.compile(r"(.+?)[ _-]*(?:mask|seg|segmentation|annotation|groundtruth|gt)(?:[ _-]?\d{1,3})?", re.IGNORECASE)
SEGMENTATION = 'name the folders images and masks, and set model.task = "segmentation" (docs: how-to/segmentation.md)'
_FEW = 3  # smallest number of masks for a notice
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def read(path: Path, spec: DataSpec, *, task: str | None = None, labelled: bool = True) -> Table:
    """Table of an image folder: ``inputs`` are paths; each file is opened once as a check.

    Raises:
        InputError: there are no images or no classes, an image does not open, or metadata do not match the files.
    """
    homes = parts(path) if labelled else {}
    files: list[Path] = []
    splits: list[str] = []
    strange: list[str] = []
    for folder, split in homes.items() or {path: "test"}.items():
        found = _pictures(folder, strange, deep=not labelled)
        files += found
        splits += [split or "train"] * len(found)
    if not files:
        wanted = "train/<class>/*.png, test/<class>/*.png, or a file of rows for each split" if labelled else "images"
        there = [name for name in strange if not name.endswith(os.sep)]
        but = f" but {_endings(there)}" if there else ""
        raise InputError(
            f"{path}: no images ({', '.join(SUFFIXES[:4])}, ...) in this folder{but}; expected {wanted}"
            f"{_scans(strange)}{_other_files(there) if task is None else ''}"
        )
    notices: tuple[str, ...] = ()
    named, targets = tasks.task_named(task), None
    own = named if labelled and named is not None and named.own_targets else None
    meta = metadata(path, list(homes), files)
    if own is not None and not meta:
        raise InputError(
            f'{path}: folders are classes, and task "{own.name}" has none: put a metadata.csv into {path} with the '
            f'columns "file_name" and "{spec.label}"'
        )
    for key in ("label", "label_name") if labelled else ():
        refuse_absent(meta, spec, key, str(path))
    if labelled and own is None and spec.label not in meta:
        for file in files:
            if file.parent in {path, *homes}:
                raise InputError(
                    f"{file} is in no class folder; expected train/<class>/*.png and test/<class>/*.png, "
                    f'or a metadata.csv (or .jsonl) with the columns "file_name" and "{spec.label}"'
                )
        meta[spec.label] = [file.parent.name for file in files]
        notices += _masks(files)
    notices += _masks_inside(files)
    looks = _look_at(files)

    def at(row: int) -> str:
        return str(files[row])

    labels, classes, more = UNLABELLED
    if own is not None:
        of = row_task(own).read_targets(Sheet(meta, at), spec, source=str(path))
        targets, classes, more = of.values, of.classes, of.notices
        meta = {name: values for name, values in meta.items() if name not in of.used}
    elif labelled:
        labels, classes, more = labels_of(meta, spec, source=str(path), at=at)
    if labelled:
        refuse_absent(meta, spec, "split", str(path))
    if labelled and set(homes.values()) == {None}:
        splits = split_of(meta, spec, len(files), at).tolist()
        notices += notices_of_marks(meta, spec, str(path))
    elif labelled:
        notices += other_marks(meta.get(spec.split), splits, spec.split, str(path))
        splits, told = with_test(splits, str(path))
        notices += (*told, *joined_splits({home.name: split for home, split in homes.items()}, str(path)))
    notices += (*more, *notices_of(looks, str(path)), *picture_forms.notices(looks, labels, classes, str(path)))
    hollow = [name for name in strange if name.endswith(os.sep)]
    strange = [name for name in strange if name not in hollow]
    if hollow:
        holds = "holds no readable image and is not a class: if it should be a class, its images are missing"
        if len(hollow) > 1:
            holds = "hold no readable images and are not classes: if they should be classes, their images are missing"
        notices += (f"{listing(hollow, 4)} {holds}",)
    if strange:
        one = len(strange) == 1
        notices += (
            f"{len(strange)} {'file' if one else 'files'} of {path} without the ending of a readable image "
            f"{'was' if one else 'were'} left out ({_endings(strange)}), e.g. {strange[0]}{_scans(strange)}",
        )
    return Table(
        "image",
        [str(file) for file in files],
        labels,
        classes,
        np.array(splits),
        others(meta, {spec.label, spec.label_name, spec.split} if labelled else set()),
        str(path),
        notices,
        targets=targets,
    )


def _look_at(files: Sequence[Path]) -> list[Look]:
    """Open each file once as a check."""
    with ThreadPoolExecutor(4) as pool:  # Pillow decodes outside the interpreter's lock
        looks = list(pool.map(look, map(str, files)))
    wrong = [(file, one.fault) for file, one in zip(files, looks, strict=True) if one.fault]
    if wrong:
        more = f" (the first of {len(wrong)} such files)" if len(wrong) > 1 else ""
        raise InputError(f"{wrong[0][0]}: {wrong[0][1]}{more}: replace the file, or remove it")
    return looks


def _endings(files: Sequence[str]) -> str:
    """The number of files with each ending, the most common first."""
    found = Counter(Path(file).suffix.lower() or "no ending" for file in files).most_common()
    more = f" and {sum(n for _, n in found[4:])} others" if len(found) > 4 else ""
    return ", ".join(f"{n} {ending}" for ending, n in found[:4]) + more


def _scans(files: Sequence[str]) -> str:
    """A hint if some of these files are scans, which become images only with a window (a range of values)."""
    if not any(file.lower().endswith(_SCANS) for file in files):
        return ""
    return "; convert DICOM and NIfTI files first, with a window of values (docs: how-to/own-data.md)"


def _other_files(files: Sequence[str]) -> str:
    """Words on the task whose rows these files are, if there is one."""
    for task in tasks.available():
        for held in (of.files for of in task.columns if of.files):
            if any(file.lower().endswith(FILES[held]) for file in files):
                return f'; for {held}s set model.task = "{task.name}"'
    return ""


def _masks(files: Sequence[Path]) -> tuple[str, ...]:
    """A notice if one class seems to hold another's masks: same file names, and a folder name such as "masks"."""
    stems: dict[Path, set[str]] = {}
    for file in files:
        stems.setdefault(file.parent, set()).add(file.stem)
    for folder, names in stems.items():
        of = [other for other, theirs in stems.items() if other != folder and names <= theirs]
        if of and folder.name.lower().startswith(_MASKS):
            return (
                f"{folder} and {of[0]} hold images of the same names and are read as two classes: if the first holds "
                f"masks of the second, {SEGMENTATION}",
            )
    return ()


def _masks_inside(files: Sequence[Path]) -> tuple[str, ...]:
    """A notice if the names of some images mark them as masks of other images in the same folder."""
    stems: dict[Path, set[str]] = {}
    for file in files:
        stems.setdefault(file.parent, set()).add(file.stem)
    masks = [file for file in files if (of := _MASK.fullmatch(file.stem)) and of[1] in stems[file.parent]]
    if len(masks) < _FEW:
        return ()
    return (
        f"{len(masks)} images, such as {masks[0]}, have names like masks of other images in the same folder, and are "
        f"read as images: if they are masks, remove them, or {SEGMENTATION}",
    )


def parts(path: Path, suffixes: Sequence[str] = SUFFIXES, holds: str = "image") -> dict[Path, str | None]:
    """{folder: its split}; if no folder has the name of a split, {path: None}.

    Args:
        suffixes: endings of the files that are rows.
        holds: what such a file is, for messages.

    Raises:
        InputError: next to folders of splits there is another folder, or such a file.
    """
    folders = [p for p in visible_entries(path) if p.is_dir()]
    named = {p: SPLIT_NAMES[p.name.lower()] for p in folders if p.name.lower() in SPLIT_NAMES}
    if not named:
        return {path: None}
    for folder in folders:
        if folder not in named:
            hint = close(folder.name, SPLIT_NAMES)
            raise InputError(f"{folder} is next to {listing(p.name for p in named)} and is not a split{hint}")
    for file in visible_entries(path):
        if file.suffix.lower() in suffixes and file.is_file():
            place = "a class folder" if holds == "image" else "one of them"
            raise InputError(f"{file} is outside {listing(p.name for p in named)}: move it into {place}")
    return dict(named)


def _pictures(folder: Path, strange: list[str], *, deep: bool) -> list[Path]:
    """The images in the folder and in its class folders, sorted by name; other files are added to ``strange``.

    If ``deep`` is true, folders at any depth are read, otherwise only class folders.
    """
    found: list[Path] = []
    for entry in visible_entries(folder):
        before = len(found)
        for file in visible_entries(entry) if entry.is_dir() else [entry]:
            if file.is_dir() and deep:
                found += _pictures(file, strange, deep=True)
            elif file.is_dir():
                raise InputError(
                    f"{file} is a folder inside the class folder {entry.name}, where only images are expected; "
                    "put a further property, such as the domain, into a column of metadata.csv"
                )
            elif file.suffix.lower() in SUFFIXES:
                found.append(file)
            elif file.name not in METADATA:
                strange.append(str(file))
        if entry.is_dir() and len(found) == before and not deep:
            strange.append(f"{entry}{os.sep}")
    return found


def metadata(path: Path, folders: Sequence[Path], files: Sequence[Path], holds: str = "image") -> dict[str, list[Any]]:
    """The columns of all metadata files, in the order of ``files``; ``holds`` says what such a file is, for messages.

    Raises:
        InputError: a file has no row, or a row has no file.
    """
    rows: dict[Path, dict[str, Any]] = {}
    homes = {path, *folders, *(file.parent for file in files)}
    for home in sorted(homes, key=lambda folder: (-len(folder.parts), folder)):  # deeper folders come first
        there = [home / name for name in METADATA if (home / name).is_file()]
        if not there:
            continue
        if len(there) > 1:
            raise InputError(f"{there[0]} is next to {there[1].name}: keep the one that describes the {holds}s")
        table = there[0]
        sheet = tables.sheet_of(table)
        known = {file for file in files if home in file.parents}
        for index, name in enumerate(column(sheet.columns, "file_name", "file_name", str(table))):
            if not isinstance(name, str):
                raise InputError(f"{sheet.at(index)}: file_name is {name!r:.40}: a file's name is expected")
            file = home / name.strip()
            if file not in known:
                hint = close(name, [str(f.relative_to(home)) for f in known])
                raise InputError(f'{sheet.at(index)}: there is no {holds} "{name}" below {home}{hint}')
            if file in rows:
                raise InputError(f'{sheet.at(index)}: "{name}" has a row already')
            rows[file] = {key: cells[index] for key, cells in sheet.columns.items() if key != "file_name"}
        for file in sorted(known - set(rows)):
            raise InputError(f"{file} has no row in {table}: add one, or remove the file")
    keys = dict.fromkeys(key for row in rows.values() for key in row)
    return {key: [rows.get(file, {}).get(key, "") for file in files] for key in keys}
