"""A short run of an experiment on this machine, from which the bytes and seconds of the whole run follow.

The rehearsal is a run in a temporary folder: all clients, the real model, aggregation and noise, but at most three
rounds, and only as many rows as its time allows. The whole run adds rounds like the second one. The size of a message
rarely depends on the number of rows; where two rehearsals with different numbers show that it does, the bytes are a
lower bound.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from fedfm.config.experiment import Experiment
from fedfm.core.method import fraction_of
from fedfm.core.new_folders import temporary_folder
from fedfm.data.table import ClientRows, FederatedData
from fedfm.engines.start import start
from fedfm.errors import RunError
from fedfm.linalg.params import Params
from fedfm.models.model import Model
from fedfm.reports.read import RunFiles, read
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.progress import Progress
from fedfm.runtime.run_directory import Run

ROUNDS = 3  # the first round, one in between, and the last
_FEW = 4  # rows of a class at a client in the first run
_MORE = 4  # the second run has this many times the rows of the first
_LONGEST = 4  # if the first run takes more than this multiple of the limit, there is no other run
# Settings of [run] that a rehearsal on this machine keeps: the others name machines, files or observers.
_KEPT = frozenset(
    [
        "seed",
        "min_clients",
        "timeout",
        "extend_timeout",
        "kernels",
        "workers",
        "deterministic",
        "transport",
        "asynchronous",
        "evaluate_every",
        "evaluate_fraction",
        "local_scores",
    ]
)


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal says about the whole run.

    Attributes:
        bytes_up, bytes_down: bytes of the method's own messages in the whole run, as the result line counts them.
        of_rounds: the part of these bytes that is not of the start, i.e. of round 0.
        at_least: whether the bytes are a lower bound, because they grow with the rows.
        seconds: the whole run's seconds on this machine.
        rounds, all_rounds: numbers of rounds in the rehearsal, and in the whole run.
        rows, all_rows: numbers of training rows in the rehearsal, and in the whole run.
        run: the files of the rehearsal.
    """

    bytes_up: int
    bytes_down: int
    of_rounds: int
    at_least: bool
    seconds: float
    rounds: int
    all_rounds: int
    rows: int
    all_rows: int
    run: RunFiles

    @property
    def basis(self) -> str:
        """A text that says what the figures were computed from."""
        rounds = "all rounds" if self.rounds == self.all_rounds else f"{self.rounds} of {self.all_rounds} rounds"
        rows = "all rows" if self.rows == self.all_rows else f"{self.rows} of {self.all_rows} training rows"
        return f"measured in {rounds} on {rows}" + (", the rest computed" if "of" in f"{rounds} {rows}" else "")


def rehearse(experiment: Experiment, population: Partitioned, seconds: float) -> Rehearsal:
    """Run a short form of an experiment two or three times: on few rows, on four times as many, then on most or all.

    Args:
        population: the experiment's rows and model; its parameters are the same afterwards.
        seconds: about how long the last of these runs may take.

    Raises:
        InputError: the experiment is refused before its first round.
        RunError: no client's answer could be used.
    """
    short, total = shorten(experiment), int(population.federated.sizes("train").sum())
    try:
        runs = [_measure(short, population, _FEW)]
    except RunError:  # e.g. because the noise exceeds the sums over so few rows
        runs = [_measure(short, population, None)]
    if runs[0][1] < total and runs[0][2] < _LONGEST * seconds:
        runs.append(_measure(short, population, _MORE * _FEW))
        (_, few, quick), (_, rows, spent) = runs
        each = max((spent - quick) / max(rows - few, 1), 1e-9)  # seconds for one more row
        room = rows + max(seconds - spent, 0.0) / each
        if rows < total and (room >= 2 * rows or room >= total):
            runs.append(_measure(short, population, None if room >= total else int(_MORE * _FEW * room / rows)))
    found, rows, _ = runs[-1]
    earlier, few, _ = runs[-2] if len(runs) > 1 else runs[-1]
    grows = rows < total and _bytes(found) != _bytes(earlier)
    marks, end, rounds = _marks(found), found.result, experiment.method.rounds
    done = int(end["rounds"])
    ends = {key: float(end[key]) for key in ("seconds", "bytes_up", "bytes_down")}
    usual_round = _of_usual_round(found, experiment, len(population.clients))
    more = (rounds - done) * usual_round
    if _by_coins(experiment):  # the cohorts of the rehearsed rounds were drawn by coins, so their sizes differ
        ends |= {key: marks[0][i] + done * usual_round[i] for i, key in enumerate(("bytes_up", "bytes_down"))}
        grows |= not any(r.cohort for r in found.rounds)
    up, down, lasts = (ends[key] + more[i] for i, key in enumerate(("bytes_up", "bytes_down", "seconds")))
    if rows < total:
        usual = _of_usual_round(earlier, experiment, len(population.clients))[2]
        shorter = float(earlier.result["seconds"]) + (rounds - done) * usual
        each = (lasts - shorter) / (rows - few) if rows > few else math.inf
        lasts += min(max(each, 0.0), lasts / max(rows, 1)) * (total - rows)
    return Rehearsal(
        bytes_up=round(up),
        bytes_down=round(down),
        of_rounds=round(up + down - marks[0][0] - marks[0][1]),
        at_least=grows,
        seconds=float(lasts),
        rounds=done,
        all_rounds=rounds,
        rows=rows,
        all_rows=total,
        run=found,
    )


