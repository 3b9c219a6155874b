"""What each client of a finished run contributed: Shapley values and leave-one-out values of the model's figure.

The run is replayed, and the server half computes the model of any set of clients from the messages of these clients.
If messages depend on a client's own rows only (the trait ``independent_messages``), this is the model that the set
would have trained, so the values equal those of true retraining. With rounds it is a reconstruction: each round starts
from the run's state, and the values of a client in all rounds are added. This is the reconstruction of GTG-Shapley
(Liu, Chen, Chen, Liu, Yu, Zhang, ACM TIST 2022, arXiv:2109.02053), without its truncation, so that the values add up to
the total.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedfm import seeds
from fedfm.aggregation.base import Mechanism
from fedfm.api.figures_runs import need_model
from fedfm.api.leave import absent_clients
from fedfm.api.shapley import Array, Coalition, Values, shapley_by_orders, shapley_over_sets
from fedfm.audits.recorded_run import Turn
from fedfm.audits.replay import open_finished, replay
from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.core.kept_sums import KeepsSums
from fedfm.core.messages import Reply, Request
from fedfm.core.rows import Rows
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import Params
from fedfm.models.model import Model
from fedfm.reports import html
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.predictions import logits, personal, scores
from fedfm.runtime.progress import Progress
from fedfm.runtime.progress_bar import Bar
from fedfm.runtime.run_directory import Run

EVALUATIONS = 1024  # sets of clients that are valued, unless the user sets another number: all sets of ten clients
_TIMED = 3  # the evaluation whose time gives the estimate; the first two also prepare rows, and compute no step
_HOW = {  # how silos consent, by whether the server keeps sums over rows
    False: "if every silo consents, run the experiment with clear sums",
    True: "a silo that consents writes its own sums by `fedfm silo sums`; give the files as --sums",
}
Notice = Callable[[str], None]


def worth(
    path: str | Path,
    *,
    evaluations: int = EVALUATIONS,
    sums: Sequence[str | Path] = (),
    rows: str | Path | None = None,
    progress: Progress | None = None,
    given: Any = None,
) -> dict[str, Any]:
    """The clients' Shapley values and leave-one-out values in a finished run; also written to its manifest.

    Args:
        path: the finished run.
        evaluations: about how many sets of clients are valued, over all rounds; all sets if they are no more.
        sums: files with clients' own sums, which ``fedfm silo sums`` wrote. With them nothing is replayed, and only
            these clients are valued, and all others as one.
        rows: with ``sums``, a file with rows by which models are valued, if the run's test rows are not here.
        given: as in :func:`fedfm.audit`.

    Returns:
        ``shapley`` and ``leave_one_out``: for each client ``value``, ``low`` and ``high`` (None if ``measure`` is one
        figure of all test rows, which has no spread over rows); ``total``: the value of all
        clients minus that of none, the sum of the Shapley values; ``measure``: what the values are differences of;
        ``how``: ``exact``, ``sampled`` or ``rounds``; ``evaluations``: how many sets were valued; with ``sums`` also
        ``opened``: the hash of each client's own sums.

    Raises:
        InputError: the run hides the clients' messages, or no set of clients has a model.
    """
    if evaluations < 2:
        raise InputError(f"evaluations = {evaluations}: expected at least 2")
    if Path(path).is_dir() and not os.access(path, os.W_OK):
        raise InputError(f"{path} cannot be written, but the values are stored there; value a copy of the run")
    notice = (progress or Bar()).notice
    if sums:
        from fedfm.api import worth_by_sums

        run = Run.open(path)
        figures = _Figures(run)
        files, place = [Path(file) for file in sums], None if rows is None else Path(rows)
        shapley, alone, more = worth_by_sums.value(run, files, place, evaluations, figures.measure, notice)
        everybody = sorted(shapley.values)
    elif rows is not None:
        raise InputError("--rows: only with --sums; without --sums, models are valued by the run's test rows")
    else:
        run = open_finished(path, given)
        _check(run)
        watch = _Valuer(run, evaluations, notice)
        replay(run, notice, {"worth": watch}, keep=False, given=given)
        assert watch.shapley is not None  # noqa: S101 - the run has a round
        assert watch.alone is not None  # noqa: S101
        shapley, alone, figures = watch.shapley, watch.alone, watch.figures
        more = {"how": watch.how, "evaluations": watch.count}
        everybody = sorted({*run.manifest["clients"], *absent_clients(run)})
    found = {"measure": figures.name, **more, "total": shapley.total}
    for key, of in (("shapley", shapley), ("leave_one_out", alone)):
        values = {c: dict(zip(("value", "low", "high"), of.interval(c), strict=True)) for c in of.values}
        found[key] = {c: values.get(c, {"value": 0.0, "low": 0.0, "high": 0.0}) for c in everybody}
    with run.lock(wait=True):
        run.manifest["worth"] = found
        run.write_manifest()
    html.renew(run.path)
    return {"run": str(path), **found}


def _check(run: Run) -> None:
    """Refuse a run whose messages do not determine the model of each set of clients."""
    need_model(run)
    experiment, method, where = run.experiment, run.experiment.method, run.path
    if experiment.aggregation.transport.form != "plain":
        raise InputError(
            f"{where}: secure aggregation hides each client's message, and the value of one client would show what the "
            f"silos did not agree to show; {_HOW[isinstance(method, KeepsSums)]}"
        )
    if type(experiment.aggregation.mechanism) is not Mechanism:
        raise InputError(
            f"{where}: [privacy] covers the mean over all clients by noise; the mean of some clients would be one more "
            "release, which no epsilon of the run counts"
        )
    why = ""
    if personal(method):
        why = "every client has its own model, and no figure belongs to all"
    elif method.needs.model == "server" or method.traits.server_secrets:
        why = f"{run.experiment.method_name} mixes secrets of the server into its messages"
    elif experiment.run.asynchronous is not None:
        why = "its updates start from earlier rounds, so a round is not a function of its own messages"
    elif not run.manifest["result"]["rounds"]:
        why = "it has no round"
    if why:
        raise InputError(f"{where}: nobody can compute what each client contributed: {why}")


class _Figures:
    """The value of models.

    Attributes:
        name: what the values are differences of, once a model was measured.
    """

    def __init__(self, run: Run) -> None:
        self._method, self.name = run.experiment.method, ""

    def measure(self, model: Model, rows: Rows, w: Params) -> Array:
        """The value of a model: for each test row whether it is right, or a figure of all rows."""
        if rows.labels is not None and not model.is_language_model:
            self.name = "accuracy"
            said: np.ndarray = logits(self._method, model, w, rows).argmax(-1).eq(rows.labels).numpy()
            return said.astype(np.float64)
        found = scores(self._method, model, w, rows)
        self.name = "accuracy" if found.get("accuracy") is not None else "-loss"
        return np.array([found["accuracy"] if self.name == "accuracy" else -found["loss"]], dtype=np.float64)


class _Messages:
    """A link that answers by messages of the run."""

    def __init__(self, sent: Mapping[ClientId, Any], clients: Coalition) -> None:
        self._sent, self.clients = sent, sorted(clients)

    def exchange(self, requests: Sequence[Request]) -> Iterator[Reply]:
        for request in requests:
            yield Reply(request.client, self._sent[request.client], request.round, request.call)


class _PartFederation(Federation):
    """A federation of some clients of a round, which all take part in it."""

    def sample(self, fraction: float) -> Sequence[ClientId]:
        return self.clients


class _Valuer:
    """Values the clients of each round of a replay."""

    def __init__(self, run: Run, evaluations: int, notice: Notice) -> None:
        self._run, self._evaluations, self.notice = run, evaluations, notice
        self._start: Params | None = None
        self.shapley: Values | None = None
        self.alone: Values | None = None
        self.figures, self.how, self.count = _Figures(run), "exact", 0

    def see(self, turn: Turn, population: Partitioned) -> None:
        if not turn.round:
            if not len(population.federated.test):
                raise InputError(f"{self._run.path}: there are no global test rows by which a model could be valued")
            self._start = population.model.params()
            return
        if any(reply.call > 1 for reply in turn.replies):
            raise InputError(
                f"{self._run.path}: nobody can compute what each client contributed: in a round of "
                f"{self._run.experiment.method_name} a client's later messages depend on the others' earlier ones, so "
                "without the others they would differ"
            )
        sent = {reply.client: reply.value for reply in turn.replies}
        clients = sorted(sent)

        @functools.cache
        def worth_of(chosen: Coalition) -> Array:
            began = time.perf_counter()
            found = self.figures.measure(population.model, population.test, self._model(turn, population, sent, chosen))
            self.count += 1
            if self.count == _TIMED:
                self._say(clients, time.perf_counter() - began)
            return found

        whole = worth_of(frozenset(clients))
        if self._is_exact(clients):
            found = shapley_over_sets(clients, worth_of)
        else:
            seed = seeds.derive(self._run.experiment.run.seed, "worth", turn.round)
            found, self.how = shapley_by_orders(clients, worth_of, self._share, seed), "sampled"
        alone = {c: whole - worth_of(frozenset(clients) - {c}) for c in clients}
        gone = Values(alone, dict.fromkeys(clients, 0.0), found.total)
        self.shapley = found if self.shapley is None else self.shapley + found
        self.alone = gone if self.alone is None else self.alone + gone
        if not self._run.experiment.method.traits.independent_messages:
            self.how = "rounds"

    @property
    def _share(self) -> int:
        """The number of sets that a round may value."""
        return max(self._evaluations // int(self._run.manifest["result"]["rounds"]), 2)

    def _is_exact(self, clients: Sequence[ClientId]) -> bool:
        return len(clients) < 30 and 2 ** len(clients) <= self._share

    def _say(self, clients: Sequence[ClientId], seconds: float) -> None:
        """Say how long all evaluations take."""
        each = 2 ** len(clients) if self._is_exact(clients) else max(self._share, 4 * len(clients))
        number = each * int(self._run.manifest["result"]["rounds"])
        self.notice(f"valuing {number} sets of clients, about {max(round(number * seconds), 1)} s")

    def _model(self, turn: Turn, population: Partitioned, sent: Mapping[ClientId, Any], chosen: Coalition) -> Params:
        """The model after the round if only these clients had sent their messages."""
        method, experiment = self._run.experiment.method, self._run.experiment
        if len(chosen) in (0, len(sent)):
            return method.params_for(turn.after if chosen else turn.before, "")
        link = _Messages(sent, chosen)
        fed = _PartFederation(link, model=population.model, aggregator=experiment.aggregation, seed=experiment.run.seed)
        assert self._start is not None  # noqa: S101 - round 0 comes first
        fed.initial = self._start
        fed.begin(turn.round)
        try:
            state = method.step(fed, turn.before, turn.round)
        except RunError:  # e.g. too few clients for a robust mean: these clients alone change nothing
            state = turn.before
        return method.params_for(state, "")
