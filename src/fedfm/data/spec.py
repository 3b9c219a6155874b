"""The [data] table of an experiment."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedfm.core import fields, tasks
from fedfm.core.fields import setting, with_settings
from fedfm.core.text import NAME, NAME_WORDS
from fedfm.errors import Faults, InputError, quote_names

WITHHELD = "(kept by the server)"  # replaces values that clients do not receive
IN_MEMORY = "(in memory)"  # the name of data and of a model from a Python program: see fedfm.api.federate
BUILT_IN = ("digits",)
FUNCTION = r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*"  # a user's own code, see fedfm.config.user_code
PARTITIONS = ("iid", "dirichlet", "by_class", "by_column", "flower")
KINDS = (
    "image",
    "text",
    "features",
    *(kind.name for kind in tasks.row_kinds() if kind.remote),
)  # kinds of rows that a server without rows can name
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


@dataclass(frozen=True)
class _Source:
    """The source of the rows, and the names of its columns."""

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
        "deployment: the class names, in order, for a server without rows; data.kind then says what kind of rows the "
        "silos have",
        pattern=_TEXT,
        words="a list of class names",
    )
    kind: str | None = setting(
        None, f"with classes: the kind of a row: {', '.join(KINDS[:-1])} or {KINDS[-1]}", choices=KINDS
    )
    width: int | None = setting(None, 'with kind "features": length d of a feature vector', ge=1)
    text: str = setting("text", "name of the text column")
    image: str = setting("image", "name of the image column")
    label: str = setting("label", "name of the label column")
    label_name: str = setting("label_name", "name of the column of class names")
    split: str = setting("split", "name of the column with train, val, test")


if TYPE_CHECKING:
    _Columns = _Source
else:
    _Columns = with_settings("_Columns", _Source, tasks.data_settings(), __name__)  # adds the columns of single tasks


@dataclass(frozen=True)
class DataSpec(_Columns):
    """The source of the rows and their partition."""

    partition: PartitionSpec = setting(PartitionSpec(), "how rows are assigned to clients")
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
        return str(vars(self)[key])


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
            f"{quote_names(KINDS)}",
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
    if not spec.classes and tasks.implied_task(spec.kind).needs_classes:
        raise InputError("data.classes = []: expected a list of class names", key="data.classes")
