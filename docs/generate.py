"""Writes what follows from the code and from kept results: pages of docs/reference/ (keys, methods, commands,
models), the figures, docs/results/index.md, the accuracies that `fedfm advise` shows, and the JSON Schemas in
src/fedfm/config/schemas, which `fedfm show` reads.

python docs/generate.py            write
python docs/generate.py --check    exit 1 where a file is not what would be written
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import accuracy_records
import diagrams
import figure
import json_schema
import models_page
import results_index

from fedfm.api.pretrain_spec import PretrainSpec
from fedfm.cli.parser import build
from fedfm.config.catalogue import SCHEMAS, value
from fedfm.config.experiment import Experiment
from fedfm.config.papers import differences
from fedfm.config.registry import available, resolve
from fedfm.config.run_spec import AsynchronousSpec, RunSpec
from fedfm.core.capabilities import HiddenModel, Traits
from fedfm.core.fields import bounds_of, is_required, leaf, plain_type, settings_of
from fedfm.data.spec import DataSpec, PartitionSpec
from fedfm.encrypted.student.distil_spec import DistilSpec
from fedfm.errors import InputError
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.privacy.policy import Budget, Requirements
from fedfm.privacy.spec import PrivacySpec
from fedfm.runtime.predictions import keeps_parts
from fedfm.sites.federation_config import FederationFile
from fedfm.sites.silo_config import Silo
from fedfm.training import Local

DOCS = Path(__file__).parent
REFERENCE = DOCS / "reference"
SOURCES = DOCS.parent / "src"
FOLDER = SOURCES / "fedfm" / "config" / "schemas"
_GENERATED = "<!-- Written by docs/generate.py from the code: change the code, then run it again. -->"
_HEAD = f"""# The experiment file

{_GENERATED}

An experiment is one TOML file. It must have `[data]`, `[model]` and `[method]`; the other tables are optional. fedfm
refuses an unknown key or a value of another type before it computes anything, and names the key. `fedfm check exp.toml`
prints an experiment with all defaults; `fedfm show METHOD` prints one method. Text in brackets says what happens if the
key is absent. The top-level key `name` names the run; by default the name consists of method and data.

`fedfm schema --out fedfm.schema.json` writes a JSON Schema. If the first line of a TOML file is
`#:schema ./fedfm.schema.json`, an editor with a TOML plugin completes keys and marks misspelt keys and wrong values.
"""
_METHODS = f"""# All methods

{_GENERATED}

`fedfm show METHOD` prints the paper, the keys and their defaults. [Choose a method](../how-to/choose-a-method.md)
compares the methods by situation; [who sees what](who-sees-what.md) says what each method shows to whom.
"""
_PAPERS = """## Defaults that differ from the papers

`fedfm show METHOD` lists these too. What a paper leaves open, or tries with several values, is not here. The baselines
of FedPFT (`ccvr`, `ensemble`, `fedbe`, `kd`) are compared with that paper's comparison where their own paper is silent,
`feddpa` with its authors' code.
"""
_COMMANDS = f"""# The command line

{_GENERATED}

