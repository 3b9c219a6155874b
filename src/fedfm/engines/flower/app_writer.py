"""Write a Flower app for an experiment. The app is one pyproject.toml that names components of the installed fedfm."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedfm.config.experiment import Experiment
from fedfm.core import storage
from fedfm.core.toml_text import to_inline, to_key, to_toml
from fedfm.engines.flower import run_config, server_app
from fedfm.engines.known_clients import dealt_clients, known_clients
from fedfm.errors import InputError
from fedfm.version import __version__

# Keys of [run] that describe the server's own machine.
_ON_THE_SERVER: dict[str, Any] = dict.fromkeys(("superlink", "root_certificates", "folder", "roster", "identity"))
_FIXED = frozenset(("run.engine", "run.wire", "run.workers"))  # settings of machines, which ``flwr run`` cannot change
PROJECT = "pyproject.toml"
RUNS = "runs"  # the folder of an app in which run directories are
_COMMENTS = (
    "the name of the run directory; the same name and settings continue the run",
    "the folder of run directories",
    "where relative paths start; if it is empty, where the SuperLink was started",
    "'data.limit=50; run.patience=2' sets what this list lacks",
)
_DEMO: dict[str, Any] = {
    "data": {"name": "digits", "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 5}},
    "model": {"name": "nano-vit", "adaptation": {"name": "lora", "rank": 4}},
    "method": {"name": "fedavg", "rounds": 5},
}


def write(folder: str | Path, experiment: str | Path | None = None) -> str:
    """Write a Flower app into ``folder``; returns the commands that run it.

    Raises:
        InputError: the folder already contains an app, or the experiment is invalid.
    """
    folder = Path(folder)
    if (folder / PROJECT).exists():
        raise InputError(f"{folder} already contains a {PROJECT}; name another folder")
    if folder.suffix == ".toml":  # else a slip makes a folder of this name, or refuses the experiment as a file
        raise InputError(
            f"{folder} is not a name for the app's folder; `fedfm app FOLDER --experiment {folder}` makes one"
        )
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; name another folder")
    chosen = Experiment.load(experiment) if experiment else Experiment.from_dict(_DEMO)
    if chosen.method.needs.pooled:
        raise InputError(f'method "{chosen.method_name}" trains on pooled rows: no federation can run it')
    given = tomllib.loads(Path(experiment).read_text(encoding="utf-8-sig")) if experiment else _DEMO
    out, text = folder / RUNS, _settable(folder, chosen, given)
    with storage.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _ignore_runs(folder / ".gitignore")
    if known := chosen.server_only():  # Flower does not bundle the file below, since it has no suffix
        out.mkdir(exist_ok=True)
        value = {key: str(Path(v).resolve()) if v and Path(v).exists() else v for key, v in known.items()}
        storage.write_atomic(out / server_app.SERVER_ONLY, json.dumps(value).encode(), 0o600, of_run=False)
    storage.write_atomic(folder / PROJECT, text.encode(), of_run=False)  # last, so that no app lacks the files above
    return _how_to(folder, chosen)


def _ignore_runs(file: Path) -> None:
    """Add run directories to the user's own .gitignore; what it names, Flower does not bundle."""
    known, line = file.read_bytes() if file.exists() else b"", f"{RUNS}/".encode()
    if line not in known.splitlines():
        storage.write_atomic(
            file, [known, b"" if known.endswith(b"\n") or not known else b"\n", line, b"\n"], of_run=False
        )


def write_app(
    folder: Path, experiment: Experiment, *, out: Path, run: str = "", key: str = "", loopback: bool = False
) -> None:
    """Write the pyproject.toml from which Flower builds the bundle of one run.

    Args:
        out: folder in which the ServerApp writes run directories.
        run: name of the run directory; an existing run of this name is resumed. If it is "", each Flower run makes a
            new directory.
        key: name of this run's folder at each client.
        loopback: whether the command that submits the run also starts the nodes. Such a node does not come back after
            it has ended.
    """
    values: dict[str, Any] = {run_config.OUT: str(out), run_config.RUN: run, "key": key}
    values |= {"loopback": True} if loopback else {}
    text = _project(experiment, _lines(values | {run_config.EXPERIMENT: experiment_text(experiment)}))
    storage.write_atomic(folder / PROJECT, text.encode())


def _settable(folder: Path, experiment: Experiment, given: Mapping[str, Any]) -> str:
    """The pyproject.toml of an app for any machine, whose settings ``flwr run --run-config`` changes.

    Args:
        given: the tables that the user wrote; their keys come first.

    Raises:
        InputError: the experiment cannot run as a deployment.
    """
    start = folder.resolve()
    tables = _tables(experiment, lambda path: os.path.relpath(path.resolve(), start))
    text, defaults = to_toml(tables), _defaults(experiment, given)
    values = run_config.split_settings(text, _FIXED, lambda key: key not in defaults)
    rest, more = values.pop(run_config.EXPERIMENT), values.pop(run_config.SET)
    chosen = {key: value for key, value in values.items() if key not in defaults}
    others = {key: value for key, value in values.items() if key in defaults}
    told = dict(run_config.settings(tables))
    own = {run_config.RUN: "", run_config.OUT: RUNS, run_config.HOME: "", run_config.SET: more}
    return _project(
        experiment,
        [
            "# flwr run . --run-config 'method.rounds=5' changes a key of this list.",
            *_with_comments(own, _COMMENTS),
            "",
            "# What the experiment says",
            *_lines(chosen),
            "",
            "# What it leaves at the default, which may follow from what is set, such as alpha from the rank",
            *_with_comments(others, [to_inline(told[key]) for key in others]),
            "",
            "# Lists, tables of names, and what flwr run cannot change",
            *_lines({run_config.EXPERIMENT: rest}),
        ],
    )


