"""Rank positives among fixed sets of candidates, so that sums over rows can be added over clients.

The rows of one split of a file (with ``data.clients``: of one client's file) are sorted by their hashes. They are cut
into sets of at most ``model.candidates`` rows, as equal in size as possible. The candidates of a set are the positives
and the negatives of its rows, without repetitions. A row's positive is ranked among the candidates of the row's set;
every client and the server use the same sets. Two kinds of candidates are left out for a row: other positives of the
row's anchor, and candidates equal to the anchor.

The sets of a split are made when one of its rows is first scored, so that training rows cost no time and no memory.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.core.rows import Rows
from fedfm.data.partition import CLIENT
from fedfm.data.table import Table
from fedfm.linalg.params import to_bytes
from fedfm.tasks._pair_rows import Cell, number_of

if TYPE_CHECKING:
    from fedfm.models.network import Network
    from fedfm.models.preprocessors import Tools
    from fedfm.tasks._sums import Sums

_FIRST = 5  # the k of recall at k
_CUT = 10  # the k of nDCG at k
_PLACE = "row_of_table"  # tensor (n,): the indexes of rows in their table


@dataclass(frozen=True)
class PairTable(Table):
    """The rows ``index`` of the table ``whole``, which also has their candidates."""

    whole: Table | None = None
    index: np.ndarray | None = None
    most: int = 0


@dataclass(frozen=True)
class PairRows(Rows):
    """Prepared rows of the table ``whole``, which also has their candidates."""

    whole: Table | None = None
    tools: Tools | None = None
    most: int = 0

    @property
    def places(self) -> list[Place]:
        """The candidates of each row."""
        if self.whole is None:
            raise TypeError("these rows have no table, hence no candidates")
        sets = sets_of(self.whole, self.most)
        return [sets.place(i) for i in self.tensors[_PLACE].tolist()]


@dataclass(eq=False)
class CandidateSet:
    """The candidates of a set of rows.

    Attributes:
        cells: texts or images by the number of their content, in ascending order of the numbers.
        size: number of rows in the set.
        known: the hash of the last weights, and the candidates' unit vectors under them; None at first.
    """

    cells: dict[int, Cell]
    size: int
    known: tuple[str, Tensor] | None = None

    def vectors(self, weights: str, tools: Tools, compute: Callable[[Rows], Tensor]) -> Tensor:
        """The unit vectors (K, d) under the weights with this hash; clients that share a set compute them only once."""
        if self.known is None or self.known[0] != weights:
            from fedfm.tasks._pair_rows import to_rows
            from fedfm.tasks._pair_vectors import singles

            rows = [(cell,) for cell in self.cells.values()]
            table = Table("pairs", rows, None, (), np.full(len(rows), "test"))
            self.known = weights, F.normalize(compute(singles(to_rows(table, tools))), dim=-1)
        return self.known[1]


class Place(NamedTuple):
    """A row's candidate set, the index of its positive in the set, and the indexes of candidates that are left out."""

    among: CandidateSet
    own: int
    left_out: tuple[int, ...]


