"""Read a model's tokenizer with the rules of its own file.

For some types of models transformers builds a tokenizer of the type's class with the words of ``tokenizer.json`` but
ignores its rules: the words of a WordLevel become those of a BPE without merges, which finds none of them in a text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fedfm.models.locate import stored_file
from fedfm.models.preprocessors import AUTO

PLAIN = "PreTrainedTokenizerFast"  # follows tokenizer.json
_FILE = "tokenizer.json"
_KIND = re.compile(r'"model"\s*:\s*\{\s*"type"\s*:\s*"(\w+)"')


def read(path: Path | str, name: str) -> tuple[Any, str, tuple[str, ...]]:
    """(tokenizer, the class of transformers that reads it, notices) of a folder or a hub id.

    Args:
        name: of the model, for notices.

    Raises:
        OSError, ValueError, KeyError: transformers cannot read a tokenizer.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    stored, built = _stored_kind(path), _built_kind(tokenizer)
    if not stored or not built or stored == built:
        return tokenizer, AUTO, ()
    own = type(tokenizer).__name__
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    return (
        tokenizer,
        PLAIN,
        (
            f"model.name: {_FILE} of {name!r} is of the kind {stored}, and transformers' {AUTO} makes a {own} of the "
            f"kind {built} of it, which splits texts differently: fedfm follows the file, and an export needs {PLAIN}",
        ),
    )


def cls_notice(tokenizer: Any, name: str) -> tuple[str, ...]:
    """A notice if the tokenizer has a token that stands for the whole text, and writes it in no text."""
    token = tokenizer.cls_token_id
    if token is None or token == tokenizer.bos_token_id or token in tokenizer("a")["input_ids"]:
        return ()
    return (
        f"model.name: the tokenizer of {name} has a token {tokenizer.cls_token} for the whole text and writes it in "
        "none: a model that was trained with it reads another token in its place",
    )


def _stored_kind(path: Path | str) -> str:
    """The kind of tokenizer that the file names, such as "BPE"; empty if no file names one."""
    file = stored_file(path, _FILE)
    found = None if file is None else _KIND.search(file.read_text(encoding="utf-8"))
    return "" if found is None else found[1]


def _built_kind(tokenizer: Any) -> str:
    """The kind of tokenizer that transformers builds; empty if it is written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "" if backend is None else type(backend.model).__name__
