"""FedPFT with ``counts = "withheld"``: what the server reads of a count, attacked on what it saw."""

import json
import math

import numpy as np
import pytest

import fedfm
from fedfm.audits.audit import perform
from fedfm.audits.replay import open_finished, replay
from fedfm.config import catalogue
from fedfm.config.experiment import Experiment
from fedfm.errors import InputError
from fedfm.methods.fedpft.encoding import unpack

K, SAMPLES, LEAST = 5, 60, 10 * 5  # LEAST: rows of a class that has K components
GRID = 64  # features are multiples of its inverse, as those of a file of few digits are
D, CLASSES, CLIENTS = 64, 6, 6
HIDDEN = {"counts": "withheld", "samples": SAMPLES}


def rows(path, seed=0, n=1800):
    """Classes of three clusters each, features on a grid; clients by a column, with every count from 1 on."""
    rng = np.random.default_rng(seed)
    y, client = rng.integers(0, CLASSES, n), rng.choice(CLIENTS, n, p=np.arange(1, 7) / 21)
    centres = rng.normal(size=(CLASSES, 3, D)) * 2
    x = centres[y, rng.integers(0, 3, n)] + rng.normal(size=(n, D))
    few = (client == 0) & (y < 4)  # of these, client 0 has 1 to 4 rows
    keep = ~few
    for c in range(4):
        keep[np.flatnonzero(few & (y == c))[: c + 1]] = True
    x = (np.round(x[keep] * GRID) / GRID).astype(np.float32)
    split = np.where(rng.random(len(x)) < 0.2, "test", "train")
    split[few[keep]] = "train"
    domain = np.array([f"c{i}" for i in client[keep]])
    np.savez(path, x=x, y=y[keep], split=split, domain=domain)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return rows(tmp_path_factory.mktemp("rows") / "rows.npz")


def tables(file, **method):
    return {
        "data": {"path": str(file), "partition": {"name": "by_column", "column": "domain"}},
        "model": {"name": "features"},
        "method": {"name": "fedpft", "components": K, **method},
        "run": {"workers": 1, "seed": 4},
    }


def run_and_capture(file, folder, **method):
    """The run's result, and of each class that crossed: (client, class, rows in truth, mixture), as the server saw."""
    result = fedfm.run(tables(file, **method), folder)
    counts = fedfm.load_run(folder).manifest["split"]["clients"]
    cells = []
    for reply in replay(open_finished(folder)).replies:
        for c, g in zip(reply.value.labels, unpack(reply.value.mixtures), strict=True):
            cells.append((reply.client, c, counts[reply.client]["train"]["by_class"][c], g))
    return result, cells


def count_by_weights(g, most=600):
    """The smallest n for which every weight is a multiple of 1/n."""
    n = np.arange(1, most)
    times = np.outer(n, g.weights)
    off = np.abs(times - np.round(times)) <= 0.01 + times * 2**-11  # EM's soft ends, and 11 digits of float16
    fits = n[off.all(1) & (times > 0.9).all(1)]
    return int(fits[0]) if len(fits) else 0


def count_by_means(g, most=600):
    """The smallest n for which the mean of n rows on the grid of the features is on the grid of the mean."""
    n = np.arange(1, most)
    times = np.outer(n, g.weights @ g.means.astype(np.float64)) * GRID
    fits = n[(np.abs(times - np.round(times)) < 0.01).all(1)]
    return int(fits[0]) if len(fits) else 0


def test_weights_tell_a_count_that_is_sent_and_none_that_is_withheld(file, tmp_path):
    _, sent = run_and_capture(file, tmp_path / "sent", samples=SAMPLES)
    several = [(n, g) for _, _, n, g in sent if g.components > 1]
    read = [count_by_weights(g) == n for n, g in several]
    assert len(read) > 15
    assert np.mean(read) > 0.7
    _, hidden = run_and_capture(file, tmp_path / "hidden", **HIDDEN)
    several = [(n, g) for _, _, n, g in hidden if g.components > 1]
    assert len(several) > 8
    assert len({n for n, _ in several}) > 5
    found = [count_by_weights(g) for _, g in several]
    # Whatever the count is, what is read is the grid's: below every count that such a class may have.
    assert max(found) < LEAST
    assert not any(a == n for a, (n, _) in zip(found, several, strict=True))


