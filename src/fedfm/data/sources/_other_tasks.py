"""Recognise rows of a task that an experiment file does not name or support, by the form of their columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from fedfm.core.text import listing
from fedfm.data.pictures import SUFFIXES, Pictured
from fedfm.errors import InputError

_SOUNDS = (".wav", ".flac", ".mp3", ".ogg", ".m4a")
_LOOK = 20  # number of values of a column that are examined
WAY = "fedfm.federate with a Trainer or a module of your own trains such rows (docs: how-to/hugging-face-script.md)"

Columns = Mapping[str, Sequence[Any]]


def other_task(columns: Columns, label: str) -> str | None:
    """A sentence that names the task of these columns and how to train it; None if no task is recognised.

    Args:
        label: name of the column of labels.
    """
    pictures = [name for name, values in columns.items() if isinstance(values, Pictured)]
    some = {n: [v for v in values[:_LOOK] if v is not None] for n, values in columns.items() if n not in pictures}
    some = {name: values for name, values in some.items() if values}
    if tagged := _tags(some):
        words, tags = tagged
        return (
            f"columns {listing(tagged)} hold a tag for each word (named entities, parts of speech): set "
            f'model.task = "token_classification", data.tokens = "{words}", data.tags = "{tags}"; '
            "for a Trainer of your own, call fedfm.federate"
        )
    names, what = tuple[str, ...](), ""
    for form, words in _FORMS:
        if names := tuple(name for name, values in some.items() if all(map(form, values))):
            what = words
            break
    texts = tuple(n for n, values in some.items() if n != label and all(_phrase(v) for v in values))
    if not names and len(pictures) > 1 and label not in some:
        names, what = tuple(pictures), "several images per row (segmentation, or one image made from another)"
    elif not names and label in some and all(isinstance(v, bool) for v in some[label]) and "completion" in some:
        names, what = ("completion", label), "answers, each of which is good or bad (KTO)"
    elif not names and label in some and len(texts) == 2:
        names, what = texts, "two texts per row (pairs of texts; a model would read two joined texts as one)"
    if not names:
        return None
    return f"columns {listing(names)} hold {what}, a task that experiment files do not support; {WAY}"


def refuse_other(columns: Columns, label: str, source: str, needed: str, labelled: bool) -> None:
    """Raise an InputError if the needed column is missing and the other columns belong to another task.

    Rows to predict have the task of their run, so no other task is advised for them.
    """
    if labelled and needed not in columns and (words := other_task(columns, label)):
        raise InputError(f'{source}: no column "{needed}"; {words}')


def files_in_cells(columns: Columns, label: str, *, images: bool, recordings: bool) -> str | None:
    """A sentence on a column of paths of images or recordings, or on columns of numbers; None if there is none.

    Args:
        label: name of the column of labels.
        images: whether the task reads images.
        recordings: whether the task reads recordings.
    """
    texts = {n: v for n, v in columns.items() if n != label and not isinstance(v, Pictured)}
    some = {name: [str(v) for v in values[:_LOOK] if v is not None] for name, values in texts.items()}
    for name, values in some.items():
        endings = {PurePath(value).suffix.lower() for value in values}
        if images and endings and endings <= {*SUFFIXES}:
            return (
                f'column "{name}" holds paths of images, which are read from their folder: set data.path to this '
                f'folder, with a metadata.csv that has the columns "file_name" and "{label}"'
            )
        if not recordings and endings and endings <= {*_SOUNDS}:
            return (
                f'column "{name}" holds paths of recordings: model.task = "sequence_to_sequence" learns their texts; '
                "their classes are learned as in docs: how-to/audio-classification.md"
            )
    if some and all(values and all(map(_is_number, values)) for values in some.values()):
        return f"columns {listing(some, 4)} hold numbers: store feature vectors in an npz file"
    return None


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _tags(some: Columns) -> tuple[str, str] | None:
    """The names of two columns: one with lists of words, one with lists of equally many tags; None without them."""
    for words in some:
        for tags in some:
            pairs = list(zip(some[words], some[tags], strict=False))
            if tags != words and all(_list_of(w, str) and _list_of(t, int, str) and len(w) == len(t) for w, t in pairs):
                return words, tags
    return None


def _list_of(value: Any, *kinds: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, kinds) for v in value)


def _phrase(value: Any) -> bool:
    return isinstance(value, str) and " " in value.strip()


def _has(*keys: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and not value.keys().isdisjoint(keys)


def _languages(value: Any) -> bool:
    return isinstance(value, dict) and len(value) > 1 and all(len(k) < 8 and _phrase(v) for k, v in value.items())


def _numbers(value: Any) -> bool:
    return _list_of(value, float) or (_list_of(value, list) and all(_list_of(v, float) for v in value))


_FORMS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (_has("answer_start"), "questions whose answers are spans of a text (extractive question answering)"),
    (_has("bbox", "boxes"), "boxes around objects (object detection)"),
    (_has("sampling_rate"), "sound"),
    (_languages, "a text in several languages (translation)"),
    (_numbers, "lists of numbers (time series; if they are feature vectors, store them in an npz file)"),
)
