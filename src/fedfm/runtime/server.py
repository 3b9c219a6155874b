"""The server's side of a run, which is the same on every engine: init, rounds, commits, evaluation and result."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import UnionType
from typing import TYPE_CHECKING, Any, get_origin

from fedfm.aggregation.base import secrets_of
from fedfm.core.capabilities import Judge
from fedfm.core.checks import nonfinite
from fedfm.core.federation import Federation
from fedfm.core.messages import Link
from fedfm.core.method import Method
from fedfm.core.update_metrics import BEFORE, JUDGED, LOSS_BEFORE, PASSES
from fedfm.core.wire import payload
from fedfm.errors import RunError
from fedfm.linalg import pages
from fedfm.linalg.kernels import buffers
from fedfm.linalg.out_of_core import limit
from fedfm.linalg.params import Params
from fedfm.linalg.precisions import EXACT
from fedfm.models.model import Model
from fedfm.runtime import early_stopping, failures, unmoved
from fedfm.runtime.client_memory import Store, of_server, secret
from fedfm.runtime.evaluation import Evaluator
from fedfm.runtime.predictions import keeps_parts
from fedfm.runtime.result import account_of, enter, finish, write_models
from fedfm.runtime.run_directory import Run
from fedfm.runtime.run_manifest import of_privacy

if TYPE_CHECKING:
    from fedfm.runtime.progress import Progress


def _vectors(state: Any) -> Iterator[Params]:
    """Yield the parameter vectors in a state."""
    if isinstance(state, Params):
        yield state
    elif isinstance(state, Mapping):
        yield from (w for part in state.values() for w in _vectors(part))
    elif dataclasses.is_dataclass(state):
        yield from (w for f in dataclasses.fields(state) for w in _vectors(getattr(state, f.name)))


class Server:
    """Runs one method with the clients that a link connects, and writes the run directory.

    Args:
        model: the server's copy of the model.
        judge: computes metrics of one model on the global test rows; None if the server has no test rows.
        progress: callbacks of the run.
        aside: returns entries for the result's ``details`` that only an engine with all parties in one process can
            compute.
    """

    def __init__(
        self,
        run: Run,
        link: Link,
        model: Model,
        *,
        judge: Judge | None,
        progress: Progress,
        aside: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.run, self._progress, self._aside = run, progress, aside
        self.method: Method[Any] = run.experiment.method
        self._start = time.perf_counter()
        self._untrained = unmoved.checksums(model.params())
        self._coded: CodedLink | None = None
        if run.experiment.run.transport != EXACT:
            from fedfm.core.transport import CodedLink, Coding

            self._coded = CodedLink(link, Coding(run.experiment.run.transport, model))
        self.fed = Federation(
            self._coded or link,
            model=model,
            aggregator=run.experiment.aggregation,
            seed=run.experiment.run.seed,
            min_clients=run.experiment.run.min_clients,
            on_excluded=progress.excluded,
            secret=partial(secret, run.path / "private", "server"),
            memory=of_server(run.path / "private"),
            store=Store(run.path / "private", "server"),
            tell=progress.notice,
            diverged=self._about_divergence,
        )
        self._evaluator = Evaluator(run, self.fed, judge)

    def go(self) -> dict[str, Any]:
        """Run from the last commit to the end; return the result."""
        run, fed, method, aggregation = self.run, self.fed, self.method, self.run.experiment.aggregation
        known = len(run.manifest["notices"])
        record = run.restore(method.state_type)
        for notice in run.manifest["notices"][known:]:
            self._progress.notice(notice)
        if record is None:
            fed.begin(0)
            for name in secrets_of(method, aggregation):
                fed.secret(name)  # draw the secret before the first round, so that a resume detects its loss
            state = method.init(fed)
            self._tell(fed.notices)
            state, t, of = self._commit(0, state), 0, None
        else:
            run.into(fed, record)
            t, of = record["round"], record["extra"].get("model_of_round")
            state = self._lean(record.pop("state"))
        again = run.repeat_count(t)
        known = again + aggregation.mechanism.repeat_count(fed.store)
        last = aggregation.mechanism.affordable(method.rounds + known) - known
        self._progress.started(run, last, t)
        if t not in {line["round"] for line in run.metrics()}:
            self._evaluate(t, state, last=t == last)
        if t < last:
            spent = account_of(run, t)
            enter(run, spent)
            self._tell(of_privacy(run.experiment, spent, len(fed.clients)))
        if again:
            self._tell(
                [f"rounds that began but were not completed: {again}; each is one more release, which epsilon includes"]
            )
        while t < last and not early_stopping.patience_over(run):
            t += 1
            run.begin(t)
            fed.begin(t)
            before, state = state, method.step(fed, state, t)
            self._evaluator.hear()
            if t == 1:
                aggregation.mechanism.check(fed, lambda s: method.params_for(s, ""), before, state)
            self._tell(fed.notices)
            state = self._commit(t, state)
            self._evaluate(t, state, last=t == last)
        if t == last < method.rounds:
            self._tell([f"ended after {t} of {method.rounds} rounds: one more would exceed privacy.halt_at_epsilon"])
        if of is None:
            state, of = self._best(t, state)
        aside, notice = self._aside(), self._progress.notice
        if t:
            models = self._evaluator.collect_models(state).values()
            self._tell(unmoved.notices(fed.model, self._untrained, models, run.manifest["notices"]))
        return finish(run, fed, self._evaluator, state, (t, of), self._seconds(), notice, aside)

    def _about_divergence(self) -> str:
        """Return advice for the case that a client's update contains NaN or has too large a norm."""
        from fedfm.config.advice import against_divergence

        return against_divergence(self.run.experiment)

    def _tell(self, notices: Sequence[str]) -> None:
        """Show notices, and add new ones to the manifest."""
        for notice in notices:
            self._progress.notice(notice)
        known = self.run.manifest["notices"]
        if new := [notice for notice in notices if notice not in known]:
            known += new
            self.run.write_manifest()

    def _commit(self, t: int, state: Any) -> Any:
        """Complete round t; return the state for the next round. A large state is mapped from the checkpoint."""
        self._check_class("step" if t else "init", state)
        if (where := nonfinite(state, "state")) is not None:
            if not t:
                raise RunError(
                    f"the server's {where} has NaN or infinity before any training; the weights of model.name, "
                    "or of another model that the method names, are damaged; use an undamaged copy"
                )
            raise RunError(
                f"round {t}: the server's {where} has NaN or infinity; round {t - 1} stays committed. "
                "Training diverged; repeat the run with a smaller learning rate"
            )
        self.fed.commit()
        if t:
            self.run.keep_arrays(t, self.method.arrays(state))
        self.run.commit(t, state, self.fed, self._seconds(), spared=early_stopping.best_round(self.run))
        return self._lean(state)

    def _check_class(self, half: str, state: Any) -> None:
        """Refuse a state if its checkpoint would be read as an object of another class.

        Raises:
            RunError: the classes differ; the error explains how the method must declare its state's class.
        """
        of = self.method.state_type
        kind = get_origin(of) or of
        if not isinstance(kind, type) or kind is UnionType or isinstance(state, kind):
            return
        found = type(state).__name__
        raise RunError(
            f"{type(self.method).__name__}.{half} returns a {found}, but a checkpoint would be read as "
            f"{kind.__name__}: derive the class from Method[{found}], or set its state_type"
        )

    def _lean(self, state: Any) -> Any:
        """Return the committed state; a large state is mapped from the checkpoint, which frees memory for training."""
        if not any(w.nbytes >= pages.LARGE for w in _vectors(state)):
            whole = payload.size(state)[1] > limit()
            return self.run.state(self.method.state_type) if whole else state
        for flat in (flat for w in _vectors(state) for flat in w.flats.values()):
            pages.release(flat)  # frees the pages of a vector that is already in a file
        buffers.give_back()
        return self.run.state(self.method.state_type, mapped=True)

    def _seconds(self) -> float:
        return self.run.seconds + time.perf_counter() - self._start

    def _evaluate(self, t: int, state: Any, last: bool) -> None:
        """Write the metrics of round t, after its commit."""
        every = self.run.experiment.run.evaluate_every
        line: dict[str, Any] = {"round": t, "seconds": round(self._seconds(), 3)}
        if last or (every and t % every == 0):
            line |= self._evaluator.scores(state, thorough=last)
        if self.run.experiment.run.local_scores and t:
            line |= {key: self._before_aggregation(key) for key in (BEFORE, LOSS_BEFORE)}
            known = {c: m for c, m in sorted(self.fed.client_metrics.items()) if m.get(JUDGED)}
            line |= {
                f"client_{key}": {c: m[key] for c, m in known.items() if key in m} for key in (BEFORE, LOSS_BEFORE)
            }
        line |= {
            "train_loss": self.fed.metrics.get("loss"),
            "cohort": list(self.fed.cohort),
            "excluded": [failures.entry(e) for e in (*self.fed.excluded, *self._evaluator.missing) if e.round == t],
            "bytes_up": self.fed.transcript.bytes_up,
            "bytes_down": self.fed.transcript.bytes_down,
        }
        aggregator = self.run.experiment.aggregation
        figures = (PASSES, *self.method.figures, *aggregator.mechanism.figures, *aggregator.transport.figures)
        line |= {name: self.fed.metrics[name] for name in figures if name in self.fed.metrics}
        if self._coded is not None:
            line["transport"] = self._coded.errors()
        self.run.note_messages(self.fed)
        self.run.log(line)
        self._progress.round(line)

    def _before_aggregation(self, key: str) -> float | None:
        """Return mean accuracy or loss of the round's clients after local training, weighted like their updates."""
        judged, total = self.fed.metrics.get(JUDGED), self.fed.metrics.get(key)
        return total / judged if judged and total is not None else None

    def _best(self, t: int, state: Any) -> tuple[Any, int]:
        """Return the final state and its round. With ``run.patience`` the best state becomes the last checkpoint."""
        best = early_stopping.best_round(self.run)
        if best is None or best == t or keeps_parts(self.method):
            return state, t
        if (found := self.run.state_of(best, self.method.state_type)) is None:
            self._progress.notice(
                f"the checkpoint of the best round, {best}, is missing; the model is that of round {t}"
            )
            return state, t
        write_models(self.run, self.fed.model, self._evaluator.models(state), last=True)
        self.run.commit(t, found, self.fed, self._seconds(), extra={"model_of_round": best})
        return found, best
