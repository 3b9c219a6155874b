"""The parts of a model: embedding, blocks (of one encoder or of two), final norm, pooler, head.

A table with the key ``config.model_type`` lists the tested families. Parts of other models are found by a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from fedfm.errors import InputError
from fedfm.models.heads import head_of

if TYPE_CHECKING:
    from fedfm.models.stages import Place


@dataclass(frozen=True)
class Family:
    """Paths inside the base model (``module.<base_model_prefix>``), or inside a complete module without a base.

    Attributes:
        embedding: maps the model's input to b_0, the input of the first block.
        blocks: the ModuleLists of the blocks, in order.
        norm: final normalisation and other modules between the blocks and the pooler.
        pooler: maps (n, T, d) to (n, d) with its own weights.
        head: the last linear layer; a path inside the complete module.
        text: the ModuleList of a text encoder; the other paths then belong to the image encoder.
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
_ROBERTA = Family("embeddings", ("encoder.layer",), head="classifier.out_proj")
_LLAMA = Family("embed_tokens", ("layers",), "norm", head="score")

FAMILIES: dict[str, Family] = {
    "vit": _VIT,
    "deit": _VIT,
    "ijepa": _VIT,
    "dinov2": Family("embeddings", ("encoder.layer",), "layernorm"),
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "siglip": replace(_CLIP, pooler="vision_model.head"),
    "bert": Family("embeddings", ("encoder.layer",), pooler="pooler"),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": Family("embeddings", ("transformer.layer",)),
    "gpt2": Family("wte", ("h",), "ln_f", head="score"),
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
    "resnet": Family("embedder", ("encoder.stages",), head="classifier.1"),
    "mobilenet_v2": Family("conv_stem", ("layer",), "conv_1x1"),
    "cifar_resnet": Family("bn1", ("layer1", "layer2", "layer3"), head="linear"),
    "fedfm_preact_resnet": Family("stem", tuple(f"sections.{s}" for s in range(16)), "bn", head="fc"),
}


@dataclass(frozen=True)
class Parts:
    """The parts of one model, as modules and as paths from its root.

    Attributes:
        embedding: module, or None if it was not found.
        blocks: (path, module) of the blocks of all stages, in order of execution: an encoder's blocks come before a
            decoder's. Empty if no block was found.
        norm: final norm, or None.
        pooler: the module that pools the states, or None.
        head: path of the last linear layer; "" if the model has none.
        text_blocks: blocks of a text encoder; the other parts then belong to the image encoder.
        unread: paths that the forward pass does not use, e.g. the vision tower of a model that reads texts. Nothing
            under these paths is trained.
        whole: the model, whose modules LoRA adapts if no blocks were found.
        vision: paths of the vision part, if the rows have images among their texts; else empty. With a vision part,
            ``blocks`` are those of the language part.
        vision_blocks: (path, module) of the blocks of the vision part.
        side_by_side: for a model that has several parallel ModuleLists in place of one list of blocks (e.g. one of all
            attentions and one of all MLPs): the modules of each block, one from each list. Else empty.
    """

    embedding: nn.Module | None
    blocks: tuple[tuple[str, nn.Module], ...]
    norm: nn.Module | None
    pooler: nn.Module | None
    head: str
    text_blocks: tuple[tuple[str, nn.Module], ...] = ()
    unread: tuple[str, ...] = ()
    whole: nn.Module | None = None
    side_by_side: tuple[tuple[Place, ...], ...] = ()
    vision: tuple[str, ...] = ()
    vision_blocks: tuple[tuple[str, nn.Module], ...] = ()

    def reads(self, path: str) -> bool:
        """Whether the forward pass uses the module of this path."""
        return not any(f"{path}.".startswith(f"{other}.") for other in self.unread)

    @property
    def encoders(self) -> tuple[tuple[tuple[str, nn.Module], ...], ...]:
        """(path, module) of the blocks of each encoder; images before texts."""
        return (self.blocks, self.text_blocks) if self.text_blocks else (self.blocks,)

    @property
    def stages(self) -> tuple[tuple[tuple[Place, ...], ...], ...]:
        """The blocks of each encoder; a block is a tuple of one module, or of one module from each parallel list."""
        if self.side_by_side:
            return (self.side_by_side,)
        return tuple(tuple((place,) for place in blocks) for blocks in self.encoders)

    @property
    def adaptable(self) -> tuple[tuple[str, nn.Module], ...]:
        """(path, module) of the modules that are searched for LoRA's default targets."""
        blocks = tuple(place for encoder in self.encoders for place in encoder)
        return blocks if blocks or self.whole is None else (("", self.whole),)


