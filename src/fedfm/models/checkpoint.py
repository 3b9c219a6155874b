"""Compare a checkpoint with the module that it was loaded into: missing, extra and misshapen tensors.

transformers initialises missing tensors at random and drops extra tensors. Here both are an error, except for parts
that may be new. These are the head of the task, and modules that the checkpoint's own class (the class that wrote the
file) does not have.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedfm.errors import InputError
from fedfm.models.heads import bases, head_of, output_maps, within

if TYPE_CHECKING:
    from fedfm.models.stored_files import StoredWeights

_FIRST = 3  # number of names that a message lists
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")  # from parallel, compiled, sharded modules of torch
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # the number of a block in a name
_TRIED = 20  # number of missing names to look up under another prefix


@dataclass
class Difference:
    """The differences that transformers reports after a load.

    Attributes:
        module: the loaded module.
        path: folder or hub id of the checkpoint.
        missing: names of the tensors that the checkpoint lacks.
        leftovers: names of the checkpoint's tensors that the module does not have.
        shapes: (shape in the checkpoint, shape in the module) by name, for the tensors whose shapes differ.
    """

    module: Any
    path: Path | str
    missing: set[str]
    leftovers: set[str]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    @classmethod
    def of_load(cls, module: Any, path: Path | str, info: Mapping[str, Any]) -> Difference:
        """The differences in the loading info of ``from_pretrained``."""
        shapes = {name: (tuple(theirs), tuple(ours)) for name, theirs, ours in info["mismatched_keys"]}
        missing = set(info["missing_keys"]) - shapes.keys()
        found = cls(module, path, {n for n in missing if _is_weight(module, n)}, set(info["unexpected_keys"]), shapes)
        found.leftovers |= found._hidden_leftovers()
        return found

    def judge(self, *, head: bool) -> tuple[set[str], list[str]]:
        """Names of the tensors that are new for the task, and notices about guesses.

        Args:
            head: whether the task may add a new head.

        Raises:
            InputError: other tensors are missing, extra or misshapen.
        """
        free = self._head if head else set()
        odd = {n: s for n, s in self.shapes.items() if not any(within(n, f) for f in free)}
        lacking = {n for n in self.missing if not any(within(n, f) for f in free)}
        new = {n for unit in self._units(lacking) if head and self._optional(unit) for n in lacking if within(n, unit)}
        faults = [*self._lacks(sorted(lacking - new)), *shape_faults(odd), *_surplus(self.surplus())]
        if faults:
            raise InputError(f"model.name: {self.path} {'; it '.join(faults)}", key="model.name")
        notices = [*self._new_parts(new), *self._guessed_heads(), *self._left_out()]
        return (self.missing | self.shapes.keys()), notices

    def surplus(self) -> list[str]:
        """Names of extra weights that belong to a part which the module has."""
        return sorted(n for n in self.leftovers if self._is_inside(n) and not self._saved_has(n) and self._is_weight(n))

    def _hidden_leftovers(self) -> set[str]:
        """Names of extra tensors that a pattern of the class hides by chance.

        transformers does not report an extra tensor whose name matches such a pattern. A pattern is meant for complete
        parts of a name: GPT-2's pattern ``attn.bias`` is meant for a mask of older releases, but also matches
        ``c_attn.bias``. A tensor is hidden by chance if a parameter of the module has the same name up to numbers.
        """
        found = self._under_patterns()
        if not found:
            return set()
        meant = re.compile("|".join(rf"(?:^|\.)(?:{p})" for p in self._patterns))
        kinds = {_NUMBER.sub("#", name) for name, _ in self.module.named_parameters(remove_duplicate=False)}
        return {n for n in found if not meant.search(n) and {_NUMBER.sub("#", a) for a in self._aliases(n)} & kinds}

    def _under_patterns(self) -> set[str]:
        """Names of extra tensors that transformers does not report, because a pattern of the class matches them."""
        if not self._patterns:
            return set()
        hides, there = re.compile("|".join(f"(?:{p})" for p in self._patterns)), self.module.state_dict().keys()
        return {name for name in self._weights if hides.search(name) and not self._aliases(name) & there}

    @property
    def _patterns(self) -> list[str]:
        return list(getattr(self.module, "_keys_to_ignore_on_load_unexpected", None) or ())

    @cached_property
    def _bases(self) -> tuple[str, ...]:
        return bases(self.module)

    @cached_property
    def _head(self) -> set[str]:
        """The modules that a task adds: the last linear map, and output maps that do not fit the file."""
        odd = self.missing | self.shapes.keys()
        if self.module.get_output_embeddings() is not None:
            return set()
        others = output_maps(self.module) if self._bases != ("",) else []
        maps = {head_of(self.module), *(path for path in others if f"{path}.weight" in odd)} - {""}
        return {path.partition(".")[0] for path in maps}

    @cached_property
    def _saved_names(self) -> frozenset[str] | None:
        """Names of the tensors of the class that wrote the checkpoint; None if the class is unknown."""
        import transformers

        names = self._saved_class
        kind = getattr(transformers, names, None) if names else None
        if kind is None or not hasattr(kind, "base_model_prefix"):
            return None
        if kind is type(self.module):
            return frozenset(self.module.state_dict())
        config = transformers.AutoConfig.from_pretrained(self.path, trust_remote_code=False)
        try:
            with torch.device("meta"):
                return frozenset(kind(config).state_dict())
        except (TypeError, ValueError, AttributeError, ImportError):  # a class for another configuration
            return None

    @cached_property
    def _saved_class(self) -> str:
        """Name of the class that wrote the checkpoint; "" if the checkpoint's configuration does not name it."""
        from transformers import AutoConfig

        found = AutoConfig.from_pretrained(self.path, trust_remote_code=False).architectures
        return str(found[0]) if found else ""

    def _saved_has(self, name: str) -> bool:
        """Whether the class that wrote the checkpoint has this tensor, with or without a base's name as prefix."""
        names = self._saved_names
        return names is not None and any(local in names for local in self._aliases(name))

    def _is_weight(self, name: str) -> bool:
        """Whether an extra tensor can be a learned weight.

        Single values, masks and tables of positions are not weights. Neither are tensors that the module computes by
        itself; older releases of transformers saved such tensors.
        """
        leaf = name.rpartition(".")[2]
        if name in self._weights:
            whole = not self._weights.dtype(name).startswith(("F", "BF"))
            bits = leaf == "weight"  # integers with this name are the weight of a quantised map
            if math.prod(self._weights.shape(name)) == 1 or (whole and not bits):
                return False
        computed = {n for n, _ in self.module.named_buffers()} - self.module.state_dict().keys()
        leaves = {n.rpartition(".")[2] for n in computed} - {"weight", "bias"}
        return leaf not in leaves and not self._aliases(name) & computed

    @cached_property
    def _weights(self) -> StoredWeights:
        from fedfm.models.stored_files import StoredWeights

        return StoredWeights(self.path)

    def _aliases(self, name: str) -> set[str]:
        """The names that a tensor may have in files: with and without the prefix of a base."""
        prefixes = {*self._bases, self.module.base_model_prefix} - {""}
        return {name, *(name.removeprefix(f"{p}.") for p in prefixes), *(f"{p}.{name}" for p in prefixes)}

    def _units(self, names: Iterable[str]) -> set[str]:
        """The parts that contain these tensors: children of a base, or of the module around it."""
        found = set[str]()
        for name in names:
            base = next((b for b in self._bases if b and within(name, b)), "")
            depth = 2 if base else 1
            parts = name.split(".")
            if len(parts) > depth:
                found.add(".".join(parts[:depth]))
        return found

    def _optional(self, unit: str) -> bool:
        """Whether a part that the checkpoint lacks may be new.

        It may be new if the checkpoint has none of the part's tensors, and if one of two conditions is true: the
        checkpoint's own class has no such part, or the part is a pooler and the base can be built without a pooler.
        """
        own = {n for n in self.module.state_dict() if within(n, unit) and _is_weight(self.module, n)}
        if self._bases == ("",) or not own <= self.missing:
            return False
        if self._saved_names is not None and not any(self._saved_has(n) for n in own):
            return True
        base = next((b for b in self._bases if within(unit, b)), None)
        if base is None:
            return self._saved_names is None
        return all(n.removeprefix(f"{base}.") not in _without_pooler(self.module.get_submodule(base)) for n in own)

    def _is_inside(self, name: str) -> bool:
        """Whether an extra tensor belongs to a part that the base has."""
        for base in self._bases:
            part = self.module.get_submodule(base)
            prefixes = [p for p in {base, self.module.base_model_prefix} if p and name.startswith(f"{p}.")]
            local = name.removeprefix(f"{prefixes[0]}.") if prefixes else name
            first = local.partition(".")[0]
            children = {child for child, _ in part.named_children()} | {p for p, _ in part.named_parameters("", False)}
            outside = {child for child, _ in self.module.named_children()} if base else self._head
            if first in children and (prefixes or first not in outside):
                return True
        return False

    def _lacks(self, names: list[str]) -> list[str]:
        if not names:
            return []
        own = {
            n
            for n, _ in (
                *self.module.named_parameters(remove_duplicate=False),
                *self.module.named_buffers(remove_duplicate=False),
            )
        }
        total = sum(n in own for n in self.module.state_dict())  # does not count the scales of quantised weights
        text = f"lacks {len(names)} of the {total} tensors of a {type(self.module).__name__}: {some(names)}"
        if prefix := self._prefix(names):
            text += f". Its names are the model's names with the prefix {prefix!r}: save the module inside that wrapper"
        return [text]

    def _prefix(self, names: list[str]) -> str:
        """The prefix under which the checkpoint has at least half of the missing names; "" if there is none.

        The search cannot find names that transformers changes while loading. If the search fails, the result
        is the prefix of one of torch's wrappers, provided that all extra names begin with this prefix.
        """
        tried = names[:_TRIED]
        found = Counter(
            other.removesuffix(local)
            for name in tried
            for local in self._aliases(name)
            for other in self.leftovers
            if other.endswith(f".{local}")
        )
        prefix, count = min(found.items(), key=lambda entry: (-entry[1], len(entry[0])), default=("", 0))
        if 2 * count >= len(tried):
            return prefix
        return next((p for p in _WRAPPERS if self.leftovers and all(n.startswith(p) for n in self.leftovers)), "")

    def _new_parts(self, new: set[str]) -> list[str]:
        if not new:
            return []
        parts = sorted({name.rpartition(".")[0] for name in new})
        return [f"model.name: {self.path} has no {some(parts)}: the model has new, untrained values there"]

    def _guessed_heads(self) -> list[str]:
        """A notice about tensors that are left out although the checkpoint names no other class than the module's."""
        left = sorted(name for name in self.leftovers if self._is_weight(name))
        if not left or self._saved_class not in ("", type(self.module).__name__):
            return []
        return [
            f"model.name: {self.path} has {tensors(len(left))} for which a {type(self.module).__name__} has no place: "
            f"{some(left)}; taken for the head of another task and left out"
        ]

    def _left_out(self) -> list[str]:
        """A notice about weights that the class leaves out by a pattern.

        Examples are the layers with which some models predict a second word. The notice does not name weights that the
        checkpoint's own class has.
        """
        found = self._under_patterns() - self.leftovers
        left = sorted(n for n in found if not self._saved_has(n) and self._is_learned(n))
        if not left:
            return []
        kind = type(self.module).__name__
        return [f"model.name: {self.path} has {tensors(len(left))} that a {kind} leaves out: {some(left)}"]

    def _is_learned(self, name: str) -> bool:
        """Whether an extra tensor has more than two different values; a mask of older releases has at most two."""
        return self._is_weight(name) and not _is_mask(self._weights[name])


