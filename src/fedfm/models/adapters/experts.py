"""Several named adapters on one frozen base: W x + sum_e m_e (alpha / r_e) B_e A_e x.

One adapter is the model's own, which may be trained; the others are frozen. Each can be on or off in each layer.

A pair is one parameter vector of three parts: the shared adapter, a client's own adapter, and their weights. See
Dual-Personalizing Adapter for Federated Foundation Models. Yang, Long, Shen, Jiang, Blumenstein. NeurIPS 2024.
arXiv:2403.19211. The client's adapter has the weight a = bias + <slope, h / |h|>, clipped to [0, 1], and the shared
adapter has 1 - a. Here h (d,) is the row's hidden state from :meth:`fedfm.models.model.Model.last_states`. If there is
no slope, the weight a is the bias for all rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.models.adapters import lora
from fedfm.models.adapters.lora import Weight
from fedfm.models.adapters.pair_names import GLOBAL, LOCAL, MIX, by_row
from fedfm.models.families import unwrap
from fedfm.models.layers import module_of
from fedfm.models.preprocessing import LOCAL_SHARE

if TYPE_CHECKING:
    from fedfm.models.model import Model

_SAVED = ".modules_to_save.default."


@dataclass(frozen=True)
class Expert:
    """One of several adapters on a frozen base.

    Attributes:
        w: its frozen tensors under the model's names, with LoRA of any rank; None means the model's own tensors.
        weight: the factor m.
        layers: paths of the layers (from ``Parts.encoders``) or modules in which its LoRA is on; None means all.
        trained: paths of the layers in which the LoRA of the model's own tensors is trained, if that LoRA is on there;
            None means all layers.
    """

    w: Params | None = None
    weight: Weight = 1.0
    layers: Collection[str] | None = None
    trained: Collection[str] | None = None


@contextmanager
def experts(model: Model, adapters: Mapping[str, Expert]) -> Iterator[None]:
    """Context manager: an adapted module computes W x + sum_e m_e (alpha / r_e) B_e A_e x over the experts that are on.

    A trained head always computes sum_e m_e h_e(x), where h_e has the values of expert e. LoRA's dropout is active
    in the trained layers only. The autograd graph ends at the lowest trained layer. If no expert has the model's
    own tensors, the model's LoRA is off and nothing is trained.

    Args:
        adapters: experts by name; at most one has the model's own tensors.

    Raises:
        InputError: the model is not adapted by LoRA on linear maps.
        KeyError: an expert's names differ from the model's.
        AttributeError: the model has no layer with one of the paths.
        ValueError: two experts have the model's own tensors.

    Example:
        Train the top 2 layers of a local expert with a frozen global one, each at the weight 1/2::

            top = [path for layers in model.parts.encoders for path, _ in layers[-2:]]
            with experts(model, {"global": Expert(w_g, 0.5), "local": Expert(weight=0.5, trained=top)}):
                w = SGD(0.1)(client, w)
    """
    lora.need(model)
    own = [expert for expert in adapters.values() if expert.w is None]
    if len(own) > 1:
        raise ValueError("two experts with the model's own tensors")
    mine = own[0] if own else Expert(weight=0.0, layers=())
    base = unwrap(model.module)
    for expert in adapters.values():
        for path in (*(expert.layers or ()), *(expert.trained or ())):
            base.get_submodule(path)
        if expert.w is not None and (differ := expert.w.keys() ^ set(model.names)):
            raise KeyError(f"parameter names differ from the model's: {sorted(differ)[:6]}")
    frozen = [(expert, expert.w) for expert in adapters.values() if expert.w is not None]
    with ExitStack() as stack:
        stack.enter_context(lora.weights_overridden(model))
        stack.enter_context(_training(model, mine, heads=bool(own)))
        for path in lora.pairs(model.names):
            layer: Any = model.module.get_submodule(path)
            if not _within(path, mine.layers):
                layer.enable_adapters(False)
                stack.callback(layer.enable_adapters, True)
            elif mine.weight != 1.0:
                hook = layer.lora_B["default"].register_forward_hook(lambda _, args, y: y * lora.at(mine.weight, y))
                stack.callback(hook.remove)
        for expert, w in frozen:
            for path, (u, v) in lora.factors(w, lora.alpha_of(model)).items():
                if _within(path, expert.layers):
                    delta = lora.LowRankDelta(u, v, model.device, expert.weight)
                    stack.callback(model.module.get_submodule(path).register_forward_hook(delta).remove)
        heads = [(expert.weight, _heads(w, model.device)) for expert, w in frozen]
        for path in dict.fromkeys(name.partition(_SAVED)[0] for name in lora.rest(model.names)):
            mixed = _Mixed(mine.weight, [(m, values[path]) for m, values in heads])
            stack.callback(model.module.get_submodule(path).register_forward_hook(mixed, with_kwargs=True).remove)
        yield


@contextmanager
def _training(model: Model, mine: Expert, *, heads: bool) -> Iterator[None]:
    """Context manager: only the LoRA of layers that are on and trained has gradients and dropout."""
    still = [p for p in lora.pairs(model.names) if not _within(p, mine.layers) or not _within(p, mine.trained)]
    without = {id(m) for path in still for m in model.module.get_submodule(path).modules()}
    flags = [(p, p.requires_grad) for p in model.module.parameters()]
    dropouts = model.train_too
    model.train_too = [m for m in dropouts if id(m) not in without]
    untrained = () if heads else lora.rest(model.names)
    for name, tensor in model.live().items():
        if name in untrained or any(name.startswith(f"{path}.") for path in still):
            tensor.requires_grad_(False)
    try:
        yield
    finally:
        model.train_too = dropouts
        for p, flag in flags:
            p.requires_grad_(flag)


class _Mixed:
    """A forward hook: m y + sum_e m_e y_e, where y_e is the module's output with the values of expert e."""

    def __init__(self, own: Weight, others: list[tuple[Weight, dict[str, Tensor]]]) -> None:
        self.own, self.others = own, others

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> Tensor:
        saved, out = module.modules_to_save["default"], lora.at(self.own, y) * y
        for m, values in self.others:
            out = out + lora.at(m, y) * cast(Tensor, functional_call(saved, values, args, kwargs))
        return cast(Tensor, out)


