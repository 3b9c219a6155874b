"""Replay a finished run in this process, with a recorder at the server (:mod:`fedfm.audits.recorded_run`).

Experiment, seed and secrets determine a run, so no messages need to be stored. On a CPU a replay gives the same bits.
On other devices sums have no fixed order, and a replay differs by at most :data:`TOLERANCE`. A replay does not change
the run directory. It copies the secrets to a temporary folder, so that it draws the same noise. An audit of messages
that are too large to keep has a watch, which reads every round and keeps only what the audit needs.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fedfm.audits.off_cpu import distance, off_the_cpu
from fedfm.audits.recorded_run import RecordedReply, RecordedRun, Turn
from fedfm.core import storage
from fedfm.core.messages import ROUND
from fedfm.core.new_folders import temporary_folder
from fedfm.data.spec import IN_MEMORY
from fedfm.errors import E_DUPLICATE, ClientFault, InputError, Lost, RunError
from fedfm.linalg.params import sha256_of
from fedfm.linalg.threads import torch_threads
from fedfm.models import devices
from fedfm.models.user.user_inputs import read_inputs
from fedfm.runtime import file_integrity
from fedfm.runtime.disclosure import check_same, fingerprints
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.population import populate
from fedfm.runtime.predictions import personal
from fedfm.runtime.run_directory import Run
from fedfm.runtime.user_population import START, of_inputs

TOLERANCE = 0.01  # largest distance between a run and its replay on a GPU, relative to the change by training


class Watch(Protocol):
    """Observer of the rounds of a replay."""

    def see(self, turn: Turn, population: Partitioned) -> None:
        """Observe a round; the replay calls this after each round."""


W = TypeVar("W", bound=Watch)


@dataclass(frozen=True)
class Replay:
    """A replayed run.

    Attributes:
        read: every client's rows, and the model; None if they are not read yet.
        replies: all replies, in the order of the run; empty if only watches read them.
        watched: for each audit, its watch.
        given: the arguments of ``fedfm.federate``, if that function made the run.
    """

    run: Run
    read: Partitioned | None
    replies: Sequence[RecordedReply]
    watched: Mapping[str, Watch] = field(default_factory=dict)
    given: Any = None

    def watch(self, kind: type[W]) -> W:
        """The watch that is an instance of this class."""
        return next(watch for watch in self.watched.values() if isinstance(watch, kind))

    @functools.cached_property
    def population(self) -> Partitioned:
        """Every client's rows. An attacker does not have them; audits use them to judge an attack."""
        return self.read or self.fresh()

    def fresh(self) -> Partitioned:
        """Read the rows and the model again, as they were at the run's start.

        Raises:
            InputError: as :func:`population_of`.
        """
        population = population_of(self.run, self.given)
        check_unchanged(self.run, population)
        return population


def open_finished(path: str | Path, given: Any = None) -> Run:
    """Open a finished run that can be replayed.

    Args:
        given: the arguments of ``fedfm.federate``, if that function made the run.

    Raises:
        InputError: the run is not finished, its data and model came from Python and are not given again, its updates
            arrived in a random order, or its rows are not on this machine.
    """
    run = Run.open(path)
    if run.experiment.in_memory and given is None:
        raise InputError(
            f"{path}: data and model of this run came from Python, and an audit runs it again; pass them to the "
            f"audit, from "
            'Python, as given={"model": ..., "clients": ..., ...}'
        )
    if run.manifest["result"] is None:
        raise InputError(f"{path} is not finished; run `fedfm resume {path}` first")
    spec = run.experiment.run
    if spec.asynchronous is not None and spec.engine == "deployment":
        raise InputError(
            f"{path}: its updates arrived in a random order, which cannot be repeated; audit the same "
            "experiment on the local engine, which simulates arrival"
        )
    if run.manifest["split"] is None:
        raise InputError(
            f"{path}: the silos' own data are not on this machine; audit the run on a machine that has all rows"
        )
    return run


def own_sources(run: Run) -> bool:
    """Whether clients have sources of their own. If so, only a client's own test rows resemble its training rows."""
    data = run.experiment.data
    return bool(data.clients) or data.partition.name == "by_column"


