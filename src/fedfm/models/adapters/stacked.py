"""LoRA on a mixture's experts, whose matrices are stacked in one parameter (E, ., .).

PEFT adapts such a parameter with ``target_parameters``: A (E r, d_in) stacks the rows of all experts, and in B (d_out,
r E) the columns of one expert are E columns apart. Here both have an axis for the experts, A (E, r, d_in) and B (d_out,
r, E), so that the shapes show the rank. PEFT's products accept these shapes. Files have PEFT's shapes.

In version 4 of transformers, each expert had linear maps with names such as ``gate_proj``. PEFT still accepts these
names, and applies them to the parameters that experts have now. But dense layers and shared experts still have maps
with these names. Here a name means only a module with this name. In files, such a map is named by the path of its
weight, because PEFT would apply the module's name to the parameters of experts.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fedfm.errors import InputError
from fedfm.models.quiet import quiet


def stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters (E, ., .) that have a matrix for each of E experts, by path."""
    return {
        f"{path}.{name}": p
        for path, owner in module.named_modules()
        for name, p in owner.named_parameters(recurse=False)
        if _is_stack(owner, p)
    }


def wrap(module: nn.Module, config: Any, maps: Collection[str] | None = None) -> nn.Module:
    """PEFT's wrapper of the module; it adapts the modules that the configuration names.

    Args:
        maps: paths of the modules that must be adapted; None means that they are not checked.

    Raises:
        InputError: PEFT adapts other modules.
    """
    from peft import get_peft_model
    from peft.tuners.lora import LoraLayer

    wanted = {*(config.target_parameters or ()), *(maps or ())}
    with quiet(), _names_as_given():
        adapted: nn.Module = get_peft_model(module, config)
    layers = _layers(adapted)
    found = {_parameter(name, experts) for name, experts in layers.items()}
    if maps is not None:
        found |= {
            path_of(name) for name, m in adapted.named_modules() if isinstance(m, LoraLayer) and name not in layers
        }
    if maps is not None and (other := found ^ wanted):
        raise InputError(
            f"model.adaptation.targets: this release of PEFT does not adapt {min(other)} by its name: add it to "
            "exclude_modules"
        )
    for experts in layers.values():
        a, b = experts.lora_A["default"], experts.lora_B["default"]
        shapes = (experts.num_experts, -1, a.in_features), (b.out_features, -1, experts.num_experts)
        for linear, shape in zip((a, b), shapes, strict=True):
            by_expert = linear.weight.detach().view(shape)
            linear.weight = nn.Parameter(by_expert, requires_grad=linear.weight.requires_grad)
    return adapted


def without(paths: Iterable[str]) -> str:
    """For messages: the setting that leaves out the modules of experts with these paths."""
    names = sorted({path.rpartition(".")[2] for path in paths})
    return f"set exclude_modules = {json.dumps(names)}"


def in_files(tensors: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """The tensors, with PEFT's shapes for the factors of experts. :func:`from_files` is the inverse."""
    layers = _layers(module)
    a, b = ({f"{path}.lora_{part}.default.weight" for path in layers} for part in "AB")
    return {name: t.flatten(0, 1) if name in a else t.flatten(1, 2) if name in b else t for name, t in tensors.items()}


def from_files(tensor: Tensor, like: Tensor) -> Tensor:
    """A factor in the shape of ``like``, if the number of values is the same."""
    return (
        tensor.view(like.shape) if tensor.dim() == 2 and like.dim() == 3 and tensor.numel() == like.numel() else tensor
    )


def in_names_of_peft(config: Any, module: Any) -> Any | None:
    """The configuration with which plain PEFT adapts the same modules; None if the present configuration already does.

    It names each linear map by its path, and experts by their parameters.
    """
    from peft.tuners.lora import LoraLayer

    found = {path_of(name): m for name, m in module.named_modules() if isinstance(m, LoraLayer)}
    layers = _layers(module)
    taken = _taken_for_experts(config, module.get_base_model(), {path.rpartition(".")[2] for path in found})
    maps = {path_of(name): m for name, m in module.named_modules() if isinstance(m, LoraLayer) and name not in layers}
    parameters = {_parameter(name, layer): layer for name, layer in layers.items()}
    parameters |= {f"{path}.weight": m for path, m in maps.items() if path.rpartition(".")[2] in taken}
    if not parameters:
        return None
    out = copy.deepcopy(config)
    out.target_modules = sorted(path for path in maps if path.rpartition(".")[2] not in taken)
    out.target_parameters, out.exclude_modules, out.lora_dropout = sorted(parameters), None, 0.0
    by_path = parameters | {path: maps[path] for path in out.target_modules}
    ranks = {path: m.r["default"] for path, m in by_path.items()}
    alphas = {path: m.lora_alpha["default"] for path, m in by_path.items()}
    out.rank_pattern = {path: r for path, r in ranks.items() if r != config.r}
    out.alpha_pattern = {path: alpha for path, alpha in alphas.items() if alpha != config.lora_alpha}
    return out


def _is_stack(owner: nn.Module, p: nn.Parameter) -> bool:
    """Whether the first axis counts experts: the owner stores their number, or its class name contains "expert"."""
    if p.dim() != 3 or len(p) == 1 or not p.is_floating_point():
        return False
    counts = {value for name, value in vars(owner).items() if "expert" in name and type(value) is int}
    return len(p) in counts or "expert" in type(owner).__name__.lower()


def _layers(module: nn.Module) -> dict[str, Any]:
    """PEFT's layers around experts, by name; each layer adapts one of the experts' parameters."""
    from peft.tuners.lora.layer import ParamWrapper

    return {name: m for name, m in module.named_modules() if isinstance(m, ParamWrapper)}


def path_of(name: str) -> str:
    """A module's path without PEFT's wrappers."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def _parameter(name: str, layer: Any) -> str:
    return f"{path_of(name)}.{layer.parameter_name}"


def _taken_for_experts(config: Any, base: nn.Module, leaves: set[str]) -> set[str]:
    """The last parts of module names that PEFT would take for experts' parameters, or would refuse."""
    conversion = _conversion()
    convert = None if conversion is None else vars(conversion).get(_CONVERT)
    if convert is None:
        return set()
    out = set[str]()
    for leaf in leaves:
        tried = copy.copy(config)
        tried.target_modules, tried.target_parameters, tried.rank_pattern, tried.alpha_pattern = {leaf}, None, {}, {}
        try:
            convert(tried, model=base, conversions=None)
        except ValueError:
            out.add(leaf)
        else:
            out |= {leaf} - set(tried.target_modules)
    return out


@contextmanager
def _names_as_given() -> Iterator[None]:
    """Context manager: PEFT does not translate the names of version 4 of transformers."""
    conversion = _conversion()
    if conversion is None or _CONVERT not in vars(conversion):
        yield
        return
    own = vars(conversion)[_CONVERT]
    vars(conversion)[_CONVERT] = lambda *_, **__: None
    try:
        yield
    finally:
        vars(conversion)[_CONVERT] = own


def _conversion() -> Any:
    """PEFT's module that translates names of version 4 of transformers; None in releases without this module."""
    try:
        from peft.utils import transformers_weight_conversion
    except ImportError:
        return None
    return transformers_weight_conversion


_CONVERT = "convert_peft_config_for_transformers"