`fedfm COMMAND --help` prints the same with examples. A command exits with 0 if it succeeds, with 2 if its input is
wrong and with 1 if it fails. A command that is stopped ends with 130 after Ctrl-C, with 143 after SIGTERM, and with 129
if its terminal is closed; systemd takes 143 for success with `SuccessExitStatus=143`. With `--format json` the last
line on the standard output is one JSON object; all other text goes to the standard error.
"""


_SPENT = {"target_epsilon": 8.0, "delta": 1e-5}
PROTECTIONS: dict[str, dict[str, Any]] = {  # as the table shows it -> as an experiment has it
    '`aggregator = "secagg"`': {"aggregator": "secagg"},
    '`mechanism = "dp_sgd"`, `unit = "record"`': {"mechanism": "dp_sgd", "unit": "record", "clip_norm": 1.0} | _SPENT,
    'the method\'s own mechanism, `unit = "record"`': {"unit": "record"} | _SPENT,
    '`mechanism = "gaussian"`, `unit = "client"`': {"unit": "client", "clip_norm": 1.0} | _SPENT,
    '`mechanism = "distributed_gaussian"`, `unit = "client"`, `aggregator = "secagg"`': {
        "mechanism": "distributed_gaussian",
        "unit": "client",
        "clip_norm": 1.0,
        "aggregator": "secagg",
    }
    | _SPENT,
}
MOST = 6  # packages of an extra that the table names
EXTRAS = {  # what each is for
    "flower": "every `run.engine` but `local`, kits and silos, `fedfm app`, `run.wire`",
    "accounting": "the epsilon of releases of samples, such as DP-SGD's steps",
    "hub": "`data.hub`: data sets of the Hugging Face hub",
    "partitioners": '`data.partition` with `name = "flower"`',
    "simulation": '`run.engine = "simulation"`, on Ray',
    "quantized": "`model.quantization`",
    "trl": "`fedfm.federate` of an `SFTTrainer`",
    "encrypted": '`blindfed` with `encryption = "ckks"`',
    "tensorboard": '`run.track = ["tensorboard"]`',
    "mlflow": '`run.track = ["mlflow"]`',
    "wandb": '`run.track = ["wandb"]`',
    "seq2seq": '`model.task = "sequence_to_sequence"`: the word error rate',
    "audio": "recordings as rows, and what `seq2seq` brings",
    "vision": "the processor of SmolVLM",
    "completion": "`fedfm completion`",
    "bench": "`make bench`",
    "docs": "`make site`",
    "dev": "`make test`, `make lint type`",
}


def main() -> int:
    """Write or check the files."""
    old = 0
    pages = {"experiment.md": page(), "methods.md": methods(), "commands.md": commands()}
    written = {REFERENCE / name: text for name, text in pages.items()} | {figure.FILE: figure.draw()}
    written |= {REFERENCE / "models.md": models_page.page()} | results_index.pages() | blocks() | diagrams.files()
    made = (json_schema.experiment(), json_schema.pretraining(PretrainSpec), distillation(), silo(), federation())
    for name, found in zip(SCHEMAS, made, strict=True):
        written[FOLDER / f"{name}.json"] = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    written[accuracy_records.FILE] = accuracy_records.text()
    for path, text in written.items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if "--check" in sys.argv[1:]:
            print(f"{path} is not up to date: run python docs/generate.py", file=sys.stderr)  # noqa: T201
            old = 1
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return old


def distillation() -> dict[str, Any]:
    """The schema of a distillation's file."""
    return json_schema.distillation(DistilSpec)


def silo() -> dict[str, Any]:
    """The schema of a silo's file."""
    found = json_schema.table(Silo)
    return json_schema.document("a silo's file of fedfm", found["properties"], found["required"], {})


def federation() -> dict[str, Any]:
    """The schema of a federation's file."""
    found = json_schema.table(FederationFile)
    return json_schema.document("a federation's file of fedfm", found["properties"], found["required"], {})


def blocks() -> dict[Path, str]:
    """Pages with a part that follows from the code, between `<!-- generated: NAME -->` and `<!-- end -->`."""
    made = {"extras": extras(), "words": words(), "protections": protections(), "traits": traits()}
    found = {}
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^<!-- generated: (\w+) -->$", text, re.M):
            part = f"<!-- generated: {name} -->\n{made[name]}<!-- end -->"
            text = re.sub(rf"<!-- generated: {name} -->\n.*?<!-- end -->", lambda _, part=part: part, text, flags=re.S)
            found[path] = text
    return found


def extras() -> str:
    """The table of optional dependencies."""
    about = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = about["optional-dependencies"]
    if optional.keys() != EXTRAS.keys():
        raise SystemExit(f"docs/generate.py: EXTRAS differs from pyproject.toml in {optional.keys() ^ EXTRAS.keys()}")
    rows = ["| extra | brings | for |", "|---|---|---|"]
    for name, packages in optional.items():
        brought = ", ".join(re.split(r"[<>=;\s]", package)[0] for package in packages)
        brought = brought if len(packages) <= MOST else "see `pyproject.toml`"
        rows.append(f"| `{name}` | {brought} | {EXTRAS[name]} |")
    return "\n".join(rows) + "\n"


def words() -> str:
    """What a silo's policy has to allow for each method, by what the method declares."""
    found: dict[str, list[str]] = {}
    for name in filter(_ours, available("methods")):
        method = resolve("methods", name)()
        declared = {"mean": method.means, "reply": method.asks, "reveal": keeps_parts(method)}
        found.setdefault(", ".join(f"`{word}`" for word, has in declared.items() if has), []).append(name)
    rows = ["| words | methods |", "|---|---|"]
    rows += [f"| {allowed or 'none'} | {', '.join(names)} |" for allowed, names in sorted(found.items())]
    return "\n".join(rows) + "\n"


def traits() -> str:
    """What a method can state of itself; a claim is marked by a star."""
    rows = ["| trait | what it says |", "|---|---|"]
    rows += [f"| `{f.name}`{'*' * f.metadata['claim']} | {f.metadata['help']} |" for f in dataclasses.fields(Traits)]
    return "\n".join(rows) + "\n"


def protections() -> str:
    """Which methods take which [privacy], by asking for an experiment of each."""
    rows = ["| `[privacy]` | methods |", "|---|---|"]
    for shown, privacy in PROTECTIONS.items():
        names = [name for name in filter(_ours, available("methods")) if _takes(name, privacy)]
        rows.append(f"| {shown} | {', '.join(names)} |")
    return "\n".join(rows) + "\n"


