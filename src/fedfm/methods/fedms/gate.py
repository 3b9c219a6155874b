"""The gate of FedMS: it maps an image's features under the global expert to the global expert's share lambda."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedfm import seeds
from fedfm.linalg.params import Params
from fedfm.models.backbone import backbone
from fedfm.models.dual_encoder import DualModel

LAST = ("output.", "output_norm.")  # the tensors that the variant "last" trains and sends
TRUNK = "trunk."  # prefix of the names in the gate's own image block


class Gate(nn.Module):
    """The gate adapter: Linear(d, d), batch norm, ReLU, Linear(d, 2), batch norm; lambda is the softmax's first entry.

    The paper's adapter has no activation, and one output, whose softmax is always 1. Here it has two outputs and a
    ReLU.
    """

    def __init__(self, d: int) -> None:
        super().__init__()
        self.hidden, self.hidden_norm = nn.Linear(d, d), nn.BatchNorm1d(d)
        self.output, self.output_norm = nn.Linear(d, 2), nn.BatchNorm1d(2)

    def forward(self, V: Tensor) -> Tensor:
        """Lambda (b,) for features (b, d)."""
        hidden = torch.relu(self.hidden_norm(self.hidden(V)))
        z: Tensor = self.output_norm(self.output(hidden))
        return z.softmax(-1)[:, 0]

    def load(self, Z: Params) -> Gate:
        """Copy the values of ``Z`` into the gate, and return the gate."""
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(Z[name])
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and batch norm's running means and variances."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.endswith("num_batches_tracked")}

    def mode(self, *, rows: int, last: bool) -> Gate:
        """Set training mode if there are enough rows for batch norm; an untrained part stays in evaluation mode."""
        self.train(rows > 1)
        if last:
            self.hidden_norm.eval()
        return self


def initial(d: int, seed: int) -> Params:
    """PyTorch's default initialisation, drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.derive(seed, "gate"))
        return Params(Gate(d).tensors())


@dataclass(frozen=True)
class Gating:
    """The kind of gate of a method.

    Attributes:
        part: the gate's part that is trained and sent: "adapter", "last" (its last layer) or "all" (also an image
            block).
        backbone: the image classifier whose frozen features the gate reads; if empty, those of the global expert.
        share: a fixed lambda for every row, instead of a gate; if None, the gate computes lambda.
    """

    part: str
    backbone: str
    share: float | None

    def width(self, model: DualModel) -> int:
        """Width of the gate's input."""
        return backbone(self.backbone, str(model.device)).width if self.backbone else model.dual.width

    def initial(self, model: DualModel, seed: int) -> Params:
        """Initial values of the adapter."""
        return initial(self.width(model), seed)

    def load(self, model: DualModel, Z: Params) -> Gate:
        """The gate with these values, on the model's device."""
        return Gate(self.width(model)).load(Z).to(model.device)

    def lam(self, gate: Gate, V_g: Tensor) -> Tensor:
        """Lambda (b,) for the global expert's features (b, d): the gate's output, or ``share``."""
        return gate(V_g) if self.share is None else torch.full((len(V_g),), self.share, device=V_g.device)

    def travelling(self, Z: Params) -> Params:
        """The part of the gate that is sent."""
        return Z.only(n for n in Z if n.startswith(LAST)) if self.part == "last" else Z

    def trains(self, name: str) -> bool:
        """Whether this tensor of the adapter is trained."""
        return self.part != "last" or name.startswith(LAST)


def adapter_of(Z: Params) -> Params:
    """The gate's adapter, without the image block."""
    return Z.only(n for n in Z if not n.startswith(TRUNK))


def trunk_of(Z: Params, device: torch.device) -> dict[str, Tensor]:
    """The gate's own image block, on the device; empty if it has none."""
    return {n: t.to(device) for n, t in Z.items() if n.startswith(TRUNK)}
