"""Turns rows into tensors with the model's own image processor or tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from fedfm.core import tasks
from fedfm.core.rows import Rows
from fedfm.errors import InputError, first_line, is_panic
from fedfm.models.images import Pictures, Preprocess
from fedfm.models.preprocessors import Tools
from fedfm.models.quiet import quiet

if TYPE_CHECKING:
    from fedfm.core.task_facts import TaskFacts
    from fedfm.core.tokens import Tokens
    from fedfm.data.table import Table
    from fedfm.models.model_task import ModelTask

CHUNK = 1024  # number of texts tokenised at a time, because a tokenizer's records of a text take kilobytes
IGNORE = -100  # the target that F.cross_entropy ignores
_NONE = Tools()
LOCAL_SHARE = "local_share"  # tensor of rows, (n,): the weight of the client's own adapter in a row's output


def bare(table: Table, index: Sequence[int] | np.ndarray) -> Rows:
    """Rows for a client without a model: ``features``, ``pixels`` uint8 (n, H, W, C), image files, or texts' bytes.

    Raises:
        InputError: the rows are of another kind.
    """
    part = table.take(np.asarray(index, dtype=np.int64))
    labels = labels_of(part, table.classes)
    if table.kind == "features":
        return Rows({"features": torch.from_numpy(np.array(part.inputs, dtype=np.float32))}, labels=labels)
    if table.kind == "image":
        if isinstance(part.inputs, np.ndarray):
            return Rows({"pixels": torch.from_numpy(part.inputs)}, labels=labels)
        return Rows(pictures=tuple(part.inputs), labels=labels)
    if table.kind == "text":
        from fedfm.core.tokens import Tokens

        return Rows(tokens=Tokens.of([list(str(text).encode()) for text in part.inputs]), labels=labels)
    raise InputError(f"{_source(table)} holds {table.kind}: a client without a model takes vectors, images or texts")


def prepare(
    table: Table,
    index: Sequence[int] | np.ndarray,
    *,
    classes: tuple[str, ...],
    tools: Tools,
    task: TaskFacts | None = None,
    most: float | None = math.inf,
    loaders: int = 0,
    check: Callable[[Tokens, str, np.ndarray | None], None] = lambda tokens, where, rows: None,
) -> Rows:
    """Rows ``index`` of ``table``, prepared for a model.

    Passages become blocks, so the number of rows can differ from the number of indexes: see
    :func:`fedfm.models.language.encoding.passages`.

    Args:
        tools: the model's preprocessors.
        task: the model's task; None means the task that the kind of the rows implies.
        most: bytes that prepared images may take in memory. If they would take more, the images of a batch are
            prepared when the batch is read. :mod:`.images` explains the value None.
        loaders: number of processes that compute deferred images in advance.
        check: called with tokens and the rows' indexes; it refuses tokens that the model does not know.

    Raises:
        InputError: the model does not accept this kind of data, or a label is not in ``classes``.
    """
    index = np.asarray(index, dtype=np.int64)
    if table.kind == "image":
        if tools.image is None:
            raise InputError(f"{_source(table)} holds images, which the model of model.name does not read")
        labels, found = labels_of(table, classes, index), Pictures(table.inputs, index, tools.image, loaders)
        targets = targets_of(table, classes, task, index)
        if found.exceed(most):
            return Rows(targets, deferred={"pixel_values": found}, labels=labels)
        return Rows({"pixel_values": found.compute(), **targets}, labels=labels)
    reader = reader_of(table.kind, task)
    part = reader.part(table, index)
    if table.kind == "features":
        x = torch.from_numpy(np.array(part.inputs, dtype=np.float32))
        return Rows({"features": x, **targets_of(part, classes, task)}, labels=labels_of(part, classes))
    if tools.tokenizer is None and (tools.image is None or tasks.row_kind(table.kind) is None):
        raise InputError(f"{_source(table)} holds {table.kind}, which the model of model.name does not read")
    rows = reader.rows(part, replace(tools, loaders=loaders, most=most), classes)
    if rows.tokens is not None:
        check(rows.tokens, _source(table), None if reader.packs(table.kind) else index)  # a block has no index
    return rows


def _source(table: Table) -> str:
    return table.source or "the data"


def labels_of(table: Table, classes: tuple[str, ...], index: np.ndarray | None = None) -> Tensor | None:
    """Labels (n,) of the rows ``index`` (by default all) as indexes into ``classes``; None if the rows have no labels.

    Raises:
        InputError: a label is not in ``classes``.
    """
    if table.labels is None:
        return None
    labels = np.asarray(table.labels if index is None else table.labels[index], dtype=np.int64)
    if table.classes and table.classes != classes:
        place = {name: i for i, name in enumerate(classes)}
        present = {int(i) for i in np.unique(labels)}
        if unknown := [table.classes[i] for i in sorted(present) if table.classes[i] not in place]:
            raise InputError(f"{_source(table)}: label {unknown[0]!r} is none of the model's classes")
        labels = np.array([place.get(name, -1) for name in table.classes], dtype=np.int64)[labels]
    return torch.from_numpy(labels.copy())


def targets_of(
    table: Table, classes: tuple[str, ...], task: TaskFacts | None, index: np.ndarray | None = None
) -> dict[str, Tensor]:
    """As :func:`fedfm.models.row_targets.targets_of`, if rows have targets; else {}."""
    if table.targets is None:
        return {}
    from fedfm.models import row_targets

    return row_targets.targets_of(table.targets, table, classes, task, index)


_PIXELS = {"pixel_values", "pixel_mask"}  # a mask without missing pixels has no information


def check_pixels_alone(processor: Any, name: str) -> None:
    """Refuse an image processor that gives the model more than pixels, e.g. for images of different sizes.

    Raises:
        InputError: the processor gives more.
    """
    given = set(getattr(processor, "model_input_names", None) or _PIXELS)
    if "pixel_values" in given and given <= _PIXELS:
        return
    raise InputError(
        f"model.name: the image processor of {name!r}, a {type(processor).__name__}, gives the model "
        f"{', '.join(sorted(given))}, and only pixel_values are passed on: take a model that reads images of one size"
    )


_LEAST = 1 / 300  # smallest plausible standard deviation, as a share of white
_NEAR = 0.02  # relative tolerance of a scale, so that a rescaling by 1/256 counts as one by 1/255
_SHAPES = {(), (3,)}  # shapes of a mean: one number for all channels, or one for each


def check_scale(processor: Any, name: str) -> tuple[str, ...]:
    """A notice if the scale of an image processor's outputs is unusual, or does not fit its mean and deviation.

    Raises:
        InputError: a standard deviation is zero, a number is not finite, or there are not 1 or 3 numbers.
    """
    said = processor.to_dict()
    white = 255 * (float(said.get("rescale_factor") or 1 / 255) if said.get("do_rescale", True) else 1.0)
    middle = np.mean(said["image_mean"]) if said.get("do_normalize") and said.get("image_mean") is not None else 0
    centred = bool(said.get("rescale_offset")) or abs(2 * middle / white - 1) <= _NEAR
    if min(abs(white - 1), abs(white / 255 - 1)) > _NEAR and not centred:
        return (
            f"model.name: the image processor of {name} maps black to 0 and white to {white:.3g}, which is another "
            f"scale than that of most models: rescale_factor = {said['rescale_factor']:.3g} of its "
            "preprocessor_config.json is usually 1 / 255",
        )
    if not said.get("do_normalize") or said.get("image_mean") is None or said.get("image_std") is None:
        return ()
    mean, std = np.atleast_1d(said["image_mean"]).astype(float), np.atleast_1d(said["image_std"]).astype(float)
    if not (np.isfinite(mean).all() and np.isfinite(std).all() and (std > 0).all()):
        raise InputError(
            f"model.name: the image processor of {name!r} divides by image_std = {said['image_std']} after it has "
            f"subtracted image_mean = {said['image_mean']}: expected finite numbers, and image_std above zero",
            key="model.name",
        )
    if not {np.shape(said["image_mean"]), np.shape(said["image_std"])} <= _SHAPES:
        raise InputError(
            f"model.name: the image processor of {name!r} has image_mean = {said['image_mean']} and image_std = "
            f"{said['image_std']}: images have 3 channels, so expected 3 numbers, or one for all",
            key="model.name",
        )
    if (mean <= white).all() and (std >= _LEAST * white).all():
        return ()
    return (
        f"model.name: the image processor of {name} maps black to 0 and white to {white:.3g}, and normalises with mean "
        f"{said['image_mean']} and standard deviation {said['image_std']}, which belong to another scale: do_rescale "
        "or rescale_factor in its preprocessor_config.json probably differs from the model's training",
    )


def processor_call(processor: Any) -> Preprocess:
    """A transformers image processor as a function of PIL images."""

    def call(pictures: list[Any]) -> Tensor:
        with quiet():
            array = np.stack(processor(pictures, return_tensors="np")["pixel_values"])
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))  # (n, 3, H, W)

    return call


def texts(strings: Sequence[str], tokenizer: Any, max_length: int) -> Tokens:
    """A token vector for each string, cut at ``max_length``, with the tokenizer's special tokens."""
    return encode(strings, tokenizer, max_length)[0]