def _with_comments(values: Mapping[str, Any], comments: Iterable[str]) -> list[str]:
    return [f"{line}  # {comment}" for line, comment in zip(_lines(values), comments, strict=True)]


def _defaults(experiment: Experiment, given: Mapping[str, Any]) -> set[str]:
    """The keys that the user did not write, and without which the experiment is the same."""
    tables = _tables(experiment, str)
    keys = {
        key for key, _ in run_config.settings(tables, (bool, int, float, str, list)) if not _at(given, key)
    } - _FIXED
    lean = run_config.split_settings(to_toml(tables), frozenset(), lambda key: key not in keys)
    found = Experiment.from_dict(tomllib.loads(run_config.merge_settings(lean)[run_config.EXPERIMENT])).to_dict()
    missing = object()
    before, after = (dict(run_config.settings(t, (bool, int, float, str, list))) for t in (tables, found))
    return {key for key in keys if before[key] == after.get(key, missing)}


def _at(tables: Mapping[str, Any], key: str) -> bool:
    """Whether the tables have a value at a dotted key; ``adaptation = "lora"`` has one at ``adaptation.name`` only."""
    inner: Any = tables
    for part in key.split("."):
        if not isinstance(inner, Mapping):
            return part == "name"  # adaptation = "lora" is short for { name = "lora" }
        if part not in inner:
            return False
        inner = inner[part]
    return True


def _project(experiment: Experiment, config: Iterable[str]) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", experiment.name.lower()).strip("-") or "experiment"
    app = f"fedfm-{name}"[:32].strip("-")  # the longest name that Flower accepts
    lines = "\n".join(config)
    return f"""[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{app}"
version = "1.0.0"
description = "The experiment {name}, run by fedfm."
license = "Apache-2.0"
dependencies = ["fedfm=={__version__}"]

[tool.hatch.build.targets.wheel]
bypass-selection = true

[tool.flwr.app]
publisher = "fedfm"

[tool.flwr.app.components]
serverapp = "fedfm.apps:server"
clientapp = "fedfm.apps:client"

[tool.flwr.app.config]
{lines}
"""


def experiment_text(experiment: Experiment) -> str:
    """The text of an experiment that the ServerApp and the clients of a deployment receive, with absolute paths."""
    return to_toml(_tables(experiment, lambda path: str(path.resolve())))


def _tables(experiment: Experiment, rename: Callable[[Path], str]) -> dict[str, Any]:
    """The tables of an experiment for a deployment, with its paths renamed."""
    spec = replace(experiment.run, engine="deployment", wire=False, workers=0, **_ON_THE_SERVER)
    tables = replace(experiment, run=spec).for_clients().to_dict()
    return run_config.rename_paths(tables, rename, Path())


def _lines(values: Mapping[str, Any]) -> list[str]:
    """Dotted keys of TOML with their values."""
    return [f"{'.'.join(map(to_key, key.split('.')))} = {to_inline(value)}" for key, value in values.items()]


def _how_to_simulate(folder: Path, experiment: Experiment) -> str:
    """How to run the app on this machine."""
    if (known := known_clients(experiment)) is not None:
        names, source = known
        silos = f"the {len(names)} silos of {source}" if names else "the silos"
        return f"this machine cannot simulate the run: {silos} have the rows"
    if experiment.silos_own_rows and not experiment.data.clients:
        return "this machine cannot simulate the run: the silos have the rows"
    try:
        nodes = len(dealt_clients(experiment))
    except InputError as error:
        return f"this machine cannot simulate the run: the number of clients is not known ({error})"
    return f"""here, simulated:
  export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
  flwr run {folder} --stream --run-config 'home="{folder.resolve()}"' \\
    --federation-config 'num-supernodes={nodes} client-resources-num-cpus=1'"""


def _how_to(folder: Path, experiment: Experiment) -> str:
    return f"""wrote {folder / PROJECT}: experiment "{experiment.name}"

{_how_to_simulate(folder, experiment)}

on real machines, each with fedfm {__version__}, its extra "flower" and the three variables above:
  the operator, once
    flower-superlink --ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key \\
      --enable-supernode-auth --host 127.0.0.1 --port 8444 --database state.db \\
      --disable-runtime-dependency-installation --isolation process --superexec-auth-secret-file secret
    flower-superexec --runtime-api-address 127.0.0.1:8444 --root-certificates ca.crt --superexec-auth-secret-file secret
    # in front of it, at HOST:8443, set up a proxy that only passes /v1/fleet/* and /health: the same port also serves
    # the operator's interface, without a password. `fedfm provision` makes a server with an access gate instead
  each silo, once
    ssh-keygen -t ecdsa -b 384 -N "" -f silo.key              # silo.key.pub goes to the operator
    fedfm silo check silo.toml                                # shows name, rows, classes, models, policy
    flower-supernode --superlink HOST:8443 --root-certificates ca.crt --auth-supernode-private-key silo.key \\
      --node-config 'silo="/path/to/silo.toml"'
  the operator, for every silo and every run
    flwr supernode register silo.key.pub prod --name NAME     # prod: a [superlink.prod] in $FLWR_HOME/config.toml
    flwr run {folder} prod --stream --run-config 'home="{folder.resolve()}"'   # home: where relative paths start
    # --run-config 'run-name="trial-1"' names the run directory; the same name and settings continue it
    # --run-config 'method.rounds=4' changes a setting that pyproject.toml lists,
    # --run-config 'set="run.min_clients=3; run.patience=2"' changes settings that it does not list"""
