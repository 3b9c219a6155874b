"""Read the server's foundation model and match its tensors with those of the federation's model.

FedBaF: Federated Learning Aggregation Biased by a Foundation Model. Park, Pranav, Moura, Joe-Wong. arXiv:2410.18352,
Section 3. Tensors of equal name and shape match. In a deeper foundation model the blocks match by their index from the
input. In a wider foundation model the first entries of each layer match. The paper takes them from the flattened
layer, which scrambles rows and columns; here they are the leading slice of every dimension.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedfm.errors import InputError, reason_of
from fedfm.linalg.params import Params
from fedfm.methods.fedbaf.pull import Piece
from fedfm.models.families import find, type_of, unwrap
from fedfm.models.first_and_last_layer import Ends
from fedfm.models.model import Model

DECLARED = ("labels", "vocabulary")
_POSITIONS = re.compile(r"position|wpe\b|(^|[._])pos([._]|$)|posemb")
_SEGMENTS = re.compile("token_type|segment")
_FUSED = ("c_attn", "qkv", "query_key_value", "Wqkv", "in_proj_weight", "in_proj_bias", "qkv_proj")


@dataclass(frozen=True)
class Match:
    """How one trainable tensor is matched; one line of the table in :class:`Matching`.

    Attributes:
        name: the tensor's name in the federation's model.
        shape: the tensor's shape.
        source: shape of the foundation model's tensor, or None.
        region: lengths of the leading slice that is mixed, or None.
        why: "same shape", "leading slice", or the reason why the tensor is left out.
    """

    name: str
    shape: tuple[int, ...]
    source: tuple[int, ...] | None
    region: tuple[int, ...] | None
    why: str


@dataclass(frozen=True)
class Matching:
    """The entries of a foundation model, and the entries of the federation's model that they are mixed into.

    Attributes:
        table: a line for every trainable tensor, in the model's order.
        pieces: the foundation model's entries for each matched trainable tensor, by its name. They are secret.
    """

    table: tuple[Match, ...]
    pieces: Mapping[str, Piece]

    def __str__(self) -> str:
        width = max(len(m.name) for m in self.table)
        return "\n".join(
            f"{m.name:<{width}}  {_dims(m.shape):<16} {_dims(m.source):<16} {_dims(m.region):<16} {m.why}"
            for m in self.table
        )

    def summary(self) -> dict[str, Any]:
        """Numbers of matched tensors and entries, and the tensors that are left out, by reason."""
        left: dict[str, list[str]] = {}
        for m in self.table:
            if m.region is None:
                left.setdefault(m.why, []).append(m.name)
        return {
            "tensors": sum(m.region is not None for m in self.table),
            "of": len(self.table),
            "entries": sum(piece.tensor.numel() for piece in self.pieces.values()),
            "left_out": left,
        }


def match(model: Model, foundation: str, identical: Collection[str] = ()) -> Matching:
    """Read ``foundation`` and match it with the trainable tensors of ``model``.

    Args:
        model: the federation's model, at the server.
        foundation: built-in name, folder or hub id; with LoRA a folder with a PEFT adapter.
        identical: "labels" if the same index means the same label in both models, "vocabulary" if it means the same
            token, or both. Equal shapes do not prove this.

    Raises:
        InputError: the foundation model cannot be read, is of another kind, or has no tensor that matches.
    """
    tensors = {n: t for n, t in _tensors(model, foundation).items() if t.is_floating_point()}
    roles, live = _roles(model), model.live()
    lines = {}
    for name, own in live.items():
        shape, source = tuple(own.shape), tensors.get(_bare(name))
        there = None if source is None else tuple(source.shape)
        lines[name] = Match(name, shape, there, *_region(name, shape, there, roles.get(name, "body"), identical))
    table, pieces = _whole_layers(lines, roles), {}
    for line in table:
        if line.region is not None:
            part = tensors[_bare(line.name)][tuple(map(slice, line.region))]
            pieces[line.name] = Piece(line.region, part.to("cpu", live[line.name].dtype).contiguous())
    if not pieces:
        reasons = sorted({m.why for m in table})
        raise InputError(
            f'method.foundation = "{foundation}": no tensor matches the model: {"; ".join(reasons)}',
            key="method.foundation",
        )
    for name, piece in pieces.items():
        if not torch.isfinite(piece.tensor).all():
            raise InputError(
                f'method.foundation = "{foundation}": {_bare(name)} has entries that are not finite',
                key="method.foundation",
            )
    packed = Params({name: piece.tensor for name, piece in pieces.items()})  # one block of memory
    return Matching(tuple(table), {name: Piece(piece.region, packed[name]) for name, piece in pieces.items()})


def _region(
    name: str, shape: tuple[int, ...], there: tuple[int, ...] | None, role: str, identical: Collection[str]
) -> tuple[tuple[int, ...] | None, str]:
    """The region to mix (or None) of a tensor of ``shape`` and its match of shape ``there``; and the reason."""
    if there is None:
        return None, "the foundation model has no such tensor"
    if role in DECLARED and role not in identical:
        return None, f'{role}: not declared identical; method.identical = ["{role}"] declares it'
    if there == shape:
        return shape, "same shape"
    if len(there) != len(shape):
        return None, "another number of dimensions"
    if role != "body":
        what = {"input": "input layer", "positions": "position table", "output": "output layer"}.get(role, role)
        return None, f"{what} of another shape: never sliced"
    if any(part in _FUSED for part in name.split(".")):
        return None, "fused projections of another width: a slice would mix q, k and v"
    return tuple(map(min, shape, there)), "leading slice"


def _whole_layers(lines: Mapping[str, Match], roles: Mapping[str, str]) -> list[Match]:
    """Mix first and last layers completely or not at all: a bias is useless without the weights of its layer."""
    differ = {
        (_layer(name), role): name
        for name, line in lines.items()
        if (role := roles.get(name, "body")) != "body" and line.source not in (None, line.shape)
    }
    table = []
    for name, line in lines.items():
        other = differ.get((_layer(name), roles.get(name, "body")))
        if line.region is not None and other is not None:
            why = f"of a layer whose {_bare(other).rpartition('.')[2]} has another shape: the layer is left out"
            line = dataclasses.replace(line, region=None, why=why)
        table.append(line)
    return table


def _layer(name: str) -> str:
    return _bare(name).rpartition(".")[0]


def _roles(model: Model) -> dict[str, str]:
    """The role (labels, vocabulary, output, positions or input) of each tensor outside the body, by tensor name."""
    root: Any = unwrap(model.module)
    ends = getattr(model, "ends", None) or Ends.of(model.parts)
    tables = {id(m.weight): path for path, m in root.named_modules() if isinstance(m, nn.Embedding)}
    vocabulary = {i for i, path in tables.items() if not (_POSITIONS.search(path) or _SEGMENTS.search(path))}
    last = _last(model, root, ends.output, {root.get_submodule(tables[i]).num_embeddings for i in vocabulary})
    inside = {id(p) for p in ends.entrance}
    roles: dict[str, str] = {}
    for name, parameter in model.live().items():
        path = _bare(name)
        if id(parameter) in vocabulary:
            roles[name] = "vocabulary"
        elif ends.output is not None and (not ends.output or f"{path}.".startswith(f"{ends.output}.")):
            roles[name] = last
        elif _POSITIONS.search(path):
            roles[name] = "positions"
        elif id(parameter) in inside or id(parameter) in tables or path.startswith(("conv1.", "conv_stem.")):
            roles[name] = "input"
    return roles


def _last(model: Model, root: Any, path: str | None, vocabularies: Collection[int]) -> str:
    """The role of the last layer: labels, vocabulary, or output for any other meaning."""
    if model.is_language_model:
        return "vocabulary"
    if not model.task.loss_is_opaque or model.classes:
        return "labels"
    words = getattr(root.get_submodule(path) if path is not None else None, "out_features", None)
    return "vocabulary" if words in vocabularies else "output"


def _bare(name: str) -> str:
    """A tensor's name without the parts that PEFT adds."""
    return name.removeprefix("base_model.model.").replace(".modules_to_save.default", "").replace(".default", "")


