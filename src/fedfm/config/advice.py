"""Advice that an experiment takes: a notice names no setting that the same experiment would refuse."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from fedfm.config.experiment import Experiment
from fedfm.config.toml import put
from fedfm.errors import InputError
from fedfm.training import TrainsLocally


def against_divergence(experiment: Experiment) -> str:
    """What helps where a client's update is NaN or too long; "" where no optimiser of clients makes it."""
    if not isinstance(experiment.method, TrainsLocally):
        return ""
    shorter = {"method.local.max_grad_norm": 1.0}
    more = ", or set method.local.max_grad_norm" if takes(experiment, shorter) else ""
    return f"training diverged; take a smaller method.local.learning_rate{more}"


def takes(experiment: Experiment, changes: Mapping[str, Any]) -> bool:
    """Whether the experiment is valid with these values, by key, e.g. ``{"run.patience": 3}``."""
    tables = copy.deepcopy(experiment.to_dict())
    try:
        for key, value in changes.items():
            put(tables, key, value)
        Experiment(**{"model": None, **tables})
    except (InputError, TypeError):  # TypeError: a table that no experiment has
        return False
    return True