def _within(path: str, layers: Collection[str] | None) -> bool:
    """Whether the adapted module of this path is in one of the layers."""
    module = f"{module_of(f'{path}.lora_A')}."
    return layers is None or any(module.startswith(f"{layer}.") for layer in layers)


def _heads(w: Params, device: torch.device) -> dict[str, dict[str, Tensor]]:
    """The parameters of each trained module other than LoRA, by the module's path."""
    found: dict[str, dict[str, Tensor]] = {}
    for name in lora.rest(w):
        path, _, own = name.partition(_SAVED)
        found.setdefault(path, {})[own] = w[name].to(device)
    return found


# --- pairs ------------------------------------------------------------------------------------------------------------


def pair(shared: Params, own: Params, bias: float, slope: Tensor | None = None) -> Params:
    """One vector of the shared adapter, the client's own adapter and their weights."""
    mix = {"bias": torch.tensor(bias)} | ({} if slope is None else {"slope": slope})
    return Params.join(**{GLOBAL: shared, LOCAL: own, MIX: Params(mix)})


def share(mix: Params, states: Tensor) -> Tensor:
    """The share a (n,) of the client's own adapter in the output of rows with these hidden states (n, d)."""
    return (mix["bias"] + F.normalize(states, dim=1) @ mix["slope"]).clamp(0, 1)


def mean_direction(states: Tensor) -> Tensor:
    """The mean m (d,) of h_s / |h_s| over states h_s (S, d); the mean cosine of h to the states is <m, h / |h|>."""
    return F.normalize(states, dim=1).mean(0)


@contextmanager
def apply(model: Model, w: Params, rows: Rows) -> Iterator[Rows]:
    """Install both adapters of a pair in the model; yields the rows to score."""
    mix = w.part(MIX)
    a = float(mix["bias"])
    own: Weight = a
    shared: Weight = 1 - a
    model.load(w.part(LOCAL))
    if by_row(w):
        # As in the authors' program, only the client's own adapter is active when the hidden states are computed.
        shares = share(mix, model.last_states(rows)) if len(rows) else torch.zeros(0)
        rows = replace(rows, tensors=rows.tensors | {LOCAL_SHARE: shares})
        own, shared = (lambda y: _rows(model.share, y)), (lambda y: 1 - _rows(model.share, y))
    with experts(model, {GLOBAL: Expert(w.part(GLOBAL), shared), LOCAL: Expert(weight=own)}):
        yield rows


def one_adapter(model: Model, w: Params) -> Params:
    """One adapter that computes the same as a pair; its rank is the sum of both ranks, and its alpha is the model's.

    If the share differs from row to row, both adapters get the weight 1/2, as in training. For a head that is not a
    linear map the result is an approximation.
    """
    a = 0.5 if by_row(w) else float(w.part(MIX)["bias"])
    own, other, alpha = w.part(LOCAL), w.part(GLOBAL), lora.alpha_of(model)
    shift = {path: ((1 - a) * u, v) for path, (u, v) in lora.factors(other, alpha).items()}
    scaled = own.replace({b: a * own[b] for _, b in lora.pairs(own).values()})
    heads = {n: a * own[n] + (1 - a) * other[n] for n in lora.rest(own)}
    return lora.merge(scaled.replace(heads), shift, alpha)


def _rows(a: Tensor | None, y: Tensor) -> Tensor:
    """The shares a in the shape (b, 1, ...), so that they multiply y (b, ...) row by row."""
    if a is None or len(a) != len(y):
        raise ValueError("rows without shares, or a module that does not keep rows apart")
    return a.to(y.device, y.dtype).view(-1, *[1] * (y.dim() - 1))
