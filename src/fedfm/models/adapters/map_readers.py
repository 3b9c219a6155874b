"""Finds linear maps that LoRA cannot adapt, from the code of the model's classes.

LoRA adds to the output of a linear map's forward pass. Some classes read the weight of a map and do not call the map.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterable
from typing import Any

from torch import nn

from fedfm.models.adapters.peft_alone import peft_alone

_CHECK = "_check_target_module_compatiblity"
_READ = re.compile(r"\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size)\b)(\s*@)?")
_CALLED = re.compile(r"\bself\.(\w+)\(")


def is_read_alone(module: nn.Module, name: str) -> bool:
    """Whether the parent module reads the weight of this map instead of calling the map, and so would skip LoRA."""
    owner, _, leaf = name.rpartition(".")
    parent = module.get_submodule(owner)
    return isinstance(parent, nn.MultiheadAttention) or leaf in _read_by(class_of(parent))


def returns_several(m: nn.Module) -> bool:
    """Whether the class of a map returns several outputs, as some routers do; LoRA cannot add to a tuple."""
    return isinstance(m, nn.Linear) and _returns_tuple(class_of(m))


def refused_by_peft(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Last parts of the paths of modules that PEFT refuses to adapt, e.g. because kernels read their weights."""
    with peft_alone():
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel

    check: Any = next((vars(c)[_CHECK] for c in LoraModel.__mro__ if _CHECK in vars(c)), None)
    out, config = set[str](), LoraConfig()
    for leaf in {name.rpartition(".")[2] for name in names} if check is not None else ():
        try:
            check(None, config, module, leaf)
        except ValueError:
            out.add(leaf)
    return out


def class_of(module: nn.Module) -> Any:
    """The class whose code a module runs."""
    return type(module)


@functools.cache
def _read_by(owner: type[nn.Module]) -> frozenset[str]:
    """Names of the maps whose weights the class multiplies itself, or reads without ever calling the map."""
    try:
        code = inspect.getsource(owner)
    except (OSError, TypeError):
        return frozenset()
    read = {(found[1], bool(found[2])) for found in _READ.finditer(code)}
    called = {found[1] for found in _CALLED.finditer(code)}
    return frozenset(name for name, multiplied in read if multiplied or name not in called)


@functools.cache
def _returns_tuple(owner: type[nn.Module]) -> bool:
    if owner.forward is nn.Linear.forward:
        return False
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(owner.forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    return any(isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) for node in ast.walk(code))