def test_the_number_of_components_reveals_one_bit_of_a_withheld_count(file, tmp_path):
    _, sent = run_and_capture(file, tmp_path / "sent", samples=SAMPLES)
    follows = [g.components == max(1, min(K, n // 10)) for _, _, n, g in sent]
    assert np.mean(follows) > 0.6
    assert len({g.components for *_, g in sent}) > 3
    result, hidden = run_and_capture(file, tmp_path / "hidden", **HIDDEN)
    assert {g.components for *_, g in hidden} == {1, K}
    assert all(g.components == (K if n >= LEAST else 1) for _, _, n, g in hidden)
    assert {k for used in result["details"]["components_used"].values() for k in used.values()} == {1, K}


def test_means_of_features_on_a_grid_tell_a_count_that_is_sent_and_none_that_is_withheld(file, tmp_path):
    method = {"components": 1, "transport": "float32", "samples": SAMPLES}
    _, sent = run_and_capture(file, tmp_path / "sent", **method)
    assert np.mean([count_by_means(g) == n for _, _, n, g in sent]) > 0.9
    _, hidden = run_and_capture(file, tmp_path / "hidden", **method | HIDDEN)
    found = [count_by_means(g) for *_, g in hidden]
    assert set(found) == {1}  # means lie on the features' grid or on a coarser one, whatever the count


def test_a_class_of_few_rows_leaves_no_trace(file, tmp_path):
    """The client's message is the same, bit for bit, with 1 to 4 rows of four classes and without them."""
    data = dict(np.load(file))
    few = (data["domain"] == "c0") & (data["y"] < 4)
    assert sorted(np.bincount(data["y"][few])) == [1, 2, 3, 4]
    np.savez(tmp_path / "without.npz", **{key: value[~few] for key, value in data.items()})
    for at, counts in (("hidden", HIDDEN), ("sent", {"samples": SAMPLES})):
        messages = []
        for name, path in (("with", file), ("without", tmp_path / "without.npz")):
            folder = tmp_path / f"{at}-{name}"
            result = fedfm.run(tables(path, **counts), folder)
            (message,) = [s.value for s in replay(open_finished(folder)).replies if s.client == "c0"]
            messages.append(message)
        one, other = messages
        assert one.labels == other.labels == [4, 5]
        assert one.mixtures.numbers.equal(other.mixtures.numbers)
        if at == "hidden":
            assert (one.withheld, one.withheld_rows) == (other.withheld, other.withheld_rows) == ([], 0)
            assert result["details"]["withheld"] == {}
        else:
            assert (one.withheld, one.withheld_rows) == ([0, 1, 2, 3], 10)
            assert (other.withheld, other.withheld_rows) == ([], 0)


def test_no_client_is_asked_for_scores_and_the_report_states_the_disclosures(file, tmp_path):
    result = fedfm.run(tables(file, **HIDDEN), tmp_path / "run")
    lines = (tmp_path / "run" / "messages.jsonl").read_text().splitlines()
    assert {json.loads(line)["handler"] for line in lines} == {"query.FedPFT_summarise"}
    assert set(result["client_accuracy"].values()) == {None}
    assert result["accuracy"] == result["global_accuracy"] > 0.9
    report = (tmp_path / "run" / "report.html").read_text()
    assert "No client is asked for scores, which would disclose its number of rows" in report
    assert "clients disclose neither which classes they withhold nor how many rows" in report
    assert not {"withheld_rows", "withheld_classes", "raw_feature_bytes"} & result["details"].keys()
    (found,) = (f for f in perform(tmp_path / "run", ["reconstruction"]) if f.name == "reconstruction")
    assert (found.verdict, found.detail["leaking_components"]) == ("holds", 0)


def test_the_help_states_what_withheld_counts_still_reveal():
    told = " ".join(catalogue.method("fedpft").replace("# ", "").split())
    for part in (
        "A class with several components has at least ten rows for each",
        "An absent class has fewer than ``min_count``",
        "If features have few distinct values, such as whole numbers, their means reveal a small count",
        "the distance of their means reveals most counts to within a factor of about two",
        "Only [privacy] bounds what is revealed",
    ):
        assert part in told


def test_a_comparison_of_clients_estimates_counts_as_the_documents_say(file, tmp_path):
    """The mean of n rows is sigma / sqrt(n) from that of the class, in each of many features."""
    _, hidden = run_and_capture(file, tmp_path / "hidden", **HIDDEN | {"components": 1})
    ratios = []
    for client, c, n, g in hidden:
        others = [h.means[0] for other, label, _, h in hidden if label == c and other != client]
        away = (g.means[0] - np.median(others, axis=0)) / g.scales[0]
        ratios.append(1 / np.mean(away**2) / n)
    low, high = np.quantile(ratios, [0.25, 0.75])
    assert 0.4 < low < high < 2.5


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"covariance": "full"}, r'method\.covariance = "full": the rank'),
        ({"verify": True}, r"method\.verify: it makes clients send their numbers of rows"),
        ({"min_count": 1}, r"method\.min_count = 1: a class of one row"),
        ({"topology": "chain"}, r"method\.samples"),
    ],
)
def test_settings_that_would_tell_a_count_are_refused(file, method, said):
    Experiment.from_dict(tables(file, **HIDDEN))
    with pytest.raises(InputError, match=said):
        Experiment.from_dict(tables(file, **HIDDEN | method))


