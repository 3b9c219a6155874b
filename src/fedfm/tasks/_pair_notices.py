"""Notices about pairs before a run: what is cut off, repeated, or ranked among few candidates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedfm.core.attachments import Attachment
from fedfm.data.table import Table
from fedfm.tasks._pair_candidates import sets_of
from fedfm.tasks._pair_rows import number_of

if TYPE_CHECKING:
    from fedfm.models.preprocessors import Tools

_FEW = 20  # recall at 5 among fewer rows says little


def forewarnings(parts: Mapping[str, Table], tools: Tools, most: int) -> list[str]:
    """Notices about the training rows and the test rows."""
    return [*cut_texts(parts, tools), *_repetitions(parts["training"]), *_of_sets(parts["test"], most)]


def cut_texts(parts: Mapping[str, Table], tools: Tools) -> list[str]:
    """A notice about texts of the rows that are longer than ``model.max_length``."""
    texts = [cell for part in parts.values() for row in part.inputs for cell in row if not isinstance(cell, Attachment)]
    if not texts or tools.tokenizer is None:
        return []
    from fedfm.models import preprocessing

    whole = preprocessing.texts(texts, tools.tokenizer, tools.max_length + 1)
    cut = int((whole.length > tools.max_length).sum())
    if not cut:
        return []
    return [f"{cut} of {len(texts)} texts of the pairs are cut to {tools.max_length} tokens (model.max_length)"]


def _repetitions(part: Table) -> list[str]:
    ids = [tuple(map(number_of, row)) for row in part.inputs]
    found = []
    anchors, positives = Counter(row[0] for row in ids), Counter(row[1] for row in ids)
    if many := sum(anchors[row[0]] > 1 or positives[row[1]] > 1 for row in ids):
        found.append(
            f"{many} of {len(ids)} training rows have the anchor or the positive of another row: in a batch such rows "
            "are not negatives of each other"
        )
    if same := sum(row[0] == row[1] for row in ids):
        found.append(f"{same} of {len(ids)} training rows have an anchor that is equal to its positive")
    if wrong := sum(number in row[:2] for row in ids for number in row[2:]):
        found.append(f"{wrong} of {len(ids)} training rows have a negative that is equal to their anchor or positive")
    return found


def _of_sets(part: Table, most: int) -> list[str]:
    if not len(part):
        return []
    sets = sets_of(part, most)
    sizes = {sets.place(i).among.size for i in range(len(part))}
    said = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    few = "; among few candidates every model has a high recall" if min(sizes) < _FEW else ""
    return [
        "scores: each test row's positive is ranked, by the cosine with its anchor, among the positives and negatives "
        f"of a fixed set of {said} test rows (model.candidates = {most}){few}"
    ]
