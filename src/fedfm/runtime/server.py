"""The server's side of a run: init, rounds, commits, evaluation, and the result. The same on every engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedfm.core.capabilities import Charting, Judge, secrets_of
from fedfm.core.checks import nonfinite
from fedfm.core.federation import Federation
from fedfm.core.method import Method
from fedfm.core.update_metrics import BEFORE, JUDGED, LOSS_BEFORE, PASSES
from fedfm.core.wire import payload
from fedfm.errors import RunError
from fedfm.linalg.out_of_core import limit
from fedfm.runtime import early_stopping
from fedfm.runtime.evaluation import Evaluator
from fedfm.runtime.predictions import kept
from fedfm.runtime.result import accounted, enter, finish
from fedfm.runtime.run_directory import Run

if TYPE_CHECKING:
    from fedfm.runtime.progress import Progress


class Server:
    """Drives one method over one federation and writes the run.

    Args:
        judge: metrics of one model on the global test rows; None where the server has none.
        progress: told of the start and of every line of metrics.
    """

    def __init__(
        self,
        run: Run,
        fed: Federation,
        *,
        judge: Judge | None,
        progress: Progress,
    ) -> None:
        self.run, self.fed, self._progress = run, fed, progress
        self.method: Method[Any] = run.experiment.method
        self._start = time.perf_counter()
        self._evaluator = Evaluator(run, fed, judge)

    def go(self) -> dict[str, Any]:
        """From the last commit to the result line."""
        run, fed, method = self.run, self.fed, self.method
        known = len(run.manifest["notices"])
        record = run.restore(method.state_type)
        for notice in run.manifest["notices"][known:]:
            self._progress.notice(notice)
        if record is None:
            fed.begin(0)
            for name in secrets_of(method):
                fed.secret(name)  # from the start: a run that goes on without it is seen
            state, t, of = self._commit(0, method.init(fed)), 0, None
        else:
            run.into(fed, record)
            state, t, of = record["state"], record["round"], record["extra"].get("model_of_round")
        self._progress.started(run, method.rounds, t)
        if t not in {line["round"] for line in run.metrics()}:
            self._evaluate(t, state, last=t == method.rounds)
        if t < method.rounds:
            enter(run, accounted(run))
        while t < method.rounds and not early_stopping.patience_over(run):
            t += 1
            fed.begin(t)
            state = method.step(fed, state, t)
            self._tell(fed.notices)
            state = self._commit(t, state)
            self._evaluate(t, state, last=t == method.rounds)
        if of is None:
            state, of = self._best(t, state)
        return finish(run, fed, self._evaluator, state, (t, of), self._seconds(), self._progress.notice)

    def _tell(self, notices: Sequence[str]) -> None:
        """Show them, and keep them in the manifest; a round that is done again says nothing twice."""
        for notice in notices:
            self._progress.notice(notice)
        kept = self.run.manifest["notices"]
        if new := [notice for notice in notices if notice not in kept]:
            kept += new
            self.run.write_manifest()

    def _commit(self, t: int, state: Any) -> Any:
        """Round t is done; the state to go on with. A large one is that of the checkpoint, mapped from its file.

        Raises:
            RunError: the state holds NaN or infinity, from which no run goes on; the last commit stands.
        """
        if (where := nonfinite(state, "state")) is not None:
            kept = f"round {t - 1} stands as it was committed" if t else "nothing is committed"
            raise RunError(f"round {t}: the server's {where} has NaN or infinity; {kept}")
        self.fed.commit()
        if t and isinstance(self.method, Charting):
            self.run.keep_arrays(t, self.method.arrays(state))
        self.run.commit(t, state, self.fed, self._seconds(), spared=early_stopping.best_round(self.run))
        return self.run.state(self.method.state_type) if payload.size(state)[1] > limit() else state

    def _seconds(self) -> float:
        return self.run.seconds + time.perf_counter() - self._start

    def _evaluate(self, t: int, state: Any, last: bool) -> None:
        """Write round t's line; the round itself is committed already."""
        every = self.run.experiment.run.evaluate_every
        line: dict[str, Any] = {"round": t, "seconds": round(self._seconds(), 3)}
        if last or (every and t % every == 0):
            line |= self._evaluator.scores(state, thorough=last)
        if self.run.experiment.run.local_scores and t:
            line |= {key: self._before_aggregation(key) for key in (BEFORE, LOSS_BEFORE)}
        line |= {
            "train_loss": self.fed.metrics.get("loss"),
            "cohort": list(self.fed.cohort),
            "excluded": [
                {"client": e.client, "code": e.code, "reason": e.reason} for e in self.fed.excluded if e.round == t
            ],
            "bytes_up": self.fed.transcript.bytes_up,
            "bytes_down": self.fed.transcript.bytes_down,
        }
        if PASSES in self.fed.metrics:
            line[PASSES] = self.fed.metrics[PASSES]
        self.run.note_messages(self.fed)
        self.run.log(line)
        self._progress.round(line)

    def _before_aggregation(self, key: str) -> float | None:
        """Mean accuracy or loss of the round's clients after local training, weighted like their updates."""
        judged, total = self.fed.metrics.get(JUDGED), self.fed.metrics.get(key)
        return total / judged if judged and total is not None else None

    def _best(self, t: int, state: Any) -> tuple[Any, int]:
        """The state to end with, and the round that it is of: under ``run.patience`` the best one's, if the server has
        all of it. The last checkpoint gets it, which is where everybody looks who needs the state of a run.
        """
        best = early_stopping.best_round(self.run)
        if best is None or best == t or kept(self.method):
            return state, t
        if (found := self.run.state_of(best, self.method.state_type)) is None:
            self._progress.notice(
                f"the checkpoint of round {best}, the best one, is gone: the model is that of round {t}"
            )
            return state, t
        self.run.commit(t, found, self.fed, self._seconds(), extra={"model_of_round": best})
        return found, best
