"""Loads a module's weights: whole, quantised, or not at all; from files in Hugging Face's format."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedfm import seeds
from fedfm.errors import InputError
from fedfm.models import devices, families
from fedfm.models.checkpoint import Difference, some
from fedfm.models.heads import bases, within
from fedfm.models.locate import BUILT_IN, DTYPES
from fedfm.models.quantised_maps import of_folder
from fedfm.models.spec import ModelSpec

if TYPE_CHECKING:
    from fedfm.models import quantised


@dataclass
class Read:
    """A module with the weights of a checkpoint.

    Attributes:
        module: as transformers loads it.
        new: names of the tensors that were drawn, since they are new for the task.
        notices: what was guessed.
    """

    module: nn.Module
    new: set[str] = field(default_factory=set)
    notices: list[str] = field(default_factory=list)


def hollow(
    auto: Any, path: Path | str, spec: ModelSpec, config: Any, *, head: bool
) -> tuple[Read, Mapping[str, Tensor]] | None:
    """As :func:`module_of`, with one zero in place of all numbers of each weight; None if the files have other names
    than the module, so that only a whole load tells what is missing.
    """
    from accelerate import init_empty_weights

    from fedfm.models import quantised, stored_bits

    stored, plain = quantised.of_folder(config), copy.deepcopy(config)
    if stored is not None:
        del plain.quantization_config
    with init_empty_weights(include_buffers=False):
        module = _skeleton(auto, path, spec, plain)
    checkpoint = _stored_weights(path, spec.name)
    weights = quantised.Unquantised(module, checkpoint, alike=stored is None)
    if stored is not None:
        stored_bits.check(checkpoint, stored, weights.by_file, path)
    last = families.find(module, config.model_type).head if head else None
    if not quantised.readable(weights, module, last, DTYPES[spec.dtype]):
        return None
    found = Difference(module, path, weights.missing, weights.leftovers if stored is None else set(), {})
    if found.surplus():
        return None
    names, notices = found.judge(head=head)
    new = new_modules(module, config.model_type, names) if head else []
    quantised.empty(module, new)
    return Read(module, names, notices), weights if stored is None else checkpoint


def module_of(
    auto: Any, path: Path | str, spec: ModelSpec, config: Any, seed: int, *, head: bool
) -> tuple[Read, Mapping[str, Tensor] | None]:
    """The module, and the checkpoint's weights if it is quantised.

    The fingerprint needs the weights as they were, which a large model has no room for beside the quantised ones: they
    are read from the files one by one where the files have the module's names, as those of most language models do.
    """
    dtype = DTYPES[spec.dtype]
    where = devices.placement(spec.device)
    stored = of_folder(config)
    if stored is None and spec.quantization is None:
        return load(auto, path, spec, config, seed, dtype, head=head, **where), None
    from fedfm.models import quantised, stored_bits

    quantised.describe(spec, config)  # refuses what does not go together
    plain = copy.deepcopy(config)
    if stored is not None:
        del plain.quantization_config
    with torch.device("meta"):
        skeleton = _skeleton(auto, path, spec, plain)
    checkpoint = _stored_weights(path, spec.name)
    lazily = quantised.Unquantised(skeleton, checkpoint, alike=stored is None)
    weights: Mapping[str, Tensor] = checkpoint if stored is not None else lazily
    if stored is not None:
        stored_bits.check(checkpoint, stored, lazily.by_file, path)
    missing = lazily.missing
    last = families.find(skeleton, config.model_type).head if head else None
    if stored is None and not quantised.readable(lazily, skeleton, last, dtype):
        whole = load(auto, path, spec, config, seed, dtype, head=head)
        weights, missing = whole.module.state_dict(), whole.new
    new = new_modules(skeleton, config.model_type, missing) if head else []
    out = skeleton.get_output_embeddings()
    keep = [*new, *(name for name, m in skeleton.named_modules() if m is out and out is not None)]
    keep += quantised.odd_maps(skeleton, spec) if stored is None else []  # a folder's bits are as they are
    bits = quantised.settings(spec, stored, keep)
    with_bits = copy.deepcopy(config)
    if stored is not None:
        with_bits.quantization_config = bits.to_dict()
    else:
        where = where | {"quantization_config": bits}
    if "device_map" not in where:
        where = where | {"device_map": {"": devices.pick(spec.device)}}
    try:
        read = load(auto, path, spec, with_bits, seed, dtype, head=head, **where)
    except (InputError, AttributeError):  # transformers cannot draw bits that lack, and does not name them
        if stored is not None:
            surplus = {n for n in lazily.leftovers if not stored_bits.is_companion(n)}
            Difference(skeleton, path, missing, surplus, {}).judge(head=head)
        raise
    quantised.keep_format(read.module)
    return read, weights


def _skeleton(auto: Any, path: Path | str, spec: ModelSpec, config: Any) -> Any:
    """The module of a configuration, on the device of the context.

    Raises:
        InputError: transformers has no such model.
    """
    try:
        return auto.from_config(config, dtype=DTYPES[spec.dtype])
    except ValueError as error:
        raise refusal(path, spec.name, error) from None


def _stored_weights(path: Path | str, name: str) -> quantised.StoredWeights:
    """The checkpoint's tensors by name.

    Raises:
        InputError: a file of it cannot be read.
    """
    from safetensors import SafetensorError

    from fedfm.models import quantised

    found = quantised.StoredWeights(path)
    try:
        len(found)  # reads the names
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise refusal(path, name, error) from None
    return found


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
    """The module with the checkpoint's weights, or with those of ``model.weights = "random"``.

    Args:
        head: whether the checkpoint may lack the head of the task.
        where: ``device_map`` and ``quantization_config`` of transformers' ``from_pretrained``; none: on the CPU.

    Raises:
        InputError: it cannot be read, or has not what the module has.
    """
    if spec.weights == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.derive(seed, "weights"))
            try:
                module: nn.Module = auto.from_config(config, **_attention(spec)).to(dtype)
            except Exception as error:  # incompatible options fail anywhere
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
    try:
        # It draws the missing weights, which must neither depend on the global generator nor change it.
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
        raise InputError(f"model.attention: {first_of(error)}", key="model.attention") from None
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if "conversion of the weights" in str(error):
            named = some(sorted(_failed_tensors(error))) or "some of the model's tensors"
            raise InputError(
                f"model.name: {path} lacks tensors, or has some of another shape, of which {named} would be made",
                key="model.name",
            ) from None
        raise refusal(path, spec.name, error) from None
    return Read(module, *Difference.of_load(module, path, info).judge(head=head))


def new_modules(module: nn.Module, model_type: str, missing: set[str]) -> list[str]:
    """Paths of the modules that were created for this task: the whole head, and modules that the checkpoint lacks.
    They do not nest.

    Raises:
        InputError: there is no head beside the pretrained model.
    """
    head = families.find(module, model_type).head
    if not head:
        raise InputError(
            f"model.name: no classification head found in a model of type {model_type!r}", key="model.name"
        )
    known = {name for name, _ in module.named_parameters()}
    paths = {head.partition(".")[0], *(name.rpartition(".")[0] for name in missing & known)}
    top = sorted(p for p in paths if not any(p != q and p.startswith(f"{q}.") for q in paths))
    for base in (b for b in bases(module) if b):
        if whole := next((p for p in top if within(base, p)), None):
            raise InputError(
                f"model.name: the head of a model of type {model_type!r} would be {whole}, which holds the pretrained "
                f"{base}; expected a head beside it",
                key="model.name",
            )
    return [p for p in top if p]


def _failed_tensors(error: Exception) -> set[str]:
    """The model's tensors that transformers could not make of those of a file. Its error does not name them, but for
    a report of many lines in the log.
    """
    trace, found = error.__traceback__, set[str]()
    while trace is not None:
        info = trace.tb_frame.f_locals.get("loading_info")
        found |= set(getattr(info, "conversion_errors", ()))
        trace = trace.tb_next
    return found


def first_of(error: Exception) -> str:
    """The first line of a library's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def refusal(path: Path | str, name: str, error: Exception) -> InputError:
    """The error of a model that transformers could not read."""
    from huggingface_hub import is_offline_mode

    first = first_of(error)
    if found := re.search(r"(\w+)Config'> for this kind of AutoModel: (?:AutoModelFor)?(\w+)", str(error)):
        first = f"transformers has no {found[1]} for {found[2]}, which model.task and the data ask for"
        return InputError(f"model.name: {name!r} does not fit: {first}", key="model.name")
    if isinstance(path, Path):
        return InputError(f"model.name: {path} cannot be read as a model: {first}", key="model.name")
    if is_offline_mode():
        first += " (HF_HUB_OFFLINE is set: nothing is downloaded)"
    return InputError(
        f"model.name: {name!r} is not built in ({', '.join(BUILT_IN)}), no folder here, "
        f"and no hub id that could be read: {first}",
        key="model.name",
    )


def _attention(spec: ModelSpec) -> dict[str, str]:
    return {"attn_implementation": spec.attention} if spec.attention else {}
