"""Runs side by side, in the terminal and on a page."""

import re

import pytest

from fedfm.errors import InputError
from fedfm.reports import compare, html, read
from reports import runs


@pytest.fixture
def pair(tmp_path):
    first = runs.changed(
        runs.make(tmp_path / "a"),
        accuracy=0.5,
        global_accuracy=0.5,
        local_accuracy=0.75,
        client_accuracy={"x": 0.5, "y": 1.0, "z": None},
    )
    second = runs.changed(runs.make(tmp_path / "b"), method="fedpft", bytes_up=999, seconds=7000)
    return [first, second]


def test_the_table_by_hand(pair):
    lines = compare.table(pair).splitlines()
    assert lines[0].split() == [
        "run",
        "method",
        "accuracy",
        "global",
        "local",
        "worst",
        "client",
        "spread",
        "up",
        "down",
        "seconds",
    ]
    assert lines[2].split() == [
        "fedavg",
        "fedavg",
        "0.5000",
        "0.5000",
        "0.7500",
        "0.5000",
        "0.2500",
        "12.3",
        "MB",
        "2.35",
        "MB",
        "61.5",
    ]
    assert lines[3].split()[-5:] == ["999", "B", "2.35", "MB", "7000.0"]
    assert len({len(line) for line in lines}) == 1


def test_the_table_is_safe_for_a_terminal(tmp_path):
    run = runs.changed(runs.make(tmp_path / "a"), method="\x1b[2Jgone\u202e")
    assert not set(compare.table([run])) & {"\x1b", "\u202e"}


@pytest.mark.parametrize("accuracy", [None, 0.31])
def test_a_table_of_language_models_has_perplexity(tmp_path, accuracy):
    """Also where the next tokens are counted, as ``evaluate`` does."""
    run = runs.changed(runs.make(tmp_path / "a"), accuracy=accuracy, perplexity=12.5)
    head, _, row = compare.table([run]).splitlines()
    assert head.split()[:3] == ["run", "method", "perplexity"]
    assert row.split()[2] == "12.5"
    assert ("accuracy" in head.split()) == (accuracy is not None)


def test_a_table_of_language_models_has_the_clients_loss(tmp_path):
    run = runs.changed(runs.make(tmp_path / "a"), accuracy=None, perplexity=12.5, local_loss=2.25)
    head, _, row = compare.table([run]).splitlines()
    assert head.split()[2:5] == ["perplexity", "local", "loss"]
    assert row.split()[2:4] == ["12.5", "2.25"]
    shown = " ".join(re.sub("<[^>]+>", " ", compare.write([run], tmp_path / "page.html").read_text()).split())
    assert "perplexity local loss" in shown
    assert "12.5 2.25" in shown


def test_the_table_marks_an_unfinished_run(tmp_path):
    whole = runs.make(tmp_path / "a")
    names = [f"c{i}" for i in range(6)]
    part = runs.make(
        tmp_path / "b", name="part", rounds=[runs.line(t, names) for t in range(4)], finished=None, result=None
    )
    lines = compare.table([whole, part]).splitlines()
    assert lines[0].split()[-1] == "state"
    assert lines[2].endswith("finished")
    assert lines[3].endswith("unfinished: 3 of 12 rounds")
    assert "state" not in compare.table([whole])


def test_labels_tell_runs_apart(tmp_path):
    paths = [runs.make(tmp_path / n, name=m) for n, m in (("a", "x"), ("b", "y"), ("c", "y"))]
    assert compare.labels([read.read(p) for p in paths]) == ["a", "b", "c"]


def test_differences_of_the_compared_runs_are_reported(tmp_path):
    first = runs.make(tmp_path / "a")
    other = runs.make(
        tmp_path / "b", name="other", n_rounds=3, fingerprints={"data": "0", "model": "e" * 64}, finished=None
    )
    said = " ".join(compare.differences([read.read(first), read.read(other)]))
    assert "different data: the rows (fingerprint) of other are not fedavg-digits's." in said
    assert "Unfinished: other." in said
    assert "number of rounds differs (12 for" in said
    assert "model" not in said
    assert compare.differences([read.read(first), read.read(first)]) == []


def test_the_page_holds_every_run(pair, tmp_path):
    text = compare.write(pair, tmp_path / "deep" / "compare.html").read_text(encoding="utf-8")
    assert "2\u00a0runs compared" in text
    assert "fedpft" in text
    assert "http:" not in text


def test_a_report_with_baselines_has_the_section(pair):
    assert 'id="compare"' not in html.write(pair[0]).read_text(encoding="utf-8")
    assert 'id="compare"' in html.write(pair[0], pair[1:]).read_text(encoding="utf-8")


def test_wrong_input_is_refused(pair, tmp_path):
    with pytest.raises(InputError, match="no run given"):
        compare.table([])
    with pytest.raises(InputError, match="a folder"):
        compare.write(pair, tmp_path)
    with pytest.raises(InputError, match="missing: there is no such folder"):
        compare.write([tmp_path / "missing"], tmp_path / "out.html")
    with pytest.raises(InputError, match="cannot be written"):
        compare.write(pair, pair[0] / "manifest.json" / "out.html")
