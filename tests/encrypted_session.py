"""Client and server of encrypted tokens in one process: 4 tokens of width 8, refreshes as messages."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedfm.encrypted.ckks import seal
from fedfm.encrypted.ckks.ciphertexts import Ciphertexts
from fedfm.encrypted.ckks.refresh import Masking, least_limbs
from fedfm.encrypted.ckks.remote_refresh import RemoteRefresh, answer_refresh, encrypt_message
from fedfm.encrypted.ckks.ring import Parameters
from fedfm.encrypted.ckks.transformer_block import Packing
from fedfm.encrypted.ckks.wire import Channel

PARAMETERS, BOUND = Parameters(), 1024.0


class Session:
    """Connected by bytes."""

    def __init__(self) -> None:
        self.layout, self.floor = Packing(PARAMETERS, 4), least_limbs(PARAMETERS, 10**4, BOUND)
        self.client = seal.ClientKeys(PARAMETERS)
        self.here, self.there = (Channel(PARAMETERS, bytes(32), bytes(16), side) for side in ("client", "server"))
        self.server = seal.ServerKeys(PARAMETERS, self.client.public(self.layout.rotations), floor=self.floor)
        self.server.refresh = RemoteRefresh(
            Masking(BOUND), self.there, lambda message: answer_refresh(self.client, self.here, message, self.floor)
        )

    def send(self, x: Any) -> Ciphertexts:
        """Tokens (n, 4, d), encrypted at the server."""
        message = encrypt_message(self.client, self.here, self.layout.pack(x))
        residues, scale = self.there.unpack(message, limbs=PARAMETERS.limbs, count=x.shape[-1], scale=PARAMETERS.scale)
        return Ciphertexts(residues.view(np.uint64), scale, self.server)

    def decrypt(self, x: Ciphertexts) -> Any:
        """Slots (d, N / 2)."""
        return self.client.decrypt(x.residues, x.scale)
