"""A second adapter beside the model's own: both put out together, one is trained at most.

Dual-Personalizing Adapter for Federated Foundation Models. Yang, Long, Shen, Jiang, Blumenstein. NeurIPS 2024.
arXiv:2403.19211: W x + a s B A x + (1 - a) s B' A' x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call

from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.models.adapters import lora
from fedfm.models.adapters.pair import GLOBAL, LOCAL, MIX, by_row, share

SHARE = "local_share"  # name of a tensor of rows: (n,) how much of a row's output is the model's own adapter's
_SAVED = ".modules_to_save.default."


@contextmanager
def beside(model: Any, other: Params, a: float | None = None) -> Iterator[None]:
    """Within it every adapted module puts out W x + a s B A x + (1 - a) s' B' A' x, and every module that is trained
    beside LoRA, a head, a times what it puts out and 1 - a times what it would with the values of ``other``.

    (A, B) are the model's own, which it has been loaded with and which may be trained; (A', B') are ``other``'s, of any
    rank, and frozen. LoRA's dropout meets the model's own only.

    Args:
        a: None: each row of the batch at hand has its own, in ``model.share``.
    """

    def of_own(y: Tensor) -> Any:
        return a if a is not None else _rows(model.share, y)

    def of_other(y: Tensor) -> Any:
        return 1 - of_own(y)

    with ExitStack() as stack:
        stack.enter_context(lora.altered(model))
        for path, (u, v) in lora.factors(other, lora.alpha_of(model)).items():
            layer = model.module.get_submodule(path)
            hooks = [
                layer.lora_B["default"].register_forward_hook(lambda _, args, y: y * of_own(y)),
                layer.register_forward_hook(lora.Shift(u, v, model.device, of_other)),
            ]
            for hook in hooks:
                stack.callback(hook.remove)
        for path, values in _saved(other, model.device).items():
            module = model.module.get_submodule(path)
            stack.callback(module.register_forward_hook(_Mixed(values, of_own), with_kwargs=True).remove)
        yield


@contextmanager
def wearing(model: Any, w: Params, rows: Rows) -> Iterator[Rows]:
    """Within it the model has both adapters of a pair (see ``training.pair``), and takes the rows that this yields."""
    local, mix = w.part(LOCAL), w.part(MIX)
    model.load(local)
    if by_row(w):
        # As the authors' program: by the hidden states under the client's own adapter alone.
        a = share(mix, model.last_states(rows)) if len(rows) else torch.zeros(0)
        rows = replace(rows, tensors=rows.tensors | {SHARE: a})
    with beside(model, w.part(GLOBAL), None if by_row(w) else float(mix["bias"])):
        yield rows


def prompts(rows: Rows) -> Rows:
    """Instruction rows without their answers; other rows as they are."""
    if "answer_start" not in rows.tensors or rows.tokens is None:
        return rows
    starts = rows.tensors["answer_start"].tolist()
    return Rows(tokens=tuple(t[:s] for t, s in zip(rows.tokens, starts, strict=True)), pad=rows.pad)


def mean(model: Any, w: Params) -> Params:
    """One adapter of both of a pair, at their ranks' sum and the model's alpha; where the rows have shares of their
    own, at 1/2 each, as they were trained together. A head that is no linear map is their mean only nearly.
    """
    a = 0.5 if by_row(w) else float(w.part(MIX)["bias"])
    own, other, alpha = w.part(LOCAL), w.part(GLOBAL), lora.alpha_of(model)
    shift = {path: ((1 - a) * u, v) for path, (u, v) in lora.factors(other, alpha).items()}
    scaled = own.replace({b: a * own[b] for _, b in lora.pairs(own).values()})
    heads = {n: a * own[n] + (1 - a) * other[n] for n in lora.rest(own)}
    return lora.merged(scaled.replace(heads), shift, alpha)


class _Mixed:
    """A forward hook: a y + (1 - a) y', y' being what the module puts out with other values."""

    def __init__(self, values: dict[str, Tensor], of_own: Callable[[Tensor], Any]) -> None:
        self.values, self.of_own = values, of_own

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> Tensor:
        a: Tensor | float = self.of_own(y)
        other = module.modules_to_save["default"]
        return a * y + (1 - a) * cast(Tensor, functional_call(other, self.values, args, kwargs))


def _saved(w: Params, device: torch.device) -> dict[str, dict[str, Tensor]]:
    """Path of each module that is trained beside LoRA -> its parameters."""
    found: dict[str, dict[str, Tensor]] = {}
    for name in lora.rest(w):
        path, _, own = name.partition(_SAVED)
        found.setdefault(path, {})[own] = w[name].to(device)
    return found


def _rows(a: Tensor | None, y: Tensor) -> Tensor:
    """(b, 1, ...) beside y (b, ...)."""
    if a is None or len(a) != len(y):
        raise ValueError("rows without shares, or a module that does not keep rows apart")
    return a.to(y.device, y.dtype).view(-1, *[1] * (y.dim() - 1))
