"""A method of your own: FedAvg with smaller steps in later rounds, in thirty lines.

python examples/gallery/own_method.py
"""

from dataclasses import dataclass
from typing import ClassVar

import fedfm
from fedfm import Client, ClientId, Federation, Method, Params, Update, on_client, setting
from fedfm.training import SGD, Local


@dataclass(frozen=True)
class Cautious(Method[Params]):
    """FedAvg whose step of round t is eta / t."""

    means: ClassVar[tuple[str, ...]] = ("train",)

    rounds: int = setting(5, "communication rounds", ge=0)
    eta: float = setting(1.0, "step of the first round", gt=0)
    local: Local = setting(SGD(), "client optimiser")

    def init(self, fed: Federation) -> Params:
        """The state before the first round."""
        return fed.initial

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        """Server half of round t."""
        return w + (self.eta / t) * fed.mean(self.train, w=w)

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        """Client half."""
        return Update(self.local(client, w) - w, len(client.data.train), client.metrics)

    def params_for(self, w: Params, client: ClientId) -> Params:
        """The weights that a client gets at the end."""
        return w


def main(limit: int = 300, rounds: int = 5) -> dict[str, float]:
    """Return the accuracy of this method and of FedAvg."""
    tables = {
        "data": {"name": "digits", "limit": limit, "partition": {"name": "iid", "clients": 3}},
        "model": {"name": "nano-vit", "adaptation": {"name": "head"}},
    }
    own = fedfm.run(tables | {"method": {"name": "own_method:Cautious", "rounds": rounds}})
    plain = fedfm.run(tables | {"method": {"name": "fedavg", "rounds": rounds}})
    print(f"cautious {own['accuracy']:.3f}, fedavg {plain['accuracy']:.3f}")
    return {"cautious": own["accuracy"], "fedavg": plain["accuracy"]}


if __name__ == "__main__":
    main()
