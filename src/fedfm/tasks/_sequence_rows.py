"""For the task sequence to sequence: read rows from columns, and turn them into tokens, features and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.attachments import Attachment
from fedfm.core.row_kinds import Reading
from fedfm.core.rows import Batch, Rows
from fedfm.core.text import listing
from fedfm.core.tokens import Tokens
from fedfm.data.invisible import is_blank
from fedfm.data.sources._attachments import attachments
from fedfm.data.sources._files import At, column
from fedfm.data.sources._other_tasks import refuse_other
from fedfm.data.sources._sheet import Sheet
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError, NoColumn, close
from fedfm.models import lengths, lost_words, preprocessing
from fedfm.models.families import unwrap
from fedfm.models.preprocessing import CHUNK, IGNORE
from fedfm.models.preprocessors import Tools
from fedfm.models.quiet import quiet

KIND = "sequences"
Source = str | Attachment


def read(sheet: Sheet, spec: DataSpec, source: str, labelled: bool) -> Reading:
    """Rows of (text or recording, output); rows to predict may lack outputs, which are then "".

    Raises:
        InputError: a column is missing; or a cell is empty, of another type, or no recording.
    """
    columns, at = sheet.columns, sheet.at
    audio, text, output = (spec.column(key) for key in ("audio", "instruction", "output"))
    inputs: Sequence[Source]
    notices: tuple[str, ...] = ()
    if audio in columns and text in columns:
        raise InputError(
            f'{source} has a column "{audio}" of recordings and a column "{text}" of texts: a row has one input; '
            "remove one of the two columns"
        )
    if audio in columns:
        from fedfm.tasks import _recordings

        inputs, used = attachments(columns[audio], audio, at, source, "a recording"), audio
        notices = _recordings.check(inputs, lambda row: f'{at(row)}: column "{audio}"', source)
    elif text in columns:
        inputs, used = _texts(columns[text], text, at), text
    else:
        refuse_other(columns, spec.label, source, text, labelled)
        near = close(text, columns, 0.65) or close(audio, columns, 0.65)
        raise NoColumn(
            f'{source}: no column "{text}" (data.instruction) of texts, nor "{audio}" (data.audio) of recordings',
            f"found {listing(columns)}{near}; one of these two keys says which column to read",
        )
    if labelled:
        outputs = _texts(column(columns, output, "data.output", source), output, at)
    else:
        outputs = _texts(columns.get(output, [""] * len(inputs)), output, at, blank=True)
    return Reading(KIND, list(zip(inputs, outputs, strict=True)), frozenset({used, output}), notices)


def _texts(cells: Sequence[Any], name: str, at: At, *, blank: bool = False) -> list[str]:
    """The texts of a column; ``blank`` allows empty ones."""
    found = []
    for row, cell in enumerate(cells):
        if cell is not None and not isinstance(cell, str):
            raise InputError(f'{at(row)}: column "{name}" holds {type(cell).__name__} {cell!r:.40}: a text is expected')
        if not blank and is_blank(cell or ""):
            raise InputError(f'{at(row)}: column "{name}" is empty: fill it, or remove the row')
        found.append(cell or "")
    return found


def shuffle(rows: Table, rng: np.random.Generator) -> Table:
    """The rows, with the outputs permuted among the inputs."""
    order = rng.permutation(len(rows)).tolist()
    return replace(rows, inputs=[(rows.inputs[i][0], rows.inputs[j][1]) for i, j in enumerate(order)])


def to_rows(part: Table, tools: Tools) -> Rows:
    """Rows with ``targets`` (n, longest): each output's tokens, then -100.

    Texts become the tokens ``input_ids``, and recordings the features ``input_features`` (n, mel bins, frames).

    Raises:
        InputError: the model reads texts and the rows are recordings, or the reverse; a recording cannot be decoded; a
            token is unknown to the model.
    """
    spoken = holds_recordings(part)
    if spoken != (tools.processor is not None) and len(part):
        has, reads = ("recordings", "texts") if spoken else ("texts", "recordings")
        raise InputError(
            f"{part.source or 'the data'} holds {has}, and the model of model.name reads {reads}: use "
            + ("a Whisper" if spoken else "a T5, a BART or an mBART")
        )
    labels = outputs([output for _, output in part.inputs], tools)
    lengths.check(tools, labels, part.source or "the data")
    targets = labels.to_padded(IGNORE)  # (n, longest)
    pairs = tuple(("" if spoken else given, output) for given, output in part.inputs)
    pad = int(tools.tokenizer.pad_token_id or 0)
    if spoken or (not len(part) and tools.processor is not None):
        from fedfm.tasks import _recordings

        made = _recordings.Recordings([given for given, _ in part.inputs], tools.processor)
        if made.exceed():
            return Rows({"targets": targets}, deferred={"input_features": made}, pad=pad, pairs=pairs)
        return Rows({"targets": targets, "input_features": made.compute()}, pad=pad, pairs=pairs)
    tokens, more = preprocessing.encode([given for given, _ in part.inputs], tools.tokenizer, tools.max_length)
    return Rows({"targets": targets}, tokens=tokens, pad=pad, pairs=pairs, token_arguments=more)


def holds_recordings(part: Table) -> bool:
    """Whether the inputs of the rows are recordings."""
    return len(part) > 0 and isinstance(part.inputs[0][0], Attachment)


def outputs(texts: Sequence[str], tools: Tools) -> Tokens:
    """The tokens of outputs: at most ``max_length`` for each. The last one is the end token (EOS).

    As in transformers' examples, the token that starts the decoder is not among them.
    """
    return Tokens.gather(_encode(texts[at : at + CHUNK], tools) for at in range(0, len(texts), CHUNK))


def _encode(texts: Sequence[str], tools: Tools, *, whole: bool = False) -> list[list[int]]:
    """As :func:`outputs`, but as lists; with ``whole``, outputs are not cut to ``max_length``."""
    tokenizer, start = tools.tokenizer, first_token(tools.tokenizer)
    adds = not ends_texts(tokenizer)
    room = tools.max_length - adds + (start is not None)
    limit: dict[str, Any] = {} if whole else {"truncation": True, "max_length": room}
    with quiet():
        found: list[list[int]] = tokenizer(text_target=list(texts), add_special_tokens=True, **limit)["input_ids"]
    if start is not None:
        found = [ids[1:] for ids in found]
    return [[*ids, tokenizer.eos_token_id] for ids in found] if adds else found


def ends_texts(tokenizer: Any) -> bool:
    """Whether a tokenizer writes its end token (EOS) into each text; True if it has no end token."""
    end = tokenizer.eos_token_id
    return end is None or end in tokenizer(text_target="a")["input_ids"]


def first_token(tokenizer: Any) -> int | None:
    """The token that begins the outputs of a Whisper's tokenizer and starts its decoder; None for other tokenizers."""
    if not hasattr(tokenizer, "set_prefix_tokens"):
        return None
    prefix: list[int] = tokenizer.prefix_tokens
    return prefix[0]


