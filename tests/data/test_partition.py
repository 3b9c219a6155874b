"""deal: every training row in exactly one client, whatever the partition; what each client is judged on."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.data.owners import own_test
from fedfm.data.partition import deal, dirichlet, summary
from fedfm.data.spec import DataSpec, PartitionSpec, check
from fedfm.data.table import FederatedData, Table
from fedfm.errors import InputError
from fedfm.seeds import generator


def rows(labels: Any, split: Any = None, **columns: Any) -> Table:
    n = len(labels)
    labels = np.array(labels, dtype=np.int64)
    return Table(
        "features",
        np.arange(n, dtype=np.float32)[:, None],
        labels,
        tuple("abcdefghij")[: labels.max(initial=0) + 1],
        np.full(n, "train") if split is None else np.array(split),
        {name: np.array(values) for name, values in columns.items()},
        "toy",
    )


def spec(name: str = "iid", val_fraction: float = 0.0, **keys: Any) -> DataSpec:
    return DataSpec(name="digits", partition=PartitionSpec(name, **keys), val_fraction=val_fraction)


def counts(data: FederatedData, split: str = "train") -> dict[str, list[int]]:
    return {name: c[split]["by_class"] for name, c in summary(data)["clients"].items()}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Table, DataSpec, int]:
    n = draw(st.integers(1, 60))
    split = draw(st.lists(st.sampled_from(["train", "train", "train", "val", "test"]), min_size=n, max_size=n))
    split[0] = "train"
    labels = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    site = draw(st.lists(st.sampled_from(["x", "y", "z/1"]), min_size=n, max_size=n))
    table = rows(labels, split, site=site)
    train = table.rows("train")
    clients = draw(st.integers(1, len(train)))
    name = draw(st.sampled_from(["iid", "dirichlet", "by_class", "by_column"]))
    keys: dict[str, Any] = {"clients": clients}
    if name == "dirichlet":
        keys["alpha"] = draw(st.sampled_from([1e-300, 0.01, 0.3, 1.0, 1e6]))
    if name == "by_class":
        assert table.labels is not None
        classes = len(set(table.labels[table.split != "test"].tolist()))
        keys["classes_per_client"] = draw(st.integers(-(-classes // clients), classes))
    if name == "by_column":
        values = Counter(np.array(site)[train].tolist())
        keys = {"column": "site", "clients": len(values) * draw(st.integers(1, min(values.values())))}
    return table, spec(name, draw(st.sampled_from([0.0, 0.3])), **keys), draw(st.integers(0, 99))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_training_row_is_in_exactly_one_client(case: tuple[Table, DataSpec, int]) -> None:
    table, how, seed = case
    data = deal(table, how, seed=seed)
    train, val, test = (table.rows(s).tolist() for s in ("train", "val", "test"))
    mine = sorted(i for c in data.clients.values() for i in (*c.train, *c.val))
    assert len(set(mine)) == len(mine)
    assert set(train) <= set(mine) <= set(train) | set(val)
    if not any("not used" in notice for notice in data.notices):
        assert mine == sorted(train + val)
    own = [i for c in data.clients.values() for i in c.test.tolist()]
    assert len(set(own)) == len(own)
    assert set(own) <= set(test)
    assert data.test.tolist() == test
    assert not set(mine) & set(test)
    assert table.labels is not None
    known = set(table.labels[train].tolist())
    if how.partition.name != "by_column":
        assert set(own) == {i for i in test if table.labels[i] in known}
    for client in data.clients.values():
        assert len(client.train) > 0
        for part in (client.train, client.val, client.test):
            assert part.tolist() == sorted(part)
            assert part.dtype == np.int64
    assert list(data.clients) == sorted(data.clients)
    again = deal(table, how, seed=seed)
    assert summary(again) == summary(data)
    for name, client in data.clients.items():
        assert np.array_equal(again.clients[name].train, client.train)
    assert json.loads(json.dumps(summary(data))) == summary(data)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 6), st.integers(0, 50))
def test_by_class_holds_that_many_classes_in_equal_counts(clients: int, classes: int, each: int, seed: int) -> None:
    each = max(min(each, classes), -(-classes // clients))
    table = rows(np.repeat(np.arange(classes), 24))
    data = deal(table, spec("by_class", clients=clients, classes_per_client=each), seed=seed)
    c = np.array(list(counts(data).values()))  # (K, C)
    assert len(c) == clients
    assert ((c > 0).sum(axis=1) == each).all()
    holders = (c > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    for column in c.T:
        held = column[column > 0]
        assert held.max() - held.min() <= 1


def test_iid_sizes_names_and_seeds() -> None:
    table = rows(np.arange(100) % 5)
    data = deal(table, spec(clients=12), seed=0)
    assert sorted(len(c.train) for c in data.clients.values()) == [8] * 8 + [9] * 4
    assert list(data.clients)[:2] == ["client-00", "client-01"]
    assert list(data.clients)[-1] == "client-11"
    assert len(deal(table, spec(), seed=0).clients) == 10
    assert "client-000" in deal(rows(np.zeros(200)), spec(clients=101), seed=0).clients
    other = deal(table, spec(clients=12), seed=1)
    assert not np.array_equal(other.clients["client-00"].train, data.clients["client-00"].train)


def test_dirichlet_follows_alpha() -> None:
    table = rows(np.repeat(np.arange(5), 400))
    even = np.array(list(counts(deal(table, spec("dirichlet", alpha=1e6, clients=4), seed=0)).values()))
    assert even == pytest.approx(np.full((4, 5), 100), abs=3)
    skewed = deal(table, spec("dirichlet", alpha=1e-3, clients=4), seed=0)
    c = np.array(list(counts(skewed).values()))
    assert ((c == 400).sum(axis=0) == 1).all()  # each class is with one client
    assert len(c) == 4 or any("left" in n and "without training rows" in n for n in skewed.notices)


def test_dirichlet_shares_have_the_moments_of_the_distribution() -> None:
    # Dir(alpha 1_K): mean 1 / K, variance (1/K)(1 - 1/K) / (K alpha + 1)
    for alpha in (0.05, 1.0, 10.0):
        p = np.array([dirichlet(alpha, 4, generator(seed, "p")) for seed in range(4000)])
        assert p.mean(axis=0) == pytest.approx(np.full(4, 0.25), abs=0.03)
        assert p.var(axis=0) == pytest.approx(np.full(4, 0.1875 / (4 * alpha + 1)), rel=0.12)


@pytest.mark.parametrize("alpha", [5e-324, 1e-12, 1e-8, 1e-5])
def test_dirichlet_of_a_vanishing_alpha_is_one_client_at_random(alpha: float) -> None:
    p = np.array([dirichlet(alpha, 3, generator(seed)) for seed in range(600)])
    assert (p.max(axis=1) > 0.99).mean() > 0.99
    assert p.sum(axis=0) == pytest.approx(np.full(3, 200), abs=58)  # five standard deviations


def dealt(classes: int, each: int, clients: int, alpha: float, seed: int) -> np.ndarray:
    """Rows of every client and class (K, C)."""
    table = rows(np.repeat(np.arange(classes), each))
    got = counts(deal(table, spec("dirichlet", alpha=alpha, clients=clients), seed=seed))
    return np.array([got.get(f"client-{k:02d}", [0] * classes) for k in range(clients)])


@pytest.mark.parametrize("each", [1, 3, 10, 97])
def test_dirichlet_deals_by_largest_remainder(each: int) -> None:
    for seed in range(20):
        p = generator(seed, "partition", "dirichlet", 0).dirichlet([0.7] * 6)
        exact = [float(share) * each for share in p]
        left = each - sum(math.floor(e) for e in exact)
        largest = sorted(range(6), key=lambda k: exact[k] % 1)[6 - left :]
        want = [math.floor(e) + (k in largest) for k, e in enumerate(exact)]
        assert dealt(6, each, 6, 0.7, seed)[:, 0].tolist() == want


@pytest.mark.parametrize("alpha", [0.05, 0.3, 10.0, 1e6])
def test_dirichlet_favours_no_client_by_its_place(alpha: float) -> None:
    # 400 deals of 8 classes of 5 rows to 12 clients: 3,200 independent classes, in each of which the counts are
    # exchangeable. With the covariance of exchangeable counts the sum below is a chi-square of 11 degrees of freedom.
    clients, seeds = 12, 400
    every = np.concatenate([dealt(8, 5, clients, alpha, seed).T for seed in range(seeds)])  # (classes, K)
    for cells in (every, every > 0, every == 1):  # rows, classes, classes of a single row
        cells = cells.astype(float)
        free = cells - cells.mean(1, keepdims=True)
        variance = (free**2).sum() / (len(free) * (clients - 1))
        chi = ((free.mean(0) ** 2) * len(free) / variance).sum()
        assert chi < 31.3  # p = 0.001
    assert (every.sum(1) == 5).all()


@pytest.mark.parametrize("alpha", [1e-9, 1e-6, 0.05, 1e6])
@pytest.mark.parametrize(("classes", "each", "clients"), [(1, 7, 7), (1, 40, 3), (5, 2, 10), (10, 30, 4)])
def test_dirichlet_deals_every_row_whatever_alpha(alpha: float, classes: int, each: int, clients: int) -> None:
    for seed in range(10):
        cells = dealt(classes, each, clients, alpha, seed)
        assert (cells.sum(0) == each).all()
        if alpha <= 1e-6:
            assert ((cells > 0).sum(0) == 1).all()
        if alpha == 1e6:
            assert (cells.max(0) - cells.min(0) <= 1).all()


def test_a_class_is_dealt_alike_whatever_the_other_classes_hold() -> None:
    how = spec("dirichlet", alpha=0.5, clients=5)
    a = counts(deal(rows([0] * 50 + [1] * 50), how, seed=3))
    b = counts(deal(rows([0] * 50 + [1] * 90), how, seed=3))
    assert {k: v[0] for k, v in a.items() if v[0]} == {k: v[0] for k, v in b.items() if v[0]}


def test_validation_rows_follow_the_same_shares() -> None:
    table = rows(np.tile(np.repeat(np.arange(3), 100), 2), ["train"] * 300 + ["val"] * 300)
    for how in (spec("dirichlet", alpha=0.2, clients=4), spec("by_class", classes_per_client=1, clients=6)):
        data = deal(table, how, seed=2)
        assert counts(data, "val") == counts(data, "train")


def test_val_fraction_is_carved_from_each_client_by_class() -> None:
    table = rows([0] * 40 + [1] * 20, site=["x"] * 30 + ["y"] * 30)
    data = deal(table, spec("by_column", 0.2, column="site"), seed=0)
    assert counts(data, "val") == {"x": [6, 0], "y": [2, 4]}
    assert counts(data, "train") == {"x": [24, 0], "y": [8, 16]}


def test_own_test_rows_by_hand() -> None:
    # Class 0: client 0 trains on 6 rows, client 1 on 2; its 4 test rows go 3 : 1. Class 1: only client 1.
    # Class 2: nobody.
    table = rows([0] * 8 + [1] * 3 + [0] * 4 + [1] * 2 + [2], ["train"] * 11 + ["test"] * 7)
    owner = np.array([0] * 6 + [1] * 2 + [1] * 3)
    got = own_test(table, table.rows("test"), table.rows("train"), owner, 2, seed=0)
    assert sorted(got[:4].tolist()) == [0, 0, 0, 1]
    assert got[4:].tolist() == [1, 1, -1]
    drawn = {tuple(own_test(table, table.rows("test"), table.rows("train"), owner, 2, seed)) for seed in range(30)}
    assert len(drawn) == 4  # which of the four goes to client 1 is drawn


def test_test_rows_of_a_class_that_nobody_trains_on_are_reported() -> None:
    table = rows([0, 0, 1], ["train", "train", "test"])
    data = deal(table, spec(clients=2), seed=0)
    assert all(len(c.test) == 0 for c in data.clients.values())
    assert data.test.tolist() == [2]
    assert "1 test rows are of classes that no client trains on" in data.notices[0]


def test_by_column() -> None:
    site = ["photo"] * 10 + ["art"] * 6 + ["photo", "art", "sketch"]
    table = rows(np.zeros(19), ["train"] * 16 + ["test"] * 3, site=site)
    data = deal(table, spec("by_column", column="site"), seed=0)
    assert list(data.clients) == ["art", "photo"]
    assert data.clients["art"].train.tolist() == [*range(10, 16)]
    assert data.clients["art"].test.tolist() == [17]
    assert data.clients["photo"].test.tolist() == [16]
    assert data.test.tolist() == [16, 17, 18]
    assert '1 test rows are of site "sketch"' in data.notices[0]
    data = deal(table, spec("by_column", column="site", clients=6), seed=0)
    assert list(data.clients) == ["art-0", "art-1", "art-2", "photo-0", "photo-1", "photo-2"]
    assert [len(c.train) for c in data.clients.values()] == [2, 2, 2, 4, 3, 3]
    assert {i for k in range(3) for i in data.clients[f"art-{k}"].test.tolist()} == {17}


def test_names_of_values_are_safe_as_folders() -> None:
    table = rows([0] * 3, site=["../etc", "a b", "ünï"])
    assert set(deal(table, spec("by_column", column="site"), seed=0).clients) == {"_etc", "a_b", "ünï"}
    with pytest.raises(InputError, match=r'both give the client name "a_b"'):
        deal(rows([0] * 2, site=["a b", "a/b"]), spec("by_column", column="site"), seed=0)


def test_clients_of_their_own_files() -> None:
    table = rows([0, 1, 0, 1], ["train", "test", "train", "train"], client=["n", "n", "s", "s"])
    how = DataSpec(clients={"s": "s.csv", "n": "n.csv"})
    data = deal(table, how, seed=0)
    assert {k: (v.train.tolist(), v.test.tolist()) for k, v in data.clients.items()} == {
        "n": ([0], [1]),
        "s": ([2, 3], []),
    }
    assert list(data.clients) == ["n", "s"]


def test_empty_clients_are_dropped_with_a_notice() -> None:
    data = deal(replace(rows([0] * 6), notices=("read so",)), spec("dirichlet", alpha=1e-6, clients=6), seed=0)
    assert len(data.clients) == 1
    assert data.notices[0] == "read so"
    assert data.notices[1].startswith("the partition left 5 of 6 clients without training rows; they are left out: ")


def test_summary_by_hand() -> None:
    table = rows([0, 1, 1, 0], ["train", "train", "test", "train"])
    got = summary(deal(table, spec(clients=1), seed=0))
    assert got["test"] == {"rows": 1, "by_class": [0, 1]}
    assert got["classes"] == ["a", "b"]
    assert got["clients"]["client-00"] == {
        "train": {"rows": 3, "by_class": [2, 1]},
        "val": {"rows": 0, "by_class": [0, 0]},
        "test": {"rows": 1, "by_class": [0, 1]},
    }
    bare = replace(table, labels=None, classes=())
    assert summary(deal(bare, spec(clients=1), seed=0))["clients"]["client-00"]["train"] == {
        "rows": 3,
        "by_class": None,
    }


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (spec(clients=9), r"data\.partition\.clients = 9: there are 8 training rows"),
        (spec("by_class", classes_per_client=5, clients=3), r"classes_per_client: 5 classes per client, .* have 4"),
        (spec("by_class", classes_per_client=1, clients=3), r"at most 3 of 4.*raise the key to 2, or clients to 4"),
        (
            spec("by_column", column="sight"),
            r'toy: no column "sight" \(data\.partition\.column\); found "site" \(did you mean "site"',
        ),
        (spec("by_column", column="site", clients=3), r"clients: 3 is not a multiple of the 2 values"),
        (spec("by_column", column="site", clients=10), r'"x" has 4 training rows for 5 clients'),
    ],
)
def test_a_wrong_partition_is_refused(how: DataSpec, message: str) -> None:
    with pytest.raises(InputError, match=message):
        deal(rows([0, 1, 2, 3] * 2, site=list("xxxxyyyy")), how, seed=0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (spec("dirichlet", alpha=0.0, clients=3), r"data\.partition\.alpha = 0\.0: expected a finite number above 0"),
        (spec("dirichlet", alpha=float("inf")), r"data\.partition\.alpha = inf"),
        (spec("dirichlet", alpha=float("nan")), r"data\.partition\.alpha = nan"),
        (spec("dirichlet"), r'data\.partition\.alpha is required by "dirichlet"'),
        (spec(clients=0), r"data\.partition\.clients = 0: expected a whole number of at least 1"),
        (spec("by_class", clients=3), r"data\.partition\.classes_per_client is required"),
        (spec("by_class", classes_per_client=0), r"data\.partition\.classes_per_client = 0: expected"),
        (spec("by_column"), r"data\.partition\.column is required"),
        (spec("dirichlett"), r'partition\.name = "dirichlett": expected .*did you mean "dirichlet"'),
        (spec(alpha=0.1), r'data\.partition\.alpha belongs to "dirichlet", not to "iid"'),
        (spec("dirichlet", alpha=1.0, column="site"), r'data\.partition\.column belongs to "by_column"'),
        (
            replace(spec(clients=3), name=None, clients={"a": "a.csv"}),
            r"data\.partition conflicts with data\.clients",
        ),
    ],
)
def test_a_wrong_partition_is_refused_before_reading(how: DataSpec, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(how)


def test_rows_without_labels_or_values_are_refused() -> None:
    bare = replace(rows([0] * 9, site=["x"] * 8 + [""]), labels=None)
    with pytest.raises(InputError, match=r'"dirichlet" needs labels, and toy has none: use "iid" or "by_column"'):
        deal(bare, spec("dirichlet", alpha=1.0, clients=2), seed=0)
    with pytest.raises(InputError, match=r'1 training rows have no value in column "site"'):
        deal(bare, spec("by_column", column="site"), seed=0)
    assert len(deal(bare, spec(clients=3), seed=0).clients) == 3


def test_a_column_that_is_read_as_something_else_names_no_clients() -> None:
    for key in ("label", "split", "text"):
        part = replace(spec(), partition=PartitionSpec("by_column", column=f"my {key}"), **{key: f"my {key}"})
        with pytest.raises(InputError, match=f'column "my {key}" is read as data.{key}') as refused:
            deal(rows([0, 1, 0, 1]), part, seed=0)
        assert ("by_class" in str(refused.value)) == (key == "label")