def replay(
    run: Run,
    notice: Callable[[str], None] = lambda text: None,
    watched: Mapping[str, Watch] | None = None,
    *,
    keep: bool = True,
    given: Any = None,
) -> Replay:
    """Run a finished run again, with a recorder at the server.

    Args:
        watched: watches, by the name of their audit; they see every round.
        keep: whether all replies stay in memory.
        given: as in :func:`open_finished`.

    Raises:
        InputError: data or model have changed, or the secrets of the noise are missing.
        RunError: the replay ends with other parameters than the run. On devices other than a CPU, a distance of at
            most :data:`TOLERANCE` is not an error.
    """
    experiment, result = run.experiment, run.manifest["result"]
    method = experiment.method
    watched, replies, state, first = watched or {}, list[RecordedReply](), None, None
    of = result["details"].get("model_of_round", result["rounds"])
    with torch_threads(1), devices.restore_determinism():
        population = population_of(run, given)
        check_unchanged(run, population)
        notice(f"replaying {run.path}, with a recorder at the server")
        for turn in play(run, population):
            replies += turn.replies if keep else ()
            first = turn.after if turn.round == 0 else first
            state = turn.after if turn.round == of else state
            for watch in watched.values():
                watch.see(turn, population)
        names = population.clients if personal(method) else ("",)
        models = {c: method.params_for(state, c) for c in names}
    same = sha256_of(models) == result.get("server_sha256", result["params_sha256"])
    if not same and not run.manifest.get("lost") and off_the_cpu(run, population):
        recorded, start = ({c: method.params_for(s, c) for c in names} for s in (run.state(method.state_type), first))
        apart = distance(models, recorded, start)
        if same := apart <= TOLERANCE:
            notice(f"the replay differs from the run by {apart:.1e} of the change by training: rounding on this device")
    if not same:
        if marks := run.manifest.get("lost"):
            raise RunError(
                f"{run.path}: the replay ends with other parameters, because the run continued without "
                f"{marks[0]['file']}; audit a run that lost no file"
            )
        raise RunError(
            f"{run.path}: the replay ends with other parameters than the result states; audit the run on its machine "
            f"and with the versions in its manifest: {run.manifest['versions']}"
        )
    return Replay(run, population, tuple(replies), watched, given)


def population_of(run: Run, given: Any = None) -> Partitioned:
    """The rows and the model as they were at the start of the run, read again or taken from ``given``.

    Raises:
        InputError: rows or model differ from the run's, or the file with the start model is missing.
    """
    if not run.experiment.in_memory:
        return populate(run.experiment)
    population = of_inputs(read_inputs(given), run.experiment.data, run.experiment.run.seed)
    start = storage.load(run.path / START)
    if start is None:
        raise InputError(f"{run.path / START} is missing or damaged; it has the weights with which the run began")
    if start["w"].layout is not population.model.layout:
        raise InputError(f"{run.path} was trained with another model than the one given")
    population.model.load(start["w"])
    return population


def play(run: Run, population: Partitioned) -> Iterator[Turn]:
    """Yield the run's rounds from round 0 on, computed again with the run's own secrets.

    Raises:
        InputError: the secrets of the noise are missing.
    """
    experiment, result = run.experiment, run.manifest["result"]
    # If a client sent two replies, the server used the first one.
    gone = [e for e in result["excluded"] if e["code"] != E_DUPLICATE and e.get("part", ROUND) == ROUND]
    excluded = {(e["round"], e["client"]): ClientFault(e["code"], e["reason"]) for e in gone}
    with secrets(run) as private:
        copied = _parties(private)
        again = RecordedRun(
            experiment.method,
            population,
            private,
            seed=experiment.run.seed,
            min_clients=experiment.run.min_clients,
            excluded=excluded,
            aggregator=experiment.aggregation,
            attack=population.attackers,
            transport=experiment.run.transport,
        )
        for turn in again.turns(result["rounds"]):
            if drawn := _parties(private) - copied:
                raise InputError(
                    f"{run.path}/private has no secret of {', '.join(sorted(drawn))}: the noise of this run cannot be "
                    "drawn again; audit the run with its private/ folder"
                )
            yield turn


@contextmanager
def secrets(run: Run) -> Iterator[Path]:
    """Context manager: a folder with copies of the run's secrets. Memories start empty, as in the run.

    Raises:
        Lost: a secret is damaged.
    """
    source = run.path / "private"
    with temporary_folder("fedfm-audit-") as target:
        for path in file_integrity.secrets(source):
            if file_integrity.read_secret(path) is None:
                raise Lost(f"{path} is damaged: the noise of this run cannot be drawn again; put back a copy of it")
            copy = target / _here(path.relative_to(source))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        yield target


def _here(path: Path) -> Path:
    """The path of a run's secret in a replay's folder, which all clients share."""
    return Path(*path.parts[-3:])  # in a run with silos on loopback, each silo has its own folder memory/


def _parties(private: Path) -> set[str]:
    """The owners of the secrets in the folder."""
    return {path.parent.name for path in private.rglob("*.secret")}


def check_unchanged(run: Run, population: Partitioned) -> None:
    """Check that rows and model are the same as in the run.

    Raises:
        InputError: rows or model differ; the error says what changed.
    """
    own = run.experiment.data.name == IN_MEMORY
    more = ", with test and classes as they were given to fedfm.federate" if own else ""
    now = fingerprints(run, population.federated.table, population.model)
    check_same(run, now, f"an audit needs the original{more}")
