"""What the documents, and the messages in the code, name by its exact spelling is there.

Commands with their flags, keys of an experiment, Python names, files.
"""

import argparse
import dataclasses
import importlib
import re
import shlex
import typing
from pathlib import Path

import pytest

from fedfm import errors
from fedfm.api.pretrain_spec import PretrainSpec
from fedfm.cli import main
from fedfm.cli.parser import build
from fedfm.config.experiment import Experiment
from fedfm.config.registry import available, ours, resolve
from fedfm.config.run_spec import RunSpec
from fedfm.config.toml import key_of
from fedfm.core import capabilities
from fedfm.core.method import Method
from fedfm.core.open_settings import complete_class
from fedfm.data.spec import DataSpec, PartitionSpec
from fedfm.encrypted.student.distil_spec import DistilSpec
from fedfm.errors import InputError
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.privacy.spec import PrivacySpec
from fedfm.sites.federation_config import FederationFile
from fedfm.sites.silo_config import Silo

ROOT = Path(__file__).resolve().parents[2]
METHODS = ROOT / "docs" / "reference" / "methods.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
BLOCK = re.compile(r"^```\w*[^\n]*\n(.*?)^```$", re.M | re.S)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
PLACEHOLDER = re.compile(r"[A-Z]+|\.\.\.")
OTHERS = {"--isolation", "--stream", "--run-config", "--model"}  # of Flower's commands, and of examples


def relative(path):
    return str(path.relative_to(ROOT))


def spans(text):
    """What stands between single backticks outside of blocks, on one line."""
    return [" ".join(span.split()) for span in SPAN.findall(BLOCK.sub("", text))]


def lines(text):
    """Lines of blocks, a continued one as a whole."""
    return [line.strip().removeprefix("$ ") for b in BLOCK.findall(text) for line in b.replace("\\\n", " ").split("\n")]


def commands(texts):
    """Words of every ``fedfm ...`` command, without what the shell does with it."""
    for text in texts:
        for part in re.split(r"&&|\||;", text.partition(" #")[0]):
            words = part.split()
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # PYTHONPATH=. fedfm ...
                words = words[1:]
            if len(words) > 1 and words[0] == "fedfm":
                yield part.strip(), words[1:]


def subcommands():
    (sub,) = (a for a in build()._actions if isinstance(a, argparse._SubParsersAction))
    return sub.choices


def wrong(found):
    """What of these commands the parser does not know."""
    known = subcommands()
    for text, words in found:
        name, flags = words[0], [w.partition("=")[0] for w in words if w.startswith("--")]
        if PLACEHOLDER.fullmatch(name) or name.startswith("{") or (name.startswith("--") and name in OPTIONS):
            continue
        if name not in known:
            yield f"{text}: no such command"
        elif missing := [f for f in flags if f not in known[name]._option_string_actions]:
            yield f"{text}: fedfm {name} has no {missing[0]}"


OPTIONS = {flag for parser in (build(), *subcommands().values()) for flag in parser._option_string_actions}


@pytest.mark.parametrize("page", DOCUMENTS, ids=relative)
def test_every_command_of_a_document_exists_with_its_flags(page):
    text = page.read_text(encoding="utf-8")
    assert list(wrong(commands([*spans(text), *lines(text)]))) == []
    alone = [s.split()[0].partition("=")[0] for s in spans(text) if re.match(r"--[a-z]", s)]
    assert [flag for flag in alone if flag not in OPTIONS | OTHERS] == []


@pytest.mark.proof
def test_every_command_that_the_code_names_exists_with_its_flags():
    found = [f"{relative(p)}: {w}" for p in SOURCES for w in wrong(commands(named_in(p)))]
    assert found == []


def named_in(path):
    """Commands between backticks in docstrings, help and messages; those that run on to the next line are joined."""
    text = re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
    return [" ".join(s.split()) for s in re.findall(r"`{1,2}(fedfm [a-z][^`\n]*)`", text)]


def test_the_check_sees_what_is_wrong():
    text = "`fedfm tune` and `fedfm run x --tun 3`\n```bash\n$ A=b fedfm report x --set a=b && fedfm nothing\n```\n"
    assert [w.rpartition(": ")[2] for w in wrong(commands([*spans(text), *lines(text)]))] == [
        "no such command",
        "fedfm run has no --tun",
        "fedfm report has no --set",
        "no such command",
    ]


