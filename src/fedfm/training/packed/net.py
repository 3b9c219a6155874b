"""Reads a Hugging Face classifier with PEFT's LoRA into the layers of :mod:`fedfm.training.packed.layers`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedfm.models.model import Model
from fedfm.training.packed.adapters import Adapted, FlatLayout, LoraSite
from fedfm.training.packed.layers import Layer, Norm
from fedfm.training.packed.linear import Linear

TEXT, IMAGE = ("bert",), ("vit", "deit", "ijepa")


class Unsupported(Exception):
    """The layers do not support a part of the model."""


@dataclass(frozen=True)
class Net:
    """A classifier: an embedding, transformer layers, a pooling, one trained linear head.

    Attributes:
        embed: the model's own embedding module.
        lowest: number of layers without adapters at the bottom: their outputs are computed once for each client.
        positions: number of tokens of an image; 0 for text.
        norm, pooler: the step between the last layer and the head: a normalisation, or BERT's dense map and tanh.
        mean: whether to pool by the mean over tokens; else the last layer computes only the first token.
        flat: the slices of the trained tensors in a flat vector.
        head: names of the head's weight (C, d) and bias (C,).
        frozen: the layers' weights; see :meth:`stale`.
        outside: all other frozen weights; the net uses them without a copy.
    """

    embed: Any
    layers: tuple[Layer, ...]
    lowest: int
    width: int
    positions: int
    norm: Norm | None
    pooler: Linear | None
    mean: bool
    flat: FlatLayout
    head: tuple[str, str]
    names: frozenset[str]
    frozen: tuple[Tensor, ...]
    outside: tuple[Tensor, ...]
    stamp: tuple[float, ...]

    def stale(self) -> bool:
        """Whether frozen weights have changed since they were read (a method may merge adapters into them)."""
        return stamp_of(self.frozen) != self.stamp


def stamp_of(tensors: tuple[Tensor, ...]) -> tuple[float, ...]:
    """The sum of each tensor. PyTorch's version counters would miss writes through ``.data``, as in PEFT's merge."""
    return tuple(torch.stack([t.sum() for t in tensors]).tolist())


def read(model: Model, *, low: bool) -> Net:
    """The net of a model; with ``low`` its frozen maps multiply in bfloat16.

    Raises:
        Unsupported: the layers do not support a part of the model, which the message names.
    """
    module: Any = model.module
    base = module.get_base_model() if hasattr(module, "peft_config") else None
    config: Any = getattr(base, "config", None)
    kind = getattr(config, "model_type", None)
    if base is None or kind not in TEXT + IMAGE or not model.task.classifies_by_head:
        raise Unsupported(f"model type {kind}")
    if any(p.device.type != "cpu" or p.dtype != torch.float32 for p in base.parameters()):
        raise Unsupported("half precision, or not on the CPU")
    if config.hidden_act != "gelu" or getattr(config, "is_decoder", False):
        raise Unsupported("another activation, or a decoder")
    backbone = getattr(base, base.base_model_prefix)
    blocks = list(backbone.encoder.layer if kind in TEXT else backbone.layers)
    live = model.live()
    names = {id(tensor): name for name, tensor in live.items()}
    mean = kind == "ijepa"
    lowest = next((i for i, block in enumerate(blocks) if any(map(_is_lora, block.modules()))), None)
    if lowest is None:
        raise Unsupported("no LoRA")
    layers = tuple(
        _layer(block, kind, names, low, first_only=not mean and i == len(blocks) - 1, lowest=i == lowest, name=str(i))
        for i, block in enumerate(blocks)
    )
    flat = FlatLayout()
    for layer in layers:
        for part in layer.maps:
            part.declare(flat)
    found = sum(len(part.sites) for layer in layers for part in layer.maps)
    if found != sum(map(_is_lora, base.modules())):
        raise Unsupported("LoRA outside the layers' linear maps")
    head = _trained_head(base.classifier, names)
    width = layers[0].norm_1.weight.shape[0]
    classes = live[head[0]].shape[0]
    flat.add(head[0], (classes, width))
    flat.add(head[1], (classes,))
    trained = frozenset(n for n in flat.slots if "/" not in n)
    if trained != set(live) or trained != set(model.names):
        raise Unsupported(f"trained besides LoRA and head: {sorted(set(live) ^ trained)[:3]}")
    if len({not site.a for layer in layers for part in layer.maps for site in part.sites}) > 1:
        raise Unsupported("A trained in some places and frozen in others")
    frozen = tuple(p.detach() for block in blocks for p in block.parameters() if id(p) not in names)
    inside = {id(p) for block in blocks for p in block.parameters()}
    return Net(
        embed=backbone.embeddings,
        layers=layers,
        lowest=lowest,
        width=width,
        positions=0 if kind in TEXT else backbone.embeddings.position_embeddings.shape[1],
        norm=None if kind in TEXT else _norm(backbone.layernorm),
        pooler=Linear(backbone.pooler.dense.weight, backbone.pooler.dense.bias, False) if kind in TEXT else None,
        mean=mean,
        flat=flat,
        head=head,
        names=trained,
        frozen=frozen,
        outside=tuple(p for p in base.parameters() if id(p) not in names.keys() | inside),
        stamp=stamp_of(frozen),
    )


def _is_lora(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def _layer(
    block: Any, kind: str, names: dict[int, str], low: bool, *, first_only: bool, lowest: bool, name: str
) -> Layer:
    if kind in TEXT:
        attention, out = block.attention.self, block.attention.output.dense
        qkv, up, down = (attention.query, attention.key, attention.value), block.intermediate.dense, block.output.dense
        norms, heads = (block.attention.output.LayerNorm, block.output.LayerNorm), attention.num_attention_heads
    else:
        attention, out = block.attention, block.attention.o_proj
        qkv, up, down = (attention.q_proj, attention.k_proj, attention.v_proj), block.mlp.fc1, block.mlp.fc2
        norms, heads = (block.layernorm_before, block.layernorm_after), attention.num_attention_heads
    return Layer(
        qkv=_qkv(qkv, attention, names, low, first_only, name),
        out=_adapt(out, names, low, f"{name}/out"),
        up=_adapt(up, names, low, f"{name}/up"),
        down=_adapt(down, names, low, f"{name}/down"),
        norm_1=_norm(norms[0]),
        norm_2=_norm(norms[1]),
        heads=heads,
        before=kind in IMAGE,
        first_only=first_only,
        lowest=lowest,
    )


def _norm(module: Any) -> Norm:
    if type(module) is not nn.LayerNorm:
        raise Unsupported("another normalisation")
    return Norm(module.weight.detach(), module.bias.detach(), module.eps)


def _qkv(
    modules: tuple[Any, Any, Any], attention: Any, names: dict[int, str], low: bool, first_only: bool, name: str
) -> tuple[Adapted, ...]:
    """One map, or two with ``first_only``; the queries' weights contain the scaling of the scores."""
    weights, biases, sites, at = [], [], [], 0
    for i, module in enumerate(modules):
        base, factor = _base(module), attention.scaling if i == 0 else 1.0
        size = base.weight.shape[0]
        weights.append(base.weight.detach() * factor)
        biases.append(torch.zeros(size) if base.bias is None else base.bias.detach() * factor)
        sites += list(_sites(module, names, at, factor))
        at += size
    whole = Adapted(Linear(torch.cat(weights), torch.cat(biases), low), sites, f"{name}/qkv")
    size = len(weights[0])
    return (whole.part(0, size), whole.part(size, at)) if first_only else (whole,)


