"""The [data] table of an experiment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedfm.core import fields, tasks
from fedfm.core.fields import setting
from fedfm.core.open_settings import OpenSettings, Setting
from fedfm.core.row_kinds import SHARED
from fedfm.core.text import NAME, NAME_WORDS
from fedfm.errors import Faults, InputError, quote_names

WITHHELD = "(kept by the server)"  # replaces values that clients do not receive
IN_MEMORY = "(in memory)"  # the name of data and of a model from a Python program: see fedfm.api.federate
BUILT_IN = ("digits",)
FUNCTION = r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*"  # a user's own code, see fedfm.config.user_code
PARTITIONS = ("iid", "dirichlet", "by_class", "by_column", "flower")
AUGMENT = ("crop", "flip")
_TEXT = r"[\s\S]*\S[\s\S]*"  # not blank
_FILES = f'{{ north = "north.csv", ... }}, each name of {NAME_WORDS}'


@dataclass(frozen=True)
class PartitionSpec:
    """How training rows are assigned to clients."""

    name: str = setting("iid", "iid, dirichlet, by_class, by_column or flower", choices=PARTITIONS)
    clients: int | None = setting(None, "number of clients K [10; by_column: one per value]", ge=1)
    alpha: float | None = setting(
        None, "dirichlet: concentration; smaller is more skewed", gt=0, finite=True, required=True, of=("dirichlet",)
    )
    classes_per_client: int | None = setting(
        None, "by_class: number of classes per client", ge=1, required=True, of=("by_class",)
    )
    column: str | None = setting(
        None, "by_column: the column whose values name the clients", required=True, of=("by_column",)
    )
    partitioner: str | None = setting(
        None, 'flower: a class of flwr_datasets.partitioner, e.g. "ShardPartitioner"', required=True, of=("flower",)
    )
    options: dict[str, Any] | None = setting(None, "flower: the partitioner's own arguments", of=("flower",))


def _kind(choices: tuple[str, ...]) -> Any:
    text = f"with classes: the kind of a row: {', '.join(choices[:-1])} or {choices[-1]}"
    return setting(None, text, choices=choices)


@dataclass(frozen=True)
class DataSpec(OpenSettings):
    """The source of the rows, and their partition."""

    one_of: ClassVar[tuple[str, ...]] = ("name", "path", "hub", "clients", "classes")  # [data] sets exactly one of them

    name: str | None = setting(
        None,
        'a built-in set: "digits"; or "module:function", which returns rows and model (how-to/own-model.md)',
        pattern=f"{'|'.join(BUILT_IN)}|{FUNCTION}",
        words='"digits", or "module:function"; a file or folder is data.path',
        metadata={"names": BUILT_IN},
    )
    path: str | None = setting(
        None,
        "csv, tsv, json, jsonl, txt (each also .gz), parquet, npz, an image folder or a folder of splits",
        pattern=_TEXT,
        words="a file or a folder",
    )
    hub: str | None = setting(
        None, "a Hugging Face data set id or save_to_disk folder", pattern=_TEXT, words="an id or a folder"
    )
    clients: dict[str, str] | None = setting(
        None,
        "client name -> its own file or folder (partition.clients sets how many clients share one table)",
        pattern=_TEXT,
        keys=NAME,
        least=1,
        words=_FILES,
    )
    classes: tuple[str, ...] | None = setting(
        None,
        "deployment, folder: the class names, in order, for a server without rows; data.kind then says what kind of "
        "rows the silos have",
        pattern=_TEXT,
        words="a list of class names",
    )
    kind: str | None = _kind(SHARED)
    width: int | None = setting(None, 'with kind "features": length d of a feature vector', ge=1)
    text: str = setting("text", "name of the text column")
    image: str = setting("image", "name of the image column")
    label: str = setting("label", "name of the label column")
    label_name: str = setting("label_name", "name of the column of class names")
    split: str = setting("split", "name of the column with train, val, test")
    partition: PartitionSpec = setting(PartitionSpec(), "how rows are assigned to clients")
    without: tuple[str, ...] = setting(
        (), "names of clients that take no part, although the source has their rows; `fedfm leave` sets it"
    )
    where: dict[str, tuple[str, ...]] | None = setting(
        None, "column -> values of the rows to keep; all other rows are left out, test rows too", least=1
    )
    limit: int | None = setting(None, "largest number of training rows; they are chosen stratified by class", ge=1)
    test_fraction: float = setting(0.2, "share of test rows if the source marks none", ge=0, lt=1)
    val_fraction: float = setting(0.0, "share of each client's training rows for validation", ge=0, lt=1)
    augment: tuple[str, ...] = setting(
        (),
        "random changes of training images, drawn anew in every epoch: crop (at a random place of the image, padded "
        "by an eighth), flip (left to right, with probability 1/2)",
        choices=AUGMENT,
    )
    scale: str = setting("none", "scaling of feature vectors: none, row or unit", choices=("none", "row", "unit"))

    def column(self, key: str) -> str:
        """The name of the column that a key of the [data] table sets, e.g. the key ``instruction``."""
        return str(vars(self)[key]) if key in vars(self) else tasks.column_name(key)

    def listed_columns(self, key: str) -> tuple[str, ...]:
        """The names of the columns that a key of the [data] table lists, e.g. the key ``targets``; () if not set."""
        found: tuple[str, ...] = vars(self).get(key, ())
        return found

    @classmethod
    def own_keys(cls, values: Mapping[str, Any]) -> dict[str, Setting]:
        return {} if values.get("kind") in (None, *SHARED) else _kind_of_tasks()

    @classmethod
    def setting_of(cls, key: str) -> Setting | None:
        return tasks.data_setting(key)

    @classmethod
    def all_keys(cls) -> dict[str, Setting]:
        return _kind_of_tasks() | tasks.data_settings()


def _kind_of_tasks() -> dict[str, Setting]:
    """The key ``kind`` with the kinds of rows that belong to single tasks."""
    return {"kind": (str | None, _kind(tasks.remote_kinds()))}


def check(spec: DataSpec) -> None:
    """Raise an InputError for values of a [data] table that are out of bounds or incompatible; reads no data."""
    given = [key for key in spec.one_of if getattr(spec, key) is not None]
    if len(given) != 1:
        what = " and ".join(given) or "none"
        raise InputError(f"[data]: expected exactly one of {', '.join(spec.one_of)}; got {what}", key="data")
    if spec.name == IN_MEMORY:
        spec = dataclasses.replace(spec, name=BUILT_IN[0])
    faults = Faults()
    if spec.clients is not None and spec.partition != PartitionSpec():
        faults.say(
            "data.partition conflicts with data.clients: every file is one client's; remove one of the two",
            key="data.partition",
        )
    with faults:
        _check_without_rows(spec)
    if spec.where and spec.clients:
        faults.say(
            "data.where conflicts with data.clients: a client's file holds only its own rows",
            key="data.where",
        )
    with faults:
        fields.check(spec, "data")
    faults.refuse()


def _check_without_rows(spec: DataSpec) -> None:
    """Check the keys of a server that has class names and no rows."""
    for key in ("kind", "width") if spec.classes is None else ():
        if getattr(spec, key) is not None:
            raise InputError(
                f"data.{key} describes rows that the server does not have; it needs data.classes", key=f"data.{key}"
            )
    if spec.classes is None:
        return
    if spec.kind is None:
        raise InputError(
            f"data.kind is missing: with data.classes it says what kind of rows the silos have, one of "
            f"{quote_names(tasks.remote_kinds())}",
            key="data.kind",
        )
    if (spec.kind == "features") != (spec.width is not None):
        raise InputError(
            'data.width: kind "features" needs the length of its vectors; no other kind has a width', key="data.width"
        )
    if spec.partition != PartitionSpec():
        raise InputError(
            "data.partition conflicts with data.classes: the silos have their own rows; remove data.partition",
            key="data.partition",
        )
    for key in ("where", "limit"):
        if getattr(spec, key):
            text = "data.where and limit choose among the server's rows, but with data.classes the server has none"
            raise InputError(text, key=f"data.{key}")
    from fedfm.data.class_names import check_list

    check_list(spec.classes, "data.classes")
    if bool(spec.classes) != tasks.implied_task(spec.kind).needs_classes:
        wanted = f'[]: rows of kind "{spec.kind}" have no classes' if spec.classes else "a list of class names"
        raise InputError(f"data.classes = {list(spec.classes)}: expected {wanted}", key="data.classes")