# --- keys of an experiment --------------------------------------------------------------------------------------------


def keys(cls):
    """The dotted keys of a table and of the tables in it."""
    cls = complete_class(cls)
    hints, out = typing.get_type_hints(cls), set()
    for f in dataclasses.fields(cls):
        key = key_of(f.name)
        inner = [t for t in (hints[f.name], *typing.get_args(hints[f.name])) if dataclasses.is_dataclass(t)]
        out |= {key} | {f"{key}.{k}" for t in inner for k in keys(t)}
    return out


def known_keys():
    """Every key that an experiment, a pretraining, a silo's or a federation's file may have, dotted from its table."""
    methods = set().union(*(keys(resolve("methods", n)) for n in available("methods")))
    optimisers = (resolve("optimisers", name) for name in ours("optimisers"))
    local = {"name"}.union(*({key_of(f.name) for f in dataclasses.fields(cls)} for cls in optimisers))
    tables = {
        "data": keys(DataSpec) | {f"partition.{k}" for k in keys(PartitionSpec)},
        "model": keys(ModelSpec) | {f"adaptation.{k}" for k in keys(AdaptationSpec)},
        "method": methods | {"name"} | {f"local.{k}" for k in local} | {f"base.{k}" for k in methods},
        "privacy": keys(PrivacySpec),
        "attack": {"name"}.union(*(keys(resolve("attacks", n)) for n in available("attacks"))),
        "aggregation": {"name"}.union(*(keys(resolve("aggregation", n)) for n in available("aggregation"))),
        "run": keys(RunSpec),
        "pretrain": keys(PretrainSpec),
        "distil": keys(DistilSpec),
    }
    return tables, {k.rpartition(".")[2] for t in tables.values() for k in t} | keys(Silo) | keys(FederationFile)


TABLES, KEYS = known_keys()
DECLARED = {name for cls in (Method, *vars(capabilities).values()) if isinstance(cls, type) for name in dir(cls)}
DOTTED = re.compile(rf"({'|'.join(TABLES)})\.([a-z_]+(?:\.[a-z_]+)*)(?:\s*=.*)?")
ASSIGNED = re.compile(r"([a-z]\w*) = \S.*")


@pytest.mark.parametrize("page", DOCUMENTS, ids=relative)
def test_every_key_of_a_document_exists(page):
    found = spans(page.read_text(encoding="utf-8"))
    dotted = [m for m in map(DOTTED.fullmatch, found) if m and m[2] not in ("json", "safetensors", "path")]
    assert [m[0] for m in dotted if m[2] not in TABLES[m[1]]] == []
    assigned = [m for m in map(ASSIGNED.fullmatch, found) if m and m[1] not in KEYS]
    # What a class of a method declares, and a package's entry point, are written alike.
    assert [m[0] for m in assigned if m[1] not in DECLARED and not re.search(r'"\w+:\w+"$', m[0])] == []


@pytest.mark.parametrize("page", DOCUMENTS, ids=relative)
def test_no_key_is_spelt_as_python_has_to(page):
    assert [s for s in spans(page.read_text(encoding="utf-8")) if re.fullmatch(r"[\w.]*[a-z]_(?: = .*)?", s)] == []


def test_lambda_is_read_and_written_without_pythons_underscore(capsys):
    tables = {"data": {"name": "digits"}, "model": {"name": "nano-vit"}}
    for name, optimiser in (("ditto", "ditto"), ("feddpa", "dual_adapter")):
        local = {"name": optimiser, "lambda": 0.25}
        text = Experiment.from_dict(tables | {"method": {"name": name, "local": local}}).to_toml()
        assert "lambda = 0.25" in text
        assert main(["show", name]) == 0
        shown = capsys.readouterr().out
        assert re.search(r"^lambda = ", shown, re.M)
        assert "lambda_" not in text + shown
        with pytest.raises(InputError, match=r'method\.local\.lambda_: unknown key \(did you mean "lambda"'):
            Experiment.from_dict(tables | {"method": {"name": name, "local": {"name": optimiser, "lambda_": 0.25}}})


