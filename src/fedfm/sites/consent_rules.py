"""A silo's terms: conditions that an experiment must meet before the silo agrees to its run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from fedfm.aggregation.secure import Secure
from fedfm.config.experiment import Experiment
from fedfm.core.fields import toml_value
from fedfm.errors import Faults, quote_names
from fedfm.models.locate import BUILT_IN
from fedfm.privacy.policy import TOLERANCE
from fedfm.runtime.site_policy import method_names, methods_of
from fedfm.sites.ledger import delta_of
from fedfm.sites.release_cost import ReleaseCosts
from fedfm.sites.silo_config import Silo

_MOST = 0.5  # largest share of rows that an experiment may hold out for tests, and likewise for validation


def check(silo: Silo, experiment: Experiment, rows: int | None = None, task: str = "") -> None:
    """Refuse an experiment that exposes more than the silo allows, or guarantees less than the silo requires.

    Args:
        rows: number of training rows of the silo; None if the rows are not read yet.
        task: name of the task that the rows imply if the experiment names none; "" if the rows are not read yet, or
            there is no model of fedfm.

    Raises:
        InputError: the experiment does not meet a term; the message lists all such terms with their keys.
    """
    faults = Faults()
    for key in ("test_fraction", "val_fraction"):
        if not (share := getattr(experiment.data, key)) <= _MOST:
            faults.say(f"data.{key} = {share}: a silo allows at most {_MOST} of its rows", key=f"data.{key}")
    names = method_names(experiment)
    words = silo.policy.of(*names)
    for method in methods_of(experiment):  # whatever run.engine says: it is the server's word
        if method.needs.local or method.needs.pooled:
            what = method.needs.local or "the method pools all rows"
            faults.say(f"{what}: that is for parties in one place, and a silo's rows stay its own", key="method.name")
        for f in fields(method):
            key, value = f"method.{f.name}", getattr(method, f.name)
            if f.metadata.get("client_model") and value and value not in (*BUILT_IN, *silo.models):
                text = f'{key} = "{value}": this silo\'s file does not list this model under this name; models lists '
                faults.say(text + (quote_names(silo.models) or "none"), key=key)
            if f.metadata.get("scores") and value and "scores" not in words:
                faults.say(f'{key}: it discloses the silo\'s accuracy, and "scores" is not in allow', key=key)
    listed = silo.allow_methods
    for name in names:
        if listed is not None and name not in listed:
            text = f'method.name = "{name}": allow_methods is {quote_names(listed)}'
            within = "" if name == names[0] else f", and {names[0]} contains this method"
            faults.say(text + within, key="method.name")
    task, tasks = experiment.model.task or task, silo.allow_tasks
    if task and tasks is not None and task not in tasks:
        faults.say(f'model.task = "{task}": allow_tasks is {quote_names(tasks) or "empty"}', key="model.task")
    if experiment.run.local_scores and "scores" not in words:
        text = 'run.local_scores: it discloses the silo\'s accuracy, and "scores" is not in allow'
        faults.say(text, key="run.local_scores")
    costs = ReleaseCosts(experiment, rows)
    for key, offer, wanted in _unmet_requirements(silo, experiment, costs):
        faults.say(f"require.{key} = {toml_value(wanted)}: the experiment has {offer}", key=f"require.{key}")
    if silo.budget.epsilon is not None and not costs.release.noise_multiplier:
        text = f"budget.epsilon = {silo.budget.epsilon:g}: the experiment states no epsilon"
        faults.say(text, key="budget.epsilon")
    faults.refuse()


def _unmet_requirements(silo: Silo, experiment: Experiment, costs: ReleaseCosts) -> Iterator[tuple[str, str, Any]]:
    """Yield (key, the experiment's value, the required value) for each requirement that is not met."""
    wanted, privacy, aggregation = silo.require, experiment.privacy, experiment.aggregation
    release = costs.release
    hidden = isinstance(aggregation, Secure)
    if wanted.aggregator and not hidden:
        yield "aggregator", 'aggregator "plain"', wanted.aggregator
    if wanted.smallest_cohort > 1 and not hidden:
        yield "smallest_cohort", 'aggregator "plain", which shows single updates', wanted.smallest_cohort
    if wanted.unit and release.unit != wanted.unit:
        yield "unit", f'unit "{release.unit}"' if release.unit else "no epsilon", wanted.unit
    if wanted.mechanism and costs.mechanism not in wanted.mechanism:
        offer = f'mechanism "{costs.mechanism}"' if costs.mechanism else "no mechanism"
        yield "mechanism", offer, wanted.mechanism
    clips = [None if privacy is None or privacy.clip_quantile is not None else privacy.clip_norm]
    clips += [aggregation.clip_norm] if isinstance(aggregation, Secure) else []
    clip = min((c for c in clips if c is not None), default=math.inf)
    if wanted.largest_clip is not None and clip > wanted.largest_clip:
        yield "largest_clip", f"clip_norm {clip:g}" if clip < math.inf else "no clip_norm", wanted.largest_clip
    if wanted.least_noise_multiplier is not None and release.noise_multiplier < wanted.least_noise_multiplier:
        yield "least_noise_multiplier", f"{release.noise_multiplier:.6g}", wanted.least_noise_multiplier
    delta = 1.0 if privacy is None or privacy.delta is None else privacy.delta
    if wanted.largest_delta is not None and delta > wanted.largest_delta:
        yield "largest_delta", f"delta {delta:g}" if delta < 1 else "no delta", wanted.largest_delta
    if wanted.largest_epsilon is not None:
        epsilon = math.inf if delta == 1 else costs.epsilon(min(delta, delta_of(wanted, silo.budget)))
        if epsilon > wanted.largest_epsilon * (1 + TOLERANCE):
            yield "largest_epsilon", f"epsilon {epsilon:.6g}" if epsilon < math.inf else "none", wanted.largest_epsilon
