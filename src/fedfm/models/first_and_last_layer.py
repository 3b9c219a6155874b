"""The first and the last layer of a module, from the table of its family or from a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fedfm.models.families import FAMILIES, Parts, find, type_of, unwrap


@dataclass(frozen=True)
class Ends:
    """The two ends of a module.

    Attributes:
        entrance: parameters of the first layer.
        output: path of the last layer, below PEFT's wrapper; "" if the module itself is this layer; None if unknown.
    """

    entrance: tuple[nn.Parameter, ...]
    output: str | None

    @classmethod
    def of(cls, parts: Parts) -> Ends:
        """The ends of known parts: the embedding and the head."""
        inside = () if parts.embedding is None else tuple(parts.embedding.parameters())
        return cls(inside, parts.head.partition(".")[0] or None)


def find_ends(module: nn.Module) -> Ends | None:
    """The ends of a model of a known family with a head; None for any other module."""
    root = unwrap(module)
    model_type = type_of(root)
    if model_type not in FAMILIES:
        return None
    heads = (FAMILIES[model_type].head, "lm_head", "head")
    head = next((h for h in heads if any(path.startswith(h) for path, _ in root.named_modules())), "")
    embedding = find(root, model_type).embedding
    if not head or embedding is None:
        return None
    return Ends(tuple(embedding.parameters()), head.partition(".")[0])


def _inside(path: str, container: str) -> bool:
    return path != container and (not container or path.startswith(f"{container}."))


@dataclass
class LayerCalls:
    """The executed layers in order: (path, output) of each module that has parameters of its own."""

    root: nn.Module
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def ends(self, output: Any = None) -> Ends:
        """The first and the last layer, according to these calls.

        The first layer's parameters include the parameters of its containers (class token, positions). The last layer
        is the layer that returned ``output``. If no layer returned it, the last layer is the layer called last.
        """
        if not self.calls:
            return Ends((), None)
        paths = list(dict.fromkeys(reversed([path for path, _ in self.calls])))
        innermost = next(p for p in paths if not any(_inside(other, p) for other in paths))
        last = next((path for path, found in self.calls if output is not None and found is output), innermost)
        first = self.calls[0][0]  # the hook of an inner module runs before the hooks of its containers
        steps = first.split(".")
        above = [self.root.get_submodule(".".join(steps[:i])) for i in range(len(steps))]
        around = [p for module in above for p in module.parameters(recurse=False)] if first else []
        return Ends((*self.root.get_submodule(first).parameters(), *around), last)


@contextmanager
def record_calls(module: nn.Module) -> Iterator[LayerCalls]:
    """Context manager: records every executed layer of the module."""
    root = unwrap(module)
    found = LayerCalls(root)

    def note(path: str, output: Any) -> None:
        found.calls.append((path, output if isinstance(output, Tensor) else None))

    hooks = [
        layer.register_forward_hook(lambda _, __, output, path=path: note(path, output))
        for path, layer in root.named_modules()
        if next(layer.parameters(recurse=False), None) is not None
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
