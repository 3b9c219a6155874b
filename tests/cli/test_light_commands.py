"""Which libraries a command loads: none that neither its rows nor its model need."""

import json
import subprocess
import sys

import pytest

import small

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
_LIST = """
import json, sys
from fedfm.cli import main

code = main(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]))
"""


def loaded(folder, *words):
    """Modules after a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _LIST, *map(str, words)], cwd=folder, capture_output=True, text=True, check=True
    )
    code, modules = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return set(modules)


@pytest.mark.proof
def test_lora_of_the_built_in_model_loads_its_class_and_no_compiler(tmp_path):
    (tmp_path / "e.toml").write_text(
        '[data]\nname = "digits"\nlimit = 60\npartition = { name = "iid", clients = 2 }\n[model]\nname = "nano-vit"\n'
        '[method]\nname = "fedavg"\nrounds = 1\n[run]\nworkers = 1\n'
    )
    for words in (("check", "e.toml"), ("run", "e.toml", "--out", "run"), ("report", "run"), ("compare", "run")):
        found = loaded(tmp_path, *words)
        assert not found.intersection(LATE), words
        models = {
            name.split(".")[2] for name in found if name.startswith("transformers.models.") and "modeling" in name
        }
        assert models <= {"auto", "vit", "ijepa", "bloom"}, words  # PEFT names BLOOM
        assert ("transformers" in found) == (words[0] in ("check", "run")), words


@pytest.mark.proof
def test_features_need_no_transformers(tmp_path):
    run = small.experiment(tmp_path, method={"rounds": 1}, run={"workers": 1})
    import fedfm
    from fedfm.runtime.progress import Progress

    fedfm.run(run, tmp_path / "run", progress=Progress())
    for words in (("report", "run"), ("compare", "run"), ("audit", "run")):
        found = loaded(tmp_path, *words)
        assert not found.intersection(("transformers", "peft", "bitsandbytes", "torch._dynamo", "sklearn")), words
