"""A large untrained part of a model gets a notice, and one larger than a head is refused."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from fedfm.errors import InputError
from fedfm.models.checkpoint import Difference
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec


def test_a_thousand_classes_of_a_tiny_base_are_trained_with_a_notice(folder):
    def load(classes, **spec):
        spec = ModelSpec(str(folder("roberta")), adaptation=AdaptationSpec("head"), **spec)
        model = load_model(spec, classes=[str(c) for c in range(classes)], kind="text")
        return [line for line in model.notices if line.startswith("model.name: ") and "untrained" in line]

    (line,) = load(1000)
    assert line.startswith("model.name: 6")
    assert "are new here and untrained: classifier" in line
    assert load(2) == []
    assert load(1000, weights="random") == []  # as all of it is


def test_an_encoder_drawn_at_random_is_refused_as_any_part(folder, tmp_path, monkeypatch):
    """The second of two lines: the first, by structure, is made to let everything pass."""
    monkeypatch.setattr(Difference, "_optional", lambda *_: True)
    shutil.copytree(folder("roberta"), tmp_path, dirs_exist_ok=True)
    kept = {k: v for k, v in load_file(tmp_path / "model.safetensors").items() if ".encoder." not in k}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    spec = ModelSpec(str(tmp_path), adaptation=AdaptationSpec("lora", rank=2))
    with pytest.raises(InputError, match=r"\d\d % of the parameters .* more than a head: roberta\.encoder"):
        load_model(spec, classes=("a", "b"), kind="text")
