"""Computes with LoRA parameters by their names: factors, adapters of any rank, low-rank shifts of frozen weights.

PEFT computes W x + (alpha / r) B A x. Here all adapters of a model have the model's alpha, whatever their rank r.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.errors import InputError
from fedfm.linalg import low_rank
from fedfm.linalg.low_rank import Factors
from fedfm.linalg.params import Layout, Params, layout_of
from fedfm.models.adapters import stacked
from fedfm.models.adapters.adaptation import with_defaults
from fedfm.models.adapters.lora_names import UP
from fedfm.models.adapters.lora_names import pairs as pairs
from fedfm.models.adapters.lora_names import rank_of as rank_of
from fedfm.models.adapters.lora_names import rest as rest
from fedfm.models.spec import ModelSpec

if TYPE_CHECKING:
    from fedfm.models.model import Model

Weight = float | Callable[[Tensor], Any]  # an adapter's weight: a number, or a function of a module's output y (b, ...)


def alpha_of(model: Model) -> float:
    """LoRA's alpha; the scale of an adapter of rank r is alpha / r."""
    adaptation = model.adaptation_spec
    return float(2 * adaptation.rank if adaptation.alpha is None else adaptation.alpha)


def matrices(w: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors (A (r, d_in), B (d_out, r)) of each adapted matrix, by path; the path of expert e is ``path[e]``."""
    out = dict[str, tuple[Tensor, Tensor]]()
    for path, (a, b) in pairs(w).items():
        if _of_experts(w[b].shape):
            out |= {f"{path}[{e}]": (w[a][e], w[b][..., e]) for e in range(len(w[a]))}
        else:
            out[path] = w[a], w[b]
    return out


def assemble(found: Mapping[str, tuple[Tensor, Tensor]], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The factors by name, in the dtypes of ``like`` but of any rank; the inverse of :func:`matrices`."""
    out = dict[str, Tensor]()
    for path, (a, b) in pairs(like).items():
        if _of_experts(like[b].shape):
            experts = [found[f"{path}[{e}]"] for e in range(len(like[a]))]
            one, two = torch.stack([x for x, _ in experts]), torch.stack([y for _, y in experts], -1)
        else:
            one, two = found[path]
        out[a], out[b] = one.to(like[a].dtype), two.to(like[b].dtype)
    return out


def factors(w: Mapping[str, Tensor], alpha: float) -> dict[str, Factors]:
    """The float64 factors (d_out, r) and (r, d_in) of (alpha / r) B A, by path as in :func:`matrices`."""
    return {path: (alpha / len(a) * b.double(), a.double()) for path, (a, b) in matrices(w).items()}


def merge(w: Mapping[str, Tensor], shift: Mapping[str, Factors], alpha: float) -> Params:
    """One adapter that replaces both the adapter w and a shift of the frozen weights.

    It has w's names, and its rank is the sum of both ranks. Modules of lower rank are padded with zeros, since an
    adapter on disk has one rank. If there is a shift, an adapter w whose factors B are all zero is left out.
    """
    own = factors(w, alpha)
    idle = bool(shift) and not any(bool(u.any()) for u, _ in own.values())
    found = {
        path: low_rank.stack([(1.0, x) for x in ((own[path],) if not idle else ()) + ((shift[path],) if shift else ())])
        for path in own
    }
    rank = max(len(v) for _, v in found.values())
    wide = {path: low_rank.pad(x, rank) for path, x in found.items()}
    return Params(dict(w) | assemble({path: (v, rank / alpha * u) for path, (u, v) in wide.items()}, w))


def first(w: Params, rank: int | None) -> Params:
    """The adapter with only the first ``rank`` rows of A and columns of B; all other tensors are kept.

    B is multiplied by rank / r, so that at the scale alpha / rank these rows and columns contribute the same as in w.
    """
    r, out = rank_of(w), dict(w)
    if r is None or rank is None or rank > r:
        raise ValueError(f"an adapter of rank {r} has no first {rank} rows")
    if rank == r:
        return w
    for a, b in pairs(w).values():
        out[a], out[b] = w[a][..., :rank, :], w[b][:, :rank] * (rank / r)
    return Params(out)


def widen(w: Params, like: Layout) -> Params:
    """An adapter that computes the same with the larger rank of ``like``; :func:`first` is the inverse.

    A and B are padded with zeros, and B is multiplied so that the update is the same at the scale alpha / rank.
    """
    wide, r = pad_rank(w, like), rank_of(w)
    more = (rank_of(wide) or 0) / r if r else 1.0
    return wide if more == 1 else wide.replace({b: more * wide[b] for _, b in pairs(w).values()})


def layout_at(layout: Layout, rank: int) -> Layout:
    """Names, dtypes and shapes of the same LoRA at another rank."""
    found = pairs(layout.slots)
    a, b = ({pair[i] for pair in found.values()} for i in (0, 1))
    experts = {a for a, b in found.values() if _of_experts(layout.slots[b][3])}

    def at(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        axis = 1 if name in b or name in experts else 0
        return (*shape[:axis], rank, *shape[axis + 1 :]) if name in a or name in b else shape

    return layout_of(tuple((name, dtype, at(name, shape)) for name, dtype, shape in layout.entries))


def pad_rank(w: Params, like: Layout) -> Params:
    """Append zeros to A and B up to the rank of ``like``.

    The zeros do not change in training: the gradient of a row of A is zero if the column of B is zero, and vice versa.
    """
    return Params({n: _grow(tensor, like.slots[n][3]) for n, tensor in w.items()})


def cut(w: Params, like: Layout) -> Params:
    """Remove the zeros that :func:`pad_rank` appended."""
    return Params({n: tensor[tuple(slice(size) for size in like.slots[n][3])] for n, tensor in w.items()})


def at_rank(spec: ModelSpec, rank: int | None) -> ModelSpec:
    """The [model] table with LoRA of this rank and the same alpha; unchanged for None."""
    if spec.adaptation is None or rank is None or rank == spec.adaptation.rank:
        return spec
    alpha = with_defaults(spec.adaptation, spec.task).alpha
    return dataclasses.replace(spec, adaptation=dataclasses.replace(spec.adaptation, rank=rank, alpha=alpha))


@contextmanager
def scale_for_rank(model: Model, rank: int) -> Iterator[None]:
    """Context manager: LoRA's scale is alpha / rank, for parameters of this rank that are padded to the model's."""
    if rank == model.adaptation_spec.rank:
        yield
        return
    layers: list[Any] = [model.module.get_submodule(path) for path in pairs(model.names)]
    before = [layer.scaling["default"] for layer in layers]
    for layer, s in zip(layers, before, strict=True):
        layer.scaling["default"] = s * model.adaptation_spec.rank / rank
    try:
        with weights_overridden(model):
            yield
    finally:
        for layer, s in zip(layers, before, strict=True):
            layer.scaling["default"] = s


@contextmanager
def shift_weights(model: Model, shift: Mapping[str, Factors]) -> Iterator[None]:
    """Context manager: each named module computes with W + U V, in training and in prediction.

    U V x is added to the module's output. W does not change, so that tied, half-precision and transposed weights need
    no special case. PEFT adds a shift of experts together with the adapter. Caches of the outputs of frozen layers are
    not used within the context.

    Args:
        shift: the factors U (d_out, R) and V (R, d_in) by path; the path of expert e is ``path[e]``.
    """
    if not shift:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(weights_overridden(model))
        experts = dict[str, list[Factors]]()
        for key, (u, v) in shift.items():
            path, of_experts, _ = key.partition("[")
            if of_experts:
                experts.setdefault(path, []).append((u, v))
                continue
            hook = model.module.get_submodule(path).register_forward_hook(LowRankDelta(u, v, model.device))
            stack.callback(hook.remove)
        for path, found in experts.items():
            from fedfm.models.adapters.expert_shift import add_factors

            both = torch.stack([u for u, _ in found]), torch.stack([v for _, v in found])
            stack.enter_context(add_factors(model.module.get_submodule(path), both))
        yield


@contextmanager
def apply(model: Model, w: Params) -> Iterator[None]:
    """Install w, LoRA of any rank, in the model; a rank other than the model's is installed as a shift."""
    rank = rank_of(w)
    if rank is None or rank == model.adaptation_spec.rank:
        model.load(w)
        yield
        return
    shift = factors(w, alpha_of(model))
    own = {n: torch.zeros_like(t) if n not in w or UP in n else t for n, t in model.params().items()}
    model.load(Params(own | {n: w[n] for n in rest(w)}))
    with shift_weights(model, shift):
        yield


def need(model: Model, *, experts: bool = False) -> None:
    """Raise an InputError unless the model is adapted by LoRA on linear maps; ``experts`` allows experts, too."""
    found = pairs(model.names)
    if getattr(model, "adaptation", None) != "lora" or not found:
        raise InputError(
            'model.adaptation: the method multiplies LoRA\'s factors; expected { name = "lora" }',
            key="model.adaptation",
        )
    spec = model.adaptation_spec
    if spec.dora or spec.rslora or spec.rank_pattern or spec.alpha_pattern:
        raise InputError(
            "model.adaptation: the method computes with (alpha / r) B A of one rank; drop dora, rslora, rank_pattern "
            "and alpha_pattern",
            key="model.adaptation",
        )
    shapes = {path: model.layout.slots[b][3] for path, (_, b) in found.items()}
    if bad := [path for path, shape in shapes.items() if len(shape) != 2 and not (experts and _of_experts(shape))]:
        path, mixed = stacked.path_of(bad[0]), [stacked.path_of(p) for p in bad if _of_experts(shapes[p])]
        cure = stacked.without(mixed) if mixed else "name linear maps only"
        raise InputError(
            f"model.adaptation.targets: {path} is not a linear map, and the method adapts only linear maps: {cure}",
            key="model.adaptation.targets",
        )


class LowRankDelta:
    """A forward hook: y + m x V^T U^T with the weight m; it uses the dense matrix if that is less work."""

    def __init__(self, u: Tensor, v: Tensor, device: torch.device, weight: Weight = 1.0) -> None:
        (m, r), n = u.shape, v.shape[1]
        dense = r * (m + n) >= m * n
        maps = [u.double() @ v.double()] if dense else [v, u]
        self.maps = [matrix.to(device, torch.float32) for matrix in maps]
        self.weight = weight

    def __call__(self, module: Any, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
        x = args[0].float()  # (..., n)
        for matrix in self.maps:
            x = F.linear(x, matrix)
        if self.weight != 1.0:
            x = x * at(self.weight, y)
        return y + x.to(y.dtype)  # (..., m)


def at(weight: Weight, y: Tensor) -> Any:
    """The weight as a number, or as one number for each row, broadcastable to y (b, ...)."""
    return weight(y) if callable(weight) else weight


@contextmanager
def weights_overridden(model: Model) -> Iterator[None]:
    """Context manager: hooks change the module's outputs, so that its weights alone do not determine them."""
    model.weights_overridden += 1
    try:
        yield
    finally:
        model.weights_overridden -= 1


def _of_experts(shape: Sequence[int]) -> bool:
    """Whether this is the shape (d_out, r, E) of the experts' factor B; the shape of a convolution's B ends with 1."""
    return len(shape) == 3 and shape[2] > 1


def _grow(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) == shape:
        return tensor
    pad = [
        amount
        for have, want in zip(reversed(tensor.shape), reversed(shape), strict=True)
        for amount in (0, want - have)
    ]
    return F.pad(tensor, pad)
