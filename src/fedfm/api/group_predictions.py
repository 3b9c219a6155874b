"""The model of a finished run, shared by a group of processes."""

from __future__ import annotations

from typing import Any

from fedfm.config.experiment import Experiment
from fedfm.core.capabilities import HiddenModel, Predictor, has
from fedfm.errors import InputError
from fedfm.models.spec import ModelSpec
from fedfm.training.sharded.group_model import GroupModel, load_group_model
from fedfm.training.sharded.settings import KEY, PATIENCE, GroupSettings


def load(experiment: Experiment, spec: ModelSpec, processes: int | None, about: dict[str, Any]) -> GroupModel:
    """The model for predictions; its processes start when they are needed first.

    Args:
        processes: number of processes; None for ``run.processes_per_client``.
        about: further arguments of :func:`load_group_model`.

    Raises:
        InputError: several processes cannot compute it.
    """
    key, method = KEY if processes is None else "--processes", experiment.method
    if isinstance(method, HiddenModel) or any(has(method, Predictor, name) for name in ("install", "logits")):
        raise InputError(f'{key}: method "{experiment.method_name}" computes its predictions in one process; drop it')
    settings = GroupSettings(
        processes or experiment.run.processes_per_client,
        limit=PATIENCE * experiment.run.timeout,
        key=key,
        device=spec.device,
        deterministic=experiment.run.deterministic,
    )
    return load_group_model(spec, settings, **about)
