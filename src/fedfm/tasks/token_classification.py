"""Token classification: a list of words -> a tag for each, such as the names of persons and places.

Entities are counted as the script of the shared task counts them (Introduction to the CoNLL-2003 Shared Task. Tjong Kim
Sang, De Meulder. CoNLL 2003. conlleval): a predicted entity is right if its span and its type are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from fedfm.tasks._sums import mean
from fedfm.tasks.task import LORA, Column, Reading, RowKind, Scores, Sums, Task, Trained

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedfm.core.rows import Batch, Rows
    from fedfm.data.sources._sheet import Sheet
    from fedfm.data.spec import DataSpec
    from fedfm.data.table import Table
    from fedfm.models.network import Network
    from fedfm.models.preprocessors import Tools

Words = tuple[str, ...]
Span = tuple[int, int, str]  # first word, the word behind the last, type
Figures = dict[str, float]

OUTSIDE = "O"
_IGNORE = -100  # the target that does not count
_AT_ONCE = 256  # rows whose logits are in memory together
_NAMED = 3  # tags that a notice names
_PREFIX = re.compile(r"([BIESLU])(?:-(.*))?")
_SAME = {"L": "E", "U": "S"}  # BILOU's names of BIOES's prefixes
_DOCUMENT = "-DOCSTART-"  # marks the beginning of a document in CoNLL-2003
_BLANK = re.compile(" +")


def _parse(tag: str) -> tuple[str, str]:
    """Prefix and type: B, I, E, S, or O outside; a tag without a prefix is one of I."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    found = _PREFIX.fullmatch(tag)
    return (_SAME.get(found[1], found[1]), found[2] or "") if found else ("I", tag)


def spans(tags: Sequence[str]) -> list[Span]:
    """The entities of a sentence, as conlleval reads the tags: BIO, IOB1 and BIOES alike.

    Example:
        >>> spans(["B-PER", "I-PER", "O", "I-LOC", "B-LOC", "S-ORG"])
        [(0, 2, 'PER'), (3, 4, 'LOC'), (4, 5, 'LOC'), (5, 6, 'ORG')]
    """
    found: list[Span] = []
    before, of = OUTSIDE, ""
    for i, tag in enumerate(tags):
        prefix, name = _parse(tag)
        if prefix != OUTSIDE:
            begins = prefix in "BS" or before in "OES" or name != of
            start = i if begins else found.pop()[0]
            found.append((start, i + 1, name))
        before, of = prefix, name
    return found


