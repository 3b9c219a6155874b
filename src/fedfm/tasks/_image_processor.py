"""Load a model's processor: its tokenizer, its image processor, and the rule that writes images as tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedfm.errors import InputError, MissingExtra, first_line
from fedfm.models import preprocessing, processor_files, refusals, unknown_keys
from fedfm.models.locate import stored_table
from fedfm.models.quiet import quiet

_FILE, _VIDEO_FILE = "processor_config.json", "video_preprocessor_config.json"
_VIDEO = "video_processor"
_NUMBERS, _EXTRA = "num2words", 'pip install "fedfm[vision]"'  # SmolVLM writes the numbers of a video in words
# attributes of processors with tokens for images: tokens in a text, or tokens that replace an image
_TOKENS = (
    *("image_token", "video_token", "boi_token", "eoi_token", "fake_image_token", "global_image_tag"),
    *("global_image_token", "image_break_token", "image_end_token", "start_image_token", "end_image_token"),
)


def read(path: Path | str, name: str, config: Any, tokenizer: Any) -> tuple[Any, tuple[str, ...]]:
    """The processor of a model that reads texts and images, with this tokenizer, and notices about its image settings.

    Pillow prepares the images, as for all other tasks, so that pixels do not depend on torchvision. The part for videos
    needs torchvision; without torchvision, this part is left out.

    Args:
        name: the model's name in messages.

    Raises:
        InputError: the model does not read texts with images, or its processor cannot be read.
        MissingExtra: its processor needs a package that is not installed.
    """
    import transformers

    if type(config) not in transformers.AutoModelForImageTextToText._model_mapping:
        raise InputError(
            f"model.name: {name!r} is of type {config.model_type!r}, which does not read texts with images: expected a "
            "model such as LLaVA, Qwen-VL, SmolVLM or Gemma 3",
            key="model.name",
        )
    with quiet():
        try:
            found = _load(path)
            images = transformers.AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=False)
        except ImportError as error:
            if _NUMBERS in str(error):
                raise MissingExtra(f"model.name: the processor of {name!r} needs {_NUMBERS}: {_EXTRA}") from None
            raise _unread(name, f"{refusals.first_of(error)}; install what it names") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unread(name, refusals.first_of(error)) from None
    if not hasattr(found, "image_processor") or not hasattr(found, "tokenizer"):
        raise _unread(name, f"{type(found).__name__} does not prepare texts with images")
    found.image_processor, found.tokenizer = images, tokenizer
    if getattr(tokenizer, "chat_template", None) is None:
        tokenizer.chat_template = _template(found, name)
    scale = preprocessing.check_scale(images, name)
    faults = [*processor_files.notices(path, images), *unknown_keys.of_image_processor(path, images)]
    return found, (*scale, *(f"model.name: {path} {text}" for text in faults))


def tokens_of(processor: Any) -> tuple[str, ...]:
    """The tokens that stand for images; a model would read a text with one of them as an image."""
    found = (getattr(of, key, None) for of in (processor, processor.tokenizer) for key in _TOKENS)
    more = getattr(processor, "all_special_multimodal_tokens", ())
    return tuple(dict.fromkeys(str(token) for token in (*found, *more) if token))


def about_videos(folder: Path) -> str:
    """What ``AutoProcessor`` needs to load the processor in this folder; empty if it reads no videos."""
    kind = _class_of(folder)
    if kind is None or _VIDEO not in kind.get_attributes():
        return ""
    return "`AutoProcessor` needs torchvision for the part of this processor that reads videos."


def _load(path: Path | str) -> Any:
    from transformers import AutoProcessor
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        return AutoProcessor.from_pretrained(path, trust_remote_code=False)
    kind = _class_of(path)
    if kind is None or _VIDEO not in kind.get_attributes():
        return AutoProcessor.from_pretrained(path, trust_remote_code=False)
    return _without_video(kind, _settings_of_video(path)).from_pretrained(path, trust_remote_code=False)


def _class_of(path: Path | str) -> Any:
    """The class of the processor by the model's files; None if the files name no class of transformers."""
    import transformers

    for file in (_FILE, "tokenizer_config.json", "preprocessor_config.json"):
        name = stored_table(path, file).get("processor_class")
        if isinstance(name, str) and hasattr(transformers, name):
            return getattr(transformers, name)
    return None


def _settings_of_video(path: Path | str) -> dict[str, Any]:
    inside = stored_table(path, _FILE).get(_VIDEO)
    return inside if isinstance(inside, dict) else stored_table(path, _VIDEO_FILE)


def _without_video(kind: Any, settings: dict[str, Any]) -> Any:
    """A class like ``kind`` that neither loads nor uses the part for videos, but saves this part's settings."""

    class WithoutVideo(kind):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != _VIDEO]

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **settings: Any) -> list[Any]:
            found: list[Any] = super()._get_arguments_from_pretrained(*args, **settings)
            return [*found[: (at := kind.get_attributes().index(_VIDEO))], None, *found[at:]]

        def to_dict(self) -> dict[str, Any]:
            found: dict[str, Any] = super().to_dict()
            return found | ({_VIDEO: settings} if settings else {})

    WithoutVideo.__name__ = WithoutVideo.__qualname__ = kind.__name__  # saved files have this name
    return WithoutVideo


def _template(processor: Any, name: str) -> str:
    """The processor's chat template, for a tokenizer that has none."""
    found = processor.chat_template
    found = found.get("default") if isinstance(found, dict) else found
    if not isinstance(found, str):
        raise InputError(
            f"model.name: {name!r} has no chat template, which places the images of a conversation: take a model that "
            "was trained on conversations, or put its chat_template.jinja into the folder",
            key="model.name",
        )
    return found


def _unread(name: str, why: str) -> InputError:
    return InputError(
        f"model.name: the processor of {name!r} cannot be read: {first_line(ValueError(why))}", key="model.name"
    )
