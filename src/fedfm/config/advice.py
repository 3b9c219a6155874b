"""Advice that fits an experiment: a notice never names a setting that the same experiment would refuse."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from fedfm.config.experiment import Experiment
from fedfm.config.toml import put
from fedfm.errors import InputError
from fedfm.training import TrainsLocally


def against_divergence(experiment: Experiment) -> str:
    """Advice if a client's update is NaN or too long; "" if no client optimiser computes the update."""
    if not isinstance(experiment.method, TrainsLocally):
        return ""
    shorter = {"method.local.max_grad_norm": 1.0}
    more = ", or set method.local.max_grad_norm" if stays_valid(experiment, shorter) else ""
    return f"training diverged; take a smaller method.local.learning_rate{more}"


def stays_valid(experiment: Experiment, changes: Mapping[str, Any]) -> bool:
    """Whether the experiment stays valid with these values, by key, e.g. ``{"run.patience": 3}``."""
    tables = copy.deepcopy(experiment.to_dict())
    try:
        for key, value in changes.items():
            put(tables, key, value)
        Experiment(**{"model": None, **tables})
    except (InputError, TypeError):  # TypeError: a table that no experiment has
        return False
    return True
