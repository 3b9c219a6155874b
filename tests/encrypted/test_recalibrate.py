"""fedfm distil of a model that is a student already: intervals for other rows, without training."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.cli import main
from fedfm.config.toml import to_toml
from fedfm.encrypted.student import conversion
from fedfm.encrypted.student.distil import distil
from fedfm.encrypted.student.fit_polynomials import Measured, refit
from fedfm.encrypted.student.polynomials import WIDEST, InverseSquareRoot
from fedfm.models import derived_modules
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from small import pictures
from tiny_students import tiny

RECIPE = {"epochs": [6, 2, 2], "learning_rates": [5e-3, 1e-3, 1e-4], "batch_size": 8, "threads": 1}


def drawings(path, n=96):
    """Black strokes on white, far from the grey noise that the student was made of."""
    rng = np.random.default_rng(5)
    x = np.full((n, 8, 8, 3), 255, np.uint8)
    x[rng.random((n, 8, 8)) < 0.15] = 0
    y = np.arange(n) % 3
    for i, c in enumerate(y):
        x[i, :, 2 * c : 2 * c + 2] = 0
    split = np.where(np.arange(n) < 64, "train", "test")
    np.savez(path, x=x, y=y, classes=np.array(["a", "b", "c"]), split=split)
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a student, the rows that it was made of, and others."""
    folder = tmp_path_factory.mktemp("again")
    pictures(folder, 120, side=8)
    tiny("ijepa", folder / "start")
    known = {"data": {"path": str(folder / "pictures.npz")}, "model": {"name": str(folder / "start")}}
    distil(known | {"distil": RECIPE}, folder / "student")
    drawings(folder / "drawings.npz")
    return folder


def again(place, folder, **recipe):
    path = folder / "again.toml"
    tables = {"data": {"path": str(place / "drawings.npz")}, "model": {"name": str(place / "student")}}
    path.write_text(to_toml(tables | {"distil": {"epochs": [0, 0, 0], "threads": 1} | recipe}))
    return path


def features(folder, rows):
    """The features of the held-out rows of a file, and the share of arguments outside the intervals."""
    from fedfm.data.load import load_table
    from fedfm.data.spec import DataSpec

    table = load_table(DataSpec(path=str(rows)), seed=0, task="classification")
    spec = ModelSpec(str(folder), adaptation=AdaptationSpec("head"), device="cpu")
    model = load_model(spec, classes=table.classes, kind="image")
    conversion.forget(model.module)
    found = model.features(model.prepare(table, table.rows("test")))
    counts = derived_modules.violations(model.module).values()
    return found, sum(n for n, _ in counts) / sum(n for _, n in counts)


def blocks(folder):
    return json.loads((folder / "config.json").read_text())["fedfm_polynomials"]["blocks"]


@pytest.mark.proof
def test_other_rows_have_numbers_and_the_first_ones_keep_theirs(place, tmp_path, capsys):
    was, far = features(place / "student", place / "drawings.npz")
    lost = int((~was.isfinite().all(1)).sum())
    assert lost or far
    old, _ = features(place / "student", place / "pictures.npz")
    code = main(["distil", str(again(place, tmp_path)), "--out", str(tmp_path / "wide"), "--format", "json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert (result["measured"], result["judged"]) == (64, 32)
    assert result["without_numbers_before"] == lost
    assert result["without_numbers"] == 0
    assert np.mean([block["outside"] for block in result["blocks"]]) == pytest.approx(result["outside"])  # same rows
    assert result["outside"] < 1e-3 < result["outside_before"]
    now, _ = features(tmp_path / "wide", place / "drawings.npz")
    assert now.isfinite().all()
    kept, outside = features(tmp_path / "wide", place / "pictures.npz")
    assert outside < 1e-3
    torch.testing.assert_close(kept, old, rtol=0.02, atol=0.02)
    same = [(f / "model.safetensors").read_bytes() for f in (place / "student", tmp_path / "wide")]
    assert same[0] == same[1]
    for before, after in zip(blocks(place / "student"), blocks(tmp_path / "wide"), strict=True):
        for part in ("exp", "gelu"):
            (a, b), (c, d) = before[part]["interval"], after[part]["interval"]
            assert c <= a < b <= d
        assert after["scale"] == before["scale"]
        assert after["range"] >= before["range"]


@pytest.mark.proof
def test_measuring_twice_changes_nothing_and_the_table_lists_changes(place, tmp_path, capsys):
    path = again(place, tmp_path)
    assert main(["distil", str(path), "--out", str(tmp_path / "wide")]) == 0
    said = capsys.readouterr().out
    assert "measured again on 64 rows" in said
    assert "32 held-out rows" in said
    assert "rows whose features overflow" in said
    path.write_text(path.read_text().replace(str(place / "student"), str(tmp_path / "wide")))
    assert main(["distil", str(path), "--out", str(tmp_path / "same")]) == 0
    for a, b in zip(blocks(tmp_path / "wide"), blocks(tmp_path / "same"), strict=True):
        assert a == b


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"epochs": [1, 0, 0]}, "is a polynomial student already; set distil.epochs = [0, 0, 0]"),
        ({"image_size": 16}, "drop distil.image_size"),
        ({"views": 2}, "distil.views"),
    ],
)
def test_a_student_is_not_trained_again(place, tmp_path, capsys, recipe, says):
    assert main(["distil", str(again(place, tmp_path, **recipe)), "--out", str(tmp_path / "no")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


EDGE = st.floats(1e-3, 1e3)


@settings(max_examples=60)
@given(old=st.tuples(EDGE, st.floats(1.01, 60)), seen=st.tuples(EDGE, st.floats(1, 1e4)))
def test_an_interval_of_a_root_grows_as_far_as_its_ratio(old, seen):
    low, high = old[0], old[0] * old[1]
    steps = InverseSquareRoot.within(5e-3, (low, high)).steps
    norm = {"kind": "inverse_square_root", "steps": steps, "interval": [low, high]}
    measured = Measured()
    measured.extremes["first"] = torch.tensor([seen[0], seen[0] * seen[1]], dtype=torch.float64)
    new = refit({"norms": [norm, norm]}, measured, "scaled", "first", keep=True)
    if new is None:
        assert low <= seen[0]
        assert seen[0] * seen[1] <= high
        return
    (first, last), untouched = new["norms"][0]["interval"], new["norms"][1]
    assert untouched == norm
    assert last >= max(high, seen[0] * seen[1])
    assert last / first <= WIDEST
    assert first <= min(low, seen[0]) or last / first > 0.99 * WIDEST
