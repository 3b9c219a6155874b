"""A rank's part of a model: its rows of each weight, read from the files, and vectors of its trained rows.

PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel. Zhao et al. VLDB 2023. arXiv:2304.11277. With R ranks,
rank r has the rows r ceil(n / R) to (r + 1) ceil(n / R) of each weight of n rows. A block collects its weights before
its forward and backward pass, and frees the others' rows after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.families import unwrap
from fedfm.models.model import Model

Place = tuple[nn.Module, str]  # a module and the name of its parameter


def rows_of(count: int, rank: int, ranks: int) -> slice:
    """A rank's rows of ``count`` rows, as torch cuts them; the last ranks may have fewer or none.

    Example:
        >>> [rows_of(5, rank, 4) for rank in range(4)]
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None), slice(5, 5, None)]
    """
    size = -(-count // ranks)
    return slice(min(rank * size, count), min((rank + 1) * size, count))


def shard_model(model: Model, mesh: DeviceMesh, say: Callable[[str], None] = lambda text: None) -> None:
    """Cut the weights of a model without weights among the ranks of ``mesh``, and read this rank's part of each.

    Args:
        say: is called with the name of each weight that was read.

    Raises:
        InputError: a trained parameter is a single number, which cannot be cut.
    """
    slices, root = model.slices, unwrap(model.module)
    if slices is None:
        raise InputError("only a model without weights can be cut among processes")
    on_gpu = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device(mesh.device_type)
    unread: dict[nn.Parameter, tuple[nn.Parameter, list[Place]]] = {}  # parameter -> itself without memory, its places
    whole: set[nn.Parameter] = set()
    for module in root.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if not p.dim():
                if p.requires_grad:
                    text = f"model.name: {name} is a single number, which cannot be cut among processes"
                    raise InputError(text, key="model.name")
                if p in slices.names:
                    p.data = slices.read(p)
                whole.add(p)
            elif p in slices.names:
                if p not in unread:
                    empty = torch.empty(p.shape, dtype=p.dtype, device="meta")
                    unread[p] = nn.Parameter(empty, requires_grad=p.requires_grad), []
                setattr(module, name, unread[p][0])
                unread[p][1].append((module, name))
    ignored = whole or None
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, ignored_params=ignored)
    fully_shard(root, mesh=mesh, reshard_after_forward=False, ignored_params=ignored)
    for part in root.modules():
        if isinstance(part, FSDPModule):  # the sum of the gradients, without a division by the number of ranks
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True, recurse=False)  # experts may have no rows at one rank
    rank, ranks = mesh.get_rank(), mesh.size()
    for p, (_, places) in unread.items():
        module, name = places[0]
        cut: Any = getattr(module, name)
        # On its own memory: a view of a safetensors file keeps the file mapped.
        values = slices.read(p, rows_of(p.shape[0], rank, ranks)).to(device, copy=True)
        local = DTensor.from_local(values, mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride())
        made = nn.Parameter(local, requires_grad=p.requires_grad)
        for module, name in places:
            setattr(module, name, made)
        say(slices.names[p])
    for p in whole:
        p.data = p.data.to(device)
    model.slices, model.hollow = None, False
    model.find_tensors()


def _blocks(model: Model) -> Iterator[nn.Module]:
    for encoder in model.parts.stages:
        for block in encoder:
            yield from (module for _, module in block)


def root_of(model: Model) -> FSDPModule:
    """The module whose forward pass begins every pass of a sharded model."""
    found: FSDPModule = unwrap(model.module)
    return found


def held_bytes(model: Model) -> int:
    """Bytes of the parameters that this rank holds between two passes."""
    rounded = sum(getattr(module, "held_bytes", 0) for module in model.module.modules())
    return rounded + sum(_local(p).nbytes for p in {id(p): p for p in model.module.parameters()}.values())


def load_shards(model: Model, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Copy this rank's rows of these trained tensors, which come one at a time, into the model."""
    root_of(model).reshard()  # drops what the last forward pass collected of the former values
    live = model.live()
    for name, tensor in tensors:
        p: Any = live[name]
        _local(p).copy_(tensor[_own_rows(p)] if tensor.dim() else tensor)
    model.forget()


def whole_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) of each trained tensor on the CPU; all ranks have to take part."""
    for name, p in model.live().items():
        yield name, p.full_tensor().detach().cpu() if isinstance(p, DTensor) else p.detach().cpu()


class TrainedShards:
    """This rank's rows of the trained parameters as one flat vector, and their gradients as another.

    Attributes:
        p: (P / R,), the values; :meth:`store` copies them into the model.
    """

    def __init__(self, model: Model) -> None:
        self._live = model.live()
        self.p = torch.cat([_local(tensor).detach().reshape(-1) for tensor in self._live.values()])

    def gradients(self) -> Tensor:
        """The gradients of the last backward passes, summed over the ranks; the tensors' own are freed."""
        g = torch.zeros_like(self.p)
        for tensor, piece in self._pieces():
            if tensor.grad is not None:
                g[piece] = _local(tensor.grad).reshape(-1)
                tensor.grad = None
        return g

    def store(self) -> None:
        """Copy the values into the model."""
        for tensor, piece in self._pieces():
            local = _local(tensor)
            local.copy_(self.p[piece].view(local.shape))

    def flat(self, w: Params) -> Tensor:
        """This rank's rows of other values of the same tensors."""
        parts = [w[name][_own_rows(tensor)].reshape(-1) for name, tensor in self._live.items()]
        return torch.cat(parts).to(self.p)

    def places(self, names: Collection[str]) -> list[slice]:
        """The slices of the tensors ``names`` in the vectors; names of tensors that are not trained are skipped."""
        return [piece for name, (_, piece) in zip(self._live, self._pieces(), strict=True) if name in names]

    def shorten(self, g: Tensor, most: float | None) -> None:
        """Clip the gradient of all ranks' parameters to the norm ``most``."""
        if most is not None:
            square = g.double().square().sum()
            dist.all_reduce(square)
            g.mul_((most / square.sqrt()).clamp(max=1).to(g))

    def _pieces(self) -> Iterator[tuple[Tensor, slice]]:
        at = 0
        for tensor in self._live.values():
            count = _local(tensor).numel()
            yield tensor, slice(at, at + count)
            at += count


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor; a change of them changes the tensor."""
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _own_rows(tensor: Tensor) -> slice:
    if not isinstance(tensor, DTensor):
        return slice(None)
    return rows_of(tensor.shape[0], tensor.device_mesh.get_rank(), tensor.device_mesh.size())


def shapes(model: Model) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each trained tensor, in the order of messages."""
    return {name: (dtype, shape) for name, dtype, shape in model.layout.entries}
