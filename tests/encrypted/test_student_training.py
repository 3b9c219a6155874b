"""A student whose blocks are trained keeps its arguments in the intervals of its polynomials."""

import math

import pytest
import torch
from torch.nn import functional

from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.encrypted.student import conversion
from fedfm.encrypted.student.modules import Replaced
from fedfm.models import derived_modules
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.runtime.after_run_checks import outside
from fedfm.training import SGD, loop
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client
from tiny_students import CLASSES, make_student


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("student") / "vit"
    return folder, make_student("vit", folder)


def load(folder, adaptation="full"):
    spec = ModelSpec(str(folder), adaptation=AdaptationSpec(adaptation))
    return load_model(spec, classes=CLASSES, kind="image")


def trained(model, pictures, local):
    rows = Rows({"pixel_values": pictures}, labels=torch.arange(len(pictures)) % 3)
    client = Client("c", ClientData(lambda: rows, Rows, Rows), model, {}, 0, trainer=train_client)
    (w,) = loop.train([Job(client, model.params(), local)])
    return w, client.metrics["loss"]


def excess(module, arguments):
    """Mean squared excess over 80 % of the half interval, by the definition; of norms on logarithms."""
    low, high = next(p.interval for p in vars(module).values() if hasattr(p, "interval"))
    if "variance" in arguments:
        low, high, x = math.log(low), math.log(high), arguments["variance"].log()
    else:
        (x,) = arguments.values()
    return float(((((x - (low + high) / 2).abs() / ((high - low) / 2)) - 0.8).clamp(min=0) ** 2).mean())


@pytest.mark.proof
def test_the_local_loss_by_hand(twin):
    folder, x = twin
    model = load(folder)
    replaced = [m for m in model.module.modules() if isinstance(m, Replaced)]
    for m in replaced:
        if hasattr(m, "exponential"):
            m.exponential = None  # an exact softmax: norms and GELUs are left
    rest = [m for m in replaced if not hasattr(m, "exponential")]
    model.train_mode()
    for m in rest:
        m.recording = True
    with torch.no_grad():
        plain = float(functional.cross_entropy(model.logits({"pixel_values": 2 * x}), torch.arange(len(x)) % 3))
    by_hand = sum(excess(m, m.seen) for m in rest)
    assert by_hand > 0
    _, loss = trained(model, 2 * x, SGD(learning_rate=1e-9, batch_size=len(x)))
    assert loss == pytest.approx(plain + loop.PENALTY * by_hand, rel=1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("penalty", [0.0, loop.PENALTY])
def test_training_leaves_no_interval(twin, monkeypatch, penalty):
    folder, x = twin
    monkeypatch.setattr(loop, "PENALTY", penalty)
    model = load(folder)
    w, _ = trained(model, x, SGD(learning_rate=0.001, momentum=0.9, batch_size=8, epochs=100))
    model.load(w)
    conversion.forget(model.module)
    with torch.no_grad():
        model.logits({"pixel_values": x})
    outside = sum(n for n, _ in derived_modules.violations(model.module).values())
    assert (outside == 0) == (penalty > 0)


@pytest.mark.sample("head", "lora")
@pytest.mark.parametrize("adaptation", ["full", "head", "lora"])
def test_no_graph_outlives_a_step_and_a_frozen_backbone_has_no_penalty(twin, monkeypatch, adaptation):
    folder, x = twin
    losses = []
    for penalty in (0.0, 1.0):
        monkeypatch.setattr(loop, "PENALTY", penalty)
        model = load(folder, adaptation)
        losses.append(trained(model, 3 * x, SGD(learning_rate=1e-3, batch_size=16))[1])
        assert all(m.penalty is None for m in model.module.modules() if isinstance(m, Replaced))
    assert (losses[0] == losses[1]) == (adaptation == "head")


def test_a_head_takes_a_row_without_numbers_as_one_of_which_nothing_is_known(twin):
    folder, x = twin
    model = load(folder, "head")
    far = x.clone()
    far[0] = torch.randn(x[0].shape, generator=torch.Generator().manual_seed(0)) * 1e3
    far[0, 0, 0, 0] = math.nan  # as an argument far outside gives
    rows = Rows({"pixel_values": far}, labels=torch.arange(len(x)) % 3)
    features = model.encode(rows).tensors["features"]
    assert not features[0].any()
    assert torch.equal(features[1:], model.features(rows.take(range(len(x))))[1:])
    (told,) = outside(model.module)
    counts = derived_modules.violations(model.module).values()
    assert told.startswith(f"{sum(n for n, _ in counts):,} of {sum(t for _, t in counts):,} arguments")
    conversion.forget(model.module)
    model.encode(Rows({"pixel_values": x}, labels=rows.labels))
    assert outside(model.module) == []
