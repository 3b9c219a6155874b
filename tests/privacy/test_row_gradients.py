"""Sums of clipped row gradients by one backward pass a batch, against a loop over rows in float64."""

import numpy as np
import pytest
import torch
from torch import nn

import tiny_text
from fedfm.core.rows import Rows
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.models.families import Parts
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.preprocessors import Tools
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training import packed, private, row_gradients
from small import tiny_vit

CLASSES = ("ant", "bee", "cow")
LORA, FULL = AdaptationSpec("lora", rank=2), AdaptationSpec("full")


def alone(model, rows, i):
    """One row's gradient."""
    live = model.live().values()
    found = torch.autograd.grad(model.loss(rows.batch(np.array([i]))), list(live), allow_unused=True)
    pairs = zip(found, live, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs]).double()


def by_hand(model, rows, index, c):
    """The clipped sum by one backward pass a row, and the norms."""
    found = [alone(model, rows, i) for i in index]
    return sum(g * min(1.0, c / float(g.norm())) for g in found), [float(g.norm()) for g in found]


def fast(model, rows, index):
    """Whether one backward pass for these rows gives the gradients of each."""
    try:
        return row_gradients._of_layers(model, rows.batch(index), model.live(), len(index)) is not None
    except row_gradients.Ambiguous:
        return False


def moved(model):
    """Every trained tensor away from its start: LoRA's B starts at 0, and norms at 1."""
    rng = np.random.default_rng(3)
    with torch.no_grad():
        for p in model.live().values():
            p.add_(torch.from_numpy(rng.normal(0, 0.05, p.shape)).to(p))
    return model


def check(model, rows, n, quick=True):
    """Sums at clips below, among and above the norms are those of the loop; ``agrees`` says so."""
    index = np.arange(n)
    model.train_mode()
    assert row_gradients.agrees(model, rows, index[:2], model.live()) is quick
    assert fast(model, rows, index) is quick
    middle = float(np.median(by_hand(model, rows, index, 1.0)[1]))
    for c in (middle / 50, middle, middle * 50):
        expected, _ = by_hand(model, rows, index, c)
        found = row_gradients.clipped_sum(model, rows, index, c, model.live()).double()
        assert (found - expected).norm() < 3e-4 * expected.norm()


# --- architectures ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    tiny_text.save_all(path)
    tiny_text.save_gpt2(path / "gpt2")
    tiny_vit(path)
    return path


def pictures(model, n, side):
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 256, (n, side, side, 3)).astype(np.uint8), rng.integers(0, len(CLASSES), n)
    return model.prepare(Table("image", list(x), y, CLASSES, np.full(n, "train")), np.arange(n))


@pytest.mark.each_value
@pytest.mark.parametrize("adaptation", [LORA, FULL], ids=["lora", "full"])
@pytest.mark.parametrize("name", ["nano-vit", "tiny-vit"])
def test_of_vision_transformers(name, adaptation, folder):
    """Class token and positions are parameters of a layer of its own kind."""
    path = name if name == "nano-vit" else str(folder / name)
    model = moved(load_model(ModelSpec(path, adaptation=adaptation), classes=CLASSES, kind="image", seed=3))
    n = 4 if name == "nano-vit" else 7
    check(model, pictures(model, n, 32 if name == "nano-vit" else 16), n)


@pytest.mark.each_value
@pytest.mark.parametrize("adaptation", [LORA, FULL], ids=["lora", "full"])
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_of_models_of_text(name, adaptation, folder):
    """Rows of unequal length; BERT looks positions up once for all rows, GPT-2's head shares the embedding's weight."""
    task = "classification" if name == "bert" else "language_modelling"
    table = load_table(DataSpec(path=str(folder / "rows.jsonl")), seed=0, task=task)
    spec = ModelSpec(str(folder / name), task=task, max_length=7, adaptation=adaptation)
    model = moved(load_model(spec, classes=table.classes, kind=table.kind, seed=3))
    rows = model.prepare(table, np.arange(len(table))).take(range(9))
    tokens = rows.tokens or tuple(rows.tensors["input_ids"])
    rows = Rows(tokens=tuple(t[: len(t) - i % 3] for i, t in enumerate(tokens)), labels=rows.labels, pad=rows.pad)
    check(model, rows, 9)


