"""The gate of FedMS: from a picture's features under the global expert to the global expert's share lambda."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedfm import seeds
from fedfm.linalg.params import Params

LAST = ("output.", "output_norm.")  # what the variant "last" trains and sends


class Gate(nn.Module):
    """The gate adapter: Linear(d, d), batch norm, ReLU, Linear(d, 2), batch norm; lambda is the softmax's first entry.

    The paper's adapter has one output, whose softmax is constantly 1, and no activation; two outputs and a ReLU are
    the repair.
    """

    def __init__(self, d: int) -> None:
        super().__init__()
        self.hidden, self.hidden_norm = nn.Linear(d, d), nn.BatchNorm1d(d)
        self.output, self.output_norm = nn.Linear(d, 2), nn.BatchNorm1d(2)

    def forward(self, V: Tensor) -> Tensor:
        """Features (b, d) -> lambda (b,)."""
        hidden = torch.relu(self.hidden_norm(self.hidden(V)))
        z: Tensor = self.output_norm(self.output(hidden))
        return z.softmax(-1)[:, 0]

    def load(self, Z: Params) -> Gate:
        """Take these values."""
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(Z[name])
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and batch norm's running means and variances."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.endswith("num_batches_tracked")}

    def mode(self, *, rows: int, last: bool) -> Gate:
        """Training mode if there are rows enough for batch norm; a part that is not trained stays in evaluation."""
        self.train(rows > 1)
        if last:
            self.hidden_norm.eval()
        return self


def initial(d: int, seed: int) -> Params:
    """PyTorch's default initialisation, drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.derive(seed, "gate"))
        return Params(Gate(d).tensors())
