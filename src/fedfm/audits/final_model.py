"""Bases of the audits that read the final model, and no message of a round."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from fedfm.audits.audit import Audit, Notice
from fedfm.audits.finding import Finding
from fedfm.audits.replay import Replay
from fedfm.audits.row_evidence import TEXT_TASKS, no_round, task_of, unreadable, writes_texts
from fedfm.audits.shadow_runs import RowPool
from fedfm.linalg.threads import torch_threads
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.run_directory import Run


class FinalModelAudit(Audit):
    """Base of the audits of final models: they need no replay, and a run with a round."""

    replays: ClassVar[bool] = False
    replies: ClassVar[bool] = False

    def unfit(self, run: Run) -> str | None:
        figures = run.experiment.method.traits.figures_only
        return "the run has figures and no model" if figures else no_round(run)


class TextMemoryAudit(FinalModelAudit):
    """Base of the audits of what a language model remembers. They load the clients' rows before they measure."""

    def reads(self, run: Run) -> bool:
        return writes_texts(run)

    def why_unread(self, run: Run) -> str:
        of = f'this run\'s task is "{task_of(run)}"'
        return unreadable(run) or f"it reads models that write texts (tasks {', '.join(TEXT_TASKS)}), and {of}"

    def findings(self, replay: Replay, notice: Notice, **options: Any) -> list[Finding]:
        run = replay.run
        with torch_threads(1):
            population = replay.fresh()
            pool = RowPool(population, run.experiment.run.seed, pooled=run.experiment.method.needs.pooled)
            return [self.measure(run, population, pool, notice)]

    @abstractmethod
    def measure(self, run: Run, population: Partitioned, pool: RowPool, notice: Notice) -> Finding:
        """Attack the final model, or repeat the run, with the rows of ``pool``."""
