"""Which libraries a command loads: none that neither its rows nor its model need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fedfm
import small
from fedfm.cli.parser import build
from fedfm.core.toml_text import to_toml
from fedfm.tasks import DEFAULT, INTERFACE

LATE = (
    "sklearn",
    "scipy.stats",
    "pandas",
    "pyarrow",
    "bitsandbytes",
    "datasets",
    "flwr",
    "ray",
    "torch._inductor.lowering",
)
# Of our own code, what FedAvg of LoRA on pictures has no use for: packages, and single modules.
UNUSED = {
    "mechanisms of privacy": (
        "aggregation.private",
        "privacy.noise",
        "privacy.plausibility",
        "privacy.gaussian",
        "privacy.dp_sgd",
        "training.private",
    ),
    "secure sums": ("aggregation.secure", "aggregation._secagg", "privacy.crypto"),
    "attacks": ("attacks.attackers", "attacks.backdoor"),
    "audits": ("audits",),
    "exports": ("models.export", "models.merging", "api.predict"),
    "modules of users": ("models.user", "models.wrap", "data.user_datasets"),
    "files of rows": (
        *("data.files", "data.sources._files", "data.sources.tables", "data.sources._tabular", "data.selection"),
        *("data.class_names", "data.pictures", "data.client_files"),
    ),
    "texts": (
        *("core.tokens", "models.language", "models.text_metrics", "models.tokenizer_files", "models.positions"),
        *("tasks._tags", "tasks._tagged_rows", "tasks._conversation_rows"),
    ),
    "vectors in files": ("linalg.mapped_files", "linalg.client_vectors", "runtime.row_identity"),
    "records of Flower": ("core.wire.flower_records",),
    "a silo's own rows": ("runtime.coarse_scores",),
    "types alone": ("core.task_facts", "data.task_rows", "models.model_task", "models.network"),
    "other architectures": ("models.architectures", "models.dual_encoder", "models.hub_encoders"),
    "other adapters": ("models.adapters.experts", "models.adapters.lora", "models.adapters.side_adapter"),
    "few bits": ("models.quantised", "models.quantised_experts", "models.stored_bits", "linalg.quantised"),
    "other trainers": (
        "training.loop",
        "training.heads",
        "training.fit_head",
        "training.personal",
        "training.augmentation",
    ),
    "coded and late messages": ("core.transport", "aggregation._asynchronous", "runtime.async_scores"),
    "processes": ("engines.flower", "engines.folder", "engines.local.worker_pool", "engines.local.spawned"),
    "several runs": ("api.studies", "reports.frontier"),
    "what is said of faults": (
        "config.key_suggestions",
        "config.more_faults",
        "core.reasons",
        "config.advice",
    ),
    "pages of other runs": ("reports.dossier", "reports.audit", "reports.fedpft", "reports.client_weights"),
    "help": ("cli.help", "config.catalogue"),
    "wings": ("encrypted", "sites"),
}
SOURCE = Path(fedfm.__file__).parent
OWN = ("fedavg", "_weights")  # of the methods
MOST = 24_000  # lines of our own code that a plain run loads
_LIST = """
import json, sys
from fedfm.cli import main

code = main(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]))
"""
_HELP = """
import json, sys
from fedfm.cli import main

for name in json.loads(sys.argv[1]):
    try:
        main([*name, "--help"])
    except SystemExit as end:
        assert end.code == 0
    for library in ("torch", "numpy", "dataclasses", "fedfm.config", "importlib.resources"):
        assert library not in sys.modules, (name, library)
"""
_LINES = """
import json, sys
from fedfm.cli import main

before, found = set(), {}
for line in json.loads(sys.argv[1]):
    code = main(line.split())
    assert code == 0, line
    found[line], before = sorted(set(sys.modules) - before), set(sys.modules)
