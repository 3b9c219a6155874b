"""Encoder-decoder models. They may classify texts or write texts, but they are not causal language models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfm.errors import InputError

if TYPE_CHECKING:
    from fedfm.models.model_task import ModelTask

_START = "decoder_start_token_id"
_BY_LANGUAGE = ("mbart", "plbart")  # the decoder starts with the code of the row's target language


def prepare(config: Any, path: Path | str, name: str, task: ModelTask) -> None:
    """Set the decoder's start token in the configuration of an encoder-decoder.

    Raises:
        InputError: the model does not fit the task, or no file names the token.
    """
    what = f"model.name: {name!r} is of type {config.model_type!r}, an encoder-decoder"
    if task.is_language_model:
        raise InputError(
            f'{what}, whose decoder needs its encoder\'s output: model.task = "{task}" needs a causal '
            "model, such as a llama or a gpt2"
        )
    if getattr(config, _START, None) is not None or (task.generates and config.model_type in _BY_LANGUAGE):
        return
    file = Path(path) / "generation_config.json"
    start = json.loads(file.read_text(encoding="utf-8")).get(_START) if file.is_file() else None
    if not isinstance(start, int):
        raise InputError(
            f"{what}, and its config.json does not name the decoder's start token: put {_START} there, "
            "with the value of the model's makers (for a T5 the id of the padding token)"
        )
    config.decoder_start_token_id = start
