"""Tools: the preprocessors of a model's rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedfm.models.images import Preprocess

AUTO = "AutoTokenizer"


@dataclass(frozen=True)
class Tools:
    """Preprocessing of rows.

    Attributes:
        image: a function that maps PIL images to a tensor (n, 3, H, W), or None.
        processor: the transformers processor that an export saves: the image processor, or the task's own processor,
            such as a processor of recordings. None if there is neither.
        tokenizer: the transformers tokenizer, or None.
        tokenizer_class: name of the transformers class that reads the tokenizer from its files.
        max_length: largest number of tokens of a row.
        positions: number of positions of the model, or None if there is no limit.
        vocabulary: number of rows of the model's token embedding, or None if it has no such table.
        template: a text with {instruction} for instructions; None stands for the tokenizer's chat template.
        loaders: number of processes that prepare deferred rows in advance.
        most: largest number of bytes of prepared rows in memory; :mod:`.images` explains the value None.
        notices: lines for the user on guesses about these tools, and on changes to a template.
    """

    image: Preprocess | None = None
    processor: Any = None
    tokenizer: Any = None
    tokenizer_class: str = AUTO
    max_length: int = 128
    positions: int | None = None
    vocabulary: int | None = None
    template: str | None = None
    loaders: int = 0
    most: float | None = None
    notices: tuple[str, ...] = ()
