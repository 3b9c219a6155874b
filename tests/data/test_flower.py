"""Partitions by flwr-datasets: the very parts that its partitioners make, every training row in exactly one client."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.data.partition import deal
from fedfm.data.spec import DataSpec, PartitionSpec, check
from fedfm.data.table import Table
from fedfm.errors import InputError

pytest.importorskip("flwr_datasets", reason="flwr-datasets is not installed")


def table(labels: Any, split: Any = None, **columns: Any) -> Table:
    n = len(labels)
    return Table(
        "features",
        np.arange(n, dtype=np.float32)[:, None],
        np.array(labels, dtype=np.int64),
        tuple("abcdefghij"),
        np.full(n, "train") if split is None else np.array(split),
        {name: np.array(values) for name, values in columns.items()},
        "toy",
    )


def spec(partitioner: str | None, clients: int | None = None, **options: Any) -> DataSpec:
    return DataSpec(name="digits", partition=PartitionSpec("flower", clients, partitioner=partitioner, options=options))


def sizes(data: Any) -> list[int]:
    return [len(rows.train) for rows in data.clients.values()]


def test_sizes_follow_the_partitioners_law() -> None:
    rows = table([0, 1] * 50)
    assert sizes(deal(rows, spec("IidPartitioner", 4), seed=0)) == [25] * 4
    assert sizes(deal(rows, spec("LinearPartitioner", 4), seed=0)) == [10, 20, 30, 40]
    assert sizes(deal(rows, spec("SquarePartitioner", 3), seed=0)) == [7, 28, 65]  # 100 k^2 / 14, the rest to the last
    assert sizes(deal(rows, spec("SizePartitioner", partition_sizes=[30, 50, 20]), seed=0)) == [30, 50, 20]


def test_parts_are_those_of_the_partitioner_itself() -> None:
    """Dirichlet shares with the same seed, cut by the partitioner on its own: the same count of every class."""
    from datasets import Dataset
    from flwr_datasets.partitioner import DirichletPartitioner

    labels = np.random.default_rng(0).integers(0, 5, 400)
    theirs = DirichletPartitioner(6, "label", 0.5, min_partition_size=0, seed=7)
    theirs.dataset = Dataset.from_dict({"label": labels})
    ours = deal(table(labels), spec("DirichletPartitioner", 6, alpha=0.5, min_partition_size=0, seed=7), seed=3)
    for k in range(6):
        expected = np.bincount(theirs.load_partition(k)["label"], minlength=5)
        np.testing.assert_array_equal(np.bincount(labels[ours.clients[f"client-{k:02}"].train], minlength=5), expected)


def test_values_of_a_column_and_their_groups() -> None:
    rows = table([0] * 12, site=list("aaabbbccccdd"))
    natural = deal(rows, spec("NaturalIdPartitioner", partition_by="site"), seed=0)
    assert sorted(sorted(rows.columns["site"][c.train].tolist()) for c in natural.clients.values()) == [
        ["a"] * 3,
        ["b"] * 3,
        ["c"] * 4,
        ["d"] * 2,
    ]
    grouped = deal(rows, spec("GroupedNaturalIdPartitioner", partition_by="site", group_size=2), seed=0)
    held = [set(rows.columns["site"][c.train].tolist()) for c in grouped.clients.values()]
    assert [len(values) for values in held] == [2, 2]
    assert held[0] | held[1] == set("abcd")


@given(
    st.lists(st.integers(0, 3), min_size=12, max_size=60),
    st.sampled_from(["IidPartitioner", "LinearPartitioner", "DirichletPartitioner", "InnerDirichletPartitioner"]),
    st.integers(1, 3),
    st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_every_training_row_is_in_exactly_one_client(labels: list[int], name: str, clients: int, seed: int) -> None:
    split = (["train"] * len(labels)) + ["val", "test"] * 3
    rows = table([*labels, 0, 1, 2, 3, 9, 9], split)
    cut = [len(labels) // clients] * (clients - 1)
    how = {
        "DirichletPartitioner": spec(name, clients, alpha=1.0, min_partition_size=0),
        "InnerDirichletPartitioner": spec(name, partition_sizes=[*cut, len(labels) - sum(cut)], alpha=1.0),
    }.get(name, spec(name, clients))
    data, again = (deal(rows, how, seed=seed) for _ in range(2))
    everyone = np.concatenate([c.train for c in data.clients.values()])
    np.testing.assert_array_equal(np.sort(everyone), rows.rows("train"))
    held = np.concatenate([c.val for c in data.clients.values()])
    assert len(held) == len(set(held.tolist())) == 3 or len(data.clients) < clients  # with those who have no rows
    assert all((data.clients[k].train == again.clients[k].train).all() for k in data.clients)


def test_another_seed_is_another_split() -> None:
    rows = table([0, 1] * 20)
    first, second = (deal(rows, spec("IidPartitioner", 2), seed=seed) for seed in (0, 1))
    assert (first.clients["client-00"].train != second.clients["client-00"].train).any()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (spec("LinearPartition", 2), r'flwr-datasets has no "LinearPartition"; .*did you mean "LinearPartitioner"'),
        (spec("Partitioner", 2), r'flwr-datasets has no "Partitioner"'),
        (spec("LinearPartitioner", 2, gamma=1), r"LinearPartitioner\(gamma=1, num_partitions=2\) refuses: TypeError"),
        (spec("NaturalIdPartitioner", 2), r"clients: NaturalIdPartitioner has no argument for the number of clients"),
        (spec("NaturalIdPartitioner", partition_by="sight"), r"refuses: .*sight"),
        (spec("IidPartitioner", 99), r"clients = 99: there are 40 training rows"),
        (spec("ShardPartitioner", 3, num_shards_per_partition=2), r"gives 4 of 40 training rows to no client"),
        (
            spec("PathologicalPartitioner", 3, num_classes_per_partition=1),
            r'gives \d+ of 40 training rows to no client and 0 to several; .* as with name = "by_class"',
        ),
    ],
)
def test_unsuitable_partitioners_are_refused(how: DataSpec, message: str) -> None:
    with pytest.raises(InputError, match=message):
        deal(table([0, 1, 2, 3] * 10), how, seed=0)


def test_without_the_package_the_message_says_what_to_install() -> None:
    code = """
import sys
sys.modules["flwr_datasets"] = None
from fedfm.data import flower_partitions
try:
    flower_partitions._find("IidPartitioner")
except Exception as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 'pip install "fedfm[partitioners]"' in said


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (spec(None), r'data\.partition\.partitioner is required by "flower"'),
        (DataSpec(name="digits", partition=PartitionSpec("iid", options={})), r'options belongs to "flower"'),
    ],
)
def test_missing_and_misplaced_keys_of_the_partition_are_refused(how: DataSpec, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(how)
