"""Decode recordings with soundfile, mix them to mono, resample them with soxr, and compute a model's features.

This is the only module that imports these two libraries; the extra ``audio`` installs them.
"""

from __future__ import annotations

import importlib
import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.attachments import Attachment, readable
from fedfm.data.table import Table
from fedfm.errors import InputError, MissingExtra
from fedfm.models.images import room
from fedfm.models.quiet import quiet

_EXTRA = 'pip install "fedfm[audio]"'
_FORMATS = "wav, flac, ogg and mp3 can be read"
_NAMED = 3  # number of rates that a notice names
_HEARD = 30.0  # in seconds; a Whisper reads no more
_SILENT = 1e-4  # samples below this, of at most 1, are silence: less than four steps of 16 bits
_CANCEL = 0.1  # if the mean of the channels has a smaller share of their largest sample, they cancel each other
_LOUD = 2.0  # a decoder gives samples from -1 to 1; a file of floats may hold larger ones
_SHORT = 0.05  # in seconds; no word is shorter
_UNKNOWN = (1 << 31) - 8  # a length in a wav header from here on means "unknown": the file was written as a stream
_THREADS = 4


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):  # soundfile raises an OSError without its C library
        raise MissingExtra(f"recordings need {name}: {_EXTRA}") from None


@dataclass(frozen=True)
class Format:
    """The header of a recording: its sample rate in Hz, its number of channels, its length in seconds."""

    rate: int
    channels: int
    seconds: float


def look(recording: Attachment, where: str) -> Format:
    """Read the header of a recording; ``where`` begins the message of an error.

    Raises:
        InputError: the file is not a recording, or is empty.
        MissingExtra: soundfile is not installed.
    """
    soundfile = _library("soundfile")
    try:
        found = soundfile.info(readable(recording.source))
    except (RuntimeError, TypeError) as error:  # soundfile's own errors are RuntimeErrors
        raise InputError(f"{where}: {recording} is not a recording ({_first_line(error)}); {_FORMATS}") from None
    if not found.frames:
        raise InputError(f"{where}: {recording} is an empty recording: remove the row")
    if found.format in ("WAV", "WAVEX") and (lost := _lost_bytes(recording)):
        raise InputError(f"{where}: {recording} is cut: {lost} bytes are missing at its end; copy it again")
    return Format(int(found.samplerate), int(found.channels), found.frames / found.samplerate)


def _lost_bytes(recording: Attachment) -> int:
    """The number of bytes that a wav file lacks by its header; a decoder reads such a file without an error."""
    with io.BytesIO(recording.source) if isinstance(recording.source, bytes) else open(recording.source, "rb") as file:
        stated = int.from_bytes(file.read(8)[4:], "little") + 8
        there = file.seek(0, io.SEEK_END)
    return stated - there if there + 1 < stated < _UNKNOWN else 0  # some programs leave out a last byte of padding


def check(recordings: Sequence[Attachment], at: Callable[[int], str], source: str) -> tuple[str, ...]:
    """Decode what a model may read of each recording; return notices about recordings that are hardly speech.

    Args:
        at: gives the name of a row by its index, for messages.

    Raises:
        InputError: a file is not a recording, or is empty or damaged, or has a sample that is not finite.
    """

    def measure(row: int) -> tuple[float, float, float]:
        look(recordings[row], at(row))
        try:
            found, rate = _read(recordings[row], _HEARD)
        except InputError as error:
            raise InputError(f"{at(row)}: {error}") from None
        return float(np.abs(found.mean(1)).max()), float(np.abs(found).max()), len(found) / rate

    with ThreadPoolExecutor(_THREADS) as pool:  # soundfile releases the interpreter's lock when it decodes
        mixed, peak, seconds = np.array(list(pool.map(measure, range(len(recordings))))).reshape(-1, 3).T
    kinds = (
        (
            mixed < _SILENT,
            f"are silent in their first {_HEARD:g} s, their channels mixed to one",
            "a model learns outputs of them that nobody says",
        ),
        (
            (mixed >= _SILENT) & (mixed < _CANCEL * peak),
            "lose most of their sound when their channels are mixed to one",
            "one channel seems to be inverted: save one of them",
        ),
        (
            peak > _LOUD,
            f"have samples beyond {_LOUD:g}, although samples are numbers from -1 to 1",
            "divide them by their largest possible value, e.g. by 32768",
        ),
        (seconds < _SHORT, f"are shorter than {_SHORT:g} s", "were they cut?"),
    )
    return tuple(
        f"{int(which.sum())} of {len(recordings)} recordings of {source} {what}: the first is "
        f"{recordings[int(which.argmax())]}; {why}"
        for which, what, why in kinds
        if which.any()
    )


