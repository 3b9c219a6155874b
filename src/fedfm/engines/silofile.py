"""A silo's own file: who it is, where its rows lie, and which handlers it answers. The server never sees it.

    name = "hospital-a"
    data = "/srv/fedfm/train.csv"           # csv, jsonl(.gz), parquet, npz, txt or an image folder
    allow = ["train.*", "query.hello"]      # patterns; what none of them matches is refused

With ``train.*`` alone the silo takes part in means (of which the server sees what the aggregator shows it), and the
server gets no single replies, nor the silo's accuracy on its own test rows.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedfm.data.sources._files import listing
from fedfm.data.spec import DataSpec, PartitionSpec
from fedfm.errors import InputError
from fedfm.experiment import Experiment
from fedfm.population import Partitioned
from fedfm.tables import build

_PATTERN = re.compile(r"\*|(train|query)\.[\w*?]+")


@dataclass(frozen=True)
class Silo:
    """A silo's file."""

    name: str = field(default="", metadata={"help": "the silo's name at the server"})
    data: str = field(default="", metadata={"help": "its rows; relative to this file"})
    allow: tuple[str, ...] = field(default=("*",), metadata={"help": "patterns of handlers that it answers"})


def load(path: Path) -> Silo:
    """Read a silo's file.

    Raises:
        InputError: the file is absent, not TOML, or says something that makes no sense.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; a silo's file has name, data and allow") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    try:
        silo: Silo = build(Silo, table, "")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if not re.fullmatch(r"[^\W_][\w.-]*", silo.name):
        raise InputError(f'{path}: name = "{silo.name}": letters, digits, "-", "_" and "." only, and not none')
    if not silo.data:
        raise InputError(f"{path}: data is missing: the file or folder of this silo's rows")
    for pattern in silo.allow:
        if not _PATTERN.fullmatch(pattern):
            raise InputError(f'{path}: allow: "{pattern}" matches no handler; e.g. "train.*", "query.FedAvg_evaluate"')
    return replace(silo, data=str((path.parent / Path(silo.data).expanduser()).resolve()))


def deal(silo: Silo, spec: DataSpec, *, seed: int, task: str | None) -> Any:
    """The silo's rows, as the one client of a federation: columns, scale and splits as the experiment says."""
    from fedfm.data.load import load_table
    from fedfm.data.partition import deal as dealt

    own = replace(spec, name=None, path=None, hub=None, where=None, limit=None)  # they say which are the server's rows
    own = replace(own, clients={silo.name: silo.data}, partition=PartitionSpec())
    return dealt(load_table(own, seed=seed, task=task), own, seed=seed)


def populate(silo: Silo, experiment: Experiment, classes: Sequence[str] | None) -> Partitioned:
    """The silo's rows and the experiment's model, with the server's classes.

    Raises:
        InputError: the silo holds rows of a class that the server does not know.
    """
    from fedfm.models.load import load_model

    seed, task = experiment.run.seed, experiment.model.task
    federated = deal(silo, experiment.data, seed=seed, task=task)
    table = federated.table
    if classes is not None and tuple(classes) != table.classes and table.labels is not None:
        code = {name: index for index, name in enumerate(classes)}
        if unknown := [name for name in table.classes if name not in code]:
            raise InputError(
                f"{silo.data}: rows of class {listing(unknown, 8)}, which the federation does not know; "
                f"it knows {listing(code, 20)}"
            )
        labels = np.array([code[name] for name in table.classes], dtype=np.int64)[table.labels]
        table = replace(table, labels=labels, classes=tuple(classes))
        federated = replace(federated, table=table)
    model = load_model(
        experiment.model,
        classes=table.classes,
        kind=table.kind,
        task=task,
        seed=seed,
        feature_dim=table.inputs.shape[1] if table.kind == "features" else None,
    )
    model.kernels = experiment.run.kernels
    return Partitioned(federated, model)


def report(path: Path) -> dict[str, Any]:
    """What ``fedfm silo`` prints: name, rows, classes, and what the policy lets out."""
    silo = load(path)
    federated = deal(silo, DataSpec(), seed=0, task=None)
    rows = federated.clients[silo.name]
    return {
        "name": silo.name,
        "data": silo.data,
        "rows": {"train": len(rows.train), "val": len(rows.val), "test": len(rows.test)},
        "classes": list(federated.table.classes),
        "allow": list(silo.allow),
        "shows_single_replies": any(p == "*" or (p.startswith("query.") and p != "query.hello") for p in silo.allow),
        "notices": list(federated.notices),
    }
