"""Finds names of classes that are identifiers instead of words, or that a text encoder cannot tell apart."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from fedfm.errors import InputError
from fedfm.models.architectures.dual_encoder import DualEncoder, Prompts, words_of

_NUMBER = re.compile(
    r"(?:[a-z]{0,2}\d{2,}|\d+)(?:\s*[._:)-]\s*|\s+)\S*[^\W\d_]", re.IGNORECASE
)  # a number in front of a name
_YEAR = re.compile(r"(?:1[89]|20)\d\d\b")
_JOINED = re.compile(r"[^\W\d_A-Z][A-Z]")  # words that are joined without spaces, such as GoldenRetriever
_NAMES = re.compile(r"Ma?c[A-Z]|[ie][A-Z]")  # McDonald, MacBook, iPhone, eBay
_SAME = 1e-6  # largest difference of equal vectors, as a share of a vector's largest number
_SHARE = 0.2  # smallest share of the classes for a notice; there must be at least two such classes


def notices(classes: Sequence[str], templates: Sequence[str]) -> list[str]:
    """A notice about names that begin with a number, have capitals instead of spaces, or look like paths of files."""
    found = [i for i, name in enumerate(classes) if _is_identifier(name)]
    if len(found) < max(2, _SHARE * len(classes)):
        return []
    prompt = templates[0].format(words_of(classes)[found[0]])
    return [
        f"model.templates: {len(found)} of {len(classes)} names of classes look like identifiers and go into prompts "
        f'unchanged, for example "{prompt}"; '
        "if a caption would use other words, name the classes in words (a column data.label_name, or names as labels)"
    ]


def read_alike(prompts: Prompts, classes: Sequence[str]) -> list[str]:
    """A notice about classes whose prompts are the same tokens, since the tokenizer does not know their words."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, ids in zip(classes, prompts.input_ids[0].tolist(), strict=True):
        groups.setdefault(tuple(ids), []).append(name)
    alike = [names for names in groups.values() if len(names) > 1]
    if not alike:
        return []
    return [
        f"model.name: the tokenizer reads {sum(map(len, alike))} of {len(classes)} names of classes as the same "
        f'tokens, such as "{alike[0][0]}" and "{alike[0][1]}": the model cannot tell them apart by their names'
    ]


def check_read(dual: DualEncoder, prompts: Prompts, name: str) -> None:
    """Refuse a text encoder that computes the same vector for texts with different names of classes.

    A CLIP takes the vector at the end token that its configuration states. If no text has this token, the CLIP takes
    the vector at the first position, which is the same for all texts.

    Raises:
        InputError: two different prompts have the same vector.
    """
    ids, mask = prompts.input_ids[0], prompts.attention_mask[0]
    other = next((i for i in range(1, len(ids)) if not torch.equal(ids[i], ids[0])), None)
    if other is None or prompts.context:
        return
    with torch.no_grad():
        both = dual.eval().clip.get_text_features(input_ids=ids[[0, other]], attention_mask=mask[[0, other]])
    first, second = both.pooler_output.float()
    if torch.allclose(first, second, rtol=0, atol=_SAME * float(first.abs().max())):
        stated = getattr(dual.config.text_config, "eos_token_id", None)
        raise InputError(
            f"model.name: the text encoder of {name!r} gives the same vector for different names of classes: "
            f"eos_token_id of text_config in its config.json is {stated}, expected the token that its tokenizer puts "
            "last",
            key="model.name",
        )


def _is_identifier(name: str) -> bool:
    first = bool(_NUMBER.match(name.replace("_", " "))) and not _YEAR.match(name)
    joined = " " not in name and _JOINED.search(_NAMES.sub("", name)) is not None
    return first or joined or "/" in name.strip("/") or "\\" in name