def test_a_run_says_how_many_rows_it_withholds(file, tmp_path):
    result = fedfm.run(tables(file, min_count=30), tmp_path / "run")
    manifest = fedfm.load_run(tmp_path / "run").manifest
    cells = [n for c in manifest["split"]["clients"].values() for n in c["train"]["by_class"]]
    away = [n for n in cells if 0 < n < 30]
    assert len(away) > 6
    told = result["details"]
    assert (told["withheld_rows"], told["withheld_classes"]) == (sum(away), len(away))
    (notice,) = [n for n in manifest["notices"] if "withheld" in n]
    assert notice == (
        f"{sum(away)} rows of {len(away)} classes withheld: each of these classes has fewer than "
        "method.min_count = 30 rows at its client"
    )
    report = (tmp_path / "run" / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert f"{len(away)} classes of single clients, {sum(away)} rows in all, withheld" in report


@pytest.mark.parametrize("how", [{"shuffle": True}, {"topology": "chain"}])
def test_other_forms_state_the_withheld_counts_too(file, tmp_path, how):
    result = fedfm.run(tables(file, min_count=30, **how), tmp_path / "run")
    assert result["details"]["withheld_rows"] > 0
    report = (tmp_path / "run" / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert f"{result['details']['withheld_rows']} rows in all, withheld" in report


def test_a_private_chain_states_that_its_rows_are_draws(file, tmp_path):
    privacy = {"privacy": {"unit": "record", "target_epsilon": 50.0, "delta": 1e-5}}
    result = fedfm.run(tables(file, min_count=30, topology="chain") | privacy, tmp_path / "run")
    (notice,) = [n for n in fedfm.load_run(tmp_path / "run").manifest["notices"] if "withheld" in n]
    assert f"{result['details']['withheld_rows']} rows of" in notice
    assert "withheld (rows drawn from noisy sums):" in notice


def test_a_run_that_withholds_nothing_has_no_notice(file, tmp_path):
    result = fedfm.run(tables(file, min_count=1), tmp_path / "run")
    assert (result["details"]["withheld_rows"], result["details"]["withheld_classes"]) == (0, 0)
    assert not [n for n in fedfm.load_run(tmp_path / "run").manifest["notices"] if "withheld" in n]


def test_a_private_run_reports_left_out_rows_from_its_noisy_counts(file, tmp_path):
    """Nothing of min_count, which would be a true count: two runs on the same noisy release say the same."""
    privacy = {"privacy": {"unit": "record", "target_epsilon": 2.0, "delta": 1e-5}}
    base = tables(file)
    del base["method"]["components"]
    result = fedfm.run(base | privacy, tmp_path / "run")
    told, run = result["details"], open_finished(tmp_path / "run")
    plan = run.experiment.method.privacy
    left = [n for s in replay(run).replies for n in s.value.counts.double().tolist() if n <= 2 * plan.count_sigma]
    assert len(left) == told["cells"] - told["cells_kept"] > 0
    assert told["left_out_rows"] == max(0, round(math.fsum(left)))
    assert told["left_out_rows_std"] == pytest.approx(plan.count_sigma * math.sqrt(len(left)))
    assert not {"withheld", "withheld_rows", "withheld_classes"} & told.keys()
    (notice,) = [n for n in run.manifest["notices"] if "noisy counts" in n]
    assert notice.startswith(f"{len(left)} of {told['cells']} noisy sums are not above their noise")
    assert f"about {told['left_out_rows']} row" in notice
    assert "rows of the other cells, by their noisy counts" in (tmp_path / "run" / "report.html").read_text()


def test_a_ring_is_a_chain_in_every_figure(file, tmp_path):
    chain = fedfm.run(tables(file, topology="chain"), tmp_path / "chain")
    ring = fedfm.run(tables(file, topology="ring"), tmp_path / "ring")
    for key in ("params_sha256", "accuracy", "bytes_up", "bytes_down", "details", "client_accuracy"):
        assert ring[key] == chain[key]
    told = " ".join(catalogue.method("fedpft").replace("# ", "").split())
    assert '``topology = "ring"`` passes once through all clients and gives the same numbers as ``chain``' in told
