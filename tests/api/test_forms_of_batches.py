"""A collate function may return lists of dicts, nested dicts, tuples, dataclasses: each trains the same weights."""

import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn
from transformers import BatchEncoding, BatchFeature

import fedfm
from fedfm.errors import InputError
from fedfm.models.batches import convert, move, rows_of, tensors

DRAWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
ROWS = [{"x": x, "target": {"y": x.sum()[None], "file": f"{i}.png"}} for i, x in enumerate(DRAWS)]
Named = namedtuple("Named", "loss scores")


@dataclasses.dataclass
class Scored:
    loss: torch.Tensor
    scores: torch.Tensor
    note: str = "none"


@dataclasses.dataclass
class Stacked:
    x: torch.Tensor
    y: torch.Tensor


class Line(nn.Module):
    """Takes x and y in any form, and returns its loss in the form ``made``, or only scores without a target."""

    def __init__(self, made=Scored):
        super().__init__()
        self.line, self.made = nn.Linear(4, 2), made

    def of(self, x, y):
        scores = self.line(x)
        return {"scores": scores} if y is None else self.made((scores[:, 0] - y).pow(2).mean(), scores)


class OfRows(Line):
    def forward(self, rows):
        known = "target" in rows[0]
        y = torch.cat([row["target"]["y"] for row in rows]) if known else None
        return self.of(torch.stack([row["x"] for row in rows]), y)


class OfPair(Line):
    def forward(self, pictures, targets=None):
        y = None if targets is None else torch.cat([of["y"] for of in targets])
        return self.of(torch.stack(list(pictures)), y)


class OfNested(Line):
    def forward(self, inputs, labels=None, extra=None, names=()):
        assert extra is None
        return self.of(inputs["a"]["x"], None if labels is None else torch.cat([of["y"] for of in labels]))


class OfStacked(Line):
    def forward(self, batch):
        return self.of(batch.x, batch.y)


def nested(rows):
    inputs = {"a": {"x": torch.stack([row["x"] for row in rows])}}
    found = {"inputs": inputs, "extra": None, "names": ["a"] * len(rows)}
    return found | ({"labels": [row["target"] for row in rows]} if "target" in rows[0] else {})


def pair(rows):
    return tuple(zip(*((row["x"], row["target"]) for row in rows), strict=True))


def stacked(rows):
    return Stacked(torch.stack([row["x"] for row in rows]), torch.cat([row["target"]["y"] for row in rows]))


FORMS = {
    "a list of dicts": (OfRows, list),
    "tuples": (OfPair, pair),
    "nested dicts": (OfNested, nested),
    "BatchEncoding": (OfNested, lambda rows: BatchEncoding(nested(rows))),
    "BatchFeature": (OfNested, lambda rows: BatchFeature(nested(rows))),
    "a dataclass": (OfStacked, stacked),
    "a named tuple comes back": (lambda: OfRows(Named), list),
    "a dict comes back": (lambda: OfRows(lambda loss, scores: {"loss": loss, "scores": scores}), list),
}