# --- modules of one's own ---------------------------------------------------------------------------------------------
def made(module):
    return Model(
        module,
        spec=ModelSpec("mine"),
        task="classification",
        classes=CLASSES,
        parts=Parts(None, (), None, None, ""),
        tools=Tools(),
        fingerprint="",
        head=None,
    )


class Mine(nn.Module):
    """Tokens (b, 5) through a module between an embedding and a linear layer."""

    def __init__(self, middle=None):
        super().__init__()
        torch.manual_seed(0)
        self.look, self.out = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, len(CLASSES))
        self.middle = nn.Identity() if middle is None else middle

    def forward(self, input_ids, attention_mask=None):
        return self.out(self.middle(self.look(input_ids)).mean(1))


class Twice(nn.Module):
    """One linear layer in two places."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


class Tied(nn.Module):
    """Scores of all words by the weight of the embedding, which is drawn on twice more."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.look, self.out = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.look.weight

    def forward(self, input_ids, attention_mask=None):
        return self.out(torch.tanh(self.look(input_ids) + self.look(input_ids.flip(1)))).mean(1)[:, : len(CLASSES)]


class Scale(nn.Module):
    """Parameters that no layer of torch owns."""

    def __init__(self, random=0.0):
        super().__init__()
        self.scale, self.shift, self.random = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(1, 5, 6)), random

    def forward(self, x):
        return nn.functional.dropout(x, self.random) * self.scale + self.shift


class Sequence(nn.Module):
    """A layer that has its rows in the second place, as recurrent networks have them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.layer(x.transpose(0, 1))).transpose(0, 1)


class Mixed(nn.Module):
    """The rows of a batch minus their mean."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        x = self.layer(x)
        return x - 0.5 * x.mean(0)


