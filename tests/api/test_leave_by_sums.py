"""A silo with its rows on its own machine leaves by its own sums: nobody else takes part, and no rows are here."""

import functools
import json
import re
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedfm
from carried import Carried, Summed
from fedfm.api.leave import leave
from fedfm.cli import main
from fedfm.core import storage
from fedfm.core.kept_sums import sums_of
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods.analytic import Analytic, _sums_of
from fedfm.runtime.run_directory import Run

QUIET = fedfm.Progress()
HIDDEN = {"privacy": {"aggregator": "secagg"}}


def rows_of(federation, names):
    parts = [np.load(federation.carried.root / name / "rows.npz") for name in names]
    train = [part["split"] == "train" for part in parts]
    return tuple(np.concatenate([p[key][t] for p, t in zip(parts, train, strict=True)]) for key in ("x", "y"))


@pytest.fixture
def analytic(tmp_path, monkeypatch):
    return Summed(tmp_path, monkeypatch, method={"name": "analytic", "rounds": 1})


@pytest.mark.parametrize(
    ("method", "tolerance"),
    [
        ({"name": "analytic"}, 1e-8),
        ({"name": "analytic", "features": "random", "width": 8}, 1e-8),
        ({"name": "ghofl"}, 1e-8),
        ({"name": "ghofl", "form": "qda"}, 1e-8),
        ({"name": "fedncm"}, 1e-5),  # its message is float32
    ],
    ids=["analytic", "random", "lda", "qda", "fedncm"],
)
def test_the_remaining_state_is_that_of_a_run_without_the_silo(tmp_path, monkeypatch, method, tolerance):
    federation = Summed(tmp_path, monkeypatch, method=method | {"rounds": 1})
    assert federation.sums("north") == 0
    found = leave(federation.run, "north", sums=tmp_path / "north.sums", progress=QUIET)
    assert (found["exact"], found["how"], found["accuracy"]) == (True, "subtracted", None)
    rest, fresh = Run.open(found["run"]), federation.without("north")
    state = rest.state(Params)
    assert set(state) == set(fresh)
    for name, tensor in fresh.items():
        scale = max(float(tensor.abs().double().max()), 1.0)
        rounding = tolerance if tensor.dtype == torch.float64 else max(tolerance, 1e-6)
        np.testing.assert_allclose(state[name].double() / scale, tensor.double() / scale, atol=rounding, rtol=0)
    assert rest.manifest["clients"] == ["east", "south"]
    assert list(rest.experiment.data.clients) == ["east", "south"]


def test_the_solution_is_that_of_the_others_rows(analytic, tmp_path):
    """Compared with numpy: centre rows and targets, then solve (X^T X + I) W = X^T Y."""
    assert analytic.sums("north") == 0
    leave(analytic.run, "north", tmp_path / "rest", sums=tmp_path / "north.sums", progress=QUIET)
    x, y = rows_of(analytic, ("east", "south"))
    x, y = x.astype(np.float64), np.eye(2)[y]
    a, b = x - x.mean(0), y - y.mean(0)
    W = np.linalg.solve(a.T @ a + np.eye(x.shape[1]), a.T @ b)
    state = Run.open(tmp_path / "rest").state(Params)
    kept = sums_of(state)
    found, intercept = Analytic().solve(kept["C"].numpy(), kept["b"].numpy())
    np.testing.assert_allclose(found, W.T, atol=1e-8)
    np.testing.assert_allclose(intercept, y.mean(0) - x.mean(0) @ W, atol=1e-8)


