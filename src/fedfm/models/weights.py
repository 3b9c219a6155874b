"""Loads a module with transformers, with the weights of a checkpoint or with random weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedfm import seeds
from fedfm.errors import InputError
from fedfm.models import families, quantised_maps
from fedfm.models.checkpoint import Difference, some
from fedfm.models.heads import bases, labels_pixels, within
from fedfm.models.refusals import first_of, refusal
from fedfm.models.spec import ModelSpec


@dataclass
class Read:
    """A module with the weights of a checkpoint.

    Attributes:
        module: the module, loaded by transformers.
        new: names of the tensors that are new for the task and were initialised at random.
        notices: lines for the user about guesses.
    """

    module: nn.Module
    new: set[str] = field(default_factory=set)
    notices: list[str] = field(default_factory=list)


def load(
    auto: Any,
    path: Path | str,
    spec: ModelSpec,
    config: Any,
    seed: int,
    dtype: torch.dtype,
    *,
    head: bool,
    **where: Any,
) -> Read:
    """The module with the checkpoint's weights, or with random weights for ``model.weights = "random"``.

    Args:
        head: whether the checkpoint may lack the task's head.
        where: ``device_map`` and ``quantization_config`` of transformers' ``from_pretrained``; without them the module
            is on the CPU and not quantised.

    Raises:
        InputError: the checkpoint cannot be read, or lacks tensors of the module.
    """
    if spec.weights == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.derive(seed, "weights"))
            try:
                module: nn.Module = auto.from_config(config, **_attention(spec)).to(dtype)
            except Exception as error:  # incompatible options may raise any error
                if spec.options:
                    raise InputError(f"model.options: {first_of(error)}", key="model.options") from None
                if isinstance(error, ValueError):
                    raise refusal(path, spec.name, error) from None
                raise
        return Read(module)
    from safetensors import SafetensorError

    if isinstance(path, Path) and not any(path.glob("*.safetensors")):
        if pickled := next((f.name for p in ("*.bin", "*.pt", "*.pth", "*.ckpt") for f in sorted(path.glob(p))), ""):
            raise InputError(
                f"model.name: {path} has {pickled}, expected model.safetensors (pickled weights are not read)",
                key="model.name",
            )
        raise InputError(
            f'model.name: {spec.name!r} is an architecture without weights: set model.weights = "random", '
            "or make weights with `fedfm pretrain` and name their folder",
            key="model.name",
        )
    widened = False
    if quantised_maps.settings(config) is not None or _has_narrow_floats(path):
        from fedfm.models import stored_files, stored_formats

        widened = stored_formats.is_widened(config)
        stored_formats.check(stored_files.checkpoint_of(path, spec.name), spec.name)
    try:
        # transformers initialises missing weights at random; this must not depend on the global generator or change it.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.derive(seed, "adaptation"))
            module, info = auto.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=False,
                **_attention(spec),
                **where,
            )
    except ImportError as error:
        key = "model.attention" if spec.attention else "model.name"
        raise InputError(f"{key}: {first_of(error)}", key=key) from None
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if "conversion of the weights" in str(error):
            named = some(sorted(_failed_tensors(error))) or "some of the model's tensors"
            raise InputError(
                f"model.name: {path} lacks tensors from which {named} would be made, or has them in another shape",
                key="model.name",
            ) from None
        raise refusal(path, spec.name, error) from None
    new, notices = Difference.of_load(module, path, info).judge(head=head)
    notices += _of_two_tables(module, path)
    return Read(module, new, [*notices, *([stored_formats.notice(module, config, spec.name)] if widened else [])])


def _has_narrow_floats(path: Path | str) -> bool:
    """Whether a file has floats of 8 or 4 bits by its header, or cannot be read here and has to be looked at."""
    for file in [path] if isinstance(path, str) else path.glob("*.safetensors"):
        try:
            with open(file, "rb") as data:
                if re.search(rb'"F[84]', data.read(min(int.from_bytes(data.read(8), "little"), 1 << 27))):
                    return True
        except OSError:
            return True
    return False


def _of_two_tables(module: Any, path: Path | str) -> list[str]:
    """A notice if a file has a separate output map, although the configuration ties the output map to the embedding.

    transformers then keeps both; older releases drop the map. This function corrects the configuration, so that exports
    keep both, too.
    """
    last = module.get_output_embeddings()
    if last is None or not getattr(module.config, "tie_word_embeddings", False) or not module._tied_weights_keys:
        return []
    from fedfm.models import positions

    ours, theirs = (getattr(of, "weight", None) for of in (positions.embedding(module), last))
    if ours is None or theirs is None or theirs is ours or (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
        return []
    if torch.equal(ours, theirs):
        return []
    module.config.tie_word_embeddings = False
    return [
        f"model.name: {path} has an output map that differs from its embedding, although its config.json says "
        "tie_word_embeddings = true: both are used, as the file has them"
    ]


def new_modules(module: nn.Module, model_type: str, missing: set[str]) -> list[str]:
    """Paths of the modules that were created for this task: the complete head, and modules that the checkpoint lacks.

    No path is inside another.

    Raises:
        InputError: there is no head next to the pretrained model.
    """
    head = families.find(module, model_type).head
    if not head:
        raise InputError(
            f"model.name: no classification head found in a model of type {model_type!r}", key="model.name"
        )
    head = head.partition(".")[0]
    if labels_pixels(module):
        from fedfm.models.pixel_heads import pixel_map

        head = pixel_map(module, head)
    known = {name for name, _ in module.named_parameters()}
    paths = {head, *(name.rpartition(".")[0] for name in missing & known)}
    top = sorted(p for p in paths if not any(p != q and p.startswith(f"{q}.") for q in paths))
    for base in (b for b in bases(module) if b):
        if whole := next((p for p in top if within(base, p)), None):
            raise InputError(
                f"model.name: the head of a model of type {model_type!r} would be {whole}, which contains the "
                f"pretrained {base}; expected a separate head",
                key="model.name",
            )
    return [p for p in top if p]


def _failed_tensors(error: Exception) -> set[str]:
    """The model's tensors that transformers could not make from a file's tensors.

    They come from the error's traceback, because its message does not name them.
    """
    trace, found = error.__traceback__, set[str]()
    while trace is not None:
        info = trace.tb_frame.f_locals.get("loading_info")
        found |= set(getattr(info, "conversion_errors", ()))
        trace = trace.tb_next
    return found


def _attention(spec: ModelSpec) -> dict[str, str]:
    return {"attn_implementation": spec.attention} if spec.attention else {}
