"""Hidden sums of a client that opened none never follow from the sums that others opened, in any order."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedfm
from carried import Summed
from fedfm.api import own_sums
from fedfm.api.leave import leave
from fedfm.api.worth import worth
from fedfm.errors import InputError
from small import features

QUIET = fedfm.Progress()
ANALYTIC = {"name": "analytic", "rounds": 1}
HIDDEN = {"privacy": {"aggregator": "secagg"}}


def run_of(path, clients, departures=(), form="masked"):
    transport = SimpleNamespace(form=form)
    path.mkdir()
    return SimpleNamespace(
        path=path,
        manifest={"clients": clients, "result": {"excluded": []}, "departures": list(departures)},
        experiment=SimpleNamespace(aggregation=SimpleNamespace(transport=transport)),
    )


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 6), st.data())
def test_the_sums_of_one_silent_client_never_follow(tmp_path_factory, count, data):
    """Clients leave any run that was made so far, or give their sums to be valued; the rest has two clients or none."""
    folder, clients = tmp_path_factory.mktemp("runs"), [f"c{i}" for i in range(count)]
    runs, known = [run_of(folder / "run", clients)], set()
    for step in range(data.draw(st.integers(1, 8))):
        run = data.draw(st.sampled_from(runs))
        here = run.manifest["clients"]
        leaves = data.draw(st.booleans())
        names = data.draw(st.sets(st.sampled_from(here), min_size=1, max_size=1 if leaves else len(here)))
        given_sums = dict.fromkeys(sorted(names), "0" * 64)
        try:
            own_sums.check_others(run, given_sums)
        except InputError as error:
            (silent,) = set(clients) - known - names
            refused = f"would disclose the sums of {silent}" in str(error)
        else:
            refused = False
        if refused:
            continue
        known |= names
        assert len(set(clients) - known) != 1
        new = None
        if leaves and len(here) > 1:
            entry = {"from": {"run": str(run.path)}, "removed": {"sums_sha256": "0"}}
            rest = [c for c in here if c not in names]
            new = run_of(folder / f"run-{step}", rest, [*run.manifest["departures"], entry])
            runs.append(new)
        own_sums.enter_opened(run, given_sums, new)


def test_sums_in_the_clear_need_no_record(tmp_path):
    run = run_of(tmp_path / "run", ["a", "b"], form="plain")
    own_sums.check_others(run, {"a": "0"})
    own_sums.enter_opened(run, {"a": "0"})
    assert not (tmp_path / "run" / own_sums.OPENED).exists()


def test_a_damaged_record_is_refused(tmp_path):
    run = run_of(tmp_path / "run", ["a", "b", "c"])
    (run.path / own_sums.OPENED).write_text("[]")
    with pytest.raises(InputError, match="damaged"):
        own_sums.check_others(run, {"a": "0"})


def test_leave_and_worth_share_the_record(tmp_path, monkeypatch):
    federation = Summed(tmp_path, monkeypatch, names=("a", "b", "c", "d"), method=ANALYTIC, **HIDDEN)
    (tmp_path / "judge").mkdir()
    judge = features(tmp_path / "judge", n=40, d=4, classes=2, seed=0)
    assert [federation.sums(name) for name in "abc"] == [0, 0, 0]
    file = {name: tmp_path / f"{name}.sums" for name in "abc"}
    rest = leave(federation.run, "a", tmp_path / "rest", sums=file["a"], progress=QUIET)["run"]
    worth(federation.run, sums=[file["b"]], rows=judge, progress=QUIET)
    for place in (federation.run, tmp_path / "rest"):
        assert {"a"} <= json.loads((place / own_sums.OPENED).read_text())["opened"].keys()
    with pytest.raises(InputError, match=r"given before by a, b, would disclose the sums of d"):
        worth(federation.run, sums=[file["c"]], rows=judge, progress=QUIET)
    with pytest.raises(InputError, match="would disclose the sums of d"):
        leave(federation.run, "c", tmp_path / "third", sums=file["c"], progress=QUIET)
    federation.run = tmp_path / "rest"
    assert federation.sums("c") == 0
    with pytest.raises(InputError, match="would disclose the sums of d"):  # b gave its sums to the run before
        leave(rest, "c", tmp_path / "fourth", sums=file["c"], progress=QUIET)
    assert not (tmp_path / "fourth").exists()


def test_a_file_that_discloses_the_only_other_silo_is_not_written(tmp_path, monkeypatch, capsys):
    federation = Summed(tmp_path, monkeypatch, names=("a", "b", "c"), method=ANALYTIC)
    manifest = federation.run / "manifest.json"
    found = json.loads(manifest.read_text())
    found["clients"] = ["a", "b"]
    found["experiment"]["privacy"] = {"aggregator": "secagg"}
    manifest.write_text(json.dumps(found))
    assert federation.sums("a") == 2
    assert "this file would disclose those of b" in capsys.readouterr().err
    assert not (tmp_path / "a.sums").exists()
