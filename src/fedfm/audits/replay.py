"""A finished run once more, in this process, with a recorder at the place of the adversary.

A run is deterministic from its experiment, its seed and its secrets, so nothing has to be kept of what the server or a
client saw. The run directory is only read: secrets are copied to a temporary folder, since noise must be the run's own.

Messages that are large or many are not kept: an audit that reads models round by round gives a watch, which sees every
round as it passes and keeps what it needs.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fedfm.aggregation.base import Aggregator
from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.core.messages import Reply, Request
from fedfm.engines.local.engine import LocalLink
from fedfm.errors import E_DUPLICATE, ClientFault, InputError, Lost, RunError
from fedfm.linalg.params import sha256_of
from fedfm.linalg.threads import torch_threads
from fedfm.runtime import kept_files
from fedfm.runtime.client import Silos
from fedfm.runtime.client_memory import secret
from fedfm.runtime.disclosure import fingerprints
from fedfm.runtime.population import Partitioned, populate
from fedfm.runtime.predictions import personal
from fedfm.runtime.run_directory import Run


@dataclass(frozen=True)
class Seen:
    """One reply, as the server saw it.

    Attributes:
        call: of the round, from 1; (round, call) is one request to several clients.
        handler: e.g. ``query.FedPFT_summarise``.
    """

    round: int
    call: int
    handler: str
    client: ClientId
    value: Any


@dataclass(frozen=True)
class Turn:
    """One round.

    Attributes:
        round: 0 for what happens before the first one.
        before, after: the server's state; equal in round 0.
        asked: clients that its first call asked; none where it asked nobody.
        sent: what the first of them was sent.
        payloads: what each of them was sent.
        seen: the replies.
    """

    round: int
    before: Any
    after: Any
    asked: Sequence[ClientId]
    sent: Mapping[str, Any]
    seen: Sequence[Seen]
    payloads: Mapping[ClientId, Mapping[str, Any]]


class Watch(Protocol):
    """An audit's eye on the rounds as they pass."""

    def see(self, turn: Turn, population: Partitioned) -> None:
        """One round is over."""


@dataclass(frozen=True)
class Replay:
    """What an audit works on.

    Attributes:
        population: every client's rows, which an attacker has not; they judge it.
        seen: all replies, in the order of the run; none if only watches read them.
        watched: watches by the name of their audit.
    """

    run: Run
    population: Partitioned
    seen: Sequence[Seen]
    watched: Mapping[str, Watch] = field(default_factory=dict)


class _Recorder:
    """A link that keeps a round's messages; clients that the run left out stay left out."""

    def __init__(self, link: LocalLink, excluded: Mapping[tuple[int, ClientId], ClientFault]) -> None:
        self._link, self._excluded = link, excluded
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        self.seen: list[Seen] = []
        self.payloads: dict[ClientId, Mapping[str, Any]] = {}

    @property
    def clients(self) -> Sequence[ClientId]:
        return self._link.clients

    def exchange(self, requests: Sequence[Request]) -> Iterator[Reply]:
        handlers = {request.client: request.handler for request in requests}
        if not self.payloads:
            self.payloads = {request.client: request.payload for request in requests}
        for reply in self._link.exchange(requests):
            fault = self._excluded.get((reply.round, reply.client))
            if fault is not None:
                yield reply._replace(value=None, fault=fault)
                continue
            if reply.fault is None:
                self.seen.append(Seen(reply.round, reply.call, handlers[reply.client], reply.client, reply.value))
            yield reply


def finished(path: str | Path) -> Run:
    """The run, if it can be replayed.

    Raises:
        InputError: it is unfinished, or its data and model were given from Python.
    """
    run = Run.open(path)
    if run.experiment.in_memory:
        raise InputError(f"{path}: data and model of this run were given from Python: there is nothing to replay")
    if run.manifest["result"] is None:
        raise InputError(f"{path} is not finished: `fedfm resume {path}` first")
    if run.manifest["split"] is None:
        raise InputError(f"{path}: its silos used data of their own, which are not here: audit where all rows are")
    return run


