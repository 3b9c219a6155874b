"""The experts of a mixture in 4 bits: parameters (E, ., .), which are no linear maps that bitsandbytes replaces.

A module's forward pass computes with the numbers that the bits stand for, plus what LoRA adds. They are made anew for
each forward pass and for its gradients: between the two, memory holds the bits alone.
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

Added = tuple[Tensor, Tensor, float]  # left (E, ., r), right (E, r, .), scale: what LoRA adds to a parameter
BLOCK = 64  # numbers of one scale
_BITS = "bits"  # name of the submodule, which a module of experts has not yet


class Bits(nn.Module):
    """A parameter in blocks of 64 numbers of 4 bits, nf4, with scales of 8 bits (double quantisation)."""

    def __init__(self, weight: Tensor) -> None:
        from bitsandbytes import functional

        super().__init__()
        self.size, self.dtype = tuple(weight.shape), weight.dtype
        rows = weight.reshape(-1, BLOCK)  # on a CPU bitsandbytes (0.50) takes wrong scales where a row ends in a block
        packed, state = functional.quantize_4bit(rows, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
        self.blocks = state.blocksize, state.state2.blocksize
        tensors = (packed, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
        for name, tensor in zip(("packed", "scales", "code", "offset", "scales_2", "code_2"), tensors, strict=True):
            self.register_buffer(name, tensor)

    def numbers(self) -> Tensor:
        """What the bits stand for."""
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
    """Base of a module of experts whose parameters are :class:`Bits`; reading one gives numbers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the experts."""
        made = vars(self)["_made"]
        made.clear()
        try:
            with saved_tensors_hooks(self._fold, _unfold):
                return super().forward(*args, **kwargs)
        finally:
            made.clear()

    def weight_of(self, name: str) -> Tensor:
        """The parameter of this name with what LoRA adds to it; computed once in a forward pass."""
        made = vars(self)["_made"]
        if name not in made:
            again = _Again(self.get_submodule(f"{_BITS}.{name}"), vars(self)["_added"].get(name, ()))
            made[name] = again, again.numbers()
        return made[name][1]  # type: ignore[no-any-return]

    @contextmanager
    def adding(self, name: str, added: Sequence[Added]) -> Iterator[None]:
        """Context manager: the parameter is read with these terms added."""
        vars(self)["_added"][name] = added
        try:
            yield
        finally:
            del vars(self)["_added"][name]

    def _fold(self, tensor: Tensor) -> Any:
        """In place of numbers that autograd keeps: how to compute them again."""
        where = tensor.untyped_storage().data_ptr()
        for again, dense in vars(self)["_made"].values():
            if dense.untyped_storage().data_ptr() == where:
                return again, tensor.shape, tensor.stride(), tensor.storage_offset()
        return tensor


class _Again:
    """How to compute a parameter."""

    def __init__(self, bits: nn.Module, added: Sequence[Added]) -> None:
        self.bits, self.added = bits, added

    def numbers(self) -> Tensor:
        with torch.no_grad():
            out = cast(Bits, self.bits).numbers()
        for left, right, scale in self.added:
            out = torch.baddbmm(out, left, right, alpha=scale)
        return out


_last: list[tuple[_Again, Tensor]] = []  # at most one: the gradients of many experts need the same numbers in turn


def _unfold(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    again, shape, stride, offset = kept
    if not _last or _last[0][0] is not again:
        with torch.no_grad():
            _last[:] = [(again, again.numbers())]
    return _last[0][1].as_strided(shape, stride, offset)


def pack(module: nn.Module) -> None:
    """Replace the parameters of all experts by bits, also below PEFT's adapters, where they fill whole blocks."""
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
    """Replace the bits of all experts by the numbers that they stand for, in this dtype, on the CPU."""
    for owner in [m for m in module.modules() if isinstance(m, OnBits)]:
        bits: Any = owner.get_submodule(_BITS)
        owner.__class__ = type(owner).__bases__[1]
        del owner._modules[_BITS], vars(owner)["_made"], vars(owner)["_added"]
        for name, own in bits.items():
            owner.register_parameter(name, nn.Parameter(own.numbers().to("cpu", dtype), requires_grad=False))


@functools.cache
def _wrapper() -> Any:
    """PEFT's layer of experts, whose factors are added to the numbers of bits."""
    from peft.tuners.lora.layer import ParamWrapper

    class OnBitsWrapper(ParamWrapper):  # type: ignore[misc]
        def get_param(self) -> Tensor:
            """An empty tensor like the parameter: PEFT asks it for dtype, shape and device."""
            bits: Any = self.get_base_layer().get_submodule(f"{_BITS}.{self.parameter_name}")
            return bits.code.new_empty((), dtype=bits.dtype).expand(bits.size)  # type: ignore[no-any-return]

        @contextmanager
        def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
            added = [self.get_delta_factors(name) for name in active_adapters if name in self.lora_A]
            with self.get_base_layer().adding(self.parameter_name, added):
                yield

    return OnBitsWrapper