@dataclass(frozen=True)
class TokenClassification(Task):
    """A new head gives each token a tag; the first token of a word stands for it."""

    name: ClassVar[str] = "token_classification"
    kinds: ClassVar[tuple[str, ...]] = ("tagged",)
    own_kind: ClassVar[RowKind | None] = RowKind("tagged", "words with tags", inputs=1)
    implied_by: ClassVar[tuple[str, ...]] = ("tagged",)
    columns: ClassVar[tuple[Column, ...]] = (
        Column("tokens", 'column of the words, each row a list, task "token_classification"'),
        Column("tags", 'column of the tags, each row a list, one tag for each word, task "token_classification"'),
    )
    endings: ClassVar[tuple[str, ...]] = (".conll", ".bio", ".iob", ".iob2", ".bioes")
    new_head: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True
    means_over_tokens: ClassVar[bool] = True
    softmax: ClassVar[bool] = True
    compared_by_row: ClassVar[bool] = True
    adaptations: ClassVar[tuple[str, ...]] = ("full", "top_layers", *LORA)
    figures: ClassVar[tuple[str, ...]] = ("precision", "recall", "f1")
    drawn: ClassVar[tuple[str, ...]] = ("f1",)
    sums: ClassVar[tuple[str, ...]] = ("words", "right_tags", "loss_of_words", "entities", "found", "right_entities")

    # --- rows ---------------------------------------------------------------------------------------------------------
    def claims(self, columns: Mapping[str, Any], spec: DataSpec) -> bool:
        return spec.column("tokens") in columns and spec.column("tags") in columns

    def sheet(self, text: str, source: str) -> Sheet:
        return _sheet(text, source)

    def read(self, sheet: Sheet, spec: DataSpec, *, source: str, labelled: bool) -> Reading:
        from fedfm.data.class_names import names_of
        from fedfm.data.sources._files import column

        words_in, tags_in = spec.column("tokens"), spec.column("tags")
        words = column(sheet.columns, words_in, "data.tokens", source)
        tags = column(sheet.columns, tags_in, "data.tags", source) if labelled else [[]] * len(words)
        known = names_of(sheet.names[tags_in], source) if tags_in in sheet.names else None
        rows: list[tuple[Words, Words]] = []
        for i in range(len(words)):
            said = _cells(words[i], sheet.at(i), words_in, "words")
            of = _tags(tags[i], sheet.at(i), tags_in, known) if labelled else ()
            if labelled and len(said) != len(of):
                raise _refusal(
                    f'{sheet.at(i)}: {len(said)} words in "{words_in}" and {len(of)} tags in "{tags_in}": each word '
                    "has one tag"
                )
            rows.append((said, of))
        classes = known or tuple(sorted({tag for _, of in rows for tag in of}, key=_order))
        return Reading("tagged", rows, frozenset({words_in, tags_in}), classes=classes if labelled else ())

    def shuffle_targets(self, rows: Table, rng: np.random.Generator) -> Table:
        tags = [tag for _, of in rows.inputs for tag in of]
        mixed = [tags[i] for i in rng.permutation(len(tags))]
        ends = list(accumulate(len(of) for _, of in rows.inputs))
        inputs = [
            (words, tuple(mixed[end - len(of) : end])) for (words, of), end in zip(rows.inputs, ends, strict=True)
        ]
        return replace(rows, inputs=inputs)

    def rows(self, part: Table, tools: Tools, classes: tuple[str, ...]) -> Rows:
        import torch

        from fedfm.core.rows import Rows
        from fedfm.models import word_tokens

        code = {tag: i for i, tag in enumerate(classes)}
        if unknown := sorted({tag for _, of in part.inputs for tag in of} - code.keys()):
            raise _refusal(f"{part.source or 'the data'}: tag {unknown[0]!r} is none of the model's classes")
        pieces = word_tokens.of([words for words, _ in part.inputs], tools)
        longest = int(pieces.tokens.length.max(initial=0))
        targets = torch.full((len(part), longest), _IGNORE)  # (n, L)
        for i, ((_, of), place) in enumerate(zip(part.inputs, pieces.places, strict=True)):
            for word, at in place.items():
                targets[i, at] = code[of[word]] if of else 0  # of rows to predict: where a word is
        pad = int(tools.tokenizer.pad_token_id or 0)
        return Rows({"targets": targets}, tokens=pieces.tokens, pad=pad, token_arguments=pieces.token_arguments)

    def forewarnings(self, parts: Mapping[str, Table], tools: Tools) -> list[str]:
        from fedfm.models import word_tokens

        found = []
        cut, total = 0, 0
        for part in parts.values():
            places = word_tokens.of([words for words, _ in part.inputs], tools).places
            cut += sum(len(words) - len(place) for (words, _), place in zip(part.inputs, places, strict=True))
            total += sum(len(words) for words, _ in part.inputs)
        if cut:
            found.append(
                f"{cut} of {total} words have no token among the first {tools.max_length} of their rows "
                "(model.max_length): they are neither trained on nor scored"
            )
        there = {name: {tag for _, of in part.inputs for tag in of} for name, part in parts.items()}
        if alone := sorted(there.get("test", set()) - there.get("training", set()), key=_order):
            more = f" and {len(alone) - _NAMED} more" if len(alone) > _NAMED else ""
            listed = ", ".join(f'"{tag}"' for tag in alone[:_NAMED])
            one = len(alone) == 1
            found.append(
                f"the tag{'' if one else 's'} {listed}{more} {'is' if one else 'are'} in test rows alone: no client "
                "can learn what no training row has"
            )
        tags = set[str]().union(*there.values()) - {OUTSIDE}
        if tags and not any(_PREFIX.fullmatch(tag) for tag in tags):
            found.append("no tag has a prefix such as B- or I-: neighbouring words of the same tag count as one entity")
        return found

    # --- model --------------------------------------------------------------------------------------------------------
    def auto_class(self, kind: str) -> str:
        return "TokenClassification"

    def peft_type(self, kind: str) -> str | None:
        return "TOKEN_CLS"

    def pipeline(self, kind: str) -> str | None:
        return "token-classification"

    def targets(self, model: Network, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        targets = batch["targets"][:, : logits.shape[1]].to(logits.device)  # (b, L)
        return logits.float().flatten(0, 1), targets.flatten()  # (b L, C), (b L,)

    def count_targets(self, batch: Batch) -> int:
        return int((batch["targets"] != _IGNORE).sum())

    def loss(self, model: Network, batch: Batch) -> Tensor:
        if self.count_targets(batch):
            return super().loss(model, batch)
        return model.logits(batch).float().sum() * 0.0  # no word of these rows has a token

    def predict(self, model: Network, rows: Rows, batch_size: int) -> Tensor:
        return model.in_batches(rows.to_padded(), batch_size)

    # --- scores -------------------------------------------------------------------------------------------------------
    def count(self, model: Network, rows: Rows, batch_size: int = 64) -> Sums:
        total: Figures = dict.fromkeys(self.sums, 0)
        for part in _parts(rows):
            for name, value in self._counts(part, model.predict(part, batch_size), model.classes).items():
                total[name] += value
        return total

    def count_of(self, model: Network, rows: Rows, logits: Tensor) -> Sums:
        return self._counts(rows, logits, model.classes)

    def _counts(self, rows: Rows, logits: Tensor, classes: tuple[str, ...]) -> Figures:
        """The sums of rows with logits (n, L, C)."""
        import torch.nn.functional as F

        targets = rows.tensors["targets"][:, : logits.shape[1]]  # (n, L)
        counts = targets != _IGNORE
        said = logits.argmax(-1)
        total: Figures = dict.fromkeys(self.sums, 0)
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

    def from_sums(self, sums: Mapping[str, float]) -> Scores:
        words, right = sums["words"], sums["right_entities"]
        return {
            "accuracy": mean(sums["right_tags"], words),
            "loss": mean(sums["loss_of_words"], words),
            **_of_entities(sums["entities"], sums["found"], right, words > 0),
        }

    # --- results ------------------------------------------------------------------------------------------------------
    def answer(self, trained: Trained, table: Table) -> dict[str, Any]:
        from fedfm.models import word_tokens

        model, warnings = trained.model, list[str]()
        tags: list[list[str | None]] = []
        entities: list[list[dict[str, Any]]] = []
        for start in range(0, len(table), _AT_ONCE):
            part = table.take(range(start, min(start + _AT_ONCE, len(table))))
            rows = trained.encode(model.prepare(part, range(len(part))))
            said = trained.logits(rows).argmax(-1)  # (n, L)
            sentences = [words for words, _ in part.inputs]
            for i, (words, place) in enumerate(
                zip(sentences, word_tokens.of(sentences, model.tools).places, strict=True)
            ):
                of = [model.classes[int(said[i, place[w]])] if w in place else None for w in range(len(words))]
                tags.append(of)
                # A word that is cut off ends what is before it.
                entities.append([_entity(words, span) for span in spans([tag or OUTSIDE for tag in of])])
        if cut := sum(of.count(None) for of in tags):
            warnings.append(
                f"{cut} words have no token among the first {model.tools.max_length} of their rows (model.max_length): "
                "their tag is null"
            )
        return {"tags": tags, "entities": entities, "words_cut": cut, "warnings": warnings}


def _parts(rows: Rows) -> Iterator[Rows]:
    """The rows in parts whose logits fit into memory."""
    return (rows.take(range(i, min(i + _AT_ONCE, len(rows)))) for i in range(0, len(rows), _AT_ONCE))


def _of_entities(entities: float, found: float, right: float, known: bool) -> Scores:
    """Precision, recall and F1; 0 where there is nothing to divide by, as of conlleval, and null without words."""
    if not known:
        return dict.fromkeys(("precision", "recall", "f1"))
    return {
        "precision": right / found if found else 0.0,
        "recall": right / entities if entities else 0.0,
        "f1": 2 * right / (entities + found) if entities + found else 0.0,
    }


def _entity(words: Words, span: Span) -> dict[str, Any]:
    """An entity as JSON: ``end`` is the word behind the last."""
    start, end, name = span
    return {"type": name, "start": start, "end": end, "text": " ".join(words[start:end])}


def _order(tag: str) -> tuple[bool, str]:
    """Tags in the order of their names, O first."""
    return tag != OUTSIDE, tag


def _refusal(text: str) -> Exception:
    from fedfm.errors import InputError

    return InputError(text)


def _as_list(value: Any) -> list[Any] | None:
    """The entries of a list, or of what Arrow gives for one; None: it is none."""
    if isinstance(value, list | tuple):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, str) else None