def test_show_and_the_reference_say_that_a_models_own_dropout_is_off(capsys):
    assert main(["show", "fedavg"]) == 0
    assert "model's own dropout is off in training" in capsys.readouterr().out
    reference = (ROOT / "docs/reference/experiment.md").read_text(encoding="utf-8")
    assert "the model's own dropout is off in training" in reference


def test_a_method_without_a_number_of_its_own_has_no_other_papers():
    first = METHODS.read_text(encoding="utf-8").partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", first, re.M))
    assert rows["dsfl"] == "DSFL: Dynamic Sparsification for Federated Learning."
    assert rows["fedpft"].endswith("arXiv:2402.01862")


# --- Python names and files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", DOCUMENTS, ids=relative)
def test_every_python_name_and_file_of_a_document_exists(page):
    found = spans(page.read_text(encoding="utf-8"))
    names = [m[1] for m in (re.match(r"(fedfm(?:\.[A-Za-z]\w*)+)\b", s) for s in found) if m]
    assert [name for name in names if not importable(name) and name != "fedfm.json"] == []
    files = [s.split()[-1] for s in found if re.fullmatch(r"(?:python )?[\w/-]+/\w+\.(?:py|md|toml)", s)]
    roots = (ROOT, ROOT / "src" / "fedfm", page.parent)
    assert [f for f in files if not any((root / f).exists() for root in roots)] == []
    scripts = [w for s in found if s.startswith("python ") for w in shlex.split(s) if w.endswith(".py")]
    assert [f for f in scripts if not (ROOT / f).exists()] == []


@pytest.mark.parametrize("page", DOCUMENTS, ids=relative)
def test_every_code_handler_detail_and_target_of_a_document_exists(page):
    text = page.read_text(encoding="utf-8")
    found = spans(text)
    assert [s for s in found if re.fullmatch(r"E_[A-Z]+", s) and not hasattr(errors, s)] == []
    handlers = [m for m in (re.fullmatch(r"(?:query|train)\.([A-Z]\w+?)_(\w+)", s) for s in found) if m]
    assert [m[0] for m in handlers if not hasattr(CLASSES.get(m[1]), m[2])] == []
    details = [m for m in (re.fullmatch(r"(?:details|ledger)\.([a-z]\w+)", s) for s in found) if m]
    assert [m[0] for m in details if f'"{m[1].removeprefix("local_")}"' not in CODE] == []  # each score has both
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    made = [m[1] for m in (re.match(r"make ([a-z-]+)", s) for s in [*found, *lines(text)]) if m]
    assert [target for target in made if target not in targets] == []


CODE = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
CLASSES = {c.__name__: c for c in (resolve("methods", name) for name in available("methods"))}


def importable(name):
    """A module, or an attribute of one."""
    module, _, rest = name.partition(".")
    value = importlib.import_module(module)
    for part in rest.split("."):
        if not hasattr(value, part):
            try:
                value = importlib.import_module(f"{value.__name__}.{part}")
            except (ImportError, AttributeError):
                return False
        else:
            value = getattr(value, part)
    return True


# --- language ---------------------------------------------------------------------------------------------------------

PRIVATE = re.compile(r"yardsticks?|beside\b|whoever|in the stead of|is told (?:that|by)|are told (?:that|by)", re.I)


def prose(page):
    """No script wrote it from code or runs."""
    by_script = page.parent.name == "results" and page.name != "index.md"
    return not by_script and "Written by docs/generate.py" not in page.read_text(encoding="utf-8")


PROSE = [page for page in DOCUMENTS if prose(page)]


@pytest.mark.parametrize("page", DOCUMENTS, ids=relative)
def test_numbers_below_one_have_their_leading_zero(page):
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    assert re.findall(r"(?<![\w.)\]/*\"])\.\d+\b", text) == []


@pytest.mark.parametrize("page", PROSE, ids=relative)
def test_pages_use_the_usual_words(page):
    text = SPAN.sub("", BLOCK.sub("", page.read_text(encoding="utf-8")))  # names in backticks stay as they are
    assert PRIVATE.findall(text) == []
