"""Linear maps in 4 bits. Each rank has the codes of its own rows.

The format is nf4 of :mod:`fedfm.models.quantised`: a block of 64 weights has a scale, and blocks of 256 scales have a
scale, after the mean of all scales of the matrix is subtracted. A rank's rows are whole blocks, since only maps are
quantised whose width is a multiple of 64. So the codes of a rank's rows are those of the whole matrix. The scales are
not: each rank collects those of all rows, rounds them together, and keeps all of them, half a bit for four weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fedfm.errors import InputError
from fedfm.models import quantised
from fedfm.models.adapters.stacked import stacks
from fedfm.models.families import unwrap
from fedfm.models.model import Model
from fedfm.training.sharded.shards import rows_of

GROUP = 256  # number of scales that share a scale


def check(model: Model, key: str) -> None:
    """Refuse a model whose rounded weights cannot be cut by rows.

    Raises:
        InputError: the message begins with ``key``, the setting that asks for several processes.
    """
    word = f'{key}: model.quantization = "{model.spec.quantization}"'
    quantised.check_adaptation(model.spec, word)
    quantised.need(word)
    if stacks(model.module) or any(type(m).__name__ == "Conv1D" for m in model.module.modules()):
        raise InputError(f"{word}: experts, and the transposed maps of a GPT-2, are rounded in one process", key=key)


def share_maps(model: Model, device: torch.device, say: Callable[[str], None] = lambda text: None) -> None:
    """Replace each linear map that is quantised in one process by a :class:`SharedMap`, before the rest is cut.

    Args:
        say: is called with the name of each weight that was read.
    """
    slices, root = model.slices, unwrap(model.module)
    assert slices is not None  # noqa: S101 - its weights are in the files
    out = root.get_output_embeddings()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for path, linear in list(root.named_modules()):
        p: Any = getattr(linear, "weight", None)
        if not isinstance(linear, nn.Linear) or p not in slices.names or linear.in_features % 64:
            continue
        if linear is getattr(out, "base_layer", out):
            continue
        outputs, bias = linear.out_features, linear.bias
        values = slices.read(p, rows_of(outputs, rank, ranks)).to(device, copy=True)
        root.set_submodule(path, SharedMap(values, outputs, None if bias is None else slices.read(bias).to(device)))
        say(slices.names[p])


class SharedMap(nn.Module):
    """A frozen linear map whose 4-bit codes are cut by rows among the ranks.

    A pass collects the codes of all ranks, computes, and frees them; the backward pass collects them again.

    Args:
        values: this rank's rows (n / R, m) of the weight, in the dtype in which the map computes.
        outputs: n, the number of rows of all ranks.
        bias: the whole bias (n,), or None.
    """

    def __init__(self, values: Tensor, outputs: int, bias: Tensor | None) -> None:
        super().__init__()
        from bitsandbytes import functional
        from bitsandbytes.functional import QuantState

        self.out_features, self.in_features = outputs, values.shape[1]
        most = rows_of(outputs, 0, dist.get_world_size()).stop
        self._size = most * self.in_features // 2  # bytes of a rank's codes; the last ranks' are padded
        rows = values if len(values) else values.new_zeros(1, self.in_features)  # a rank may have none
        codes, state = functional.quantize_4bit(rows.contiguous(), quant_type="nf4", compress_statistics=False)
        count = values.numel() // 64
        scales = _collect(state.absmax[:count], self._size // 32)[: outputs * self.in_features // 64]
        offset = scales.mean()
        rounded, second = functional.quantize_blockwise(scales - offset, blocksize=GROUP)
        self._state = QuantState(
            absmax=rounded,
            shape=torch.Size((outputs, self.in_features)),
            dtype=values.dtype,
            blocksize=64,
            code=state.code,
            quant_type="nf4",
            offset=offset,
            state2=second,
        )
        self.register_buffer("codes", codes.reshape(-1)[: count * 32].clone(), persistent=False)
        self.held_bytes = count * 32 + rounded.nbytes + second.absmax.nbytes
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The codes of this rank, where PEFT looks for a device."""
        codes: Any = self.codes
        return codes  # type: ignore[no-any-return]

    def whole(self) -> Tensor:
        """The weight (n, m); all ranks have to ask."""
        from bitsandbytes import functional

        codes = _collect(self.weight, self._size)[: self.out_features * self.in_features // 2]
        return functional.dequantize_4bit(codes[:, None], self._state)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (..., m) -> outputs (..., n)."""
        y: Tensor = _Product.apply(x.to(self._state.dtype), self)  # type: ignore[no-untyped-call]
        return (y if self.bias is None else y + self.bias.to(y.dtype)).to(x.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: SharedMap) -> Tensor:
        ctx.linear = linear
        return F.linear(x, linear.whole())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] @ ctx.linear.whole(), None


def _collect(own: Tensor, size: int) -> Tensor:
    """All ranks' parts, one after the other; each is padded to ``size`` entries, which only the last ones lack."""
    padded = F.pad(own, (0, size - len(own)))
    found = padded.new_empty(size * dist.get_world_size())
    dist.all_gather_into_tensor(found, padded)
    return found
