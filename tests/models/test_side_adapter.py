"""Side adapters: the chain by hand and by loops, the released states, and any vision transformer with them."""

import math

import pytest
import torch
from safetensors.torch import load_file

import fedfm
from fedfm.api.predict import export, predict
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.models.adapters.side_adapter import STATES, SideAdapter, of_states, projection_of, release
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from small import experiment, pictures, tiny_vit


def side(**keys):
    spec = ModelSpec("nano-vit", adaptation=AdaptationSpec("side_adapter", **keys))
    return load_model(spec, classes=("a", "b", "c"), kind="image", seed=3)


def test_two_blocks_by_hand():
    net = SideAdapter(2, 1, 2, 1, 2)
    with torch.no_grad():
        net.down.copy_(torch.tensor([[[1.0, 1.0]], [[1.0, -1.0]]]))
        net.up.copy_(torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]]))
    states = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]])  # b_1, b_2 = h_0
    assert net.last_states(states)[0, 0].tolist() == pytest.approx([1.9544997, 0.9780755], abs=1e-6)
    with torch.no_grad():
        net.up[1] = 0.0  # then h_2 = h_1
    assert net.last_states(states)[0, 0].tolist() == pytest.approx([1.9544997, 1.0], abs=1e-6)


def gelu(x):
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def product(a, b):
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a]


def added(*terms):
    return [[sum(values) for values in zip(*rows, strict=True)] for rows in zip(*terms, strict=True)]


def naive(net, states):
    """h_L (P, d) of one row, by lists."""
    p = {name: x.double().tolist() for name, x in net.state_dict().items()}
    b = states.double().tolist()
    h = b[-1]
    for level in range(len(b)):
        z, alpha = added(b[level], h), p["alpha"][level]
        inner = [[gelu(x) for x in row] for row in product(z, list(zip(*p["down"][level], strict=True)))]
        g = [[alpha * x for x in row] for row in product(inner, list(zip(*p["up"][level], strict=True)))]
        if len(z) > 1:
            mixed = [[gelu(x) for x in row] for row in product(p["mix_down"][level], added(z, g))]
            mixed = [[alpha * x for x in row] for row in product(p["mix_up"][level], mixed)]
            g = added(g, mixed)
        h = added(g, h)
    return h


