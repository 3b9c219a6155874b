"""Searches a model's modules for its blocks, in order of execution, and for parts that its forward pass does not use.

Blocks are entries of lists of modules: layers of a transformer, of a stage, or of an encoder and then of a decoder. An
entry counts as a block if it has a norm (experts of a layer have none) and weight matrices. A stage is replaced by the
blocks in it. A few models, such as XLM, have one list for each part of a block; a block is then one entry of each list.
:mod:`fedfm.models.first_batch` checks that the blocks run in this order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn

Place = tuple[str, nn.Module]  # a path from the model's root, and its module
_STAGE = 0.5  # if the blocks in a stage have a smaller share of its parameters, the stage counts as one block


def find_blocks(module: nn.Module, leave_out: Collection[str] = ()) -> tuple[Place, ...]:
    """(path, module) of the blocks in order; empty if none were found.

    Args:
        leave_out: paths outside the forward pass, such as the vision tower of a model that reads texts.
    """
    # A block of the simplest networks has one weight matrix, but an embedding's convolution with its norm also has one.
    # So entries with one matrix are tried only if no entry has two.
    for matrices in (2, 1):
        if found := tuple(_within(module, "", frozenset(leave_out), matrices, inside=False)):
            return found
    return ()


def in_parallel_lists(module: nn.Module) -> tuple[tuple[Place, ...], ...]:
    """The modules of each block: the entries with the same index in all lists of one module.

    These lists must have the same length, and together hold at least half of the parameters outside embeddings. The
    result is () if no module has such lists.
    """
    embeddings = _numbers(m for m in module.modules() if isinstance(m, nn.Embedding))
    for path, owner in module.named_modules():
        lists = [(name, m) for name, m in owner.named_children() if isinstance(m, nn.ModuleList) and len(m)]
        if len(lists) < 2 or len({len(m) for _, m in lists}) > 1:
            continue
        if 2 * _numbers(m for _, m in lists) < _numbers([module]) - embeddings:
            continue
        at = [(f"{path}.{name}" if path else name, m) for name, m in lists]
        blocks = [tuple((f"{name}.{i}", m[i]) for name, m in at) for i in range(len(lists[0][1]))]
        if all(_is_block(nn.ModuleList(m for _, m in block), 2) for block in blocks):
            return tuple(blocks)
    return ()


def unread_by_text(module: Any) -> tuple[str, ...]:
    """Paths of the parts of a transformers model through which no text passes; no path is inside another.

    These parts are towers for images or sound, and other parts next to the language part of a multimodal model.
    """
    if getattr(module, "main_input_name", None) != "input_ids":
        return ()
    towers = [name for name, m in module.named_modules() if getattr(m, "main_input_name", "input_ids") != "input_ids"]
    found = [*towers, *_next_to_decoder(module)]
    return tuple(name for name in dict.fromkeys(found) if not any(name.startswith(f"{other}.") for other in found))


def _next_to_decoder(module: Any) -> Iterator[str]:
    """Paths of modules next to the decoder, except those directly below the root, which are heads."""
    if getattr(module.config, "text_config", None) is None:
        return
    decoder = module.get_decoder()
    path = next((name for name, m in module.named_modules() if m is decoder), "")
    steps = path.split(".")
    for above in (".".join(steps[:i]) for i in range(1, len(steps))):
        for name, child in module.get_submodule(above).named_children():
            if not f"{path}.".startswith(f"{above}.{name}.") and _numbers([child]):
                yield f"{above}.{name}"


def _within(module: nn.Module, path: str, leave_out: frozenset[str], matrices: int, *, inside: bool) -> Iterator[Place]:
    """The blocks below a module.

    Args:
        inside: whether the module is an entry of a list. If so, a list below the module counts only if all entries
            of that list are of one class.
    """
    if isinstance(module, nn.ModuleList | nn.Sequential):
        entries = [(f"{path}.{name}", m) for name, m in module.named_children() if _numbers([m])]
        if _are_blocks([m for _, m in entries], matrices, alike=inside):
            stages = _differ(m for _, m in entries)
            for at, entry in entries:
                blocks = tuple(_within(entry, at, leave_out, matrices, inside=True)) if stages else ()
                if isinstance(entry, nn.ModuleList) or _numbers(m for _, m in blocks) >= _STAGE * _numbers([entry]):
                    yield from blocks
                elif _is_block(entry, matrices):
                    yield at, entry
            return
    for name, child in module.named_children():
        at = f"{path}.{name}" if path else name
        if at not in leave_out:
            yield from _within(child, at, leave_out, matrices, inside=inside)


def _are_blocks(entries: list[nn.Module], matrices: int, *, alike: bool) -> bool:
    if not entries or (alike and len({type(m) for m in entries}) > 1):  # the parts of one block have different classes
        return False
    return 2 * sum(_is_block(m, matrices) for m in entries) >= len(entries)


def _is_block(module: nn.Module, matrices: int) -> bool:
    normalises = any("norm" in type(m).__name__.lower() for m in module.modules())
    weights = [name for name, p in module.named_parameters() if name.endswith("weight") and p.dim() > 1]
    return normalises and len(weights) >= matrices


def _differ(entries: Iterable[nn.Module]) -> bool:
    """Whether the entries of a list may be stages: stages differ in width or depth, layers do not."""
    shapes = [[(name, p.shape) for name, p in m.named_parameters()] for m in entries]
    return len(shapes) == 1 or any(s != shapes[0] for s in shapes)


def _numbers(modules: Iterable[nn.Module]) -> int:
    return sum(p.numel() for m in modules for p in m.parameters())
