"""A simulation of the "permuted" protocol (BlindFed, Sections 3.2 and 3.3) without encryption.

Every batch has new secret orders Pi_1 ... Pi_{L+1}. The client gets the states of all tokens of block l in the order
Pi_l, and the relative orders Pi_{l-1}^-1 Pi_l. With these it reorders its adapters' states from block to block.
In the paper, the server returns the encrypted mean loss, which has no gradient. Here, the server returns the labels in
the order Pi_{L+1}. The model is frozen, so the states are sent once and not in every round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.encrypted.protocol import permutations
from fedfm.encrypted.protocol.clear import NOTICE
from fedfm.encrypted.protocol.foundation_check import check
from fedfm.encrypted.protocol.handshake import spans_by_part
from fedfm.encrypted.protocol.server import ForwardPass, token_states

if TYPE_CHECKING:
    from fedfm.encrypted.protocol.protocol_method import ProtocolMethod


def run(method: ProtocolMethod, fed: Federation) -> dict[str, float]:
    """Run the forward pass of all rows in secret orders."""
    passing = ForwardPass.begin(fed, check(fed.model, method.foundation))
    fed.notice(NOTICE)
    _, released, scales = passing.model.frozen_parts
    hello = passing.hello(release=released.positions, scales=scales)
    passing.opened = fed.ask(method.open, hello=hello)
    passing.count_bytes()
    for client, opened in passing.opened.items():
        for batch in range(len(spans_by_part(opened.rows, passing.batch))):
            if batch in passing.done.get(client, ()):
                continue
            if not _batch(method, fed, passing, client, batch):
                break
            passing.finish_batch([client], batch)
    return {}


def _batch(method: ProtocolMethod, fed: Federation, passing: ForwardPass, client: ClientId, batch: int) -> bool:
    """Run one batch of one client; return whether the client has answered all messages."""
    sent = fed.ask(method.labelled, of=[client], least=0, batch=batch)
    passing.count_bytes()
    if client not in sent:
        return False
    rows, labels = sent[client]["rows"], sent[client]["labels"]
    levels = token_states(passing.model, rows)  # (n, L, T, d)
    n, blocks = levels.shape[:2]
    pi = permutations.draw_all(fed.secret("orders"), client, batch, blocks, n)
    for block in range(1, blocks + 1):
        turned = levels[:, block - 1][pi[block - 1]]  # B_l Pi_l
        if not fed.ask(method.turn, of=[client], least=0, batch=batch, block=block, states=turned):
            return False
        passing.count_bytes()
    seen: Tensor = labels[pi[-1]] if method.labels == "permuted" else labels[:0]
    steps = permutations.steps(pi)
    return bool(fed.ask(method.align, of=[client], least=0, batch=batch, orders=steps, labels=seen))