print(json.dumps(found))
"""
# On feature vectors, in this order: what a line loads first is its own.
NOTHING = ("list", "show fedavg", "schema", "completion bash")
ROWS = (
    "provision federation.toml --out kits",
    "silo check silo.toml",
    "silo show silo.toml",
    "silo predictions silo.toml",
    "report run",
    "compare run run",
    "sign run --key key.pem",
    "verify run --key key.pem.pub",
    "check exp.toml",
    "predict run rows.npz",
    "export run --to torch --out exported",
    "resume run",
    "run exp.toml --out again --set method.rounds=0",
)
# These train, attack, or serve until they are stopped; app is for Flower, and doctor tries the libraries themselves.
BESIDE = {
    "demo",
    "pretrain",
    "distil",
    "audit",
    "join",
    "leave",
    "worth",
    "watch",
    "advise",
    "survey",
    "start",
    "app",
    "doctor",
}
HEAVY = (*LATE, "scipy", "numba", "transformers", "peft", "torch._dynamo", "torch._inductor", "sympy", "yaml", "jinja2")


def commands():
    """The names of all commands."""
    (actions,) = (action for action in build()._actions if action.choices)
    return list(actions.choices)


def test_no_command_s_help_loads_what_the_command_needs():
    words = [[], *([name] for name in commands())]
    subprocess.run([sys.executable, "-c", _HELP, json.dumps(words)], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.proof
def test_no_command_on_features_loads_a_library_of_models(tmp_path):
    assert {line.split()[0] for line in (*NOTHING, *ROWS)} | BESIDE == set(commands())
    tables = small.experiment(tmp_path, method={"rounds": 1}, run={"workers": 1})
    (tmp_path / "exp.toml").write_text(to_toml(tables))
    (tmp_path / "silo.toml").write_text('name = "north"\ndata = "rows.npz"\n')
    (tmp_path / "federation.toml").write_text('server = "127.0.0.1:0"\nsilos = ["a", "b"]\n')
    subprocess.run([sys.executable, "-m", "fedfm", "run", "exp.toml", "--out", "run"], cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, "-c", _LINES, json.dumps([*NOTHING, *ROWS])], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for line, modules in found.items():
        assert not set(modules).intersection(HEAVY), line
        if line in NOTHING:
            assert not set(modules).intersection(("torch", "numpy")), line


def loaded(folder, *words):
    """Modules after a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _LIST, *map(str, words)], cwd=folder, capture_output=True, text=True, check=True
    )
    code, modules = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return set(modules)


def unused(modules):
    """What a plain run has no use for among these modules, by kind."""
    for place in (place for places in UNUSED.values() for place in places):
        path = SOURCE.joinpath(*place.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), place
    ours = {name.removeprefix("fedfm.") for name in modules if name.startswith("fedfm.")}
    found = {
        kind: sorted(name for name in ours if any(f"{name}.".startswith(f"{place}.") for place in places))
        for kind, places in UNUSED.items()
    }
    methods = sorted(name for name in ours if name.startswith("methods.") and name.partition(".")[2] not in OWN)
    return {kind: names for kind, names in {**found, "other methods": methods}.items() if names}


def tasks_among(modules):
    """The tasks whose file is among these modules."""
    found = {name.removeprefix("fedfm.tasks.") for name in modules if name.startswith("fedfm.tasks.")}
    return {name for name in found if not name.startswith("_")} - {INTERFACE}


def own_lines(modules):
    """How many lines of our own code these modules have."""
    places = [SOURCE.joinpath(*name.split(".")[1:]) for name in modules if name.partition(".")[0] == "fedfm"]
    files = [place / "__init__.py" if place.is_dir() else place.with_suffix(".py") for place in places]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files if file.is_file())


@pytest.mark.proof
def test_lora_of_the_built_in_model_loads_its_class_and_no_compiler(tmp_path):
    (tmp_path / "e.toml").write_text(
        '[data]\nname = "digits"\nlimit = 60\npartition = { name = "iid", clients = 2 }\n[model]\nname = "nano-vit"\n'
        '[method]\nname = "fedavg"\nrounds = 2\n[run]\nworkers = 1\n'
    )
    for words in (("check", "e.toml"), ("run", "e.toml", "--out", "run"), ("report", "run"), ("compare", "run")):
        found = loaded(tmp_path, *words)
        assert not found.intersection(LATE), words
        models = {
            name.split(".")[2] for name in found if name.startswith("transformers.models.") and "modeling" in name
        }
        assert models <= {"auto", "vit", "ijepa", "bloom"}, words  # PEFT names BLOOM
        if words[0] == "run":
            assert not unused(found), words
            assert own_lines(found) <= MOST
            assert tasks_among(found) == {DEFAULT}
        assert ("transformers" in found) == (words[0] in ("check", "run")), words


@pytest.mark.proof
def test_features_need_no_transformers(tmp_path):
    run = small.experiment(tmp_path, method={"rounds": 1}, run={"workers": 1})
    from fedfm.runtime.progress import Progress

    fedfm.run(run, tmp_path / "run", progress=Progress())
    for words in (("report", "run"), ("compare", "run"), ("audit", "run")):
        found = loaded(tmp_path, *words)
        assert not found.intersection(("transformers", "peft", "bitsandbytes", "torch._dynamo", "sklearn")), words