def find(module: nn.Module, model_type: str, *, images: bool = False) -> Parts:
    """Find the parts of ``module``, which has no adapter yet. ``images`` says whether rows have images among texts."""
    prefix = getattr(module, "base_model_prefix", "")
    family = FAMILIES.get(model_type)
    if family is None:
        found = _guess(module)
        return (
            found
            if not images
            else replace(found, vision=found.unread, unread=(), vision_blocks=_blocks_in(module, found.unread))
        )
    blocks, text_blocks = _blocks(module, prefix, family.blocks), _blocks(module, prefix, (family.text,))
    head = next((h for h in (family.head, "lm_head", "head") if isinstance(_module(module, h), nn.Linear)), "")
    if not blocks or not (head or text_blocks):
        guess = _guess(module)
        blocks, head = blocks or guess.blocks, head or guess.head
    embedding, norm, pooler = (
        _module(module, _resolve(module, prefix, p)) for p in (family.embedding, family.norm, family.pooler)
    )
    return Parts(embedding, blocks, norm, pooler, head, text_blocks)


def _blocks_in(module: nn.Module, paths: Sequence[str]) -> tuple[Place, ...]:
    from fedfm.models.stages import find_blocks

    inside = ((path, find_blocks(module.get_submodule(path))) for path in paths)
    return tuple((f"{path}.{name}", block) for path, found in inside for name, block in found)


def type_of(module: Any) -> str:
    """The model type in the module's configuration; "" if it has none."""
    found = getattr(getattr(module, "config", None), "model_type", "")
    return found if isinstance(found, str) else ""


def check_alike(name: str, model_type: str, mine: str) -> None:
    """Raise an InputError unless both types are of one family; in a family the parts have the same names."""
    if mine != model_type and (mine not in FAMILIES or FAMILIES.get(mine) is not FAMILIES.get(model_type)):
        raise InputError(f"{name}: a model of type {model_type!r} does not match one of type {mine!r}")


def unwrap(module: Any) -> Any:
    """The module below PEFT's wrapper."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def default_targets(parts: Parts) -> tuple[str, ...]:
    """The default targets of LoRA; () if there are none.

    In a transformer they are the query and value projections; a fused projection is adapted as a whole. In a
    convolutional network they are the convolutions without groups and the linear maps, which equal convolutions of one
    pixel. In a model with two encoders they are the paths of both maps of each MLP.
    """
    if parts.text_blocks:
        blocks = [(path, dict(block.named_modules())) for encoder in parts.encoders for path, block in encoder]
        return tuple(
            f"{p}.{name}" for p, inside in blocks for names in _MLP if inside.keys() >= {*names} for name in names
        )
    leaves = {
        name.rpartition(".")[2]
        for _, block in parts.adaptable
        for name, m in block.named_modules()
        if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"
    }
    for names in _QUERY_VALUE:
        if leaves.issuperset(names):
            return names
    if strides_are_read(parts):
        return ()
    inside = [
        (".".join(step for step in (path, name) if step), m)
        for path, block in parts.adaptable
        for name, m in block.named_modules()
    ]
    if not any(isinstance(m, nn.Conv2d) for _, m in inside):
        return ()
    return tuple(
        p
        for p, m in inside
        if p != parts.head and (isinstance(m, nn.Linear) or (isinstance(m, nn.Conv2d) and m.groups == 1))
    )


def strides_are_read(parts: Parts) -> bool:
    """Whether transformers reads the attribute ``stride`` of this model's convolutions; PEFT's wrapper has none."""
    return any(type(block).__name__.startswith("MobileNet") for _, block in parts.blocks)


_MLP = (("mlp.fc1", "mlp.fc2"), ("intermediate.dense", "output.dense"))  # paths inside a block
_QUERY_VALUE: tuple[tuple[str, ...], ...] = (
    *(("q_proj", "v_proj"), ("query", "value"), ("q_lin", "v_lin"), ("query_proj", "value_proj")),
    *(("c_attn",), ("query_key_value",), ("qkv_proj",), ("qkv",), ("Wqkv",), ("q", "v")),
)


def _blocks(module: nn.Module, prefix: str, lists: Sequence[str]) -> tuple[tuple[str, nn.Module], ...]:
    """(path, module) of the entries of these ModuleLists, in order; missing lists are skipped."""
    return tuple(
        (f"{path}.{i}", block)
        for path in (_resolve(module, prefix, list_) for list_ in lists)
        if path
        for i, block in enumerate(module.get_submodule(path).children())
    )


def _module(module: nn.Module, path: str) -> nn.Module | None:
    if not path:
        return None
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _resolve(module: nn.Module, prefix: str, path: str) -> str:
    """``path`` from the root of ``module``; "" if there is no such module."""
    if not path:
        return ""
    candidates = [f"{prefix}.{path}" if prefix else path, path]
    return next((c for c in candidates if _module(module, c) is not None), "")


def _guess(module: nn.Module) -> Parts:
    """Find the blocks with :mod:`fedfm.models.stages`; the head is transformers' own, else the last linear layer."""
    from fedfm.models.stages import find_blocks, in_parallel_lists, unread_by_text

    unread = unread_by_text(module)
    if hasattr(module, "get_output_embeddings"):
        head = head_of(module)
    else:
        head = next((path for path, m in reversed(list(module.named_modules())) if isinstance(m, nn.Linear)), "")
    blocks = find_blocks(module, unread)
    parallel = () if blocks else in_parallel_lists(module)
    return Parts(None, blocks, None, None, head, unread=unread, whole=module, side_by_side=parallel)