def test_the_new_run_is_one_like_any_other(analytic, tmp_path, capsys):
    rows = str(analytic.carried.root / "east" / "rows.npz")
    before = json.dumps(Run.open(analytic.run).manifest)
    assert analytic.sums("north") == 0
    assert main(["leave", str(analytic.run), "north", "--sums", str(tmp_path / "north.sums")]) == 0
    out = capsys.readouterr().out
    assert "north has left: subtracted" in out
    assert "own sums, which discloses them: remove it" in out
    rest = f"{analytic.run}-without-north"
    assert json.dumps(Run.open(analytic.run).manifest) == before
    (entry,) = Run.open(rest).manifest["departures"]
    assert entry["removed"]["sums_sha256"]
    for args in (["report", rest], ["predict", rest, rows], ["export", rest, "--to", "torch", "--out", f"{rest}-x"]):
        assert main(args) == 0, capsys.readouterr().err
    assert main(["sign", rest]) == 0, capsys.readouterr().err
    # The next silo leaves the rest; the message of the old run is not one of the new.
    assert main(["leave", rest, "south", "--sums", str(tmp_path / "north.sums")]) == 2
    analytic.run = Run.open(rest).path
    assert analytic.sums("south") == 0
    assert main(["leave", rest, "south", "--sums", str(tmp_path / "south.sums")]) == 0
    assert [e["client"] for e in Run.open(f"{rest}-without-south").manifest["departures"]] == ["north", "south"]


@pytest.mark.proof
def test_hidden_sums_stay_hidden_but_for_the_leavers_own(tmp_path, monkeypatch):
    federation = Summed(tmp_path, monkeypatch, method={"name": "analytic", "rounds": 1}, **HIDDEN)
    assert federation.sums("north") == 0
    found = leave(federation.run, "north", tmp_path / "rest", sums=tmp_path / "north.sums", progress=QUIET)
    assert any("secure aggregation hid" in text for text in found["not_removed"])
    federation.tables = {"method": federation.tables["method"]}
    state, fresh = Run.open(tmp_path / "rest").state(Params), federation.without("north")
    for name, tensor in fresh.items():
        np.testing.assert_allclose(state[name], tensor, atol=1e-6)
    federation.run = tmp_path / "rest"
    assert federation.sums("south") == 2  # south's sums would disclose those of east
    with pytest.raises(InputError, match="the sum is that of east alone"):
        leave(tmp_path / "rest", "south", sums=tmp_path / "south.sums", progress=QUIET)


def test_the_ledger_has_a_line_and_the_file_is_private(analytic, tmp_path, capsys):
    before = len(analytic.carried.left("north"))
    assert analytic.sums("north") == 0
    *_, line = analytic.carried.left("north")
    assert len(analytic.carried.left("north")) == before + 1
    assert (line["exposes"], line["form"], line["handler"]) == ("reply", "plain", "query.Analytic_own_sums")
    assert line["sha256"] == storage.load(tmp_path / "north.sums")["sums"].sha256()
    assert (tmp_path / "north.sums").stat().st_mode & 0o077 == 0
    assert "in the clear" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ('allow = ["mean"]\n', r"allow: its sums alone are a .reply."),
        ("[budget]\nrounds = 1\n", "budget"),
    ],
)
def test_a_silo_whose_file_does_not_consent_writes_nothing(tmp_path, monkeypatch, capsys, tables, says):
    federation = Summed(tmp_path, monkeypatch, tables, method={"name": "analytic", "rounds": 1})
    capsys.readouterr()
    before = federation.carried.left("north")
    assert federation.sums("north") == 2
    assert re.search(says, capsys.readouterr().err)
    assert not (tmp_path / "north.sums").exists()
    assert federation.carried.left("north") == before


@pytest.mark.proof
def test_a_silo_that_requires_hidden_sums_writes_nothing(tmp_path, monkeypatch, capsys):
    required = 'require = { aggregator = "secagg" }\n'
    federation = Summed(tmp_path, monkeypatch, required, method={"name": "analytic", "rounds": 1}, **HIDDEN)
    assert federation.sums("north") == 2
    assert "require.aggregator" in capsys.readouterr().err
    assert not (tmp_path / "north.sums").exists()


