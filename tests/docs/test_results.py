"""The verdicts of ``reproduce/`` follow from the figures, and the pages of results from what was kept of the runs."""

from __future__ import annotations

import gzip
import importlib
import json
import math
import statistics
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from fedfm.api.pretrain_spec import Pretraining
from fedfm.config.experiment import Experiment
from fedfm.encrypted.student.distil_spec import Distillation

ROOT = Path(__file__).parents[2]
FOLDERS = [p.parent for p in sorted((ROOT / "reproduce").glob("**/tables.json"))]
PAGES = [f.name for f in FOLDERS if f.parent == ROOT / "reproduce"]


@pytest.fixture
def reproduce(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "reproduce"))
    yield importlib.import_module("run")
    for name in ("run", "cached_runs", "rates", "claims", "sets"):
        sys.modules.pop(name, None)


def test_the_interval_decides_and_not_the_mean_alone(reproduce: ModuleType) -> None:
    verdict = sys.modules["claims"].verdict
    # Mean 2 and standard deviation 1 of three: the half-width is 4.303 / sqrt(3) = 2.484.
    assert verdict([1.0, 2.0, 3.0], -0.5, at_least=True) == "holds"
    assert verdict([1.0, 2.0, 3.0], -0.4, at_least=True) == "open: the mean holds (4 seeds)"
    assert verdict([1.0, 2.0, 3.0], 4.4, at_least=True) == "open: the mean does not (4 seeds)"
    assert verdict([1.0, 2.0, 3.0], 4.5, at_least=True) == "does not hold"
    assert verdict([1.0, 2.0, 3.0], 4.5, at_least=False) == "holds"
    assert verdict([1.0, 2.0, 3.0], -0.5, at_least=False) == "does not hold"
    assert verdict([1.0], 0.0, at_least=True) == "one seed: its sign holds"
    assert verdict([0.0, 0.0], 0.0, at_least=True) == "open: equal"


def test_differences_are_taken_seed_by_seed(reproduce: ModuleType) -> None:
    claims = sys.modules["claims"]
    found = {"a": {"0": 90.0, "1": 80.0, "2": 1.0}, "b": {"0": 89.0, "1": 82.0}}
    assert claims.points_by_seed({"left": "a", "right": "b"}, found) == {"0": 1.0, "1": -2.0}
    assert claims.points_by_seed({"spread": ["a", "b"]}, found) == {"0": 1.0, "1": 2.0}
    assert claims.points_by_seed({"left": "a", "right": "c"}, found) == {}
    check = {"what": "w", "left": "a", "right": "b", "at_least": 0}
    line = claims.lines([{"claim": "c", "checks": [check]}], found, {"a": "", "b": ""})
    # Mean -0.5, standard deviation 1.5 sqrt(2), half-width 12.706 * 1.5.
    said = f"-0.5 ± {12.706 * 1.5:.1f}"
    # With 72 seeds the half-width would be 1.994 * 1.5 sqrt(2) / sqrt(72), the first below 0.5.
    assert line[-2] == f"| w | at least 0 | {said} | 0, 1 | open: the mean does not (72 seeds) |"


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.floats(-50, 50).map(lambda v: round(v, 3)), min_size=2, max_size=12), bound=st.floats(-9, 9))
def test_the_seeds_that_an_open_claim_needs_are_those_of_students_t(reproduce: ModuleType, values, bound) -> None:
    claims = sys.modules["claims"]
    deviation, gap = statistics.stdev(values), abs(statistics.fmean(values) - bound)
    halves = [stats.t.ppf(0.975, n - 1) * deviation / n**0.5 for n in range(2, claims.MOST + 1)]
    assume(deviation > 0.1 and halves[len(values) - 2] >= gap)
    enough = [n for n, half in enumerate(halves, start=2) if half < gap and n > len(values)]
    said = claims.seeds_needed(values, bound)
    if said.startswith("over"):
        assert not enough or enough[0] >= claims.MOST - 1
    else:
        assert abs(int(said.removesuffix(" seeds")) - (enough or [claims.MOST + 1])[0]) <= 1, "the table is rounded"


