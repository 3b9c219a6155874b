"""Polynomial students: polynomials in place of functions, their intervals, and blocks folded for encrypted tokens."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from fedfm.encrypted.student import conversion, folding
from fedfm.encrypted.student.fit_polynomials import Measured, apply, check_ratio, entry, exponential_of
from fedfm.encrypted.student.modules import PolynomialGelu, PolynomialNorm, PolynomialSoftmax
from fedfm.encrypted.student.polynomials import Exponential, Inverse, InverseSquareRoot, Quadratic
from fedfm.errors import InputError
from fedfm.models import derived_modules
from fedfm.models.load import load_model
from fedfm.models.saved_modules import as_saved
from fedfm.models.spec import AdaptationSpec, ModelSpec
from folded_blocks import states_by_definition
from tiny_students import make_student, tiny


def load(folder, adaptation="full", **spec):
    spec = ModelSpec(str(folder), adaptation=AdaptationSpec(adaptation), **spec)
    return load_model(spec, classes=("a", "b", "c"), kind="image")


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """A student with 4 tokens, width 8 and 2 blocks, and rows."""
    folder = tmp_path_factory.mktemp("student") / "ijepa"
    x = make_student("ijepa", folder)
    return folder, x


# --- functions --------------------------------------------------------------------------------------------------------
def test_numbers_of_the_specification():
    assert float(Exponential(6, 0)(torch.tensor(-4.0, dtype=torch.float64))) == pytest.approx(2.1555556, abs=1e-7)
    softmax = PolynomialSoftmax(1).eval()
    softmax.exponential, softmax.inverse = Exponential(2, 3), Inverse(7, (0.01, 1.99), 1.0)
    # One token: its centred key is zero, exp 1, and 1 / (0.01 x 1) by seven steps is 92.36850, times 0.01.
    softmax.scales.fill_(0.01)
    q = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    assert float(softmax(q, q, None, 1.0)) == pytest.approx(0.9236850, abs=1e-6)
    norm = PolynomialNorm(torch.nn.LayerNorm(2, dtype=torch.float64)).eval()
    norm.inverse = InverseSquareRoot(0, (1.0, 4.0))
    y = norm(torch.tensor([[1.0, -1.0]], dtype=torch.float64))  # variance 1: p - q = 0.9129219
    assert y[0, 0].item() == pytest.approx(0.9129219, abs=1e-6)
    gelu = PolynomialGelu(torch.nn.GELU()).eval()
    gelu.quadratic = Quadratic()
    assert gelu(torch.tensor([-1.0, 2.0])).tolist() == pytest.approx([0.375, 1.5])


def test_without_polynomials_nothing_changes():
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8) * 2 + 1
    exact = torch.nn.LayerNorm(8)
    torch.nn.init.normal_(exact.weight)
    assert torch.allclose(PolynomialNorm(exact)(x), exact(x), atol=1e-6)
    assert torch.equal(PolynomialGelu(torch.nn.GELU())(x), torch.nn.functional.gelu(x))
    q, k = torch.randn(2, 3, 2, 5, 4)
    softmax = PolynomialSoftmax(2)
    assert torch.allclose(softmax(q, k, None, 0.5), (0.5 * q @ k.mT).softmax(-1), atol=1e-6)
    mask = torch.tensor([1, 1, 1, 0, 0], dtype=torch.bool).expand(3, 1, 5, 5)
    masked = (0.5 * q @ k.mT).masked_fill(~mask, -math.inf).softmax(-1)
    assert torch.allclose(softmax(q, k, mask, 0.5), masked, atol=1e-6)


def test_masked_keys_do_not_influence_the_softmax():
    torch.manual_seed(0)
    q, k = 0.5 * torch.randn(2, 1, 1, 4, 2)
    softmax = PolynomialSoftmax(1).eval()
    softmax.exponential, softmax.inverse = Exponential(2, 3, (-9, 9)), Inverse(7, (0.02, 1.98), 1.0)
    softmax.scales.fill_(0.2)
    mask = torch.tensor([True, True, True, False]).expand(1, 1, 4, 4)
    weights = softmax(q, k, mask, 1.0)
    assert softmax.total == 4 * 3 + 4
    assert weights[..., 3].abs().max() == 0
    changed = k.clone()
    changed[..., 3, :] = 100.0
    assert torch.equal(softmax(q, changed, mask, 1.0), weights)
    assert torch.allclose(weights[..., :3], softmax(q, k[..., :3, :], None, 1.0), atol=1e-6)


def test_arguments_are_clamped_in_training_and_counted_in_evaluation():
    gelu = PolynomialGelu(torch.nn.GELU())
    gelu.quadratic = Quadratic(0.125, 0.25, 0.5, (-2.0, 2.0))
    x = torch.tensor([-3.0, 0.0, 1.7, math.nan])
    gelu.eval()
    assert gelu(x)[0] == pytest.approx(0.125 * 9 - 0.75 + 0.5)
    assert (gelu.outside, gelu.total, gelu.penalty) == (2, 4, None)
    gelu.train()
    gelu(x[:3])
    assert gelu.penalty is None  # training that does not use it keeps no graph of it
    gelu.hinged = True
    y = gelu(x[:3])
    assert y[0] == pytest.approx(0.125 * 4 - 0.5 + 0.5)
    assert float(gelu.penalty) == pytest.approx((0.7**2 + 0.05**2) / 3)  # beyond 80 % of the half interval
    assert gelu.total == 4
    norm = PolynomialNorm(torch.nn.LayerNorm(2))
    norm.inverse = InverseSquareRoot(2, (1.0, 4.0))
    norm.hinged = True
    norm(torch.tensor([[4.0, -4.0]]))  # variance 16, two half intervals of its logarithm from the end
    assert float(norm.penalty) == pytest.approx((3 - 0.8) ** 2, rel=1e-5)


# --- choosing ---------------------------------------------------------------------------------------------------------
def measured(**extremes):
    found = Measured()
    usual = {"scores": [-3, 5], "hidden": [-2, 2], "first": [1.0, 4.0], "second": [0.5, 2.0]}
    for name, ends in (usual | extremes).items():
        found.extremes[name] = torch.tensor(ends, dtype=torch.float64)
    found.extremes.setdefault("sums", torch.tensor([[4.0, 5.0], [12.0, 10.0]], dtype=torch.float64))
    x = torch.randn(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.nn.functional.gelu(x)
    found.moments = torch.stack([(x**i).sum() for i in range(5)])
    found.targets = torch.stack([(y * x**i).sum() for i in range(3)])
    return found


def test_intervals_are_widened_and_scales_are_of_each_head():
    e = entry(measured(), "scaled", exponential_of("scaled", 2, 3), "block 1")
    assert e["exp"]["interval"] == pytest.approx([1 - 4 * 1.3, 1 + 4 * 1.3])
    assert e["norms"][0]["interval"] == pytest.approx([1 / 1.3, 4 * 1.3])
    lows, highs = np.array([4.0, 5.0]) / 1.3, np.array([12.0, 10.0]) * 1.3
    scales = 2 / (lows + highs)
    assert e["inverse"]["scales"] == pytest.approx(scales.tolist())
    assert e["inverse"]["interval"] == pytest.approx([(lows * scales).min(), (highs * scales).max()])
    assert [e["gelu"][k] for k in "abc"] == pytest.approx([0.2116, 0.5, 0.0705], abs=0.01)
    for norm in e["norms"]:  # the fewest steps within 0.005
        interval = tuple(norm["interval"])
        assert InverseSquareRoot(norm["steps"], interval).error() <= 5e-3
        assert InverseSquareRoot(norm["steps"] - 1, interval).error() > 5e-3


def test_intervals_are_widened_as_far_as_64_allows():
    e = entry(measured(first=[1.0, 50.0], sums=[[1.0, 1.0], [60.0, 2.0]]), "scaled", Exponential(), "block 1")
    factor = math.sqrt(64 / 50)
    assert e["norms"][0]["interval"] == pytest.approx([1 / factor, 50 * factor])
    assert e["inverse"]["interval"][1] / e["inverse"]["interval"][0] == pytest.approx(64)
    assert e["inverse"]["scales"][1] == pytest.approx(2 / (1 / 1.3 + 2 * 1.3))


def test_the_papers_polynomials():
    e = entry(measured(), "paper", exponential_of("paper", 2, 3), "block 1")
    assert (e["exp"]["degree"], e["exp"]["squarings"], e["inverse"]["steps"]) == (6, 0, 7)
    assert e["inverse"]["scales"] == pytest.approx([1 / (12 * 1.3), 1 / (10 * 1.3)])
    assert [e["gelu"][k] for k in "abc"] == [0.125, 0.25, 0.5]
    assert e["norms"][1] == {
        "kind": "inverse",
        "steps": 7,
        "scale": 1 / 2.6,
        "interval": pytest.approx([0.5 / 1.3, 2.6]),
    }


def test_arguments_that_spread_too_far_are_refused():
    for changes in ({"first": [0.1, 40.0]}, {"sums": [[1.0, 1.0], [70.0, 50.0]]}, {"second": [0.0, 1.0]}):
        with pytest.raises(InputError, match=r"block 3: .* at most 64; train longer"):
            entry(measured(**changes), "scaled", Exponential(), "block 3")
    with pytest.raises(ValueError, match="at most 64"):
        check_ratio((1.0, 64.1), "row sums")
    check_ratio((1.0, 64.0), "row sums")


@pytest.mark.sample("head", "lora", "top_layers")
# --- folders ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("adaptation", ["full", "head", "lora", "top_layers"])
def test_a_folder_loads_with_every_adaptation(twin, adaptation):
    folder, x = twin
    model = load(folder, adaptation)
    assert conversion.is_polynomial_student(model.module)
    assert len(derived_modules.violations(model.module)) == 8
    with torch.no_grad():
        out = model.logits({"pixel_values": x})
    assert out.isfinite().all()
    counts = derived_modules.violations(model.module).values()
    assert all(total for _, total in counts)
    model.train_mode()
    loss = model.loss({"pixel_values": x, "labels": torch.zeros(len(x), dtype=torch.long)})
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.live().values())
    assert {total for _, total in derived_modules.violations(model.module).values()} == {t for _, t in counts}


def test_saved_and_loaded_again_it_gives_the_same_bits(twin, tmp_path):
    from fedfm.models.export import export

    folder, x = twin
    model = load(folder)
    export(model, model.params(), "hf", tmp_path / "again")
    again = load(tmp_path / "again")
    assert again.fingerprint == load(tmp_path / "again").fingerprint
    with torch.no_grad():
        assert torch.equal(model.logits({"pixel_values": x}), again.logits({"pixel_values": x}))
    module, _, _ = as_saved(str(tmp_path / "again"), model.module)
    assert conversion.is_polynomial_student(module)
    assert len(derived_modules.violations(module)) == 8


def test_transformers_loads_the_exact_model(twin):
    folder, _ = twin
    plain = transformers.AutoModel.from_pretrained(folder)
    assert isinstance(plain.layers[0].layernorm_before, torch.nn.LayerNorm)


def test_the_student_differs_from_the_exact_model(twin):
    folder, x = twin
    exact = transformers.AutoModel.from_pretrained(folder).eval()
    model = load(folder)
    with torch.no_grad():
        a, b = exact(pixel_values=x).last_hidden_state, model.module.ijepa(pixel_values=x).last_hidden_state
    assert 1e-5 < float((a - b).abs().max()) < 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.update(version=2), "version 2"),
        (lambda t: t["blocks"].pop(), "1 blocks, but the model has 2"),
        (lambda t: t["blocks"][0]["exp"].update(degree=3), "even degree"),
        (lambda t: t["blocks"][0]["norms"][0].update(interval=[0.1, 7.0]), "at most 64"),
        (lambda t: t["blocks"][0]["inverse"].update(scales=[1.0]), "1 scales came for 2 heads"),
        (lambda t: t["blocks"][1].pop("gelu"), "gelu"),
        (lambda t: t["blocks"][1]["gelu"].update(a=-1.0), "a > 0"),
        (lambda t: t["blocks"][1]["gelu"].update(interval=[2.0, 1.0]), "low <= high"),
    ],
)
def test_damaged_tables_are_refused(twin, tmp_path, change, match):
    folder, _ = twin
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    change(config["fedfm_polynomials"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InputError, match=f"fedfm_polynomials in config.json is not as `fedfm distil` writes it.*{match}"
    ):
        load(tmp_path)


def test_other_models_are_refused():
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16))
    with pytest.raises(InputError, match="polynomials can replace only one softmax"):
        conversion.prepare(gpt)


# --- folding ----------------------------------------------------------------------------------------------------------
@pytest.mark.proof
@pytest.mark.parametrize("polynomials", ["scaled", "paper"])
def test_the_folded_model_by_its_definition(tmp_path, polynomials):
    x = make_student("ijepa", tmp_path, polynomials=polynomials).double()
    module = load(tmp_path).module.double()
    got = conversion.fold(module)
    with torch.no_grad():
        want = conversion.block_states(module, x)
    assert want.shape == (len(x), 2, 4, 8)
    np.testing.assert_allclose(states_by_definition(got, x), want, atol=1e-9)
    assert 0.1 < want.std() < 10
    for level in range(2):
        assert float(want[:, level].abs().max()) < got.ranges[level]
        assert float(want[:, level].square().mean().sqrt()) == pytest.approx(got.scales[level], rel=1e-3)
    assert got.bound > float(want.abs().max())


@pytest.mark.proof
@pytest.mark.parametrize(("size", "tokens"), [((4, 12), 4), ((8, 8), 5)])
def test_a_class_token_is_a_token_of_zeros(tmp_path, size, tokens):
    """Three or four patches and a class token."""
    x = make_student("vit", tmp_path, size=size).double()
    module = load(tmp_path).module.double()
    got = conversion.fold(module)
    assert got.patch(x).shape == (len(x), tokens, 48)
    with torch.no_grad():
        want = conversion.block_states(module, x)
    np.testing.assert_allclose(states_by_definition(got, x), want, atol=1e-9)


def test_centring_changes_no_output(tmp_path):
    tiny("vit", tmp_path)
    a, b = load(tmp_path), load(tmp_path)
    x = torch.randn(4, 3, 8, 8)
    conversion.centre(b.module)
    with torch.no_grad():
        assert torch.allclose(a.logits({"pixel_values": x}), b.logits({"pixel_values": x}), atol=1e-6)
    assert float(b.module.vit.layers[0].mlp.fc2.weight.detach().mean(0).abs().max()) < 1e-7


@pytest.mark.proof
def test_models_that_cannot_run_encrypted_are_refused(twin, tmp_path):
    folder, _ = twin
    with pytest.raises(InputError, match="no polynomials"):
        conversion.fold(load(tiny("ijepa", tmp_path / "plain")).module)
    with pytest.raises(InputError, match="merge"):
        conversion.fold(load(folder, "lora").module)
    module = load(folder).module
    module.config.fedfm_polynomials["outside"] = 0.0011
    with pytest.raises(InputError, match=r"0.11% of the arguments .* train it longer"):
        conversion.fold(module)


@pytest.mark.proof
def test_a_folded_block_on_encrypted_tokens(twin):
    pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')
    from encrypted_session import BOUND, Session
    from fedfm.encrypted.ckks.transformer_block import EncryptedBlock

    folder, x = twin
    module = load(folder).module.double()
    got = conversion.fold(module)
    assert got.bound <= BOUND
    session = Session()
    tokens = got.patch(x.double()).numpy() @ got.embedding.T + got.bias + got.positions
    cipher = session.send(tokens)
    with torch.no_grad():
        want = conversion.block_states(module, x.double()).numpy()
    for level, block in enumerate(got.blocks):
        cipher = EncryptedBlock(session.layout, **{f: getattr(block, f) for f in vars(block)})(cipher)
        slots = session.decrypt(cipher)
        np.testing.assert_allclose(session.layout.unpack(slots, len(x)), want[:, level], atol=1e-3)


def test_magnitudes_inside_polynomials():
    inside = folding._inside(Exponential(2, 3, (-8.0, 8.0)))
    assert inside == pytest.approx(float(Exponential(2, 3)(torch.tensor(8.0, dtype=torch.float64))))
    assert folding._inside(replace(Quadratic(), interval=(0.0, 4.0))) >= 0.125 * 16 + 0.25 * 4


def test_the_depth_of_a_block_is_counted():
    tables = {
        "exp": {"degree": 6, "squarings": 0, "interval": [-1, 1]},
        "inverse": {"steps": 4, "interval": [0.5, 1.5], "scales": [1.0, 1.0]},
        "norms": [{"kind": "inverse_square_root", "steps": 2, "interval": [1, 4]}] * 2,
        "gelu": {"a": 0.2, "b": 0.5, "c": 0.1, "interval": [-3, 3]},
    }
    config = transformers.IJepaConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    (block,) = conversion.prepare(transformers.IJepaModel(config))
    with pytest.raises(ValueError, match="exact"):
        conversion.depth(block)
    apply(block, tables)
    assert conversion.depth(block) == 29  # k = 2, e = 3, d = 4


def test_the_built_in_student_is_near_its_teacher():
    """On rows that it was not distilled on: features near nano-vit's, arguments inside the intervals, folding."""
    from fedfm.data.load import load_table
    from fedfm.data.spec import DataSpec

    table = load_table(DataSpec(name="digits", limit=100), seed=0)
    twin, exact = (
        load_model(ModelSpec(name, adaptation=AdaptationSpec("head")), classes=table.classes, kind="image")
        for name in ("nano-vit-fhe", "nano-vit")
    )
    rows = twin.prepare(table, range(64))
    a, b = twin.features(rows), exact.features(rows)
    assert float(((a - b).square().mean(0) / b.var(0)).mean()) < 0.15
    counts = derived_modules.violations(twin.module).values()
    assert sum(outside for outside, _ in counts) <= 1e-3 * sum(total for _, total in counts)
    got = conversion.fold(twin.module)
    assert (len(got.blocks), got.embedding.shape, got.positions.shape) == (8, (128, 192), (16, 128))
    with torch.no_grad():
        states = conversion.block_states(twin.module, rows.tensors["pixel_values"][:8])
    assert (states.abs().amax((0, 2, 3)).numpy() < got.ranges).all()
    assert float(states.abs().max()) < got.bound
