"""Count the tags and entities that a model predicts for words, and write its predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from fedfm.core.rows import Rows
from fedfm.data.table import Table
from fedfm.models import word_tokens
from fedfm.models.preprocessing import IGNORE
from fedfm.tasks._tags import OUTSIDE, entity, spans

if TYPE_CHECKING:
    from fedfm.models.network import Network
    from fedfm.models.trained import Trained

_AT_ONCE = 256  # number of rows whose logits are in memory together


def count(model: Network, rows: Rows, batch_size: int, names: Sequence[str]) -> dict[str, float]:
    """The sums ``names`` over all rows, from the model's predictions and the rows' tags."""
    total: dict[str, float] = dict.fromkeys(names, 0)
    for part in _parts(rows):
        for name, value in count_of(part, model.predict(part, batch_size), model.classes, names).items():
            total[name] += value
    return total


def count_of(rows: Rows, logits: Tensor, classes: tuple[str, ...], names: Sequence[str]) -> dict[str, float]:
    """As :func:`count`, but from the logits (n, L, C) of these rows."""
    targets = rows.tensors["targets"][:, : logits.shape[1]]  # (n, L)
    counts = targets != IGNORE
    said = logits.argmax(-1)
    total: dict[str, float] = dict.fromkeys(names, 0)
    for i in range(len(rows)):
        right = spans([classes[tag] for tag in targets[i][counts[i]].tolist()])
        found = spans([classes[tag] for tag in said[i][counts[i]].tolist()])
        total["entities"] += len(right)
        total["found"] += len(found)
        total["right_entities"] += len({*right} & {*found})
    total["words"] = int(counts.sum())
    total["right_tags"] = int((said == targets)[counts].sum())
    total["loss_of_words"] = float(F.cross_entropy(logits[counts].double(), targets[counts], reduction="sum"))
    return total


def answer(trained: Trained, table: Table) -> dict[str, Any]:
    """The tags and entities of each row; the tag of a word that is cut off is None."""
    model, warnings = trained.model, list[str]()
    tags: list[list[str | None]] = []
    entities: list[list[dict[str, Any]]] = []
    for start in range(0, len(table), _AT_ONCE):
        part = table.take(range(start, min(start + _AT_ONCE, len(table))))
        rows = trained.encode(model.prepare(part, range(len(part))))
        said = trained.logits(rows).argmax(-1)  # (n, L)
        sentences = [words for words, _ in part.inputs]
        for i, (words, place) in enumerate(zip(sentences, word_tokens.of(sentences, model.tools).places, strict=True)):
            of = [model.classes[int(said[i, place[w]])] if w in place else None for w in range(len(words))]
            tags.append(of)
            # A word that is cut off ends the entity before it.
            entities.append([entity(words, span) for span in spans([tag or OUTSIDE for tag in of])])
    if cut := sum(of.count(None) for of in tags):
        warnings.append(
            f"{cut} words have no token among the {model.tools.max_length} that are read of their rows "
            "(model.max_length): their tag is null"
        )
    return {"tags": tags, "entities": entities, "words_cut": cut, "warnings": warnings}


def _parts(rows: Rows) -> Iterator[Rows]:
    """The rows in parts whose logits fit into memory."""
    return (rows.take(range(i, min(i + _AT_ONCE, len(rows)))) for i in range(0, len(rows), _AT_ONCE))
