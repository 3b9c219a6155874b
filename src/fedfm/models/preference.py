"""Direct preference optimisation: of two answers to a prompt the model learns which is the better one.

Direct Preference Optimization: Your Language Model is Secretly a Reward Model. Rafailov, Sharma, Mitchell, Ermon,
Manning, Finn. NeurIPS 2023. arXiv:2305.18290. Equation 7, with the better answer y_w and the worse one y_l to x:

    L = -E log sigma(beta log(pi(y_w | x) / pi_ref(y_w | x)) - beta log(pi(y_l | x) / pi_ref(y_l | x)))

The reference pi_ref is the frozen base, which is the model with its adapter off. It takes no memory of its own, and
since it does not change, its log-probabilities are computed once for each row and kept with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.core.rows import Batch, Rows
from fedfm.core.tokens import Tokens
from fedfm.models import metrics
from fedfm.models.adapters.adaptation import base_alone
from fedfm.models.language.next_token import rows_at_once, scored
from fedfm.models.memory_budget import in_halves, warned
from fedfm.models.model import Model
from fedfm.models.preprocessing import IGNORE, next_tokens

SECOND = "second"  # tensor of rows, (n,): where the second of a row's two texts begins
REFERENCE = "reference"  # tensor of rows, (n, 2): log pi_ref of the two answers
_AT_ONCE = 32  # rows of two texts
_OWN = (SECOND, REFERENCE, "input_ids", "attention_mask", "answer_start")


class PreferenceModel(Model):
    """A language model adapted by LoRA that learns from pairs of answers.

    Its rows have two texts each, one after the other (see :func:`fedfm.models.preprocessing.preferences`). Its logits
    are the two rewards of a row, so that the loss is the cross-entropy with the first as the right one.
    """

    softmax = False

    def encode(self, rows: Rows) -> Rows:
        """The rows with the log-probabilities of the frozen base."""
        if SECOND not in rows.tensors or REFERENCE in rows.tensors:
            return rows
        with base_alone(self.module):
            found = self._by_batches(rows, self._log_probabilities)
        return replace(rows, tensors=rows.tensors | {REFERENCE: found})

    def logits(self, batch: Batch) -> Tensor:
        """Of rows of two texts the rewards (b, 2): beta log(pi(y | x) / pi_ref(y | x)) of the better and the worse
        answer; of other rows as any language model's.
        """
        if SECOND not in batch:
            return super().logits(batch)
        reference = batch.get(REFERENCE)
        if reference is None:
            with torch.no_grad(), base_alone(self.module):
                reference = self._log_probabilities(batch)
        return self.spec.beta * (self._log_probabilities(batch) - reference.to(self.device))

    def loss(self, batch: Batch) -> Tensor:
        """Equation 7 on these rows, a scalar: their mean."""
        if SECOND not in batch:
            return super().loss(batch)
        return _losses(self.logits(batch)).mean()

    def flat(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of rows of two texts the rewards (b, 2) and targets 0: the first answer is the better one."""
        if SECOND not in batch:
            return super().flat(logits, batch)
        return logits.float(), torch.zeros(len(logits), dtype=torch.int64, device=logits.device)

    def counted(self, batch: Batch) -> int:
        return len(batch[SECOND]) if SECOND in batch else super().counted(batch)

    def predict(self, rows: Rows, batch_size: int = _AT_ONCE) -> Tensor:
        """The rewards (n, 2) of all rows, float32 on the CPU."""
        if len(rows) and SECOND not in rows.tensors:
            return super().predict(rows, batch_size)
        return self._by_batches(self.encode(rows), self.logits, batch_size)

    def evaluate(self, rows: Rows, logits: Tensor | None = None) -> dict[str, Any]:
        """``accuracy``, the share of rows whose better answer has the larger reward; ``loss`` (equation 7);
        ``reward_margin``, the mean difference of the rewards.
        """
        rewards = self.predict(rows) if logits is None else logits
        found = metrics.nothing(len(rows)) | {"reward_margin": None}
        if not len(rows):
            return found
        margin = (rewards[:, 0] - rewards[:, 1]).double()
        scores = {"accuracy": (margin > 0).double(), "loss": _losses(rewards.double()), "reward_margin": margin}
        return found | {name: float(of.mean()) for name, of in scores.items()}

    def last_states(self, rows: Rows) -> Tensor:
        if SECOND not in rows.tensors or rows.tokens is None:
            return super().last_states(rows)
        starts = rows.tensors["answer_start"][:, 0].tolist()
        asked = Tokens.of([ids[:start] for ids, start in zip(rows.tokens, starts, strict=True)])
        return super().last_states(Rows(tokens=asked, pad=rows.pad))

    def _by_batches(self, rows: Rows, of: Any, most: int = _AT_ONCE) -> Tensor:
        """Two numbers for each row, (n, 2) float32 on the CPU; rows of like length share a batch."""
        lengths = [len(ids) for ids in rows.tokens] if rows.tokens is not None else [0] * len(rows)
        order = torch.argsort(torch.tensor(lengths, dtype=torch.int64), stable=True)
        sorted_rows = rows.take(order)

        def by(size: int) -> list[Tensor]:
            with self.evaluating():
                return [of(batch).float().cpu() for batch in sorted_rows.batches(size)]

        done, _ = in_halves(rows_at_once(self, rows, most), by, warned)
        return torch.cat(done)[torch.argsort(order)] if done else torch.zeros(0, 2)

    def _log_probabilities(self, batch: Batch) -> Tensor:
        """Log pi of the two answers of each row, (b, 2): sums over their tokens."""
        texts = self._texts(batch)
        logits, targets = scored(self, texts)
        each = -F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")  # 0 where none counts
        counts = next_tokens(texts).to(each.device) != IGNORE  # (2 b, L - 1)
        if len(each) != counts.numel():  # only those that count were computed
            each = torch.zeros(counts.shape, device=each.device).masked_scatter(counts, each)
        return each.reshape(counts.shape).sum(1).reshape(2, -1).T

    def _texts(self, batch: Batch) -> Batch:
        """The first texts (b, L), then the second ones."""
        ids, second = batch["input_ids"], batch[SECOND]
        ends = batch["attention_mask"].sum(1) if "attention_mask" in batch else torch.full_like(second, ids.shape[1])
        parts = [row[:at] for row, at in zip(ids, second.tolist(), strict=True)]
        parts += [row[a:b] for row, a, b in zip(ids, second.tolist(), ends.tolist(), strict=True)]
        starts = batch["answer_start"].T.reshape(-1)
        both = Rows({"answer_start": starts}, tokens=Tokens.of(parts), pad=self.tools.tokenizer.pad_token_id or 0)
        others = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items() if name not in _OWN}
        padded = {name: tensor.to(ids.device) for name, tensor in both.batch(range(len(parts))).items()}
        return padded | others


def _losses(rewards: Tensor) -> Tensor:
    """-log sigma(r_w - r_l) of each row of rewards (b, 2)."""
    return -F.logsigmoid(rewards[:, 0] - rewards[:, 1])
