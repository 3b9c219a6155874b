"""A fingerprint of how a model's rows are prepared: its tokenizer, chat template and image processor.

Two copies of a model with the same weights and different tokenizers compute different values from the same rows. The
fingerprint covers the results and settings of the tools, not their files, because releases of transformers write
different files for the same tools.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from fedfm.models.preprocessing import token_argument_names
from fedfm.models.preprocessors import Tools
from fedfm.models.quiet import quiet

_PROBES = (
    "The quick, brown fox's 12.5 % jumps!  Over\tthe lazy dog.\n",
    "ÀÉ naïve straße İ ﬁ ½ A\u030a \u200b",
    "北京 東京 한국어 Русский العربية हिन्दी 🙂",
    "a",
    "",
)
_WITHOUT_EFFECT = (
    "auto_map",
    "video_processor",
    "data_format",
    "device",
    "input_data_format",
    "return_tensors",
    "processor_class",
)


def fingerprint(tools: Tools) -> str:
    """SHA-256 of the way in which rows become the model's inputs; for feature vectors, the hash of an empty table."""
    said: dict[str, Any] = {}
    if tools.processor is not None:
        said["image"] = _of_processor(tools.processor)
    elif tools.image is not None:
        said["image"] = getattr(tools.image, "settings", None)
    if tools.tokenizer is not None:
        said["text"] = _of_tokenizer(tools.tokenizer)
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def _of_processor(processor: Any) -> dict[str, Any]:
    """The class and settings; a setting of None counts as absent, since newer releases have more settings."""
    stated = {key: value for key, value in processor.to_dict().items() if value is not None and not key.startswith("_")}
    return {key: value for key, value in stated.items() if key not in _WITHOUT_EFFECT and not key.endswith("_type")} | {
        "kind": type(processor).__name__.removesuffix("Pil").removesuffix("Fast")
    }


def _of_tokenizer(tokenizer: Any) -> list[Any]:
    """The vocabulary, the ids of some texts, the special tokens, the chat template and the other token arguments."""
    with quiet():
        texts = [tokenizer(text)["input_ids"] for text in _PROBES]
        words = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    sides = tokenizer.padding_side, tokenizer.truncation_side
    special = tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id
    more = [[name, [tokenizer(text)[name] for text in _PROBES]] for name in token_argument_names(tokenizer)]
    return [texts, words, sides, special, getattr(tokenizer, "chat_template", None), *more]
