"""A silo's own file: who it is, which rows it has and what they hold, what it loads and what it answers.

    name = "hospital-a"
    data = "/srv/fedfm/train.csv"           # csv, jsonl(.gz), parquet, npz, txt or an image folder
    label = "diagnosis"                     # columns, as in [data]; shown: text, image, label, label_name, split, ...
    classes = ["benign", "malignant"]       # as the federation agreed; absent: those of the rows, no more and no fewer
    models = ["/srv/models/bert-small"]     # folders and hub ids that experiments may name, beside the built-in ones
    methods = ["my_methods:Cautious"]       # code beside fedfm's own that experiments may name
    downloads = false                       # true: what a hub id in models names is downloaded
    allow = ["mean", "scores"]              # what requests may expose of it: mean, reply, scores, reveal

    [allow_by_method]                       # in place of allow, for single methods
    fedpft = ["reply"]

The server never sees this file, and nothing that it sends changes what the file says: an experiment that names another
model, class or method is refused, its columns and its paths are not read. With ``allow = ["mean"]`` the silo takes part
in means (of which the server sees what the aggregation shows it), and the server gets no single replies, nor the silo's
accuracy on its own test rows; with ``allow = []`` it takes part in nothing. See :mod:`fedfm.privacy.policy`.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedfm.config.experiment import Experiment
from fedfm.config.registry import admit_any, available
from fedfm.config.toml import build
from fedfm.core.fields import check as check_fields
from fedfm.core.fields import setting
from fedfm.data.sources._files import listing
from fedfm.data.spec import CLIENT_NAME, WITHHELD, DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError, close, listed
from fedfm.models.names import BUILT_IN
from fedfm.models.spec import ModelSpec
from fedfm.privacy.policy import WORDS, Policy
from fedfm.runtime.population import Partitioned

_EXPOSED = {
    "mean": "its update, in a mean",
    "reply": "single replies, which the server sees one by one",
    "scores": "scores on its own rows",
    "reveal": "its own final model",
}
_MOST = 0.5  # share of the rows that an experiment may keep from training, for tests and for validation
COLUMNS = ("text", "image", "label", "label_name", "split", "instruction", "output")


def _column(name: str) -> Any:
    return field(default=name, metadata={"help": f"name of the {name.replace('_', ' ')} column"})


@dataclass(frozen=True)
class Silo:
    """A silo's file."""

    name: str = setting(
        "",
        "the silo's name at the server",
        required=True,
        pattern=CLIENT_NAME,
        words='letters, digits, "-", "_" and "." only',
    )
    data: str = setting(
        "", "its rows; relative to this file", required=True, words="the file or folder of this silo's rows"
    )
    allow: tuple[str, ...] = setting(
        WORDS,
        "what requests may expose of it: mean (its update goes into one), reply (the server sees it by itself), "
        "scores (metrics on its rows), reveal (its own final model)",
        choices=WORDS,
    )
    allow_by_method: dict[str, tuple[str, ...]] = setting(
        dict, "the same for single methods, in place of allow", choices=WORDS
    )
    classes: tuple[str, ...] | None = setting(
        None, "class names that the federation agreed on, in order [those of the rows]"
    )
    models: tuple[str, ...] = setting((), "folders and hub ids that experiments may name, beside the built-in models")
    methods: tuple[str, ...] = setting((), 'methods and aggregations beside fedfm\'s own, e.g. "my_methods:Cautious"')
    downloads: bool = setting(False, "whether models are downloaded from a hub")
    text: str = _column("text")
    image: str = _column("image")
    label: str = _column("label")
    label_name: str = _column("label_name")
    split: str = _column("split")
    instruction: str = _column("instruction")
    output: str = _column("output")

    @property
    def policy(self) -> Policy:
        """What it lets out."""
        return Policy(self.allow, self.allow_by_method)


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
        for name in silo.policy.allow_by_method.keys() - set(silo.methods) - set(known := available("methods")):
            raise InputError(f'allow_by_method: method = "{name}": expected {listed(known)}{close(name, known)}')
        check_fields(silo, "")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    models = tuple(_absolute(path, model) if _is_path(path, model) else model for model in silo.models)
    return replace(silo, data=_absolute(path, silo.data), models=models)


def _absolute(path: Path, text: str) -> str:
    return str((path.parent / Path(text).expanduser()).resolve())


def _is_path(path: Path, model: str) -> bool:
    return model.startswith((".", "~", "/")) or Path(_absolute(path, model)).exists()


def admit_methods(silo: Silo, path: Path) -> None:
    """Import what the silo lists, so that experiments may name it; modules may lie beside the silo's file.

    Raises:
        InputError: something cannot be imported, or is neither a method nor an aggregation.
    """
    if silo.methods:
        sys.path.append(str(path.parent))
    for name in silo.methods:
        admit_any(name, f"{path}: methods")


def deal(silo: Silo, spec: DataSpec, *, seed: int, task: str | None) -> Any:
    """The silo's rows, as the one client of a federation: of the experiment's [data] scale and splits alone count."""
    from fedfm.data.load import load_table
    from fedfm.data.partition import deal as dealt

    columns = {name: getattr(silo, name) for name in COLUMNS}
    kept = {key: getattr(spec, key) for key in ("test_fraction", "val_fraction", "scale")}
    own = DataSpec(clients={silo.name: silo.data}, **columns, **kept)
    return dealt(load_table(own, seed=seed, task=task), own, seed=seed)