def test_many_seeds_are_written_as_ranges_in_ascending_order(reproduce: ModuleType) -> None:
    claims = sys.modules["claims"]
    found = {"a": {str(s): 1.0 + s for s in (10, 2, 0, 1, 9)}, "b": {str(s): 0.0 for s in range(30)}}
    check = {"what": "w", "left": "a", "right": "b", "at_least": 0}

    def seeds() -> str:
        return claims.verdicts([{"claim": "c", "checks": [check]}], found, {"a": "", "b": ""})[0]["seeds"]

    assert seeds() == "0, 1, 2, 9, 10"
    found["a"] = {str(s): 1.0 + s for s in reversed(range(30))}
    assert seeds() == "0 to 29"


def test_no_interval_says_what_the_figure_cannot_be(reproduce: ModuleType) -> None:
    claims, wide = sys.modules["claims"], [1.0, 99.0]
    assert claims.spread([98.0, 99.0, 100.0], claims.PERCENT) == "99.0 (96.5 to 100.0)"
    assert claims.spread([50.0, 51.0, 52.0], claims.PERCENT) == "51.0 ± 2.5"
    assert reproduce.cell("perplexity", [{"perplexity": v} for v in (2.0, 3.0)]) == f"2.5 (1.0 to {2.5 + 6.353:.1f})"
    assert reproduce.cell("own_loss", [{"own_loss": v} for v in (-1.0, 1.0)]) == "0.000 ± 12.706"  # a loss of one's own
    percent = {"left": "a", "right": "b"}
    assert claims.limits(percent) == claims.limits({"sum": {"a": 0.5, "b": -0.5, "c:own": 0.5, "d": -0.5}})
    assert claims.limits({"spread": ["a", "b"]}) == claims.PERCENT
    assert claims.limits({"left": "a:own_loss", "right": "b:own_loss"}) == (-math.inf, math.inf)
    assert claims.limits({"sum": {"a:fall": 1}}) == (-math.inf, 100.0)
    for check in (percent, {"spread": ["a", "b"]}, {"sum": {"a": 1}}):
        least, most = claims.limits(check)
        ends = claims.spread(wide, (least, most)).split("(")[1].rstrip(")").split(" to ")
        assert least <= float(ends[0]) <= 50.0 <= float(ends[1]) <= most


def test_a_sum_of_rows_compares_what_two_differences_lose(reproduce: ModuleType) -> None:
    claims = sys.modules["claims"]
    found = {"a": {"0": 90.0, "1": 80.0}, "a.bad": {"0": 70.0}, "b": {"0": 60.0}, "b.bad": {"0": 59.0}}
    # a loses 20 and b loses 1; only seed 0 has all four.
    check = {"what": "w", "sum": {"a": 1, "a.bad": -1, "b": -1, "b.bad": 1}, "at_most": 0}
    assert claims.points_by_seed(check, found) == {"0": 19.0}
    assert claims.rows_of(check) == ["a", "a.bad", "b", "b.bad"]


def test_checks_of_one_line_stand_side_by_side_each_with_its_verdict(reproduce: ModuleType) -> None:
    claims = sys.modules["claims"]
    found = {"a": {"0": 90.0, "1": 80.0}, "a.few": {"0": 70.0}, "b": {"0": 60.0, "1": 90.0}, "b.few": {"0": 75.0}}
    same = {"what": "w", "at_least": 0}
    checks = [
        {**same, "column": "few", "left": "a.few", "right": "b.few"},  # one seed: a line of its own
        {**same, "column": "all", "left": "a", "right": "b"},
        {**same, "column": "few", "left": "b", "right": "a"},
        {**same, "column": "few", "left": "a", "right": "not there"},
    ]
    # Of 30 and -10 the standard deviation is 20 sqrt(2), and the half-width 254: no difference of accuracies is so far.
    doubts = dict.fromkeys(found, "")
    assert claims.lines([{"claim": "c", "columns": ["few", "all"], "checks": checks}], found, doubts) == [
        *("**c**", "", "| what | bound, points | few | all | seeds |", "|---|---|---|---|---|"),
        "| w | at least 0 | -5.0 one seed: its sign does not |  | 0 |",
        "| w | at least 0 | -10.0 (-100.0 to +100.0) open: the mean does not (34 seeds) "
        "| +10.0 (-100.0 to +100.0) open: the mean holds (34 seeds) | 0, 1 |",
        "",
    ]
    with pytest.raises(ValueError, match="'none'"):
        claims.lines([{"claim": "c", "columns": ["few"], "checks": [{**checks[0], "column": "none"}]}], found, doubts)


