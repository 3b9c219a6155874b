"""The logits of a language model at the tokens that count in the loss, without computing all other logits.

Logits are the largest tensor of a language model: a row of 2,048 tokens with a vocabulary of 128,000 has 1 GB of them.
In an instruction only the answer counts. In a text all tokens except padding count.
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

FEW = 1 << 24  # number of logits, 64 MB in float32; if a batch has at most this many, all are computed
_COUNTED = 256  # number of rows that are counted at a time
MOST = 1 << 26  # largest number of logits of a batch in evaluation, 256 MB


def logits_and_targets(model: Network, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits (m, V) in float32 and targets (m,). A large batch has them only at the tokens that count."""
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
    """Number of tokens that the loss of these rows counts, at least 1; None if the loss is not over tokens.

    A user's own rows have the target -100 at tokens that do not count.
    """
    count = 0
    for batch in rows.batches(_COUNTED):
        if model.is_language_model:
            count += model.count_targets(batch)
            continue
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_floating_point():
            return None
        count += int((labels != IGNORE).sum())  # Trainers count items in this way
    return max(count, 1)


def rows_at_once(model: Network, rows: Rows, most: int) -> int:
    """The number of rows of a batch whose tokens stay within the budget, and whose logits stay within :data:`MOST`."""
    head, most = model.last_layer, by_tokens(rows.longest, most)
    return most if head is None else by_tokens(rows.longest, most, head.out_features, MOST)
