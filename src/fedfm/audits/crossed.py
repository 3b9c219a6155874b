"""The updates of a replay as an attacker at the server reads them: where training began, and how far it went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedfm.audits.replay import Seen, Turn
from fedfm.core.client import ClientId, Update
from fedfm.core.method import Method
from fedfm.linalg.params import Params
from fedfm.methods._lora_products import Merged, Merging, as_factors
from fedfm.methods.flora import FLoRA, fresh
from fedfm.models.adapters import lora
from fedfm.models.model import Model
from fedfm.runtime.predictions import personal
from fedfm.runtime.run_directory import Run


@dataclass(frozen=True)
class CrossedUpdate:
    """An update that the server saw.

    Attributes:
        clients: whose it is: one client, or under a hidden sum all that are in it.
        start, end: the whole model before and after; the attacker can compute with both.
        delta: what was sent of the trained tensors, end less start; None of a sum.
        weight: n_k, or what stands in its place; None of a sum.
    """

    round: int
    clients: tuple[ClientId, ...]
    start: Params
    end: Params
    delta: Params | None = None
    weight: float | None = None


def crossings(turn: Turn, method: Method[Any], model: Model, *, sums: bool = False) -> Iterator[CrossedUpdate]:
    """The round's updates that are changes of a whole model, one by one.

    Args:
        sums: the server saw only their sum, hence the change of its own model.
    """
    if turn.round == 0:
        return
    for seen in () if sums else turn.seen:
        if isinstance(seen.value, Update) and (pair := _pair(seen, turn, method, model)) is not None:
            w, delta = pair
            yield CrossedUpdate(
                turn.round, (seen.client,), *_whole(seen, turn, method, w, w + delta), delta, seen.value.weight
            )
    if not sums or personal(method):
        return
    asked = tuple(sorted(turn.payloads))
    before, after = (method.params_for(state, "") for state in (turn.before, turn.after))
    if asked and set(before) == set(model.names):
        yield CrossedUpdate(turn.round, asked, before, after)


def sees_sums_only(run: Run) -> bool:
    """Whether the server of this run saw sums of updates only."""
    return run.experiment.aggregation.transport.form != "plain"


def _pair(seen: Seen, turn: Turn, method: Method[Any], model: Model) -> tuple[Params, Params] | None:
    """(start, change) of a reply: parameters of the model that were sent, and those of its shape that came back."""
    payload: Mapping[str, Any] = turn.payloads.get(seen.client, {})
    delta: Params = seen.value.delta
    prefixes = dict.fromkeys(name.partition("/")[0] for name in delta if "/" in name)
    changes = [delta, *(delta.part(prefix) for prefix in prefixes)]
    starts = [sent for sent in payload.values() if isinstance(sent, Params)]
    if isinstance(method, FLoRA) and "restart" in payload:  # clients draw the adapter from a seed that all know
        starts = [fresh(model.layout, payload["head"], payload["rank"], payload["restart"])]
    for start in starts:
        for change in changes:
            if start.layout.entries == change.layout.entries and list(change) == list(model.names):
                return start, change
    return None


def _whole(seen: Seen, turn: Turn, method: Method[Any], w: Params, trained: Params) -> tuple[Params, Params]:
    """Start and end with what the method has added to the frozen weights."""
    shift = turn.payloads.get(seen.client, {}).get("shift")
    if isinstance(method, Merging) and isinstance(turn.before, Merged) and isinstance(shift, Params) and len(shift):
        frozen, alpha = as_factors(shift), turn.before.alpha
        return lora.merged(w, frozen, alpha), lora.merged(trained, frozen, alpha)
    return w, trained
