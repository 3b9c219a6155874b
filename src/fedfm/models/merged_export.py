"""Writes the complete model of a run whose base stays in its files: one weight at a time is in memory.

The values are those of :func:`fedfm.models.export.merge`, bit for bit: a weight is read, the adapter's product is added
in float32, and the sum is written before the next weight is read.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedfm.core.text import to_json
from fedfm.data.user_functions import is_function
from fedfm.linalg.params import Params, to_bytes
from fedfm.models import configuration, merging, quantised_maps
from fedfm.models.locate import locate
from fedfm.models.model import Model
from fedfm.models.spec import ModelSpec

SHARD = 5 * 10**9  # bytes of a file; a folder with more has several files and an index
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "bool": "BOOL"}
_NAMES |= {f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)} | {"uint8": "U8"}
_HEAD, _ALIGNED = 8, 8  # bytes of the length of a file's head; its data begins at a multiple of this


def can_stay(spec: ModelSpec) -> bool:
    """Whether an export of a LoRA may leave the base's weights in their files; see ``hollow`` of ``load_model``.

    Quantised weights may not stay there, since the export of an adapter then describes the rounded base.
    """
    if spec.quantization is not None or spec.name == "features" or is_function(spec.name):
        return False
    path = locate(spec.name)
    if isinstance(path, Path) and path.is_file():
        return False
    return quantised_maps.settings(configuration.read(path, spec)) is None


def needs_whole(model: Model, to: str) -> str:
    """Why an export of this model cannot leave its weights in their files; "" if it can."""
    module: Any = model.module
    if model.slices is None:
        return ""
    if model.spec.quantization is not None:
        return "an export describes the rounded weights"
    experts = to != "peft" and hasattr(module, "peft_config") and module.peft_config["default"].target_parameters
    return "an adapter of experts, whose matrices are in one parameter, is merged in memory" if experts else ""


class MergedWeights(Mapping[str, Tensor]):
    """The tensors of the complete model by name; each is computed when it is accessed.

    Attributes:
        module: the complete model, whose parameters have no values yet.

    Args:
        model: a model whose weights are in the files; it keeps its adapter.
        w: trained tensors of this model.
    """

    def __init__(self, model: Model, w: Params) -> None:
        assert model.slices is not None  # noqa: S101 - the caller has looked
        self._slices = model.slices
        # A copy of a placeholder would have the memory of a weight, so placeholders are shared.
        wrapped: Any = copy.deepcopy(model.module, {id(model): model} | {id(p): p for p in model.slices.names})
        own = {id(tensor): name for name, tensor in model.live().items() if tensor in model.slices.names}
        self._trained = {key: w[name] for key, name in own.items()}  # values of a base that is trained itself
        _load_rest(wrapped, model, w)
        self._untie(wrapped)
        merging.refuse_shared(wrapped)
        self._layers = dict[int, tuple[str, Any]]()  # adapted layers by their base layers' parameters
        for name, layer in merging.layers(wrapped):
            self._layers |= {id(p): (name, layer) for p in layer.get_base_layer().parameters()}
        self.module = wrapped.unload() if hasattr(wrapped, "peft_config") else wrapped
        self._state: dict[str, Tensor] = self.module.state_dict(keep_vars=True)
        self._merged = dict[int, Tensor]()  # the tensors of the last adapted layer

    def _untie(self, wrapped: Any) -> None:
        """Give the head a weight of its own if it shares one with the embeddings, and LoRA adapts either of them."""
        ends = merging.tied_ends(wrapped)
        if ends is not None:
            head, p = ends[1], ends[1].weight
            head.weight = nn.Parameter(p.detach(), requires_grad=False)
            self._slices.names[head.weight] = self._slices.names[p]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not computed."""
        return tuple(self._state[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, which is not computed."""
        p = self._state[name]
        wide = id(p) in self._layers and p.dtype in merging.NARROW
        return torch.float32 if wide else p.dtype

    def __getitem__(self, name: str) -> Tensor:
        p: Any = self._state[name]
        if id(p) in self._layers:
            if id(p) not in self._merged:
                self._merge(*self._layers[id(p)])
            return self._merged[id(p)]
        return self._value(p)

    def _value(self, p: Any) -> Tensor:
        if id(p) in self._trained:
            return self._trained[id(p)]
        return self._slices.read(p) if p in self._slices.names else p.detach()

    def _merge(self, name: str, layer: Any) -> None:
        """Compute the tensors of an adapted layer; the layer then has placeholders again."""
        parameters = list(layer.get_base_layer().parameters())
        placeholders = [p.data for p in parameters]
        self._merged.clear()
        try:
            for p in parameters:
                p.data = self._value(p).clone()
            merging.merge_layer(name, layer)
            layer.merge() if not layer.merged else None
            self._merged = {id(p): p.data for p in parameters}
        finally:
            for p, placeholder in zip(parameters, placeholders, strict=True):
                p.data = placeholder
            layer.merged_adapters.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def without_tied(self) -> list[str]:
        """The names that a folder of transformers has: each weight once."""
        first = dict[int, str]()
        tied, ignored = getattr(self.module, "all_tied_weights_keys", {}), self.module._keys_to_ignore_on_save or ()
        for name in sorted(self._state, key=lambda name: name in tied):
            first.setdefault(id(self._state[name]), name)
        return [name for name in self._state if first[id(self._state[name])] == name and name not in ignored]


def _load_rest(wrapped: nn.Module, model: Model, w: Params) -> None:
    """Load the trained tensors that have memory of their own, such as an adapter and a new head."""
    assert model.slices is not None  # noqa: S101 - the caller has looked
    copies = dict(wrapped.named_parameters(remove_duplicate=False)) | dict(wrapped.named_buffers())
    with torch.no_grad():
        for name in model.names:
            if copies[name] not in model.slices.names:
                copies[name].copy_(w[name])


def save(weights: MergedWeights, folder: Path, shard: int = SHARD) -> None:
    """Write a folder of transformers, as ``save_pretrained`` of the merged module does."""
    names, module = weights.without_tied(), weights.module
    dtypes = {weights.dtype(name) for name in names}
    module.config.dtype = str(module.dtype).removeprefix("torch.")
    if torch.float32 in dtypes:  # so that loading does not round weights
        module.config.dtype = "float32"
    module.config.architectures = [type(module).__name__]
    module.config.save_pretrained(str(folder))
    if module.can_generate():
        module.generation_config.save_pretrained(str(folder))
    parts = list(_parts(weights, names, shard))
    if len(parts) == 1:
        write(weights, parts[0], folder / "model.safetensors")
        return
    files = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        write(weights, part, folder / file)
    places = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    about = {"metadata": {"total_size": sum(_nbytes(weights, name) for name in names)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(to_json(about, indent=2) + "\n", encoding="utf-8")


def _parts(weights: MergedWeights, names: list[str], most: int) -> Iterator[list[str]]:
    """The names in parts of at most ``most`` bytes, but of at least one tensor."""
    part, size = list[str](), 0
    for name in names:
        more = _nbytes(weights, name)
        if part and size + more > most:
            yield part
            part, size = [], 0
        part, size = [*part, name], size + more
    yield part


def _nbytes(weights: MergedWeights, name: str) -> int:
    return weights.dtype(name).itemsize * torch.Size(weights.shape(name)).numel()


def write(weights: MergedWeights, names: list[str], path: Path) -> None:
    """Write these tensors one after the other into a safetensors file.

    The format: 8 bytes, the length of the head; the head, JSON with dtype, shape and place of each tensor; the data.
    https://huggingface.co/docs/safetensors
    """
    names = sorted(names, key=lambda name: -weights.dtype(name).itemsize)  # each begins at a multiple of its size
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        end = at + _nbytes(weights, name)
        dtype = _NAMES[str(weights.dtype(name)).removeprefix("torch.")]
        head[name] = {"dtype": dtype, "shape": list(weights.shape(name)), "data_offsets": [at, end]}
        at = end
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_HEAD, "little"))
        file.write(text)
        for name in names:
            file.write(to_bytes(weights[name].to("cpu", weights.dtype(name)).contiguous()))
