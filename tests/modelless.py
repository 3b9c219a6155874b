"""A method whose clients have no model: they send the mean picture of each class, which the server's model looks at."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedfm.core.capabilities import Needs
from fedfm.core.client import Client, on_client
from fedfm.core.method import Method
from fedfm.data.table import Table
from fedfm.linalg.params import Params


@dataclass(frozen=True)
class MeanPictures(Method[Params]):
    """W_c = f(mean picture of class c): a head that says which mean a picture is like."""

    needs: ClassVar[Needs] = Needs("head", ("head",), model="server")
    asks: ClassVar[tuple[str, ...]] = ("sums",)

    rounds: int = field(default=1)

    def init(self, fed):
        return fed.initial

    def step(self, fed, w, t):
        replies = fed.ask(self.sums, classes=len(fed.model.classes)).values()
        total, count = (sum(reply[key] for reply in replies) for key in ("total", "count"))
        pictures = (total / count[:, None, None, None]).round().numpy().astype(np.uint8)
        table = Table("image", pictures, None, fed.model.classes, np.full(len(pictures), "train"))
        x = fed.model.features(fed.model.prepare(table, range(len(pictures))))  # (C, d)
        return Params({n: x if n.endswith("weight") else -(x**2).sum(1) / 2 for n in fed.model.names})

    @on_client
    def sums(self, client: Client, classes: int) -> dict[str, Tensor]:
        """Per class: the sum of its pictures (C, H, W, channels) and their number (C,)."""
        assert client.model is None
        rows = client.data.train
        member = torch.nn.functional.one_hot(rows.labels, classes).double()  # (n, C)
        return {"total": torch.einsum("nc,nhwx->chwx", member, rows.tensors["pixels"].double()), "count": member.sum(0)}

    def params_for(self, w, client):
        return w