def test_points_of_a_grid_stand_side_by_side_a_table_a_column(reproduce: ModuleType) -> None:
    rows = {
        "r_0.1.a": {"0": {"accuracy": 1.0, "seconds": 2.0}, "1": {"accuracy": 3.0, "seconds": 5.0}},
        "r_0.1.a_bad": {"0": {"accuracy": 4.0, "seconds": 6.0}},
        "r_0.1.b": {"0": {"accuracy": 5.0, "seconds": 7.0}},
        "none.a": {"0": {"accuracy": 8.0, "seconds": 9.0}},
        "none.b": {"0": {"accuracy": 2.0, "seconds": 1.0}},
    }
    across = {"iid": {"none": "a", "bad": "a_bad"}, "": {"none": "b"}}
    assert reproduce.beside(rows, across, ("accuracy", "seconds")) == [
        *("| accuracy, % | none | bad |", "|---|---|---|"),
        *(f"| r_0.1.iid | 2.0 (0.0 to {2 + 12.706:.1f}) | 4.0 |", "| none.iid | 8.0 |  |"),
        *("| r_0.1 | 5.0 |  |", "| none | 2.0 |  |", ""),
        *("| s | none | bad |", "|---|---|---|", "| r_0.1.iid | 4 | 6 |", "| none.iid | 9 |  |"),
        *("| r_0.1 | 7 |  |", "| none | 1 |  |", ""),
    ]


def test_a_point_of_a_grid_may_be_a_number_with_a_dot(reproduce: ModuleType) -> None:
    rows = {f"r.{point}": {"0": {"accuracy": float(point)}} for point in ("1", "0.01")}
    across = {"": {"alpha 1": "1", "alpha 0.01": "0.01"}}
    assert reproduce.beside(rows, across, ("accuracy",))[2:] == ["| r | 1.0 | 0.0 |", ""]


def test_figures_are_points_log_perplexity_and_the_fall_of_tau(reproduce: ModuleType) -> None:
    curve = [{"angle": a} for a in (1.0, 0.6, 0.3, 0.1)]
    kept = {"accuracy": 12.5, "before": 30.0, "perplexity": math.e, "curve": curve}
    found = reproduce.figures({"t": {"rows": {"r.iid": {"0": kept, "1": {"accuracy": 2.0}}}}})
    assert found["t__r.iid"] == {"0": 12.5, "1": 2.0}
    assert found["t__r.iid:before"] == {"0": 30.0}
    assert found["t__r.iid:perplexity"]["0"] == pytest.approx(100.0)
    assert found["t__r.iid:fall"]["0"] == pytest.approx(75.0)  # means of halves: 0.8, then 0.2


def test_theta_and_theta_bar_of_both_kinds_of_method(reproduce: ModuleType) -> None:
    one = {"local_accuracy": 0.25, "local_loss": 2.0}
    alone = reproduce.sides(one, {})
    assert alone == {"own": 25.0, "own_loss": 2.0}
    shared = {"accuracy_before_aggregation": 0.5, "loss_before_aggregation": 1.0}
    assert reproduce.sides(one, shared) == {"own": 50.0, "start": 25.0, "own_loss": 1.0, "start_loss": 2.0}
    personal = {"server_accuracy": 0.5, "server_loss": None, "local_rouge_1": 0.125}
    assert reproduce.sides(one, personal) == {"own": 25.0, "start": 50.0, "own_loss": 2.0, "rouge": 12.5}
    found = reproduce.figures({"t": {"rows": {"r": {"0": {"accuracy": None} | alone}}}})
    assert found == {"t__r:own": {"0": 25.0}, "t__r:own_loss": {"0": 200.0}}


