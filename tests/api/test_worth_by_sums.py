"""Clients of hidden sums are valued only by their own sums, which each client writes into a file."""

from itertools import combinations
from math import factorial

import numpy as np
import pytest

import fedfm
from carried import Summed
from fedfm.api.worth import worth
from fedfm.cli import main
from fedfm.errors import InputError
from fedfm.runtime.run_directory import Run
from small import features

QUIET = fedfm.Progress()
HIDDEN = {"privacy": {"aggregator": "secagg"}}
FOUR = ("a", "b", "c", "d")
ANALYTIC = {"name": "analytic", "rounds": 1}


@pytest.fixture
def rows(tmp_path):
    """Rows of nobody, on which models are valued; three in ten have a wrong label, so that no model is perfect."""
    (tmp_path / "judge").mkdir()
    path = features(tmp_path / "judge", n=200, d=4, classes=2, seed=0)
    table = dict(np.load(path))
    flip = np.arange(200) % 10 < 3
    np.savez(path, **{**table, "y": np.where(flip, 1 - table["y"], table["y"])})
    return path


def files(federation, names):
    assert [federation.sums(name) for name in names] == [0] * len(names)
    return [federation.root / f"{name}.sums" for name in names]


def test_the_files_of_all_give_the_values_of_the_replay(tmp_path, monkeypatch):
    federation = Summed(tmp_path, monkeypatch, method=ANALYTIC)
    local = fedfm.run(federation.carried.tables(**federation.tables), tmp_path / "local", progress=QUIET)["run"]
    federation.run = Run.open(local).path
    opened = worth(local, sums=files(federation, ("east", "north", "south")), progress=QUIET)
    replayed = worth(local, progress=QUIET)
    assert (opened["how"], opened["measure"]) == ("exact", "accuracy")
    assert list(opened["opened"]) == ["east", "north", "south"]
    for key in ("shapley", "leave_one_out"):
        assert opened[key].keys() == replayed[key].keys()
        for client, of in replayed[key].items():
            assert opened[key][client] == pytest.approx(of, abs=1e-9)


@pytest.mark.proof
def test_silos_without_a_file_count_as_one(tmp_path, monkeypatch, rows):
    """Compared with the definition: all sets of two silos and the two others together are trained again."""
    federation = Summed(tmp_path, monkeypatch, names=FOUR, method=ANALYTIC, **HIDDEN)
    found = worth(federation.run, sums=files(federation, "ab"), rows=rows, progress=QUIET)
    parts = {"a": "a", "b": "b", "2 others together": "cd"}
    assert set(found["shapley"]) == set(parts)

    labels = [str(y) for y in np.load(rows)["classes"][np.load(rows)["y"]]]

    def value(chosen):
        members, place = {name for part in chosen for name in parts[part]}, start
        if members:
            gone = [name for name in FOUR if name not in members]
            federation.without(*gone)
            place = tmp_path / f"without-{'-'.join(gone)}"
        return np.mean([a == b for a, b in zip(fedfm.predict(place, rows)["predictions"], labels, strict=True)])

    tables = federation.carried.tables(method={**ANALYTIC, "rounds": 0})
    start = fedfm.run(tables, tmp_path / "start", progress=QUIET)["run"]
    federation.tables = {"method": ANALYTIC}  # the same sums in the clear
    known = {frozenset(s): value(s) for n in range(4) for s in combinations(parts, n)}
    for part, of in found["shapley"].items():
        others = [p for p in parts if p != part]
        mean = sum(
            factorial(n) * factorial(2 - n) / factorial(3) * (known[frozenset(s) | {part}] - known[frozenset(s)])
            for n in range(3)
            for s in combinations(others, n)
        )
        assert of["value"] == pytest.approx(mean, abs=1e-9)
        assert found["leave_one_out"][part]["value"] == pytest.approx(
            known[frozenset(parts)] - known[frozenset(others)], abs=1e-9
        )
    assert found["total"] == pytest.approx(known[frozenset(parts)] - known[frozenset()], abs=1e-9)
    with pytest.raises(InputError, match="would disclose the sums of d, which gave none"):
        worth(federation.run, sums=files(federation, "abc"), rows=rows, progress=QUIET)


def test_invalid_files_of_sums_are_refused(tmp_path, monkeypatch, rows):
    federation = Summed(tmp_path, monkeypatch, method=ANALYTIC)
    (file,) = files(federation, ("north",))
    for given, says in (
        ({"sums": [file]}, "give rows to value models by: --rows"),
        ({"sums": [file, file], "rows": rows}, "north are given twice"),
        ({"sums": [rows], "rows": rows}, "no file of a client's sums"),
        ({"rows": rows}, "--rows: only with --sums"),
        ({"sums": [file], "rows": rows, "evaluations": 1}, "expected at least 2"),
        ({}, "own data are not on this machine"),
    ):
        with pytest.raises(InputError, match=says):
            worth(federation.run, **given, progress=QUIET)


def test_the_command_line_says_who_opened_its_sums(tmp_path, monkeypatch, rows, capsys):
    federation = Summed(tmp_path, monkeypatch, method=ANALYTIC)
    (file,) = files(federation, ("north",))
    assert main(["worth", str(federation.run), "--sums", str(file), "--rows", str(rows)]) == 0
    out = capsys.readouterr().out
    assert "2 others together" in out
    assert "opened by their own files: north" in out
    page = (federation.run / "report.html").read_text()
    assert "To be valued, north gave their own sums" in page
