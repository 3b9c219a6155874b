"""The page docs/results/secure-aggregation.md from the result of secagg_gate.py."""

from __future__ import annotations

from typing import Any

import common
from run import result_lines

INTRODUCTION = """# Secure aggregation under dropouts and attacks

Made by `{command}`; do not edit.

- Up to n - t of n clients drop out at one message of the protocol: their request is lost, with every second seed their
  reply. Each case has ten seeds. A sum counts as exact if it is that of all clients that sent a masked update, within
  half a step of the fixed-point numbers for each client. With one dropout more the round must end with an error that
  counts the clients. At the first message no single client is needed yet, so in that case
  only two clients stay.
- A server that cheats gets no sum, and a client's refusal or the run's error names what it did.
- The chi-square test is of the bytes of masked zeros, and of the differences of every two vectors. `equal` counts equal
  words at the same place of two vectors, `p, equal` is the chance of so many among uniform words.

What a client keeps lies in memory here, not on a disk. The [threat model](../threat-model.md#hidden-sums) says what the
protocol does not hide. [Performance](performance.md) has its seconds and bytes.
"""


def page(result: dict[str, Any]) -> str:
    """The document."""
    rows = [
        {"goal": g["goal"], "wanted": g["wanted"], "measured": f"{g['measured']:.3g}, {common.verdict(g)}"}
        for g in result["goals"]
    ]
    parts = [INTRODUCTION.format(command=result["command"]).strip(), "Goals:\n\n" + common.markdown(rows)]
    return "\n\n".join([*parts, *result_lines(result)]) + "\n"
