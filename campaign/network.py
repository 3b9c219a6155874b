"""A network that is cut in the middle of messages: each is sent again, and no bit changes.

Silos reach the SuperLink through a relay that resets a connection after a random number of bytes, TLS and all.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path

from gate import Gate, Outcome, scale_tries

from kit_sites import Relay, bits, reset, sites
from processes import fedfm

CUTS = 60


class Cutter(Relay):
    """A relay that resets connections in the middle of what they carry.

    Attributes:
        cuts: how many more to make; ``cut`` counts those that were made, each in a block of more than 2 KiB.
    """

    def __init__(self, port: int, to: int, cuts: int) -> None:
        self.cuts, self._rng = cuts, random.Random(0)
        super().__init__(port, to, idle=600.0)

    def _carry(self, here: socket.socket) -> None:
        try:
            there = socket.create_connection(("127.0.0.1", self._to), timeout=5)
        except OSError:
            reset(here)
            return
        left = self._rng.randint(3_000, 120_000)  # bytes, of both ways
        with contextlib.suppress(OSError):
            while not self._ended:
                for end in select.select((here, there), [], [], 0.05)[0]:
                    block = end.recv(1 << 16)
                    if not block:
                        raise OSError
                    to = there if end is here else here
                    left -= len(block)
                    if left < 0 and self.cuts > 0 and len(block) > 2048:
                        to.sendall(block[: len(block) // 2])
                        self.cuts, self.cut = self.cuts - 1, self.cut + 1
                        raise OSError
                    to.sendall(block)
        reset(here)
        reset(there)


def attempt(size: float, folder: Path, progress: Callable[[str], None]) -> Outcome:
    """Federations of kits behind the relay, until there were enough cuts."""
    found, wanted, number = Outcome(), scale_tries(CUTS, size), 0
    while wanted > 0 and number < 10:
        number += 1
        (place := folder / str(number)).mkdir()
        with sites(place, "proxy = true\n", rounds=8, width=20_000) as at:
            alone, kit = fedfm("run", at.alone, "--out", at.folder / "local"), at.server()
            cutter = Cutter(int(kit.server.rpartition(":")[2]), kit.port, min(wanted, 30))
            try:
                at.start()
                result = at.result(at.begin(), 580)
            except BaseException as error:
                found.failures.append(f"a run whose messages are cut does not end: {str(error)[-400:]}")
                return found
            finally:
                cutter.close()
            found.require(bits(result) == bits(alone), f"{cutter.cut} cuts, and other bits")
            found.count("connections cut in a message", cutter.cut)
            wanted -= cutter.cut
            progress(f"{cutter.cut} cuts, {max(wanted, 0)} to go")
            time.sleep(1)
    return found


GATE = Gate("every message that was cut is sent again, and the bits are those of the local engine", attempt)
