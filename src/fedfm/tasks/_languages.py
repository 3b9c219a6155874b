"""Sequence-to-sequence models: their classes, preprocessors, languages and generation settings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedfm.errors import InputError, close
from fedfm.models import refusals
from fedfm.models.families import unwrap
from fedfm.models.language.generation import stated_as_greedy
from fedfm.models.locate import stored_file
from fedfm.models.preprocessors import Tools
from fedfm.models.quiet import quiet
from fedfm.tasks import _sequence_rows

if TYPE_CHECKING:
    from fedfm.models.network import Network

_SPEECH = ("whisper",)  # ``model_type`` of the models that read recordings, all padded to one length
_ANY = "<|notimestamps|>"  # a token in the vocabulary of every Whisper
_CODE = re.compile(r"<\|([a-z]{2,3})\|>")


def model_class(config: Any) -> Any:
    """Transformers' class for a model of this configuration.

    Raises:
        InputError: the model is neither an encoder-decoder that reads texts nor a Whisper.
    """
    import transformers

    if config.model_type in _SPEECH:
        return transformers.AutoModelForSpeechSeq2Seq
    if config.is_encoder_decoder and type(config) in transformers.AutoModelForSeq2SeqLM._model_mapping:
        return transformers.AutoModelForSeq2SeqLM
    causal = not config.is_encoder_decoder and type(config) in transformers.AutoModelForCausalLM._model_mapping
    raise InputError(
        f'model.name: it is of type {config.model_type!r}, and model.task = "sequence_to_sequence" needs an '
        "encoder-decoder: a T5, a BART or an mBART for texts, a Whisper for recordings"
        + ('; a causal model learns with model.task = "instruction"' if causal else ""),
        key="model.name",
    )


def complete(tools: Tools, path: Path | str, config: Any, source: str | None, target: str | None) -> Tools:
    """The tools with the languages of the rows and, for a Whisper, with its feature extractor.

    Raises:
        InputError: the model needs a language that is not named, or does not know a language that is named; the feature
            extractor cannot be read, or does not fit the model.
    """
    tokenizer, notices = tools.tokenizer, list(tools.notices)
    if config.model_type in _SPEECH:
        extractor, more = _extractor(path, config)
        notices += more
        _set_spoken_language(tokenizer, _is_multilingual(path, tokenizer), source, target)
        tools = dataclasses.replace(tools, processor=extractor)
    elif hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang"):
        _set_languages(tokenizer, source, target)
    elif source or target:
        key = "source_language" if source else "target_language"
        raise InputError(
            f"model.{key}: the tokenizer of this model has no codes of languages; drop it, and name the language in "
            "the instruction if the model knows several",
            key=f"model.{key}",
        )
    if not _sequence_rows.ends_texts(tokenizer):
        notices.append(
            f"model.name: the tokenizer of {path} does not write its end token {tokenizer.eos_token} after a text: it "
            "is written after each output, so that answers end"
        )
    return dataclasses.replace(tools, notices=tuple(notices))


# --- recordings -------------------------------------------------------------------------------------------------------


def _extractor(path: Path | str, config: Any) -> tuple[Any, list[str]]:
    """The feature extractor of a Whisper, and a notice if it is guessed."""
    from transformers import AutoFeatureExtractor, WhisperFeatureExtractor

    if stored_file(path, "preprocessor_config.json") is None and stored_file(path, "processor_config.json") is None:
        found = WhisperFeatureExtractor(feature_size=config.num_mel_bins)
        notices = [
            f"model.name: {path} has no preprocessor_config.json: recordings are resampled to {found.sampling_rate} Hz "
            f"and described by {found.feature_size} mel bins, which may differ from the model's training"
        ]
    else:
        try:
            with quiet():
                found, notices = AutoFeatureExtractor.from_pretrained(path, trust_remote_code=False), []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"model.name: the feature extractor of {path} cannot be read: {refusals.first_of(error)}",
                key="model.name",
            ) from None
    window = 2 * config.max_source_positions
    sizes = getattr(found, "feature_size", None), getattr(found, "nb_max_frames", None)
    if sizes != (config.num_mel_bins, window):
        raise InputError(
            f"model.name: the feature extractor of {path} makes {sizes[0]} mel bins and {sizes[1]} frames of a "
            f"recording, and the model reads {config.num_mel_bins} and {window}: put the model's own "
            "preprocessor_config.json there",
            key="model.name",
        )
    return found, notices


def _is_multilingual(path: Path | str, tokenizer: Any) -> bool:
    """Whether a Whisper knows several languages, so that its decoder needs the language."""
    if not hasattr(tokenizer, "set_prefix_tokens"):
        return False
    import json

    file = stored_file(path, "generation_config.json")
    said = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    known: bool = said.get("is_multilingual", "<|de|>" in tokenizer.get_vocab())
    return known


def _set_spoken_language(tokenizer: Any, multilingual: bool, source: str | None, target: str | None) -> None:
    """Set the tokens before each output, which give a Whisper the language and the task."""
    if not multilingual:
        if source or target:
            key = "source_language" if source else "target_language"
            raise InputError(
                f"model.{key}: this Whisper knows one language, and its tokenizer has no codes of languages; drop it",
                key=f"model.{key}",
            )
        return
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    if source is None:
        raise InputError(
            "model.source_language: this Whisper knows several languages: name the one of the recordings, such as "
            '"english"',
            key="model.source_language",
        )
    for key, name in (("source_language", source), ("target_language", target or source)):
        if name.lower() not in {*TO_LANGUAGE_CODE, *TO_LANGUAGE_CODE.values()}:
            raise InputError(
                f'model.{key} = "{name}": no language of a Whisper{close(name.lower(), TO_LANGUAGE_CODE)}; expected a '
                'name or a code, such as "english" or "en"',
                key=f"model.{key}",
            )
    if _translates(source, target) and _whisper_code(target or "") != "en":
        raise InputError(
            f'model.target_language = "{target}": a Whisper translates to English alone; drop it, or set "english"',
            key="model.target_language",
        )
    tokenizer.set_prefix_tokens(language=_whisper_code(source), task=_whisper_task(source, target))


def _whisper_code(name: str) -> str:
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    return str(TO_LANGUAGE_CODE.get(name.lower(), name.lower()))


def _translates(source: str, target: str | None) -> bool:
    return target is not None and _whisper_code(target) != _whisper_code(source)


def _whisper_task(source: str, target: str | None) -> str:
    return "translate" if _translates(source, target) else "transcribe"


# --- translations -----------------------------------------------------------------------------------------------------


def _set_languages(tokenizer: Any, source: str | None, target: str | None) -> None:
    """Set the languages of a tokenizer that writes language codes, such as mBART's.

    Raises:
        InputError: a language is not named, or the tokenizer does not know it.
    """
    codes = _codes(tokenizer)
    for key, name in (("source_language", source), ("target_language", target)):
        if name is None:
            some = ", ".join(f'"{code}"' for code in codes[:3])
            raise InputError(
                f"model.{key}: the tokenizer of this model writes the languages of input and output into each row: "
                f"name both by their codes{f', such as {some}' if some else ''} (source_language, target_language)",
                key=f"model.{key}",
            )
        if _language_id(tokenizer, name) is None:
            raise InputError(
                f'model.{key} = "{name}": the tokenizer of this model has no such code'
                f"{close(name, codes) or _some(codes)}",
                key=f"model.{key}",
            )
    tokenizer.src_lang, tokenizer.tgt_lang = source, target
    tokenizer.init_kwargs = {**tokenizer.init_kwargs, "src_lang": source, "tgt_lang": target}  # for an export


def _some(codes: list[str]) -> str:
    return f"; it has {', '.join(codes[:5])} ..." if codes else ""


def _codes(tokenizer: Any) -> list[str]:
    """The codes of a tokenizer's languages."""
    if known := getattr(tokenizer, "lang_code_to_id", None):
        return sorted(known)
    return sorted(token for token in tokenizer.all_special_tokens if re.fullmatch(r"[a-z]{2,3}_[A-Za-z]{2,4}", token))


