"""Where the parts of a model lie: embedding, blocks (of one encoder or of two), final norm, pooler, head.

An explicit table for the families that are tested, by ``config.model_type``; other models fall back on what their
modules look like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fedfm.errors import InputError


@dataclass(frozen=True)
class Family:
    """Paths inside the base model (``module.<base_model_prefix>``), or inside the whole module where there is none.

    Attributes:
        embedding: turns the model's input into b_0.
        blocks: the ModuleLists that hold the blocks, in order.
        norm: final normalisation and whatever else stands between the blocks and the pooler.
        pooler: turns (n, T, d) into (n, d) with weights of its own.
        head: the last linear layer; a path inside the whole module.
        text: the ModuleList of a text encoder beside one of pictures, whose parts are the others.
    """

    embedding: str
    blocks: tuple[str, ...]
    norm: str = ""
    pooler: str = ""
    head: str = "classifier"
    text: str = ""


_VIT = Family("embeddings", ("layers",), "layernorm")
_CLIP = Family(
    "vision_model.embeddings",
    ("vision_model.encoder.layers",),
    "vision_model.post_layernorm",
    text="text_model.encoder.layers",
)
_BERT = Family("embeddings", ("encoder.layer",), "", "pooler")
_ROBERTA = Family("embeddings", ("encoder.layer",), "", "", "classifier.out_proj")
_LLAMA = Family("embed_tokens", ("layers",), "norm", "", "score")

FAMILIES: dict[str, Family] = {
    "vit": _VIT,
    "deit": _VIT,
    "ijepa": _VIT,
    "dinov2": Family("embeddings", ("encoder.layer",), "layernorm"),
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "siglip": replace(_CLIP, pooler="vision_model.head"),
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": Family("embeddings", ("transformer.layer",), "", ""),
    "gpt2": Family("wte", ("h",), "ln_f", "", "score"),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "vision-text-dual-encoder": Family(
        "vision_model.embeddings",
        ("vision_model.layers", "vision_model.encoder.layers", "vision_model.encoder.layer"),
        "vision_model.layernorm",
        "vision_model.pooler",
        text="text_model.encoder.layer",
    ),
    "resnet": Family("embedder", ("encoder.stages",), "", "", "classifier.1"),
    "mobilenet_v2": Family("conv_stem", ("layer",), "conv_1x1"),
    "cifar_resnet": Family("bn1", ("layer1", "layer2", "layer3"), "", "", "linear"),
    "fedfm_preact_resnet": Family("stem", tuple(f"sections.{s}" for s in range(16)), "bn", "", "fc"),
}


@dataclass(frozen=True)
class Parts:
    """The parts of one model, as modules and as paths from its root.

    Attributes:
        embedding: module, or None where it was not found.
        blocks: (path, module) in order; empty where none was found.
        norm: final norm, or None.
        pooler: or None.
        head: path of the last linear layer; "" where the model has none.
        text_blocks: of a text encoder beside one of pictures, whose parts are the others; empty where there is none.
    """

    embedding: nn.Module | None
    blocks: tuple[tuple[str, nn.Module], ...]
    norm: nn.Module | None
    pooler: nn.Module | None
    head: str
    text_blocks: tuple[tuple[str, nn.Module], ...] = ()

    @property
    def encoders(self) -> tuple[tuple[tuple[str, nn.Module], ...], ...]:
        """(path, module) of the layers of each encoder, each numbered from its own first one; pictures before texts."""
        return (self.blocks, self.text_blocks) if self.text_blocks else (self.blocks,)


def find(module: nn.Module, model_type: str) -> Parts:
    """The parts of ``module``, before any adapter is put into it."""
    prefix = getattr(module, "base_model_prefix", "")
    family = FAMILIES.get(model_type)
    if family is None:
        return _guess(module)
    blocks, text_blocks = _blocks(module, prefix, family.blocks), _blocks(module, prefix, (family.text,))
    head = next((h for h in (family.head, "lm_head", "head") if _linear(module, h)), "")
    if not blocks or not (head or text_blocks):
        guess = _guess(module)
        blocks, head = blocks or guess.blocks, head or guess.head
    embedding, norm, pooler = (
        _module(module, _resolve(module, prefix, p)) for p in (family.embedding, family.norm, family.pooler)
    )
    return Parts(embedding, blocks, norm, pooler, head, text_blocks)


def type_of(module: Any) -> str:
    """The model type by its configuration; "" of a module that is of no such kind."""
    found = getattr(getattr(module, "config", None), "model_type", "")
    return found if isinstance(found, str) else ""


def check_alike(name: str, model_type: str, mine: str) -> None:
    """Refuse a model whose parts have other names than those of one of type ``mine``.

    Raises:
        InputError: the two types are not of one family.
    """
    if mine != model_type and (mine not in FAMILIES or FAMILIES.get(mine) is not FAMILIES.get(model_type)):
        raise InputError(f"{name}: a model of type {model_type!r} does not match one of type {mine!r}")


def unwrapped(module: Any) -> Any:
    """The module below PEFT's wrapper."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def default_targets(parts: Parts) -> tuple[str, ...]:
    """What LoRA adapts by default: the query and value projections (all of a fused one), and in a network of
    convolutions those without groups; in two encoders, by their paths, both maps of every MLP; () where there is none.
    """
    if parts.text_blocks:
        blocks = [(path, dict(block.named_modules())) for encoder in parts.encoders for path, block in encoder]
        return tuple(
            f"{p}.{name}" for p, inside in blocks for names in _MLP if inside.keys() >= {*names} for name in names
        )
    leaves = {
        name.rpartition(".")[2]
        for blocks in parts.encoders
        for _, block in blocks
        for name, m in block.named_modules()
        if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"
    }
    for names in _QUERY_VALUE:
        if leaves.issuperset(names):
            return names
    if strides_are_read(parts):
        return ()
    return tuple(
        f"{path}.{name}" if name else path
        for path, block in parts.blocks
        for name, m in block.named_modules()
        if isinstance(m, nn.Conv2d) and m.groups == 1
    )


