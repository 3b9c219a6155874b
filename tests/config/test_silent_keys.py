"""Keys and values that a command would drop: refused, or named in a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedfm.cli import main
from fedfm.config.experiment import Experiment
from fedfm.core.overrides import parse_override, parse_overrides, refuse_doubles
from fedfm.errors import InputError
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec

EXPERIMENT = '[data]\nname = "digits"\n[model]\nname = "nano-vit"\n[method]\nname = "fedavg"\n'


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(EXPERIMENT, encoding="utf-8-sig")
    assert Experiment.load(tmp_path / "a.toml").method_name == "fedavg"


def test_a_key_that_is_set_twice_is_refused() -> None:
    assert parse_overrides(["method.rounds=5", "run.seed=1"]) == {"method.rounds": 5, "run.seed": 1}
    with pytest.raises(InputError, match=r"--set method\.rounds is given twice"):
        parse_overrides(["method.rounds=5", "run.seed=1", "method.rounds = 6"])


def test_a_table_does_not_replace_a_key_that_was_given_before_it() -> None:
    changes = parse_overrides(["method.local={epochs=2}", "method.local.learning_rate=0.1"])
    assert list(changes) == ["method.local", "method.local.learning_rate"]
    with pytest.raises(InputError, match=r"--set method\.local would replace --set method\.local\.epochs"):
        parse_overrides(["method.local.epochs=2", "method.local={learning_rate=0.1}"])


DOUBLES = {
    "run --set run.engine=local --engine local": "--engine local and --set run.engine both set run.engine",
    "run --set run={engine='local'} --engine local": "--engine local and --set run both set run.engine",
    "check --set run.engine=local --engine local": "--engine local and --set run.engine both set run.engine",
    "survey --set run.engine=local --engine local": "--engine local and --set run.engine both set run.engine",
    "run --set run.seed=3 --seeds 1,2": "--seeds 1,2 and --set run.seed both set run.seed",
    "run --set method.local={learning_rate=1} --tune 1,2": "--tune 1,2 and --set method.local both set method.local.l",
    "survey --set privacy.target_epsilon=2 --epsilon 1": "--epsilon 1.0 and --set privacy.target_epsilon both set",
    "survey --set privacy.noise_multiplier=2 --epsilon 1": "--epsilon 1.0 and --set privacy.noise_multiplier both set",
    "survey --set privacy.delta=1e-6 --epsilon 1 --delta 1e-5": "--delta 1e-05 and --set privacy.delta both set",
    "survey --delta 1e-5": "--delta 1e-05: no noise is asked for; give --epsilon, too",
    "survey --epsilon 1 --delta 0": "privacy.delta",
    "advise --set privacy.target_epsilon=2 --epsilon 1": "--epsilon 1.0 and --set privacy.target_epsilon both set",
    "advise --set privacy.delta=1e-6 --delta 1e-5": "--delta 1e-05 and --set privacy.delta both set",
    "advise --set privacy.clip_norm=1 --clip-norm 2": "--clip-norm 2.0 and --set privacy.clip_norm both set",
    "run --seeds=": "--seeds : expected whole numbers",
    "run --tune=": "--tune : expected numbers",
}


@pytest.mark.parametrize("line", DOUBLES)
def test_no_option_wins_over_a_key_in_silence(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_text(EXPERIMENT)
    name, *words = line.split(" ")
    assert main([name, str(tmp_path / "a.toml"), *words]) == 2
    assert DOUBLES[line] in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]


def test_an_option_and_another_key_of_its_table_are_both_used() -> None:
    options = {"run.engine": ("--engine", "local"), "run.seed": ("--seeds", None)}
    refuse_doubles({"run.seed": 1, "run": {"workers": 1}, "run.engineer": 2, "runs": {"engine": 3}}, options)


def test_lines_after_a_value_are_refused() -> None:
    with pytest.raises(InputError, match="lines after its end"):
        parse_override("method.rounds=5\nseed=3")


@pytest.mark.parametrize(
    ("adaptation", "idle"),
    [
        (AdaptationSpec("head", rank=4), "rank"),
        (AdaptationSpec("full", alpha=3.0, targets=("qkv",)), "alpha, targets"),
        (AdaptationSpec("top_layers", layers=1, dropout=0.1), "dropout"),
        (AdaptationSpec("lora", tokens=4, released="grid"), "tokens, released"),
        (AdaptationSpec("lora", rank=2, alpha=1.0, layers=1), ""),
        (AdaptationSpec("top_layers", layers=1), ""),
        (AdaptationSpec("head"), ""),
    ],
)
def test_keys_of_other_adaptations_are_named(adaptation: AdaptationSpec, idle: str) -> None:
    model = load_model(ModelSpec("nano-vit", adaptation=adaptation), classes=("a", "b"), kind="image")
    said = [text for text in model.notices if "no effect" in text]
    assert said == ([f'model.adaptation.{idle}: no effect with "{adaptation.name}"'] if idle else [])