def replay(
    run: Run,
    notice: Callable[[str], None] = lambda text: None,
    watched: Mapping[str, Watch] | None = None,
    *,
    keep: bool = True,
) -> Replay:
    """Run it again and record.

    Args:
        watched: see the rounds as they pass.
        keep: all replies; they are as large as what clients send.

    Raises:
        InputError: data or model changed since, or the secrets of its noise are not there.
        RunError: the same experiment gave another result on this machine.
    """
    experiment, result = run.experiment, run.manifest["result"]
    method: Any = experiment.method
    watched, seen, state = watched or {}, list[Seen](), None
    of = result["details"].get("model_of_round", result["rounds"])
    with torch_threads(1):
        notice("reading data and model")
        population = populate(experiment)
        _unchanged(run, population)
        notice(f"running {run.path} again, with a recorder at the server")
        for turn in play(run, population):
            seen += turn.seen if keep else ()
            state = turn.after if turn.round == of else state
            for watch in watched.values():
                watch.see(turn, population)
        models = {c: method.params_for(state, c) for c in (population.clients if personal(method) else ("",))}
    if sha256_of(models) != result.get("server_sha256", result["params_sha256"]):
        if marks := run.manifest.get("lost"):
            raise RunError(
                f"{run.path}: run again, it ends with other parameters: it went on without {marks[0]['file']}, and a "
                "replay has nothing to lose; audit a run that is whole"
            )
        raise RunError(
            f"{run.path}: run again, it ends with other parameters than its result line says; audit it on the machine "
            f"and with the versions of its manifest: {run.manifest['versions']}"
        )
    return Replay(run, population, tuple(seen), watched)


def play(run: Run, population: Partitioned) -> Iterator[Turn]:
    """The run's rounds with the run's own secrets, one after the other, from round 0 on.

    Raises:
        InputError: the secrets of its noise are not there.
    """
    experiment, result = run.experiment, run.manifest["result"]
    # A client that sent something twice, or another's vector, has been heard all the same.
    gone = [e for e in result["excluded"] if e["code"] != E_DUPLICATE]
    excluded = {(e["round"], e["client"]): ClientFault(e["code"], e["reason"]) for e in gone}
    with secrets(run) as private:
        copied = _parties(private)
        for turn in turns(
            experiment.method,
            population,
            private,
            rounds=result["rounds"],
            seed=experiment.run.seed,
            min_clients=experiment.run.min_clients,
            excluded=excluded,
            aggregator=experiment.aggregation,
            attack=population.attackers,
        ):
            if drawn := _parties(private) - copied:
                raise InputError(
                    f"{run.path}/private has no secret of {', '.join(sorted(drawn))}: the noise of this run cannot be "
                    "drawn again; audit the run where its private/ folder is"
                )
            yield turn


def turns(
    method: Any,
    population: Partitioned,
    private: Path,
    *,
    rounds: int,
    seed: int,
    min_clients: int = 1,
    excluded: Mapping[tuple[int, ClientId], ClientFault] | None = None,
    aggregator: Aggregator | None = None,
    attack: Any = None,
) -> Iterator[Turn]:
    """A method's rounds on a population, from round 0 on, in this process and with a recorder.

    Args:
        private: folder of secrets and memories.
        excluded: who is left out, by (round, client).
        aggregator: of the means; the plain one if None.
        attack: what some clients do instead.
    """
    aggregator = aggregator or Aggregator()
    silos = Silos(method, aggregator, population, memory=private / "memory", seed=seed, attack=attack)
    recorder = _Recorder(LocalLink(silos), excluded or {})
    fed = Federation(
        recorder,
        model=population.model,
        aggregator=aggregator,
        seed=seed,
        min_clients=min_clients,
        secret=partial(secret, private, "server"),
    )
    before = None
    for t in range(rounds + 1):
        recorder.begin()
        fed.begin(t)
        state = method.step(fed, before, t) if t else method.init(fed)
        payloads = recorder.payloads
        sent = next(iter(payloads.values()), {})
        yield Turn(t, before if t else state, state, list(payloads), sent, recorder.seen, payloads)
        before = state


@contextmanager
def secrets(run: Run) -> Iterator[Path]:
    """A folder with copies of the run's secrets and nothing else: memories start empty, as the run's did.

    Raises:
        Lost: a secret is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="fedfm-audit-") as name:
        source, target = run.path / "private", Path(name)
        for path in kept_files.secrets(source):
            if kept_files.read_secret(path) is None:
                raise Lost(f"{path} is damaged: the noise of this run cannot be drawn again; put back a copy of it")
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        yield target


def _parties(private: Path) -> set[str]:
    """Who has a secret there."""
    return {path.parent.name for path in private.rglob("*.secret")}


def _unchanged(run: Run, population: Partitioned) -> None:
    now = fingerprints(run, population.federated.table, population.model.fingerprint)
    for name, value in now.items():
        if run.manifest["fingerprints"].get(name) != value:
            raise InputError(f"{run.path}: the {name} changed since this run: an audit needs what it was run with")