@pytest.mark.parametrize("positions", [1, 4])
def test_the_chain_equals_a_loop(positions):
    torch.manual_seed(0)
    net = SideAdapter(3, positions, 6, 2, 4).double()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    states = torch.randn(2, 3, positions, 6, dtype=torch.float64)
    for row, h in zip(states, net.last_states(states), strict=True):
        assert torch.allclose(h, torch.tensor(naive(net, row), dtype=torch.float64), atol=1e-12)
    first = net.last_states(states)[:, 0]
    first = (first - first.mean(-1, keepdim=True)) / (first.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    assert torch.allclose(net(states), first @ net.head.weight.T + net.head.bias, atol=1e-12)


def test_a_new_side_adapter_is_a_linear_probe_and_equal_at_every_party():
    net, again, other = (SideAdapter(4, 5, 64, 8, 3).draw(seed) for seed in (1, 1, 2))
    for (name, p), q, r in zip(net.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, r) or name in ("up", "alpha", "mix_up", "head.bias")
    assert not net.up.any()
    assert not net.mix_up.any()
    assert torch.equal(net.alpha, torch.full((4,), 2 / 8))
    assert float(net.down.detach().var()) == pytest.approx(1 / 64, rel=0.1)
    assert float(net.mix_down.detach().var()) == pytest.approx(1 / 5, rel=0.3)
    states = torch.randn(2, 4, 5, 64)
    assert torch.equal(net.last_states(states), states[:, -1])


def test_released_states_are_means_of_the_stated_tokens():
    patches = torch.arange(16.0)[:, None]  # (T, 1): the number of the patch
    assert release("class", 16, (4, 4))(patches).tolist() == [[7.5]]
    assert release("grid", 16, (4, 4))(patches).flatten().tolist() == [7.5, 2.5, 4.5, 10.5, 12.5]
    token = torch.cat([torch.full((1, 1), 100.0), patches])
    assert release("class", 17, (4, 4))(token).tolist() == [[100.0]]
    assert release("grid", 17, (4, 4))(token).flatten().tolist() == [100.0, 2.5, 4.5, 10.5, 12.5]
    assert release("grid", 6, (2, 3))(torch.arange(6.0)[:, None]).flatten().tolist() == [2.5, 0.0, 1.5, 3.0, 4.5]
    with pytest.raises(InputError, match="no quadrants"):
        release("grid", 3, (1, 3))


@pytest.mark.parametrize(("released", "shape"), [("class", (8, 1, 128)), ("grid", (8, 5, 128)), ("tokens", (8, 16, 6))])
def test_states_of_a_frozen_transformer(released, shape):
    model = side(rank=2, released=released, projection=6)
    rows = Rows({"pixel_values": torch.randn(40, 3, 32, 32)}, labels=torch.zeros(40, dtype=torch.int64))
    states = model.encode(rows).tensors[STATES]
    assert states.shape == (40, *shape)
    levels = torch.stack(model.backbone.blocks(rows)[1:], 1) / model.scales[:, None, None]
    if released == "class":
        assert torch.allclose(states[:, :, 0], levels.mean(2), atol=1e-6)
    if released == "tokens":
        assert torch.allclose(states, levels @ projection_of(model.backbone.module, 128, 6), atol=1e-5)
    # Only adapters and head are trained and sent; rows that are not encoded give the same logits.
    assert set(model.names) <= {"down", "up", "alpha", "mix_down", "mix_up", "head.weight", "head.bias"}
    assert torch.allclose(model.predict(rows), model.predict(model.encode(rows)), atol=1e-5)


def test_a_projection_wider_than_a_token_is_refused():
    assert side(released="tokens", projection=128).net.shape == (8, 16, 128)
    with pytest.raises(InputError, match="projection = 129: 'nano-vit' has 128 values per token"):
        side(released="tokens", projection=129)


def test_a_row_outside_a_students_ranges_becomes_zeros_in_all_blocks():
    states = torch.tensor(
        [[[[1.0, -2.0]], [[3.0, 0.0]]], [[[2.5, 0.0]], [[1.0, 1.0]]], [[[math.nan, 0.0]], [[1.0, 1.0]]]]
    )
    model = of_states(2, 1, 2, 1, ("a", "b"))
    assert model.within_ranges(states) is states  # no student
    model.ranges = torch.tensor([2.0, 3.0])
    assert torch.equal(model.within_ranges(states), torch.cat([states[:1], torch.zeros(2, 2, 1, 2)]))
    near = model.within_ranges(states[:2], unit=torch.tensor([1.25, 1.0]))  # the ranges are 2.5 and 3
    assert torch.equal(near, states[:2])
    assert not model.within_ranges(states, unit=0.5).any()


def test_a_client_without_the_transformer_trains_the_side_adapter():
    owner = side(rank=4, released="grid")
    rows = owner.encode(Rows({"pixel_values": torch.randn(3, 3, 32, 32)}))
    party = of_states(*owner.net.shape, 4, owner.classes)
    assert party.layout == owner.layout
    party.load(owner.params())
    assert torch.equal(party.predict(rows), owner.predict(rows))
    with pytest.raises(ValueError, match="owner"):
        party.states(Rows({"pixel_values": torch.zeros(1, 3, 32, 32)}))


def tables(folder, **adaptation):
    found = experiment(folder, method={"name": "fedavg", "rounds": 3, "local": {"learning_rate": 0.3, "epochs": 5}})
    found["data"]["path"] = str(pictures(folder, 120))
    found["model"] = {"name": str(tiny_vit(folder)), "adaptation": {"name": "side_adapter", "rank": 4, **adaptation}}
    return found


def test_a_side_adapter_adapts_any_vision_transformer(tmp_path):
    result = fedfm.run(tables(tmp_path, released="grid"), tmp_path / "run")
    assert result["accuracy"] > 0.8  # a quarter is guessing
    export(tmp_path / "run", "torch", tmp_path / "out")
    trained = load_file(tmp_path / "out" / "model.safetensors")
    model = load_model(
        ModelSpec(str(tiny_vit(tmp_path)), adaptation=AdaptationSpec("side_adapter", rank=4, released="grid")),
        classes=("ant", "bee", "cow", "dog"),
        kind="image",
    )
    assert {n: tuple(x.shape) for n, x in trained.items()} == {n: s for n, _, s in model.layout.entries}
    found = predict(tmp_path / "run", tmp_path / "pictures.npz")
    assert len(found["predictions"]) == 120


@pytest.mark.parametrize(
    ("model", "data", "reason"),
    [
        ({"name": "features", "adaptation": {"name": "side_adapter"}}, None, "not a transformer of image patches"),
        ({"name": "nano-gpt2", "weights": "random", "adaptation": {"name": "side_adapter"}}, "text", "side_adapter"),
    ],
)
def test_other_models_are_refused(model, data, reason, tmp_path):
    found = experiment(tmp_path)
    found["model"] = model
    if data == "text":
        rows = tmp_path / "rows.csv"
        rows.write_text("text,label\n" + "\n".join(f"word {i},{i % 2}" for i in range(40)))
        found["data"]["path"] = str(rows)
    with pytest.raises(InputError, match=reason):
        fedfm.run(found, tmp_path / "run")