@pytest.mark.proof
def test_each_point_of_a_grid_is_tuned_and_options_take_the_choice_of_another_row(
    reproduce: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ROW.replace('name = "fedbaf"', 'name = "fedavg"').replace('foundation = ".data/secret"', "")
    for row, weighting in (("r", "size"), ("like", "uniform")):
        (tmp_path / f"t__{row}.toml").write_text(text.replace("rounds = 2", f'rounds = 1\nweighting = "{weighting}"'))
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    monkeypatch.setattr(sys.modules["rates"], "STEPS", 0)  # the grid stays as it is
    rates = {"method.local.learning_rate": [1e-6, 0.05]}
    about = {
        "tune": {"r": rates},
        "tuned_as": {"like": "r"},
        "tuning": {"seed": 5, "val_fraction": 0.5},
        "tuned_at": {"c": "b"},
        "grid": {"a": {}, "b": {"method.rounds": 2}, "c": {"method.rounds": 3}},
    }
    how = {}
    for row in ("r", "like"):
        how |= reproduce.results(tmp_path / f"t__{row}.toml", tmp_path / ".runs", about, [0], tmp_path)[1]
    borrowed = {"r.c": "t__r.b", "like.a": "t__r.a", "like.b": "t__r.b", "like.c": "t__r.b"}
    assert {row: choice.get("of") for row, choice in how.items() if choice["how"] == "borrowed"} == borrowed
    assert [row for row, choice in how.items() if choice["how"] == "tuned"] == ["r.a", "r.b"]
    runs = {path.name for path in (tmp_path / ".runs").iterdir()}
    assert runs == {"t__r.a-tune", "t__r.b-tune"} | {f"t__{r}.{p}-seed0" for r in ("r", "like") for p in "abc"}
    for point, whose, rounds in (("a", "a", 1), ("b", "b", 2), ("c", "b", 2)):
        losses = {}
        for value in rates["method.local.learning_rate"]:
            trial = tmp_path / ".runs" / f"t__r.{whose}-tune" / f"{value:g}"
            tried = json.loads((trial / "manifest.json").read_text())["experiment"]
            assert (tried["run"]["seed"], tried["data"]["val_fraction"], tried["method"]["rounds"]) == (5, 0.5, rounds)
            losses[value] = json.loads((trial / "metrics.jsonl").read_text().splitlines()[-1])["val_loss"]
        for row in ("r", "like"):
            ran = json.loads((tmp_path / ".runs" / f"t__{row}.{point}-seed0" / "manifest.json").read_text())
            assert ran["experiment"]["method"]["local"]["learning_rate"] == min(losses, key=losses.__getitem__)
    (tmp_path / "u__like.toml").write_text((tmp_path / "t__like.toml").read_text())
    (tmp_path / "v__r.toml").write_text((tmp_path / "t__r.toml").read_text())
    chosen = {"tune": {"r": rates}, "tuned_as": {"like": "r"}, "tuning": about["tuning"]}
    of_v = {"tuned_in": "v", "choices": chosen, "grid": {"d": {"method.rounds": 2}}}
    reproduce.results(tmp_path / "u__like.toml", tmp_path / ".runs", of_v, [0], tmp_path)
    trials = sorted((tmp_path / ".runs").glob("v__r-tune/*"))  # of the other table: without this one's changes
    losses = {float(p.name): json.loads((p / "metrics.jsonl").read_text().splitlines()[-1])["val_loss"] for p in trials}
    assert set(losses) == set(rates["method.local.learning_rate"])
    ran = json.loads((tmp_path / ".runs" / "u__like.d-seed0" / "manifest.json").read_text())["experiment"]["method"]
    assert (ran["rounds"], ran["local"]["learning_rate"]) == (2, min(losses, key=losses.__getitem__))
    # The other table has a grid: its choice at one point, whatever the rows here change.
    of_t = {"tuned_in": "t", "choices": about, "tuned_at": {"e": "b"}, "grid": {"e": {"method.rounds": 1}}}
    (tmp_path / "w__like.toml").write_text((tmp_path / "t__like.toml").read_text())
    before = {path.name for path in (tmp_path / ".runs").iterdir()}
    reproduce.results(tmp_path / "w__like.toml", tmp_path / ".runs", of_t, [0], tmp_path)
    assert {path.name for path in (tmp_path / ".runs").iterdir()} - before == {"w__like.e-seed0"}
    runs_of = (tmp_path / ".runs" / name / "manifest.json" for name in ("w__like.e-seed0", "t__like.b-seed0"))
    here, there = (json.loads(path.read_text())["experiment"]["method"] for path in runs_of)
    assert (here["rounds"], here["local"]) == (1, there["local"])


def test_numbers_of_fedms_and_its_baselines_on_the_papers_model(
    reproduce: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "reproduce" / "fedms"))
    rows = {name.partition(",")[0]: of for name, *of in importlib.import_module("traffic").of_the_paper()}
    vision, text = (12 * 2 * (d + 4 * d) for d in (768, 512))  # twelve blocks, two maps each, rank 1
    # Linear(512, 512), Linear(512, 2) and two batch norms; running means and variances travel too.
    adapter = 512 * 512 + 512 + 2 * 512 + 2 + 2 * (512 + 2)
    assert rows["FT"] == [149_620_737, 149_620_737]
    assert rows["FedMS stage one"] == [vision + text] * 2
    assert rows["FedMS stage two"] == [vision + text + adapter, adapter + 2 * (512 + 2)]


