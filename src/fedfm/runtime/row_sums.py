"""Keys of a task that are computed from the training rows of all silos: each silo sends sums once, before round 1.

In one process the keys are computed from the rows themselves (:mod:`fedfm.runtime.keys_of_rows`). In a federation
of silos no party has all rows. So each silo sends sums, the server computes the keys, and a second hello has them.
A silo answers no other question until it has the keys. It stores keys and sums, which stay the same during the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, get_type_hints, runtime_checkable

from fedfm.config.experiment import Experiment
from fedfm.core import tasks
from fedfm.core.checks import conform
from fedfm.core.client import Client, action, on_client
from fedfm.core.fields import check
from fedfm.core.method import fraction_of
from fedfm.core.text import listing
from fedfm.errors import E_FIELD, E_REFUSED, ClientFault, InputError, RunError
from fedfm.models.model import Model
from fedfm.runtime.client import Silos
from fedfm.runtime.client_memory import Store

if TYPE_CHECKING:
    from fedfm.core.federation import Federation
    from fedfm.core.rows import Rows
    from fedfm.runtime.run_directory import Run

KEYS = "keys"  # entry of a hello: the keys with their values
_NAME = "row sums"  # name under which a silo stores its sums


@runtime_checkable
class AddsRows(Protocol):
    """A task with keys that are computed from sums over rows.

    Attributes:
        keys_from_sums: names of these keys. The value of a key has one number for each target.
    """

    keys_from_sums: ClassVar[frozenset[str]]

    def sums_of_rows(self, rows: Rows) -> list[float]:
        """The sums over a silo's training rows."""

    def check_sums(self, sums: Sequence[float], names: Sequence[str]) -> None:
        """Raise a ClientFault if no rows can have a silo's sums; ``names`` are the names of the targets."""

    def keys_of_sums(
        self, parts: Sequence[Sequence[float]], names: Sequence[str]
    ) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """The keys, computed from the sums of all silos, and notices; ``names`` are the names of the targets.

        Raises:
            InputError: the model cannot learn from these rows.
        """


def missing_keys(experiment: Experiment) -> tuple[str, str] | None:
    """What the task needs from the rows of all clients, and settings that avoid this need; None if it needs nothing."""
    named = tasks.task_named(experiment.model.task)
    return None if named is None else named.of(experiment.model).reads_all_rows


def check_silos(experiment: Experiment) -> bool:
    """Whether silos with own rows have to send sums for this experiment.

    Raises:
        InputError: the sums would be sent in the clear, but the run uses secure aggregation.
    """
    if (needed := missing_keys(experiment)) is None:
        return False
    if experiment.aggregation.transport.form != "plain":
        what, cure = needed
        raise InputError(f"{what}, and secure aggregation would not hide the silos' sums: {cure}", key="model.task")
    return True


# --- silo -------------------------------------------------------------------------------------------------------------
class RowSums:
    """The client half: a silo computes its sums."""

    @on_client
    def tell(self, client: Client) -> list[float]:
        """The sums over the training rows. During a run the silo repeats its first answer."""
        found = _task(client.model).sums_of_rows(client.data.train)
        return [float(v) for v in json.loads(client.write_once(_NAME, json.dumps(found).encode()))]


_ASKED = f"query.{action(RowSums().tell)}"


