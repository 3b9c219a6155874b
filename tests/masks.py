"""An aggregation that sends two messages of its own: updates stay at the clients, and only their masked sum leaves.

The structure of Bonawitz et al. 2017 (CCS) without its recovery by secret sharing. Who drops out before the sum is left
out of it; who drops out while it is made is left out of another try, among those who are left.

1. before: every client sends the public half of a fresh X25519 key and keeps the private half;
2. the method's train message: the client keeps its update and sends nothing;
3. after: every client that has one gets the keys of the others that have one, and sends its update in whole numbers
   modulo 2^64 plus a mask for each of them, which the other subtracts.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from torch import Tensor

from fedfm.aggregation.base import Aggregator, Mechanism, Rule, Transport
from fedfm.core.client import Client, ClientId, Update, on_client
from fedfm.core.federation import Federation
from fedfm.errors import E_SHAPE, ClientFault, RunError
from fedfm.linalg.params import Layout, Params
from fedfm.privacy.accountant import Accountant, Spent
from fedfm.privacy.gaussian import epsilon_of

SCALE = 1 << 24  # of weight times delta, in whole numbers
KEY, UPDATE, ROUNDS = "PairwiseMasks.key", "PairwiseMasks.update", "PairwiseMasks.rounds"


@dataclass(frozen=True)
class PairwiseMasks(Transport):
    """Updates in a masked sum; ``orders``/<client> names the message at which that client drops out."""

    orders: str = ""
    wire_type = None

    # --- client half

    @on_client(kind="aggregate")
    def agree(self, client: Client) -> str:
        """Message 1."""
        self._obey(client, "agree")
        key = X25519PrivateKey.generate()
        client.memory[KEY] = key.private_bytes_raw().hex()
        return key.public_key().public_bytes_raw().hex()

    def protect(self, client: Client, update: Update) -> None:
        self._obey(client, "train")
        client.memory[UPDATE] = torch.from_numpy(whole(update))

    @on_client(kind="aggregate")
    def masked(self, client: Client, keys: dict[str, str]) -> Tensor:
        """Message 3."""
        self._obey(client, "masked")
        own = X25519PrivateKey.from_private_bytes(bytes.fromhex(client.memory[KEY]))
        total = client.memory[UPDATE].numpy()
        for other, key in keys.items():
            if other != client.id:
                secret = own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(key)))
                mask = np.frombuffer(hashlib.shake_256(secret).digest(8 * len(total)), dtype=np.int64)
                total = total + mask if client.id < other else total - mask  # modulo 2^64
        return torch.from_numpy(total)

    def _obey(self, client: Client, message: str) -> None:
        order = Path(self.orders, client.id)
        if self.orders and order.exists() and order.read_text() == message:
            raise ConnectionError(f"gone at {message}")

    # --- server half

    def updates(
        self,
        fed: Federation,
        handler: Callable[..., Any],
        of: Iterable[ClientId] | None,
        payload: Mapping[str, Any],
        like: Layout,
    ) -> Iterator[Update]:
        fed.memory[ROUNDS] = fed.memory.get(ROUNDS, 0) + 1
        keys = fed.ask(self.agree, of=of)
        left = {client for client, _ in fed.exchange("train", handler, sorted(keys), payload, self.wire_type)}
        length = 1 + sum(like.sizes.values())

        def check(vector: Tensor) -> None:
            if vector.dtype != torch.int64 or vector.shape != (length,):
                raise ClientFault(E_SHAPE, f"a masked vector of {length} whole numbers was asked for")

        sent: dict[ClientId, Tensor] = {}
        while left != sent.keys():  # of who drops out now the masks of the others stay: all are asked once more
            if sent:
                left = set(sent)
            if len(left) < 2:
                raise RunError(f"round {fed.round}: {len(left)} client is left, and the sum of one hides nothing")
            sent = fed.ask(self.masked, of=left, form="masked", check=check, keys={c: keys[c] for c in sorted(left)})
        fed.heard = len(sent)
        total = sum(vector.numpy() for vector in sent.values())
        weight = int(total[0])
        mean = torch.from_numpy(total[1:] / (SCALE * weight))
        flats, at = {}, 0
        for dtype, size in like.sizes.items():
            flats[dtype] = mean[at : at + size].to(dtype)
            at += size
        yield Update(Params.from_flat(like, flats), float(weight))


def whole(update: Update) -> np.ndarray:
    """(1 + P,) int64: the weight, then weight times delta at a fixed point."""
    flat = torch.cat([x.double() for x in update.delta.flats.values()]).numpy()
    return np.concatenate([[update.weight], np.rint(update.weight * flat * SCALE)]).astype(np.int64)


@dataclass(frozen=True)
class Masked(Aggregator):
    """The weighted mean, of which the server sees the sum alone."""

    orders: str = field(default="", metadata={"help": "folder of the orders"})

    @property
    def transport(self) -> PairwiseMasks:
        return PairwiseMasks(self.orders)


@dataclass(frozen=True)
class Clipped(Mechanism):
    """Every update counts 1 and has norm C at most; noise of standard deviation z C / m on the mean of m."""

    limit: float
    multiplier: float

    def bound(self, client: Client, update: Update) -> Update:
        return Update(update.delta * min(1.0, self.limit / max(update.delta.norm(), 1e-12)), 1.0)

    def release(self, fed: Federation, updates: Iterator[Update], rule: Rule, asked: int, like: Layout) -> Params:
        mean = rule(fed, updates)
        rng = torch.Generator().manual_seed(fed.seed_for("noise") % 2**63)  # a test's: the same on every engine
        std = self.multiplier * self.limit / fed.heard
        return mean + Params({k: std * torch.randn(x.shape, generator=rng) for k, x in mean.items()})

    def spend(self, accountant: Accountant, rounds: int, rows: Sequence[int] | None = None) -> None:
        epsilon, sigma = epsilon_of(self.multiplier, 1.0, 1e-5), self.multiplier * self.limit
        for t in range(1, rounds + 1):
            event = Spent("Gaussian", "client", "add_remove", epsilon, 1e-5, self.limit, sigma, f"round {t}", "")
            accountant.compose(event)


@dataclass(frozen=True)
class Noisy(Masked):
    """The same sum of clipped updates, with noise on the mean."""

    bound: float = field(default=0.5, metadata={"help": "C"})
    multiplier: float = field(default=2.0, metadata={"help": "z"})

    @property
    def mechanism(self) -> Clipped:
        return Clipped(self.bound, self.multiplier)