def check_place(foundation: str) -> None:
    """Refuse a name that is not a foundation model, before anything is loaded.

    Raises:
        InputError: it is not a built-in name, a hub id or the folder of a model, an adapter or a trained head.
    """
    folder = Path(foundation).expanduser()
    trained = folder / "fedfm.json", folder / "model.safetensors"
    if not (folder / "adapter_config.json").is_file() and not all(path.is_file() for path in trained):
        from fedfm.models.locate import locate

        with _as_foundation():
            locate(foundation)


@contextlib.contextmanager
def _as_foundation() -> Iterator[None]:
    """Context manager: change errors about model.name into errors about method.foundation."""
    try:
        yield
    except InputError as error:
        text = str(error).replace("model.name: ", "", 1)
        raise InputError(f"method.foundation: {text}", key="method.foundation") from None


def _tensors(model: Model, foundation: str) -> Mapping[str, Tensor]:
    """The foundation model's tensors under the names of the federation's model."""
    folder = Path(foundation).expanduser()
    lora = hasattr(model.module, "peft_config")
    if (folder / "adapter_config.json").is_file():
        return _adapter(model, folder, lora)
    if lora:
        raise InputError(
            f'method.foundation = "{foundation}": with LoRA expected a folder with adapter_config.json: only an '
            'adapter can be mixed in, since every client has the frozen weights; or set model.adaptation = "full"',
            key="method.foundation",
        )
    if (folder / "fedfm.json").is_file() and (folder / "model.safetensors").is_file():
        return _read(folder / "model.safetensors", foundation)
    own: Any = unwrap(model.module)
    if not type_of(own):
        what = "a head on feature vectors" if model.spec.name == "features" else "a user's own module"
        raise InputError(
            f'method.foundation = "{foundation}": {what} needs the folder of its trained weights '
            "(fedfm.json and model.safetensors, as a run's adapter/)",
            key="method.foundation",
        )
    return _whole(own, foundation)