class TableSets:
    """The candidate sets of a table, of at most ``most`` rows each."""

    def __init__(self, table: Table, most: int) -> None:
        self._table, self.most = weakref.ref(table), most
        self._places: dict[int, Place] = {}

    def of(self, table: Table, most: int) -> bool:
        """Whether these are the sets of this table."""
        return self._table() is table and self.most == most

    def place(self, i: int) -> Place:
        """The candidates of row i."""
        if i not in self._places:
            table = self._table()
            if table is None:
                raise RuntimeError("the table of these sets is gone")
            self._make(table, np.flatnonzero(table.split == table.split[i]).tolist())
        return self._places[i]

    def _make(self, table: Table, rows: Sequence[int]) -> None:
        owners = table.columns.get(CLIENT)
        groups: dict[str, list[int]] = defaultdict(list)
        for i in rows:
            groups["" if owners is None else str(owners[i])].append(i)
        for group in groups.values():
            ids = {i: tuple(map(number_of, table.inputs[i])) for i in group}
            positives: dict[int, set[int]] = defaultdict(set)
            for anchor, positive, *_ in ids.values():
                positives[anchor].add(positive)
            ordered = sorted(group, key=lambda i: hashlib.sha256(repr(ids[i]).encode()).digest())
            for some in np.array_split(ordered, -(-len(ordered) // self.most)):
                mine: list[int] = some.tolist()
                cells = {n: cell for i in mine for n, cell in zip(ids[i][1:], table.inputs[i][1:], strict=True)}
                among = CandidateSet(dict(sorted(cells.items())), len(mine))
                code = {number: k for k, number in enumerate(among.cells)}
                for i in mine:
                    anchor, positive = ids[i][:2]
                    known = (positives[anchor] | {anchor}) & code.keys() - {positive}
                    self._places[i] = Place(among, code[positive], tuple(sorted(code[number] for number in known)))


_last: list[TableSets] = []  # the sets of the last table


def sets_of(table: Table, most: int) -> TableSets:
    """The sets of a table; those of the last table are kept."""
    if not _last or not _last[0].of(table, most):
        _last[:] = [TableSets(table, most)]
    return _last[0]


def part(table: Table, index: np.ndarray, most: int) -> Table:
    """The rows ``index``, with a reference to the whole table."""
    own = {f.name: getattr(taken, f.name) for taken in (table.take(index),) for f in fields(Table)}
    return PairTable(**own, whole=table, index=np.asarray(index, dtype=np.int64), most=most)


def with_table(rows: Rows, part: Table, tools: Tools) -> Rows:
    """The rows with a reference to their whole table, if the part has one."""
    if not isinstance(part, PairTable) or part.index is None:
        return rows
    plain = {f.name: getattr(rows, f.name) for f in fields(Rows)}
    plain["tensors"] = rows.tensors | {_PLACE: torch.from_numpy(part.index)}
    return PairRows(**plain, whole=part.whole, tools=tools, most=part.most)


def similarities(model: Network, rows: Rows, batch_size: int, temperature: float) -> Tensor:
    """Cosines (n, K) of anchors with their sets' candidates, divided by the temperature; -infinity if left out."""
    from fedfm.tasks._pair_vectors import singles

    if not isinstance(rows, PairRows) or rows.tools is None or not len(rows):
        return torch.zeros(0, 1)

    def compute(some: Rows) -> Tensor:
        return model.in_batches(some, batch_size)

    weights, anchors, places = _sha256_of(model), F.normalize(compute(singles(rows)), dim=-1), rows.places
    of_set: dict[CandidateSet, list[int]] = defaultdict(list)
    for i, place in enumerate(places):
        of_set[place.among].append(i)
    found = torch.full((len(rows), max(len(among.cells) for among in of_set)), -torch.inf)
    for among, mine in of_set.items():
        found[mine, : len(among.cells)] = anchors[mine] @ among.vectors(weights, rows.tools, compute).T / temperature
    for i, place in enumerate(places):
        found[i, list(place.left_out)] = -torch.inf
    return found


def _sha256_of(model: Network) -> str:
    """A hash of the tensors of the model that may change: those of an adapter, and those that are trained."""
    found = hashlib.sha256(str(id(model.module)).encode())
    for name, tensor in model.module.named_parameters():
        if tensor.requires_grad or ".lora_" in name:
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(to_bytes(tensor.detach().cpu().contiguous()))
    return found.hexdigest()


def count(logits: Tensor, rows: Rows) -> Sums:
    """The sums from which scores are computed, from :func:`similarities`."""
    own = [place.own for place in rows.places] if isinstance(rows, PairRows) and len(rows) else []
    return sums(logits[: len(own)], torch.tensor(own, dtype=torch.int64))


def sums(logits: Tensor, own: Tensor) -> Sums:
    """The sums from which scores are computed; the positive of row i is the candidate ``own[i]``.

    A candidate that is as similar as the positive is ranked before it, and so is one whose logit is NaN.
    """
    right = logits.double().gather(1, own[:, None])  # (n, 1)
    ranks = (~(logits.double() < right)).sum(1).double()  # the positive itself adds 1
    gains = torch.where(ranks <= _CUT, 1 / torch.log2(1 + ranks), 0.0)
    return {
        "rows": len(own),
        "right": int((ranks == 1).sum()),
        "in_first_5": int((ranks <= _FIRST).sum()),
        "reciprocal_ranks": float((1 / ranks).sum()),
        "gains": float(gains.sum()),
        "loss_of_rows": float((torch.logsumexp(logits.double(), 1) - right[:, 0]).sum()),
    }
