"""Value the clients of a run whose sums are hidden. A client that agrees to be valued gives its own sums in a file.

Secure aggregation hides each client's message, so nobody can value a client without its help. ``fedfm silo sums``
writes the file. The server's sums minus the sums in the files are the sums of the other clients, which count as one
client.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedfm import seeds
from fedfm.api import own_sums
from fedfm.api.shapley import Array, Coalition, Values, shapley_by_orders, shapley_over_sets
from fedfm.core.kept_sums import sums_of
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.model import Model
from fedfm.runtime.own_rows import OwnRows, columns_of
from fedfm.runtime.own_rows import populate as read_rows
from fedfm.runtime.population import populate
from fedfm.runtime.result_match import final_state
from fedfm.runtime.run_directory import Run


def value(
    run: Run,
    files: Sequence[Path],
    rows: Path | None,
    evaluations: int,
    measure: Callable[[Model, Rows, Params], Array],
    notice: Callable[[str], None],
) -> tuple[Values, Values, dict[str, Any]]:
    """Shapley and leave-one-out values of the clients that gave their sums, and of all others together.

    Args:
        files: one of each client that agrees.
        rows: the rows by which models are valued; None for the global test rows of the run.
        measure: the value of a model.

    Returns:
        Both values, and further entries of the result: ``how``, ``evaluations``, and ``opened`` with the SHA-256 of
        each client's sums.

    Raises:
        InputError: a file is not of this run, the sums of a client without a file would be disclosed, or there are no
            rows by which a model could be valued.
    """
    method, state, seed = own_sums.method_with_sums(run), final_state(run, Params), run.experiment.run.seed
    start = run.state_of(0, Params)
    if start is None:
        raise InputError(f"{run.checkpoint(0)} is missing or damaged; it has the model of no client")
    parts = dict[str, Params]()
    for path in files:
        name, sums = own_sums.read(run, state, path)
        if name in parts:
            raise InputError(f"{path}: the sums of {name} are given twice")
        parts[name] = sums
    opened = {name: sums.sha256() for name, sums in sorted(parts.items())}
    silent = [c for c in own_sums.in_sum(run) if c not in parts]
    own_sums.check_others(run, opened)
    total = sums_of(state)
    if silent:
        rest = f"{len(silent)} others together"
        parts[rest] = own_sums.subtract(method, state, functools.reduce(Params.__add__, parts.values()), "the files")
    model, judged = _judges(run, rows)
    own_sums.enter_opened(run, opened)
    clients = sorted(parts)

    @functools.cache
    def worth_of(chosen: Coalition) -> Array:
        if not chosen:
            return measure(model, judged, method.params_for(start, ""))
        sums = total if len(chosen) == len(parts) else functools.reduce(Params.__add__, (parts[c] for c in chosen))
        w = method.state_of(model, sums, seed)
        return measure(model, judged, method.params_for(w, ""))

    exact = len(clients) < 30 and 2 ** len(clients) <= evaluations
    notice(f"valuing sets of {len(clients)} {'clients' if not silent else 'parts'} by their own sums")
    if exact:
        found = shapley_over_sets(clients, worth_of)
    else:
        found = shapley_by_orders(clients, worth_of, evaluations, seeds.derive(seed, "worth", 1))
    everybody = frozenset(clients)
    alone = {c: worth_of(everybody) - worth_of(everybody - {c}) for c in clients}
    about = {"how": "exact" if exact else "sampled", "evaluations": worth_of.cache_info().currsize, "opened": opened}
    return found, Values(alone, dict.fromkeys(clients, 0.0), found.total), about


def _judges(run: Run, rows: Path | None) -> tuple[Model, Rows]:
    """The model, and the rows by which models are valued: all rows of a file, or the global test rows of the run.

    Raises:
        InputError: there are none.
    """
    experiment = run.experiment
    if rows is not None:
        columns, classes = columns_of(experiment.data), tuple(run.manifest["model"]["classes"])
        name, models = "rows", (experiment.model.name,)
        brought = OwnRows(name, str(rows.resolve()), classes=classes, models=models, columns=columns)
        population = read_rows(brought, experiment, classes)
        return population.model, population.rows(np.arange(len(population.federated.table)))
    if run.manifest["split"] is None:
        raise InputError(f"{run.path}: the silos' rows are not on this machine; give rows to value models by: --rows")
    population = populate(experiment)
    if not len(population.test):
        raise InputError(f"{run.path}: there are no global test rows by which a model could be valued; give --rows")
    return population.model, population.test
