"""Finds the words of texts that a tokenizer loses: unknown words, and the ends of texts that are too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

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
        said.append(f"{long} of {of} have more than {tools.max_length} tokens (model.max_length) and lose their end")
    return said