def _cells(value: Any, where: str, name: str, what: str) -> Words:
    """The words or tags of a row."""
    cells = _as_list(value)
    if cells is None:
        raise _refusal(f'{where}: column "{name}" holds {value!r:.40}: a list of {what} is expected')
    if not cells:
        raise _refusal(f'{where}: column "{name}" is empty: a list of {what} is expected')
    for i, cell in enumerate(cells):
        if not isinstance(cell, str) or not cell.strip():
            raise _refusal(f'{where}: entry {i} of "{name}" is {cell!r:.40}: {what} are texts that are not empty')
    return tuple(cells)


def _tags(value: Any, where: str, name: str, known: tuple[str, ...] | None) -> Words:
    """The tags of a row; numbers are places in ``known``, where the file names its tags, and else names themselves."""
    from fedfm.data.class_names import class_name

    cells = _as_list(value)
    if cells is None or not any(isinstance(cell, int) and not isinstance(cell, bool) for cell in cells):
        found = _cells(value, where, name, "tags")
    elif not all(isinstance(cell, int) and not isinstance(cell, bool) for cell in cells):
        raise _refusal(f'{where}: column "{name}" holds {value!r:.40}: numbers and names of tags are mixed')
    elif known is None:
        return tuple(map(str, cells))
    else:
        if bad := [cell for cell in cells if not 0 <= cell < len(known)]:
            raise _refusal(f'{where}: tag {bad[0]} in "{name}" is outside of 0..{len(known) - 1}, the tags of the file')
        return tuple(known[cell] for cell in cells)
    if known is not None and (unknown := [tag for tag in found if tag not in known]):
        raise _refusal(f'{where}: tag "{unknown[0]}" in "{name}" is none of the tags of the file')
    return tuple(map(class_name, found))


