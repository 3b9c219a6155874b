"""What a report says of own data, of epsilon, of files, of classes and of newcomers."""

import json
import math
import re

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support

import fedfm
import small
from fedfm.report import html, read
from fedfm.report.plain_words import present, reading
from fedfm.runtime.disclosure import do_not_share
from fedfm.runtime.progress import Progress
from report import runs


def words(path):
    return " ".join(re.sub("<[^>]+>", " ", html.write(path).read_text(encoding="utf-8")).split())


def test_own_data_are_not_called_iid(tmp_path):
    path = runs.make(tmp_path / "run")
    experiment = json.loads((path / "manifest.json").read_text())["experiment"]
    own = {"clients": {"north": "n.csv", "south": "s.csv"}, "partition": {"name": "iid"}}
    text = words(runs.make(tmp_path / "own", experiment={**experiment, "data": own}))
    assert "with the silos’ own data at 6" in text
    assert "(iid)" not in text
    sites = {**experiment, "data": {"path": "classes.csv", "partition": {"name": "iid"}}}
    text = words(runs.make(tmp_path / "sites", experiment=sites, split=None))
    assert "with the silos’ own data at 6" in text
    assert "(dirichlet 0.1)" in words(path)


def private(path, epsilon, delta, unit):
    made = runs.make(path)
    experiment = json.loads((made / "manifest.json").read_text())["experiment"]
    entry = {"mechanism": "gaussian", "unit": unit, "delta": delta}
    ledger = {"epsilon": epsilon, "entries": [entry]}
    experiment["privacy"] = {"unit": unit, "target_epsilon": epsilon, "delta": delta}
    return runs.changed(runs.make(path, experiment=experiment, ledger=ledger), epsilon=epsilon)


@pytest.mark.parametrize(("unit", "said"), [("record", "A person with k rows"), ("client", "rows lie at k clients")])
def test_epsilon_in_two_sentences(tmp_path, unit, said):
    path = private(tmp_path / "run", 2.0, 1e-5, unit)
    text = reading(read.read(path))
    assert len(re.findall(r"\.(?: |$)", text)) == 2
    assert said in text
    assert f"e^epsilon = {math.exp(2.0):.4g}" in text
    # Group privacy of two: 2 epsilon, and delta + e^epsilon delta.
    assert f"epsilon = 4 at delta = {1e-5 + math.exp(2.0) * 1e-5:.4g}" in text
    assert "not covered" in text
    assert text in " ".join(words(path).split())


def test_without_an_epsilon_nothing_is_read(tmp_path):
    assert reading(read.read(runs.make(tmp_path / "a"))) == ""
    assert reading(read.read(private(tmp_path / "b", math.inf, 1e-5, "record"))) == ""


def test_only_files_that_are_there_are_named(tmp_path):
    run = read.read(runs.make(tmp_path / "run"))
    (run.path / "checkpoint").mkdir()
    said = [text for sentence in do_not_share(None) if (text := present(run, sentence))]
    (one,) = said
    assert one.startswith("checkpoint/ and metrics.jsonl tell about")
    (run.path / "adapter").mkdir()
    (run.path / "audit.json").write_text("{}")
    said = [text for sentence in do_not_share(None) if (text := present(run, sentence))]
    assert said[0].startswith("checkpoint/, adapter/ and metrics.jsonl tell")
    assert said[1].startswith("audit.json names")
    assert "dossier.html" not in " ".join(said)
    assert present(run, "Something else.") == "Something else."


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    fedfm.run(small.experiment(folder), folder / "run", progress=Progress())
    return folder


def test_scores_of_classes_are_those_of_the_predictions(finished):
    """Against scikit-learn, on what ``fedfm predict`` says of the test rows."""
    rows = np.load(finished / "rows.npz")
    tested, names = rows["split"] == "test", list(rows["classes"])
    predicted = [names.index(p) for p in fedfm.predict(finished / "run", finished / "rows.npz")["predictions"]]
    true, said = rows["y"][tested], np.array(predicted)[tested]
    counts = np.zeros((4, 4), dtype=int)
    np.add.at(counts, (true, said), 1)
    assert fedfm.load_run(finished / "run").manifest["result"]["details"]["confusion"] == counts.tolist()
    page = html.write(finished / "run").read_text()
    section = page[page.index('id="classes"') :]
    table = section[section.index("Scores of each class") : section.index("All counts")]
    shown = [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)][1:]
    precision, recall, f1, support = precision_recall_fscore_support(true, said, labels=range(4), zero_division=0)
    for i, row in enumerate(shown):
        assert row[0] == names[i]
        assert int(row[1]) == support[i]
        numbers = [float(cell.split("\u00a0")[0]) for cell in row[2:5]]
        assert numbers == [pytest.approx(100 * v, abs=0.051) for v in (recall[i], precision[i], f1[i])]


def test_models_of_clients_are_added_up(finished):
    tables = small.experiment(finished, method={"name": "local", "rounds": 1})
    result = fedfm.run(tables, finished / "alone", progress=Progress())
    counts = np.array(result["details"]["confusion"])
    assert counts.sum() == 5 * 48
    assert np.trace(counts) / counts.sum() == pytest.approx(result["global_accuracy"])
    assert "All clients&#x27; models are added up" in html.write(finished / "alone").read_text()


def test_a_newcomer_is_in_the_report_at_once(tmp_path):
    tables = small.experiment(tmp_path, method={"name": "fedbip", "rounds": 2})
    tables["method"].pop("local")
    fedfm.run(tables, tmp_path / "run", progress=Progress())
    found = fedfm.join(tmp_path / "run", tmp_path / "rows.npz", "hospital-z")
    page = (tmp_path / "run/report.html").read_text()
    section = page[page.index('id="newcomers"') :].partition("</section>")[0]
    assert "hospital-z" in section
    for key in ("accuracy", "start_accuracy", "alone_accuracy"):
        assert f"{100 * found[key]:.1f}\u00a0%" in section
