"""The page docs/reference/experiment.md: the keys of an experiment and of other files, from the settings dataclasses.

docs/generate.py writes it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from typing import Any

from fedfm.api.pretrain_spec import PretrainSpec
from fedfm.config.registry import available, resolve
from fedfm.config.run_spec import AsynchronousSpec, RunSpec
from fedfm.core.fields import bounds_of, is_required, leaf, plain_type, settings_of
from fedfm.data.spec import DataSpec, PartitionSpec
from fedfm.encrypted.student.distil_spec import DistilSpec
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.privacy.policy import Budget, Requirements
from fedfm.privacy.spec import PrivacySpec
from fedfm.sites.federation_config import FederationFile
from fedfm.sites.silo_config import Silo
from fedfm.training import Local

GENERATED = "<!-- Written by docs/generate.py from the code: change the code, then run it again. -->"
_HEAD = f"""# The experiment file

{GENERATED}

An experiment is one TOML file. It must have `[data]`, `[model]` and `[method]`; the other tables are optional. fedfm
refuses an unknown key or a value of another type before it computes anything, and names the key. `fedfm check exp.toml`
prints an experiment with all defaults; `fedfm show METHOD` prints one method. Text in brackets says what happens if the
key is absent. The top-level key `name` names the run; by default the name consists of method and data.

`fedfm schema --out fedfm.schema.json` writes a JSON Schema. If the first line of a TOML file is
`#:schema ./fedfm.schema.json`, an editor with a TOML plugin completes keys and marks misspelt keys and wrong values.
"""


def page() -> str:
    """The whole page."""
    parts = [
        _HEAD,
        section(
            "[data]",
            DataSpec,
            "Exactly one of `name`, `path`, `hub`, `clients` and `classes` says where the rows come from.",
        ),
        section("data.partition", PartitionSpec, '`partition = { name = "dirichlet", alpha = 0.1, clients = 10 }`'),
        section("[model]", ModelSpec),
        section("model.adaptation", AdaptationSpec, '`adaptation = { name = "lora", rank = 4 }`'),
        "## [method]\n\n`name` says which method; the other keys depend on it.\n",
        *(method(name) for name in available("methods") if ours(name)),
        "## [method.local]\n\nThe client optimiser; `name` is one of "
        + ", ".join(f"`{n}`" for n in available("optimisers"))
        + ". All have these keys:\n\n"
        + table(Local),
        *(
            f"`{name}`: {_sentence(cls)}\n\n{table(cls, beyond=Local)}" if _own(cls, Local) else ""
            for name, cls in ((n, resolve("optimisers", n)) for n in available("optimisers"))
        ),
        section(
            "[privacy]",
            PrivacySpec,
            "What is protected, and how well. Without this table nothing is. "
            "[hide clients](../how-to/client-privacy.md), [hide rows](../how-to/train-with-dp-sgd.md) and "
            "[one round](../how-to/one-round.md) say which methods take which keys; a combination that would not keep "
            "its promise is refused with the reason.",
        ),
        "## [attack]\n\nWhat some clients do. Without this table all are honest. `name` is one of these.\n",
        *(method(name, "attacks") for name in available("attacks")),
        '## [aggregation]\n\nHow the server combines the updates of a round. Without this table `name = "mean"`.\n',
        *(method(name, "aggregation") for name in available("aggregation")),
        section("[run]", RunSpec),
        section(
            "run.asynchronous",
            AsynchronousSpec,
            "`asynchronous = { buffer = 4 }`: see [slow silos](../how-to/slow-silos.md).",
        ),
        section(
            "[pretrain]",
            PretrainSpec,
            "Not part of an experiment: `fedfm pretrain` takes a file with `[data]`, `[model]` and this table. The "
            "keys of `local` are those of `[method.local]`.",
        ),
        section(
            "[distil]",
            DistilSpec,
            "Not part of an experiment: `fedfm distil` takes a file with `[data]`, `[model]` and this table.",
        ),
        section(
            "A silo's file",
            Silo,
            "Not part of an experiment: `fedfm silo check silo.toml` checks it, and no server sees it.",
        ),
        section("[require] of a silo's file", Requirements),
        section("[budget] of a silo's file", Budget),
        section(
            "A federation's file",
            FederationFile,
            "Not part of an experiment: `fedfm provision federation.toml --out kits` makes a kit for each site of it.",
        ),
    ]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def section(title: str, cls: type, text: str = "") -> str:
    """A heading, a sentence, and the keys."""
    return f"## {title}\n\n{text or _sentence(cls)}\n\n{table(cls)}"


def method(name: str, kind: str = "methods") -> str:
    """Paper and keys of a method, an attack or an aggregation."""
    cls = resolve(kind, name)
    paper = (sys.modules[cls.__module__].__doc__ or "").strip().partition("\n\n")[0]
    keys = table(cls, without=("local",)) if any(f.name != "local" for f in dataclasses.fields(cls)) else ""
    return f"### `{name}`\n\n{' '.join(paper.split())}\n" + (f"\n{keys}" if keys else "")


def table(cls: Any, beyond: Any = None, without: tuple[str, ...] = ()) -> str:
    """The keys of a dataclass as a table."""
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, f, hint in settings_of(cls):
        if f.name in without or (beyond is not None and f.name not in _own(cls, beyond)):
            continue
        cells = (f"`{key}`", _value(f, hint), _default(f), str(f.metadata.get("help", "")))
        rows.append("| " + " | ".join(plain(c) for c in cells) + " |")
    return "\n".join(rows) + "\n"


def plain(text: str) -> str:
    """Escape bars and brackets, so that the text can stand in a cell of a table."""
    return text.replace("|", "\\|").replace("<", "\\<")


def _own(cls: Any, base: Any) -> set[str]:
    """Fields that are not the base's, or have another default."""
    known = {f.name: f.default for f in dataclasses.fields(base)}
    return {f.name for f in dataclasses.fields(cls) if f.name not in known or known[f.name] != f.default}


def ours(name: str) -> bool:
    """Whether the method of this name comes with fedfm."""
    return available("methods")[name].startswith("fedfm.")


def _sentence(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]


def _value(f: dataclasses.Field[Any], hint: Any) -> str:
    """What a key takes: its type and bounds."""
    hint, bounds = plain_type(hint), bounds_of(f)
    if dataclasses.is_dataclass(hint):
        return "table"
    one = ", ".join(f"`{c}`" for c in bounds.choices) or dataclasses.replace(bounds, words="").words_for(leaf(hint))
    one = re.sub("^a ", "", one).replace("text in quotes", "text")
    holds = {tuple: "list: ", dict: "table: "}.get(getattr(hint, "__origin__", None), "")
    return ("required; " if is_required(f) else "") + holds + one


def _default(f: dataclasses.Field[Any]) -> str:
    value = f.metadata.get("usual", f.default)
    if value is None or value is dataclasses.MISSING or value == "" or dataclasses.is_dataclass(value):
        return ""
    if isinstance(value, tuple):
        return f"`{json.dumps(value)}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"
