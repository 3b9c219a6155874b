"""Find in which scripts, languages and letters the texts of a table are written, and compare two tables."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedfm.data.table import Table, inputs_of

_INPUT = "### Input:"  # the heading between an instruction and its input
_LOOKED_AT = 500  # largest number of rows that are examined
_LONG = 1000  # number of characters of a text that are examined
_FEW = 8  # smallest number of texts for a comparison of languages, letters and tags
_SOME = 4  # with fewer new texts whose language is recognised, there is no notice about their language
_MOST, _RARE = 0.8, 0.05  # share that counts as most texts, and share that counts as hardly any
_SURE = 2  # smallest number of function words that decides a text's language
_WORDS = re.compile(r"[^\W\d_]+")
_TAGS = re.compile(r"</?[a-zA-Z][a-zA-Z0-9]{0,9}(?:\s[^<>]*)?/?>")

# Frequent words of each language; a word that is listed for two languages decides nothing
_FUNCTION_WORDS = {
    "English": "the and of to is that with for this was are be it you have not what",
    "German": "der die das und nicht mit von zu den eine auf wird wurde ich einen dem",
    "French": "le les et est des une dans pour qui sur pas avec vous je au ce du",
    "Spanish": "el los y es que una por las con para del no como pero su al mi",
    "Italian": "il di che e non per una sono della del gli con si ma ho nel alla",
    "Portuguese": "o os e que uma não com para do da em um por mais na no se",
    "Dutch": "de het een en van is niet dat op te zijn met voor ik aan er maar",
}
_OF_WORD: dict[str, str] = {
    word: language
    for language, words in _FUNCTION_WORDS.items()
    for word in words.split()
    if sum(word in other.split() for other in _FUNCTION_WORDS.values()) == 1
}


def habits(table: Table) -> dict[str, Any]:
    """Shares of a table's texts, rounded to tenths: per script, per language, with capital letters, with HTML tags."""
    places = np.unique(np.linspace(0, len(table) - 1, _LOOKED_AT).astype(np.int64)) if len(table) else ()
    texts = [" ".join(inputs_of(table.kind, table.inputs[int(i)])).replace(_INPUT, " ")[:_LONG] for i in places]
    languages = [of for text in texts if (of := language_of(text))]
    return {
        "texts": min(len(texts), _FEW),
        "decided": min(len(languages), _FEW),
        "scripts": _shares(of for text in texts if (of := script_of(text))),
        "languages": _shares(languages),
        "capitals": _share(text != text.lower() for text in texts),
        "tags": _share(_TAGS.search(text) is not None for text in texts),
    }


def differences(trained: Mapping[str, Any], now: Mapping[str, Any], source: str) -> list[str]:
    """Notices about texts that are written differently from the texts of the training rows.

    Args:
        trained, now: the results of :func:`habits` for the training rows and for the new texts.
    """
    if script := _new(trained["scripts"], now["scripts"]):
        return [
            f"the texts of {source} are written in {_WORDS_OF.get(script, script.title())} letters, and those of the "
            f"training rows in {_main(trained['scripts'])}: the model has not seen such texts"
        ]
    found = []
    of = _new(trained["languages"], now["languages"])
    if of and now["decided"] >= _SOME and trained["decided"] >= _FEW:
        found.append(
            f"the texts of {source} seem to be {of}, and those of the training rows {_main(trained['languages'])}: "
            "the model has not seen such texts"
        )
    for key, words in (("capitals", "capital letters"), ("tags", "tags of HTML")):
        was, are = trained[key], now[key]
        if min(trained["texts"], now["texts"]) < _FEW or min(was, are) > _RARE or max(was, are) < _MOST:
            continue
        has, lacks = ("the training rows", source) if was > are else (source, "the training rows")
        found.append(f"the texts of {has} have {words}, and those of {lacks} have none: prepare both in the same way")
    return found


def language_of(text: str) -> str | None:
    """The language of most function words in a text; None if they are too few, or two languages are similarly frequent.

    Example:
        >>> language_of("this was not what I have seen"), language_of("xyz")
        ('English', None)
    """
    found = Counter(_OF_WORD[w] for word in _WORDS.findall(text) if (w := word.lower()) in _OF_WORD).most_common(2)
    if not found or found[0][1] < _SURE or (len(found) > 1 and found[0][1] < 2 * found[1][1]):
        return None
    return found[0][0]


def script_of(text: str) -> str | None:
    """The script of most letters of a text, as Unicode names it; None without letters.

    Example:
        >>> script_of("Привет, world!!"), script_of("12")
        ('CYRILLIC', None)
    """
    found = Counter(_script(c) for c in text if c.isalpha()).most_common(1)
    return found[0][0] if found else None


_WORDS_OF = {"CJK": "Chinese or Japanese", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean"}


@functools.lru_cache(maxsize=4096)
def _script(character: str) -> str:
    return unicodedata.name(character, "?").split(" ", 1)[0].split("-", 1)[0]


def _shares(of: Iterable[str]) -> dict[str, float]:
    counts = Counter(of)
    return {name: share for name, n in sorted(counts.items()) if (share := round(n / counts.total(), 1))}


def _share(holds: Iterable[bool]) -> float:
    each = list(holds)
    return round(sum(each) / max(len(each), 1), 1)


def _main(shares: Mapping[str, float]) -> str:
    name = max(shares, key=shares.__getitem__)
    return _WORDS_OF.get(name, name.title() if name.isupper() else name)


def _new(trained: Mapping[str, float], now: Mapping[str, float]) -> str | None:
    """The script or language that most texts have and hardly any training text has; None if there is none."""
    if not trained or not now:
        return None
    name = max(now, key=now.__getitem__)
    return name if now[name] >= _MOST and trained.get(name, 0.0) <= _RARE else None
