"""The experts of a mixture in 4 bits.

The weights of E experts are one parameter (E, ., .). bitsandbytes only replaces modules for linear maps, so this module
quantises such parameters.

A forward pass dequantises the parameter and adds LoRA's update. The backward pass computes this sum again, so that
between the two passes memory only contains the 4-bit weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fedfm.models.adapters.stacked import stacks

Added = tuple[Tensor, Tensor, float]  # LoRA's update of a parameter: left (E, ., r), right (E, r, .), scale
BLOCK = 64  # number of weights that share a scale
_BITS = "bits"  # name of the new submodule; no module of experts has a submodule of this name


class Bits(nn.Module):
    """A parameter in nf4: weights of 4 bits in blocks of 64, with scales of 8 bits (double quantisation)."""

    def __init__(self, weight: Tensor) -> None:
        from bitsandbytes import functional

        super().__init__()
        self.size, self.dtype = tuple(weight.shape), weight.dtype
        rows = weight.reshape(-1, BLOCK)  # bitsandbytes (0.50) uses wrong scales on a CPU if a row ends inside a block
        packed, state = functional.quantize_4bit(rows, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
        self.blocks = state.blocksize, state.state2.blocksize
        tensors = (packed, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
        for name, tensor in zip(("packed", "scales", "code", "offset", "scales_2", "code_2"), tensors, strict=True):
            self.register_buffer(name, tensor)

    def numbers(self) -> Tensor:
        """The dequantised parameter."""
        from bitsandbytes import functional

        second = functional.QuantState(self.scales_2, blocksize=self.blocks[1], code=self.code_2, dtype=torch.float32)
        state = functional.QuantState(
            self.scales,
            shape=torch.Size((math.prod(self.size) // BLOCK, BLOCK)),
            code=self.code,
            blocksize=self.blocks[0],
            quant_type="nf4",
            dtype=self.dtype,
            offset=self.offset,
            state2=second,
        )
        rows: Tensor = functional.dequantize_4bit(self.packed, state)
        return rows.view(self.size)


class OnBits(nn.Module):
    """Base class of a module of experts whose parameters are :class:`Bits`; reading a parameter dequantises it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the experts."""
        made = vars(self)["_made"]
        made.clear()
        try:
            with saved_tensors_hooks(self._fold, _unfold):
                return super().forward(*args, **kwargs)
        finally:
            made.clear()

    def weight_of(self, name: str) -> Tensor:
        """The parameter of this name plus LoRA's update; the sum is computed once per forward pass."""
        made = vars(self)["_made"]
        if name not in made:
            again = _Again(self.get_submodule(f"{_BITS}.{name}"), vars(self)["_added"].get(name, ()))
            made[name] = again, again.numbers()
        return made[name][1]  # type: ignore[no-any-return]

    @contextmanager
    def adding(self, name: str, added: Sequence[Added]) -> Iterator[None]:
        """Context manager: a read of the parameter adds these terms."""
        vars(self)["_added"][name] = added
        try:
            yield
        finally:
            del vars(self)["_added"][name]

    def _fold(self, tensor: Tensor) -> Any:
        """Return what autograd saves for a tensor: the tensor, or the inputs that give a parameter again."""
        where = tensor.untyped_storage().data_ptr()
        for again, dense in vars(self)["_made"].values():
            if dense.untyped_storage().data_ptr() == where:
                return again, tensor.shape, tensor.stride(), tensor.storage_offset()
        return tensor


class _Again:
    """The inputs from which a parameter can be computed again."""

    def __init__(self, bits: nn.Module, added: Sequence[Added]) -> None:
        self.bits, self.added = bits, added

    def numbers(self) -> Tensor:
        with torch.no_grad():
            out = cast(Bits, self.bits).numbers()
        for left, right, scale in self.added:
            out = torch.baddbmm(out, left, right, alpha=scale)
        return out


_last: list[tuple[_Again, Tensor]] = []  # at most one entry: all experts' gradients need the same tensor


def _unfold(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    again, shape, stride, offset = kept
    if not _last or _last[0][0] is not again:
        with torch.no_grad():
            _last[:] = [(again, again.numbers())]
    return _last[0][1].as_strided(shape, stride, offset)


def pack(module: nn.Module) -> None:
    """Quantise every parameter of experts that has a multiple of :data:`BLOCK` values, also in PEFT's wrappers."""
    found = {id(p) for p in stacks(module).values() if p.numel() % BLOCK == 0}
    for owner in list(module.modules()):
        own = {name: p for name, p in owner.named_parameters(recurse=False) if id(p) in found}
        if not own:
            continue
        for name in own:
            del owner._parameters[name]
        kind = type(owner)
        reads = {name: property(functools.partial(OnBits.weight_of, name=name)) for name in own}
        owner.__class__ = type(kind.__name__, (OnBits, kind), reads)
        owner.add_module(_BITS, nn.ModuleDict({name: Bits(p.detach()) for name, p in own.items()}))
        vars(owner).update(_made={}, _added={})
    layer: Any
    for layer in list(module.modules()):
        if hasattr(layer, "parameter_name") and isinstance(layer.get_base_layer(), OnBits):
            layer.__class__ = _wrapper()


def unpack(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace the quantised parameters of all experts by dequantised parameters, in this dtype, on the CPU."""
    for owner in [m for m in module.modules() if isinstance(m, OnBits)]:
        bits: Any = owner.get_submodule(_BITS)
        owner.__class__ = type(owner).__bases__[1]
        del owner._modules[_BITS], vars(owner)["_made"], vars(owner)["_added"]
        for name, own in bits.items():
            owner.register_parameter(name, nn.Parameter(own.numbers().to("cpu", dtype), requires_grad=False))


@functools.cache
def _wrapper() -> Any:
    """A subclass of PEFT's layer for experts: its factors are added when a quantised parameter is read."""
    from peft.tuners.lora.layer import ParamWrapper

    class OnBitsWrapper(ParamWrapper):  # type: ignore[misc]
        def get_param(self) -> Tensor:
            """A placeholder for the parameter, from which PEFT reads dtype, shape and device."""
            bits: Any = self.get_base_layer().get_submodule(f"{_BITS}.{self.parameter_name}")
            return bits.code.new_empty((), dtype=bits.dtype).expand(bits.size)  # type: ignore[no-any-return]

        @contextmanager
        def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
            added = [self.get_delta_factors(name) for name in active_adapters if name in self.lora_A]
            with self.get_base_layer().adding(self.parameter_name, added):
                yield

    return OnBitsWrapper
