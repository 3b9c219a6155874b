"""Scores of a language model at the tokens that count, without the logits of all others.

Logits are the largest tensor of a language model: at length 2,048 and 128,000 tokens in the vocabulary a row has 1 GB
of them. Of an instruction only the answer counts, of a text all but padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedfm.core.rows import Batch, Rows
from fedfm.models.language.encoding import next_tokens
from fedfm.models.memory_budget import by_tokens
from fedfm.models.preprocessing import IGNORE

if TYPE_CHECKING:
    from fedfm.models.network import Network

FEW = 1 << 24  # logits of a batch, 64 MB in float32: below it they are computed as they come, with their bits
_COUNTED = 256  # rows at a time
MOST = 1 << 26  # logits of a batch in evaluation, 256 MB


def logits_and_targets(model: Network, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits (m, V) in float32 and targets (m,); of many logits only those whose target counts."""
    ids, head = batch["input_ids"], model.last_layer
    if head is None or ids.numel() * head.out_features <= FEW:
        return model.flat(model.logits(batch), batch)
    targets = next_tokens(batch).to(model.device)
    counts = targets != IGNORE  # (b, L - 1)

    def pick(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states, *rest = args  # (b, L, d)
        return (states[:, :-1][counts.to(states.device)][None], *rest)

    hook = head.register_forward_pre_hook(pick)
    try:
        logits = model.logits(batch)  # (1, m, V)
    finally:
        hook.remove()
    return logits[0].float(), targets[counts]


def targets_of(model: Network, rows: Rows) -> int | None:
    """How many tokens the loss of these rows counts, at least 1; None if it is no loss over tokens.

    A user's own rows mark those that do not count by targets of -100.
    """
    count = 0
    for batch in rows.batches(_COUNTED):
        if model.is_language_model:
            count += model.count_targets(batch)
            continue
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_floating_point():
            return None
        count += int((labels != IGNORE).sum())  # as Trainers count items
    return max(count, 1)


def rows_at_once(model: Network, rows: Rows, most: int) -> int:
    """Rows of a batch within the budget of tokens, whose logits stay below :data:`MOST`."""
    head, most = model.last_layer, by_tokens(rows.longest, most)
    return most if head is None else by_tokens(rows.longest, most, head.out_features, MOST)