def shorten(experiment: Experiment) -> Experiment:
    """The experiment with at most :data:`ROUNDS` rounds, on the local engine, without trackers and paths of a site."""
    tables = copy.deepcopy(experiment.to_dict())
    tables["run"] = {key: value for key, value in tables["run"].items() if key in _KEPT}
    if "rounds" in {f.name for f in fields(experiment.method)}:
        tables["method"]["rounds"] = min(experiment.method.rounds, ROUNDS)
    return Experiment.from_dict(tables, imports=True)


def _measure(experiment: Experiment, population: Partitioned, most: int | None) -> tuple[RunFiles, int, float]:
    """A run on at most ``most`` rows of each class of each client: its files, its training rows, and its seconds."""
    began = time.perf_counter()
    model = population.model_or_none
    part = Partitioned(
        thin(population.federated, most),
        model,
        population.attackers,
        shared=population.client_model is not None,
        augment=population.augment,
    )
    before: Params | None = model.params() if isinstance(model, Model) else None
    with temporary_folder() as folder:
        run = Run.create(experiment, folder / "run")
        with run.lock():
            start(run, lambda: False, Progress(), lambda: part)
        found = read(run.path)
    if before is not None:
        model.load(before)  # type: ignore[union-attr]
    return found, int(part.federated.sizes("train").sum()), time.perf_counter() - began


def thin(federated: FederatedData, most: int | None) -> FederatedData:
    """At most ``most`` training rows of each class of each client, and the same share of the other rows.

    The clients stay, and so do the classes of each client. ``most = None`` keeps every row.
    """
    if most is None:
        return federated
    labels = federated.table.labels
    train = {name: _first_of_each(rows.train, labels, most) for name, rows in federated.clients.items()}
    total = max(int(federated.sizes("train").sum()), 1)
    step = max(total // max(sum(map(len, train.values())), 1), 1)
    kept = np.unique(np.concatenate([federated.test, federated.all_rows("test")]).astype(np.int64))[::step]
    clients = {
        name: ClientRows(train[name], rows.val[::step], rows.test[np.isin(rows.test, kept)])
        for name, rows in federated.clients.items()
    }
    return replace(federated, clients=clients, test=federated.test[np.isin(federated.test, kept)])


def _first_of_each(rows: np.ndarray, labels: np.ndarray | None, most: int) -> np.ndarray:
    """The first rows of each class in ascending order; the first rows if there are no classes."""
    if labels is None or labels.ndim != 1:
        return rows[:most]
    of = labels[rows]
    return np.sort(np.concatenate([rows[:0], *(rows[of == c][:most] for c in np.unique(of))]))


def _bytes(run: RunFiles) -> tuple[int, int]:
    return int(run.result["bytes_up"]), int(run.result["bytes_down"])


def _marks(run: RunFiles) -> list[np.ndarray]:
    """Bytes up, bytes down and seconds from the start to the end of rounds 0, 1, ..."""
    each = [np.array([r.bytes_up, r.bytes_down, r.seconds or 0.0]) for r in run.rounds]
    for i in range(1, len(each)):  # the files count bytes from the start, and seconds of single rounds
        each[i][2] += each[i - 1][2]
    return each


def _of_usual_round(run: RunFiles, experiment: Experiment, clients: int) -> np.ndarray:
    """Bytes up, bytes down and seconds of a round that is neither the first nor the last.

    If cohorts are drawn by coins, a rehearsal of three rounds may draw other sizes than the mean.
    """
    marks = _marks(run)
    if not _by_coins(experiment):
        return np.asarray(marks[2] - marks[1]) if len(marks) > ROUNDS else np.zeros(3)
    cohorts = [len(r.cohort) for r in run.rounds[1:]]
    # The first round also loads compiled loops, so only its bytes count.
    each = np.array([*(marks[-1] - marks[0])[:2] / max(sum(cohorts), 1), 0.0])
    each[2] = (marks[-1] - marks[1])[2] / max(sum(cohorts[1:]), 1)
    return each * fraction_of(experiment.method) * clients


def _by_coins(experiment: Experiment) -> bool:
    """Whether secret coins choose each cohort, so that its size is random."""
    fraction = experiment.aggregation.mechanism.fraction
    return fraction is not None and fraction < 1


def counts_of(population: Partitioned) -> list[Sequence[int]]:
    """Each client's numbers of training, validation and test rows."""
    found: Mapping[str, Any] = population.federated.clients
    return [[len(part) for part in (of.train, of.val, of.test)] for of in found.values()]