def test_another_file_is_refused(analytic, tmp_path, capsys):
    assert analytic.sums("north") == 0
    good = storage.load(tmp_path / "north.sums")

    def refused(says, client="north", **change):
        storage.save(tmp_path / "other.sums", good | change)
        with pytest.raises(InputError, match=says):
            leave(analytic.run, client, tmp_path / "rest", sums=tmp_path / "other.sums", progress=QUIET)
        assert not (tmp_path / "rest").exists()

    refused("are of another run", params_sha256="0" * 64)
    refused("sums of north, not of south", client="south")
    refused("no file of a client's sums", sums=Params({"C": good["sums"]["C"]}))
    refused("no file of a client's sums", sums=float("nan") * good["sums"])
    refused("no rows have the kept sums", sums=10.0 * good["sums"])
    (tmp_path / "other.sums").write_bytes(b"damaged")
    with pytest.raises(InputError, match="no file of a client's sums"):
        leave(analytic.run, "north", sums=tmp_path / "other.sums", progress=QUIET)
    with pytest.raises(InputError, match="no file of a client's sums"):
        leave(analytic.run, "north", sums=tmp_path / "absent.sums", progress=QUIET)
    assert main(["silo", "sums", str(analytic.carried.file("north")), "--out", "x"]) == 2
    assert main(["silo", "show", str(analytic.carried.file("north")), "--out", "x"]) == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": {"name": "average", "rounds": 1}}, "keeps no sums of average"),
        ({"method": {"name": "analytic", "rounds": 1, "class_weights": "balanced"}}, "class weights depend"),
        ({"method": {"name": "fedncm", "rounds": 1}, "aggregation": {"name": "median"}}, "plain sum"),
        (
            {
                "method": {"name": "analytic", "rounds": 1},
                "privacy": {"mechanism": "gaussian", "unit": "record", "target_epsilon": 8.0, "delta": 1e-3},
            },
            "would be another release",
        ),
        ({"method": {"name": "fedncm", "rounds": 0}}, "it has no round"),
    ],
    ids=["average", "balanced", "median", "noise", "no-round"],
)
def test_methods_whose_remaining_sums_are_wrong_are_refused(tmp_path, changes, says):
    carried = Carried(tmp_path, names=("east", "north", "south"))
    fedfm.run(carried.tables(**changes), tmp_path / "run", progress=QUIET)
    with pytest.raises(InputError, match=says):
        leave(tmp_path / "run", "north", sums=tmp_path / "none", progress=QUIET)


def test_the_refusal_of_a_plain_leave_names_the_other_way(analytic):
    with pytest.raises(InputError, match=r"needs one more run of east, south.*--sums subtracts them"):
        leave(analytic.run, "north", progress=QUIET)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 30), st.integers(1, 30))
@settings(deadline=None, max_examples=50)
def test_sums_of_some_rows_are_possible_and_those_of_more_than_all_are_not(seed, d, kept, gone):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(np.concatenate([rng.normal(size=(kept + gone, d)), np.ones((kept + gone, 1))], 1))
    y = torch.from_numpy(np.eye(2)[rng.integers(0, 2, kept + gone)])
    total, own = (_sums_of(x[i:], y[i:], torch.ones(1)) for i in (0, kept))
    method = Analytic()
    assert method.could_be_sums(Params(dict(total - own)))
    assert not method.could_be_sums(Params(dict(own - (total + total))))


def test_a_file_of_sums_is_refused_if_the_rows_are_on_this_machine(analytic, tmp_path):
    local = fedfm.run(analytic.carried.tables(**analytic.tables), tmp_path / "local", progress=QUIET)["run"]
    with pytest.raises(InputError, match="leave out --sums"):
        leave(local, "north", tmp_path / "rest", sums=tmp_path / "north.sums", progress=QUIET)


def edited(federation, change):
    """A copy of the run's manifest at the silo, changed by the server."""
    place = federation.root / "copy"
    place.mkdir(exist_ok=True)
    manifest = json.loads((federation.run / "manifest.json").read_text())
    change(manifest)
    (place / "manifest.json").write_text(json.dumps(manifest))
    return place


def write_sums(federation, place, name="north"):
    out = federation.root / f"{name}.sums"
    code = main(["silo", "sums", str(federation.carried.file(name)), str(place), "--out", str(out)])
    return code, out.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["experiment"]["run"].update(seed=4),
        lambda m: m["experiment"]["method"].update(features="random", width=4),
        lambda m: m["experiment"]["method"].update(ridge=2.0),
    ],
    ids=["seed", "features", "ridge"],
)
def test_a_silo_writes_no_sums_that_it_did_not_send(analytic, capsys, change):
    """The server could subtract the sums of a changed manifest from those of the run, and have those of few rows."""
    capsys.readouterr()
    before = analytic.carried.left("north")
    assert write_sums(analytic, edited(analytic, change)) == (2, False)
    assert "this silo sent no such sums" in capsys.readouterr().err
    assert analytic.carried.left("north") == before
    assert write_sums(analytic, edited(analytic, lambda m: None)) == (0, True)