def test_rows_in_two_codings_and_the_first_test_rows(
    reproduce: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = importlib.import_module("sets")
    (tmp_path / "export.py").touch()
    monkeypatch.setattr(sets, "HERE", tmp_path)
    monkeypatch.setattr(sets, "MADE", tmp_path)
    made = sets.Sets(tmp_path, tmp_path)
    y, split = np.array([0, 4, 6]), np.array(["train", "test", "train"])
    classes = np.array(list("abcdefg"))
    np.savez(tmp_path / "s.npz", x=np.eye(3), y=y, split=split, domain=np.array(["u", "v", "u"]), classes=classes)
    made.make("s.two_codings.npz")
    with np.load(tmp_path / "s.two_codings.npz") as twice:
        assert twice["y"].tolist() == [0, 4, 6, 3, 0, 2]
        assert twice["silo"].tolist() == ["u-plain", "v-plain", "u-plain", "u-turned", "v-turned", "u-turned"]
        assert twice["split"].tolist() == [*split, *split]
        assert (twice["x"] == np.concatenate([np.eye(3)] * 2)).all()
    rows = [{"client": c, "split": s, "n": n} for c in (0, 1) for n, s in enumerate(("test", "train", "test", "test"))]
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made.make("f.test2.jsonl")
    kept = [json.loads(line) for line in (tmp_path / "f.test2.jsonl").read_text().splitlines()]
    assert [(row["client"], row["n"]) for row in kept] == [(c, n) for c in (0, 1) for n in (0, 1, 2)]


def test_rows_for_tuning_are_training_rows_alone(reproduce: ModuleType, tmp_path: Path) -> None:
    sets = importlib.import_module("sets")
    y, split = np.tile([0, 1], 12), np.array(["test", "test", *["train"] * 22])
    np.savez(tmp_path / "s.npz", x=np.arange(24), y=y, split=split, classes=np.array(["a", "b"]))
    sets.for_tuning(tmp_path / "s.npz", tmp_path / "s.tuning.npz")
    with np.load(tmp_path / "s.tuning.npz") as z:
        assert set(z["x"]) == set(range(2, 24))
        for c in (0, 1):  # eleven training rows a class
            assert list(np.flatnonzero(z["split"][z["y"] == c] == "test")) == [0, 5, 10]


def test_pictures_with_the_first_test_rows_of_each_kind(reproduce: ModuleType, tmp_path: Path) -> None:
    sets = importlib.import_module("sets")
    y, domain = np.array([0, 0, 0, 0, 1, 0]), np.array(list("uuuvuu"))
    split = np.array(["test", "test", "train", "test", "test", "train"])
    x = np.arange(6 * 12).reshape(6, 2, 2, 3)
    np.savez(tmp_path / "s.npz", x=x, y=y, split=split, domain=domain, classes=np.array(["a", "b"]))
    sets.first_pictures(tmp_path / "s.npz", 1, tmp_path / "s.test1.npz")
    with np.load(tmp_path / "s.test1.npz") as z:
        assert (z["x"] == x[[0, 2, 3, 4, 5]]).all()
        assert (z["y"].tolist(), z["classes"].tolist()) == ([0, 0, 0, 1, 0], ["a", "b"])


def test_a_vit_for_smaller_pictures_is_the_one_that_interpolates_its_positions(
    reproduce: ModuleType, tmp_path: Path
) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    sets = importlib.import_module("sets")
    size = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    vit = ViTForImageClassification(ViTConfig(**size, image_size=64, patch_size=16, num_labels=3)).eval()
    vit.save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text('{"size": {"height": 64, "width": 64}, "resample": 3}')
    sets.write_resampled_vit(tmp_path / "vit", 48, tmp_path / "vit.at48")
    small = ViTForImageClassification.from_pretrained(tmp_path / "vit.at48").eval()
    x = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        expected = vit(x, interpolate_pos_encoding=True).logits  # as transformers does it, in every forward
        assert torch.allclose(small(x).logits, expected, atol=1e-5)
        assert not torch.allclose(expected[0], expected[1], atol=1e-3)
    processor = json.loads((tmp_path / "vit.at48" / "preprocessor_config.json").read_text())
    assert processor == {"size": {"height": 48, "width": 48}, "resample": 3}


def test_a_run_older_than_a_key_is_kept_and_a_run_of_other_keys_is_replaced(
    reproduce: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "t__r.toml", tmp_path / "runs" / "r"
    path.write_text(
        '[data]\nname = "digits"\nlimit = 40\npartition = { clients = 2 }\n'
        '[model]\nname = "preact-resnet-small"\nweights = "random"\n'
        'options = { widths = [4], blocks = [1], image_size = 8 }\nadaptation = { name = "full" }\n'
        '[method]\nname = "fedavg"\nrounds = 1\n[run]\nworkers = 1\n'
    )
    monkeypatch.chdir(tmp_path)
    first = reproduce.run_once(path, out, {"run.seed": 3})
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["experiment"]["method"]["fraction"]  # as if it had come later
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert reproduce.run_once(path, out, {"run.seed": 3})["seconds"] == first["seconds"]
    again = reproduce.run_once(path, out, {"run.seed": 4})
    assert again["seed"] == 4
    assert json.loads((out / "manifest.json").read_text())["experiment"]["run"]["seed"] == 4


def test_the_scripts_of_fedbips_figures_agree_with_numpy(
    reproduce: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "reproduce" / "fedbip"))
    similarity, seconds = (importlib.import_module(name) for name in ("similarity", "server_seconds"))
    tau = seconds.vectors(3, blocks=1)
    x = np.stack([torch.cat([t.flatten() for t in v.values()]).double().numpy() for v in tau])
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    c = x @ x.T
    np.testing.assert_allclose(similarity.cosines(tau), c, atol=1e-6)
    monkeypatch.setattr(seconds, "LAYERS", seconds.LAYERS[:1])  # one layer: FedBip-L is FedBip
    found = {name: run() for name, run in seconds.aggregations(tau, 0.0 * tau[0]).items()}
    p = (c / c.sum(1, keepdims=True))[0].tolist()
    for name in ("FedBip", "FedBip-L"):
        expected = p[0] * tau[0] + p[1] * tau[1] + p[2] * tau[2]
        assert (found[name][0] - expected).norm() < 1e-5 * expected.norm()


ROW = """
[data]
name = "digits"
limit = 60
partition = { name = "iid", clients = 5 }
[model]
name = "preact-resnet-small"
weights = "random"
options = { widths = [4], blocks = [1], image_size = 8 }
adaptation = { name = "full" }
[method]
name = "fedbaf"
foundation = ".data/secret"
rounds = 2
local = { learning_rate = 0.05, absent = "zero" }
[run]
workers = 1
local_scores = true
"""
RECIPE = """
[data]
name = "digits"
limit = 60
[model]
name = "preact-resnet-small"
weights = "random"
options = { widths = [4], blocks = [1], image_size = 8 }
[pretrain]
local = { learning_rate = 0.1 }
threads = 1
"""


@pytest.mark.proof
def test_a_grid_is_run_point_by_point_with_a_model_made_for_it_and_audited(
    reproduce: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = importlib.import_module("sets")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "export.py").touch()
    (tmp_path / "rows" / "prepare").mkdir(parents=True)
    path = tmp_path / "rows" / "t__r.toml"
    path.write_text(ROW)
    (tmp_path / "rows" / "prepare" / "secret.toml").write_text(RECIPE)
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    monkeypatch.setattr(sets, "HERE", tmp_path)
    monkeypatch.setattr(sets, "MADE", tmp_path / ".data")
    monkeypatch.chdir(tmp_path)
    assert sets.needed_names(Experiment.load(path)) == ["secret"]
    two = {"data.partition.name": "by_class", "data.partition.classes_per_client": 2}
    text = {"grid": {"iid": {}, "two_classes": two}, "audit": "extraction"}
    found, choices = reproduce.results(path, tmp_path / ".runs", text, [3], tmp_path / "data")
    assert choices == {"r.iid": {"how": "by hand"}, "r.two_classes": {"how": "by hand"}}
    assert list(found) == ["r.iid", "r.two_classes"]
    kept = found["r.two_classes"]["3"]
    assert [line["round"] for line in kept["curve"]] == [1, 2]
    run = json.loads((tmp_path / ".runs" / "t__r.two_classes-seed3" / "manifest.json").read_text())
    assert run["experiment"]["data"]["partition"]["name"] == "by_class"
    assert run["experiment"]["run"]["seed"] == 3
    assert kept["before"] == round(100 * run["result"]["details"]["accuracy_before_aggregation"], 3)
    assert len(reproduce.curves(found)) == 1 + 2 * 2 + 1


@pytest.mark.parametrize(
    ("keys", "tuned", "searched"),
    [
        ({"method.local.learning_rate": 0.5}, True, False),  # the page has the choice
        ({}, True, True),  # ridge, l2 and shrinkage are not rates, so the page has no key of theirs
        ({}, False, False),  # there is nothing to search
    ],
)
def test_a_page_keeps_a_row_of_which_it_has_the_choice(
    reproduce: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys, tuned, searched
) -> None:
    path, asked, changed = tmp_path / "t__r.toml", [], []
    path.write_text(ROW.replace('name = "fedbaf"', 'name = "fedavg"').replace('foundation = ".data/secret"', ""))
    choice = sys.modules["rates"].Choice
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    monkeypatch.setattr(reproduce, "find_rates", lambda *of: asked.append(of) or ({"k": 1}, "k 1", choice("tuned")))
    monkeypatch.setattr(reproduce, "run_once", lambda path, out, changes: changed.append(changes))
    monkeypatch.setattr(reproduce, "shown_figures", lambda *_: {"accuracy": 1.0, "more": []})
    monkeypatch.setattr(reproduce.Run, "open", lambda _: type("R", (), {"manifest": {"ledger": {}}}))
    old = {str(s): {"accuracy": 1.0, "more": ["words"]} for s in range(2)}
    before = {"rows": {"r": old}, "choices": {"r": {"how": "tuned", "keys": keys}}}
    text = {"seeds": 3, "tune": {"r": {"k": [1, 2]}} if tuned else {}}
    found, choices = reproduce.results(path, tmp_path / ".runs", text, None, tmp_path, before)
    assert bool(asked) == searched
    of_row = {"k": 1} if searched else keys
    assert changed == [{**of_row, "run.seed": 2}]
    assert list(found["r"]) == ["0", "1", "2"]
    assert found["r"]["1"] is old["1"]
    assert choices["r"].get("keys", {}) == ({} if searched else keys)


@pytest.mark.proof
def test_the_operations_to_a_target_come_from_the_ledger(
    reproduce: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t__r.toml"
    path.write_text(ROW.replace('name = "fedbaf"', 'name = "fedavg"').replace('foundation = ".data/secret"', ""))
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    found, _ = reproduce.results(path, tmp_path / ".runs", {}, [0, 1], tmp_path)
    assert reproduce.row("r", found["r"], ("rounds_to_target", "tmac")) == "| r |  |  |"  # there is no target
    lines = (tmp_path / ".runs/t__r-seed1/metrics.jsonl").read_text().splitlines()
    accuracy = [line["accuracy"] for line in map(json.loads, lines)]  # before the first round, and after each
    grid = {"best": {"run.target_accuracy": max(accuracy)}, "high": {"run.target_accuracy": 1.0}}
    found, _ = reproduce.results(path, tmp_path / ".runs", {"grid": grid}, [1], tmp_path)
    ledger = json.loads((tmp_path / ".runs/t__r.best-seed1/manifest.json").read_text())["ledger"]["operations"]
    rounds = accuracy.index(max(accuracy))
    assert found["r.best"]["1"]["rounds_to_target"] == rounds
    assert found["r.best"]["1"]["tmac"] == pytest.approx(ledger["macs"] * rounds / 2 / 1e9, rel=1e-3)
    assert reproduce.row("r", found["r.high"], ("rounds_to_target", "tmac")) == "| r | not reached | not reached |"
    both = {"0": {"tmac": 2.0}, "1": {"tmac": reproduce.NEVER}}
    assert reproduce.cell("tmac", list(both.values())) == "2.0 (1 of 2 seeds)"


def test_a_text_is_its_training_part_and_then_its_test_part(
    reproduce: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = importlib.import_module("sets")
    (tmp_path / "text").mkdir()
    (tmp_path / "export.py").touch()
    for split in ("train", "valid", "test"):
        (tmp_path / "text" / f"t.{split}.txt.gz").write_bytes(gzip.compress(f"{split} é\n".encode()))
    monkeypatch.setattr(sets, "HERE", tmp_path)
    monkeypatch.setattr(sets, "MADE", tmp_path / ".data")
    made = sets.Sets(tmp_path, tmp_path)
    made.make("t.txt")
    assert (tmp_path / ".data" / "t.txt").read_text(encoding="utf-8") == "train é\ntest é\n"
    with pytest.raises(SystemExit, match=r"has no nowhere: make .*nowhere\.npz by hand"):
        made.make("nowhere.npz")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.relative_to(ROOT / "reproduce").as_posix())
def test_every_row_is_an_experiment_and_so_is_every_point_of_a_grid(folder: Path) -> None:
    about = json.loads((folder / "tables.json").read_text(encoding="utf-8"))
    rows = sorted(folder.glob("*.toml"))
    assert {path.stem.partition("__")[0] for path in rows} == set(about["tables"])
    for path in rows:
        foundation = getattr(Experiment.load(path).method, "foundation", "")
        recipe = folder / "prepare" / f"{Path(foundation).name}.toml"
        given = ("", "nano-vit", "nano-vit-fhe", ".data/vit_tiny_patch16_224", ".data/vit_tiny_patch16_224.at64")
        assert foundation in given or recipe.exists(), f"{path}: nothing makes {foundation}"
    for table, text in about["tables"].items():
        first = next(path for path in rows if path.stem.startswith(f"{table}__"))  # the keys are the same for each row
        for keys in text.get("grid", {}).values():
            Experiment.load(first, keys)
        if "across" in text:  # no point is left out of the page
            assert {p for points in text["across"].values() for p in points.values()} == set(text["grid"])
    for path in (folder / "prepare").glob("*.toml"):
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        what = Pretraining if "pretrain" in tables else Distillation if "distil" in tables else Experiment
        what.load(path)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_runs_gave(
    reproduce: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_name = reproduce.page_name(ROOT / "reproduce" / name)
    page = json.loads((ROOT / "docs" / "results" / f"{page_name}.json").read_text(encoding="utf-8"))
    about = json.loads((ROOT / "reproduce" / name / "tables.json").read_text(encoding="utf-8"))
    rows = {
        f"{path.stem}{point and f'.{point}'}"
        for path in (ROOT / "reproduce" / name).glob("*.toml")
        for point in about["tables"][path.stem.partition("__")[0]].get("grid", {"": {}})
    }
    for table, part in page.items():
        assert {f"{table}__{row}" for row in part["rows"]} == {r for r in rows if r.partition("__")[0] == table}
        assert part["choices"].keys() == part["rows"].keys()
    for claim in about["claims"]:
        for check in claim["checks"]:
            assert {row.partition(":")[0] for row in sys.modules["claims"].rows_of(check)} <= rows
    (tmp_path / "docs" / "results").mkdir(parents=True)
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    reproduce.write(ROOT / "reproduce" / name, about, page)
    written = (tmp_path / "docs" / "results" / f"{page_name}.md").read_text(encoding="utf-8")
    assert written == (ROOT / "docs" / "results" / f"{page_name}.md").read_text(encoding="utf-8")
