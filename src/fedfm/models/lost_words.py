"""Finds what a tokenizer loses: unknown words, the ends of texts that are too long, and outputs that it changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fedfm.core.attachments import IMAGE
from fedfm.data.table import inputs_of
from fedfm.models.quiet import quiet

if TYPE_CHECKING:
    from fedfm.data.table import Table
    from fedfm.models.model_task import ModelTask
    from fedfm.models.network import Network

_LOOKED_AT = 256  # largest number of rows that are checked
_UNKNOWN = 0.1  # if at least this share of tokens is unknown, the tokenizer seems to be made for other texts


def notices(table: Table, index: Sequence[int], model: Network) -> list[str]:
    """Notices about words that the model's tokenizer does not know, and about texts beyond its ``max_length``.

    If there are more than 256 rows, only 256 of them are checked, at equal distances.
    """
    tools = model.tools
    tokenizer = tools.tokenizer
    if tokenizer is None or not len(index) or table.kind in ("image", "features"):
        return []  # a zero-shot model for images has a tokenizer only for the classes' names
    places = np.unique(np.linspace(0, len(index) - 1, _LOOKED_AT).astype(np.int64))
    rows = [" ".join(inputs_of(table.kind, table.inputs[int(index[int(i)])])).replace(IMAGE, " ") for i in places]
    # The beginning of a long text is enough: it shows unknown words, and that the text is too long.
    with quiet():
        found = tokenizer([text[: 8 * tools.max_length + 1000] for text in rows], add_special_tokens=False)["input_ids"]
    of = f"{len(rows)} rows of {table.source}" + (" that were looked at" if len(rows) < len(index) else "")
    said = []
    unknown = sum(ids.count(tokenizer.unk_token_id) for ids in found) if tokenizer.unk_token_id is not None else 0
    total = sum(map(len, found))
    if total and unknown >= _UNKNOWN * total:
        said.append(
            f"{unknown / total:.0%} of the tokens of {of} are unknown to the tokenizer of the model and read as "
            f"{tokenizer.unk_token}: was it made for such texts?"
        )
    frame = len(tokenizer("")["input_ids"])
    long = sum(len(ids) + frame > tools.max_length for ids in found)
    if long and table.kind == "text" and not cast("ModelTask", model.task).packs(table.kind):
        lost = {"left": "beginning"}.get(tokenizer.truncation_side, "end")
        said.append(f"{long} of {of} have more than {tools.max_length} tokens (model.max_length) and lose their {lost}")
    return said


def changed_outputs(parts: Mapping[str, Table], tokenizer: Any) -> list[str]:
    """A notice if the tokens of some outputs stand for another text, since no answer of the model equals such outputs.

    Examples are unknown characters, and a tokenizer that joins blanks or writes lower case.

    Args:
        parts: rows (input, output, ...) by what they are, such as "test"; at most 256 of each are checked.
    """
    counts, example = list[str](), ("", "")
    for words, part in parts.items():
        outputs = [row[1] for row in part.inputs if isinstance(row[1], str) and row[1].strip()]
        most = min(len(outputs), _LOOKED_AT)
        some = [outputs[i * len(outputs) // most] for i in range(most)]
        with quiet():
            ids = tokenizer(text_target=some, add_special_tokens=False)["input_ids"] if some else []
            read = [tokenizer.decode(of, skip_special_tokens=True) for of in ids]
        changed = [pair for pair in zip(some, read, strict=True) if pair[0].strip() != pair[1].strip()]
        if changed:
            counts.append(f"{len(changed)} of {len(some)} {words} rows")
            example = changed[0]
    if not counts:
        return []
    before, after = (f"{text!r:.60}" for text in example)
    return [
        f"the tokenizer of the model changes the outputs of {' and '.join(counts)}, such as {before} to {after}: the "
        "model learns the changed text, and no answer equals such an output, so that accuracy (exact match) counts it "
        "as wrong"
    ]
