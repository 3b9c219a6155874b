"""A class token under encryption: of a student's tokens, four in four places or five in eight, the first is one."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedfm.core.rows import Rows
from fedfm.encrypted.student.folding import fold
from fedfm.errors import InputError
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from tiny_students import make_student

pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')

from fedfm.encrypted.inference.cost_estimate import plan
from fedfm.encrypted.inference.model_serialization import model_bytes, model_of
from fedfm.encrypted.protocol.masked import in_one_place


@pytest.fixture(scope="module", params=[(4, 12), (8, 8)], ids=["4 tokens", "5 tokens"])
def twin(tmp_path_factory, request):
    """Folder of a ViT of three or four patches and a class token, and the pictures that it was distilled on."""
    folder = tmp_path_factory.mktemp("student")
    return folder, make_student("vit", folder, size=request.param)


def sided(folder, released):
    spec = ModelSpec(str(folder), adaptation=AdaptationSpec("side_adapter", released=released, projection=3))
    return load_model(spec, classes=("a", "b"), kind="image")


def exact(folder, pictures):
    """(n, L, T, d): the outputs of the blocks of the module itself."""
    module = sided(folder, "class").backbone.module
    seen = []
    hooks = [block.register_forward_hook(lambda m, a, y: seen.append(y)) for block in module.vit.layers]
    with torch.no_grad():
        module(pixel_values=pictures)
    for hook in hooks:
        hook.remove()
    return torch.stack([y - y.mean(-1, keepdim=True) for y in seen], 1)


@pytest.mark.proof
def test_the_class_token_is_released_and_not_the_mean(twin):
    folder, pictures = twin
    model = sided(folder, "class")
    states = exact(folder, pictures[:5]) / model.scales[:, None, None]
    got = in_one_place(model, Rows({"pixel_values": pictures[:5]})).tensors["states"]
    assert got.shape == (5, 2, 1, 8)
    np.testing.assert_allclose(got[:, :, 0], states[:, :, 0], atol=1e-3)
    assert float((states[:, :, 0] - states.mean(2)).abs().max()) > 0.1  # the mean over the tokens is something else


@pytest.mark.proof
def test_all_tokens_are_released_with_the_class_token(twin):
    folder, pictures = twin
    model = sided(folder, "tokens")
    want = exact(folder, pictures[:5]) / model.scales[:, None, None] @ model.released.projection
    got = in_one_place(model, Rows({"pixel_values": pictures[:5]})).tensors["states"]
    np.testing.assert_allclose(got, want, atol=2e-3)
    assert got.shape == want.shape


@pytest.mark.proof
def test_other_processes_know_of_it(twin):
    matrices = fold(sided(twin[0], "class").backbone.module)
    assert model_of(model_bytes(matrices)).class_token
    assert not model_of(model_bytes(replace(matrices, class_token=False))).class_token


@pytest.mark.proof
def test_a_grid_has_no_class_token(twin):
    matrices = fold(sided(twin[0], "class").backbone.module)
    assert matrices.class_token
    with pytest.raises(InputError, match=f"has {len(matrices.positions)} tokens, the first a class token"):
        plan(matrices, [5], "grid")
    assert plan(matrices, [5], "class").messages > 10
