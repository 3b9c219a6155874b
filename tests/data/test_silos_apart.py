"""Silos whose files are joined although they hold other units, unnamed columns, or no marks of test rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec

N = 24


def notices_for(clients: dict[str, Path], task: str | None = None) -> str:
    spec = DataSpec(clients={name: str(path) for name, path in clients.items()})
    return " / ".join(load_table(spec, seed=0, task=task).notices)


@pytest.mark.parametrize(("factor", "shift", "other"), [(1, 0, False), (1.5, 0, False), (18, 0, True), (-1, 0, True)])
def test_a_target_in_other_units_is_named(factor: float, shift: float, other: bool, tmp_path: Path) -> None:
    """Glucose in mmol/l at one silo and in mg/dl at another was trained as one number."""
    values = np.random.default_rng(0).uniform(4, 9, (2, N))
    for name, of in (("north", values[0]), ("south", values[1] * factor + shift)):
        rows = "".join(f"{name} {i},{v}\n" for i, v in enumerate(of))
        (tmp_path / f"{name}.csv").write_text("text,label\n" + rows)
    text = notices_for({name: tmp_path / f"{name}.csv" for name in ("north", "south")}, "regression")
    assert ("are they in other units?" in text) == other


def test_labels_of_rows_are_no_units(tmp_path: Path) -> None:
    for name, label in (("north", "a"), ("south", "b")):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(f'{{"text": "{name} {i}", "label": ["{label}", "c"]}}\n' for i in range(N))
        )
    text = notices_for({name: tmp_path / f"{name}.jsonl" for name in ("north", "south")}, "multi_label")
    assert "units" not in text


def test_a_file_without_names_of_columns_is_named(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(2, N, 3)), np.arange(N) % 2
    np.savez(tmp_path / "north.npz", x=x[0], y=y, feature_names=np.array(list("abc")))
    np.savez(tmp_path / "south.npz", x=x[1], y=y)
    text = notices_for({name: tmp_path / f"{name}.npz" for name in ("north", "south")})
    assert '"north" name the columns of x, and "south" do not: they are taken to have the same order' in text


@pytest.mark.parametrize("marked", [(), ("north",), ("north", "south")])
def test_silos_without_marks_of_test_rows_are_named_next_to_others(marked: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("north", "south"):
        head, part = ("text,label,split", [",train", ",test"]) if name in marked else ("text,label", ["", ""])
        rows = [f"{name} {i},{'ab'[i % 2]}{part[i % 5 == 0]}" for i in range(N)]
        (tmp_path / f"{name}.csv").write_text("\n".join([head, *rows]) + "\n")
    text = notices_for({name: tmp_path / f"{name}.csv" for name in ("north", "south")})
    assert ('drawn from training rows for "south", since only others mark them' in text) == (len(marked) == 1)