NOISY = {"privacy": {"unit": "record", "target_epsilon": 4.0, "delta": 1e-5}}


@pytest.mark.parametrize(
    "tables", [NOISY, HIDDEN, {"aggregation": {"name": "secure"}}], ids=["noise", "secagg", "secure"]
)
def test_a_manifest_without_the_runs_protection_gives_no_sums(tmp_path, monkeypatch, capsys, tables):
    """The silo sent noisy or hidden sums; a changed manifest would make it write the same sums as if nothing did."""
    federation = Summed(tmp_path, monkeypatch, method={"name": "analytic", "rounds": 1}, **tables)
    capsys.readouterr()

    def unprotected(manifest):
        for key in tables:
            del manifest["experiment"][key]

    assert write_sums(federation, edited(federation, unprotected)) == (2, False)
    assert "this silo sent no such sums" in capsys.readouterr().err


def test_rows_that_changed_since_the_run_are_noticed(analytic, capsys):
    path = analytic.carried.root / "north" / "rows.npz"
    rows = dict(np.load(path))
    rows["x"][1] += 1
    np.savez(path, **rows)
    assert write_sums(analytic, edited(analytic, lambda m: None)) == (2, False)
    assert "this silo sent no such sums" in capsys.readouterr().err


def test_a_silo_whose_part_was_empty_has_no_sums_in_the_total(tmp_path, monkeypatch, capsys):
    """Under hidden sums the server cannot tell, so only the silo's own record can."""
    real = Analytic.sums.__wrapped__ if hasattr(Analytic.sums, "__wrapped__") else Analytic.sums

    @functools.wraps(real)
    def fails(self, client, seed, weights):
        if client.id == "north":
            raise ValueError("a row cannot be read")
        return real(self, client, seed=seed, weights=weights)

    monkeypatch.setattr(Analytic, "sums", fails)
    names = ("east", "north", "south", "west")
    federation = Summed(tmp_path, monkeypatch, names=names, method={"name": "analytic", "rounds": 1}, **HIDDEN)
    assert [line["fault"] for line in federation.carried.left("north") if line["handler"].startswith("train.")] != [""]
    monkeypatch.setattr(Analytic, "sums", real)
    capsys.readouterr()
    assert write_sums(federation, edited(federation, lambda m: None)) == (2, False)
    assert "its part of the sum was empty" in capsys.readouterr().err
    assert write_sums(federation, edited(federation, lambda m: None), "east") == (0, True)


def test_a_silo_that_took_no_part_has_no_sums(analytic, capsys):
    (analytic.carried.root / "north" / "silo.ledger.jsonl").unlink()
    for path in (analytic.carried.root / "north" / ".fedfm").glob("**/sent_sums.json"):
        path.unlink()
    assert write_sums(analytic, edited(analytic, lambda m: None)) == (2, False)
    assert "no message of analytic" in capsys.readouterr().err


def test_a_departure_that_stops_midway_leaves_no_run_to_resume(analytic, tmp_path):
    """A resumed half would ask the silos for their sums again."""
    from fedfm.api import leave_by_sums

    assert analytic.sums("north") == 0
    before = {path.name for path in tmp_path.iterdir()}
    for error in (KeyboardInterrupt, OSError):
        patch = pytest.MonkeyPatch()
        patch.setattr(leave_by_sums, "write_models", Mock(side_effect=error))
        with pytest.raises(error):
            leave(analytic.run, "north", tmp_path / "rest", sums=tmp_path / "north.sums", progress=QUIET)
        patch.undo()
        assert {path.name for path in tmp_path.iterdir()} == before
    found = leave(analytic.run, "north", tmp_path / "deep" / "rest", sums=tmp_path / "north.sums", progress=QUIET)
    rest = Run.open(found["run"])
    assert rest.manifest["result"]["run"] == found["run"] == str(tmp_path / "deep" / "rest")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["rest"]
