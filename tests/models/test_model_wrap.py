import pytest
import torch
import torch.nn.functional as F
from tiny_models import CLASSES, load, vectors
from torch import nn

from fedfm.core.rows import Rows
from fedfm.models.adapter_files import save_adapter
from fedfm.models.adapter_reading import load_adapter
from fedfm.models.metrics import evaluate
from fedfm.models.wrap import wrap


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def cross_entropy(module, batch):
    return F.cross_entropy(module(batch["features"]), batch["labels"])


def test_a_module_with_a_loss_serves_as_a_model():
    net, table = network(), vectors()
    model = wrap(net, cross_entropy, classes=CLASSES, head="2")
    assert model.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    rows = model.prepare(table, range(5))
    x = torch.from_numpy(table.inputs)
    torch.testing.assert_close(model.predict(rows), net(x).detach())
    torch.testing.assert_close(model.features(rows), net[1](net[0](x)).detach())
    assert model.encode(rows) is rows
    assert evaluate(model, rows)["n"] == 5
    w = model.params()
    model.loss(rows.batch(range(5))).backward()
    assert all(p.grad is not None for p in model.live().values())
    model.load(0.0 * w)
    assert model.predict(rows).abs().max() == 0


def test_a_wrapped_module_learns():
    table = vectors(30)
    model = wrap(network(), cross_entropy, classes=CLASSES)
    batch = model.prepare(table, range(30)).batch(range(30))
    optimiser = torch.optim.Adam(model.live().values(), lr=0.02)
    first = model.loss(batch).item()
    for _ in range(40):
        optimiser.zero_grad()
        model.loss(batch).backward()
        optimiser.step()
    assert model.loss(batch).item() < 0.9 * first


def test_named_parameters_alone_travel():
    model = wrap(network(), cross_entropy, trainable=["2.bias", "2.weight"])
    assert model.names == ("2.weight", "2.bias")
    assert model.head is None
    with pytest.raises(KeyError, match="nine"):
        wrap(network(), cross_entropy, trainable=["nine"])
    with pytest.raises(ValueError, match="expected a Linear"):
        wrap(network(), cross_entropy, head="1")


def test_own_logits_preparation_and_batch_norm(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 3)

        def forward(self, left, right):
            return self.out(self.norm(left + right))

    def prepare(table, index):
        x = torch.from_numpy(table.inputs[index])
        return Rows({"left": x, "right": -0.5 * x}, labels=torch.from_numpy(table.labels[index]))

    def loss(module, batch):
        return F.cross_entropy(module(batch["left"], batch["right"]), batch["labels"])

    model = wrap(Two(), loss, classes=CLASSES, head="out", prepare=prepare)
    rows = model.prepare(vectors(), range(5))
    assert "norm.running_mean" in model.names
    assert model.predict(rows).shape == (5, 3)
    assert model.features(rows).shape == (5, 4)
    save_adapter(model, model.params(), tmp_path)
    assert load_adapter(model, tmp_path).sha256() == model.params().sha256()
    doubled = wrap(model.module, loss, prepare=prepare, logits=lambda m, b: 2 * m(b["left"], b["right"]))
    torch.testing.assert_close(doubled.predict(rows), 2 * model.predict(rows))


def test_dropout_of_ones_own_module_is_on_in_training_only():
    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    model = wrap(net, cross_entropy, classes=CLASSES)
    rows = model.prepare(vectors(), range(5))
    batch = rows.batch(range(5))
    assert torch.equal(model.logits(batch), model.logits(batch))
    model.train_mode()
    assert torch.equal(model.predict(rows), model.predict(rows))
    assert not torch.equal(model.logits(batch), model.logits(batch))


def test_fingerprint_is_of_the_weights():
    a, b = wrap(network(), cross_entropy), wrap(network(), cross_entropy)
    with torch.no_grad():
        other = network()
        other[0].bias.add_(1)
    assert a.fingerprint == b.fingerprint != wrap(other, cross_entropy).fingerprint
    assert a.fingerprint != load("features", vectors()).fingerprint
