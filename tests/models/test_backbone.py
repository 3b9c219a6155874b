"""A frozen network next to a model of two encoders: its features of the original images."""

import pytest
import torch
from tiny_models import images, load

from fedfm.errors import InputError
from fedfm.models.backbone import Backbone, backbone


def test_features_are_those_of_the_pictures_themselves():
    table = images(6, side=32)
    clip = load("nano-clip", table, "lora", task="zero_shot")
    side = clip.prepare(table, range(6)).tensors["pixel_values"].shape[-1]
    exact = images(6, side=side)  # the processor resizes nothing: only rounding to 8 bits is between
    found = backbone("nano-vit", "cpu").features(clip.prepare(exact, range(6)), clip)
    vit = load("nano-vit", exact, "head")
    expected = vit.encode(vit.prepare(exact, range(6))).tensors["features"]
    assert found.shape == (6, backbone("nano-vit", "cpu").width)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_models_that_classify_no_images_are_refused():
    with pytest.raises(InputError, match="nano-clip"):
        Backbone("nano-clip", "cpu")
    with pytest.raises(InputError, match="no-such"):
        Backbone("no-such", "cpu")