def _sheet(text: str, source: str) -> Sheet:
    """The sentences of a CoNLL file: a word a line, its tag in the last column, a blank line behind a sentence.

    A file of one column has words without tags. Lines that mark documents are not read, nor are comments: lines with #
    before a sentence that have another number of columns than the words, or end in what is no tag of another word.

    Raises:
        InputError: lines have different numbers of columns, or there is no word.
    """
    from fedfm.data.sources._sheet import Sheet

    lines = [_columns(line) for line in text.split("\n")]
    first = next((i for i, cells in enumerate(lines) if cells and not cells[0].startswith(("#", _DOCUMENT))), None)
    if first is None:
        raise _refusal(f"{source} holds no words: a word a line is expected, with its tag in the last column")
    width, marks, begun = len(lines[first]), 0, False
    known = {OUTSIDE} | {cells[-1] for cells in lines if len(cells) == width > 1 and not cells[0].startswith("#")}
    starts: list[int] = []  # lines
    sentences: list[list[list[str]]] = []
    for i, cells in enumerate(lines):
        if not cells:
            begun = False
        elif cells[0] == _DOCUMENT or (
            not begun and cells[0].startswith("#") and not (len(cells) == width and (width == 1 or cells[-1] in known))
        ):
            marks += 1
        elif len(cells) != width or "" in (cells[0], cells[-1]):
            raise _refusal(
                f"{source}, line {i + 1}: {sum(map(bool, cells))} filled columns where line {first + 1} has {width}: a "
                "line is a word, with its tag in the last column, and a blank line ends a sentence"
            )
        else:
            if not begun:
                starts.append(i + 1)
                sentences.append([])
            begun = True
            sentences[-1].append(cells)
    columns = {"tokens": [[cells[0] for cells in of] for of in sentences]}
    if width > 1:
        columns["tags"] = [[cells[-1] for cells in of] for of in sentences]
    notices = (f"{source}: lines of comments or {_DOCUMENT} are not read: {marks}",) if marks else ()
    return Sheet(columns, lambda row: f"{source}, line {starts[row]}", notices)


def _columns(line: str) -> list[str]:
    """The columns of a line, by tabs or else by blanks; none of a blank line."""
    if not line.strip():
        return []
    return [cell.strip() for cell in line.split("\t")] if "\t" in line.strip() else _BLANK.split(line.strip())
