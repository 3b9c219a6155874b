"""The base class of tasks for causal language models: the targets are the next tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedfm.tasks.task import Scores, Sums, Task, Trained

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fedfm.core.rows import Batch, Rows
    from fedfm.data.table import Table
    from fedfm.models.network import Network


@dataclass(frozen=True)
class LanguageTask(Task):
    """A causal language model: its loss is a mean over the next tokens that count."""

    softmax: ClassVar[bool] = True  # its loss is the cross-entropy, computed in chunks

    is_language_model: ClassVar[bool] = True
    sums: ClassVar[tuple[str, ...]] = ("tokens", "right_tokens", "loss_of_tokens")

    def peft_type(self, kind: str) -> str | None:
        return "CAUSAL_LM"

    def pipeline(self, kind: str) -> str | None:
        return "text-generation"

    def targets(self, model: Network, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits and targets: the logits at position i predict token i + 1; padding and prompts do not count."""
        from fedfm.models.language.encoding import next_tokens

        targets = next_tokens(batch).to(logits.device)
        return logits[:, :-1].reshape(-1, logits.shape[-1]).float(), targets.reshape(-1)

    def count_targets(self, batch: Batch) -> int:
        from fedfm.models.language.encoding import next_tokens
        from fedfm.models.preprocessing import IGNORE

        return int((next_tokens(batch) != IGNORE).sum())

    def loss(self, model: Network, batch: Batch) -> Tensor:
        import torch.nn.functional as F

        from fedfm.models.language.chunked_loss import mean_loss
        from fedfm.models.language.next_token import logits_and_targets
        from fedfm.models.preprocessing import IGNORE

        in_pieces = mean_loss(model, batch)
        return (
            F.cross_entropy(*logits_and_targets(model, batch), ignore_index=IGNORE) if in_pieces is None else in_pieces
        )

    def predict(self, model: Network, rows: Rows, batch_size: int) -> Tensor:
        """The logits of all rows. Rows are padded to the longest row, so that their logits have one shape."""
        return model.in_batches(rows if rows.tokens is None else rows.to_padded(), batch_size)

    def count(self, model: Network, rows: Rows, batch_size: int = 64) -> Sums:
        """Sums over the predicted tokens; the logits are not kept, since they are as wide as the vocabulary."""
        from fedfm.models.text_metrics import count_tokens

        return count_tokens(model, rows, batch_size)

    def from_sums(self, sums: Mapping[str, float]) -> Scores:
        """``loss`` and ``accuracy`` per token, and ``perplexity``."""
        from fedfm.models.text_metrics import of_tokens

        return of_tokens(sums)


def answer_passages(trained: Trained, table: Table) -> dict[str, Any]:
    """The output of ``fedfm predict`` for running text: the text's loss and perplexity."""
    from fedfm.models.text_metrics import likelihood

    with trained.apply(trained.model.prepare(table, range(len(table)))) as rows:
        found = likelihood(trained.model, rows)
    return {**NO_CLASSES, **{key: found[key] for key in ("loss", "perplexity")}}


NO_CLASSES: Mapping[str, Sequence[Any]] = {"predictions": [], "probabilities": []}
