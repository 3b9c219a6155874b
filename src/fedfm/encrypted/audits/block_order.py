"""Audit of BlindFed's permutations: can a client match the states of its samples before and after a block?

The "permuted" protocol sends the states of each block with the samples in a new secret order. A client that matches the
states before and after a block has pairs of inputs and outputs, and can fit the block to them. The paper's
Proposition 1 says that the absolute orders are hidden. The attack does not need the absolute orders.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from fedfm.audits.audit import Audit
from fedfm.audits.finding import ABOVE, Finding, nothing
from fedfm.audits.inference.rates import clopper_pearson
from fedfm.audits.replay import Replay
from fedfm.encrypted.audits.block_states import largest_client, of_client
from fedfm.encrypted.audits.inference_alignment import aligned_shares, shuffle
from fedfm.encrypted.blindfed import BlindFed
from fedfm.encrypted.protocol.permutations import relative, to_last
from fedfm.runtime.run_directory import Run

SENT = "Can a client match the states of a block with the states of the next block from the server's messages?"
SEEN = "Could a client match these states from their values alone, without the relative orders?"
BATCH = 64  # samples in a batch; a random guess is right for 1 in 64
LINE = 0.5  # above this fraction, an attacker fits a block almost as well as if it had all pairs


class BlockOrder(Audit):
    """Finds the fraction of the samples for which an attacker matches the states before and after a block."""

    methods: ClassVar[tuple[str, ...]] = ("blindfed",)
    replays: ClassVar[bool] = False
    takes: ClassVar[float] = 5.0

    def unfit(self, run: Run) -> str | None:
        method = run.experiment.method_as(BlindFed)
        if method.protocol != "permuted":
            return 'protocol = "masked" sends no permuted states'
        return None

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        seed = replay.run.experiment.run.seed
        states = of_client(replay.population, largest_client(replay.population), "train", seed)
        n, levels = min(len(states), BATCH), states.blocks.shape[1]
        if n < 2 or levels < 2:
            return [nothing("order.sent", SENT, "No client has two rows, or the model has no second block.")]
        blocks = states.blocks[:n].double().numpy()
        mixed, orders = shuffle(blocks, seed)
        return [_pair_by_orders(blocks, orders), self._pair_by_states(mixed, orders, n), self._tokens(blocks, seed, n)]

    def _pair_by_states(self, mixed: np.ndarray, orders: np.ndarray, n: int) -> Finding:
        return _share("order.from_states", SEEN, aligned_shares(mixed, orders), n, "all tokens")

    def _tokens(self, blocks: np.ndarray, seed: int, n: int) -> Finding:
        mixed, orders = shuffle(blocks.mean(2), seed + 1)
        question = "Could a client match the states of two blocks from their means over the tokens alone?"
        return _share("order.from_means", question, aligned_shares(mixed, orders), n, "the mean over the tokens")


def _pair_by_orders(blocks: np.ndarray, orders: np.ndarray) -> Finding:
    """Match states by the relative orders. With these, the client puts all states into the last order (step 4)."""
    pi = [torch.from_numpy(order) for order in orders]
    lists = [torch.from_numpy(blocks[order, level]) for level, order in enumerate(orders)]
    steps = [relative(before, after) for before, after in itertools.pairwise([*pi, pi[-1]])]
    paired = to_last(lists, steps)
    exact = [bool(torch.equal(x, torch.from_numpy(blocks[:, level])[pi[-1]])) for level, x in enumerate(paired)]
    share = sum(exact) / len(exact)
    says = "With the relative orders that the protocol sends, a client matches the states of all tokens in "
    says += f"{sum(exact)} of {len(exact)} blocks."
    return Finding("order.sent", SENT, share, share, share, LINE, ABOVE, says)


def _share(name: str, question: str, shares: list[float], n: int, of: str) -> Finding:
    trials = n * len(shares)
    share = float(np.mean(shares))
    low, high = clopper_pearson(round(share * trials), trials)
    says = (
        f"By the cosine of {of}, {share:.0%} of {trials} pairs are found in batches of {n}; guesses find {1 / n:.1%}."
    )
    detail = {"by_block": [round(s, 4) for s in shares], "batch": n}
    return Finding(name, question, share, low, high, LINE, ABOVE, says, False, detail)
