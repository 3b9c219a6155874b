"""A federation whose clients compute a mean of vectors, over a link that drops, changes and stores messages."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from fedfm.aggregation.secure import Secure
from fedfm.core.client import Client, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.method import Method
from fedfm.engines.local.engine import LocalLink
from fedfm.linalg.params import Params
from fedfm.runtime.client import Silos
from toy import LINKS, Toys

MESSAGES = ("keys", "share", "hold", "give", "consent", "unmask")


@dataclass(frozen=True)
class Vectors(Method):
    """A mean of vectors that :func:`update_of` makes."""

    rounds: int = 1
    size: int = 40
    scale: float = 1.0
    fraction: float = 1.0
    means: ClassVar = ("give",)

    @on_client
    def give(self, client: Client, t: int, w: Params) -> Update:
        return update_of(client.id, t, self.size, self.scale)

    def init(self, fed):
        return fed.initial

    def step(self, fed, state, t):
        like = update_of("", 0, self.size, 1.0).delta.layout
        return fed.mean(self.give, of=fed.sample(self.fraction), like=like, t=t, w=fed.initial)

    def params_for(self, state, client):
        return state


def update_of(name, t, size, scale):
    """Two tensors, of two dtypes; weights are whole numbers and halves."""
    rng = np.random.default_rng([*name.encode(), t])
    a, b = rng.normal(0, 0.05 * scale, size), rng.normal(0, 2.0, 3)
    delta = Params({"a": torch.from_numpy(a).float(), "b": torch.from_numpy(b)})
    return Update(delta, float(rng.integers(1, 2000)) / 2, {"loss": float(rng.random())})


class Between:
    """A link whose server side may drop, change and read messages.

    Attributes:
        lost: {message: names} whose request does not arrive; ``late``: whose reply does not.
        change: called with each request, returns the one to deliver.
    """

    def __init__(self, link):
        self._link, self.lost, self.late, self.change = link, {}, {}, lambda request: request
        self.sent, self.heard = [], []

    @property
    def clients(self):
        return self._link.clients

    def exchange(self, requests):
        message = requests[0].handler.rpartition("_")[2]
        here = [self.change(r) for r in requests if r.client not in self.lost.get(message, ())]
        self.sent += here
        for reply in self._link.exchange(here) if here else ():
            self.heard.append((message, reply))
            if reply.client not in self.late.get(message, ()):
                yield reply

    def replies(self, message):
        return {reply.client: reply for name, reply in self.heard if name == message}


class Houses(Silos):
    """Clients of whom each has its own file: attributes of :class:`Client` by name."""

    own = None

    def client(self, request):
        found = super().client(request)
        return replace(found, **(self.own or {}).get(request.client, {}))


def names(n):
    return [f"c{i:02d}" for i in range(n)]


def federation(folder, n, aggregator=None, method=None, own=None, **link):
    method, aggregator = method or Vectors(), aggregator or Secure()
    toys = Toys({name: [1.0] for name in names(n)})
    silos = Houses(method, aggregator, toys, memory=folder)
    silos.own = own
    LINKS.append(LocalLink(silos, **link))
    fed = Federation(Between(LINKS[-1]), model=toys.model, aggregator=aggregator)
    return fed, fed._link, method


def step(fed, method, t):
    fed.begin(t)
    return method.step(fed, None, t)


def expected(alive, t, method):
    """The weighted mean in float64, by NumPy."""
    updates = [update_of(name, t, method.size, method.scale) for name in alive]
    weights = np.array([u.weight for u in updates])
    return {
        key: np.average([u.delta[key].double().numpy() for u in updates], axis=0, weights=weights) for key in ("a", "b")
    }, float(np.average([u.metrics["loss"] for u in updates], weights=weights))


def agrees(found, alive, t, method):
    mean, _ = expected(alive, t, method)
    for key, value in mean.items():
        assert np.abs(found[key].double().numpy() - value).max() < 1e-7 * max(1, np.abs(value).max())
