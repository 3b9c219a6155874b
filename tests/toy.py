"""A model with one number: f_k(w) = mean over the client's rows of (w - a)^2 / 2. Tests compute results by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedfm.core import tasks
from fedfm.core.client import ClientData
from fedfm.core.federation import Federation
from fedfm.core.messages import Excluded
from fedfm.core.rows import Batch, Rows
from fedfm.engines.local.engine import LocalLink
from fedfm.linalg.params import Params
from fedfm.runtime.client import Silos

LINKS: list[LocalLink] = []  # ended after each test


class Quadratic:
    """One trainable scalar w; the loss of a row a is (w - a)^2 / 2."""

    task, classes, kernels = tasks.find("regression"), (), "exact"

    def __init__(self, w: float = 1.0) -> None:
        self.module = nn.ParameterDict({"w": nn.Parameter(torch.tensor([w]))})
        self.names = ("w",)
        self.layout = self.params().layout

    def params(self) -> Params:
        return Params({"w": self.module["w"]})

    def load(self, w: Params) -> None:
        with torch.no_grad():
            self.module["w"].copy_(w["w"])

    def live(self) -> dict[str, Tensor]:
        return {"w": self.module["w"]}

    def loss(self, batch: Batch) -> Tensor:
        return ((self.module["w"] - batch["a"]) ** 2 / 2).mean()

    def train_mode(self) -> None: ...

    def eval_mode(self) -> None: ...


class Toys:
    """Clients by name, each with its numbers."""

    attackers = None

    def __init__(self, rows: Mapping[str, Sequence[float]], w: float = 1.0) -> None:
        self.model = Quadratic(w)
        self.client_model = self.model
        self._rows = {name: Rows({"a": torch.tensor(list(a), dtype=torch.float32)}) for name, a in rows.items()}

    @property
    def clients(self) -> list[str]:
        return sorted(self._rows)

    def data(self, client: str) -> ClientData:
        return ClientData(lambda: self._rows[client], lambda: Rows(), lambda: Rows())


def federation(
    method: Any,
    rows: Mapping[str, Sequence[float]],
    folder: Path,
    *,
    w: float = 1.0,
    min_clients: int = 1,
    attack: Any = None,
    aggregator: Any = None,
    **link: Any,
) -> Federation:
    """A federation of toys on the local engine."""
    from fedfm.aggregation.base import Aggregator

    toys, aggregator = Toys(rows, w), aggregator or Aggregator()
    silos = Silos(method, aggregator, toys, memory=folder, attack=attack)
    out: list[Excluded] = []
    LINKS.append(LocalLink(silos, **link))
    return Federation(
        LINKS[-1], model=toys.model, aggregator=aggregator, min_clients=min_clients, on_excluded=out.append
    )


def run(method: Any, fed: Federation, rounds: int) -> list[Any]:
    """States after 0, 1, ... rounds."""
    fed.begin(0)
    states = [method.init(fed)]
    for t in range(1, rounds + 1):
        fed.begin(t)
        states.append(method.step(fed, states[-1], t))
    return states