def _language_id(tokenizer: Any, code: str) -> int | None:
    """The id of a language's token; None if the tokenizer does not know the language."""
    known = getattr(tokenizer, "lang_code_to_id", None)
    found = known.get(code) if known else tokenizer.convert_tokens_to_ids(code)
    return None if found is None or found == tokenizer.unk_token_id else int(found)


# --- generation -------------------------------------------------------------------------------------------------------


def generation_settings(model: Network, source: str | None, target: str | None) -> dict[str, Any]:
    """The settings with which a model generates as it was trained: first and last tokens, length, and greedily.

    The first tokens are those of training: the decoder's first input, and the language's code as the first target.
    """
    tokenizer, module = model.tools.tokenizer, unwrap(model.module)
    own: Any = module.generation_config
    stops = sorted(ends(model))
    answer = _sequence_rows.outputs(["a"], model.tools).to_padded(0)  # (1, L)
    found: dict[str, Any] = {
        "decoder_start_token_id": int(_sequence_rows.shift(module, answer.to(model.device))[0, 0]),
        "eos_token_id": stops if len(stops) > 1 else next(iter(stops), None),
        "pad_token_id": tokenizer.pad_token_id,
        "max_length": None,
        "max_new_tokens": limit(model),
        **stated_as_greedy(model),
    }
    if model.tools.processor is None:
        if target is not None and hasattr(tokenizer, "tgt_lang"):
            first = int(answer[0, 0])
            found["forced_bos_token_id"] = first if first == _language_id(tokenizer, target) else None
        return found
    if source is None:
        return found | ({"no_timestamps_token_id": _id(tokenizer, _ANY)} if _id(tokenizer, _ANY) else {})
    vocabulary = tokenizer.get_vocab()
    languages = {token: i for token, i in vocabulary.items() if _CODE.fullmatch(token)}
    tasks = {name: vocabulary[f"<|{name}|>"] for name in ("transcribe", "translate")}
    return found | {
        "is_multilingual": True,
        "lang_to_id": getattr(own, "lang_to_id", None) or languages,
        "task_to_id": getattr(own, "task_to_id", None) or tasks,
        "no_timestamps_token_id": vocabulary[_ANY],
        "language": f"<|{_whisper_code(source)}|>",
        "task": _whisper_task(source, target),
        "forced_decoder_ids": None,
    }


