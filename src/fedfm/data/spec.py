"""The [data] table of an experiment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WITHHELD = "(kept by the server)"  # in the place of what clients are not told
IN_MEMORY = "(in memory)"  # the name of data and of a model that a Python program gave: see fedfm.api.federate


@dataclass(frozen=True)
class PartitionSpec:
    """How training rows are dealt to clients."""

    name: str = field(default="iid", metadata={"help": "iid, dirichlet, by_class, by_column or flower"})
    clients: int | None = field(default=None, metadata={"help": "number of clients K [10; by_column: one a value]"})
    alpha: float | None = field(default=None, metadata={"help": "dirichlet: concentration, > 0; small = skewed"})
    classes_per_client: int | None = field(default=None, metadata={"help": "by_class: classes that a client holds"})
    column: str | None = field(default=None, metadata={"help": "by_column: the column whose values name the clients"})
    partitioner: str | None = field(
        default=None, metadata={"help": 'flower: a class of flwr_datasets.partitioner, e.g. "ShardPartitioner"'}
    )
    options: dict[str, Any] | None = field(default=None, metadata={"help": "flower: the partitioner's own arguments"})


@dataclass(frozen=True)
class DataSpec:
    """Where the rows come from and how they are dealt."""

    name: str | None = field(default=None, metadata={"help": 'a built-in set: "digits"'})
    path: str | None = field(
        default=None, metadata={"help": "csv, jsonl(.gz), parquet, npz, txt(.gz) or an image folder"}
    )
    hub: str | None = field(default=None, metadata={"help": "a Hugging Face data set id or save_to_disk folder"})
    clients: dict[str, str] | None = field(
        default=None,
        metadata={"help": "client name -> its own file or folder; how many share one table: partition.clients"},
    )
    text: str = field(default="text", metadata={"help": "name of the text column"})
    image: str = field(default="image", metadata={"help": "name of the image column"})
    label: str = field(default="label", metadata={"help": "name of the label column"})
    label_name: str = field(default="label_name", metadata={"help": "name of the column of class names"})
    split: str = field(default="split", metadata={"help": "name of the column with train, val, test"})
    instruction: str = field(default="instruction", metadata={"help": 'instruction column of task "instruction"'})
    output: str = field(default="output", metadata={"help": 'output column of task "instruction"'})
    partition: PartitionSpec = field(default=PartitionSpec(), metadata={"help": "how rows are dealt to clients"})
    where: dict[str, tuple[str, ...]] | None = field(
        default=None, metadata={"help": "column -> values: other rows, test rows too, are left out"}
    )
    limit: int | None = field(default=None, metadata={"help": "at most so many training rows, stratified"})
    test_fraction: float = field(default=0.2, metadata={"help": "where the source marks no test rows"})
    val_fraction: float = field(default=0.0, metadata={"help": "of each client's training rows, kept for validation"})
    scale: str = field(default="none", metadata={"help": "feature vectors: none, row or unit"})