class Past(nn.Module):
    """A layer's weight is used past the layer, too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.layer(x)) @ self.layer.weight


def words(n):
    rng = np.random.default_rng(2)
    ids = torch.from_numpy(rng.integers(0, 11, (n, 5)))
    return Rows({"input_ids": ids}, labels=torch.from_numpy(rng.integers(0, len(CLASSES), n)))


@pytest.mark.parametrize("n", [2, 7])
@pytest.mark.parametrize(
    "module",
    [Mine, lambda: Mine(Twice()), Tied, lambda: Mine(Scale()), lambda: Mine(nn.Conv1d(5, 5, 1))],
    ids=["padding", "twice", "tied", "loose", "other layer"],
)
def test_of_layers_alone_shared_and_of_ones_own(module, n):
    check(moved(made(module())), words(n), n)


def test_of_convolutions_in_groups_that_are_changed_in_place():
    class Depthwise(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Conv2d(3, 6, 3, padding="same", groups=3), nn.Conv2d(6, 4, 3, padding="valid")
            self.norm, self.out = nn.GroupNorm(2, 4), nn.Linear(4, len(CLASSES))

        def forward(self, pixel_values):
            x = torch.relu_(self.a(pixel_values))
            return self.out(torch.relu_(self.norm(self.b(x))).mean((2, 3)))

    rng = np.random.default_rng(2)
    x = torch.from_numpy(rng.normal(size=(6, 3, 8, 8))).float()
    labels = torch.from_numpy(rng.integers(0, len(CLASSES), 6))
    check(moved(made(Depthwise())), Rows({"pixel_values": x}, labels=labels), 6)


@pytest.mark.parametrize("module", [Mixed, Past, lambda: Scale(0.5)], ids=["mixed", "past", "random"])
def test_modules_without_gradients_per_row_are_trained_row_by_row(module):
    model, rows = moved(made(Mine(module()))), words(6)
    assert not row_gradients.agrees(model, rows, np.arange(2), model.live())
    index = np.arange(6)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected, _ = by_hand(model, rows, index, 0.1)
        torch.manual_seed(5)
        found = private.sums(model, rows, 0.1, 4)(index)
    if isinstance(model.module.middle, Scale):  # the draws are others: only the bound is known
        assert found.norm() < 0.6
    else:
        assert (found - expected).norm() < 3e-4 * expected.norm()


def test_a_batch_as_large_as_another_place_is_not_taken_for_the_rows():
    """Rows of 5 tokens in the second place, in a batch of 5: which numbers belong to a row?"""
    model, rows = moved(made(Mine(Sequence()))), words(9)
    for n in (4, 5, 9):
        expected, _ = by_hand(model, rows, np.arange(n), 0.1)
        found = private.sums(model, rows, 0.1, 16)(np.arange(n))
        assert (found - expected).norm() < 3e-4 * expected.norm()
    model = moved(made(Mine(Twice())))
    expected, _ = by_hand(model, rows, np.arange(5), 0.1)
    found = row_gradients.clipped_sum(model, rows, np.arange(5), 0.1, model.live()).double()
    assert (found - expected).norm() < 3e-4 * expected.norm()


def test_terms_that_cancel_do_not_pass_the_clip():
    """Two inputs that are almost alike, with opposite gradients: the norm is a small difference of large numbers."""

    class Difference(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(200, 200, bias=False)

        def forward(self, pixel_values):
            y = self.layer(pixel_values)
            return 1e4 * (y[:, 0] - y[:, 1])[:, : len(CLASSES)]

    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 1, 200)).repeat(2, axis=1)
    x[:, 1] += 10.0 ** -rng.uniform(1, 3.5, (40, 1)) * rng.normal(size=(40, 200))
    rows = Rows({"pixel_values": torch.from_numpy(x).float()}, labels=torch.zeros(40, dtype=torch.int64))
    model, c = made(Difference()), 1.0
    with torch.no_grad():
        model.module.layer.weight.mul_(1e-4)  # wrong enough that each row is clipped
    for i in range(40):
        g = alone(model, rows, i)
        assert g.norm() > c
        found = row_gradients.clipped_sum(model, rows, np.array([i]), c, model.live()).double()
        assert found.norm() <= c


# --- packed -----------------------------------------------------------------------------------------------------------
@pytest.mark.each_value
@pytest.mark.parametrize("kernels", ["exact", "fast"])
@pytest.mark.parametrize(
    "targets", [None, ("query", "key", "value", "output.dense", "intermediate.dense")], ids=["some", "all"]
)
@pytest.mark.parametrize("layers", [None, 1])
def test_of_text_without_padding(kernels, targets, layers, folder):
    """The written backward pass of LoRA, on rows of unequal length, in all layers or above frozen ones."""
    table = load_table(DataSpec(path=str(folder / "rows.jsonl")), seed=0, task="classification")
    adaptation = AdaptationSpec("lora", rank=2, layers=layers, **({"targets": targets} if targets else {}))
    spec = ModelSpec(str(folder / "bert"), max_length=7, adaptation=adaptation)
    model = moved(load_model(spec, classes=table.classes, kind=table.kind, seed=3))
    rows = model.prepare(table, np.arange(9))
    tokens = rows.tokens or tuple(rows.tensors["input_ids"])
    rows = Rows(tokens=tuple(t[: len(t) - i % 3] for i, t in enumerate(tokens)), labels=rows.labels, pad=rows.pad)
    check_packed(model, rows, 9, kernels)


@pytest.mark.each_value
@pytest.mark.parametrize("kernels", ["exact", "fast"])
@pytest.mark.parametrize("name", ["nano-vit", "tiny-vit"])
def test_of_pictures_that_are_packed(name, kernels, folder):
    path = name if name == "nano-vit" else str(folder / name)
    model = moved(load_model(ModelSpec(path, adaptation=LORA), classes=CLASSES, kind="image", seed=3))
    check_packed(model, pictures(model, 4, 32 if name == "nano-vit" else 16), 4, kernels)


def check_packed(model, rows, n, kernels):
    """The same bounds as :func:`check`, through what a client's training calls."""
    model.kernels = kernels
    assert packed.row_gradients(model, rows) is not None
    index = np.arange(n)[::-1].copy()
    middle = float(np.median(by_hand(model, rows, index, 1.0)[1]))
    for c in (middle / 50, middle, middle * 50):
        expected, _ = by_hand(model, rows, index, c)
        found = private.sums(model, rows, c, 4)(index)
        assert (found - expected).norm() < 3e-4 * expected.norm()
    live = next(iter(model.live().values()))
    with torch.no_grad():
        live.add_(0.05)  # a step: the next sum is of the moved model
    expected, _ = by_hand(model, rows, index, middle)
    assert (private.sums(model, rows, middle, 4)(index) - expected).norm() < 3e-4 * expected.norm()
