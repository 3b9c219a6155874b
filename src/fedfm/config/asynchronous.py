"""Experiments with asynchronous rounds: which ones are allowed, and their aggregation."""

from __future__ import annotations

from typing import Any

from fedfm.aggregation._asynchronous import with_buffer
from fedfm.aggregation.base import Aggregator
from fedfm.attacks.attack import locals_of
from fedfm.config.cohorts import named_clients
from fedfm.config.parts import ExperimentParts
from fedfm.config.registry import name_of, ours, resolve
from fedfm.config.run_spec import AsynchronousSpec
from fedfm.core.capabilities import Traits
from fedfm.core.method import Method, fraction_of
from fedfm.errors import InputError, quote_names

WHERE = "run.asynchronous"


def not_late(method: type[Method[Any]], name: str) -> str:
    """Why runs of this method cannot be asynchronous; "" if they can."""
    if _accepts_stale_updates(method):
        return ""
    names = quote_names(name for name in ours("methods") if _accepts_stale_updates(resolve("methods", name)))
    return f'run.asynchronous: method "{name}" requires a full cohort to answer to the same model; expected {names}'


def _accepts_stale_updates(method: type[Method[Any]]) -> bool:
    """Whether the method's class accepts stale updates, whatever its settings are."""
    return isinstance(method.traits, Traits) and method.traits.accepts_stale_updates


def asynchronous(e: ExperimentParts, late: AsynchronousSpec) -> Aggregator:
    """The aggregation of an experiment with ``run.asynchronous``.

    Raises:
        InputError: a part of the experiment needs full cohorts.
    """
    where = f"{WHERE}:"
    fraction = fraction_of(e.method)
    if why := not_late(type(e.method), e.method_name):
        raise InputError(why, key=WHERE)
    if any(local.personal for local in locals_of(e.method)):
        raise InputError(
            f"{where} with this [method.local] every client ends with its own model; drop one of the two",
            key=WHERE,
        )
    if e.privacy is not None:
        raise InputError(f"{where} the accounting of [privacy] assumes full cohorts; drop one of the two", key=WHERE)
    if e.aggregation.transport.form != "plain":
        raise InputError(f"{where} a hidden sum needs clients that answer together; drop one of the two", key=WHERE)
    if fraction < 1:
        raise InputError(
            f"{where} all clients train continuously, and method.fraction = {fraction:g} asks fewer; drop it",
            key=WHERE,
        )
    if (least := e.aggregation.least()) > late.buffer:
        raise InputError(
            f'{where} buffer = {late.buffer}: aggregation.name = "{name_of("aggregation", e.aggregation)}" needs '
            f"{least} updates; expected at least that number",
            key=WHERE,
        )
    if e.run.min_clients is not None and e.run.min_clients > late.buffer:
        raise InputError(
            f"run.min_clients = {e.run.min_clients}: a round has only run.asynchronous.buffer = {late.buffer} updates",
            key="run.min_clients",
        )
    if e.run.engine == "folder":
        raise InputError(
            f'{where} engine = "folder" waits for the answers of complete rounds; drop one of the two',
            key=WHERE,
        )
    if late.speeds and e.run.engine == "deployment":
        raise InputError(f"{where} speeds: on a deployment clients have real speeds; drop it", key=WHERE)
    if e.data.clients:
        named_clients(late.speeds, e.data.clients)
    return with_buffer(e.aggregation, late.buffer, late.staleness, late.speeds)