def _whole(own: Any, foundation: str) -> Mapping[str, Tensor]:
    from fedfm.models.saved_modules import as_saved

    with _as_foundation():
        module, model_type, drawn = as_saved(foundation, own)
    here, there = getattr(own, "base_model_prefix", ""), getattr(module, "base_model_prefix", "")
    head = find(module, model_type).head.partition(".")[0]
    return {
        f"{here}.{name.removeprefix(f'{there}.')}" if there and name.startswith(f"{there}.") else name: tensor
        for name, tensor in module.state_dict().items()
        if name not in drawn and not (head == "" and name.startswith("lm_head"))
    }


def _adapter(model: Model, folder: Path, lora: bool) -> Mapping[str, Tensor]:
    if not lora:
        raise InputError(
            f'method.foundation = "{folder}": an adapter can be mixed only with model.adaptation "lora"',
            key="method.foundation",
        )
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        rank, alpha = config["r"], config["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"method.foundation: {folder}/adapter_config.json cannot be read: {reason_of(error)}",
            key="method.foundation",
        ) from None
    own: Any = model.module.peft_config["default"]  # type: ignore[index]
    if (rank, alpha) != (own.r, own.lora_alpha):
        raise InputError(
            f"method.foundation: {folder} has rank {rank} and alpha {alpha}, the model rank {own.r} and alpha "
            f"{own.lora_alpha}: factors of another rank or scaling cannot be mixed",
            key="method.foundation",
        )
    saved = _read(folder / "adapter_model.safetensors", str(folder))
    return {name.removeprefix("base_model.model."): tensor for name, tensor in saved.items()}


def _read(path: Path, foundation: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        saved: dict[str, Tensor] = load_file(path)
        return saved
    except (OSError, SafetensorError) as error:
        raise InputError(
            f'method.foundation = "{foundation}": {path} cannot be read: {reason_of(error)}', key="method.foundation"
        ) from None


def _dims(shape: tuple[int, ...] | None) -> str:
    return "-" if shape is None else " x ".join(map(str, shape)) or "()"
