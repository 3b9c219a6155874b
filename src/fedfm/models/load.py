"""load_model: make a Model from the [model] table.

A name is looked up in this order: "features", a user's function, a built-in model, a folder in the format of
``save_pretrained``, a .safetensors file of a CIFAR ResNet, a Hugging Face hub id. Only safetensors are read; a model's
code is not executed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, cast

import torch
from torch import Tensor, nn

from fedfm import seeds
from fedfm.core import tasks
from fedfm.core.libraries import refuse
from fedfm.data.user_functions import is_function
from fedfm.errors import InputError, quote_names
from fedfm.models import devices, families, hub, new_parts, precision
from fedfm.models.adapters import adaptation
from fedfm.models.families import Parts
from fedfm.models.finite import Finite
from fedfm.models.heads import within
from fedfm.models.hub_tools import Loaded
from fedfm.models.kinds import is_dual_encoder, is_pooled_encoder
from fedfm.models.locate import BUILT_IN, locate
from fedfm.models.model import Model
from fedfm.models.preprocessors import Tools
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.models.weight_fingerprint import fingerprint

if TYPE_CHECKING:
    from fedfm.models.model_task import ModelTask

P = ParamSpec("P")


class LinearSoftmax(nn.Module):
    """A linear softmax classifier of feature vectors."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(dim, classes)

    def forward(self, features: Tensor) -> Tensor:
        """Features (b, d) -> logits (b, C)."""
        return self.head(features)  # type: ignore[no-any-return]


def _naming_the_model(load: Callable[Concatenate[ModelSpec, P], Model]) -> Callable[Concatenate[ModelSpec, P], Model]:
    """Decorator: turn a library's error while loading a model into an InputError for ``model.name``."""

    def load_or_refuse(spec: ModelSpec, /, *args: P.args, **settings: P.kwargs) -> Model:
        with refuse(f"model.name: {spec.name!r} cannot be made the model of this task"):
            return load(spec, *args, **settings)

    functools.update_wrapper(load_or_refuse, load)
    return load_or_refuse


