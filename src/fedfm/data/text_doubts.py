"""Notices about texts that are probably wrong: damaged characters, numbers or paths in place of language, marks of a
template, and answers without content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from fedfm.core import tasks
from fedfm.data.table import Table, inputs_of

_LOOKED_AT = 2000  # largest number of rows that are examined
_FEW = 8  # with fewer rows there is no notice
_SOME, _TIMES = 0.01, 3  # smallest share and number of damaged texts for a notice
_MOST = 0.5  # smallest share of texts that are not language, such as numbers, for a notice
_AGAIN = 0.05  # smallest share of answers that repeat their instruction, for a notice
_WORDS = 3  # an answer that begins with an instruction of at least this many words does not do so by chance

# UTF-8 that was read as Latin-1 or Windows-1252: pairs and triples of characters that occur in no language
_MISREAD = re.compile(
    "[\u00c3\u00c2][\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u0192\u2018-\u203a]|\u00e2\u20ac|\u00e2\u0080"
)
_LOST = "\ufffd"
_ESCAPE = re.compile(r"&(?:amp|lt|gt|quot|nbsp|apos|#\d{2,5}|#x[0-9a-fA-F]{2,4});")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f]")
_UNSEEN = re.compile("[\u200b\u2060\ufeff\u00ad\u202a-\u202e]")
_SPECIAL = re.compile(r"\[(?:CLS|SEP|PAD|MASK|UNK)\]|</?s>|<pad>|<\|endoftext\|>")  # special tokens of tokenizers
_LENGTH = 200  # texts of at least this many characters do not have equal lengths by chance
_ALL = 0.95  # smallest share of texts that counts as all texts; the rest may be errors
_ESCAPES = 0.1  # smallest share of texts with HTML escapes for a notice
_NO_LANGUAGE: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("numbers", re.compile(r"\s*[-+]?\d[\d.,]*(?:e[-+]?\d+)?\s*%?\s*", re.IGNORECASE)),
    ("Python's form of bytes", re.compile(r"b(['\"]).*\1", re.DOTALL)),
    (
        "paths of files",
        re.compile(
            r"(?:[A-Za-z]:\\|~?/|\.{1,2}/|\w+/)?(?:[^\s/\\]+[/\\])*[^\s/\\]+"
            r"\.(?:txt|html?|pdf|docx?|md|xml|png|jpe?g|gif|bmp|tiff?|webp|dcm|wav|flac|mp3|ogg|m4a)",
            re.IGNORECASE,
        ),
    ),
    ("addresses", re.compile(r"https?://\S+")),
    ("base64", re.compile(r"(?=[^\s]*\d)(?=[^\s]*[A-Z])(?=[^\s]*[a-z])[A-Za-z0-9+/_-]{24,}={0,2}")),
    ("identifiers", re.compile(r"(?=\S*\d)[0-9a-fA-F]{8,}(?:-[0-9a-fA-F]{4,})*")),
)
_FAILED = re.compile(r"#(?:REF!|VALUE!|DIV/0!|NAME\?|NUM!|NULL!)")
_ESCAPED = re.compile(r"\\n(?![a-z])")  # a line break that was escaped twice; not the beginning of a LaTeX command
_GAP = re.compile(r"\{\{?\s*[a-z_]+\s*\}?\}")  # a placeholder of a template that was not filled in
_TEMPLATE = re.compile(
    r"<\|(?:im_start|im_end|user|assistant|system|end|eot_id|start_header_id|end_header_id|begin_of_text|endoftext)\|>"
    r"|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|^### (?:Response|Assistant|Human|Instruction):|</s>",
    re.MULTILINE,
)
_OUTSIDE, _OF_ENTITY, _TWO = "O", re.compile(r"[BIESLUM]-.+"), 2
_CLASSES = 100  # largest number of classes whose names are searched for in texts
_COMPARED = 3  # number of parts of a row with two answers: prompt, better answer, worse answer


def notices(table: Table) -> tuple[str, ...]:
    """Notices about the texts of a table; in a large table, only rows at equal distances are examined."""
    of = tasks.row_kind(table.kind)
    if not (table.kind == "text" or (of is not None and of.wording)) or len(table) < _FEW:
        return ()
    places = np.unique(np.linspace(0, len(table) - 1, _LOOKED_AT).astype(np.int64))
    items = [table.inputs[int(i)] for i in places]
    texts = [" ".join(inputs_of(table.kind, item)) for item in items]
    where = f"{len(texts)} rows of {table.source}" + (" that were examined" if len(texts) < len(table) else "")
    found = [_damage(texts, where), _failures(texts, where)]
    if table.kind == "text":
        found += [_without_language(texts, where), _names(table, places, texts, where)]
        found += [_cut_texts(texts, where), _special(texts, where), _own_names(table, places, texts, where)]
    if of is not None and of.answered:
        found += [*_answers(items, where), _marks(items, where), _gaps(texts, where)]
        if all(len(item) == _COMPARED for item in items):
            found += [_contradictions(items, where), _same_worse(items, where)]
    if table.labels is None and table.targets is None and (text := _no_outside(table.classes, table.source)):
        found.append(text)
    if table.labels is None and table.targets is None and len(table.classes) == 1:
        found.append(f'all tags of {table.source} are "{table.classes[0]}": there is nothing to distinguish')
    return tuple(text for text in found if text)


def _no_outside(tags: Sequence[str], source: str) -> str | None:
    """A notice if no tag is O (outside of entities): another tag with this meaning counts as a type of entity."""
    if _OUTSIDE in tags or len(tags) < _TWO:
        return None
    plain = [tag for tag in tags if not _OF_ENTITY.fullmatch(tag)]
    if all(tag.isdecimal() for tag in tags):
        return (
            f'the tags of {source} are numbers, and none is "{_OUTSIDE}", the tag of words outside of entities: each '
            "number counts as a type of entity; write the names of the tags"
        )
    if not plain or len(plain) == len(tags):
        return None
    return (
        f'no tag of {source} is "{_OUTSIDE}", the tag of words outside of entities, and "{plain[0]}" counts as a type '
        f'of entity: if it means outside, write "{_OUTSIDE}"'
    )


def _count(texts: Sequence[str], holds: Callable[[str], object]) -> int:
    return sum(bool(holds(text)) for text in texts)


def _damage(texts: Sequence[str], where: str) -> str | None:
    least = max(_TIMES, _SOME * len(texts))
    if (n := _count(texts, _MISREAD.search)) >= least:
        sign = next(found[0] for text in texts if (found := _MISREAD.search(text)))
        return (
            f'{n} of {where} hold signs such as "{sign}", which come from UTF-8 read in another encoding: write the '
            "file again from its origin, as UTF-8"
        )
    if (n := _count(texts, lambda text: _LOST in text)) >= least:
        return f"{n} of {where} hold U+FFFD, the mark of an unreadable character: write the file again from its origin"
    if (n := _count(texts, _CONTROL.search)) >= least:
        return (
            f"{n} of {where} hold control characters, which terminals and broken exports write: remove them, since "
            "they are read as text"
        )
    if (n := _count(texts, _UNSEEN.search)) >= least:
        return (
            f"{n} of {where} hold invisible characters inside of words, such as zero-width spaces, which "
            "split the words: remove them"
        )
    if (n := _count(texts, _ESCAPE.search)) >= max(_TIMES, _ESCAPES * len(texts)):
        sign = next(found[0] for text in texts if (found := _ESCAPE.search(text)))
        return (
            f'{n} of {where} hold escapes of HTML, such as "{sign}": undo them with html.unescape, here and in rows to '
            "predict"
        )
    breaks = any("\n" in text for text in texts)
    if not breaks and (n := _count(texts, _ESCAPED.search)) >= max(_TIMES, _AGAIN * len(texts)):
        return (
            f"{n} of {where} hold a backslash and an n, and none has a line break: if line breaks were escaped twice, "
            "write the file again"
        )
    return None


def _failures(texts: Sequence[str], where: str) -> str | None:
    if (n := _count(texts, lambda text: _FAILED.fullmatch(text.strip()))) >= _TIMES:
        return f"{n} of {where} are what a spreadsheet writes where a formula fails, and are read as words"
    return None


def _without_language(texts: Sequence[str], where: str) -> str | None:
    for words, form in _NO_LANGUAGE:
        if (n := _count(texts, lambda text, form=form: form.fullmatch(text.strip()))) >= _MOST * len(texts):  # type: ignore[misc]
            return f"{n} of {where} are {words} and no texts: is data.text the column of the texts?"
    return None


def _names(table: Table, places: np.ndarray, texts: Sequence[str], where: str) -> str | None:
    """A notice if each text is the name of its class."""
    if table.labels is None or not table.classes:
        return None
    names = [table.classes[label] for label in table.labels[places]]
    if len(set(names)) < 2 or any(text.strip() != name for text, name in zip(texts, names, strict=True)):
        return None
    return f"the {where} are the names of their classes: is data.text the column of the texts?"


def _cut_texts(texts: Sequence[str], where: str) -> str | None:
    """A notice if another program seems to have cut texts: many have the largest length, or end with three dots."""
    if (n := _count(texts, lambda text: text.rstrip().endswith(("...", "\u2026", "[...]")))) >= _MOST * len(texts):
        return f"{n} of {where} end with three dots: are they the beginnings of longer texts?"
    longest = max(map(len, texts))
    n = _count(texts, lambda text: len(text) == longest)
    if longest < _LENGTH or n < max(_TIMES, _AGAIN * len(texts)) or len(set(map(len, texts))) == 1:
        return None
    return f"{n} of {where} have exactly {longest} characters, and none has more: has another program cut them?"


def _special(texts: Sequence[str], where: str) -> str | None:
    """A notice about special tokens inside texts, since a tokenizer adds its own."""
    if (n := _count(texts, _SPECIAL.search)) < max(_TIMES, _AGAIN * len(texts)):
        return None
    sign = next(found[0] for text in texts if (found := _SPECIAL.search(text)))
    return f'{n} of {where} hold special tokens, such as "{sign}", but a tokenizer adds its own: remove them'


def _own_names(table: Table, places: np.ndarray, texts: Sequence[str], where: str) -> str | None:
    """A notice if each text holds the name of its class and of no other class: the inputs then hold the label."""
    if table.labels is None or not 2 <= len(table.classes) <= _CLASSES:
        return None
    names = {i: re.compile(rf"(?<!\w){re.escape(name)}(?!\w)") for i, name in enumerate(table.classes)}
    labels = table.labels[places]
    if len(set(labels.tolist())) < 2 or any(
        text.strip() == table.classes[of] for text, of in zip(texts, labels, strict=True)
    ):
        return None
    own = sum(
        names[of].search(text) is not None and not any(n.search(text) for other, n in names.items() if other != of)
        for text, of in zip(texts, labels.tolist(), strict=True)
    )
    if own < _ALL * len(texts):
        return None
    return (
        f"{own} of {where} hold the name of their class, and of no other: if the label was written into them, remove it"
    )


def _answers(items: Sequence[tuple[object, ...]], where: str) -> list[str]:
    """Notices about answers (in preferences: better answers) that repeat the instruction, or are all the same."""
    pairs = [(_last_of(asked).strip(), _last_of(answer).strip()) for asked, answer, *_ in items]
    pairs = [(asked, answer) for asked, answer in pairs if answer]
    if len(pairs) < _FEW:
        return []
    again = sum(answer.startswith(asked) and len(asked.split()) >= _WORDS for asked, answer in pairs)
    again += sum(answer == asked and len(asked.split()) < _WORDS for asked, answer in pairs)
    found = []
    if again >= max(_TIMES, _AGAIN * len(pairs)):
        found.append(
            f"{again} answers of {where} begin with their whole instruction, and a model learns to repeat it: is "
            "data.output the column of the answers alone?"
        )
    if len({answer for _, answer in pairs}) == 1:
        found.append(f"all answers of {where} are the same text: a model learns to give it to any instruction")
    return found


def _last_of(part: object) -> str:
    """The part itself if it is a text, else the content of its last message."""
    if isinstance(part, str):
        return part
    return str(part[-1][1]) if isinstance(part, tuple) and part else ""


def _gaps(texts: Sequence[str], where: str) -> str | None:
    """A notice if most texts hold the same unfilled placeholder of a template."""
    first = next((found[0] for text in texts if (found := _GAP.search(text))), None)
    if first is None or (n := _count(texts, lambda text: first in text)) < _MOST * len(texts):
        return None
    return f'{n} of {where} hold "{first}", which seems to be a placeholder of a template that was not filled in'


def _contradictions(items: Sequence[tuple[object, ...]], where: str) -> str | None:
    """A notice if rows contradict each other: of two answers to a prompt, each is the better answer in some row."""
    there = {tuple(map(_last_of, item)) for item in items}
    n = sum((asked, worse, better) in there and better != worse for asked, better, worse in there)
    if n < max(_TIMES, _AGAIN * len(items)):
        return None
    return f"{n} of {where} say the opposite of another row, with the answers exchanged: no model learns both"


def _same_worse(items: Sequence[tuple[object, ...]], where: str) -> str | None:
    """A notice if all rows have the same worse answer, which a model recognises without reading the prompt."""
    if len({_last_of(worse).strip() for *_, worse in items}) > 1:
        return None
    return f"all rejected answers of {where} are the same text: a model learns only to avoid it"


def _marks(items: Sequence[tuple[object, ...]], where: str) -> str | None:
    """A notice about marks of a chat template inside of texts, since the model's template adds its own."""
    said = [
        found[0] for asked, answer, *_ in items if (found := _TEMPLATE.search(f"{_last_of(asked)}\n{_last_of(answer)}"))
    ]
    if len(said) < max(_TIMES, _AGAIN * len(items)):
        return None
    return (
        f'{len(said)} of {where} hold marks of a chat template, such as "{said[0]}", but the template of the model '
        "adds its own: remove them from instructions and answers"
    )
