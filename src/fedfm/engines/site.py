"""A site: what answers Flower messages for one client, with its rows, its model and its memory.

It lives where it stays warm: in a Ray actor of the simulation, or in the worker process of a site.
"""

from __future__ import annotations

import contextlib
import json
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fedfm import __version__, codec, records, store, wire
from fedfm.conform import conform
from fedfm.engines.link import HELLO
from fedfm.errors import E_EXCEPTION, E_FORMAT, ClientFault, InputError, first_line
from fedfm.experiment import Experiment
from fedfm.federation import ClientId, Request
from fedfm.population import Partitioned, populate, record_error
from fedfm.silo import Silos


class Site:
    """Answers for the clients of one experiment.

    Args:
        experiment: what the server runs.
        memory: folder of the clients' memories.
        population: where rows and model come from, given the server's class names where it has told them.
        classes: those names, if they were told before.
        remember: keeps them for a process that takes over from this one.
        allow: the silo's policy.
        on_error: told of tracebacks, which stay here.
        own: the silo's name, where the rows are its own and not a part of the server's table.
    """

    def __init__(
        self,
        experiment: Experiment,
        memory: Path,
        population: Callable[[Sequence[str] | None], Partitioned],
        *,
        classes: Sequence[str] | None = None,
        remember: Callable[[Sequence[str]], None] = lambda classes: None,
        allow: tuple[str, ...] = ("*",),
        on_error: Callable[[ClientId, str], None] = lambda client, text: None,
        own: str | None = None,
    ) -> None:
        self._experiment, self._memory, self._populate = experiment, memory, population
        self._classes, self._remember = classes, remember
        self._allow, self._on_error, self._own = allow, on_error, own

    @cached_property
    def silos(self) -> Silos:
        """The clients; rows and model are read when this is first asked for."""
        population = self._populate(self._classes)
        return Silos(
            self._experiment.method,
            self._experiment.aggregation,
            population,
            memory=self._memory,
            seed=self._experiment.run.seed,
            attack=population.attackers,
            allow=self._allow,
            on_error=self._on_error,
            reveal=self._own is None,
            local_scores=self._experiment.run.local_scores,
        )

    def warm(self, shared: Site | None = None) -> None:
        """Load what can be loaded before the first message, or take rows and model from a site that has them.

        What is wrong is told when the server says hello.
        """
        if self._own is None or self._classes is not None:
            with contextlib.suppress(Exception):
                if shared is not None and "silos" in shared.__dict__:
                    population = shared.silos.population
                    self._populate = lambda classes: population  # type: ignore[return-value,assignment]
                _ = self.silos

    def client(self, partition: int) -> ClientId:
        """The client of a node that only has a number, in order of names."""
        names = self.silos.population.clients
        if not 0 <= partition < len(names):
            raise InputError(f"partition-id {partition}: the experiment has clients 0 to {len(names) - 1}")
        return names[partition]

    def answer(self, client: ClientId | int, handler: str, head: str, data: bytes) -> tuple[str, bytes]:
        """One message: a payload's two halves in, a reply's out. Never raises: what goes wrong is the reply."""
        round = call = 0
        name = str(client)
        try:
            message = wire.decode(head, data, None)
            if not isinstance(message, Mapping) or message.keys() != {"round", "call", "body"}:
                raise ClientFault(E_FORMAT, "the request is not an envelope")
            round, call = conform(message["round"], int, "round"), conform(message["call"], int, "call")
            name = self._name(client)
            if handler == HELLO:
                value = self._hello(name, message["body"])
            else:
                payload = self.silos.conform(handler, message["body"])
                (value,) = self.silos.answer([Request(name, handler, payload, round, call)])
            if isinstance(value, ClientFault):
                raise value
            return _halves(codec.envelope(round, call, value))
        except ClientFault as bad:
            fault = bad
        except (Exception, SystemExit) as error:
            self._on_error(name, "".join(traceback.format_exception(error)))
            # A silo's own paths and values are in the text: the server is told the kind only.
            text = "see the site's errors.log" if self._own else first_line(error)
            fault = ClientFault(E_EXCEPTION, f"{type(error).__name__}: {text}")
        told = {"code": fault.code, "reason": fault.reason[:400]}
        return _halves({"round": round, "call": call, "fault": told})

    def _name(self, client: ClientId | int) -> ClientId:
        if self._own is not None:
            return self._own
        return self.client(client) if isinstance(client, int) else client

    def _hello(self, name: ClientId, told: Any) -> dict[str, Any]:
        """Name, versions and the model's fingerprint: rows and model are loaded here, so that round 1 finds them."""
        classes = conform(told, dict[str, Any], "hello").get("classes")
        if classes is not None and classes != self._classes:
            self._classes = conform(classes, list[str], "classes")
            self._remember(self._classes)
            if self._own is not None:
                self.__dict__.pop("silos", None)
        population = self.silos.population
        return {
            "name": name,
            "fedfm": __version__,
            "wire": records.WIRE,
            "model": population.model.fingerprint,
            "own_data": self._own is not None,
        }


def _halves(value: Any) -> tuple[str, bytes]:
    head, pieces = wire.encode(value)
    return head, b"".join(pieces)


def of_experiment(experiment: Experiment, memory: Path, errors: Path) -> Site:
    """A site whose clients hold parts of the experiment's own table.

    Args:
        errors: the folder under whose ``private/`` tracebacks are kept.
    """
    return Site(experiment, memory, lambda classes: populate(experiment), on_error=partial(record_error, errors))


def of_folder(folder: Path) -> tuple[Site, ClientId | int]:
    """The site that ``folder/site.json`` describes, and its client; what it remembers is kept in that folder."""
    told = json.loads((folder / "site.json").read_text(encoding="utf-8"))
    experiment = Experiment.from_dict(tomllib.loads(told["experiment"]))
    (folder / "private").mkdir(mode=0o700, exist_ok=True)
    if not told["silo"]:
        return of_experiment(experiment, folder / "memory", folder), told["client"]
    from fedfm.engines import silofile

    silo = silofile.load(Path(told["silo"]))

    def remember(classes: Sequence[str]) -> None:
        text = json.dumps(told | {"classes": list(classes)})
        store.write_atomic(folder / "site.json", text.encode(), 0o600)

    site = Site(
        experiment,
        folder / "memory",
        lambda classes: silofile.populate(silo, experiment, classes),
        classes=told.get("classes"),
        remember=remember,
        allow=silo.allow,
        on_error=partial(record_error, folder),
        own=silo.name,
    )
    return site, silo.name