def strides_are_read(parts: Parts) -> bool:
    """Whether transformers reads the strides of this model's convolutions, which PEFT's wrapper does not have."""
    return any(type(block).__name__.startswith("MobileNet") for _, block in parts.blocks)


_MLP = (("mlp.fc1", "mlp.fc2"), ("intermediate.dense", "output.dense"))  # not BERT's attention.output.dense
_QUERY_VALUE: tuple[tuple[str, ...], ...] = (
    ("q_proj", "v_proj"),
    ("query", "value"),
    ("q_lin", "v_lin"),
    ("query_proj", "value_proj"),
    ("c_attn",),
    ("query_key_value",),
    ("qkv_proj",),
    ("qkv",),
    ("Wqkv",),
    ("q", "v"),
)


def _blocks(module: nn.Module, prefix: str, lists: Sequence[str]) -> tuple[tuple[str, nn.Module], ...]:
    """(path, module) of what is in the ModuleLists that the module has, in order."""
    return tuple(
        (f"{path}.{i}", block)
        for path in (_resolve(module, prefix, list_) for list_ in lists)
        if path
        for i, block in enumerate(module.get_submodule(path).children())
    )


def _linear(module: nn.Module, path: str) -> bool:
    found = _module(module, path)
    return isinstance(found, nn.Linear)


def _module(module: nn.Module, path: str) -> nn.Module | None:
    if not path:
        return None
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _resolve(module: nn.Module, prefix: str, path: str) -> str:
    """``path`` from the root of ``module``; "" where there is no such module."""
    if not path:
        return ""
    candidates = [f"{prefix}.{path}" if prefix else path, path]
    return next((c for c in candidates if _module(module, c) is not None), "")


def _guess(module: nn.Module) -> Parts:
    """The longest ModuleList of one class holds the blocks; the last linear layer is the head."""
    best: tuple[tuple[str, nn.Module], ...] = ()
    head = ""
    for path, m in module.named_modules():
        if isinstance(m, nn.Linear):
            head = path
        if isinstance(m, nn.ModuleList) and len(m) > len(best) and len({type(c) for c in m}) == 1:
            best = tuple((f"{path}.{i}", c) for i, c in enumerate(m))
    return Parts(None, best, None, None, head)
