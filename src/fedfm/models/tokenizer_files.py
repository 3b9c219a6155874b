"""Reads a model's tokenizer as its own file defines it.

For some model types transformers builds a tokenizer of a fixed class. Such a class takes the vocabulary of
``tokenizer.json`` but not the algorithm. So a WordLevel vocabulary becomes the vocabulary of a BPE without merges,
which finds none of the words in a text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fedfm.models.locate import stored_file, stored_table
from fedfm.models.preprocessors import AUTO

PLAIN = "PreTrainedTokenizerFast"  # a class that follows tokenizer.json
_FILE = "tokenizer.json"
_CONFIG, _MAP = "tokenizer_config.json", "special_tokens_map.json"
# An embedding often has spare rows. So ``of_another_model`` gives no notice if at most ``_ROUNDED`` rows have no token,
# or if more than the share ``_MOST`` of the rows have one.
_ROUNDED, _MOST = 64, 0.9
_FOLLOWS = ("TokenizersBackend", PLAIN)  # classes of transformers that follow tokenizer.json
_PHRASES = ("The fox", "THE FOX", "naïve Über", "b12 3456", "don't stop.", "(a-b)_c/d")
_TEMPLATE = "chat_template.jinja"
_LIKE_TEMPLATE = re.compile(r"chat\W?_?templ|\.jinja2?$", re.IGNORECASE)
_KIND = re.compile(r'"model"\s*:\s*\{\s*"type"\s*:\s*"(\w+)"')


def read(path: Path | str, name: str) -> tuple[Any, str, tuple[str, ...]]:
    """The tokenizer of a folder or a hub id, the name of the transformers class that reads it, and notices.

    Args:
        name: the model's name, for notices.

    Raises:
        OSError, ValueError, KeyError: transformers cannot read a tokenizer.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    stored, built = _stored_kind(path), _built_kind(tokenizer)
    if not stored or not built or stored == built:
        return tokenizer, AUTO, _splits_otherwise(path, tokenizer, name)
    own = type(tokenizer).__name__
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    return (
        tokenizer,
        PLAIN,
        (
            f"model.name: {_FILE} of {name!r} defines a {stored} tokenizer, but transformers' {AUTO} makes a {own}, a "
            f"{built} tokenizer that splits texts differently: fedfm follows the file, and an export needs {PLAIN}",
        ),
    )


def cls_notice(tokenizer: Any, name: str) -> tuple[str, ...]:
    """A notice if the tokenizer has a classification token (CLS) that it does not write into texts."""
    token = tokenizer.cls_token_id
    if token is None or token == tokenizer.bos_token_id or token in tokenizer("a")["input_ids"]:
        return ()
    return (
        f"model.name: the tokenizer of {name} has a classification token {tokenizer.cls_token} and does not write it "
        "into texts: a model that was trained with this token reads another token in its place",
    )


def choose_padding(tokenizer: Any, config: Any) -> None:
    """Set a tokenizer's padding token if it has none.

    The model's configuration gives the token, because classifiers of transformers find a text's end by that token. If
    the configuration names none, the tokenizer's end token is used, or else the tokenizer's unknown token.
    """
    if tokenizer.pad_token_id is not None:
        return
    stated = getattr(config, "pad_token_id", None)
    known = isinstance(stated, int) and 0 <= stated < len(tokenizer)
    tokenizer.pad_token = (
        tokenizer.convert_ids_to_tokens(stated) if known else tokenizer.eos_token or tokenizer.unk_token
    )


