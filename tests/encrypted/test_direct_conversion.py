"""A polynomial student without training: what its polynomials and offsets are, and that it computes on ciphertexts."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erf

from fedfm.encrypted.student import conversion, folding, interval_table
from fedfm.encrypted.student.direct_conversion import convert
from fedfm.encrypted.student.distil import distil
from fedfm.encrypted.student.distillation_loss import Distiller, Recipe, save
from fedfm.encrypted.student.drawn_pictures import drawn_pictures
from fedfm.encrypted.student.input_limits import measure_detail
from fedfm.encrypted.student.modules import PolynomialSoftmax
from fedfm.encrypted.student.neuron_polynomials import MARGIN, NeuronGelu, fit_neurons
from fedfm.errors import InputError
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from folded_blocks import states_by_definition
from small import pictures
from tiny_students import full, tiny


def gelu(x):
    return x * (1 + erf(x / np.sqrt(2))) / 2


@settings(max_examples=20, deadline=None)
@given(st.floats(-8, 8), st.floats(0.05, 6), st.integers(0, 2**31))
def test_a_neuron_is_close_to_gelu_on_its_interval(mean, deviation, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(mean, deviation, (400, 3))
    sample = torch.from_numpy(x)
    fitted = fit_neurons(sample, sample.amin(0), sample.amax(0))
    reach = (x.max() - x.min()) * MARGIN / 2
    error = np.abs(fitted.values(fitted.places(sample)).numpy() - gelu(x))
    assert error.max() < 0.05 * reach + 1e-3
    assert np.sqrt((error**2).mean()) < 0.012 * reach + 1e-3
    assert float(fitted.places(sample).abs().max()) <= 1  # within the interval


def test_the_products_after_the_square_give_the_polynomial():
    """Knuth's form against the powers that least squares gave, by polynomial arithmetic of NumPy."""
    x = torch.randn(300, 4, dtype=torch.float64)
    fitted = fit_neurons(x, x.amin(0), x.amax(0))
    t = np.linspace(-1, 1, 9)
    for j in range(4):
        c0, c1, c2 = (shift[j] for shift in fitted.core.shifts)
        v = np.polynomial.Polynomial([0, 1])
        y = (v + c0) * v + c1
        want = ((y + v + c2) * y)(t**2)
        np.testing.assert_allclose(
            fitted.core.evaluate_folded(torch.from_numpy(t)[:, None]).numpy()[:, j], want, rtol=1e-9
        )
    again = NeuronGelu.from_entry(json.loads(json.dumps(fitted.to_entry())))
    assert torch.equal(again.values(x), fitted.values(x))


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """Folder, rows and entries of a converted ViT of five tokens."""
    folder = tmp_path_factory.mktemp("direct")
    start = tiny("vit", folder / "start", (8, 8))
    teacher, made = full(start), full(start)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        batch = {"pixel_values": torch.randn(64, 3, 8, 8)}
    distiller = Distiller(teacher, made, Recipe(), new_head=True)
    distiller.put(convert(distiller.student, lambda: [batch]))
    with torch.no_grad():
        distiller.teacher(batch)
        distiller.student(batch)
    features = distiller.teacher.features, distiller.student.features
    interval_table.finish(distiller, lambda: [batch], 0.0)
    save(made, folder / "student", new_head=True)
    return folder / "student", batch["pixel_values"], features


def test_features_stay_near_the_models_without_training(student):
    _, _, (want, got) = student
    distance = ((want - got).square().mean(0) / want.var(0)).mean()
    assert float(distance) < 0.05


def test_a_row_beyond_the_measured_ones_keeps_its_numbers(student):
    """Row sums and variances have room above; brighter pictures than all measured ones are the simplest such rows."""
    folder, x, _ = student
    module = load_model(ModelSpec(str(folder), adaptation=AdaptationSpec("full")), classes=("a", "b"), kind="image")
    entries = module.module.config.fedfm_polynomials["blocks"]
    for entry in entries:
        largest = entry["inverse"]["interval"][1] / min(entry["inverse"]["scales"])  # row sum
        assert entry["exp"]["interval"][1] == pytest.approx(np.log(largest))
    with torch.no_grad():
        states = conversion.block_states(module.module, 1.5 * x)
    assert bool(states.isfinite().all())
    assert float(states.abs().max()) < 10 * max(entry["range"] for entry in entries)