def _adapt(module: Any, names: dict[int, str], low: bool, name: str) -> Adapted:
    base = _base(module)
    return Adapted(Linear(base.weight, base.bias, low), list(_sites(module, names, 0, 1.0)), name)


def _base(module: Any) -> nn.Linear:
    base: Any = module.base_layer if _is_lora(module) else module
    if type(base) is not nn.Linear:
        raise Unsupported(f"a {type(base).__name__} where a linear map should be")
    return base


def _sites(module: Any, names: dict[int, str], start: int, factor: float) -> Iterator[LoraSite]:
    from peft.tuners.lora.layer import Linear as LoraLinear

    if not _is_lora(module):
        return
    plain = type(module) is LoraLinear and module.active_adapters == ["default"] and list(module.lora_A) == ["default"]
    if not plain or module.lora_variant or module.merged or module.disable_adapters or module.fan_in_fan_out:
        raise Unsupported("a variant of LoRA")
    a, b = module.lora_A["default"], module.lora_B["default"]
    if a.bias is not None or b.bias is not None or float(getattr(module.lora_dropout["default"], "p", 0.0)) > 0:
        raise Unsupported("LoRA with bias or dropout")
    if id(b.weight) not in names:
        raise Unsupported("a frozen B")
    name_a = names.get(id(a.weight), "")
    frozen = None if name_a else a.weight.detach()
    scale = float(module.scaling["default"]) * factor
    yield LoraSite(start, start + b.weight.shape[0], a.weight.shape[0], scale, name_a, names[id(b.weight)], frozen)


def _trained_head(module: Any, names: dict[int, str]) -> tuple[str, str]:
    linear = module.modules_to_save["default"] if hasattr(module, "modules_to_save") else module
    if type(linear) is not nn.Linear or linear.bias is None or not {id(linear.weight), id(linear.bias)} <= names.keys():
        raise Unsupported("no trained linear head")
    return names[id(linear.weight)], names[id(linear.bias)]