def limit(model: Network) -> int:
    """The largest number of tokens that a model generates for an answer; the first tokens take positions, too."""
    most: int = model.task.answer_limit(model.tools)  # type: ignore[attr-defined]
    first = len(model.tools.tokenizer.prefix_tokens) if hasattr(model.tools.tokenizer, "set_prefix_tokens") else 1
    places = model.tools.positions
    return max(min(most, places - first), 1) if places else most


def _id(tokenizer: Any, token: str) -> int | None:
    found = tokenizer.get_vocab().get(token)
    return None if found is None else int(found)


def ends(model: Network) -> set[int]:
    """The tokens that end an answer."""
    module: Any = unwrap(model.module)
    stated, own = module.generation_config.eos_token_id, model.tools.tokenizer.eos_token_id
    listed: Iterable[int] = [stated] if isinstance(stated, int) else stated or ()
    return {*listed, *([] if own is None else [own])}


def greedy_settings(model: Network, settings: dict[str, Any]) -> Any:
    """A copy of the model's generation settings, made greedy and then changed by ``settings``."""
    import copy

    from fedfm.models.language.generation import GREEDY

    config = copy.deepcopy(unwrap(model.module).generation_config)
    for key, value in {**GREEDY, **settings}.items():
        setattr(config, key, value)
    config._from_model_config = False
    of = unwrap(model.module).config
    if (getattr(of, "num_decoder_layers", None) or 0) > getattr(of, "num_hidden_layers", 0):
        config.use_cache = False  # transformers' cache has a place for each layer of the encoder, and no more
    return config


def to_device(model: Network, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the model's device."""
    return {name: tensor.to(model.device) for name, tensor in tensors.items()}
