"""Groups a model's trainable tensors by layer, to compare and mix task vectors layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedfm.models.model import Model

GRANULARITIES = ("model", "layer", "module")
_PEFT = "base_model.model."


def layers(model: Model, granularity: str) -> dict[str, tuple[str, ...]]:
    """The names of the trainable tensors of each layer, in the model's order.

    Args:
        model: if its blocks are unknown (``model.parts``), each module is a layer.
        granularity: ``model`` makes one layer of all tensors. ``layer`` makes one layer of each transformer block; all
            modules before the first block are the layer ``embeddings``, and final norm, pooler and head are one layer
            each. ``module`` makes one layer of each adapted module. LoRA's A and B of a module are in one layer.
            Running statistics are in no layer, since they are not trained.
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


def body_and_head(model: Model) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(names of the tensors in the model's body, names of the tensors in its head), including running statistics.

    The head is the last linear layer and the modules that PEFT trains in full (``modules_to_save``).
    """
    path = getattr(getattr(model, "parts", None), "head", "")

    def is_head(name: str) -> bool:
        return ".modules_to_save." in name or (bool(path) and f"{module_of(name)}.".startswith(f"{path}."))

    names = model.names
    return tuple(n for n in names if not is_head(n)), tuple(n for n in names if is_head(n))


def module_of(name: str) -> str:
    """The path of a parameter's module in the foundation model, without PEFT's wrapper and LoRA's suffixes."""
    path = name.removeprefix(_PEFT).replace(".modules_to_save.default", "")
    return path.partition(".lora_")[0] if ".lora_" in path else path.rpartition(".")[0]
