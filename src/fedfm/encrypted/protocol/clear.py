"""The "masked" protocol of BlindFed without encryption: the messages are the same, but the server sees the rows.

Clients train on nearly the same activations as in the encrypted protocol, and get nearly the same scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedfm.core.federation import Federation
from fedfm.encrypted.protocol.foundation_check import check
from fedfm.encrypted.protocol.handshake import spans
from fedfm.encrypted.protocol.server import ForwardPass, clear_states, rows_of
from fedfm.models.adapters.side_adapter import with_numbers

if TYPE_CHECKING:
    from fedfm.encrypted.protocol.protocol_method import ProtocolMethod

NOTICE = 'encryption = "clear" is a simulation: the server saw all rows; only "ckks" hides them'


def run(method: ProtocolMethod, fed: Federation) -> dict[str, float]:
    """Run the forward pass of all rows, one batch of every client at a time."""
    passing = ForwardPass.begin(fed, check(fed.model, method.foundation))
    fed.notice(NOTICE)
    passing.opened = fed.ask(method.open, hello=passing.hello())
    passing.count_bytes()
    batches = {client: len(spans(o.rows, passing.batch)) for client, o in passing.opened.items()}
    lost = dict[str, int]()
    for batch in range(max(batches.values(), default=0)):
        left = [c for c, count in batches.items() if batch < count and batch not in passing.done.get(c, ())]
        if not left:
            continue
        rows = fed.ask(method.rows, of=left, least=0, batch=batch)
        passing.count_bytes()
        if not rows:
            continue
        states = clear_states(passing.model, rows)
        for client in states:
            lost[client] = lost.get(client, 0) + int((~with_numbers(states[client])).sum())
        kept = fed.ask(method.keep, of=rows, least=0, batch=batch, block=1, states=states)
        passing.finish_batch(kept, batch)
        passing.tell((batch + 1) / max(batches.values()), "forward pass of the rows")
    for client, count in sorted(lost.items()):
        if count:
            fed.notice(
                f"{count} of {rows_of(passing.opened[client])} rows of {client} left the intervals of the model's "
                "polynomials, or its limits; training skips these rows, and test rows among them count as wrong"
            )
    return {}
