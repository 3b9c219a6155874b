"""Vectors of texts and images, the logits of a batch of pairs, and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.core.rows import Batch, Rows
from fedfm.core.tokens import Tokens
from fedfm.tasks._encoders import Pooling, pooling_of
from fedfm.tasks._pair_rows import ENDS, IDS, IMAGES

if TYPE_CHECKING:
    from fedfm.data.table import Table
    from fedfm.models.network import Network
    from fedfm.models.trained import Trained

_DIGITS = 7  # significant digits of predicted vectors: float32 has no more


def logits(model: Network, batch: Batch, temperature: float) -> Tensor:
    """For pairs, the cosines (b, m) of anchors and candidates, divided by the temperature t; for single rows, vectors.

    The loss is that of SimCSE and of the MultipleNegativesRankingLoss of sentence-transformers,

        L_i = -log(exp(cos(a_i, p_i) / t) / sum_j exp(cos(a_i, c_j) / t)),

    over the candidates c_j: all positives, then all negatives. A candidate other than p_i gets the logit -infinity if
    it is not a negative of row i: if it equals a_i or p_i, or is the positive of an anchor equal to a_i.
    """
    if IDS not in batch:
        return vectors(model, batch)
    anchors, *others = (F.normalize(vectors(model, part), dim=-1) for part in _parts(model, batch))
    found = anchors @ torch.cat(others).T / temperature  # (b, m)
    return found.masked_fill(_false_negatives(batch[IDS]).to(found.device), -torch.inf)


def _false_negatives(ids: Tensor) -> Tensor:
    """Whether each candidate is a false negative of each row (b, m), by the ids of the rows' contents (b, 2 or 3)."""
    anchors, positives = ids[:, :1], ids[:, 1:2]
    candidates = ids[:, 1:].T.reshape(1, -1)  # (1, m)
    same_anchor = torch.zeros(len(ids), candidates.shape[1], dtype=torch.bool, device=ids.device)
    same_anchor[:, : len(ids)] = anchors == anchors.T
    found = same_anchor | (candidates == positives) | (candidates == anchors)
    found[:, : len(ids)].fill_diagonal_(False)
    return found


def vectors(model: Network, batch: Batch) -> Tensor:
    """The pooled states (b, d) of texts or images, float32, not normalised."""
    return pool(model.outputs(batch).float(), batch.get("attention_mask"), pooling_of(model))


def pool(states: Tensor, mask: Tensor | None, pooling: Pooling) -> Tensor:
    """The vectors (b, d) of states (b, T, d), or of a convolutional network's (b, d, H, W).

    Args:
        mask: (b, T), 0 at padding.
    """
    if states.dim() == 4:
        states, mask = states.flatten(2).mT, None  # (b, H W, d)
    mask = states.new_ones(states.shape[:2]) if mask is None else mask.to(states)
    weights = mask.unsqueeze(-1)  # (b, T, 1)
    if pooling.mode == "cls":
        return states[:, 0]
    if pooling.mode == "max":
        return states.masked_fill(weights == 0, -torch.inf).amax(1)
    if pooling.mode == "lasttoken":
        return states[torch.arange(len(states), device=states.device), mask.sum(1).long() - 1]
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def _parts(model: Network, batch: Batch) -> list[Batch]:
    """The anchors, the positives and, if there are any, the negatives of a batch, each as arguments of the model."""
    if IMAGES[0] in batch:
        return [{"pixel_values": batch[name]} for name in IMAGES if name in batch]
    ids, ends = batch["input_ids"], batch[ENDS]  # (b, L), (b, 2 or 3)
    starts = F.pad(ends[:, :-1], (1, 0))
    names = [name for name, of in batch.items() if of.shape[:2] == ids.shape and name not in (ENDS, IDS)]
    pads = dict.fromkeys(names, 0) | {"input_ids": model.tools.tokenizer.pad_token_id or 0}
    found = []
    for start, end in zip(starts.unbind(1), ends.unbind(1), strict=True):
        place = torch.arange(int((end - start).max()), device=ids.device)
        inside, at = place < (end - start)[:, None], (start[:, None] + place).clamp(max=ids.shape[1] - 1)
        found.append({name: batch[name].gather(1, at).masked_fill(~inside, pads[name]) for name in names})
    return found


def singles(rows: Rows, column: int = 0) -> Rows:
    """The anchors (column 0), positives (1) or negatives (2) of pairs, as rows of single texts or images."""
    if rows.tokens is None:
        name = IMAGES[column]
        if name in rows.deferred:
            return Rows(deferred={"pixel_values": rows.deferred[name]})
        return Rows({"pixel_values": rows.tensors[name]})
    ends = rows.tensors[ENDS].numpy()
    start = ends[:, column - 1] if column else 0 * ends[:, 0]

    def cut(tokens: Tokens) -> Tokens:
        return Tokens(tokens.flat, tokens.start + start, ends[:, column] - start)

    more = {name: cut(of) for name, of in rows.token_arguments.items()}
    return Rows(tokens=cut(rows.tokens), pad=rows.pad, token_arguments=more)


def answer(trained: Trained, table: Table) -> dict[str, Any]:
    """The vectors of the rows' anchors; if rows have positives, also the cosines of anchors with positives."""
    model, paired = trained.model, bool(len(table)) and len(table.inputs[0]) > 1
    rows, pooling = model.prepare(table, range(len(table))), pooling_of(model)
    with trained.apply(rows) as applied:
        found = [model.in_batches(singles(applied, column)) for column in range(2 if paired else 1)]
    units = [F.normalize(vector, dim=-1) for vector in found]
    embeddings = units[0] if pooling.normalize else found[0]
    answers: dict[str, Any] = {"embeddings": [_shorten(row) for row in embeddings.tolist()]}
    if paired:
        answers["similarities"] = _shorten((units[0] * units[1]).sum(1).tolist())
    return answers


def _shorten(numbers: Sequence[float]) -> list[float]:
    return [float(f"{x:.{_DIGITS}g}") for x in numbers]