def targets_of(batch: Batch) -> Tensor:
    """The targets (b, L) of a batch, cut to its longest output; (b, 1) if it has no targets."""
    if "targets" not in batch:
        return torch.full((len(next(iter(batch.values()))), 1), IGNORE)
    targets = batch["targets"]
    longest = int((targets != IGNORE).sum(1).max()) if len(targets) else 0
    return targets[:, : max(longest, 1)]


def shift(module: Any, targets: Tensor) -> Tensor:
    """The decoder's inputs (b, L): the targets, shifted right by one, after the token that starts the decoder."""
    inner = unwrap(module)
    own = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    if own is not None:
        found: Tensor = own(labels=targets)
        return found
    config = inner.config
    start = torch.full_like(targets[:, :1], config.decoder_start_token_id)
    before = targets[:, :-1].masked_fill(targets[:, :-1] == IGNORE, config.pad_token_id)
    return torch.cat([start, before], 1)


def forewarnings(parts: Mapping[str, Table], tools: Tools) -> list[str]:
    """Notices on texts and outputs that are cut, and on recordings that are cut, resampled or mixed."""
    found: list[str] = []
    cut_inputs, cut_outputs = list[str](), list[str]()
    for words, part in parts.items():
        given, said = [source for source, _ in part.inputs], [output for _, output in part.inputs]
        if not holds_recordings(part) and (n := _count_longer(given, tools.tokenizer, tools.max_length)):
            cut_inputs.append(f"{n} of {len(part)} {words} rows")
        long = (
            len(ids) > tools.max_length
            for at in range(0, len(said), CHUNK)
            for ids in _encode(said[at : at + CHUNK], tools, whole=True)
        )
        if n := sum(long):
            cut_outputs.append(f"{n} of {len(part)} {words} rows")
    limit = f"more than {tools.max_length} tokens (model.max_length)"
    if cut_inputs:
        found.append(f"the inputs of {' and '.join(cut_inputs)} have {limit}: the model does not read the rest")
    if cut_outputs:
        found.append(
            f"the outputs of {' and '.join(cut_outputs)} have {limit}: the rest is not trained; scores compare answers "
            "with the complete output"
        )
    found += lost_words.changed_outputs(parts, tools.tokenizer)
    if any(holds_recordings(part) for part in parts.values()):
        from fedfm.tasks import _recordings

        found += _recordings.forewarnings(parts, tools.processor)
    return found


def _count_longer(texts: Sequence[str], tokenizer: Any, most: int) -> int:
    """The number of texts with more tokens than ``most``."""
    with quiet():
        return sum(
            len(ids) > most
            for at in range(0, len(texts), CHUNK)
            for ids in tokenizer(list(texts[at : at + CHUNK]))["input_ids"]
        )
