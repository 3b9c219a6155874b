"""Finds the model's own generation settings that greedy answers follow, and the settings that they ignore."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fedfm.models.families import unwrap

if TYPE_CHECKING:
    from fedfm.models.model import Model
    from fedfm.models.network import Network

# These replace the settings of generation_config.json, so that each token of an answer is the model's likeliest token.
GREEDY: Mapping[str, Any] = MappingProxyType(
    {
        **{"do_sample": False, "num_beams": 1, "num_return_sequences": 1},
        **{"stop_strings": None, "max_time": None, "penalty_alpha": None, "dola_layers": None},
        **{"prompt_lookup_num_tokens": None, "token_healing": False, "is_assistant": False},
        **{"return_dict_in_generate": False},
    }
)
_SILENT = ("return_dict_in_generate", "num_return_sequences", "is_assistant")  # these change no answer
_FOLLOWED = (
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"),
    *("begin_suppress_tokens", "bad_words_ids", "sequence_bias", "guidance_scale", "watermarking_config"),
    *("exponential_decay_length_penalty",),
)
_READ_PADDING = (  # transformers (5.24) counts padding before a prompt as part of the prompt
    *("encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"),
    "forced_bos_token_id",
)
_ONE = ("num_beams", "repetition_penalty", "encoder_repetition_penalty", "guidance_scale")  # at 1 they have no effect
_LONGEST = 40  # number of a value's characters that a notice shows


def reads_padding(config: Any) -> bool:
    """Whether a setting treats padding as a part of the prompt, so that a batch may only have prompts of one length.

    Args:
        config: transformers' generation configuration of a model.
    """
    return any(_acts(key, getattr(config, key, None)) for key in _READ_PADDING)


def left_out(model: Model) -> str:
    """A notice if ``generation_config.json`` has settings that greedy answers ignore; "" if it has none.

    Answers are greedy, so that a row gets the same answer each time. The other settings of that file apply, such as
    a repetition penalty.
    """
    config = _config(model)
    odd = {key: getattr(config, key, None) for key in GREEDY if key not in _SILENT}
    asked = [f"{key} = {_text(value)}" for key, value in odd.items() if value != GREEDY[key] and _acts(key, value)]
    if not asked:
        return ""
    return (
        f"generation_config.json of the model has {' and '.join(asked)}, which `fedfm predict` ignores: it takes "
        "the likeliest token each time, as generate(do_sample=False, num_beams=1)"
    )


def settings_in_force(model: Model) -> str:
    """A notice if settings in ``generation_config.json`` make answers deviate from the likeliest tokens; else ""."""
    config = _config(model)
    found = {key: getattr(config, key, None) for key in _FOLLOWED}
    asked = [f"{key} = {_text(value)}" for key, value in found.items() if _acts(key, value)]
    if not asked:
        return ""
    return f"answers follow generation_config.json of the model, which has {', '.join(asked)}"


def stated_as_greedy(model: Network) -> dict[str, Any]:
    """What ``generation_config.json`` has to state for greedy answers, where the model's makers state nothing.

    transformers' pipelines draw texts, and search transcripts with five beams, unless that file says otherwise.
    """
    config = unwrap(model.module).generation_config
    return {key: GREEDY[key] for key in ("do_sample", "num_beams") if getattr(config, key, None) is None}


def _config(model: Model) -> Any:
    return getattr(model.module, "generation_config", None) if model.task.generates else None


def _acts(key: str, value: Any) -> bool:
    """Whether the setting has an effect with this value."""
    if key.endswith("_token_id"):
        return value is not None
    return bool(value) and not (key in _ONE and value == 1)


def _text(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