class WaitingSilos(Silos):
    """A silo whose task needs keys from the rows of all silos; it answers only :class:`RowSums` until it has them."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        handler = RowSums().tell
        self._handlers[_ASKED], self._hints[_ASKED] = handler, get_type_hints(handler)
        (self._client,) = self.population.clients
        self._store, self._keys = Store(self._memory, self._client), dict[str, list[float]]()
        if KEYS in self._store:
            self._use(json.loads(self._store[KEYS]))

    def permit(self, handler: str) -> None:
        super().permit(handler)
        if not self._keys and handler != _ASKED:
            raise ClientFault(E_REFUSED, "the values that follow from the rows of all silos have not come yet")

    def take(self, values: object) -> None:
        """Use the values of the server's hello from now on.

        Raises:
            ClientFault: they do not fit the task's keys, or differ from earlier values in this run.
        """
        keys = conform(values, dict[str, list[float]], KEYS)
        if not self._keys:
            self._use(keys)
            self._store[KEYS] = json.dumps(keys).encode()
        elif keys != self._keys:
            raise ClientFault(E_REFUSED, f"hello.{KEYS} differ from those at the beginning of this run")

    def _use(self, keys: dict[str, list[float]]) -> None:
        model = self.population.client_model
        if model is None:
            raise ClientFault(E_FIELD, f"hello.{KEYS}: the silo has no model")
        apply_keys(model, keys)
        self._keys = keys


def accept(silos: Silos, values: object) -> None:
    """Give a silo the keys in a hello.

    Raises:
        ClientFault: the silo needs no keys, or cannot use these values.
    """
    if not isinstance(silos, WaitingSilos):
        raise ClientFault(E_FIELD, f"hello.{KEYS}: this experiment needs none")
    silos.take(values)


def apply_keys(model: Model, keys: Mapping[str, Sequence[float]]) -> None:
    """Give a model's task the values of its keys.

    Raises:
        ClientFault: a key is missing or unknown, or its value is out of bounds or has not one number for each target.
    """
    try:
        if keys.keys() != _task(model).keys_from_sums or any(len(v) != len(model.classes) for v in keys.values()):
            raise ClientFault(E_FIELD, f"hello.{KEYS}: expected {listing(sorted(_task(model).keys_from_sums))}")
        given: dict[str, Any] = {key: tuple(values) for key, values in keys.items()}
        spec = replace(model.spec, **given)
        check(spec, "model")
    except InputError as error:
        raise ClientFault(E_FIELD, f"hello.{KEYS}: {error}") from None
    model.spec, model.task = spec, model.task.of(spec)


def _task(model: Model) -> AddsRows:
    task: object = model.task
    if not isinstance(task, AddsRows):
        raise ClientFault(E_FIELD, f'the task "{model.task}" has no keys that follow from sums')
    return task


# --- server -----------------------------------------------------------------------------------------------------------
def known_keys(run: Run, experiment: Experiment) -> dict[str, Any]:
    """The entry of a run's hellos with the keys; empty if the run has no keys yet or needs none."""
    chosen = run.manifest.get("chosen")
    return {KEYS: chosen} if chosen and missing_keys(experiment) is not None else {}


def agree(
    run: Run,
    experiment: Experiment,
    fed: Federation,
    greet: Callable[[Mapping[str, Any]], None],
    notice: Callable[[str], None],
) -> None:
    """Ask the silos for their sums, and give the keys to all parties; a resumed run has its keys already.

    The manifest keeps the keys. A silo that sends no sums takes part with the keys of the others.

    Args:
        experiment: the silos' experiment. The run's own one has keys of the server's rows, which do not count.
        greet: function that sends another hello with these entries to all silos.

    Raises:
        RunError: too few silos sent their sums.
        InputError: the model cannot learn from the silos' rows.
    """
    keys = run.manifest.get("chosen")
    run.experiment = experiment
    for key in _task(fed.model).keys_from_sums:
        run.manifest["experiment"]["model"][key] = getattr(experiment.model, key)
    if not keys:
        needed = missing_keys(experiment) or ("", "")
        keys, notices = _ask(fed, needed)
        if fraction_of(experiment.method) < 1:
            notices.append(f"every silo was asked before round 1, although a round asks only some: {needed[0]}")
        for text in notices:
            notice(text)
        run.manifest["notices"] += [text for text in notices if text not in run.manifest["notices"]]
        run.manifest["chosen"] = keys
        run.write_manifest()
        greet({KEYS: keys})
    apply_keys(fed.model, keys)


def _ask(fed: Federation, needed: tuple[str, str]) -> tuple[dict[str, list[float]], list[str]]:
    """Ask the silos for their sums; return the keys and notices."""
    task, names = _task(fed.model), fed.model.classes
    excluded, cohort = list(fed.excluded), fed.cohort
    fed.begin(0)
    try:
        found = fed.ask(RowSums().tell, counted=False, check=lambda sums: task.check_sums(sums, names))
    except RunError as error:
        raise RunError(f"{error}; {needed[0]}: {needed[1]}") from None
    absent = fed.excluded[len(excluded) :]
    fed.excluded, fed.cohort = excluded, cohort  # a silo without sums may still train
    keys, notices = task.keys_of_sums([*found.values()], names)
    without = [f"{e.client} sent no sums of its rows ({e.code}): the values come from the other silos" for e in absent]
    return {key: list(values) for key, values in keys.items()}, [*notices, *without]
