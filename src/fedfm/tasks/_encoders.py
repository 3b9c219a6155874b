"""Encoders without a head, and the files of sentence-transformers that say how an encoder's states become a vector."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfm.core.text import to_json
from fedfm.errors import InputError, reason_of
from fedfm.models.families import unwrap
from fedfm.models.locate import stored_file
from fedfm.models.unread_parts import POOLING

if TYPE_CHECKING:
    from fedfm.models.network import Network

MODES = ("mean", "cls", "max", "lasttoken")
BASE = "base"  # in the export of an adapter, the folder of its base model
_NAMED = 3  # number of prompts that a notice names
_MODULES, _PARTS = "modules.json", "sentence_transformers.models"
_LEGACY = {  # keys of 1_Pooling/config.json before sentence-transformers 5
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class Pooling:
    """How the states of a row become its vector.

    Attributes:
        mode: one of :data:`MODES`.
        normalize: whether vectors are scaled to norm 1.
    """

    mode: str = "mean"
    normalize: bool = False


def pooling_of(model: Network) -> Pooling:
    """The pooling of a loaded model."""
    return Pooling(**getattr(unwrap(model.module).config, POOLING))


@dataclass(frozen=True)
class Encoder:
    """Loads an encoder like transformers' ``AutoModel``, but without the encoder's pooler, which no vector needs."""

    pooler: bool  # whether the encoder's class has an option to leave out the pooler

    def _without_pooler(self) -> dict[str, bool]:
        return {"add_pooling_layer": False} if self.pooler else {}

    def from_config(self, config: Any, **settings: Any) -> Any:
        """The architecture with random weights."""
        from transformers import AutoModel

        return AutoModel.from_config(config, **self._without_pooler(), **settings)

    def from_pretrained(self, path: Path | str, **settings: Any) -> Any:
        """The module with a checkpoint's weights, and transformers' loading info."""
        from transformers import AutoModel

        module, info = AutoModel.from_pretrained(path, **self._without_pooler(), **settings)
        prefixes = ("pooler.", f"{module.base_model_prefix}.pooler.") if self.pooler else ()
        info["unexpected_keys"] = {name for name in info["unexpected_keys"] if not name.startswith(prefixes)}
        return module, info


def find(path: Path | str, config: Any) -> tuple[Encoder, tuple[str, ...]]:
    """An object that loads the encoder, and notices on the encoder's pooling, which is written into ``config``.

    Raises:
        InputError: the model is not a single encoder, or its folder names a pooling that fedfm does not compute.
    """
    from transformers import AutoModel

    kind = f"model.name: {path} is of type {config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f'{kind}, an encoder-decoder: model.task = "embedding" needs an encoder, such as a BERT')
    if getattr(config, "text_config", None) is not None and getattr(config, "vision_config", None) is not None:
        raise InputError(
            f'{kind}, which has an encoder of texts and one of images: model.task = "embedding" trains one encoder; '
            "for images with texts of classes there is zero_shot",
            key="model.name",
        )
    if type(config) not in AutoModel._model_mapping:
        raise InputError(f"{kind}, for which transformers has no encoder without a head", key="model.name")
    found, notices = _pooling(path)
    setattr(config, POOLING, asdict(found))
    return Encoder(_has_pooler(AutoModel._model_mapping[type(config)])), notices


def _has_pooler(kind: type) -> bool:
    """Whether this class of transformers has an option to leave out the pooler."""
    return "add_pooling_layer" in inspect.signature(kind).parameters


def _pooling(path: Path | str) -> tuple[Pooling, tuple[str, ...]]:
    """The pooling that a folder's or hub id's ``modules.json`` names, else the mean; and notices on the pooling."""
    parts = _json(path, _MODULES)
    if parts is None:
        return Pooling(), (f"model.name: {path} has no {_MODULES}: a row's vector is the mean of its states",)
    found, notices = Pooling(), list[str]()
    kinds = [str(part.get("type", "")).rpartition(".")[2] for part in parts if isinstance(part, Mapping)]
    if other := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize", "Dropout")]:
        raise InputError(
            f"model.name: {path} has the part {other[0]} in its {_MODULES}, which fedfm does not compute: expected a "
            "model with Transformer, Pooling and Normalize",
            key="model.name",
        )
    for part, kind in zip(parts, kinds, strict=True):
        if kind == "Pooling":
            found = Pooling(_mode(path, f"{part.get('path', '')}/config.json"), found.normalize)
        elif kind == "Normalize":
            found = Pooling(found.mode, True)
    about = _json(path, "config_sentence_transformers.json")
    about = about if isinstance(about, Mapping) else {}
    prompts = {name: text for name, text in dict(about.get("prompts") or {}).items() if text}
    if name := about.get("default_prompt_name"):
        notices.append(
            f'model.name: {path} writes its prompt "{name}" before each text in sentence-transformers, and fedfm does '
            "not: write it into the rows"
        )
    elif prompts:
        listed = ", ".join(f"{text!r:.60} ({name})" for name, text in list(prompts.items())[:_NAMED])
        notices.append(
            f"model.name: {path} was trained with prompts before its texts, such as {listed}, and fedfm writes none: "
            "write them into the rows"
        )
    if (compared := about.get("similarity_fn_name")) not in (None, "cosine"):
        notices.append(
            f"model.name: {path} compares vectors by {compared} (similarity_fn_name), and fedfm trains and scores by "
            "the cosine"
        )
    settings = _json(path, "sentence_bert_config.json")
    if isinstance(settings, Mapping) and settings.get("do_lower_case"):
        notices.append(f"model.name: {path} has do_lower_case in its sentence_bert_config.json, which is not read")
    how = f"the {found.mode} of its states{', scaled to norm 1' if found.normalize else ''}"
    return found, (f"model.name: a row's vector is {how}, as the {_MODULES} of {path} says", *notices)


def _mode(path: Path | str, name: str) -> str:
    about = _json(path, name)
    if not isinstance(about, Mapping):
        raise InputError(f"model.name: {path} has no {name}, which its {_MODULES} names", key="model.name")
    modes = about.get("pooling_mode") or [mode for key, mode in _LEGACY.items() if about.get(key)] or "mean"
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) > 1 or modes[0] not in MODES:
        raise InputError(
            f"model.name: {path} pools by {' and '.join(map(str, modes))} ({name}), which fedfm does not compute: "
            f"expected one of {', '.join(MODES)}",
            key="model.name",
        )
    return str(modes[0])


def _json(path: Path | str, name: str) -> Any:
    file = stored_file(path, name)
    try:
        return None if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"model.name: {file} cannot be read: {reason_of(error)}", key="model.name") from None


def add_files(model: Network, to: str, folder: Path) -> None:
    """Write the files with which sentence-transformers loads an export, or the base model of an exported adapter."""
    pooling, whole = pooling_of(model), unwrap(model.module)
    for place in (folder, folder / BASE):
        _clean(place / "config.json")
    home = folder / BASE if to == "peft" else folder
    if to == "torch" or not home.is_dir():
        return
    if to == "peft":
        from fedfm.models.export import save_tools

        save_tools(model, home)
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] * pooling.normalize)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{_PARTS}.{kind}"} for i, (path, kind) in enumerate(parts)
    ]
    _write(home / _MODULES, modules)
    for path, _ in parts[1:]:
        (home / path).mkdir()
    width = {"word_embedding_dimension": _width(whole.config)}
    _write(home / "1_Pooling" / "config.json", width | {key: pooling.mode == mode for key, mode in _LEGACY.items()})
    about: dict[str, Any] = {"max_seq_length": model.tools.max_length, "do_lower_case": False}
    if model.tools.tokenizer is None:
        way = {"method": "forward", "method_output_name": "last_hidden_state"}
        about = {"modality_config": {"image": way}, "module_output_name": "token_embeddings"}
    if to == "hf" and _has_pooler(type(whole)):  # an adapter's base model keeps its pooler
        about["model_args"] = {"add_pooling_layer": False}
    _write(home / "sentence_bert_config.json", about)


def about_export(to: str, folder: Path) -> str:
    """A text for the README: how sentence-transformers loads an export."""
    text = "The model gives a state for each token or patch, and the vector is pooled from these states."
    if to == "torch" or not (folder / (BASE if to == "peft" else "") / _MODULES).exists():
        return text
    lines = ["from sentence_transformers import SentenceTransformer", "", 'encoder = SentenceTransformer("FOLDER")']
    if to == "peft":
        lines[-1:] = [f'encoder = SentenceTransformer("FOLDER/{BASE}")', 'encoder.load_adapter("FOLDER")']
    code = "\n".join(["```python", *lines, "```"])
    return (
        f"{text} sentence-transformers does both:\n\n{code}\n\n`encoder.encode(rows)` gives the vectors of "
        "`fedfm predict`; an encoder of images takes Pillow images. No vector needs a pooler, which transformers may "
        "report as new."
    )


def _width(config: Any) -> int:
    if (size := getattr(config, "hidden_size", None)) is not None:
        return int(size)
    return int(config.hidden_sizes[-1])  # the width of a convolutional network's last stage


def _clean(path: Path) -> None:
    """Remove fedfm's key from a configuration file; if the file is a link, a real file replaces the link."""
    if not path.exists():
        return
    about = json.loads(path.read_text(encoding="utf-8"))
    if about.pop(POOLING, None) is not None:
        path.unlink()
        _write(path, about)


def _write(path: Path, value: Any) -> None:
    path.write_text(to_json(value, indent=2) + "\n", encoding="utf-8")
