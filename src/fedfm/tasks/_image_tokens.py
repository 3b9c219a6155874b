"""Tokens of conversations with images, as the model's processor writes them.

Prompt and answer are one text, in which the processor replaces each image by as many tokens as the image takes. The
loss counts the tokens of the answers. Replacing an image changes the text's length, which moves all later answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from fedfm.core.rows import Asked, Output, blank, has_tools
from fedfm.errors import InputError, first_line
from fedfm.models.language import chat_templates
from fedfm.models.language.chat_form import check_tools, describe, render
from fedfm.models.quiet import quiet
from fedfm.tasks._image_processor import tokens_of

if TYPE_CHECKING:
    from torch import Tensor

    from fedfm.core.attachments import Attachment
    from fedfm.models.preprocessors import Tools

Row = tuple[Asked, Output, tuple["Attachment", ...]]
_LEAST = 2  # a cut answer keeps at least two tokens: one of its text, and the token that ends the answer
_OWN = ("input_ids", "attention_mask", "offset_mapping", "text_replacement_offsets")


@dataclass(frozen=True)
class EncodedRow:
    """The tokens of one row.

    Attributes:
        ids: tokens of the prompt, with those of its images, and of the answer.
        counts: for each token, whether the loss counts it.
        start: index of the first token of the last answer.
        by_token: the model's further arguments with one value for each token, by name.
        images: the model's arguments that contain the images, by name.
        prompt: the tokens after which the model writes the answer.
        length: number of tokens of the row before its answer was cut.
    """

    ids: list[int]
    counts: list[bool]
    start: int
    by_token: dict[str, list[int]]
    images: dict[str, Tensor]
    prompt: list[int]
    length: int


_lengths: WeakKeyDictionary[Any, dict[Row, int]] = WeakKeyDictionary()  # token counts of rows, by processor
_prompts: WeakKeyDictionary[Any, dict[Row, tuple[np.ndarray, dict[str, np.ndarray]]]] = WeakKeyDictionary()


def encode(row: Row, tools: Tools) -> EncodedRow:
    """The tokens and images of a row. If the row is too long, its answer loses its last tokens; a prompt is never cut.

    Raises:
        InputError: the template or the processor refuses the row, or its prompt leaves no room for an answer.
    """
    said, output, files = row
    try:
        whole = _encode(said, output, files, tools.processor)
    except InputError as error:  # from the chat template, or from an image that changed after it was read
        raise InputError(f"{_place(row)}: {error}", key=error.key) from None
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise InputError(f"{_place(row)}: the model's processor refuses the row: {first_line(error)}") from None
    _lengths.setdefault(tools.processor, {})[row] = whole.length
    _prompts.setdefault(tools.processor, {})[said, "", files] = (
        np.array(whole.prompt, np.int32),
        {name: np.array(_like(of, whole.prompt), np.int32) for name, of in whole.by_token.items()},
    )
    return _cut(whole, row, tools)


def prompt(row: Row, tools: Tools) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The tokens of a row's prompt, and the further arguments with one value for each of these tokens."""
    key = row[0], "", row[2]
    if key not in _prompts.get(tools.processor, {}):
        encode(key, tools)
    return _prompts[tools.processor][key]


def length(row: Row, tools: Tools) -> int:
    """The number of tokens of a row before its answer is cut."""
    known = _lengths.get(tools.processor, {})
    return known[row] if row in known else encode(row, tools).length