def sound(recording: Attachment, rate: int, seconds: float) -> np.ndarray:
    """The beginning of a recording, in mono, float32 (samples,), at the sample rate ``rate``.

    Args:
        rate: the sample rate of the result, in Hz.
        seconds: the length of the beginning that is decoded.

    Raises:
        InputError: the recording cannot be decoded, has no sound, or has a sample that is not finite.
        MissingExtra: soundfile or soxr is not installed.
    """
    found, own = _read(recording, seconds)
    mono = found.mean(1, dtype=np.float32)
    if own == rate:
        return np.ascontiguousarray(mono)
    made: np.ndarray = _library("soxr").resample(mono, own, rate)
    return made.astype(np.float32)


def _read(recording: Attachment, seconds: float) -> tuple[np.ndarray, int]:
    """The beginning of a recording, float32 (samples, channels), and its sample rate; :func:`sound` has the errors."""
    soundfile = _library("soundfile")
    try:
        with soundfile.SoundFile(readable(recording.source)) as file:
            own = int(file.samplerate)
            found = file.read(int(np.ceil(seconds * own)), dtype="float32", always_2d=True)  # (samples, channels)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{recording} cannot be decoded ({_first_line(error)}); {_FORMATS}") from None
    if not len(found) or not np.isfinite(found).all():
        raise InputError(f"{recording} holds {'numbers that are not finite' if len(found) else 'no sound'}")
    return found, own


def _first_line(error: BaseException) -> str:
    lines = str(getattr(error, "error_string", error)).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def window(extractor: Any) -> float:
    """How much of a recording a model reads, in seconds."""
    return float(extractor.n_samples / extractor.sampling_rate)


@dataclass(frozen=True)
class Recordings:
    """Features of recordings, computed batch by batch; see :class:`fedfm.core.rows.Deferred`.

    Attributes:
        recordings: n files.
        extractor: transformers' feature extractor of the model.
        loaders: number of processes that compute batches in advance.
    """

    recordings: Sequence[Attachment]
    extractor: Any
    loaders: int = 0

    def __len__(self) -> int:
        return len(self.recordings)

    def take(self, index: np.ndarray) -> Recordings:
        """These rows, in this order."""
        return replace(self, recordings=[self.recordings[int(i)] for i in index])

    def compute(self) -> Tensor:
        """The features, float32 (n, mel bins, frames); those of a row do not depend on the other rows."""
        if not self.recordings:
            return torch.zeros(0, self.extractor.feature_size, self.extractor.nb_max_frames)
        rate = self.extractor.sampling_rate
        out = []
        for recording in self.recordings:
            samples = sound(recording, rate, window(self.extractor))
            with quiet():
                found = self.extractor(samples, sampling_rate=rate, return_tensors="np")
            out.append(torch.from_numpy(np.ascontiguousarray(found["input_features"][0], dtype=np.float32)))
        return torch.stack(out)

    def sources(self) -> Iterator[bytes]:
        """The bytes of each file."""
        return (recording.content() for recording in self.recordings)

    def exceed(self) -> bool:
        """Whether the features take too much memory to compute them once and keep them."""
        each = 4 * self.extractor.feature_size * self.extractor.nb_max_frames
        return len(self) > 1 and each * len(self) > room()


def forewarnings(parts: Mapping[str, Table], extractor: Any) -> list[str]:
    """Notices on recordings that are too long for the model, have another sample rate, or have several channels."""
    rate, most = int(extractor.sampling_rate), window(extractor)
    rates: Counter[int] = Counter()
    long, mixed, n = list[str](), 0, 0
    for words, part in parts.items():
        found = [look(recording, f"{part.source}, row {i + 1}") for i, (recording, _) in enumerate(part.inputs)]
        rates.update(of.rate for of in found if of.rate != rate)
        mixed += sum(of.channels > 1 for of in found)
        n += len(found)
        if count := sum(of.seconds > most for of in found):
            long.append(f"{count} of {len(found)} {words} rows")
    notices = []
    if long:
        notices.append(
            f"the recordings of {' and '.join(long)} are longer than the {most:g} s that the model reads: the rest is "
            "not heard, although the outputs tell it; cut recordings and outputs into shorter ones"
        )
    if rates:
        listed = ", ".join(f"{count} of {own} Hz" for own, count in rates.most_common(_NAMED))
        more = f" and {len(rates) - _NAMED} further rates" if len(rates) > _NAMED else ""
        notices.append(f"of {n} recordings, {listed}{more} are resampled to {rate} Hz, the rate of the model")
    if mixed:
        notices.append(f"{mixed} of {n} recordings have several channels, which are mixed to one (their mean)")
    return notices
