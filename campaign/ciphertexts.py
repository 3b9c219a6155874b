"""Flipped bits, wrong keys, sessions and lengths of messages with real ciphertexts: none reaches the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gate import Gate, Outcome, scale_tries

from fedfm.encrypted.ckks import seal
from fedfm.encrypted.ckks.refresh import least_limbs
from fedfm.encrypted.ckks.remote_refresh import encrypt_message
from fedfm.encrypted.ckks.ring import Parameters
from fedfm.encrypted.ckks.transformer_block import Packing
from fedfm.encrypted.ckks.wire import Channel
from fedfm.errors import ClientFault

FLIPS, OTHERS = 10_000, 1_000
PARAMETERS, KEY, SESSION = Parameters(), bytes(range(32)), b"a session's name"


def attempt(size: float, folder: Path, progress: Callable[[str], None]) -> Outcome:
    """Damage one encrypted batch in every way."""
    found, rng = Outcome(), np.random.default_rng(0)
    floor = least_limbs(PARAMETERS, 10**4, 1024.0)
    client = seal.ClientKeys(PARAMETERS)
    layout = Packing(PARAMETERS, 4)
    seal.ServerKeys(PARAMETERS, client.public(layout.rotations), floor=floor)
    tokens = rng.normal(size=(8, 4, 2))

    def channel(sender: str, key: bytes = KEY, session: bytes = SESSION) -> Channel:
        return Channel(PARAMETERS, key, session, sender)

    message = bytearray(encrypt_message(client, channel("client"), layout.pack(tokens)))

    def arrives(data: bytes, there: Channel | None = None) -> bool:
        try:
            (there or channel("server")).unpack(data, limbs=PARAMETERS.limbs, count=2, scale=PARAMETERS.scale)
        except ClientFault:
            return False
        return True

    found.require(arrives(bytes(message)), "the message that nobody changed is refused")
    for bit in rng.integers(0, 8 * len(message), scale_tries(FLIPS, size)):
        message[bit // 8] ^= 1 << bit % 8
        found.require(not arrives(bytes(message)), f"bit {bit} is flipped, and the message is taken")
        message[bit // 8] ^= 1 << bit % 8
        found.count("flipped bits")
    whole = bytes(message)
    for _ in range(scale_tries(OTHERS, size)):
        a, b = sorted(rng.integers(0, len(whole), 2))
        for name, data in {
            "cut": whole[:a],
            "a part missing": whole[:a] + whole[b + 1 :],
            "a part twice": whole[:b] + whole[a:] + b"\0",
            "noise": rng.bytes(int(a) % 4096),
        }.items():
            found.require(not arrives(data), f"{name}: the message is taken")
            found.count("cut, joined and random messages")
    for name, there in {
        "another key": channel("server", key=bytes(32)),
        "another session": channel("server", session=b"another session."),
        "one's own message": channel("client"),
    }.items():
        found.require(not arrives(whole, there), f"{name}: the message is taken")
        found.count("wrong keys, sessions and senders")
    twice = channel("server")
    found.require(arrives(whole, twice) and not arrives(whole, twice), "a message is taken twice")
    found.count("replays")
    return found


GATE = Gate("every changed message with ciphertexts is refused before it is used", attempt)
