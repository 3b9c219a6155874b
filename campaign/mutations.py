"""Damaged messages of every type that crosses: each is refused by a code, or is another valid message."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import fuzzing
import torch
from gate import Gate, Outcome, scale_tries

MUTATIONS = 5_000_000  # for all types together
BLOCK = 20_000
SLOWEST, MOST = 0.05, 256  # seconds of one message; MiB by which the process may grow


def attempt(size: float, folder: Path, progress: Callable[[str], None]) -> Outcome:
    """Damage messages of every type in turn."""
    torch.set_num_threads(1)
    found, kinds = Outcome(), fuzzing.kinds()
    each = scale_tries(MUTATIONS // len(kinds), size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    longest, slowest, accepted = 0.0, "", 0
    for name, kind in kinds.items():
        progress(name)
        for seed, at in enumerate(range(0, each, BLOCK)):
            try:
                outcome = fuzzing.fuzz(kind, min(BLOCK, each - at), seed)
            except Exception as error:
                found.failures.append(f"{name}, seed {seed}: {type(error).__name__}: {str(error)[:200]}")
                continue
            if outcome.longest > longest:
                longest, slowest = outcome.longest, f"{name}, seed {seed}: {outcome.slowest}"
            accepted += outcome.accepted
        found.count("mutations", each)
    found.count("types of message", len(kinds))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    found.require(longest <= SLOWEST, f"one message took {longest:.3f} s ({slowest})")
    found.require(grown <= MOST, f"the process grew by {grown:.0f} MiB")
    found.figures = {
        "accepted and valid": f"{accepted:,}",
        "longest": f"{1e3 * longest:.1f} ms",
        "growth": f"{grown:.0f} MiB",
    }
    return found


GATE = Gate("every damaged message is refused by a code or is valid, in at most 50 ms and 256 MiB", attempt)
