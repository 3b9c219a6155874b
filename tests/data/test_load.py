"""load_table: test rows, limit, scale, clients' own files, and what is refused before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfm.data.client_files import unite
from fedfm.data.feature_scales import scale_features
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec, PartitionSpec, check
from fedfm.data.table import Table, fingerprint
from fedfm.errors import InputError


def table_of(x: Any, kind: Any = "features") -> Table:
    return Table(kind, np.array(x, dtype=np.float32), None, (), np.full(len(x), "train"))


def silo(path: Path, labels: list[str], split: list[str] | None = None, more: str = "") -> str:
    head = "text,label" + (",split" if split else "") + (",site" if more else "")
    rows = [
        ",".join([f"{path.stem} {i}", label, *([split[i]] if split else []), *([more] if more else [])])
        for i, label in enumerate(labels)
    ]
    path.write_text("\n".join([head, *rows]))
    return str(path)


def test_test_rows_are_stratified_and_the_limit_spares_them() -> None:
    whole = load_table(DataSpec(name="digits"), seed=0)
    assert whole.labels is not None
    test = whole.rows("test")
    assert len(test) == round(0.2 * 1797)
    share = np.bincount(whole.labels[test]) / np.bincount(whole.labels)
    assert np.abs(share - 0.2).max() < 0.01
    part = load_table(DataSpec(name="digits", limit=100), seed=0)
    assert part.labels is not None
    assert np.bincount(part.labels[part.rows("train")]).tolist() == pytest.approx([10] * 10, abs=1)
    assert len(part.rows("train")) == 100
    assert np.array_equal(part.inputs[part.rows("test")], whole.inputs[test])
    again = load_table(DataSpec(name="digits", limit=100), seed=0)
    assert np.array_equal(again.inputs, part.inputs)
    other = load_table(DataSpec(name="digits", limit=100), seed=1)
    assert not np.array_equal(other.inputs, part.inputs)


def test_marked_test_rows_stay_alone(tmp_path: Path) -> None:
    path = silo(tmp_path / "a.csv", list("abababab"), ["test", "val", *["train"] * 6])
    table = load_table(DataSpec(path=path, test_fraction=0.5), seed=0)
    assert table.rows("test").tolist() == [0]
    assert table.rows("val").tolist() == [1]


def test_every_value_of_the_column_keeps_test_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "text,label,site\n" + "".join(f"t{i},{'ab'[i % 2]},{'big' if i < 90 else 'tiny'}\n" for i in range(100))
    )
    by = PartitionSpec("by_column", column="site")
    for seed in range(5):
        table = load_table(DataSpec(path=str(tmp_path / "a.csv"), partition=by), seed=seed)
        site = table.columns["site"][table.rows("test")]
        assert (site == "big").sum() == 18
        assert (site == "tiny").sum() == 2
        few = load_table(DataSpec(path=str(tmp_path / "a.csv"), partition=by, limit=8), seed=seed)
        assert set(few.columns["site"][few.rows("train")]) == {"big", "tiny"}


def test_where_keeps_the_rows_of_the_listed_values_and_all_classes(tmp_path: Path) -> None:
    lines = [f"t{i},{'abc'[i % 3]},{'xyz'[i // 10]},{'test' if i % 5 == 0 else 'train'},{i % 2}" for i in range(30)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label,site,split,odd", *lines]))

    def texts(**where: tuple[str, ...]) -> Table:
        return load_table(DataSpec(path=str(tmp_path / "a.csv"), where=where), seed=0)

    both = texts(site=("x", "z"))
    assert both.inputs == [f"t{i}" for i in range(30) if i // 10 != 1]
    assert both.split.tolist() == ["test" if i % 5 == 0 else "train" for i in range(30) if i // 10 != 1]
    assert texts(site=("x",), odd=("1",)).inputs == ["t1", "t3", "t5", "t7", "t9"]
    assert texts(site=("x",)).classes == ("a", "b", "c")
    assert fingerprint(texts(site=("x", "y", "z"))) == fingerprint(texts())


def test_where_refuses_absent_columns_and_values(tmp_path: Path) -> None:
    path = silo(tmp_path / "a.csv", list("ab") * 5, more="x")
    only_test = silo(tmp_path / "b.csv", list("ab") * 5, ["test"] * 5 + ["train"] * 5)
    (tmp_path / "c.csv").write_text("text,label,split,site\nt,a,test,x\nu,a,train,y")
    for spec, message in (
        (
            DataSpec(path=path, where={"sites": ("x",)}),
            r'a\.csv: no column "sites" \(data\.where\); found "site" \(did you mean',
        ),
        (
            DataSpec(path=path, where={"site": ("x", "q")}),
            r'data\.where\.site: no row of .*a\.csv has "q"; there are "x"',
        ),
        (DataSpec(path=only_test, where={"site": ("x",)}), r'no column "site" \(data\.where\); found none'),
        (
            DataSpec(path=path, where={"label": ("a",)}),
            r'data\.where\.label: data\.label reads .*\("site"\); add',
        ),
        (
            DataSpec(path=only_test, where={"split": ("test",)}),
            r"data\.where\.split: data\.split reads .*are none",
        ),
        (DataSpec(path=path, where={"text": ("a",)}), r"data\.where\.text: data\.text reads this column"),
        (DataSpec(path=str(tmp_path / "c.csv"), where={"site": ("x",)}), r"c\.csv has no training rows"),
    ):
        with pytest.raises(InputError, match=message):
            load_table(spec, seed=0)


def test_scale_by_hand() -> None:
    assert scale_features(table_of([[3.0, 4.0], [0.0, 0.0]]), "unit").inputs == pytest.approx(
        np.array([[0.6, 0.8], [0, 0]])
    )
    # mean 2, variance (1 + 0 + 1) / 3
    row = scale_features(table_of([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]]), "row").inputs
    assert row == pytest.approx(np.array([[-(1.5**0.5), 0, 1.5**0.5], [0, 0, 0]]))
    assert row.dtype == np.float32
    with pytest.raises(InputError, match=r'data\.scale: "row" is for feature vectors; digits holds images'):
        load_table(DataSpec(name="digits", scale="row"), seed=0)


def test_clients_files_become_one_table(tmp_path: Path) -> None:
    north = silo(tmp_path / "north.csv", list("aabb") * 5, more="x")
    south = silo(tmp_path / "south.csv", list("cb") * 4, ["test"] + ["train"] * 7)
    table = load_table(DataSpec(clients={"south": south, "north": north}), seed=0)
    assert table.classes == ("a", "b", "c")
    assert table.columns["client"].tolist() == ["north"] * 20 + ["south"] * 8
    assert table.labels is not None
    assert table.labels[20:].tolist() == [2, 1] * 4
    test = table.columns["client"][table.rows("test")].tolist()
    assert test == ["north"] * 4 + ["south"]  # north marks none: a fifth; south marks its own
    assert table.columns["site"].tolist() == ["x"] * 20 + [""] * 8
    turned = load_table(DataSpec(clients={"north": north, "south": south}), seed=0)
    assert turned.split.tolist() == table.split.tolist()
    assert turned.inputs == table.inputs
    few = load_table(DataSpec(clients={"north": north, "south": south}, limit=6), seed=0)
    assert set(few.columns["client"][few.rows("train")]) == {"north", "south"}


def test_classes_are_united_by_name() -> None:
    assert unite([("b", "a"), ("b", "a")]) == ("b", "a")
    assert unite([("b", "a"), ("c",)]) == ("a", "b", "c")
    assert unite([("0", "10"), ("9",)]) == ("0", "9", "10")


def test_clients_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    a = silo(tmp_path / "a.csv", list("ab"))
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "head.csv").write_text("text,label\n")
    only = silo(tmp_path / "only.csv", list("ab"), ["test", "test"])
    np.savez(tmp_path / "f2.npz", x=np.ones((3, 2)), y=[0, 1, 0])
    np.savez(tmp_path / "f3.npz", x=np.ones((3, 3)), y=[0, 1, 0])
    cases = [
        ({"a": a, "b": str(tmp_path / "empty.csv")}, r"data\.clients\.b: .*empty\.csv is empty"),
        ({"a": a, "b": str(tmp_path / "head.csv")}, r"data\.clients\.b: .*head\.csv .* no rows"),
        ({"a": a, "b": only}, r"data\.clients\.b: .*only\.csv has no training rows"),
        ({"a": a, "b": str(tmp_path / "none.csv")}, r"^data\.clients\.b: there is no"),
        (
            {"a": a, "b": str(tmp_path / "f2.npz")},
            r"b \(.*f2\.npz\) holds feature vectors of 2 and a \(.*\) holds texts",
        ),
        ({"a": str(tmp_path / "f2.npz"), "b": str(tmp_path / "f3.npz")}, r"vectors of 3 and a .* feature vectors of 2"),
    ]
    for clients, message in cases:
        with pytest.raises(InputError, match=message):
            load_table(DataSpec(clients=clients), seed=0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (DataSpec(), r"\[data\]: expected exactly one of name, path, hub, clients, classes; got none"),
        (DataSpec(name="digits", path="a.csv"), r"exactly one of .*; got name and path"),
        (DataSpec(name="digit"), r'data\.name = "digit": expected "digits", .*did you mean "digits"'),
        (DataSpec(name="silo.csv"), r"a file or folder is data\.path"),
        (DataSpec(name="digits", limit=0), r"data\.limit = 0: expected a whole number of at least 1"),
        (DataSpec(name="digits", test_fraction=1.0), r"data\.test_fraction = 1\.0: expected a number in \[0, 1\)"),
        (DataSpec(name="digits", val_fraction=-0.1), r"data\.val_fraction = -0\.1"),
        (DataSpec(name="digits", val_fraction=float("nan")), r"data\.val_fraction = nan"),
        (DataSpec(name="digits", scale="rows"), r'data\.scale = "rows": .*did you mean "row"'),
        (DataSpec(path="/no/such.csv", partition=PartitionSpec("dirichlet")), r"data\.partition\.alpha"),
        (DataSpec(clients={}), r"data\.clients = \{\}: expected"),
        (DataSpec(clients={"../a": "a.csv"}), r"data\.clients = .*each name of letters, digits"),
        (DataSpec(clients={"a": " "}), r'data\.clients\.a = " "'),
        (DataSpec(clients={"a": "a.csv"}, where={"site": ("x",)}), r"data\.where conflicts with data\.clients"),
        (DataSpec(path="a.csv", where={"site": ()}), r"data\.where\.site = \[\]"),
    ],
)
def test_a_wrong_table_is_refused_before_reading(spec: DataSpec, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(spec)


def test_the_name_of_the_built_in_set_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r'there is no "digits"; the built-in set is data\.name = "digits"'):
        load_table(DataSpec(path="digits"), seed=0)


def test_too_few_rows_for_a_test_are_reported(tmp_path: Path) -> None:
    table = load_table(DataSpec(path=silo(tmp_path / "a.csv", ["a", "b"])), seed=0)
    assert len(table.rows("test")) == 0
    assert "there are no test rows" in table.notices[-1]


def test_heavy_libraries_wait_until_they_are_needed() -> None:
    import subprocess
    import sys

    code = (
        "import sys, fedfm.data.load, fedfm.data.partition; "
        "assert not {'torch', 'pyarrow', 'pandas', 'datasets', 'PIL', 'sklearn', 'flwr_datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
