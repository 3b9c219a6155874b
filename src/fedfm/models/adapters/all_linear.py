"""Lists the modules that ``targets = "all-linear"`` adapts, and the modules that it leaves out, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from fedfm.models.adapters.map_readers import is_read_alone, refused_by_peft, returns_several
from fedfm.models.adapters.stacked import stacks
from fedfm.models.families import Parts, unwrap

_SHARE = 0.01  # a matrix that is not a linear map is named only if it has at least this share of the model's parameters


def all_linear(module: nn.Module, parts: Parts, new: Iterable[str]) -> tuple[str, ...]:
    """Paths of all linear maps and experts that LoRA adapts.

    The head, new modules and the maps that :func:`left_out` names are not among them.
    """
    return tuple(path for path, why in _reasons(module, parts, new).items() if not why)


def left_out(module: nn.Module, parts: Parts, new: Iterable[str]) -> str:
    """A notice about the matrices that "all-linear" leaves out, with their share of all parameters; "" if none."""
    total = sum(_size(m) for m in module.modules()) or 1
    found: dict[str, dict[str, int]] = {}  # reason -> last part of the name -> number of values
    for path, why in _reasons(module, parts, new).items():
        if why:
            sizes = found.setdefault(why, {})
            leaf = path.rpartition(".")[2]
            sizes[leaf] = sizes.get(leaf, 0) + _size(module.get_submodule(path))
    other = _other_matrices(module, parts)
    if sum(other.values()) >= _SHARE * total:
        found["which are not linear maps"] = {n: size for n, size in other.items() if size >= _SHARE * total} or other
    texts = [
        " and ".join(f"{leaf} ({100 * size / total:.2g} % of the parameters)" for leaf, size in sorted(sizes.items()))
        + f", {why}"
        for why, sizes in found.items()
    ]
    return f'model.adaptation.targets: "all-linear" leaves out {"; ".join(texts)}' if texts else ""


def _reasons(module: nn.Module, parts: Parts, new: Iterable[str]) -> dict[str, str]:
    """Why each linear map or experts' parameter of the forward pass is left out, by path; "" if it is adapted."""
    own = (*new, *((parts.head,) if parts.head else ()))
    whole: Any = unwrap(module)
    out = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    found = dict[str, str]()
    refused = refused_by_peft(module, (name for name, _ in module.named_modules()))
    for name, m in module.named_modules():
        if not (isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D") or m is out:
            continue
        if not parts.reads(name) or any(name == path or name.startswith(f"{path}.") for path in own):
            continue
        found[name] = ""
        if is_read_alone(module, name):
            found[name] = "whose weights the model reads without calling the module"
        elif returns_several(m):
            found[name] = "which return more than a product"
        elif name.rpartition(".")[2] in refused:
            found[name] = "which PEFT does not adapt in a model of this type"
    return found | {name: "" for name in stacks(module) if parts.reads(name)}


def _other_matrices(module: nn.Module, parts: Parts) -> dict[str, int]:
    """Number of values in matrices that are neither in linear maps nor experts, by the last part of the name."""
    experts, sizes = {id(p) for p in stacks(module).values()}, dict[str, int]()
    for blocks in parts.encoders:
        for _, block in blocks:
            for m in block.modules():
                if type(m).__module__.startswith(("torch.nn.", "transformers.pytorch_utils", "bitsandbytes.")):
                    continue
                for name, p in m.named_parameters(recurse=False):
                    if p.dim() > 1 and id(p) not in experts and "bias" not in name:
                        sizes[name] = sizes.get(name, 0) + p.numel()
    return sizes


def _size(m: nn.Module) -> int:
    """Number of values in a module's own parameters; for a quantised map the number after dequantisation."""
    if isinstance(m, nn.Linear):
        return m.in_features * m.out_features + (m.out_features if m.bias is not None else 0)
    return sum(p.numel() for p in m.parameters(recurse=False))
