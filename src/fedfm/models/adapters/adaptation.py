"""The trainable part of a foundation model: full, head, top_layers, lora (PEFT), ffa_lora, prompt.

LoRA: Low-Rank Adaptation of Large Language Models. Hu et al. ICLR 2022: W x + (alpha / r) B A x, B = 0 at the start.
FFA-LoRA: Improving LoRA in Privacy-preserving Federated Learning. Sun et al. ICLR 2024: A is frozen.
PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models. Guo et al. arXiv:2208.11625.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedfm import seeds
from fedfm.core import tasks
from fedfm.core.fields import check
from fedfm.errors import InputError, quote_names
from fedfm.models.adapters.map_readers import is_read_alone, refused_by_peft, returns_several
from fedfm.models.adapters.peft_alone import peft_alone
from fedfm.models.adapters.stacked import stacks, without, wrap
from fedfm.models.families import Parts, default_targets, strides_are_read, unwrap
from fedfm.models.kinds import is_dual_encoder
from fedfm.models.spec import ALL_LINEAR, AdaptationSpec

if TYPE_CHECKING:
    from fedfm.models.model_task import ModelTask

LORA = ("lora", "ffa_lora")


def with_defaults(spec: AdaptationSpec, task: str | ModelTask | None = None) -> AdaptationSpec:
    """The specification with its defaults filled in, for a model of this task."""
    if spec.name in LORA and spec.alpha is None:
        scale = (tasks.find(task) if task else tasks.default()).lora_scale
        return dataclasses.replace(spec, alpha=scale * spec.rank)
    if spec.name == "top_layers" and spec.layers is None:
        return dataclasses.replace(spec, layers=1)
    return spec


def apply(
    module: nn.Module, spec: AdaptationSpec, parts: Parts, *, new: list[str], task: ModelTask, seed: int
) -> nn.Module:
    """Make the specified part trainable; for LoRA the result is PEFT's wrapper of the module.

    Args:
        module: the complete model; changed in place.
        spec: from :func:`with_defaults`.
        parts: the module's parts.
        new: paths of the modules that were created for this task (the classification head).
        task: decides which adaptations are allowed.
        seed: ``derive(seed, "adaptation")`` seeds LoRA's A, so that all machines start with the same A.

    Raises:
        InputError: the specification does not fit the architecture.
    """
    check(spec, "model.adaptation")
    if task.keeps_base and spec.name not in LORA:
        raise InputError(
            f'model.adaptation.name: "{spec.name}" changes the base, and task "{task}" needs the unchanged base: use '
            "lora, which leaves the base unchanged",
            key="model.adaptation.name",
        )
    module.requires_grad_(spec.name == "full")
    if spec.name == "full":
        for path in parts.unread:
            module.get_submodule(path).requires_grad_(False)
        return module
    if spec.name == "head":
        if task.new_head and spec.name not in task.adaptations:
            raise InputError(
                f'model.adaptation.name = "head": task "{task}" takes {quote_names(task.adaptations)} only',
                key="model.adaptation.name",
            )
        if not parts.head or spec.name not in task.adaptations:
            raise InputError(
                f"model.adaptation.name: 'head' needs a classification head, task {task.name!r} has none: use lora",
                key="model.adaptation.name",
            )
        module.get_submodule(parts.head).requires_grad_(True)
        return module
    if spec.name == "prompt":
        if not is_dual_encoder(module) or module.context is None:
            raise InputError(
                f'model.adaptation.name: "prompt" learns words before class names, which task {task.name!r} does not '
                'use: expected model.task = "zero_shot"',
                key="model.adaptation.name",
            )
        module.context.requires_grad_(True)
        return module
    if spec.name == "top_layers":
        count = spec.layers or 1
        _enough(count, parts)
        tops: list[nn.Module | None] = [m for stages in parts.stages for block in stages[-count:] for _, m in block]
        ends = module.projections if is_dual_encoder(module) else (parts.norm, parts.pooler)
        for top in [*tops, *ends, *(module.get_submodule(n) for n in {*new, parts.head} if n)]:
            if top is not None:
                top.requires_grad_(True)
        return module
    return _lora(module, spec, parts, new=new, task=task, seed=seed)


def notices(module: nn.Module, spec: AdaptationSpec, parts: Parts, new: list[str]) -> tuple[str, ...]:
    """Notices for the user about keys and targets that :func:`apply` does not use."""
    found = list[str]()
    if spec != AdaptationSpec(spec.name, alpha=spec.alpha if spec.name in LORA else None):
        from fedfm.models.adapters import idle_keys

        found += idle_keys.notices(spec)
    if spec.name in LORA and spec.targets == (ALL_LINEAR,):
        from fedfm.models.adapters.all_linear import left_out

        found += [line] if (line := left_out(module, parts, new)) else []
    return tuple(found)


def give_bias(module: nn.Module, path: str) -> bool:
    """Add a zero bias, which changes no output, to a linear head that has no bias; return whether one was added."""
    head = live_head(module, path)
    if head is None or head.bias is not None:
        return False
    head.bias = nn.Parameter(head.weight.new_zeros(head.out_features))
    return True


def live_head(module: nn.Module, path: str) -> nn.Linear | None:
    """The linear head that the forward pass uses. PEFT may have replaced the original by a trained copy."""
    if not path:
        return None
    found: Any = unwrap(module)
    for name in path.split("."):
        found = getattr(found, name)
        found = found.modules_to_save["default"] if hasattr(found, "modules_to_save") else found
    return found if isinstance(found, nn.Linear) else None


def _lora(
    module: nn.Module, spec: AdaptationSpec, parts: Parts, *, new: list[str], task: ModelTask, seed: int
) -> nn.Module:
    with peft_alone():
        from peft import LoraConfig

    if spec.name == "ffa_lora" and spec.dora:
        raise InputError(
            "model.adaptation.dora: ffa_lora trains only B, but DoRA also trains a norm; expected lora",
            key="model.adaptation.dora",
        )
    _refuse_changes_of_the_base(spec)
    if parts.vision:
        from fedfm.models.vision_part import with_parts

        spec = with_parts(module, spec, parts, new)
    if spec.targets == (ALL_LINEAR,):
        from fedfm.models.adapters.all_linear import all_linear

        spec = dataclasses.replace(spec, targets=all_linear(module, parts, new))
    _check_targets(module, spec, parts, new)
    hits, stacked, targets, excluded = _find_targets(module, spec, parts)
    transposed = any(type(m).__name__ == "Conv1D" for m in hits.values())
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha if spec.alpha is None or spec.alpha % 1 else int(spec.alpha),
        lora_dropout=spec.dropout,
        rank_pattern=dict(spec.rank_pattern or {}),
        alpha_pattern=dict(spec.alpha_pattern or {}),
        exclude_modules=excluded or None,
        init_lora_weights=True if spec.init_lora_weights == "default" else "gaussian",
        use_dora=spec.dora,
        use_rslora=spec.rslora,
        target_modules=[t for t in targets if any(_matches(n, (t,)) for n in hits)] if stacked else targets,
        target_parameters=stacked or None,
        modules_to_save=list(new) or None,
        fan_in_fan_out=transposed,
        task_type=task.peft_type("text") if task.is_language_model else None,
    )
    with peft_alone(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.derive(seed, "adaptation"))
        adapted = wrap(module, config, [n for n in hits if not _within(n, new)])
    if spec.name == "ffa_lora":
        for name, parameter in adapted.named_parameters():
            if ".lora_A." in name:
                parameter.requires_grad_(False)
    return adapted


def _find_targets(
    module: nn.Module, spec: AdaptationSpec, parts: Parts
) -> tuple[dict[str, nn.Module], list[str], list[str], list[str]]:
    """Which modules LoRA adapts.

    Returns:
        The adapted modules by path; the paths of adapted stacks of experts; PEFT's targets, and the modules that it
        leaves out of them.

    Raises:
        InputError: LoRA would adapt nothing, or would have no effect at a target.
    """
    targets = list(spec.targets or default_targets(parts))
    experts = stacks(module)
    if spec.layers is not None:
        _enough(spec.layers, parts)
        tops = tuple(path for stages in parts.stages for block in stages[-spec.layers :] for path, _ in block)
        targets = [
            name
            for name in (*(name for name, _ in module.named_modules()), *experts)
            if _matches(name, targets) and _within(name, tops)
        ]
        if not targets:
            raise InputError(
                f"model.adaptation.targets: none of {', '.join(spec.targets or ())} is in the last {spec.layers} of "
                f"{_deepest(parts)} blocks; drop model.adaptation.layers, or raise it",
                key="model.adaptation.targets",
            )
    hits = {n: m for n, m in module.named_modules() if _matches(n, targets)}
    stacked = [n for n in experts if _matches(n, targets)]
    if unread := [n for n in (*hits, *stacked) if not parts.reads(n)]:
        hits = {n: m for n, m in hits.items() if parts.reads(n)}
        stacked = [n for n in stacked if parts.reads(n)]
        targets = [*hits, *stacked]
        if not targets:
            raise InputError(
                f"model.adaptation.targets: the forward pass does not use {unread[0]}, so LoRA would learn nothing",
                key="model.adaptation.targets",
            )
    _check_excluded(spec, hits, stacked)
    excluded = [key for key in spec.exclude_modules or () if any(_matches(n, (key,)) for n in hits)]
    hits = {n: m for n, m in hits.items() if not _matches(n, excluded)}
    stacked = [n for n in stacked if not _in_or_named(n, spec.exclude_modules or ())]
    if idle := [n for n in hits if is_read_alone(module, n)]:
        owner = type(module.get_submodule(idle[0].rpartition(".")[0])).__name__
        raise InputError(
            f"model.adaptation.targets: {owner} reads the weight of {idle[0]} without calling this "
            f"module, so that LoRA would do nothing there: add {idle[0]} to exclude_modules",
            key="model.adaptation.targets",
        )
    if stacked and (spec.dropout or spec.dora):
        key = "dora" if spec.dora else "dropout"
        owners = (path.rpartition(".")[0] for path in stacked)
        raise InputError(
            f"model.adaptation.{key}: PEFT does not support {key} for experts such as {stacked[0]}, whose "
            f"matrices are one parameter: remove {key}, or {without(owners)}",
            key=f"model.adaptation.{key}",
        )
    for key in ("rank_pattern", "alpha_pattern"):
        _check_pattern(key, getattr(spec, key) or {}, (*hits, *stacked))
    return hits, stacked, targets, excluded


def _check_targets(module: nn.Module, spec: AdaptationSpec, parts: Parts, new: list[str]) -> None:
    """Refuse targets that PEFT refuses, and targets with which the model cannot run."""
    modules: dict[str, nn.Module | nn.Parameter] = {**dict(module.named_modules()), **stacks(module)}
    made = {n for n in modules if _within(n, new)}
    fit = {n for n, m in modules.items() if n not in made and _takes_factors(m, spec, parts)}
    has = ", ".join(sorted({n.rpartition(".")[2] for n in fit if n != parts.head}))
    right = f"it has {has}" if has else "use top_layers, head or full"
    if not spec.targets and not default_targets(parts):
        raise InputError(
            f"model.adaptation.targets: lora finds no query and value projections in this model: {right}",
            key="model.adaptation.targets",
        )
    refused = refused_by_peft(module, modules)
    for target in spec.targets or ():
        hits = [n for n in modules if target and (n == target or n.endswith(f".{target}"))]
        if not hits:
            raise InputError(
                f"model.adaptation.targets: no module {target!r} in this model: {right}", key="model.adaptation.targets"
            )
        if made.issuperset(hits):
            raise InputError(
                f"model.adaptation.targets: {hits[0]} is a new module and trained without LoRA: {right}",
                key="model.adaptation.targets",
            )
        if no := next((n for n in hits if n.rpartition(".")[2] in refused), None):
            raise InputError(
                f"model.adaptation.targets: PEFT does not adapt {no} in a model of this type: {right}",
                key="model.adaptation.targets",
            )
        if wrong := next((n for n in hits if n not in fit | made), None):
            kind = type(modules[wrong]).__name__
            raise InputError(
                f"model.adaptation.targets: {wrong} is of type {kind}, which {spec.name} cannot adapt: {right}",
                key="model.adaptation.targets",
            )


def _matches(name: str, ends: Iterable[str]) -> bool:
    """Whether a module's path equals or ends with one of these names; PEFT compares lists of names in this way."""
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _within(name: str, paths: Iterable[str]) -> bool:
    """Whether the name is one of these paths, or is below one of them."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def _in_or_named(path: str, ends: Iterable[str]) -> bool:
    """Whether the path of a parameter, or of its module, equals or ends with one of these names."""
    return _matches(path, ends) or _matches(path.rpartition(".")[0], ends)


def _refuse_changes_of_the_base(spec: AdaptationSpec) -> None:
    if spec.bias != "none":
        raise InputError(
            f'model.adaptation.bias = "{spec.bias}": it trains biases of the base, which must '
            'stay unchanged when the adapter is off, merged or exchanged; expected "none"; to train biases, set '
            'model.adaptation.name to "top_layers" or "full"',
            key="model.adaptation.bias",
        )
    start = spec.init_lora_weights
    if start not in ("default", "gaussian"):
        why = {
            "random": "B starts at random, so that the initial model differs from the base",
            "orthogonal": "A and B start at nonzero values, and averaging the factors does not preserve their product",
            "eva": "it reads rows before the start, and the rows differ between clients",
            "corda": "it reads rows before the start, and the rows differ between clients",
            "lora_ga": "it reads rows before the start, and the rows differ between clients",
        }.get(
            start,
            "it moves a part of the base's weights into the adapter, which then fits no other copy of the base",
        )
        raise InputError(
            f'model.adaptation.init_lora_weights = "{start}": {why}; expected "default" or "gaussian"',
            key="model.adaptation.init_lora_weights",
        )


def _check_excluded(spec: AdaptationSpec, hits: Iterable[str], stacked: Iterable[str]) -> None:
    """Refuse an exclusion that matches no target, and exclusions that match all; ``stacked`` has experts' paths."""
    names, parameters = list(hits), list(stacked)
    has = ", ".join(sorted({name.rpartition(".")[2] for name in (*names, *parameters)}))
    for key in spec.exclude_modules or ():
        if not any(_matches(name, (key,)) for name in names) and not any(_in_or_named(p, (key,)) for p in parameters):
            raise InputError(
                f"model.adaptation.exclude_modules: no target's name ends with {key!r}: the names end with {has}",
                key="model.adaptation.exclude_modules",
            )
    ends = spec.exclude_modules or ()
    if all(_matches(name, ends) for name in names) and all(_in_or_named(p, ends) for p in parameters):
        raise InputError(
            "model.adaptation.exclude_modules: it leaves no module to adapt; drop a name",
            key="model.adaptation.exclude_modules",
        )


