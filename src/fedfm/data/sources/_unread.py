"""Notices about unread columns that hold texts, mark splits, or name clients."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedfm.core.text import listing
from fedfm.data.pictures import Pictured
from fedfm.data.sources._splits import SPLIT_NAMES
from fedfm.data.spec import DataSpec

_LOOK = 1000  # number of rows that are examined
_SPLITS = 5  # largest number of different values of a column that marks splits
_SAYS = re.compile(r"(?:is[_ ]?)?(?:test|train|training|val|validation|holdout)(?:[_ ]?(?:set|row|split))?")
_FOLDS = re.compile(r"(?:cv|k)?[_ -]?(?:fold|split|set|subset|partition)s?(?:[_ -]?(?:id|nr|no|number|index))?")
_PART = re.compile(r"(?:fold|part|split|set)?[_ -]?(?:-?\d{1,2}|[a-z])")
_MOST_FOLDS = 20
_CLIENTS = re.compile(
    r"(?:client|silo|site|hospital|institution|institute|clinic|cent(?:er|re)|bank|organi[sz]ation)s?"
    r"(?:[_ -]?(?:id|nr|no|number|name|code))?"
)
_MOST_CLIENTS = 1000
_EXTEND = frozenset({"input", "context", "system", "history", "prompt"})  # names of columns that extend an input
_WORDS = 3  # smallest number of words of a text; shorter values are names


def notice_of_unread(
    columns: Mapping[str, Sequence[Any]], used: set[str], spec: DataSpec, source: str, *, labelled: bool
) -> tuple[str, ...]:
    """A notice about unread columns of texts, messages, lists and images, or with the name of a column that is read.

    Such names differ by case, or by blanks at their ends.

    Args:
        labelled: whether the rows have classes. If not, the notice also lists a column with the same text in all rows,
            which may be a common system message.
    """
    chosen = {spec.partition.column, *(spec.where or ())}
    others = {name: values for name, values in columns.items() if name and name not in used | chosen}
    found = [name for name, values in others.items() if _tells(values, alike=not labelled) or _extends(name, values)]
    read = {name.strip().casefold() for name in used & columns.keys() if name}
    found += [name for name in others if name not in found and name.strip().casefold() in read]
    if not found:
        return ()
    one = len(found) == 1
    return (f"column{'' if one else 's'} {listing(found, 6)} of {source} {'is' if one else 'are'} not read",)


def notices_of_marks(columns: Mapping[str, Sequence[Any]], spec: DataSpec, source: str) -> tuple[str, ...]:
    """Notices about unread columns that seem to mark test rows, or to name clients."""
    chosen = {spec.split, spec.label, spec.label_name, spec.partition.column, *(spec.where or ())}
    others = {name: values for name, values in columns.items() if name not in chosen}
    splits = (
        () if spec.split in columns else (_split_notice(name, values, spec, source) for name, values in others.items())
    )
    by_column = spec.partition.name in ("by_column", "flower") or spec.clients is not None
    clients = () if by_column else (_client_notice(name, values, source) for name, values in others.items())
    return tuple(text for some in (splits, clients) if (text := next(filter(None, some), None)))


def _split_notice(name: str, values: Sequence[Any], spec: DataSpec, source: str) -> str | None:
    """A notice about a column that marks test rows but is not ``data.split``, or that has numbers of folds."""
    if _numbers_folds(name, values):
        return (
            f'column "{name}" of {source} seems to number parts of the rows, as for cross-validation, and is not '
            f'read: other test rows are drawn; to test on one part, write a column "{spec.split}" with train and '
            "test, or choose parts by data.where"
        )
    if not _marks_splits(name, values):
        return None
    return (
        f'column "{name}" of {source} seems to mark training and test rows, and is not read: other test rows are '
        f'drawn; if it does mark them, name it "{spec.split}" or set data.split = "{name}"; its values must be train, '
        "val and test"
    )


def _client_notice(name: str, values: Sequence[Any], source: str) -> str | None:
    """A notice about a column that names clients, if rows are assigned to clients in another way."""
    if isinstance(values, Pictured) or not _CLIENTS.fullmatch(name.strip().lower()):
        return None
    found = {str(v) for v in values if v not in (None, "")}
    if not 2 <= len(found) <= _MOST_CLIENTS or 2 * len(found) > len(values):
        return None
    return (
        f'column "{name}" of {source} seems to name {len(found)} clients, and is not read to assign rows to clients; '
        f'data.partition = {{ name = "by_column", column = "{name}" }} makes each of them a client'
    )


def _numbers_folds(name: str, values: Sequence[Any]) -> bool:
    """Whether a column is called fold, split or the like, and has a few whole numbers or letters."""
    if isinstance(values, Pictured) or not _FOLDS.fullmatch(name.strip().lower()):
        return False
    found = {str(v).strip().lower().removesuffix(".0") for v in _some(values)}
    return 2 <= len(found) <= _MOST_FOLDS and all(_PART.fullmatch(v) for v in found)


def _marks_splits(name: str, values: Sequence[Any]) -> bool:
    """Whether the values are names of splits, including train, or are yes and no in a column named after a split."""
    if isinstance(values, Pictured):
        return False
    found = {str(v).strip().lower() for v in _some(values)}
    if len(found) > _SPLITS or len(found) < 2:
        return False
    named = {SPLIT_NAMES.get(v) for v in found}
    yes_or_no = found <= {"0", "1", "true", "false"}
    return (None not in named and "train" in named) or (yes_or_no and _SAYS.fullmatch(name.strip().lower()) is not None)


def _some(values: Sequence[Any]) -> Sequence[Any]:
    """Some values at equal distances in the column, since files are often sorted."""
    return values[:: max(1, len(values) // _LOOK)]


def _extends(name: str, values: Sequence[Any]) -> bool:
    """Whether a column has the name of one that extends an input, and is not empty: its texts may be single words."""
    filled = name.strip().lower() in _EXTEND and not isinstance(values, Pictured)
    return filled and any(isinstance(v, str) and v.strip() for v in values)


def _tells(values: Sequence[Any], *, alike: bool) -> bool:
    """Whether a column may be meant as input: images, lists, or texts (mostly different texts unless ``alike``)."""
    if isinstance(values, Pictured):
        return True
    some = [v for v in values[:_LOOK] if v not in (None, "", [], {})]
    if any(isinstance(v, list | dict) for v in some):
        return True
    texts = [v for v in some if isinstance(v, str) and len(v.split()) >= _WORDS]
    return 2 * len(texts) > len(some) and (alike or 2 * len(set(texts)) > len(texts))
