"""Ranks of positives among fixed sets of candidates, so that ranks of single rows can be added over clients.

The rows of one file (with ``data.clients``: of one client's file) and one split are put in the order of their hashes and
cut into sets of at most ``model.candidates`` rows, as equal in size as possible. The candidates of a set are the
positives and the negatives of its rows, each content once. A row's positive is ranked among the candidates of its set,
whoever evaluates the row. Candidates that are positives of the same anchor, or equal to the anchor, are left out.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

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

_FIRST = 5  # recall is also counted among so many first candidates
_CUT = 10  # nDCG is cut after so many candidates
SET, OWN, LEFT_OUT = "candidate_set", "own_candidate", "left_out"


@dataclass(frozen=True)
class Grouping:
    """The sets of a table.

    Attributes:
        place: (N,) the set of each row.
        cells: the candidates of each set, by the number of their content.
        others: for each row the numbers of candidates of its set that are left out.
    """

    place: np.ndarray
    cells: tuple[dict[int, Cell], ...]
    others: tuple[frozenset[int], ...]


@dataclass(frozen=True)
class PairTable(Table):
    """Rows with the sets to which they belong."""

    grouping: Grouping | None = None
    index: np.ndarray | None = None


@dataclass(frozen=True)
class PairRows(Rows):
    """Rows with their sets of candidates; ``candidate_set`` (n,) of the tensors is an index into ``sets``."""

    sets: tuple[CandidateSet, ...] = ()


@dataclass(eq=False)
class CandidateSet:
    """The candidates of a set of rows.

    Attributes:
        cells: texts or images, each content once.
        tools: the model's preprocessing.
        known: the candidates' vectors, and the hash of the weights that computed them.
    """

    cells: tuple[Cell, ...]
    tools: Tools
    known: tuple[str, Tensor] | None = field(default=None, repr=False)

    def vectors(self, weights: str, compute: Callable[[Rows], Tensor]) -> Tensor:
        """Unit vectors (K, d) under the weights of this hash. Clients with rows of one set compute them once."""
        if self.known is None or self.known[0] != weights:
            from fedfm.tasks._pair_rows import to_rows
            from fedfm.tasks._pair_vectors import singles

            table = Table("pairs", [(cell,) for cell in self.cells], None, (), np.full(len(self.cells), "test"))
            self.known = weights, F.normalize(compute(singles(to_rows(table, self.tools))), dim=-1)
        return self.known[1]


_grouped: list[tuple[weakref.ref[Table], int, Grouping]] = []  # of the last table
_sets: weakref.WeakValueDictionary[tuple[object, ...], CandidateSet] = weakref.WeakValueDictionary()


def part(table: Table, index: np.ndarray, most: int) -> Table:
    """The rows ``index``, which know the sets of the whole table."""
    taken = table.take(index)
    if not len(table) or len(table.inputs[0]) < 2:
        return taken
    if not _grouped or _grouped[0][0]() is not table or _grouped[0][1] != most:
        _grouped[:] = [(weakref.ref(table), most, grouping(table, most))]
    own = {f.name: getattr(taken, f.name) for f in fields(Table)}
    return PairTable(**own, grouping=_grouped[0][2], index=np.asarray(index, dtype=np.int64))


def grouping(table: Table, most: int) -> Grouping:
    """The sets of a table's rows, of at most ``most`` rows each."""
    ids = [tuple(number_of(cell) for cell in row) for row in table.inputs]
    owners = table.columns[CLIENT].tolist() if CLIENT in table.columns else [""] * len(table)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, key in enumerate(zip(owners, table.split.tolist(), strict=True)):
        groups[key].append(i)
    place, others = np.zeros(len(table), dtype=np.int64), [frozenset[int]()] * len(table)
    sets: list[dict[int, Cell]] = []
    for group in groups.values():
        positives: dict[int, set[int]] = defaultdict(set)
        for i in group:
            positives[ids[i][0]].add(ids[i][1])
        ordered = sorted(group, key=lambda i: _order(ids[i]))
        for some in np.array_split(ordered, -(-len(ordered) // most)):
            cells = {number: cell for i in some for number, cell in zip(ids[i][1:], table.inputs[i][1:], strict=True)}
            for i in some.tolist():
                known = (positives[ids[i][0]] | {ids[i][0]}) & cells.keys()
                others[i] = frozenset(known - {ids[i][1]})
            place[some] = len(sets)
            sets.append(dict(sorted(cells.items())))
    return Grouping(place, tuple(sets), tuple(others))


def _order(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(repr(tuple(ids)).encode()).digest()


def with_sets(rows: Rows, table: Table, tools: Tools) -> Rows:
    """The rows with their sets, if the table knows them."""
    if not isinstance(table, PairTable) or table.grouping is None or table.index is None or not len(table):
        return rows
    of, index = table.grouping, table.index
    used, place = np.unique(of.place[index], return_inverse=True)
    numbers = {int(s): {number: k for k, number in enumerate(of.cells[s])} for s in used}
    mine = [numbers[int(of.place[i])] for i in index]
    own = [code[number_of(row[1])] for code, row in zip(mine, table.inputs, strict=True)]
    omitted = [[code[number] for number in of.others[i]] for code, i in zip(mine, index, strict=True)]
    left_out = torch.full((len(index), max(map(len, omitted), default=0)), -1)
    for row, places in enumerate(omitted):
        left_out[row, : len(places)] = torch.tensor(places, dtype=torch.int64)
    more = {SET: torch.from_numpy(place.reshape(-1)), OWN: torch.tensor(own), LEFT_OUT: left_out}
    plain = {f.name: getattr(rows, f.name) for f in fields(Rows)}
    sets = tuple(_set_of(of.cells[s], tools) for s in used)
    return PairRows(**plain | {"tensors": rows.tensors | more}, sets=sets)


def _set_of(cells: dict[int, Cell], tools: Tools) -> CandidateSet:
    """The set of these cells; equal sets of one model are one object."""
    key = tuple(cells), id(tools.tokenizer), id(tools.image), tools.max_length
    found = _sets.get(key)
    if found is None:
        found = _sets[key] = CandidateSet(tuple(cells.values()), tools)
    return found


def similarities(model: Network, rows: Rows, batch_size: int, temperature: float) -> Tensor:
    """The scaled cosines (n, K) of each row's anchor with the candidates of its set; -infinity for those left out."""
    from fedfm.tasks._pair_vectors import of_rows, singles

    if not isinstance(rows, PairRows) or not len(rows):
        return torch.zeros(0, 1)

    def compute(some: Rows) -> Tensor:
        return of_rows(model, some, batch_size)

    weights, anchors = _sha256_of(model), F.normalize(compute(singles(rows)), dim=-1)
    found = torch.full((len(rows), max(len(of.cells) for of in rows.sets)), -torch.inf)
    for s, mine in _by_set(rows):
        cosines = anchors[mine] @ rows.sets[s].vectors(weights, compute).T
        found[mine, : cosines.shape[1]] = cosines / temperature
    places = rows.tensors[LEFT_OUT]
    row, at = torch.nonzero(places >= 0, as_tuple=True)
    found[row, places[row, at]] = -torch.inf
    return found


def _by_set(rows: PairRows) -> Iterator[tuple[int, Tensor]]:
    """Each set that rows are in, and the indexes of its rows."""
    of = rows.tensors[SET]
    return ((int(s), torch.nonzero(of == s)[:, 0]) for s in torch.unique(of))


def _sha256_of(model: Network) -> str:
    """A hash of the tensors of the model that may change: those of an adapter, and those that are trained."""
    found = hashlib.sha256(str(id(model.module)).encode())
    for name, tensor in model.module.named_parameters():
        if tensor.requires_grad or ".lora_" in name:
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(to_bytes(tensor.detach().cpu().contiguous()))
    return found.hexdigest()


def count(logits: Tensor, rows: Rows) -> Sums:
    """The sums of the scores, from :func:`similarities`. A candidate as similar as the positive counts as nearer."""
    if not len(rows):
        return dict.fromkeys(("rows", "right", "in_first_5", "reciprocal_ranks", "gains", "loss_of_rows"), 0)
    logits = logits.double()
    own = logits.gather(1, rows.tensors[OWN][:, None])  # (n, 1)
    ranks = (~(logits < own)).sum(1).double()  # the row's own candidate counts as one; NaN is no right answer
    gains = torch.where(ranks <= _CUT, 1 / torch.log2(1 + ranks), 0.0)
    return {
        "rows": len(rows),
        "right": int((ranks == 1).sum()),
        "in_first_5": int((ranks <= _FIRST).sum()),
        "reciprocal_ranks": float((1 / ranks).sum()),
        "gains": float(gains.sum()),
        "loss_of_rows": float((torch.logsumexp(logits, 1) - own[:, 0]).sum()),
    }
