"""A silo's own file: its name, its rows, the models and code it loads, and the requests it answers.

    name = "hospital-a"
    data = "/srv/fedfm/train.csv"           # csv, jsonl(.gz), parquet, npz, txt or an image folder
    label = "diagnosis"                     # name of a column, as in [data]; also text, image, label_name, split, ...
    classes = ["benign", "malignant"]       # as the federation agreed; default: exactly the classes of the rows
    models = ["/srv/models/bert-small"]     # folders and hub ids that experiments may name, as well as built-in models
    methods = ["my_methods:Cautious"]       # code from outside fedfm that experiments may name
    device = "cuda:1"                       # the model's device; default: the device that the experiment names
    processes = 8                           # processes that share the model's weights, each with a GPU; default: 1
    launch = "srun --ntasks=8"              # the command that starts them; default: on this machine
    downloads = false                       # true: hub ids in models are downloaded
    allow = ["mean", "scores"]              # what requests may expose: mean, reply, scores, reveal
    allow_methods = ["fedavg", "fedpft"]    # the only methods that experiments may name; default: all
    allow_tasks = ["classification"]        # the only tasks that experiments may train; default: all
    ledger = "silo.ledger.jsonl"            # the file that lists all messages that left; this is the default
    predict = "new.npz"                     # rows without labels, for runs that predict
    identity = "silo.key"                   # file of the key that signs for the silo, see fedfm.sites.identity
    roster = "roster.toml"                  # the other silos' public keys
    server = "64 hexadecimal digits"        # the server's public key, for `fedfm silo serve`

    [allow_by_method]                       # replaces allow for single methods
    fedpft = ["reply"]

    [require]                               # properties that every experiment must have
    aggregator = "secagg"
    smallest_cohort = 5

    [budget]                                # limits on the silo's answers in its lifetime, over all runs
    epsilon = 8.0
    rounds = 100

The server never sees this file and cannot override it by messages: the silo refuses an experiment that names another
model, class or method, and ignores the experiment's columns and paths. With ``allow = ["mean"]`` the silo takes part in
means only; the aggregation decides whether the server sees more than the mean. The server gets neither single replies
nor the silo's accuracy on its own test rows. With ``allow = []`` the silo answers no request. See
:mod:`fedfm.privacy.policy`.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedfm.config.faults import read_all
from fedfm.config.registry import admit_any, available
from fedfm.config.toml import build
from fedfm.config.user_code import admit_function, is_function
from fedfm.core import tasks
from fedfm.core.fields import check as check_fields
from fedfm.core.fields import setting
from fedfm.core.open_settings import OpenSettings, Setting
from fedfm.core.text import NAME, NAME_WORDS, several
from fedfm.data.class_names import check_list
from fedfm.data.spec import DataSpec
from fedfm.errors import Faults, InputError, close, quote_names, reason_of
from fedfm.privacy.exposure import WORDS
from fedfm.privacy.policy import Budget, Policy, Requirements
from fedfm.runtime.own_rows import OwnRows, classes_of, columns_of, deal
from fedfm.sites import identity as silo_identity

EXPOSED = {
    "mean": "its update, in a mean",
    "reply": "single replies, which the server sees one by one",
    "scores": "scores on its own rows",
    "reveal": "its own final model",
}
_ENDLESS = "has no limit on answers: budget.rounds or budget.epsilon can set one"
_HELP = "name of the {} column"


def _column(name: str) -> Any:
    return field(default=name, metadata={"help": _HELP.format(name.replace("_", " "))})


@dataclass(frozen=True)
class Silo(OpenSettings):
    """The settings in a silo's file."""

    name: str = setting(
        "",
        "the silo's name at the server",
        required=True,
        pattern=NAME,
        words=NAME_WORDS,
    )
    data: str = setting(
        "",
        'the silo\'s rows, relative to this file; or its own "module:function", which returns rows and a model',
        required=True,
        words="the file or folder of this silo's rows",
    )
    task: str | None = setting(
        None,
        "the task of its rows for `fedfm silo check`, if they do not imply it; an experiment names its own",
        choices=tasks.names(),
    )
    allow: tuple[str, ...] = setting(
        WORDS,
        "what requests may expose: mean (the silo's update, in a mean), reply (single replies, which the server sees), "
        "scores (metrics on the silo's rows), reveal (the silo's own final model)",
        choices=WORDS,
    )
    allow_by_method: dict[str, tuple[str, ...]] = setting(dict, "replaces allow for single methods", choices=WORDS)
    allow_methods: tuple[str, ...] | None = setting(None, "the only methods that experiments may name [all]")
    allow_tasks: tuple[str, ...] | None = setting(
        None, "the only tasks that experiments may train, named or implied by the rows [all]", choices=tasks.names()
    )
    require: Requirements = setting(Requirements, "properties that every experiment must have")
    budget: Budget = setting(Budget, "limits on the answers that the silo gives in its lifetime, over all runs")
    predict: str = setting("", "rows to predict, without labels, for runs that predict; relative to this file")
    ledger: str = setting("", "the list of all messages that left [next to this file, with the suffix .ledger.jsonl]")
    identity: str = setting("", "the file of the key that signs for the silo under secagg [a new key in each run]")
    roster: str = setting(
        "", "a TOML or JSON file with public keys by silo, agreed without the server [keys are trusted on first use]"
    )
    server: str = setting(
        "",
        'the server\'s public key, for `fedfm silo serve`: `fedfm run` on engine = "folder" prints it',
        pattern="|[0-9a-f]{64}",
        words="64 hexadecimal digits",
    )
    classes: tuple[str, ...] | None = setting(
        None, "class names that the federation agreed on, in order [the classes of the rows]"
    )
    models: tuple[str, ...] = setting(
        (),
        'folders, hub ids and functions ("module:function") that experiments may name, in addition to the built-in '
        "models",
    )
    methods: tuple[str, ...] = setting((), 'methods and aggregations from outside fedfm, e.g. "my_methods:Cautious"')
    device: str = setting(
        "",
        "this silo's device for the model: auto, cpu, cuda, cuda:1, mps, auto-map [the experiment's]",
        pattern="|auto-map|(auto|cpu|cuda|mps)(:.*)?",
        words='"auto", "cpu", "cuda", "mps" or "auto-map"',
    )
    processes: int = setting(
        1, "processes that compute the model together, each with a part of every weight", ge=1, le=4096
    )
    launch: str = setting(
        "",
        "the command line that starts these processes, e.g. torchrun or srun, on other machines, too [this machine]",
    )
    downloads: bool = setting(False, "whether models are downloaded from a hub")
    text: str = _column("text")
    image: str = _column("image")
    label: str = _column("label")
    label_name: str = _column("label_name")
    split: str = _column("split")

    @property
    def rows(self) -> OwnRows:
        """The settings of the silo's rows and models."""
        of = columns_of(self)
        paths = self.name, self.data, self.classes, self.models, self.device, self.predict
        return OwnRows(*paths, self.processes, self.launch, of)

    @property
    def policy(self) -> Policy:
        return Policy(self.allow, self.allow_by_method)

    @classmethod
    def setting_of(cls, key: str) -> Setting | None:
        return tasks.data_setting(key, _HELP)

    @classmethod
    def all_keys(cls) -> dict[str, Setting]:
        return tasks.data_settings(_HELP)