def _encode(said: Asked, output: Output, files: Sequence[Attachment], processor: Any) -> EncodedRow:
    from fedfm.data.pictures import rgb

    tokenizer = processor.tokenizer
    turns = chat_templates.messages_of_row(said, output, None)
    if wrong := next((t for t in tokens_of(processor) if any(t in turn[1] for turn in turns)), None):
        raise ValueError(f"a message has {wrong!r}, which the model reads as an image: remove it")
    if has_tools(turns):
        check_tools(turns, tokenizer)
    asked = turns if blank(output) else turns[:-1]
    start = render(asked, tokenizer, add_generation_prompt=True)
    pieces = [(start, False)] if blank(output) else chat_templates.pieces_of(turns, tokenizer)
    text, spans = "", []
    for piece, answers in pieces:
        spans += [(len(text), len(text) + len(piece))] if answers else []
        text += piece
    special = not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))  # as transformers decides it
    options = {"add_special_tokens": special, "return_offsets_mapping": True, "return_text_replacement_offsets": True}
    with quiet():
        found = processor(
            text=[text],
            images=[[rgb(file.source) for file in files]] if files else None,
            return_tensors="pt",
            **options,
        )
    moved = found.get("text_replacement_offsets", [[]])[0]
    if "offset_mapping" not in found or len(moved) != len(files):
        raise ValueError("it does not report the places of images and tokens, as those of transformers 5.24 do")
    if any(a < one["span"][0] < b for one in moved for a, b in spans):
        raise ValueError("the chat template writes an image into an answer")
    spans = [(_new_place(a, moved), _new_place(b, moved)) for a, b in spans]
    places = found["offset_mapping"][0].tolist()
    kept = max((i + 1 for i, (a, b) in enumerate(places) if b > a), default=0)  # no special tokens after the text
    ids = found["input_ids"][0].tolist()
    of_tokens = {k for k, x in found.items() if k not in _OWN and x.shape == found["input_ids"].shape}
    counts = [any(a < end and b > begin for begin, end in spans) for a, b in places[:kept]]
    last = max((i for i, counted in enumerate(counts) if counted), default=None)
    if last is None and not blank(output):
        raise ValueError("its chat template leaves no token to the assistant")
    begin = kept if last is None else next((i + 1 for i in range(last, -1, -1) if not counts[i]), 0)
    return EncodedRow(
        ids[:kept],
        counts,
        begin,
        {name: found[name][0].tolist()[:kept] for name in of_tokens},
        {k: x for k, x in found.items() if k not in _OWN and k not in of_tokens},
        ids[:kept] if last is None else _tokens(_expand(start, moved), tokenizer, special=special),
        kept,
    )


def _new_place(at: int, moved: Sequence[dict[str, Any]]) -> int:
    """The place of a character of the text after the images before it are replaced."""
    before = [one for one in moved if one["span"][1] <= at]
    return at + (before[-1]["new_span"][1] - before[-1]["span"][1] if before else 0)


def _expand(text: str, moved: Sequence[dict[str, Any]]) -> str:
    """The start of a row's text, with each image replaced by its tokens."""
    for one in reversed([one for one in moved if one["span"][1] <= len(text)]):
        begin, end = one["span"]
        text = text[:begin] + one["replacement"] + text[end:]
    return text


def _tokens(text: str, tokenizer: Any, *, special: bool) -> list[int]:
    found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    places = found["offset_mapping"]
    return list(found["input_ids"])[: max((i + 1 for i, (a, b) in enumerate(places) if b > a), default=0)]


def _like(values: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """One value for each token of a prompt; tokens that a prompt has beyond the row's length are text, with value 0."""
    return [*values[: len(tokens)], *[0] * (len(tokens) - len(values))]


def _cut(row: EncodedRow, of: Row, tools: Tools) -> EncodedRow:
    most, answer = tools.max_length, row.length - row.start
    if row.length <= most:
        return row
    if most - row.start < min(_LEAST, answer) or not answer:
        with_images = f" with {len(of[2])} image{'s' * (len(of[2]) != 1)}" if of[2] else ""
        raise InputError(
            f"{_place(of)}: the prompt{with_images} has {row.start} tokens and the answer {answer}, and "
            f"model.max_length = {most}: a prompt is not cut, since an image needs all its tokens; set "
            f"model.max_length = {row.length}, or use smaller images",
            key="model.max_length",
        )
    return replace(  # cut as in fedfm.models.language.truncation: an answer that is cut has no end token
        row,
        ids=row.ids[:most],
        counts=row.counts[:most],
        by_token={name: values[:most] for name, values in row.by_token.items()},
    )


def _place(row: Row) -> str:
    said, _, files = row
    if files and files[0].place:
        return files[0].place
    return describe((("user", said),) if isinstance(said, str) else said)