def test_maps_fitted_to_the_exact_states_take_back_errors(tmp_path, monkeypatch):
    start = tiny("vit", tmp_path / "start", (8, 8))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        batch = {"pixel_values": torch.randn(96, 3, 8, 8)}
    teacher = Distiller(full(start), full(start), Recipe(), new_head=True).teacher

    def distance():
        taps = Distiller(full(start), full(start), Recipe(), new_head=True).student
        convert(taps, lambda: [batch])
        with torch.no_grad():
            teacher(batch), taps(batch)
        return float((teacher.features - taps.features).square().mean())

    fitted = distance()
    monkeypatch.setattr("fedfm.encrypted.student.direct_conversion.Fitting._fit", lambda *_: None)
    assert fitted < 0.7 * distance()


def test_the_offset_changes_no_exact_softmax(student):
    softmax = PolynomialSoftmax(2)
    q, k = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 4)
    before = softmax(q, k, None, 0.5)
    softmax.offset, softmax.shift = torch.randn(2, 4), torch.randn(2)
    torch.testing.assert_close(softmax(q, k, None, 0.5), before)
    torch.testing.assert_close(before, (0.5 * q @ k.mT).softmax(-1))


def test_the_folded_student_is_the_module(student):
    folder, x, _ = student
    spec = ModelSpec(str(folder), adaptation=AdaptationSpec("full"))
    module = load_model(spec, classes=("a", "b"), kind="image").module.double()
    folded = conversion.fold(module)
    assert {"key_offset", "score_shift", "skip"} <= set(folded.blocks[0].weights)
    with torch.no_grad():
        want = conversion.block_states(module, x.double())
    np.testing.assert_allclose(states_by_definition(folded, x.double()), want, atol=1e-9)


@pytest.mark.proof
def test_a_converted_block_computes_on_ciphertexts(student):
    pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')
    from fedfm.core.rows import Rows
    from fedfm.encrypted.inference.model_serialization import model_bytes, model_of
    from fedfm.encrypted.protocol.masked import in_one_place

    folder, x, _ = student
    spec = ModelSpec(str(folder), adaptation=AdaptationSpec("side_adapter", released="class", projection=3))
    model = load_model(spec, classes=("a", "b"), kind="image")
    module = model.backbone.module
    with torch.no_grad():
        want = conversion.block_states(module, x[:5])[:, :, 0] / model.scales[:, None]
    got = in_one_place(model, Rows({"pixel_values": x[:5]})).tensors["states"]
    np.testing.assert_allclose(got[:, :, 0], want, atol=2e-3)
    block, again = conversion.fold(module).blocks[1], model_of(model_bytes(conversion.fold(module))).blocks[1]
    np.testing.assert_array_equal(np.asarray(again.gelu.shifts), np.asarray(block.gelu.shifts))


def test_drawn_pictures_come_from_their_seed():
    first, again, other = drawn_pictures(64, 0, 16), drawn_pictures(64, 0, 16, 6), drawn_pictures(64, 1, 16)
    assert all(np.array_equal(a, b) for a, b in zip(first[6:], again, strict=True))
    differ = [a.size != b.size or not np.array_equal(a, b) for a, b in zip(first, other, strict=True)]
    assert sum(differ) >= 14  # two flat pictures may have one colour
    assert sum(np.asarray(p).std() > 0 for p in first) >= 14


@settings(max_examples=20, deadline=None)
@given(side=st.integers(2, 70), seed=st.integers(0, 99))
def test_drawn_pictures_fit_the_student(side, seed):
    sizes = {p.size for p in drawn_pictures(side, seed, 8)}
    assert all(width == height <= side for width, height in sizes)


