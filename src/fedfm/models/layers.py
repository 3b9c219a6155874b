"""Which of a model's travelling tensors make a layer: the pieces by which task vectors are compared and mixed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedfm.models.model import Model

GRANULARITIES = ("model", "layer", "module")
_PEFT = "base_model.model."


def layers(model: Model, granularity: str) -> dict[str, tuple[str, ...]]:
    """Layer -> names of its trainable tensors, in the model's order.

    Args:
        model: any; without known blocks (``model.parts``) a layer is a module.
        granularity: ``model``: all of them; ``layer``: a transformer block (what comes before the first one is one
            layer, ``embeddings``; final norm, pooler and head are one each); ``module``: one adapted module. LoRA's A
            and B of a module are never apart. Running statistics, which are not trained, are in none.
    """
    trained = tuple(name for name in model.names if name in model.live())
    if granularity == "model":
        return {"model": trained}
    parts = getattr(model, "parts", None)
    encoders = parts.encoders if parts is not None and granularity == "layer" else ()
    blocks = [path for encoder in encoders for path, _ in encoder]
    modules = [module_of(name) for name in trained]
    owners = [next((path for path in blocks if m == path or m.startswith(f"{path}.")), "") for m in modules]
    first = next((i for i, block in enumerate(owners) if block), 0)
    found: dict[str, list[str]] = {}
    for i, name in enumerate(trained):
        found.setdefault(owners[i] or ("embeddings" if i < first else modules[i]), []).append(name)
    return {layer: tuple(names) for layer, names in found.items()}


def halves(model: Model) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(names of the body, names of the head) among a model's travelling tensors, running statistics included.

    The head is the last linear layer and what PEFT trains in full beside its adapters (``modules_to_save``).
    """
    path = getattr(getattr(model, "parts", None), "head", "")

    def is_head(name: str) -> bool:
        module = module_of(name)
        return ".modules_to_save." in name or (bool(path) and f"{module}.".startswith(f"{path}."))

    names = model.names
    return tuple(n for n in names if not is_head(n)), tuple(n for n in names if is_head(n))


def module_of(name: str) -> str:
    """The module of a parameter, as the foundation model calls it: PEFT's wrapping and LoRA's A and B taken off."""
    path = name.removeprefix(_PEFT).replace(".modules_to_save.default", "")
    return path.partition(".lora_")[0] if ".lora_" in path else path.rpartition(".")[0]
