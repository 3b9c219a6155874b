"""Tools: what prepares the rows of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedfm.models.images import Preprocess

AUTO = "AutoTokenizer"


@dataclass(frozen=True)
class Tools:
    """Preprocessing of rows.

    Attributes:
        image: PIL images -> (n, 3, H, W), or None.
        processor: the transformers image processor of ``image``, which an export saves, or None.
        tokenizer: or None.
        tokenizer_class: of transformers, which reads it from its files.
        max_length: tokens.
        positions: most tokens that the model has positions for, or None without a limit.
        vocabulary: rows of the model's embedding of tokens, or None if it has no such table.
        template: how instructions are written, a text with {instruction}; None: by the tokenizer's chat template.
        notices: which of these are guessed, and what of a template is written otherwise than it says.
    """

    image: Preprocess | None = None
    processor: Any = None
    tokenizer: Any = None
    tokenizer_class: str = AUTO
    max_length: int = 128
    positions: int | None = None
    vocabulary: int | None = None
    template: str | None = None
    notices: tuple[str, ...] = ()