def check(silo: Silo, experiment: Experiment) -> None:
    """Refuse settings of an experiment that would show more than the silo's policy lets out.

    Raises:
        InputError: few rows would be left to train on, and an update of few rows tells them; or the silo's accuracy
            would travel beside its updates.
    """
    for key in ("test_fraction", "val_fraction"):
        if not getattr(experiment.data, key) <= _MOST:
            raise InputError(f"data.{key} = {getattr(experiment.data, key)}: at a silo at most {_MOST} of the rows")
    if experiment.run.local_scores and "scores" not in silo.policy.of(experiment.method_name):
        raise InputError('run.local_scores: it tells the silo\'s accuracy, and "scores" is not in allow')


def listed_model(silo: Silo, spec: ModelSpec) -> ModelSpec:
    """The model that an experiment names, as the silo has it: a built-in one, or one that the silo lists.

    A folder is found by its last part, too: at the server it lies somewhere else. That it is the same model, the server
    sees from its fingerprint.

    Raises:
        InputError: the silo lists no such model.
    """
    if spec.name == "features" or spec.name in BUILT_IN:
        return spec
    for model in silo.models:
        if spec.name == model or Path(spec.name).name == Path(model).name:
            return replace(spec, name=model)
    known = listing(silo.models) if silo.models else "none"
    raise InputError(f'model.name = "{spec.name}": not among the models of this silo\'s file, which lists {known}')


def populate(silo: Silo, experiment: Experiment, classes: Sequence[str]) -> Partitioned:
    """The silo's rows and a model that it lists, for the classes that the server names.

    Raises:
        InputError: the experiment does not fit the silo: its model, its classes, its task.
    """
    from fedfm.models.load import load_model

    seed, task = experiment.run.seed, experiment.model.task
    federated = deal(silo, experiment.data, seed=seed, task=task)
    table = _with_classes(silo, federated.table, tuple(classes))
    if experiment.model.name == WITHHELD:
        return Partitioned(replace(federated, table=table), None)
    model = load_model(
        listed_model(silo, experiment.model),
        classes=table.classes,
        kind=table.kind,
        task=task,
        seed=seed,
        feature_dim=table.inputs.shape[1] if table.kind == "features" else None,
    )
    model.kernels = experiment.run.kernels
    return Partitioned(replace(federated, table=table), model)


def _with_classes(silo: Silo, table: Table, classes: tuple[str, ...]) -> Table:
    """The rows with their labels counted in the federation's classes.

    Raises:
        InputError: those are not the classes that the silo agreed to.
    """
    agreed = _agreed(silo, table)
    if classes != agreed:
        raise InputError(
            f"the server's classes are {listing(classes, 20)}, and this silo's {listing(agreed, 20)}: if they are "
            "agreed, write them into silo.toml as classes = [...], in this order"
        )
    if table.labels is None or table.classes == agreed:
        return table
    code = {name: index for index, name in enumerate(agreed)}
    labels = np.array([code[name] for name in table.classes], dtype=np.int64)[table.labels]
    return replace(table, labels=labels, classes=agreed)


def _agreed(silo: Silo, table: Table) -> tuple[str, ...]:
    """The federation's classes as the silo's file has them, else those of its rows."""
    agreed = table.classes if silo.classes is None or table.labels is None else silo.classes
    if unknown := [name for name in table.classes if name not in agreed]:
        raise InputError(f"{silo.data}: rows of class {listing(unknown, 8)}, which classes does not list")
    return agreed


def report(path: Path) -> dict[str, Any]:
    """What ``fedfm silo`` prints: name, rows, classes, and what the policy lets out."""
    silo = load(path)
    admit_methods(silo, path)
    federated = deal(silo, DataSpec(), seed=0, task=None)
    rows = federated.clients[silo.name]
    return {
        "name": silo.name,
        "data": silo.data,
        "rows": {"train": len(rows.train), "val": len(rows.val), "test": len(rows.test)},
        "classes": list(_agreed(silo, federated.table)),
        "models": list(silo.models),
        "methods": list(silo.methods),
        "downloads": silo.downloads,
        "allow": list(silo.allow),
        "allow_by_method": {name: list(words) for name, words in silo.allow_by_method.items()},
        "takes_part": bool(silo.policy.words),
        "shows_single_replies": "reply" in silo.policy.words,
        "notices": list(federated.notices),
    }


def described(found: Mapping[str, Any]) -> str:
    """What :func:`report` found, in lines."""
    rows = found["rows"]
    policies = {"": found["allow"], **{f" of method {m}": words for m, words in found["allow_by_method"].items()}}
    lines = [
        f"{found['name']}: {rows['train']} training, {rows['val']} validation and {rows['test']} test rows, "
        f"{len(found['classes'])} classes",
        *(f"exposes{of}: {', '.join(_EXPOSED[word] for word in words) or 'nothing'}" for of, words in policies.items()),
        f"loads {', '.join(['built-in models', *found['models']])}; "
        f"{'downloads what is missing' if found['downloads'] else 'downloads nothing'}",
        f"runs {', '.join(['built-in methods', *found['methods']])}",
    ]
    return "\n".join([*lines, *found["notices"]])
