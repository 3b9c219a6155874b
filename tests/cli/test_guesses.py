"""Keys that everybody guesses are understood, and `fedfm show` prints TOML."""

import tomllib

import pytest

import small
from fedfm.cli import main
from fedfm.config import catalogue
from fedfm.config.experiment import Experiment
from fedfm.config.registry import ours, resolve
from fedfm.config.toml import to_toml
from fedfm.core.fields import settings_of
from fedfm.errors import InputError


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("method.lr=0.1", "did you mean method.local.learning_rate?"),
        ("method.local.lr=0.1", 'did you mean "learning_rate"?'),
        ("method.local.batch=8", 'did you mean "batch_size"?'),
        ("method.epochs=3", "did you mean method.local.epochs?"),
        ("method.optimizer=adam", "did you mean method.local.name"),
        ("method.local.optimizer=adam", "did you mean method.local.name"),
        ("method.lambda=0.1", "did you mean method.local.lambda?"),
        ("lr=0.1", "did you mean method.local.learning_rate?"),
        ("seed=3", "did you mean run.seed?"),
        ("run.rounds=3", "did you mean method.rounds?"),
        ("model.rank=4", "did you mean model.adaptation.rank?"),
        ("method.fractoin=0.5", 'did you mean "fraction"?'),
    ],
)
def test_keys_that_everybody_guesses(tmp_path, capsys, key, hint):
    path = tmp_path / "exp.toml"
    path.write_text(to_toml(small.experiment(tmp_path)))
    assert main(["check", str(path), "--set", key]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line


def test_lambda_is_mu_of_fedprox(tmp_path):
    with pytest.raises(InputError, match='did you mean "mu"'):
        Experiment.from_dict(small.experiment(tmp_path, method={"name": "fedprox", "lambda": 0.1}))


@pytest.mark.parametrize("name", [*ours("methods"), *ours("attacks"), *ours("aggregation")])
def test_show_prints_toml(name):
    """Whatever stands there can be copied into a file; every key of it is one that the method takes."""
    table = next(iter(tomllib.loads(catalogue.method(name)).values()))
    assert table["name"] == name
    kind = next(k for k in ("methods", "attacks", "aggregation") if name in ours(k))
    known = {key for key, _, _ in settings_of(resolve(kind, name))} | {"name"}
    assert set(table) <= known
