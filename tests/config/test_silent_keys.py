"""Keys and values that a command would drop: refused, or named in a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedfm.config.experiment import Experiment
from fedfm.core.overrides import parse_override, parse_overrides
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
