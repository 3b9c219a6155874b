"""Read NumPy archives with images or feature vectors.

An archive holds ``x`` (images: uint8 or uint16 (N, H, W, C); feature vectors: float (N, d)) and ``y`` (integers (N,)).
It may hold ``classes`` (strings (C,)), ``split`` and ``domain`` (strings (N,)), and further string or integer arrays
(N,), which become columns. ``feature_names`` or ``columns`` (strings (d,)) names the columns of feature vectors.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import numpy as np

from fedfm.core import tasks
from fedfm.core.text import listing
from fedfm.data.class_names import names_of, notices_of
from fedfm.data.pictures import to_eight_bits
from fedfm.data.sources._files import begin, content_of, read_bytes, str_array
from fedfm.data.sources._sheet import Sheet
from fedfm.data.sources._tabular import UNLABELLED, Labels, check_split, codes_of, refuse_absent
from fedfm.data.sources._unread import notices_of_marks
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.data.task_rows import row_task
from fedfm.errors import InputError, close, reason_of

_NAMES = ("feature_names", "columns")  # arrays with names of feature columns
_STRIP = 4  # an image that is this many times as wide as high is improbable
MAPPED = 1 << 28  # bytes; in a larger file, uncompressed images or vectors are memory-mapped, not loaded
_STEPS = 256  # float32 hardly describes a column that has fewer steps between its smallest and largest value
_PIECE = 1 << 22  # number of bytes that are read at a time
_EXPECTED = "uint8 or uint16 (N, H, W, C) images with C = 1 or 3, or float (N, d) feature vectors"


def read(path: Path, spec: DataSpec, *, task: str | None = None, labelled: bool = True) -> Table:
    """Table of an npz file; messages index its rows from 0, as NumPy does.

    Raises:
        InputError: the file is not an npz file, an array is missing or wrong, or has NaN, infinity or pickled objects.
    """
    arrays = _arrays(path)
    x = _array(arrays, "x", path)
    length = len(x) if x.ndim else 0
    if x.dtype.kind == "u" and x.dtype.itemsize <= 2 and x.ndim == 4 and x.shape[3] in (1, 3):
        image = True
    elif x.dtype.kind == "f" and x.ndim == 2:
        image = False
    else:
        raise InputError(f"{path}: x is {x.dtype} {x.shape}{_hint(x)}; expected {_EXPECTED}")
    if length == 0:
        raise InputError(f"{path}: x has no rows")
    if 0 in x.shape:
        raise InputError(f"{path}: x {x.shape} holds no values")
    labels, classes, notices = UNLABELLED
    targets, used = None, frozenset[str]()
    reader = tasks.task_named(task)
    if labelled and reader is not None and reader.own_targets:
        read = row_task(reader).read_targets(_sheet(arrays, length, spec, path), spec, source=str(path))
        targets, classes, notices, used = read.values, read.classes, read.notices, read.used
    elif labelled:
        labels, classes, notices = _labels(arrays, length, path)
    if image and x.dtype.itemsize > 1:
        inputs, more = to_eight_bits(x, str(path))
        notices += more
    else:
        inputs = np.ascontiguousarray(x) if image else _finite(x, path)
        notices += () if image else _rounded_columns(x, path)
    if image and x.shape[1] in (1, 3) and x.shape[2] >= _STRIP * x.shape[1]:
        notices += (
            f"{path}: the images of x {x.shape} are {x.shape[1]} pixels high: if this axis has the channels, "
            "x.transpose(0, 2, 3, 1) puts them last",
        )
    split = np.full(length, "train" if labelled else "test")
    if labelled:
        refuse_absent(arrays, spec, "split", str(path))
        if spec.label not in ("y", DataSpec.label):
            raise InputError(f'{path}: data.label = "{spec.label}": the labels of an npz file are its array y')
    if labelled and spec.split in arrays:
        values = _strings(arrays, spec.split, length, path)
        check_split(values, "", lambda i: f"{path}: {spec.split}[{i}]")
        split = np.array(values)
    columns = {}
    named = () if image else tuple(name for name in _NAMES if _is_names(arrays.get(name), x.shape[1]))[:1]
    for name in sorted(set(arrays) - {"x", "y", "classes", spec.split, *named, *used}):
        array = arrays[name]
        if array.shape == (length,) and array.dtype.kind in "USiu":
            columns[name] = str_array(_strings(arrays, name, length, path))
        elif name == "domain":
            raise InputError(f"{path}: domain is {array.dtype} {array.shape}; expected strings ({length},)")
        else:
            notices += (f'array "{name}" {array.dtype} {array.shape} of {path} is not used',)
    if not labelled and (given := _given_labels(arrays, length)) is not None:
        columns[spec.label] = given
    if labelled and spec.split not in arrays:
        notices += notices_of_marks({name: values.tolist() for name, values in columns.items()}, spec, str(path))
    of = "image" if image else "features"
    names = tuple(map(str, arrays[named[0]].tolist())) if named else ()
    return Table(of, inputs, labels, classes, split, columns, str(path), notices, names=names, targets=targets)


def _sheet(arrays: dict[str, np.ndarray], length: int, spec: DataSpec, path: Path) -> Sheet:
    """Columns from arrays that have an entry for each row; ``y`` becomes the column of labels (or lists of labels)."""
    columns = {n: a.tolist() for n, a in arrays.items() if n not in ("x", "y") and a.ndim == 1 and len(a) == length}
    y, names = arrays.get("y"), arrays.get("classes")
    if y is not None and (y.ndim not in (1, 2) or len(y) != length):
        raise InputError(
            f"{path}: y has shape {y.shape} and x has {length} rows; expected y of shape ({length},) or ({length}, T)"
        )
    if y is not None:
        columns[spec.label] = y.tolist()
    named = {} if names is None else {spec.label: tuple(map(str, names.tolist()))}
    return Sheet(columns, lambda row: f"{path}: row {row}", names=named)


def _given_labels(arrays: dict[str, np.ndarray], length: int) -> np.ndarray | None:
    """The labels of rows to predict, as class names if the file has them; None if it has no readable labels."""
    y, names = arrays.get("y"), arrays.get("classes")
    if y is None or y.dtype.kind not in "iu" or y.shape != (length,):
        return None
    if names is None or names.ndim != 1 or names.dtype.kind != "U" or y.min() < 0 or y.max() >= len(names):
        return y.astype(str)
    found: np.ndarray = names[y]
    return found


def _is_names(array: np.ndarray | None, width: int) -> bool:
    return array is not None and array.shape == (width,) and array.dtype.kind == "U"


def _arrays(path: Path) -> dict[str, np.ndarray]:
    large = path.is_file() and path.stat().st_size > MAPPED
    data = begin(path) if large else read_bytes(path, "an npz file")
    if not data.startswith(b"PK"):
        raise InputError(f"{path} holds {content_of(data)}, not an npz file: write it with numpy.savez")
    try:
        with np.load(path if large else io.BytesIO(data), allow_pickle=False) as archive:
            names = archive.files
            if twice := {name for name in names if names.count(name) > 1}:
                raise InputError(f'{path}: there are several arrays "{min(twice)}": write the file again')
            arrays = {}
            for name in names:
                try:
                    mapped = _memory_map(path, archive.zip.getinfo(f"{name}.npy")) if large and name == "x" else None
                    arrays[name] = archive[name] if mapped is None else mapped
                except ValueError as error:
                    if "allow_pickle" not in str(error):
                        raise
                    raise InputError(
                        f'{path}: array "{name}" holds Python objects, which are not loaded (a pickle can run code): '
                        "save numbers or strings, e.g. with .astype(str)"
                    ) from None
    except InputError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError, NotImplementedError) as error:
        raise InputError(
            f"{path} is damaged or cut short ({reason_of(error)}): write it again with numpy.savez"
        ) from None
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise InputError(f'{path}: "{name}" is not a NumPy array: is this an npz file? Write it with numpy.savez')
    return arrays


def _memory_map(path: Path, member: zipfile.ZipInfo) -> np.ndarray | None:
    """Memory-map an uncompressed array of the archive; return None if it is compressed, small or in Fortran order.

    Raises:
        ValueError: the checksum of its bytes is wrong.
    """
    if member.compress_type != zipfile.ZIP_STORED or member.file_size < MAPPED:
        return None
    with path.open("rb") as file:
        file.seek(member.header_offset + 26)
        lengths = file.read(4)  # lengths of the name and of an extra field; the array's file follows that field
        start = member.header_offset + 30 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
        file.seek(start)
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(file)
        if fortran or dtype.hasobject:
            return None
        array = np.memmap(path, dtype, "r", file.tell(), shape)
        file.seek(start)
        found, left = 0, member.file_size
        while left:
            piece = file.read(min(left, _PIECE))
            if not piece:
                break
            found, left = zlib.crc32(piece, found), left - len(piece)
    if left or found != member.CRC:
        raise ValueError(f"the checksum of {member.filename} is wrong")
    return array


def _array(arrays: dict[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    if name in arrays:
        return arrays[name]
    raise InputError(f'{path}: no array "{name}"; found {listing(arrays) or "none"}{close(name, arrays)}')


def _hint(x: np.ndarray) -> str:
    """A hint for a message: how to convert an array of another form into images."""
    if x.ndim == 3:
        return ": x[..., None] adds the channel"
    if x.ndim != 4 or not x.size or x.dtype.kind not in "uifb":
        return ""
    if x.shape[3] not in (1, 3):
        if x.shape[1] in (1, 3):
            return ": x.transpose(0, 2, 3, 1) puts the channels last"
        return ": x[..., :3] leaves out a fourth channel" if x.shape[3] == 4 else ""
    low, high = x.min(), x.max()
    if not (low >= 0 and high <= (1 if x.dtype.kind in "fb" else 65535)):
        return f", from {low:g} to {high:g}: scale x to 0..255, with one window for all rows, and round it to uint8"
    if x.dtype.kind in "fb":
        return ', from 0 to 1: (x * 255).round().astype("uint8") converts it to images'
    return f': x.astype("{"uint8" if high <= 255 else "uint16"}") converts it to images'


def _finite(x: np.ndarray, path: Path) -> np.ndarray:
    """Convert feature vectors to float32 (N, d); raise an InputError if a value is then not finite."""
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(x, dtype=np.float32)
    bad = np.argwhere(~np.isfinite(narrow))
    if len(bad):
        row, place = bad[0].tolist()
        more = f", the first of {len(bad)} such values" if len(bad) > 1 else ""
        raise InputError(
            f"{path}: x[{row}, {place}] is {x[row, place]}{more}: feature vectors must be finite numbers (float32)"
        )
    return narrow


def _rounded_columns(x: np.ndarray, path: Path) -> tuple[str, ...]:
    """A notice about columns whose values float32 hardly tells apart, such as times in seconds since 1970."""
    low, high = x.min(0).astype(np.float64), x.max(0).astype(np.float64)
    steps = (high - low) / np.spacing(np.maximum(abs(low), abs(high)).astype(np.float32))
    for j in np.flatnonzero((steps > 0) & (steps < _STEPS)):
        before, after = len(np.unique(x[:, j])), len(np.unique(x[:, j].astype(np.float32)))
        if after < before:
            return (
                f"{path}: column x[:, {j}] lies from {low[j]:.17g} to {high[j]:.17g}, and features are read as "
                f"float32, in which its {before} different values become {after}: subtract a constant, such as its "
                "mean in all files",
            )
    return ()


def _labels(arrays: dict[str, np.ndarray], length: int, path: Path) -> Labels:
    y = _array(arrays, "y", path)
    if y.dtype.kind not in "iu":
        hint = "; names go into classes" if y.dtype.kind in "US" else ""
        raise InputError(f"{path}: y is {y.dtype}; expected integers{hint}")
    if y.shape != (length,):
        raise InputError(f"{path}: y has shape {y.shape} and x has {length} rows; expected y of shape ({length},)")
    if "classes" not in arrays:
        return codes_of(y.tolist(), "y", lambda i: f"{path}: y[{i}]")
    classes = arrays["classes"]
    if classes.ndim != 1 or classes.dtype.kind != "U":
        raise InputError(f"{path}: classes is {classes.dtype} {classes.shape}; expected strings (C,)")
    names = names_of(classes.tolist(), f"{path}: classes")
    outside = np.flatnonzero((y < 0) | (y >= len(names)))
    if len(outside):
        raise InputError(
            f"{path}: y[{outside[0]}] is {y[outside[0]]}, outside the {len(names)} classes (0..{len(names) - 1})"
        )
    return y.astype(np.int64), names, notices_of(classes.tolist(), "classes")


def _strings(arrays: dict[str, np.ndarray], name: str, length: int, path: Path) -> list[str]:
    array = arrays[name]
    if array.shape != (length,):
        raise InputError(f"{path}: {name} has shape {array.shape} and x has {length} rows; expected ({length},)")
    if array.dtype.kind not in "USiu":
        raise InputError(f"{path}: {name} is {array.dtype}; expected strings")
    if array.dtype.kind == "S":
        return [value.decode("utf-8", "replace") for value in array.tolist()]
    return [str(value) for value in array.tolist()]
