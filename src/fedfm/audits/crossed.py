"""Read a replay as an attacker at the server does: the model before each local training, and the model's change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedfm.audits.audit import Audit
from fedfm.audits.recorded_run import RecordedReply, Turn
from fedfm.audits.row_evidence import no_round, unreadable
from fedfm.core.client import ClientId, Update
from fedfm.core.method import Method
from fedfm.linalg.params import Params
from fedfm.methods._lora_products import Merged, Merging, as_factors
from fedfm.methods.flora import FLoRA, fresh
from fedfm.models.adapters import lora
from fedfm.models.model import Model
from fedfm.runtime.predictions import personal
from fedfm.runtime.run_directory import Run
from fedfm.training import TrainsLocally


class UpdateAudit(Audit):
    """Base class of audits of the updates that clients send after local training."""

    replies: ClassVar[bool] = False

    def reads(self, run: Run) -> bool:
        method: Any = run.experiment.method
        return unreadable(run) is None and isinstance(method, TrainsLocally) and not run.experiment.method.needs.pooled

    def why_unread(self, run: Run) -> str:
        return unreadable(run) or super().why_unread(run)

    def unfit(self, run: Run) -> str | None:
        return no_round(run)


@dataclass(frozen=True)
class CrossedUpdate:
    """An update that the server received from a client, or the sum of a round's updates.

    Attributes:
        clients: the client; if the server only sees sums, all clients in the sum.
        start, end: the complete model before and after the training; the attacker can compute with both.
        delta: the sent change of the trained tensors, end - start; None for a sum.
        weight: n_k, or the weight that the method uses instead of it; None for a sum.
    """

    round: int
    clients: tuple[ClientId, ...]
    start: Params
    end: Params
    delta: Params | None = None
    weight: float | None = None


def crossings(turn: Turn, method: Method[Any], model: Model, *, sums: bool = False) -> Iterator[CrossedUpdate]:
    """Yield the round's updates that are changes of a complete model.

    Args:
        sums: whether the server only sees the sum of updates. Then a round has one update, the change of the server's
            own model.
    """
    if turn.round == 0:
        return
    for reply in () if sums else turn.replies:
        if isinstance(reply.value, Update) and (pair := _pair(reply, turn, method, model)) is not None:
            w, delta = pair
            yield CrossedUpdate(
                turn.round, (reply.client,), *_complete(reply, turn, method, w, w + delta), delta, reply.value.weight
            )
    if not sums or personal(method):
        return
    asked = tuple(sorted(turn.payloads))
    before, after = (method.params_for(state, "") for state in (turn.before, turn.after))
    if asked and set(before) == set(model.names):
        yield CrossedUpdate(turn.round, asked, before, after)


def sees_sums_only(run: Run) -> bool:
    """Whether the server of this run only saw sums of updates."""
    return run.experiment.aggregation.transport.form != "plain"


def _pair(reply: RecordedReply, turn: Turn, method: Method[Any], model: Model) -> tuple[Params, Params] | None:
    """Return (the model in the request, the reply's tensors of the same layout); None if there are no such tensors."""
    payload: Mapping[str, Any] = turn.payloads.get(reply.client, {})
    delta: Params = reply.value.delta
    prefixes = dict.fromkeys(name.partition("/")[0] for name in delta if "/" in name)
    changes = [delta, *(delta.part(prefix) for prefix in prefixes)]
    starts = [sent for sent in payload.values() if isinstance(sent, Params)]
    if isinstance(method, FLoRA) and "restart" in payload:  # clients draw the adapter from a seed that everyone knows
        starts = [fresh(model.layout, payload["head"], payload["rank"], payload["restart"])]
    for start in starts:
        for change in changes:
            if start.layout.entries == change.layout.entries and list(change) == list(model.names):
                return start, change
    return None


def _complete(
    reply: RecordedReply, turn: Turn, method: Method[Any], w: Params, trained: Params
) -> tuple[Params, Params]:
    """(start, end) of the complete model, including the adapters that the method has merged into frozen weights."""
    shift = turn.payloads.get(reply.client, {}).get("shift")
    if isinstance(method, Merging) and isinstance(turn.before, Merged) and isinstance(shift, Params) and len(shift):
        frozen, alpha = as_factors(shift), turn.before.alpha
        return lora.merge(w, frozen, alpha), lora.merge(trained, frozen, alpha)
    return w, trained
