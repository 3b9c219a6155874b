"""Read words with tags from lists in two columns, or from the lines of a CoNLL file, and prepare them for a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from fedfm.core.row_kinds import Reading
from fedfm.core.rows import Rows
from fedfm.core.text import listing
from fedfm.data.class_names import class_name, names_of
from fedfm.data.invisible import is_blank
from fedfm.data.similar_names import spellings
from fedfm.data.sources._files import column
from fedfm.data.sources._sheet import Sheet
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.models import word_tokens
from fedfm.models.preprocessing import IGNORE
from fedfm.models.preprocessors import Tools
from fedfm.tasks import _tags

Words = tuple[str, ...]

# The types of chunks in CoNLL-2000 and CoNLL-2003.
_CHUNKS = frozenset(("NP", "VP", "PP", "ADVP", "SBAR", "ADJP", "PRT", "CONJP", "INTJ", "LST", "UCP"))
_DOCUMENT = "-DOCSTART-"  # marks the beginning of a document in CoNLL-2003
_BLANK = re.compile(" +")
_NAMED = 3  # number of tags that a notice names


def read(sheet: Sheet, spec: DataSpec, source: str, labelled: bool) -> Reading:
    """The rows of two columns, with the tags as classes.

    Raises:
        InputError: a cell is not a list of texts, or a row has different numbers of words and tags.
    """
    words_in, tags_in = spec.column("tokens"), spec.column("tags")
    words = column(sheet.columns, words_in, "data.tokens", source)
    tags = column(sheet.columns, tags_in, "data.tags", source) if labelled else [[]] * len(words)
    known = names_of(sheet.names[tags_in], source) if tags_in in sheet.names else None
    rows: list[tuple[Words, Words]] = []
    for i in range(len(words)):
        said = _cells(words[i], sheet.at(i), words_in, "words")
        of = _tags_of(tags[i], sheet.at(i), tags_in, known) if labelled else ()
        if labelled and len(said) != len(of):
            raise InputError(
                f'{sheet.at(i)}: {len(said)} words in "{words_in}" and {len(of)} tags in "{tags_in}": each word '
                "has one tag"
            )
        rows.append((said, of))
    classes = known or tuple(sorted({tag for _, of in rows for tag in of}, key=_tags.order))
    return Reading("tagged", rows, frozenset({words_in, tags_in}), classes=classes if labelled else ())


def forewarnings(parts: Mapping[str, Table], tools: Tools) -> list[str]:
    """Notices about words that are cut off, tags that only test rows have, and tags without prefixes."""
    found = []
    cut, total = 0, 0
    for part in parts.values():
        places = word_tokens.of([words for words, _ in part.inputs], tools).places
        cut += sum(len(words) - len(place) for (words, _), place in zip(part.inputs, places, strict=True))
        total += sum(len(words) for words, _ in part.inputs)
    if cut:
        found.append(
            f"{cut} of {total} words have no token among the {tools.max_length} that are read of their rows "
            "(model.max_length): they are neither trained on nor scored"
        )
    there = {name: {tag for _, of in part.inputs for tag in of} for name, part in parts.items()}
    if alone := sorted(there.get("test", set()) - there.get("training", set()), key=_tags.order):
        more = f" and {len(alone) - _NAMED} more" if len(alone) > _NAMED else ""
        listed = ", ".join(f'"{tag}"' for tag in alone[:_NAMED])
        one = len(alone) == 1
        found.append(
            f"the tag{'' if one else 's'} {listed}{more} {'is' if one else 'are'} in test rows alone: no client "
            "can learn a tag that no training row has"
        )
    tags = set[str]().union(*there.values()) - {_tags.OUTSIDE}
    bare = sorted(tag for tag in tags if not _tags.PREFIX.fullmatch(tag))
    if bare and len(bare) == len(tags):
        found.append("no tag has a prefix such as B- or I-: neighbouring words of the same tag count as one entity")
    elif bare:
        found.append(
            f"other tags have a prefix such as B- or I-, and {listing(bare, _NAMED)} have none: neighbouring words of "
            'such a tag count as one entity, so if it is a misspelt tag or marks no entity, correct it, e.g. to "O"'
        )
    if not spellings(sorted(tags), "tag"):  # else that notice says it
        found += spellings(sorted({name for tag in tags if (name := _tags.type_of(tag))}), "type")
    sentences = [of for part in parts.values() for _, of in part.inputs]
    two = "these are two notations, and a model learns both tags for the same words; write all tags in one"
    ended, left_open = _tags.count_ends(sentences)
    inside, begun = _tags.count_begins(sentences)
    if ended and left_open:
        found.append(
            f"{ended} of {ended + left_open} entities end with E-, S-, L- or U-, and the others with B- or I-: {two}"
        )
    elif inside and begun and not bare:
        found.append(f"{inside} of {inside + begun} entities begin with I-, and the others with B-: {two}")
    return found


def to_rows(part: Table, tools: Tools, classes: tuple[str, ...]) -> Rows:
    """Rows as tokens, with the target of each word at the place of its first token.

    Raises:
        InputError: a tag is none of the classes.
    """
    code = {tag: i for i, tag in enumerate(classes)}
    if unknown := sorted({tag for _, of in part.inputs for tag in of} - code.keys()):
        raise InputError(f"{part.source or 'the data'}: tag {unknown[0]!r} is none of the model's classes")
    pieces = word_tokens.of([words for words, _ in part.inputs], tools)
    longest = int(pieces.tokens.length.max(initial=0))
    targets = torch.full((len(part), longest), IGNORE)  # (n, L)
    for i, ((_, of), place) in enumerate(zip(part.inputs, pieces.places, strict=True)):
        for word, at in place.items():
            targets[i, at] = code[of[word]] if of else 0  # without tags, 0 marks the place of a word
    pad = int(tools.tokenizer.pad_token_id or 0)
    return Rows({"targets": targets}, tokens=pieces.tokens, pad=pad, token_arguments=pieces.token_arguments)


def presence(table: Table, classes: Sequence[str]) -> np.ndarray:
    """1 where a row has a word with a tag, else 0: (n, C)."""
    return np.array([np.isin(classes, of) for _, of in table.inputs], np.float64).reshape(len(table), len(classes))


def shuffle(rows: Table, rng: np.random.Generator) -> Table:
    """The rows, with the tags of all words randomly permuted."""
    tags = [tag for _, of in rows.inputs for tag in of]
    mixed = [tags[i] for i in rng.permutation(len(tags))]
    ends = list(accumulate(len(of) for _, of in rows.inputs))
    inputs = [(words, tuple(mixed[end - len(of) : end])) for (words, of), end in zip(rows.inputs, ends, strict=True)]
    return replace(rows, inputs=inputs)


def _as_list(value: Any) -> list[Any] | None:
    """The entries of a list, a tuple or an array; None for other values."""
    if isinstance(value, list | tuple):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, str) else None


def _cells(value: Any, where: str, name: str, what: str) -> Words:
    """The words or tags of a row."""
    cells = _as_list(value)
    if cells is None:
        raise InputError(f'{where}: column "{name}" holds {value!r:.40}: a list of {what} is expected')
    if not cells:
        raise InputError(f'{where}: column "{name}" is empty: a list of {what} is expected')
    for i, cell in enumerate(cells):
        if not isinstance(cell, str) or is_blank(cell):
            raise InputError(f'{where}: entry {i} of "{name}" is {cell!r:.40}: {what} are texts that are not empty')
    return tuple(cells)


def _tags_of(value: Any, where: str, name: str, known: tuple[str, ...] | None) -> Words:
    """The tags of a row. A number is an index into ``known``, the file's tags; if ``known`` is None, it is a name."""
    cells = _as_list(value)
    if cells is None or not any(isinstance(cell, int) and not isinstance(cell, bool) for cell in cells):
        found = _cells(value, where, name, "tags")
    elif not all(isinstance(cell, int) and not isinstance(cell, bool) for cell in cells):
        raise InputError(f'{where}: column "{name}" holds {value!r:.40}: numbers and names of tags are mixed')
    elif known is None:
        return tuple(map(str, cells))
    else:
        if bad := [cell for cell in cells if not 0 <= cell < len(known)]:
            raise InputError(
                f'{where}: tag {bad[0]} in "{name}" is outside of 0..{len(known) - 1}, the tags of the file'
            )
        return tuple(known[cell] for cell in cells)
    if known is not None and (unknown := [tag for tag in found if tag not in known]):
        raise InputError(f'{where}: tag "{unknown[0]}" in "{name}" is none of the tags of the file')
    return tuple(map(class_name, found))


