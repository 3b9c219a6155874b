"""Runs are compared by one figure on the same rows; local training sends no bytes; a run of one round is a line."""

import json
import re

import pytest
from runs import make

import fedfm
from fedfm.core.metric_names import ACCURACY, GLOBAL_ACCURACY, LOCAL_ACCURACY
from fedfm.reports import compare, read
from fedfm.reports.basis import basis, unlike_settings
from fedfm.reports.text import percent


def tables(**method):
    return {
        "data": {"name": "digits", "limit": 200, "partition": {"name": "dirichlet", "alpha": 0.1, "clients": 3}},
        "model": {"name": "nano-vit", "adaptation": {"name": "head"}},
        "method": {"rounds": 2, "local": {"learning_rate": 0.1}} | method,
        "run": {"workers": 1},
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """FedAvg and training alone on rows that hardly overlap in classes."""
    folder = tmp_path_factory.mktemp("pair")
    for name in ("fedavg", "local"):
        fedfm.run(tables(name=name), folder / name)
    return [folder / "fedavg", folder / "local"]


@pytest.mark.proof
def test_training_alone_sends_nothing(pair):
    run = read.read(pair[1]).result
    assert (run["bytes_up"], run["bytes_down"]) == (0, 0)
    assert [m["cohort"] for m in fedfm.load_run(pair[1]).metrics()[1:]] == [["client-00", "client-01", "client-02"]] * 2


@pytest.mark.proof
def test_one_global_model_and_clients_models_are_compared_on_all_test_rows(pair):
    fedavg, alone = (read.read(path).result for path in pair)
    assert alone["accuracy"] > fedavg["accuracy"]  # on other rows
    assert alone["global_accuracy"] < fedavg["global_accuracy"]  # on the same
    head, _, *rows, said = compare.table(pair).splitlines()
    assert head.split()[2:4] == ["global", "local"]
    assert [float(row.split()[2]) for row in rows] == [
        pytest.approx(run["global_accuracy"], abs=1e-4) for run in (fedavg, alone)
    ]
    assert said.startswith("compared by the accuracy on all test rows; the accuracy of local is measured")


@pytest.mark.proof
def test_the_page_compares_by_the_same_figure(pair, tmp_path):
    page = compare.write(pair, tmp_path / "c.html").read_text()
    said = " ".join(re.sub("<[^>]+>", " ", page).split())
    assert "Compared by the accuracy on all test rows" in said
    assert "no other run reaches with fewer bytes: local" not in said
    assert "Accuracy averaged over the clients, each on its own test rows." in said  # of the lines: known in each round
    assert "method.name" in said  # what differs in the settings
    assert "data.limit" not in said


@pytest.mark.proof
def test_the_page_names_the_runs_that_the_chart_of_bytes_omits(pair, tmp_path):
    for name in ("centralised", "fedprox"):
        fedfm.run(tables(name=name), tmp_path / name)
    runs = [*pair, tmp_path / "centralised", tmp_path / "fedprox"]
    said = " ".join(re.sub("<[^>]+>", " ", compare.write(runs, tmp_path / "c.html").read_text()).split())
    assert "Not shown: centralised; all rows are in one place. Not shown: local; nothing is sent." in said
    said = " ".join(re.sub("<[^>]+>", " ", compare.write(runs[::3], tmp_path / "c.html").read_text()).split())
    assert "no other run reaches with fewer bytes" in said
    assert "Not shown" not in said


def test_a_single_run_is_shown_by_its_own_accuracy(pair):
    assert basis([read.read(pair[0])]) == (ACCURACY, "on all test rows", False)
    assert basis([read.read(pair[1])]).key == ACCURACY
    assert "accuracy" in compare.table([pair[0]]).splitlines()[0].split()
    assert basis([read.read(p) for p in pair]).key == GLOBAL_ACCURACY


def test_runs_without_common_test_rows_are_compared_by_the_clients_mean(tmp_path):
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    for path, accuracy in ((first, "global_accuracy"), (second, "local_accuracy")):
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["result"] |= {"global_accuracy": 0.5, "local_accuracy": 0.7}
        manifest["result"]["accuracy"] = manifest["result"][accuracy]
        if path == second:
            manifest["result"]["global_accuracy"] = None
        (path / "manifest.json").write_text(json.dumps(manifest))
    assert basis([read.read(first), read.read(second)])[::2] == (LOCAL_ACCURACY, True)


def test_a_run_of_one_round_is_a_line(pair, tmp_path):
    fedfm.run(tables(name="fedncm") | {"method": {"name": "fedncm"}}, tmp_path / "once")
    page = compare.write([pair[0], tmp_path / "once"], tmp_path / "c.html").read_text()
    drawn = page[page.index("Accuracy by round") :]
    paths = re.findall(r'<path class="line s2" d="M([0-9. ]+)L([0-9. ]+)"', drawn)
    assert paths
    (_, y_0), (_, y_1) = (point.split() for point in paths[0])
    assert y_0 == y_1


def test_rounds_without_an_evaluation_do_not_break_a_line(pair, tmp_path):
    sparse = tables(name="centralised", rounds=6) | {"run": {"workers": 1, "evaluate_every": 3}}
    fedfm.run(sparse, tmp_path / "centralised")
    known = [m.get("accuracy") for m in fedfm.load_run(tmp_path / "centralised").metrics()]
    assert None in known[: max(i for i, v in enumerate(known) if v is not None)]  # a gap between points
    page = compare.write([pair[0], tmp_path / "centralised"], tmp_path / "c.html").read_text()
    drawn = page[page.index("by round</h3>") :].partition("<h3>")[0]
    paths = re.findall(r'<path class="line s2" d="M([0-9]+\.[0-9. L]+)"', drawn)  # the legend's has whole numbers
    assert {len(path.split("L")) for path in paths} == {sum(v is not None for v in known)}  # one line in each width


@pytest.mark.proof
def test_a_run_evaluated_only_at_its_end_is_drawn_by_the_common_test_rows(pair, tmp_path):
    """`fedfm demo` scores each client's own model like this: its own test rows do not compare with all test rows."""
    alone = tables(name="local") | {"run": {"workers": 1, "evaluate_every": 0}}
    fedfm.run(alone, tmp_path / "alone")
    page = compare.write([pair[0], tmp_path / "alone"], tmp_path / "c.html").read_text()
    drawn = page[page.index("Accuracy by round") :]
    assert "Accuracy on all test rows." in drawn
    result = read.read(tmp_path / "alone").result
    levels = [percent(result[key]) for key in ("global_accuracy", "local_accuracy")]
    assert [f"<title>local, 2: {level}</title>" in drawn for level in levels] == [True, False]
    lines = re.findall(r'<path class="line s2" d="M[0-9.]+ ([0-9.]+)L[0-9.]+ ([0-9.]+)"', drawn)
    assert lines
    assert all(start == end for start, end in lines)  # a level, to be compared with each round of the others


def test_only_keys_that_differ_are_in_the_table():
    one = {"run": {"seed": 0}, "method": {"name": "fedavg", "local": {"epochs": 1}}}
    other = {"run": {"seed": 0}, "method": {"name": "fedprox", "mu": 0.1, "local": {"epochs": 1}}}
    assert unlike_settings([one, other]) == {"method.name": ["fedavg", "fedprox"], "method.mu": [None, 0.1]}
