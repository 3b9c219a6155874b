"""``fedfm silo sums``: a silo writes its own sums of a finished run into a file, to leave the run or to be valued.

Under secure aggregation the server has only seen sums over all silos. Anyone who gets this file sees the sums of this
silo alone. So the silo's own file must allow ``reply`` and must not require a sum of several, and the ledger gets a
line before the file is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedfm.api import own_sums
from fedfm.core.new_folders import temporary_folder
from fedfm.core.wire import codec
from fedfm.errors import ClientFault, InputError
from fedfm.linalg.params import Params
from fedfm.linalg.threads import torch_threads
from fedfm.privacy.exposure import EXPOSES
from fedfm.runtime import predictions
from fedfm.runtime.disclosure import check_same
from fedfm.runtime.own_rows import populate
from fedfm.runtime.run_directory import Run
from fedfm.sites import consent_rules, sent_sums, silo_config
from fedfm.sites.ledger import UNBOUNDED, Entry, Ledger, entries, now
from fedfm.sites.ledger_mark import mark_of
from fedfm.sites.silo_config import Silo

WORD = EXPOSES["query"]  # the server sees what this silo alone sends


def report(path: Path, folder: Path, out: Path) -> dict[str, Any]:
    """Write the silo's own sums; return the output of ``fedfm silo sums``.

    Args:
        path: the silo's file.
        folder: a folder with the ``manifest.json`` of the finished run.
        out: the file for the sums.

    Raises:
        InputError: the silo's file does not consent, the run keeps no sums, the silo's rows do not fit the run, or the
            silo did not send these sums.
    """
    silo, run = silo_config.load(path), Run.open(folder)
    silo_config.admit_methods(silo, path)
    own_sums.method_with_sums(run)
    _check_consent(silo, run, path)
    _check_others(silo, run)
    with torch_threads(1), temporary_folder() as memory:
        population = populate(silo.rows, run.experiment, run.manifest["model"]["classes"])
        check_same(run, population.model.fingerprints, "the silo's sums need the original model")
        ledger = Path(silo.ledger)
        record = sent_sums.record_of(run.experiment, population)
        doubt = sent_sums.check(path, run.experiment.method_name, record, entries(ledger))
        population.encode = partial(predictions.encode_rows, run.experiment.method, population.model)
        sums = own_sums.compute(run, silo.name, population, memory)
    try:
        Ledger(ledger, silo.budget, mark_of(path.resolve().parent / ".fedfm", ledger)).enter(_entry(run, sums))
    except ClientFault as fault:
        raise InputError(f"{path}: {fault.reason}") from None
    own_sums.write(run, silo.name, sums, out)
    found = {"name": silo.name, "run": str(folder), "file": str(out), "sha256": sums.sha256(), "ledger": silo.ledger}
    return found | ({"doubt": doubt} if doubt else {})


def render(found: Mapping[str, Any]) -> str:
    """Format the result of :func:`report` as text."""
    return (
        f"{found['name']}: {found['file']} has the sums over its own rows, in the clear, which show what secure "
        f"aggregation hides. {found['ledger']} has a line about it"
        + (f"; {found['doubt']}" if "doubt" in found else "")
    )


def _check_consent(silo: Silo, run: Run, path: Path) -> None:
    """Refuse to write what the silo's file does not allow.

    Raises:
        InputError: the message names the key.
    """
    experiment = run.experiment
    consent_rules.check(silo, experiment)
    method = experiment.method_name
    if WORD not in silo.policy.of(method):
        raise InputError(
            f'{path}: allow: its sums alone are a "{WORD}", which it does not allow for {method}; to consent, write '
            f'allow_by_method = {{ {method} = ["mean", "{WORD}"] }}',
            key="allow",
        )
    if silo.require.aggregator or silo.require.smallest_cohort > 1:
        key = "aggregator" if silo.require.aggregator else "smallest_cohort"
        raise InputError(
            f"{path}: require.{key}: it lets the server see sums of several silos only, and the file for "
            "the sums would have those of one silo; to consent, remove the key",
            key=f"require.{key}",
        )


def _check_others(silo: Silo, run: Run) -> None:
    """Refuse if the file alone would disclose the sums of the only other silo.

    Raises:
        InputError: the run hides the sums of two silos from the server.
    """
    others = [name for name in own_sums.in_sum(run) if name != silo.name]
    if own_sums.is_hidden(run) and 0 < len(others) < own_sums.LEAST:
        raise InputError(
            f"{run.path}: the sums are of {silo.name} and {others[0]} alone, so this file would disclose those of "
            f"{others[0]}, which secure aggregation hid: run the experiment again"
        )


def _entry(run: Run, sums: Params) -> Entry:
    """The line of the ledger about the file."""
    of = run.manifest["result"]["params_sha256"]
    return Entry(
        time=now(),
        run=of[:16],
        experiment=hashlib.sha256(str(run.manifest["experiment"]).encode()).hexdigest(),
        round=1,
        call=1,
        method=run.experiment.method_name,
        handler=f"query.{type(run.experiment.method).__name__}_own_sums",
        exposes=WORD,
        form="plain",
        bytes=codec.weigh(sums),
        sha256=sums.sha256(),
        epsilon=None,
        cost=UNBOUNDED,
        asked=hashlib.sha256(f"own sums of {of}".encode()).hexdigest(),
    )