def encode(strings: Sequence[str], tokenizer: Any, max_length: int) -> tuple[Tokens, dict[str, Tokens]]:
    """The tokens of :func:`texts`, and the tokenizer's other values for each token, by the model's argument names.

    Raises:
        InputError: the tokenizer gives up on a text, e.g. since its regular expression needs too many steps for it.
    """
    from fedfm.core.tokens import Tokens

    empty = [tokenizer.pad_token_id or 0]  # no model accepts a row of length 0
    names = token_argument_names(tokenizer)

    def chunk(start: int) -> tuple[list[list[int]], ...]:
        try:
            with quiet():
                found = tokenizer(list(strings[start : start + CHUNK]), truncation=True, max_length=max_length)
        except BaseException as error:
            if not is_panic(error):
                raise
            why = f"model.name: the tokenizer gives up on a text of the rows: {first_line(error)}"
            raise InputError(why, key="model.name") from None
        return [i or empty for i in found["input_ids"]], *([i or [0] for i in found[name]] for name in names)

    if not names:
        return Tokens.gather(chunk(start)[0] for start in range(0, len(strings), CHUNK)), {}
    chunks = [chunk(start) for start in range(0, len(strings), CHUNK)]
    tokens, *others = (Tokens.gather(c[i] for c in chunks) for i in range(1 + len(names)))
    return tokens, dict(zip(names, others, strict=True))


def token_argument_names(tokenizer: Any) -> tuple[str, ...]:
    """The model's arguments, other than ids and mask, for which a tokenizer writes nonzero values for each token.

    Without such an argument a model uses zeros. The tokenizers of XLNet and Funnel give the token for classification a
    token type of its own; the tokenizer of RoCBert writes the shapes and sounds of characters.
    """
    with quiet():
        found = dict(tokenizer("a"))
    ids = found.pop("input_ids")
    found.pop("attention_mask", None)
    return tuple(
        sorted(
            name
            for name, of in found.items()
            if isinstance(of, list) and len(of) == len(ids) and all(isinstance(i, int) for i in of) and any(of)
        )
    )


def reader_of(kind: str, task: TaskFacts | None) -> ModelTask:
    """The task that converts rows of this kind for a model of ``task``: the kind's own task, else the model's task."""
    owner = tasks.owner(kind)
    own = task is not None and owner is not None and task.name == owner.name  # its keys have the experiment's values
    return cast("ModelTask", (None if own else owner) or task or tasks.implied_task(kind))


def packs(kind: str, task: TaskFacts | None) -> bool:
    """Whether rows of this kind are joined and cut into blocks, so that blocks and rows differ in number."""
    return reader_of(kind, task).packs(kind)