@_naming_the_model
def load_model(
    spec: ModelSpec,
    *,
    classes: Sequence[str],
    kind: str,
    task: str | ModelTask | None = None,
    seed: int = 0,
    feature_dim: int | None = None,
    keep_head: bool = False,
    head_bias: bool = False,
    hollow: bool = False,
    bare: bool = False,
    known: str | None = None,
) -> Model:
    """The model of an experiment.

    Args:
        spec: the [model] table.
        classes: class names; () for language models.
        kind: the kind of the data: image, text, features, instruction, preference or passages.
        task: overrides ``spec.task``; if both are None, the kind of the data implies the task.
        seed: seeds the new head, LoRA's A and random weights, so that they are the same on all machines.
        feature_dim: d, for kind "features".
        keep_head: whether to keep a saved head if its outputs and the classes are equal in number.
        head_bias: whether adaptation "head" adds a zero bias to a head without one; the fingerprint ignores this bias.
        hollow: whether to skip the frozen weights if possible and stay on the CPU, for a server that computes no
            outputs. The trained tensors and the fingerprint are the same as for the complete model.
        bare: whether to leave all weights in the files, for processes that each read a part of them.
        known: the fingerprint, if another process of this machine has computed it.

    Raises:
        InputError: there is no such model, or it does not fit the data, the task or the adaptation.

    Example:
        >>> model = load_model(ModelSpec("features"), classes=("a", "b"), kind="features", feature_dim=3)
        >>> model.names
        ('head.weight', 'head.bias')
    """
    task = _task(task or spec.task, kind, classes)
    tasks.check_keys(spec, task)
    task = task.of(spec)
    if spec.options and spec.weights != "random":
        raise InputError(
            'model.options: they change the architecture, so that no weights fit: set weights = "random"',
            key="model.options",
        )
    adapt = spec.adaptation or AdaptationSpec("head" if spec.name == "features" else "lora")
    adapt = adaptation.with_defaults(adapt, task)
    spec = dataclasses.replace(spec, task=task.name, adaptation=adapt)
    device = devices.pick(spec.device)
    hollow = bare or (hollow and adapt.name in adaptation.LORA and not adapt.dora and spec.weights == "pretrained")
    loaded = _load(spec, tuple(classes), kind, task, seed, feature_dim, hollow)
    device = torch.device("cpu") if loaded.hollow else device
    if keep_head:
        loaded.new = [p for p in loaded.new if any(name.startswith(f"{p}.") for name in loaded.missing)]
    parts = families.find(loaded.module, loaded.model_type, images=task.images_in_texts)
    by_user, new = loaded.head is not None, loaded.new
    if loaded.head is not None:
        parts, new = dataclasses.replace(parts, head=loaded.head), [loaded.head] if loaded.head else []
    kept = keep_head and spec.weights == "pretrained" and not any(within(parts.head, path) for path in loaded.new)
    if kept and parts.head:
        from fedfm.models import kept_head

        loaded.notices += kept_head.arrange(loaded.module, parts.head, loaded.outputs, classes, spec.name)
    drawn: tuple[str, ...] = ()
    if task.new_head and spec.weights == "pretrained" and spec.name != "features" and not by_user:
        drawn = new_parts.notice(loaded.module, loaded.new, parts.head, spec.name)
    if spec.gradient_checkpointing:
        from fedfm.models import checkpointing

        checkpointing.check(parts, adapt.name)
    if spec.compile:
        from fedfm.models import compiled

        compiled.check(spec, parts)
    loaded.notices += tuple(_of_head(loaded, parts.head, spec))
    _draw_head(loaded.module, loaded.new, seed)
    bits = loaded.stored is not None and not loaded.hollow
    weights = loaded.module.state_dict() if loaded.stored is None else loaded.stored
    look = Finite(spec.name, _weights(loaded))
    weight_hash = known or fingerprint(weights, loaded.config, loaded.new, look)
    _check_fingerprint(spec, weight_hash)
    del weights
    if spec.weights == "pretrained" and known is None and not by_user:
        loaded.notices += tuple(look.notices())
    slices = None
    if loaded.hollow or bare:
        from fedfm.models.file_slices import slices_of

        slices = slices_of(loaded, spec.name, needed=bare)
    loaded.stored = None
    loaded.module.eval()
    if adapt.name == "side_adapter":
        if adapt.name not in task.adaptations:
            raise InputError(
                f'model.adaptation.name = "side_adapter": task "{task}" takes {quote_names(task.adaptations)} only',
                key="model.adaptation.name",
            )
        module = loaded.module if loaded.placed else loaded.module.to(device)
        adapted = _side_model(module, spec, parts, classes, loaded.tools, weight_hash, seed)
        adapted.notices = (*_notices(loaded, parts, spec), *drawn)
        return adapted
    biased = head_bias and adapt.name == "head" and adaptation.give_bias(loaded.module, parts.head)
    if by_user and adapt.name == "head" and not parts.head:
        from fedfm.models.user import function_module

        raise function_module.no_head(spec.name)
    notices = adaptation.notices(loaded.module, adapt, parts, new)
    module = adaptation.apply(loaded.module, adapt, parts, new=new, task=task, seed=seed)
    for parameter in loaded.frozen if adapt.name == "full" else ():
        parameter.requires_grad_(False)
    if bits and spec.quantization == "nf4":
        from fedfm.models import quantised_experts

        quantised_experts.pack(module)  # only now: PEFT takes the order of the adapters from the original parameters
    if bits:
        from fedfm.models import quantised

        if line := quantised.in_floats(module, parts.head):
            notices += (line,)
    head = adaptation.live_head(module, parts.head) if task.linear_head else None
    precision.train_in_single(module)
    kind_of = _class_of(loaded.module, by_user)
    if loaded.placed and spec.device == devices.MAP:
        if adapt.dora or adapt.name not in ("head", *adaptation.LORA):
            raise InputError(
                'model.device = "auto-map" supports only the adaptations lora (without dora), ffa_lora and head',
                key="model.device",
            )
        from fedfm.models import cuda_devices

        cuda_devices.gather_trained(module, device)
    if kind_of is Model:
        task.check_single_encoder()
    model = kind_of(
        module if loaded.placed else module.to(device),
        spec=spec,
        task=task,
        classes=classes,
        parts=parts,
        tools=loaded.tools,
        fingerprint=weight_hash,
        head=head,
    )
    model.new, model.hollow, model.added_bias, model.slices = tuple(loaded.new), loaded.hollow, biased, slices
    model.notices = (*_notices(loaded, parts, spec), *drawn, *notices)
    _complete(model, parts)
    return model


def _check_fingerprint(spec: ModelSpec, found: str) -> None:
    """Refuse another model than the one that the experiment names."""
    if spec.fingerprint is not None and found != spec.fingerprint:
        raise InputError(
            f"model.fingerprint: {spec.name} here is {found}, and the experiment needs {spec.fingerprint}: use the "
            "federation's copy of the model",
            key="model.fingerprint",
        )


def _side_model(
    module: nn.Module, spec: ModelSpec, parts: Parts, classes: Sequence[str], tools: Tools, fingerprint: str, seed: int
) -> Model:
    """The frozen module with side adapters."""
    if getattr(getattr(module, "config", None), "fedfm_places", 0):
        from fedfm.models.adapters.side_texts import around_texts as around
    else:
        from fedfm.models.adapters.side_adapter import around
    return around(module, spec, parts, classes=classes, tools=tools, fingerprint=fingerprint, seed=seed)


def _class_of(module: nn.Module, by_user: bool) -> type[Model]:
    """The class of the model with this module; ``by_user``: a user's function made the module."""
    if is_dual_encoder(module):
        from fedfm.models.dual_encoder import DualModel

        return DualModel
    if by_user:
        from fedfm.models.user.function_module import FunctionModel

        return FunctionModel
    return Model


