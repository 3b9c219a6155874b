"""The numbers of direct preference optimisation: log-probabilities of two answers, and the loss of their rewards."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.core.rows import Batch, Rows
from fedfm.core.tokens import Tokens
from fedfm.models.language.encoding import next_tokens
from fedfm.models.language.next_token import logits_and_targets, rows_at_once
from fedfm.models.memory_budget import in_halves, warn
from fedfm.models.network import Network
from fedfm.models.preprocessing import IGNORE
from fedfm.tasks.preference import AT_ONCE, REFERENCE, SECOND

_OWN = (SECOND, REFERENCE, "input_ids", "attention_mask", "answer_start")


def by_batches(model: Network, rows: Rows, of: Callable[[Batch], Tensor], most: int = AT_ONCE) -> Tensor:
    """Compute two numbers for each row, (n, 2) float32 on the CPU; rows of similar length share a batch."""
    lengths = [len(ids) for ids in rows.tokens] if rows.tokens is not None else [0] * len(rows)
    order = torch.argsort(torch.tensor(lengths, dtype=torch.int64), stable=True)
    sorted_rows = rows.take(order)

    def by(size: int) -> list[Tensor]:
        with model.evaluating():
            return [of(batch).float().cpu() for batch in sorted_rows.batches(size)]

    done, _ = in_halves(rows_at_once(model, rows, most), by, warn)
    return torch.cat(done)[torch.argsort(order)] if done else torch.zeros(0, 2)


def log_probabilities(model: Network, batch: Batch) -> Tensor:
    """Log pi of the two answers of each row, (b, 2): sums over their tokens."""
    texts = _texts(model, batch)
    logits, targets = logits_and_targets(model, texts)
    each = -F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")  # 0 for ignored targets
    counts = next_tokens(texts).to(each.device) != IGNORE  # (2 b, L - 1)
    if len(each) != counts.numel():  # only tokens of answers were computed
        each = torch.zeros(counts.shape, device=each.device).masked_scatter(counts, each)
    return each.reshape(counts.shape).sum(1).reshape(2, -1).T


def _texts(model: Network, batch: Batch) -> Batch:
    """A batch (2 b, L) with the texts of the first answers of all rows, then those of the second answers."""
    ids, second = batch["input_ids"], batch[SECOND]
    ends = batch["attention_mask"].sum(1) if "attention_mask" in batch else torch.full_like(second, ids.shape[1])
    parts = [row[:at] for row, at in zip(ids, second.tolist(), strict=True)]
    parts += [row[a:b] for row, a, b in zip(ids, second.tolist(), ends.tolist(), strict=True)]
    starts = batch["answer_start"].T.reshape(-1)
    both = Rows({"answer_start": starts}, tokens=Tokens.of(parts), pad=model.tools.tokenizer.pad_token_id or 0)
    others = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items() if name not in _OWN}
    padded = {name: tensor.to(ids.device) for name, tensor in both.batch(range(len(parts))).items()}
    return padded | others


def losses(rewards: Tensor) -> Tensor:
    """-log sigma(r_w - r_l) of each row of rewards (b, 2)."""
    return -F.logsigmoid(rewards[:, 0] - rewards[:, 1])