def trained(make, collate, out, **more):
    torch.manual_seed(0)
    module = make()
    settings = {"clients": {"a": ROWS[:10], "b": ROWS[10:18]}, "test": ROWS[18:], "collate": collate, "out": out}
    settings |= {"rounds": 2, "local": {"learning_rate": 0.1, "batch_size": 4, "micro_batch": 2}}
    return module, fedfm.federate(module, **settings | more, progress=fedfm.Progress())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The result with tensors alone."""
    made = {"collate": lambda rows: {"x": torch.stack([row["x"] for row in rows]), "labels": stacked(rows).y}}
    made |= {"labels": "labels", "loss": lambda found, y: (found["scores"][:, 0] - y).pow(2).mean()}

    class Plain(Line):
        def forward(self, x):
            return self.of(x, None)

    return trained(Plain, out=tmp_path_factory.mktemp("plain") / "run", run={"workers": 1}, **made)[1]


@pytest.mark.sample("a list of dicts", "nested dicts", "a dataclass")
@pytest.mark.parametrize("form", FORMS)
def test_each_form_trains_the_same_weights_and_is_scored_and_predicted(form, plain, tmp_path):
    make, collate = FORMS[form]
    out = tmp_path / "run"
    trained(make, collate, out, rounds=1, run={"workers": 1})
    module, result = trained(make, collate, out, run={"workers": 1})  # resumed
    assert result["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    _, straight = trained(make, collate, tmp_path / "straight", run={"workers": 2})
    assert straight["params_sha256"] == result["params_sha256"]
    found = fedfm.predict(out, ROWS[18:], given={"model": module, "collate": collate}, progress=fedfm.Progress())
    expected = module.line(torch.stack([row["x"] for row in ROWS[18:]]))
    torch.testing.assert_close(torch.tensor(found["outputs"]), expected.detach(), atol=1e-6, rtol=1e-5)


def test_rows_without_targets_are_predicted(tmp_path):
    module, _ = trained(OfNested, nested, tmp_path / "run", rounds=1, run={"workers": 1})
    bare = [{"x": row["x"]} for row in ROWS[18:]]
    given = {"model": module, "collate": nested}
    found = fedfm.predict(tmp_path / "run", bare, given=given, progress=fedfm.Progress())
    expected = module.line(torch.stack([row["x"] for row in bare]))
    torch.testing.assert_close(torch.tensor(found["outputs"]), expected.detach(), atol=1e-6, rtol=1e-5)


def test_a_pair_of_dicts_is_two_arguments_and_no_list_of_rows(tmp_path):
    class Two(Line):
        def forward(self, inputs, target):
            return self.of(inputs["x"], target["y"])

    rows = [({"x": x}, {"y": x.sum()}) for x in DRAWS[:2]]  # as many rows as dicts a row
    settings = {"clients": {"a": rows}, "rounds": 1, "run": {"workers": 1}, "progress": fedfm.Progress()}
    for name, more in (("a", {}), ("b", {"collate": torch.utils.data.default_collate})):
        fedfm.federate(Two(), **settings, **more, out=tmp_path / name)


@pytest.mark.parametrize(
    ("collate", "words"),
    [
        (lambda rows: None, "a batch is a NoneType"),
        (lambda rows: object(), "a batch is a object"),
        (lambda rows: {"x": object()}, '"x" of a batch is a object'),
        (lambda rows: {"x": rows[0]["z"]}, "KeyError: 'z'"),
        (lambda rows: rows[len(rows)], "IndexError: list index out of range"),
    ],
)
def test_an_invalid_batch_is_refused_in_one_line(collate, words, tmp_path):
    with pytest.raises(InputError, match=words) as error:
        trained(OfRows, collate, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "value",
    [
        [{"a": torch.ones(2)}, {"a": torch.ones(3), "b": "text", "c": None}],
        (torch.ones(2), [torch.ones(1), 3]),
        Named(torch.ones(2), {"x": torch.ones(1)}),
        Stacked(torch.ones(2), torch.ones(2)),
        BatchEncoding({"input_ids": torch.ones(2, 3)}),
        OrderedDict(a=torch.ones(2)),
    ],
    ids=["rows", "tuple", "named tuple", "dataclass", "BatchEncoding", "OrderedDict"],
)
def test_all_tensors_move_and_containers_keep_their_type(value):
    moved = move({"x": value}, torch.device("meta"))["x"]
    assert type(moved) is type(value)
    found = list(tensors(moved))
    assert found
    assert all(x.is_meta for x in found)
    assert [x.shape for x in found] == [x.shape for x in tensors(value)]
    assert convert(value, lambda x: x.sum().item()) is not value


def test_rows_are_counted_in_any_form():
    n = len(ROWS)
    for _, collate in FORMS.values():
        batch = collate(ROWS)
        named = batch if isinstance(batch, dict | BatchEncoding | BatchFeature) else {"0": batch}
        if isinstance(batch, tuple):
            named = dict(enumerate(batch))
        assert rows_of(named) == n
