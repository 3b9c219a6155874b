"""FedBaF on Flower: the local engine's bits under the same key, and nothing at a client names the foundation model."""

import importlib.resources
import shutil
from pathlib import Path

import pytest

from fedfm.config.experiment import Experiment
from fedfm.core import storage
from fedfm.runtime import file_integrity
from fedfm.runtime.run_directory import Run
from processes import experiment, here, on_engine, same


def prepared(exp: Path, out: Path, engine: str) -> Path:
    """A run that has not begun, whose server has its key already: as one that was killed before its first round."""
    Run.create(Experiment.load(exp, {"run.engine": engine}), out)
    (out / "private/server").mkdir(mode=0o700)
    (out / "private/server/alpha.secret").write_bytes(storage.seal(b"k" * 32))
    file_integrity.write_list(file_integrity.list_of(out / "private", "server"), {"alpha.secret"})
    return out


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("simulation", marks=pytest.mark.release),
        pytest.param("deployment", marks=pytest.mark.deployment),
    ],
)
def test_a_run_has_the_local_engines_bits_and_no_client_learns_the_secret(tmp_path, engine):
    shipped = Path(str(importlib.resources.files("fedfm.models") / "nano_vit"))
    secret = tmp_path / "the-labs-own"
    shutil.copytree(shipped, secret)
    method = f'name = "fedbaf"\nrounds = 2\nfoundation = "{secret}"\nlocal = {{ learning_rate = 0.05 }}'
    exp = experiment(tmp_path, method=method, adaptation='{ name = "full" }')
    exp.write_text(exp.read_text().replace('name = "nano-vit"\n', 'name = "nano-vit"\nweights = "random"\n'))
    alone = here("resume", prepared(exp, tmp_path / "local", "local"))
    same(on_engine(engine, "resume", prepared(exp, tmp_path / engine, engine)), alone)
    folder = tmp_path / engine
    told = [p for p in (folder / "private").rglob("*") if p.is_file() and secret.name.encode() in p.read_bytes()]
    assert told == []