def _complete(model: Model, parts: Parts) -> None:
    """Describe what is trained of a vision part, and compile the blocks."""
    if parts.vision:
        from fedfm.models import vision_part

        line, seen = vision_part.describe(parts, model.names, model.adaptation)
        model.notices, model.softmax = (*model.notices, line), model.softmax and not seen
    if model.spec.compile and not model.hollow:
        from fedfm.models import compiled

        why = compiled.compile_blocks(parts, model.spec.compile, model.device)
        model.compiled, model.notices = not why, (*model.notices, *filter(None, [why]))


def _weights(loaded: Loaded) -> set[str]:
    """Names of the tensors that must be finite: parameters, and the scales of quantised values.

    For a quantised folder each name is there with and without the base's name as prefix.
    """
    own, stored = {name for name, _ in loaded.module.named_parameters()}, loaded.stored
    if stored is None:
        return own
    from fedfm.models import stored_bits, stored_files

    if not isinstance(stored, stored_files.StoredWeights):
        return own
    base = f"{loaded.module.base_model_prefix}."
    return own | {n.removeprefix(base) for n in own} | {f"{base}{n}" for n in own} | stored_bits.scales(stored)


def _notices(loaded: Loaded, parts: families.Parts, spec: ModelSpec) -> Iterator[str]:
    """Notices about properties of a loaded model that its name does not show."""
    yield from (*loaded.notices, *loaded.tools.notices)
    if loaded.tools.tokenizer is not None:
        from fedfm.models import lengths

        yield from lengths.notice(spec, loaded.tools)
    if is_pooled_encoder(loaded.module):
        yield (
            f"transformers has no classifier of type {loaded.model_type!r}: a new linear head reads the encoder's "
            f"{loaded.module.pooling}"
        )
    if parts.unread:
        yield f"no text passes through {' and '.join(parts.unread)}: nothing is adapted or trained there"


def _of_head(loaded: Loaded, head: str, spec: ModelSpec) -> Iterator[str]:
    """Notices that a trained head is replaced, or that the adaptation does not train a part of the new head."""
    plain = not hasattr(loaded.module, "config") or is_pooled_encoder(loaded.module) or loaded.head is not None
    if plain or spec.weights == "random" or spec.name in BUILT_IN:
        return
    made = {name for name, _ in loaded.module.named_parameters() if any(within(name, new) for new in loaded.new)}
    if head and any(within(name, head) and name not in loaded.missing for name in made):
        last = next((path for path in loaded.new if within(path, head)), head)  # only a decoder's last map is new
        yield (
            f"model.name: {spec.name} has a trained head {last} with as many outputs as there are classes here: a new "
            "head replaces it"
        )
    rest = sorted({name.rpartition(".")[0] for name in made if not within(name, head)})
    if rest and spec.adaptation is not None and spec.adaptation.name == "head":
        yield (
            f'model.adaptation.name = "head" trains only {head}; the new values in {", ".join(rest)} stay '
            "random; lora, top_layers and full train them, too"
        )


def _task(name: str | ModelTask | None, kind: str, classes: Sequence[str]) -> ModelTask:
    task = cast("ModelTask", tasks.find(name) if name else tasks.implied_task(kind))
    if kind not in task.kinds:
        raise InputError(
            f"model.task: {task.name!r} needs data of kind {' or '.join(task.kinds)}, these are of kind {kind}",
            key="model.task",
        )
    if task.needs_classes and len(classes) < 1:
        raise InputError("data.label: classification needs labelled rows, these have no classes", key="data.label")
    return task


def _load(
    spec: ModelSpec,
    classes: tuple[str, ...],
    kind: str,
    task: ModelTask,
    seed: int,
    feature_dim: int | None,
    hollow: bool = False,
) -> Loaded:
    if (spec.name == "features") != (kind == "features"):
        right = '"features"' if kind == "features" else "a model that reads them"
        raise InputError(f"model.name: {spec.name!r} does not fit data of kind {kind}: use {right}", key="model.name")
    if spec.name == "features":
        if spec.options:
            raise InputError('model.options: "features" has no options; drop it', key="model.options")
        if not feature_dim:
            raise InputError("data: feature vectors of unknown length")
        module = LinearSoftmax(feature_dim, len(classes))
        return Loaded(module, "features", {"model_type": "features", "dim": feature_dim}, ["head"], Tools())
    if is_function(spec.name):
        from fedfm.models.user import function_module

        return function_module.load(spec, classes, task, seed)
    path = locate(spec.name)
    if isinstance(path, Path) and path.is_file():
        from fedfm.models.resnet_files import load_resnet

        return load_resnet(path, spec, classes, kind, seed)
    if task.two_encoders:
        from fedfm.models.hub_encoders import zero_shot

        return zero_shot(path, spec, classes, task, seed)
    return hub.load_pretrained(path, spec, classes, kind, task, seed, hollow)


def _draw_head(module: nn.Module, new: list[str], seed: int) -> None:
    """Initialise the new modules: weights N(0, 0.02^2) from one random stream per name, biases zero, norms one."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for path in new:
            for name, parameter in module.get_submodule(path).named_parameters():
                torch.manual_seed(seeds.derive(seed, "adaptation", f"{path}.{name}"))
                if parameter.dim() > 1:
                    parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02))
                else:
                    parameter.fill_(1.0 if name.endswith("weight") else 0.0)
