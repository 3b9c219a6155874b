"""Requirements of DP-SGD on an experiment: rows influence messages only through the client optimiser."""

from __future__ import annotations

from typing import Any

from fedfm.aggregation import _record_level as record_level
from fedfm.aggregation.base import Aggregator
from fedfm.attacks.attack import locals_of
from fedfm.core.method import Method, nested_methods
from fedfm.errors import Faults
from fedfm.privacy.dp_sgd import DescentPlan
from fedfm.privacy.spec import PrivacySpec, need

_WHERE = 'privacy.mechanism = "dp_sgd":'


def under(method: Method[Any], aggregation: Aggregator, privacy: PrivacySpec) -> Aggregator:
    """The aggregation whose clients train by DP-SGD as the [privacy] table says.

    Raises:
        InputError: the table or the method does not allow it; the message gives the reason.
    """
    faults = Faults()
    if privacy.unit != "record":
        faults.say(
            f'privacy.unit = "{privacy.unit}": dp_sgd protects a "record"; to protect clients, drop mechanism',
            key="privacy.unit",
        )
    if privacy.clip_norm is None:
        faults.say(
            "privacy.clip_norm is missing: the norm to which each row's gradient is clipped, e.g. 1.0",
            key="privacy.clip_norm",
        )
    if privacy.halt_at_epsilon is not None:
        faults.say(
            f"privacy.halt_at_epsilon: {_WHERE} each client spends its epsilon over all rounds; set target_epsilon",
            key="privacy.halt_at_epsilon",
        )
    if not all(m.traits.rows_by_optimiser for m in (method, *nested_methods(method))):
        faults.say(
            f"{_WHERE} the clients of this method use training rows outside their local optimiser, and no noise would "
            "cover that; expected a method that declares rows_by_optimiser, e.g. fedavg",
            key="privacy.mechanism",
        )
    for where, m in (("method", method), *(("method.base", m) for m in nested_methods(method))):
        if vars(m).get("weighting") != "tokens":
            continue
        faults.say(
            f'{where}.weighting = "tokens": {_WHERE} the number of tokens depends on every row, and no noise covers '
            'it; expected "size" or "uniform"',
            key=f"{where}.weighting",
        )
    faults.refuse()
    local, *more = dict.fromkeys(locals_of(method))
    if more or local.personal:
        faults.say(
            f"{_WHERE} a client that trains a second model would need a budget for it; drop method.local",
            key="privacy.mechanism",
        )
    if local.absent != "keep":
        faults.say(
            f'method.local.absent = "{local.absent}": it discloses which classes a client has; drop it',
            key="method.local.absent",
        )
    if local.stepwise:
        faults.say(
            f"method.local: {_WHERE} it clips each row's gradient and splits a batch itself, at one learning rate; "
            "drop micro_batch, max_grad_norm, schedule, warmup and warmup_steps",
            key="method.local",
        )
    faults.refuse()
    plan = DescentPlan(
        need(privacy.clip_norm, "clip_norm"),
        need(privacy.delta, "delta"),
        method.rounds,
        privacy.target_epsilon,
        privacy.noise_multiplier,
    )
    return record_level.under(aggregation, plan, local.batch_size, local.steps)