def _read(table: Mapping[str, Any]) -> Silo:
    silo: Silo = build(Silo, table, "")
    faults, bounds, known = Faults(), Faults(), available("methods")
    with faults:
        Policy(silo.allow, silo.allow_by_method)
    for name in [n for n in silo.allow_by_method if n not in (*silo.methods, *known)]:
        text = f'allow_by_method: method = "{name}": expected {quote_names(known)}{close(name, known)}'
        faults.say(text, key="allow_by_method")
    for name in [n for n in silo.allow_methods or () if n not in (*silo.methods, *known)]:
        text = f'allow_methods: "{name}": expected {quote_names(known)}{close(name, known)}'
        faults.say(text, key="allow_methods")
    with bounds:
        check_fields(silo, "")
    with faults:
        check_list(silo.classes or (), "classes")
    if silo.launch and silo.processes == 1:
        faults.say(f'launch = "{silo.launch}": set processes to the number of processes that it starts', key="launch")
    # Policy reports wrong words in allow and allow_by_method in more detail, so drop what check_fields found in them.
    faults.found += [fault for fault in bounds.found if fault.key not in ("allow", "allow_by_method")]
    faults.refuse()
    return silo


def load(path: Path) -> Silo:
    """Read a silo's file.

    Raises:
        InputError: the file is absent, not TOML, or has wrong keys or values; the error has a line for each.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; a silo's file has name, data and allow") from None
    except IsADirectoryError:
        raise InputError(f"{path}: this is a folder without a kit; expected a silo's file, as silo.toml") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {reason_of(error)}") from None
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not TOML, or too many digits
        raise InputError(f"{path}: not TOML: {reason_of(error)}") from None
    silo = read_all(path, table, _read)

    def absolute(text: str) -> str:
        return str((path.parent / Path(text).expanduser()).resolve())

    models = (absolute(m) if m.startswith((".", "~", "/")) or Path(absolute(m)).exists() else m for m in silo.models)
    ledger = absolute(silo.ledger or path.with_suffix(".ledger.jsonl").name)
    identity, roster = (absolute(text) if text else "" for text in (silo.identity, silo.roster))
    predict = absolute(silo.predict) if silo.predict else ""
    silo = replace(silo, identity=identity, roster=roster, predict=predict)
    data = silo.data if is_function(silo.data) else absolute(silo.data)
    return replace(silo, data=data, models=tuple(models), ledger=ledger)


def admit_methods(silo: Silo, path: Path) -> None:
    """Import the code that the silo lists, so that experiments may name it; modules may be in the silo file's folder.

    Raises:
        InputError: a name cannot be imported, or is neither a method nor an aggregation.
    """
    functions = {name: key for key, names in (("data", [silo.data]), ("models", silo.models)) for name in names}
    functions = {name: key for name, key in functions.items() if is_function(name)}
    if silo.methods or functions:
        sys.path.append(str(path.parent))
    for name, key in functions.items():
        admit_function(name, f"{path}: {key}")
    for name in silo.methods:
        admit_any(name, f"{path}: methods")


def report(path: Path) -> dict[str, Any]:
    """Return the output of ``fedfm silo check``: name, rows, classes, and the requests that the policy allows."""
    from fedfm.data.similar_names import spellings

    silo = load(path)
    admit_methods(silo, path)
    identity = silo_identity.of(silo, create=True)
    federated = deal(silo.rows, DataSpec(), seed=0, task=silo.task)
    rows, table = federated.clients[silo.name], federated.table
    word = tasks.class_word(table.kind, silo.task)
    return {
        "name": silo.name,
        "data": silo.data,
        "rows": {"train": len(rows.train), "val": len(rows.val), "test": len(rows.test)},
        "classes": list(classes_of(silo.rows, table, silo.task)),
        "class_word": word,
        "models": list(silo.models),
        "methods": list(silo.methods),
        "device": silo.device or None,
        "processes": silo.processes,
        "launch": silo.launch,
        "downloads": silo.downloads,
        "allow": list(silo.allow),
        "allow_by_method": {name: list(words) for name, words in silo.allow_by_method.items()},
        "allow_methods": None if silo.allow_methods is None else list(silo.allow_methods),
        "allow_tasks": None if silo.allow_tasks is None else list(silo.allow_tasks),
        "require": {key: value for key, value in asdict(silo.require).items() if value},
        "budget": {key: value for key, value in asdict(silo.budget).items() if value is not None},
        "ledger": silo.ledger,
        "public_key": identity.public,
        "server": silo.server or None,
        "roster": None if identity.roster is None else sorted(identity.roster),
        "takes_part": bool(silo.policy.words),
        "shows_single_replies": "reply" in silo.policy.words,
        "notices": [*federated.notices, *spellings(table.classes, word)],
    }


def render(found: Mapping[str, Any]) -> str:
    """Format the result of :func:`report` as text."""
    rows, classes, word = found["rows"], found["classes"], found["class_word"]
    policies = {"": found["allow"], **{f" under method {m}": words for m, words in found["allow_by_method"].items()}}
    runs = ["built-in methods", *found["methods"]] if found["allow_methods"] is None else found["allow_methods"]
    lines = [
        f"{found['name']}: {rows['train']} training, {rows['val']} validation and {rows['test']} test rows"
        f"{f', {len(classes)} {word if len(classes) == 1 else several(word)}' if classes else ''}",
        *(f"exposes{of}: {', '.join(EXPOSED[word] for word in words) or 'nothing'}" for of, words in policies.items()),
        f"loads {', '.join(['built-in models', *found['models']])}; "
        f"{'downloads what is missing' if found['downloads'] else 'downloads nothing'}",
        f"runs {', '.join(runs) or 'nothing'}",
        *([] if found["allow_tasks"] is None else [f"trains {', '.join(found['allow_tasks']) or 'nothing'}"]),
        *([f"computes a model with {found['processes']} processes"] if found["processes"] > 1 else []),
        *(f"requires {key} = {json.dumps(value)}" for key, value in found["require"].items()),
        *(f"discloses at most {key} = {value} in all runs" for key, value in found["budget"].items() if key != "delta"),
        *([] if found["budget"].keys() & {"rounds", "epsilon"} else [_ENDLESS]),
        f"lists in {found['ledger']} all messages that leave it",
        *([f"answers the files of the server {found['server']}"] if found["server"] else []),
        f"signs as {found['public_key'] or 'a new key in each run'}",
        f"knows the keys of {', '.join(found['roster'])}"
        if found["roster"]
        else "trusts the other silos' keys on first use",
    ]
    return "\n".join([*lines, *found["notices"]])
