"""The states of a frozen model that `reproduce/` stores equal those of the model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedfm.core.rows import Rows
from fedfm.models.adapters.side_adapter import SideModel
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.spec import AdaptationSpec, ModelSpec

ROOT = Path(__file__).parents[2]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "reproduce"))
    monkeypatch.setattr(SideModel, "states", SideModel.states)  # both are put back afterwards
    monkeypatch.setattr(Model, "features", Model.features)
    yield importlib.import_module("states")
    sys.modules.pop("states", None)


def side(released: str) -> SideModel:
    adaptation = AdaptationSpec("side_adapter", released=released)
    model = load_model(ModelSpec("nano-vit", adaptation=adaptation), classes=("a", "b"), kind="image", seed=0)
    assert isinstance(model, SideModel)
    return model


def test_a_picture_is_computed_once_and_for_each_kind_of_release(
    kept: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = Rows({"pixel_values": torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))})
    models = {released: side(released) for released in ("grid", "class")}
    plain = {released: model.states(pictures) for released, model in models.items()}
    kept.keep()
    for released, model in models.items():
        torch.testing.assert_close(model.states(pictures.take([3, 0])), plain[released][[3, 0]])
        torch.testing.assert_close(model.states(pictures), plain[released])  # two known, three new, in their order
    again = side("grid")
    monkeypatch.setattr(again.backbone, "blocks", None)  # it is not asked again, nor is another load of it
    torch.testing.assert_close(again.states(pictures.take([4, 1])), plain["grid"][[4, 1]])
    assert again.states(pictures.take([])).shape == (0, *plain["grid"].shape[1:])


def test_the_inputs_of_a_frozen_head_are_kept_and_those_of_a_trained_model_are_not(
    kept: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = Rows({"pixel_values": torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(2))})

    def load(how: str) -> Model:
        spec = ModelSpec("nano-vit", adaptation=AdaptationSpec(how))
        return load_model(spec, classes=("a", "b"), kind="image", seed=0)

    plain = load("head").features(pictures)
    kept.keep()
    torch.testing.assert_close(load("head").features(pictures), plain)
    again, trained = load("head"), load("full")
    monkeypatch.setattr("fedfm.models.head_inputs.head_inputs", lambda model, head, rows: torch.zeros(len(rows), 1))
    torch.testing.assert_close(again.features(pictures.take([2, 1])), plain[[2, 1]])
    assert trained.features(pictures).shape == (3, 1)
