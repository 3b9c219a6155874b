"""A user's own method: what it lacks is said before a run, and an error names its line."""

import json

import numpy as np
import pytest

from fedfm.cli import main
from fedfm.config import registry

WHOLE = """
from dataclasses import dataclass
from typing import ClassVar

from fedfm import Client, ClientId, Federation, Method, Params, Update, on_client, setting
from fedfm.training import SGD, Local


@dataclass(frozen=True)
class Plain(Method[Params]):
    means: ClassVar[tuple[str, ...]] = ("train",)

    rounds: int = setting(1, "communication rounds", ge=0)
    local: Local = setting(SGD(), "client optimiser")

    def init(self, fed: Federation) -> Params:
        return fed.initial

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        return w + fed.mean(self.train, w=w)

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        return Update(self.local(client, w) - w, 1.0, client.metrics)

    def params_for(self, w: Params, client: ClientId) -> Params:
        return w
"""


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """A function that runs a command on a method with one text replaced; returns the exit code and the last line."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_admitted", {})
    x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
    np.savez(tmp_path / "rows.npz", x=x, y=(x[:, 0] > 0).astype(int))
    path = json.dumps(str(tmp_path / "rows.npz"))

    def command(verb, name, old="", new=""):
        assert old in WHOLE
        (tmp_path / f"{name.partition(':')[0]}.py").write_text(WHOLE.replace(old, new) if old else WHOLE)
        (tmp_path / "e.toml").write_text(
            f'data = {{ path = {path}, partition = {{ name = "iid", clients = 2 }} }}\n'
            f'[model]\nname = "features"\n[method]\nname = "{name}"\n[run]\nworkers = 1\n'
        )
        words = (name,) if verb == "show" else (str(tmp_path / "e.toml"),)
        code = main([verb, *words, *(("--out", str(tmp_path / name.replace(":", "-"))) if verb == "run" else ())])
        return code, capsys.readouterr().err.splitlines()[-1]

    return command


@pytest.mark.parametrize(
    ("name", "old", "new", "why"),
    [
        ("no_params:Plain", "def params_for", "def params_of", "Plain lacks params_for"),
        ("no_mark:Plain", "@on_client", "", 'Plain.means names "train", and the class has no function train with'),
        ("no_name:Plain", '("train",)', '("trian",)', 'Plain.means names "trian", and the class has no function trian'),
        ("no_class:Plane", "", "", "module 'no_class' has no attribute 'Plane' (did you mean \"Plain\"?)"),
    ],
)
def test_missing_parts_of_a_users_method_are_named(call, name, old, new, why):
    for verb in ("check", "run", "show"):
        code, line = call(verb, name, old, new)
        assert code == 2
        assert f'"{name}": {why}' in line


def test_a_module_that_is_not_found_is_put_on_the_path(tmp_path, capsys):
    (tmp_path / "e.toml").write_text(
        '[data]\nname = "digits"\n[model]\nname = "nano-vit"\n[method]\nname = "no_such.part:Plain"\n'
    )
    for words in (("check", str(tmp_path / "e.toml")), ("show", "no_such.part:Plain")):
        assert main(words) == 2
        assert "No module named 'no_such': put its folder on PYTHONPATH, or install it" in capsys.readouterr().err


def test_an_error_in_a_methods_server_half_names_the_methods_line(call, tmp_path):
    code, line = call("run", "wrong:Plain", "return w + fed", "return w + {}[0] + fed")
    number = 1 + WHOLE[: WHOLE.index("return w + fed")].count("\n")
    assert code == 1
    assert f"fedfm: KeyError: 0 (at {tmp_path / 'wrong.py'}, line {number}; the traceback is in " in line
    for name, new in (
        ("misused", "return w + 'x' + fed"),
        ("library", "return w + __import__('json').loads('{') + fed"),
    ):
        code, line = call("run", f"{name}:Plain", "return w + fed", new)
        assert (code, f"(at {tmp_path / name}.py, line {number}; " in line) == (1, True)


def test_a_complete_method_of_a_user_runs(call):
    assert call("run", "plain_method:Plain")[0] == 0