def test_some_drawn_pictures_have_detail_of_one_pixel_and_some_are_enlarged():
    drawn = drawn_pictures(224, 0, 48)
    own = [p for p in drawn if p.size == (224, 224)]
    assert 0.2 < len(own) / len(drawn) < 0.6
    finest = [
        max(float(measure_detail(torch.tensor(np.asarray(p)).permute(2, 0, 1)[None])["detail"]) for p in part)
        for part in (own, [p.resize((128, 128)).resize((224, 224)) for p in own])
    ]
    assert finest[0] > 4 * finest[1]


def test_a_conversion_takes_drawn_pictures_and_writes_a_student(tmp_path):
    place = tmp_path / "vit"
    tiny("vit", place, (8, 8), head=True)
    rows = pictures(tmp_path, n=60, side=8)
    tables = {"data": {"path": str(rows)}, "model": {"name": str(place)}}
    result = distil(
        {**tables, "distil": {"epochs": [0, 0, 0], "direct": True, "drawn": 12, "threads": 1}}, tmp_path / "out"
    )
    assert result["epochs"] == 0
    assert result["distance"] < 0.1
    assert len(json.loads((tmp_path / "out" / "config.json").read_text())["fedfm_polynomials"]["blocks"]) == 2


def test_a_conversion_outside_its_intervals_asks_for_rows_not_for_training(student):
    folder, _, _ = student
    spec = ModelSpec(str(folder), adaptation=AdaptationSpec("full"))
    module = load_model(spec, classes=("a", "b"), kind="image").module
    module.config.fedfm_polynomials["outside"] = 0.0011
    with pytest.raises(InputError, match=r"0.11% of the arguments .* again on more rows .* wider distil\.margin"):
        conversion.fold(module)
    assert folding.remedy([{"gelu": {"a": 0.1}}]) == "train it longer"


def test_a_wider_margin_widens_the_neurons_intervals():
    x = torch.randn(300, 4, dtype=torch.float64)
    narrow, wide = (fit_neurons(x, x.amin(0), x.amax(0), margin) for margin in (1.3, 1.8))
    reach = (x.amax(0) - x.amin(0)) / 2
    for fitted, margin in ((narrow, 1.3), (wide, 1.8)):
        middle = (x.amax(0) + x.amin(0)) / 2
        for end in (middle - margin * reach, middle + margin * reach):
            assert float(fitted.places(end[None]).abs().max()) <= 1 + 1e-9


def test_a_wider_margin_widens_sums_and_variances(tmp_path):
    start = tiny("vit", tmp_path / "start", (8, 8))
    batch = {"pixel_values": torch.linspace(-2, 2, 48 * 192).sin().view(48, 3, 8, 8)}
    found = []
    for margin in (1.3, 1.8):
        taps = Distiller(full(start), full(start), Recipe(), new_head=True).student
        found.append(convert(taps, lambda: [batch], margin=margin)[0])
    ends = [np.array([e["inverse"]["interval"], e["norms"][0]["interval"]]) for e in found]
    narrow, wide = (e[:, 1] / e[:, 0] for e in ends)
    assert wide[0] / narrow[0] == pytest.approx((1.8 / 1.3) ** 2)
    assert wide[1] / narrow[1] == pytest.approx((1.8 / 1.3) ** 3)


def test_a_margin_without_a_conversion_is_refused(tmp_path):
    tables = {"data": {"name": "digits"}, "model": {"name": "nano-vit"}}
    with pytest.raises(InputError, match=r"distil\.margin = 1\.6"):
        distil({**tables, "distil": {"margin": 1.6}}, tmp_path / "out")


def test_a_conversion_trains_nothing(tmp_path):
    tables = {"data": {"name": "digits"}, "model": {"name": "nano-vit"}}
    with pytest.raises(InputError, match="trains nothing"):
        distil({**tables, "distil": {"direct": True}}, tmp_path / "out")