def _takes(name: str, privacy: dict[str, Any]) -> bool:
    cls = resolve("methods", name)
    tables: dict[str, Any] = {"data": {"name": "digits", "partition": {"name": "iid", "clients": 20}}}
    tables |= {"method": {"name": name}, "privacy": privacy}
    if "foundation" in {f.name for f in dataclasses.fields(cls)}:
        tables["method"]["foundation"] = "nano-vit"
    if not issubclass(cls, HiddenModel):
        adaptation, task = (cls().needs.adaptations or ("",))[0], (cls().needs.tasks or ("",))[0]
        tables["model"] = {"name": "nano-clip" if task else "nano-vit"}
        tables["model"] |= {"task": task} if task else {}
        tables["model"] |= {"adaptation": {"name": adaptation}} if adaptation else {}
    try:
        Experiment.from_dict(tables)
    except InputError:
        return False
    return True


def methods() -> str:
    """The table of all methods."""
    rows = ["| method | paper | file |", "|---|---|---|"]
    for name in filter(_ours, available("methods")):
        module = sys.modules[resolve("methods", name).__module__]
        first, _, rest = (module.__doc__ or "").strip().partition("\n\n")
        source = Path(str(module.__file__))
        link = f"[{source.name}](../../src/{source.relative_to(SOURCES)})"
        paper = " ".join([*first.split(), *_arxiv(rest)])
        rows.append(f"| `{name}` | {paper} | {link} |")
    return _METHODS + "\n" + "\n".join(rows) + "\n\n" + papers()


def papers() -> str:
    """The defaults that are not the papers'."""
    rows = ["| method | key | default | in the paper | why |", "|---|---|---|---|---|"]
    for name in filter(_ours, available("methods")):
        for row in differences(resolve("methods", name)):
            cells = (f"`{row['key']}`", f"`{value(row['default'])}`", value(row["paper"], bare=True), row["why"])
            rows.append(f"| `{name}` | " + " | ".join(_plain(cell) for cell in cells) + " |")
    return _PAPERS + "\n" + "\n".join(rows) + "\n"


def commands() -> str:
    """Every command with its arguments."""
    (sub,) = (a for a in build()._actions if isinstance(a, argparse._SubParsersAction))
    parts = [_COMMANDS]
    for about in sub._choices_actions:
        arguments = [a for a in sub.choices[about.dest]._actions if a.dest != "help"]
        rows = ["| argument | meaning |", "|---|---|", *(f"| `{_argument(a)}` | {_meaning(a)} |" for a in arguments)]
        text = f"{str(about.help)[0].upper()}{str(about.help)[1:]}."
        parts.append(f"## fedfm {about.dest}\n\n{text}\n" + ("\n" + "\n".join(rows) + "\n" if arguments else ""))
    return "\n".join(parts)


def _argument(a: argparse.Action) -> str:
    """Its name, with what it takes."""
    if not a.option_strings:
        return f"[{a.dest}]" if a.nargs == "?" else f"{a.dest} ..." if a.nargs == "+" else a.dest
    taken = "" if a.nargs == 0 else f" {a.metavar or a.dest.upper()}"
    return "`, `".join(a.option_strings) + taken


def _meaning(a: argparse.Action) -> str:
    """Its help and its choices."""
    choices = ", ".join(f"`{c}`" for c in a.choices or ())
    required = "required" if a.required and a.option_strings else ""
    repeated = "can be given several times" if isinstance(a, argparse._AppendAction) else ""
    return "; ".join(filter(None, (_plain(str(a.help or "")), choices, repeated, required)))


def _arxiv(text: str) -> list[str]:
    """The paper's own number, if it has one; later ones in a docstring are of papers that it leans on."""
    found = re.search(r"arXiv:\d{4}\.\d{5}|no arXiv number", text)
    return [found[0]] if found and found[0].startswith("arXiv:") else []


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
        *(method(name) for name in available("methods") if _ours(name)),
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
        rows.append("| " + " | ".join(_plain(c) for c in cells) + " |")
    return "\n".join(rows) + "\n"


def _plain(text: str) -> str:
    """As the cell of a table, where neither a bar nor a bracket means something."""
    return text.replace("|", "\\|").replace("<", "\\<")


def _own(cls: Any, base: Any) -> set[str]:
    """Fields that are not the base's, or have another default."""
    known = {f.name: f.default for f in dataclasses.fields(base)}
    return {f.name for f in dataclasses.fields(cls) if f.name not in known or known[f.name] != f.default}


def _ours(name: str) -> bool:
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


if __name__ == "__main__":
    sys.exit(main())