def _splits_otherwise(path: Path | str, tokenizer: Any, name: str) -> tuple[str, ...]:
    """A notice if the tokenizer's class normalises or splits words differently from ``tokenizer.json``.

    Some classes of transformers take their rules from ``tokenizer_config.json`` and from their own defaults, e.g. lower
    case. Tokens around each text, and unknown words, are not compared.
    """
    file, own = stored_file(path, _FILE), type(tokenizer).__name__
    if file is None or own in _FOLLOWS:
        return ()
    from tokenizers import Tokenizer

    try:
        stored = Tokenizer.from_file(str(file))
    except Exception:  # tokenizers has no error class of its own; another release wrote the file
        return ()
    stored.no_padding()
    stored.no_truncation()
    unknown = {tokenizer.unk_token_id, stored.token_to_id("<unk>")}
    for phrase in _PHRASES:
        found = (
            tokenizer(phrase, add_special_tokens=False)["input_ids"],
            stored.encode(phrase, add_special_tokens=False).ids,
        )
        ours, theirs = ([stored.id_to_token(i) for i in ids if i not in unknown] for ids in found)
        if theirs != ours:
            return (
                f"model.name: from the tokenizer of {name!r}, transformers makes a {own}, which reads {phrase!r} as "
                f"{ours}, and its {_FILE} says {theirs}: the {own} is used, also in an export; if the model was "
                f"trained with the file, correct tokenizer_config.json (such as do_lower_case), or set its "
                f'tokenizer_class to "{PLAIN}", which follows the file',
            )
    return ()


def contradictions(path: Path | str, tokenizer: Any, name: str) -> tuple[str, ...]:
    """A notice about special tokens that differ between two files of the folder."""
    tables = [_special_tokens(path, file) for file in (_CONFIG, _MAP)]
    odd = sorted(key for key in tables[0].keys() & tables[1].keys() if tables[0][key] != tables[1][key])
    if not odd:
        return ()
    said = ", ".join(
        f"{k} {tables[0][k]!r} and {tables[1][k]!r} ({getattr(tokenizer, k, None)!r} is used)" for k in odd
    )
    return (f"model.name: {_CONFIG} and {_MAP} of {name!r} differ: {said}; remove one",)


def of_another_model(tokenizer: Any, rows: int, name: str) -> tuple[str, ...]:
    """A notice if a tokenizer has far fewer tokens than the embedding has rows: it may belong to another model.

    Args:
        rows: the number of rows of the embedding.
    """
    if rows - len(tokenizer) <= _ROUNDED or len(tokenizer) > _MOST * rows:
        return ()
    return (
        f"model.name: the tokenizer of {name!r} has {len(tokenizer)} tokens, and the model's embedding has {rows} "
        "rows: is it the model's own tokenizer?",
    )


def templates(path: Path | str, tokenizer: Any, name: str) -> tuple[str, ...]:
    """Notices about files of the folder that have chat templates but are not read."""
    own, file = stored_table(path, _CONFIG).get("chat_template"), stored_file(path, _TEMPLATE)
    if isinstance(own, str) and file is not None and file.read_text(encoding="utf-8").strip() != own.strip():
        return (
            f"model.template: {_CONFIG} of {name!r} and its {_TEMPLATE} have different chat templates: {_TEMPLATE} is "
            "used",
        )
    if tokenizer.chat_template is not None or not isinstance(path, Path):
        return ()
    others = sorted(entry.name for entry in path.iterdir() if _LIKE_TEMPLATE.search(entry.name))
    if not others:
        return ()
    return (
        f"model.template: {name!r} has no chat template that a tokenizer reads, but it has {', '.join(others)}: "
        f"rename the file with the template to {_TEMPLATE}",
    )


def _special_tokens(path: Path | str, name: str) -> dict[str, str]:
    """The special tokens that a file names, by their role, such as ``pad_token``."""
    table = stored_table(path, name)
    found = {key: value for key, value in table.items() if key.endswith("_token") and not key.startswith("add_")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in found.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _stored_kind(path: Path | str) -> str:
    """The kind of tokenizer that the file names, such as "BPE"; empty if no file names one."""
    file = stored_file(path, _FILE)
    found = None if file is None else _KIND.search(file.read_text(encoding="utf-8"))
    return "" if found is None else found[1]


def _built_kind(tokenizer: Any) -> str:
    """The kind of tokenizer that transformers builds; empty if it is written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "" if backend is None else type(backend.model).__name__