def _is_weight(module: nn.Module, name: str) -> bool:
    """Whether a tensor was learned: it is neither a counter nor a table of positions."""
    try:
        tensor: Tensor = module.get_buffer(name)
    except AttributeError:
        return True
    return tensor.is_floating_point()


def _is_mask(tensor: Tensor) -> bool:
    """Whether a tensor has at most two different values."""
    tensor = tensor.float()  # torch finds no minimum of eight-bit floats
    low, high = tensor.aminmax()
    return bool(((tensor == low) | (tensor == high)).all())


def _without_pooler(base: Any) -> frozenset[str]:
    """Names of the tensors of a base that is built without its pooler; all names if the base always has one."""
    if "add_pooling_layer" not in inspect.signature(type(base).__init__).parameters:
        return frozenset(base.state_dict())
    with torch.device("meta"):
        return frozenset(type(base)(base.config, add_pooling_layer=False).state_dict())


def shape_faults(shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> list[str]:
    """The fault text for tensors whose shapes in file and model differ; [] if there are none."""
    if not shapes:
        return []
    named = [f"{name} is {theirs}, expected {ours}" for name, (theirs, ours) in sorted(shapes.items())]
    return [f"has {tensors(len(shapes))} with a shape that differs from its configuration: {some(named)}"]


def _surplus(names: list[str]) -> list[str]:
    if not names:
        return []
    return [f"has {tensors(len(names))} for which a model of its configuration has no place: {some(names)}"]


def tensors(count: int) -> str:
    """The count in words, e.g. "3 tensors"."""
    return "a tensor" if count == 1 else f"{count} tensors"


def some(names: list[str]) -> str:
    """The first of these names, and the number of the others."""
    others = len(names) - _FIRST
    return ", ".join(names[:_FIRST]) + (f" and {others} more" if others > 0 else "")
