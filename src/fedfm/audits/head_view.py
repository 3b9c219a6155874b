"""Find the head's tensors in the updates that a server sees. The attacker at the server also has test rows."""

from __future__ import annotations

from typing import NamedTuple

from fedfm.audits.crossed import CrossedUpdate, UpdateAudit, sees_sums_only
from fedfm.audits.inference.rates import Array
from fedfm.core import tasks
from fedfm.models.model import Model
from fedfm.runtime.run_directory import Run


class Names(NamedTuple):
    """Names of the head's tensors in the updates."""

    weight: str
    bias: str | None


def head_names(model: Model) -> Names | None:
    """Names of the head's tensors; None if no classification head is trained. An untrained bias has the name None."""
    head = model.head
    if head is None or model.is_language_model:
        return None
    found = {id(tensor): name for name, tensor in model.live().items()}
    weight = found.get(id(head.weight))
    return None if weight is None else Names(weight, None if head.bias is None else found.get(id(head.bias)))


def _task(run: Run) -> str | None:
    name: str | None = run.manifest["model"].get("task", run.experiment.model.task)
    return name


def _by_head(run: Run) -> bool:
    name = _task(run)
    return name is None or tasks.find(name).classifies_by_head


class HeadAudit(UpdateAudit):
    """Base class of audits that read the head in single clients' updates."""

    def reads(self, run: Run) -> bool:
        return super().reads(run) and _by_head(run)

    def why_unread(self, run: Run) -> str:
        if _by_head(run):
            return super().why_unread(run)
        return f'it reads heads with one class a row, and this run\'s task is "{_task(run)}"'

    def unfit(self, run: Run) -> str | None:
        if sees_sums_only(run):
            return "the server saw only sums of updates; the attack update_membership reads these"
        return super().unfit(run)


def changes(crossing: CrossedUpdate, names: Names) -> tuple[Array, Array] | None:
    """Changes of the weight (C, d) and of the bias (C,) in one client's update; None if one of them is missing."""
    if crossing.delta is None or names.bias is None or names.bias not in crossing.delta:
        return None
    return crossing.delta[names.weight].double().numpy(), crossing.delta[names.bias].double().numpy()