def sheet_of(text: str, source: str) -> Sheet:
    """The sentences of a CoNLL file: one word per line, its tag in the last column, a blank line after a sentence.

    A file of one column has words without tags. A first column that counts the words of a sentence is skipped, and so
    are lines that mark documents, and comments. A notice says only what is a guess: which of several columns has the
    tags, and which lines are comments although they have as many columns as words. A comment
    stands before a sentence and begins with #. In addition, a comment has another number of columns than the lines of
    words, or its last column is not a tag of a word.

    Raises:
        InputError: lines have different numbers of columns, or there is no word.
    """
    lines = [_columns(line) for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    first = next((i for i, cells in enumerate(lines) if cells and not cells[0].startswith(("#", _DOCUMENT))), None)
    if first is None:
        raise InputError(f"{source} holds no words: one word per line is expected, with its tag in the last column")
    width, marks, begun = len(lines[first]), 0, False
    known = {_tags.OUTSIDE} | {cells[-1] for cells in lines if len(cells) == width > 1 and not cells[0].startswith("#")}
    starts: list[int] = []  # number of each sentence's first line
    sentences: list[list[list[str]]] = []
    for i, cells in enumerate(lines):
        if not cells:
            begun = False
        elif cells[0] == _DOCUMENT:
            continue
        elif (
            not begun and cells[0].startswith("#") and not (len(cells) == width and (width == 1 or cells[-1] in known))
        ):
            marks += len(cells) == width
        elif len(cells) != width or "" in (cells[0], cells[-1]):
            raise InputError(
                f"{source}, line {i + 1}: {sum(map(bool, cells))} filled columns where line {first + 1} has {width}: a "
                "line is a word, with its tag in the last column, and a blank line ends a sentence"
            )
        else:
            if not begun:
                starts.append(i + 1)
                sentences.append([])
            begun = True
            sentences[-1].append(cells)
    notices = []
    if marks:
        why = f"they begin with # and have {width} columns, as words have"
        notices.append(f"{source}: lines that are taken for comments and not read: {marks} ({why})")
    word = int(width > 1 and _count_words(sentences))  # then the words are in the second column
    columns = {"tokens": [[cells[word] for cells in of] for of in sentences]}
    if width > 2 + word and not _is_plain(sentences, word):
        row = " ".join(sentences[0][0])
        notices.append(
            f"{source}: of {width} columns, words are read from column {word + 1} and tags from the last; "
            f'from "{row:.60}" the word "{sentences[0][0][word]}" and the tag "{sentences[0][0][-1]}"'
        )
    if width > 1 + word:
        columns["tags"] = [[cells[-1] for cells in of] for of in sentences]
        words, tags = (len({cell for of in columns[key] for cell in of}) for key in ("tokens", "tags"))
        if tags > words:
            notices.append(
                f"{source}: the last column, read as tags, has {tags} different entries, and the column of words "
                f"{words}: does the file have its tags first?"
            )
    return Sheet(columns, lambda row: f"{source}, line {starts[row]}", tuple(notices))


def _is_plain(sentences: Sequence[Sequence[Sequence[str]]], word: int) -> bool:
    """Whether the last column has tags of entities, and no column between it and the words could be meant instead.

    Parts of speech could not, and neither could chunks, which CoNLL-2003 has between them and the entities.
    """

    def types(column: int) -> set[str] | None:
        found = {cells[column] for of in sentences for cells in of} - {_tags.OUTSIDE}
        return set(map(_tags.type_of, found)) if found and all(map(_tags.PREFIX.fullmatch, found)) else None

    between = [types(column) for column in range(word + 1, len(sentences[0][0]) - 1)]
    return types(-1) is not None and all(found is None or found <= _CHUNKS for found in between)


def _count_words(sentences: Sequence[Sequence[Sequence[str]]]) -> bool:
    """Whether the first column only numbers the words of each sentence, from 0 or 1, as in GermEval's files."""
    if max(map(len, sentences)) == 1:
        return False
    return any(all(cells[0] == str(i + start) for of in sentences for i, cells in enumerate(of)) for start in (0, 1))


def _columns(line: str) -> list[str]:
    """The columns of a line, split at tabs if it has any, else at blanks; [] for a blank line."""
    if not line.strip():
        return []
    return [cell.strip() for cell in line.split("\t")] if "\t" in line.strip() else _BLANK.split(line.strip())