def _check_pattern(of: str, keys: Iterable[str], adapted: Iterable[str]) -> None:
    """Refuse a rank or an alpha for modules that are not adapted; PEFT would ignore it."""
    for key in keys:
        if not any(_matches(name, (key,)) for name in adapted):
            has = ", ".join(sorted({name.rpartition(".")[2] for name in adapted}))
            raise InputError(
                f"model.adaptation.{of}: no adapted module's name ends with {key!r}: the names end with {has}",
                key=f"model.adaptation.{of}",
            )


def _takes_factors(module: nn.Module | nn.Parameter, spec: AdaptationSpec, parts: Parts) -> bool:
    if isinstance(module, nn.Parameter):  # the weights of several experts in one parameter
        return True
    if isinstance(module, nn.Conv2d):
        return not strides_are_read(parts) and spec.rank % module.groups == 0
    if isinstance(module, nn.Embedding):
        return spec.name == "lora"  # ffa_lora would freeze the factor that starts at zero, and train nothing
    kinds = (nn.Linear, nn.Conv1d, nn.Conv3d, nn.MultiheadAttention)
    return (isinstance(module, kinds) and not returns_several(module)) or type(module).__name__ == "Conv1D"


def _enough(count: int, parts: Parts) -> None:
    if not any(parts.stages):
        raise InputError(
            "model.adaptation.layers: the blocks of this architecture are unknown; use lora, head or full",
            key="model.adaptation.layers",
        )
    if count > _deepest(parts):
        raise InputError(
            f"model.adaptation.layers: {count}, but the model has {_deepest(parts)} blocks",
            key="model.adaptation.layers",
        )


def _deepest(parts: Parts) -> int:
    """Number of blocks of the deepest encoder; an encoder with fewer blocks than requested is trained completely."""
    return max(map(len, parts.stages))
