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
import experiment_page
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
from fedfm.core.capabilities import HiddenModel, Traits
from fedfm.encrypted.student.distil_spec import DistilSpec
from fedfm.errors import InputError
from fedfm.runtime.predictions import keeps_parts
from fedfm.sites.federation_config import FederationFile
from fedfm.sites.silo_config import Silo

DOCS = Path(__file__).parent
REFERENCE = DOCS / "reference"
SOURCES = DOCS.parent / "src"
FOLDER = SOURCES / "fedfm" / "config" / "schemas"
_METHODS = f"""# All methods

{experiment_page.GENERATED}

`fedfm show METHOD` prints the paper, the keys and their defaults. [Choose a method](../how-to/choose-a-method.md)
compares the methods by situation; [who sees what](who-sees-what.md) says what each method shows to whom.
"""
_PAPERS = """## Defaults that differ from the papers

`fedfm show METHOD` lists these too. What a paper leaves open, or tries with several values, is not here. The baselines
of FedPFT (`ccvr`, `ensemble`, `fedbe`, `kd`) are compared with that paper's comparison where their own paper is silent,
`feddpa` with its authors' code.
"""
_COMMANDS = f"""# The command line

{experiment_page.GENERATED}

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
    pages = {"experiment.md": experiment_page.page(), "methods.md": methods(), "commands.md": commands()}
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
    for name in filter(experiment_page.ours, available("methods")):
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
        names = [name for name in filter(experiment_page.ours, available("methods")) if _takes(name, privacy)]
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
    for name in filter(experiment_page.ours, available("methods")):
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
    for name in filter(experiment_page.ours, available("methods")):
        for row in differences(resolve("methods", name)):
            cells = (f"`{row['key']}`", f"`{value(row['default'])}`", value(row["paper"], bare=True), row["why"])
            rows.append(f"| `{name}` | " + " | ".join(experiment_page.plain(cell) for cell in cells) + " |")
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
    return "; ".join(filter(None, (experiment_page.plain(str(a.help or "")), choices, repeated, required)))


def _arxiv(text: str) -> list[str]:
    """The paper's own number, if it has one; later ones in a docstring are of papers that it leans on."""
    found = re.search(r"arXiv:\d{4}\.\d{5}|no arXiv number", text)
    return [found[0]] if found and found[0].startswith("arXiv:") else []


if __name__ == "__main__":
    sys.exit(main())
