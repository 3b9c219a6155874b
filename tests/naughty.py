"""A method whose clients misbehave as a file instructs them: for tests that reach into other processes."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from fedfm.core.capabilities import Traits
from fedfm.core.client import Client, Update, on_client
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Naughty(FedAvg):
    """FedAvg; ``orders``/<client> holds what that client does instead of training: raise, die, hang; wait: before it
    trains, until the file is gone.

    If there is a folder ``orders``/log, each pass leaves a line in a file of the client's name there.
    """

    traits: ClassVar[Traits] = Traits(accepts_stale_updates=True)
    orders: str = field(default="", metadata={"help": "folder of the orders"})

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        order = Path(self.orders, client.id)
        match order.read_text() if order.exists() else "":
            case "raise":
                raise ValueError("as ordered")
            case "die":
                order.unlink()
                os._exit(9)
            case "hang":
                order.unlink()
                time.sleep(1000)
            case "wait":
                begun = time.monotonic()
                while order.exists() and time.monotonic() - begun < 240:
                    time.sleep(0.05)
        found = super().train(client, w)
        if (log := Path(self.orders, "log")).is_dir():
            with open(log / client.id, "a") as file:
                file.write(f"{client.seed}\n")
        return found
