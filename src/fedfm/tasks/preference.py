"""Direct preference optimisation: from pairs of answers to a prompt, the model learns which answer is better.

Direct Preference Optimization: Your Language Model is Secretly a Reward Model. Rafailov, Sharma, Mitchell, Ermon,
Manning, Finn. NeurIPS 2023. arXiv:2305.18290. Equation 7, with the better answer y_w and the worse answer y_l to the
prompt x:

    L = -E log sigma(beta log(pi(y_w | x) / pi_ref(y_w | x)) - beta log(pi(y_l | x) / pi_ref(y_l | x)))

The reference pi_ref is the frozen base: the model with its adapter off. So the reference takes no further memory and
never changes. Its log-probabilities are computed once for each row and stored with the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from fedfm.core.fields import setting
from fedfm.tasks._answers import ADDITIONS, INSTRUCTIONS, MESSAGES, AnswerTask
from fedfm.tasks.task import LORA, Column, Reading, RowKind, Scores, Sums

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedfm.core.rows import Batch, Rows
    from fedfm.data.sources._sheet import Sheet
    from fedfm.data.spec import DataSpec
    from fedfm.data.table import Table
    from fedfm.models.network import Network
    from fedfm.models.preprocessors import Tools

SECOND = "second"  # tensor (n,): where the second of a row's two texts begins
REFERENCE = "reference"  # tensor (n, 2): log pi_ref of the two answers
AT_ONCE = 32  # number of rows (of two texts each) that are computed at once


@dataclass(frozen=True)
class Preference(AnswerTask):
    """A language model adapted by LoRA that learns from pairs of answers.

    A row has two texts, one after the other, see :func:`fedfm.models.language.encoding.preferences`. The logits of a
    row are its two rewards, so the loss is the cross-entropy with the first answer as the right class. Rows of one
    text, e.g. prompts to answer, are treated as in any language model.
    """

    name: ClassVar[str] = "preference"
    kinds: ClassVar[tuple[str, ...]] = ("preference",)
    own_kind: ClassVar[RowKind | None] = RowKind("preference", "preferences", answered=True, predicted_as="instruction")
    implied_by: ClassVar[tuple[str, ...]] = ("preference",)
    columns: ClassVar[tuple[Column, ...]] = (
        Column("prompt", 'column of prompts, task "preference": text, or a list of { role, content }'),
        Column("chosen", 'column of the better answers, task "preference"'),
        Column("rejected", 'column of the worse answers, task "preference"'),
        *INSTRUCTIONS,
        MESSAGES,
        *ADDITIONS,
    )
    no_pretraining: ClassVar[str] = "it trains an adapter against its frozen base; expected another task"
    adaptations: ClassVar[tuple[str, ...]] = LORA
    keeps_base: ClassVar[bool] = True
    softmax: ClassVar[bool] = False
    texts_a_row: ClassVar[int] = 2
    figures: ClassVar[tuple[str, ...]] = ("reward_margin",)
    row_means: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"accuracy": "right", "loss": "loss_of_rows", "reward_margin": "margin_of_rows"}
    )
    sums: ClassVar[tuple[str, ...]] = ("rows", *row_means.values())

    beta: float = setting(
        0.1,
        "preference: how strongly DPO keeps the model near its frozen base; a larger beta keeps it closer",
        gt=0,
        finite=True,
    )

    def claims(self, columns: Mapping[str, Any], spec: DataSpec) -> bool:
        return spec.column("chosen") in columns and spec.column("rejected") in columns

    def read(self, sheet: Sheet, spec: DataSpec, *, source: str, labelled: bool) -> Reading:
        from fedfm.tasks import _conversation_rows

        return _conversation_rows.preferences(sheet, spec, source, labelled)

    def shuffle_targets(self, rows: Table, rng: np.random.Generator) -> Table:
        """Swap the two answers of a row with probability 1/2."""
        swapped = rng.integers(2, size=len(rows)).tolist()
        both = zip(rows.inputs, swapped, strict=True)
        return replace(rows, inputs=[(x, b, a) if swap else (x, a, b) for (x, a, b), swap in both])

    def rows(self, part: Table, tools: Tools, classes: tuple[str, ...]) -> Rows:
        from fedfm.core.rows import Rows
        from fedfm.models.language import encoding

        tokens, where = encoding.preferences(part.inputs, tools.tokenizer, tools.max_length, tools.template)
        return Rows(where, tokens=tokens, pad=int(tools.tokenizer.pad_token_id or 0))

    def encode(self, model: Network, rows: Rows) -> Rows:
        """The rows with their answers' log-probabilities under the frozen base."""
        if SECOND not in rows.tensors or REFERENCE in rows.tensors:
            return rows
        from fedfm.models.adapters.base_alone import base_alone

        with base_alone(model.module):
            found = _by_batches(model, rows, lambda batch: log_probabilities(model, batch))
        return replace(rows, tensors=rows.tensors | {REFERENCE: found})

    def logits(self, model: Network, batch: Batch) -> Tensor:
        """For rows of two texts the rewards (b, 2); for other rows the logits of a language model.

        The reward of an answer y is beta log(pi(y | x) / pi_ref(y | x)); the better answer comes first.
        """
        if SECOND not in batch:
            return super().logits(model, batch)
        import torch

        from fedfm.models.adapters.base_alone import base_alone

        reference = batch.get(REFERENCE)
        if reference is None:
            with torch.no_grad(), base_alone(model.module):
                reference = log_probabilities(model, batch)
        return self.beta * (log_probabilities(model, batch) - reference.to(model.device))

    def targets(self, model: Network, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """For rows of two texts the rewards (b, 2), and targets 0, since the first answer is the better one."""
        import torch

        if SECOND not in batch:
            return super().targets(model, logits, batch)
        return logits.float(), torch.zeros(len(logits), dtype=torch.int64, device=logits.device)

    def count_targets(self, batch: Batch) -> int:
        return len(batch[SECOND]) if SECOND in batch else super().count_targets(batch)

    def loss(self, model: Network, batch: Batch) -> Tensor:
        """Equation 7, a scalar: the mean over these rows."""
        if SECOND not in batch:
            return super().loss(model, batch)
        return losses(model.logits(batch)).mean()

    def predict(self, model: Network, rows: Rows, batch_size: int) -> Tensor:
        """The rewards (n, 2) of all rows, float32 on the CPU."""
        if len(rows) and SECOND not in rows.tensors:
            return super().predict(model, rows, min(batch_size, AT_ONCE))
        return _by_batches(model, self.encode(model, rows), model.logits, min(batch_size, AT_ONCE))

    def count(self, model: Network, rows: Rows, batch_size: int = 64) -> Sums:
        return self.count_of(model, rows, model.predict(rows, AT_ONCE))

    def count_of(self, model: Network, rows: Rows, logits: Tensor) -> Sums:
        margin = (logits[:, 0] - logits[:, 1]).double()
        return {
            "rows": len(rows),
            "right": int((margin > 0).sum()),
            "loss_of_rows": float(losses(logits.double()).sum()),
            "margin_of_rows": float(margin.sum()),
        }

    def from_sums(self, sums: Mapping[str, float]) -> Scores:
        """The scores: ``accuracy``, the share of rows whose better answer has the larger reward; ``loss`` (equation 7);
        and ``reward_margin``, the mean difference of the rewards.
        """
        return self.means_over_rows(sums)

    def prompts(self, rows: Rows) -> Rows:
        """The prompt of each row."""
        from fedfm.core.rows import Rows
        from fedfm.core.tokens import Tokens

        if SECOND not in rows.tensors or rows.tokens is None:
            return super().prompts(rows)
        starts = rows.tensors["answer_start"][:, 0].tolist()
        asked = Tokens.of([ids[:start] for ids, start in zip(rows.tokens, starts, strict=True)])
        return super().prompts(Rows(tokens=asked, pad=rows.pad))


def losses(rewards: Tensor) -> Tensor:
    """-log sigma(r_w - r_l) of each row of rewards (b, 2)."""
    import torch.nn.functional as F

    return -F.logsigmoid(rewards[:, 0] - rewards[:, 1])


def log_probabilities(model: Network, batch: Batch) -> Tensor:
    """Log pi of the two answers of each row, (b, 2): each is a sum over the answer's tokens."""
    import torch
    import torch.nn.functional as F

    from fedfm.models.language.encoding import next_tokens
    from fedfm.models.language.next_token import logits_and_targets
    from fedfm.models.preprocessing import IGNORE

    texts = _texts(model, batch)
    logits, targets = logits_and_targets(model, texts)
    each = -F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")  # 0 for ignored targets
    counts = next_tokens(texts).to(each.device) != IGNORE  # (2 b, L - 1)
    if len(each) != counts.numel():  # only tokens of answers were computed
        each = torch.zeros(counts.shape, device=each.device).masked_scatter(counts, each)
    return each.reshape(counts.shape).sum(1).reshape(2, -1).T


def _texts(model: Network, batch: Batch) -> Batch:
    """A batch (2 b, L) with the texts of the first answers of all rows, then those of the second answers."""
    import torch

    from fedfm.core.rows import Rows
    from fedfm.core.tokens import Tokens

    ids, second = batch["input_ids"], batch[SECOND]
    ends = batch["attention_mask"].sum(1) if "attention_mask" in batch else torch.full_like(second, ids.shape[1])
    parts = [row[:at] for row, at in zip(ids, second.tolist(), strict=True)]
    parts += [row[a:b] for row, a, b in zip(ids, second.tolist(), ends.tolist(), strict=True)]
    starts = batch["answer_start"].T.reshape(-1)
    both = Rows({"answer_start": starts}, tokens=Tokens.of(parts), pad=model.tools.tokenizer.pad_token_id or 0)
    own = (SECOND, REFERENCE, "input_ids", "attention_mask", "answer_start")
    others = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items() if name not in own}
    padded = {name: tensor.to(ids.device) for name, tensor in both.batch(range(len(parts))).items()}
    return padded | others


def _by_batches(model: Network, rows: Rows, of: Callable[[Batch], Tensor], most: int = AT_ONCE) -> Tensor:
    """The results of ``of`` for all rows, (n, 2), float32 on the CPU; rows of similar length share a batch."""
    import torch

    from fedfm.models.language.next_token import rows_at_once
    from fedfm.models.memory_budget import in_halves, warn

    lengths = [len(ids) for ids in rows.tokens] if rows.tokens is not None else [0] * len(rows)
    order = torch.argsort(torch.tensor(lengths, dtype=torch.int64), stable=True)
    sorted_rows = rows.take(order)

    def by(size: int) -> list[Tensor]:
        with model.evaluating():
            return [of(batch).float().cpu() for batch in sorted_rows.batches(size)]

    done, _ = in_halves(rows_at_once(model, rows, most), by, warn)
    return torch.cat(done)[torch.argsort(order)] if done else torch.zeros(0, 2)
