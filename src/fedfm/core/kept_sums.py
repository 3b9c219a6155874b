"""The role of a one-round method whose model is a function of sums over all rows.

The server keeps the sums in its state. So a client that joins later adds its own sums, and one that leaves subtracts
them. The model is then that of a run in which this client took part, or did not, from the start. Caller: ``fedfm
join``, ``leave`` and ``worth``. The role stands apart from :mod:`fedfm.core.capabilities`, since no round calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from fedfm.core.client import Client, ClientId, Update
from fedfm.linalg.params import Params

if TYPE_CHECKING:
    from fedfm.core.federation import Federation
    from fedfm.models.model import Model

SUMS = "sums."  # prefix of the entries of the server's state that are not part of the model
SEED = f"{SUMS}seed"  # entry of the state: the seed of random features, if the sums are over these
_ROUNDING = 1e-3  # tolerance of a number of rows, which is whole without rounding errors


class ChecksUpdates(ABC):
    """A method whose server can tell that no rows have a client's sums."""

    @abstractmethod
    def check_update(self, handler: str, client: ClientId, update: Update, fed: Federation) -> None:
        """Refuse an update for a mean, if the server sees it and no mechanism has changed it.

        Args:
            handler: the name of the client half.
            fed: the server's view.

        Raises:
            ClientFault: no rows have these sums; the client is left out.
        """


class KeepsSums(ChecksUpdates):
    """A method whose state is the model and the sums over all clients. Derive from it first."""

    @abstractmethod
    def own_sums(self, client: Client, seed: int) -> Params:
        """The exact sums over the client's training rows, as its message has them without noise.

        Args:
            seed: the run's seed.
        """

    @abstractmethod
    def state_of(self, model: Model, total: Params, seed: int) -> Params:
        """The state that the sums over all clients determine.

        Args:
            seed: the run's seed.
        """

    def could_be_sums(self, total: Params) -> bool:
        """Whether rows could have these sums, but for rounding. By default, no class has a negative number of rows."""
        return bool((total["count"] > -_ROUNDING).all())

    @property
    def one_head(self) -> bool:
        """Whether the result is a head of the model; else it is not a model that can be stored alone."""
        return True

    def params_for(self, w: Params, client: ClientId) -> Params:
        """The state without the sums."""
        return w.only(name for name in w if not name.startswith(SUMS))


def with_sums(w: Params, total: Params) -> Params:
    """The state of a model w and the sums that determine it."""
    return Params({**w, **{f"{SUMS}{name}": total[name] for name in total}})


def sums_of(state: Params) -> Params:
    """The sums in a state, without the seed of random features that may stand with them."""
    return Params({name.removeprefix(SUMS): state[name] for name in state if name.startswith(SUMS) and name != SEED})
