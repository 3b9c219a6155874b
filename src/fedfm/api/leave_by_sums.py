"""Let a client leave a finished run by its own sums: the server's sums minus these are the sums of the others.

Nobody else takes part and no rows are read, so this works where each silo has its rows on its own machine.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedfm.api import own_sums
from fedfm.api.predict import load
from fedfm.core import storage
from fedfm.core.text import to_json
from fedfm.errors import InputError
from fedfm.linalg.params import Params, sha256_of
from fedfm.reports import html
from fedfm.runtime import logs
from fedfm.runtime.result import write_models
from fedfm.runtime.result_match import final_state
from fedfm.runtime.run_directory import Run
from fedfm.runtime.run_folder import refuse_used, settings_of_rounds

# entries of the manifest that the new run keeps
KEPT = ("fingerprints", "model", "guarantee", "seen", "do_not_share", "ledger")
SCORES = ("accuracy", "global_accuracy", "local_accuracy", "local_loss", "balanced_accuracy", "macro_f1", "loss")


def check(run: Run, name: str) -> None:
    """Refuse a client if subtracting its sums would not give the others' model, or would disclose another's sums.

    Raises:
        InputError: the message says why.
    """
    own_sums.method_with_sums(run)
    own_sums.check_in_sum(run, name)
    hidden = own_sums.is_hidden(run)
    others = [c for c in own_sums.in_sum(run) if c != name]
    if hidden and len(others) < own_sums.LEAST:
        raise InputError(
            f"{run.path}: without {name} the sum is that of {' and '.join(others) or 'nobody'} alone, which secure "
            "aggregation hid: run the experiment again"
        )
    if run.manifest["split"] is not None:
        raise InputError(
            f"{run.path}: its rows are on this machine: leave out --sums, and the others send their own again, with "
            "scores and an attack on the result"
        )


def make_run(run: Run, name: str, file: Path, without: Any, out: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """Make the run without a client from the client's own sums.

    Args:
        file: the client's sums, from :func:`fedfm.api.own_sums.write`.
        without: the experiment without the client.
        entry: the certificate, as far as it does not depend on the sums.

    Returns:
        The certificate of the new run.

    Raises:
        InputError: the sums are not the client's, or another run is in ``out``.
    """
    began, experiment = time.perf_counter(), run.experiment
    method = own_sums.method_with_sums(run)
    state = final_state(run, Params)
    _, sums = own_sums.read(run, state, file, name)
    given = {name: sums.sha256()}
    own_sums.check_others(run, given)
    rest = own_sums.subtract(method, state, sums, name)
    _, model, _ = load(run.path)
    now = method.state_of(model, rest, experiment.run.seed)
    record, _ = run.newest()
    assert record is not None  # noqa: S101 - state() has read it
    with _begin(without, out) as new:
        w = {"": method.params_for(now, "")}
        others = [c for c in run.manifest["clients"] if c != name]
        seconds = time.perf_counter() - began
        entry["removed"] |= {"sums_sha256": given[name]}
        nothing = {"bytes_up": 0, "bytes_down": 0, "messages": 0, "seconds": seconds, "cohort": others}
        nothing["experiment"] = to_json(settings_of_rounds(new.manifest["experiment"]))
        storage.save(new.checkpoint(1), {**record, **nothing, "state": now})
        if (start := storage.load(run.checkpoint(0))) is not None:
            storage.save(new.checkpoint(0), start)
        write_models(new, model, w)
        for t, cohort in enumerate(([], others)):
            new.log({"round": t, "seconds": round(seconds, 3), "cohort": cohort, "excluded": [], "train_loss": None})
        result = copy.deepcopy(run.manifest["result"])
        result |= dict.fromkeys(SCORES) | {"client_accuracy": {}, "details": experiment.method.details(now, None)}
        result |= {"run": str(out), "seconds": round(seconds, 3), "bytes_up": 0, "bytes_down": 0}
        result |= {"params_sha256": sha256_of(w), "engine": without.run.engine}
        new.manifest |= {key: copy.deepcopy(run.manifest[key]) for key in KEPT if key in run.manifest}
        new.manifest |= {"clients": others, "result": result}
        new.manifest["departures"] = [*run.manifest.get("departures", ()), entry]
        new.manifest["finished"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        new.write_manifest()
        (new.path / logs.MESSAGES).touch()
        own_sums.enter_opened(run, given, new)
    html.renew(out)
    return entry


@contextlib.contextmanager
def _begin(without: Any, out: Path) -> Iterator[Run]:
    """A new run in a hidden folder, which gets its name at the end.

    A process that is killed leaves no run without a result: `fedfm resume` would ask the silos for their sums again.

    Raises:
        InputError: another run is in ``out``.
    """
    refuse_used(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    new = Run.create(without, out.with_name(f".{out.name}.{os.urandom(4).hex()}"))
    try:
        with new.lock():
            yield new
            refuse_used(out)  # another process may have used the folder in the meantime
            os.rename(new.path, out)
    except BaseException:
        shutil.rmtree(new.path, ignore_errors=True)
        raise
