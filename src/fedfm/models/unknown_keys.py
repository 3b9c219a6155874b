"""Finds misspelt keys in a model's files: the class does not read such a key, but reads a similar key that is absent.

transformers keeps an unknown key as an attribute, and uses the default of the key that was meant. Unknown keys that are
similar to no known key are common, e.g. those of older releases. They are not a mistake and are not reported.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedfm.models.locate import stored_table

_ALIKE = 0.87  # smallest ratio (difflib) of similar keys, without case and underscores; about one letter may differ
_LONGER = 2  # largest number of letters by which one of two similar keys is longer
_SHORTEST = 6  # smallest number of letters of a key that is checked; shorter keys are similar by chance
_OF_OTHERS = (
    "_id",
    "_ids",
    "_file",
    "_type",
)  # the ends of keys that other programs write into a tokenizer's file
_OF_TOKENIZERS = frozenset(  # keys that transformers reads for all tokenizers
    (
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        *("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder", "split_special_tokens"),
        *("model_max_length", "padding_side", "truncation_side", "model_input_names", "chat_template"),
        *("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces", "tokenizer_class"),
    )
)


def of_configuration(path: Path | str, config: Any) -> list[str]:
    """Texts about keys that are probably misspelt in ``config.json``, with the values that are used instead."""
    return [f"has {text}" for text in _faults(stored_table(path, "config.json"), config, "", "config.json")]


def of_image_processor(path: Path | str, processor: Any) -> list[str]:
    """As :func:`of_configuration`, for the settings of the image processor."""
    from fedfm.models import processor_files

    tables = processor_files.settings(path)
    return [f"has {text}" for file, table in tables.items() for text in _faults(table, processor, "", file)]


def of_tokenizer(path: Path | str, tokenizer: Any) -> list[str]:
    """As :func:`of_configuration`, for ``tokenizer_config.json``."""
    file = "tokenizer_config.json"
    table = {key: value for key, value in stored_table(path, file).items() if not key.endswith(_OF_OTHERS)}
    return [f"has {text}" for text in _faults(table, tokenizer, "", file)]


def of_generation(path: Path | str) -> list[str]:
    """As :func:`of_configuration`, for ``generation_config.json``."""
    from transformers import GenerationConfig

    file = "generation_config.json"
    return [f"has {text}" for text in _faults(stored_table(path, file), GenerationConfig(), "", file)]


def _faults(table: Mapping[str, Any], read: Any, within: str, file: str) -> Iterator[str]:
    """A text for each misspelt key, including the keys of nested configurations."""
    parts = getattr(read, "sub_configs", {})
    known = _keys_of(read) | set(parts)
    absent = {_plain(name): name for name in sorted(known - set(table)) if len(name) >= _SHORTEST}
    for key in table:
        if key in known or key.startswith("_") or len(key) < _SHORTEST:
            continue
        plain = _plain(key)
        near = difflib.get_close_matches(plain, absent, n=1, cutoff=_ALIKE)
        if not near or abs(len(near[0]) - len(plain)) > _LONGER or _takes(read, key):
            continue
        name = absent[near[0]]
        if not _is_another_token(key, name):
            yield (
                f'"{within}{key}" in its {file}, which is not read; "{within}{name}" is absent and counts as '
                f"{_value(read, name)!r:.60}: correct the key, or remove it"
            )
    for name in parts:
        part, inner = vars(read).get(name), table.get(name)
        if part is not None and isinstance(inner, Mapping):
            yield from _faults(inner, part, f"{within}{name}.", file)


def _is_another_token(key: str, name: str) -> bool:
    """Whether two names of special tokens differ in a letter of their role, as ``boi_token`` and ``bos_token`` do."""
    both = key.endswith("_token") and name.endswith("_token")
    return both and len(key) == len(name) and sorted(key) != sorted(name)


def _value(read: Any, name: str) -> Any:
    """The value that is used for a key that is absent."""
    found = vars(read).get(name, getattr(type(read), name, None))
    if found is None or isinstance(found, property):
        found = getattr(read, name, None)
    if found is None:
        for kind in type(read).__mro__:
            default = inspect.signature(kind).parameters.get(name) if "__init__" in vars(kind) else None
            if default is not None and default.default is not inspect.Parameter.empty:
                return default.default
    return found


def _keys_of(read: Any) -> set[str]:
    """All keys that the class of a configuration or a processor reads, under each of their names."""
    kind = type(read)
    try:
        defaults = set(kind().to_dict())
    except Exception:  # an argument of the class has no default
        defaults = set()
    named = {name for of in kind.__mro__ for name in getattr(of, "__annotations__", ())}
    named |= set(getattr(getattr(kind, "valid_kwargs", None), "__annotations__", ()))
    named |= _OF_TOKENIZERS if hasattr(read, "padding_side") else set()
    arguments = (inspect.signature(of).parameters for of in kind.__mro__ if "__init__" in vars(of))
    return defaults | named | {name for some in arguments for name in some} | set(getattr(kind, "attribute_map", {}))


def _takes(read: Any, key: str) -> bool:
    """Whether the code of the class contains the key, e.g. because it still accepts a key of older releases."""
    try:
        source = inspect.getsource(sys.modules[type(read).__module__])
    except (OSError, KeyError, TypeError):
        return False
    return f'"{key}"' in source or f"'{key}'" in source


def _plain(key: str) -> str:
    return key.replace("_", "").lower()
