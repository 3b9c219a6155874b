"""A model of texts and images has a language part and a vision part. Choose the part that an adaptation trains.

Without ``targets``, LoRA adapts the language part. The words "language" and "vision" among the targets name the parts
in which LoRA searches the other targets. Without other targets, LoRA adapts the query and value projections of these
parts. The vision part includes the map from its outputs to the language part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from torch import nn

from fedfm.errors import InputError
from fedfm.models.families import Parts, default_targets
from fedfm.models.spec import ALL_LINEAR, AdaptationSpec

LANGUAGE, VISION = "language", "vision"


def with_parts(module: nn.Module, spec: AdaptationSpec, parts: Parts, new: Iterable[str]) -> AdaptationSpec:
    """The specification with paths of modules as targets, if it names a part or has no targets; else unchanged.

    Raises:
        InputError: a target is in none of the chosen parts, or a part has no default targets.
    """
    words = [word for word in spec.targets or (LANGUAGE,) if word in (LANGUAGE, VISION)]
    names = tuple(target for target in spec.targets or () if target not in words)
    if not words:
        return spec
    found: list[str] = []
    for word in dict.fromkeys(words):
        ends = names or _defaults(parts, word)
        if ends == (ALL_LINEAR,):
            from fedfm.models.adapters.all_linear import all_linear

            paths: Iterable[str] = all_linear(module, parts, new)
        else:
            paths = (n for n, _ in module.named_modules() if any(n == e or n.endswith(f".{e}") for e in ends))
        found += [path for path in paths if in_vision(path, parts) == (word == VISION)]
    for name in names:
        if name != ALL_LINEAR and not any(path == name or path.endswith(f".{name}") for path in found):
            raise InputError(
                f"model.adaptation.targets: no module {name!r} in the {' and '.join(words)} part of this model",
                key="model.adaptation.targets",
            )
    return dataclasses.replace(spec, targets=tuple(found))


def _defaults(parts: Parts, word: str) -> tuple[str, ...]:
    """The default targets of a part.

    Raises:
        InputError: the part has none.
    """
    of = parts
    if word == VISION:
        of = Parts(None, parts.vision_blocks, None, None, "")
    found = default_targets(of)
    if not found:
        raise InputError(
            f"model.adaptation.targets: lora finds no query and value projections in the {word} part of this model: "
            f'name its maps, such as targets = ["{word}", "all-linear"]',
            key="model.adaptation.targets",
        )
    return found


def in_vision(path: str, parts: Parts) -> bool:
    """Whether a module or tensor belongs to the vision part. Its path may have a prefix, as in PEFT."""
    return any(f".{other}." in f".{path}." for other in parts.vision)


def describe(parts: Parts, names: Sequence[str], adaptation: str) -> tuple[str, bool]:
    """A notice on how many of these trained tensors each part has, and whether the adaptation trains the vision part.

    The first axis of the vision part's tensors is that of images or patches, not of rows. If this part is trained,
    gradients of single rows need one pass per row.
    """
    seen = sum(in_vision(path, parts) for path in names)
    read, where = len(names) - seen, f"the vision part ({', '.join(parts.vision)})"
    if seen and read:
        text = f"{read} tensors of the language part and {seen} of {where}"
    elif seen:
        text = f"{seen} tensors of {where}, and none of the language part"
    else:
        text = f"{read} tensors of the language part; {where} stays as it is"
        if "lora" in adaptation:
            text += f', unless targets has "{VISION}"'
    return f'model.adaptation.name = "{adaptation}" trains {text}', bool(seen)
