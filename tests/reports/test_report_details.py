"""A report's statements on the user's data, epsilon, files, classes and newcomers."""

import json
import math
import re
import shutil
from html import unescape

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

import fedfm
import small
from fedfm.reports import html, read
from fedfm.reports.plain_words import present, reading
from fedfm.runtime.progress import Progress
from fedfm.runtime.sharing import do_not_share
from reports import runs


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
    assert "partition = {" in words(path)
    for own in ("own", "sites"):
        assert "partition" not in words(tmp_path / own)
        assert "partition" in json.loads((tmp_path / own / "manifest.json").read_text())["experiment"]["data"]


def private(path, epsilon, delta, unit):
    made = runs.make(path)
    experiment = json.loads((made / "manifest.json").read_text())["experiment"]
    entry = {"mechanism": "gaussian", "unit": unit, "delta": delta}
    ledger = {"epsilon": epsilon, "entries": [entry]}
    experiment["privacy"] = {"unit": unit, "target_epsilon": epsilon, "delta": delta}
    return runs.changed(runs.make(path, experiment=experiment, ledger=ledger), epsilon=epsilon)


@pytest.mark.parametrize(
    ("unit", "said"), [("record", "A person with k rows"), ("client", "A person with rows at k clients")]
)
def test_epsilon_in_two_sentences(tmp_path, unit, said):
    path = private(tmp_path / "run", 2.0, 1e-5, unit)
    text = reading(read.read(path))
    assert len(re.findall(r"\.(?: |$)", text)) == 2
    assert said in text
    assert f"e^epsilon = {math.exp(2.0):.4g}" in text
    # Group privacy of two: 2 epsilon, and delta + e^epsilon delta.
    assert f"epsilon = 4 at delta = {1e-5 + math.exp(2.0) * 1e-5:.4g}" in text
    assert "does not cover" in text
    assert text in " ".join(words(path).split())


def test_without_an_epsilon_nothing_is_read(tmp_path):
    assert reading(read.read(runs.make(tmp_path / "a"))) == ""
    assert reading(read.read(private(tmp_path / "b", math.inf, 1e-5, "record"))) == ""


def test_only_files_that_are_there_are_named(tmp_path):
    run = read.read(runs.make(tmp_path / "run"))
    (run.path / "checkpoint").mkdir()
    said = [text for sentence in do_not_share(None, own_models=True) if (text := present(run, sentence))]
    (one,) = said
    assert one.startswith("checkpoint/ and metrics.jsonl reveal")
    (run.path / "adapter").mkdir()
    (run.path / "audit.json").write_text("{}")
    said = [text for sentence in do_not_share(None, own_models=True) if (text := present(run, sentence))]
    assert said[0].startswith("checkpoint/, adapter/ and metrics.jsonl reveal")
    assert said[1].startswith("audit.json names")
    assert "dossier.html" not in " ".join(said)
    assert present(run, "Something else.") == "Something else."


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("fedavg", "private/ holds a lock, but no clients' memories or keys."),
        ("ditto", "private/ holds clients' memories: never share it."),
    ],
)
def test_the_content_of_the_private_folder_is_stated(tmp_path, method, said):
    tables = small.experiment(tmp_path, method={"name": method, "rounds": 1})
    tables["method"].pop("local")
    fedfm.run(tables, tmp_path / "run", progress=Progress())
    assert (tmp_path / "run/private/memory").exists() == (method == "ditto")
    assert said in unescape(words(tmp_path / "run"))


@pytest.mark.proof
@pytest.mark.usefixtures("coarse_accounting")
def test_under_privacy_keys_and_counts_are_stated(tmp_path):
    privacy = {"mechanism": "dp_sgd", "unit": "record", "target_epsilon": 8.0, "delta": 1e-3, "clip_norm": 1.0}
    tables = small.experiment(tmp_path, privacy=privacy, method={"rounds": 1, "fraction": 1.0})
    fedfm.run(tables, tmp_path / "run", progress=Progress())
    kept = [path.name for path in (tmp_path / "run/private").rglob("*.secret")]
    assert kept
    assert "keys, and in private/data.json the exact numbers of rows" in words(tmp_path / "run")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    fedfm.run(small.experiment(folder), folder / "run", progress=Progress())
    return folder


def test_scores_of_classes_are_those_of_the_predictions(finished):
    """Compared with scikit-learn, on what ``fedfm predict`` says of the test rows."""
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


def many(folder, classes, rows=1200):
    """An npz of so many classes, of which neighbours overlap."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    y = rng.integers(0, classes, rows)
    x = np.stack([np.cos(y / 9), np.sin(y / 9), y / classes, np.ones(rows)], 1) * 4 + rng.normal(0, 0.2, (rows, 4))
    split = np.where(np.arange(rows) % 3 == 0, "test", "train")
    names = np.array([f"intent {i:03d}" for i in range(classes)])
    np.savez(folder / "rows.npz", x=x.astype(np.float32), y=y, split=split, classes=names)
    return folder


def test_of_many_classes_the_scores_are_kept_and_no_matrix_is_drawn(tmp_path):
    """Compared with scikit-learn, on what ``fedfm predict`` says of the test rows."""
    folder = many(tmp_path / "many", 60)
    local = {"learning_rate": 0.3, "epochs": 5, "batch_size": 32}
    result = fedfm.run(small.experiment(folder, method={"local": local}), folder / "run", progress=Progress())
    rows = np.load(folder / "rows.npz")
    tested, names = rows["split"] == "test", list(rows["classes"])
    predicted = [names.index(p) for p in fedfm.predict(folder / "run", folder / "rows.npz")["predictions"]]
    true, said = rows["y"][tested], np.array(predicted)[tested]
    matrix = confusion_matrix(true, said, labels=range(60))
    counts = result["details"]["class_counts"]
    assert "confusion" not in result["details"]
    assert counts["rows"] == matrix.sum(1).tolist()
    assert counts["predicted"] == matrix.sum(0).tolist()
    assert counts["right"] == matrix.diagonal().tolist()
    wrong = matrix - np.diag(matrix.diagonal())
    assert [0 if t is None else t[1] for t in counts["taken_for"]] == wrong.max(1).tolist()
    assert [n for *_, n in counts["confused"]] == sorted(wrong.ravel().tolist(), reverse=True)[:20]
    page = html.write(folder / "run").read_text()
    section = page[page.index('id="classes"') :].partition("</section>")[0]
    assert "No confusion matrix is drawn: with 60 classes it would have" in section
    assert "<svg" not in section
    *_, f1, _ = precision_recall_fscore_support(true, said, labels=range(60), zero_division=0)
    worst = min((v, i) for i, v in enumerate(f1) if matrix.sum(1)[i])
    assert f"Lowest F1: {names[worst[1]]} ({100 * worst[0]:.1f}" in section
    a, b, n = counts["confused"][0]
    assert f"Most frequent mistakes: {names[a]} taken for {names[b]} ({n} of {matrix.sum(1)[a]})" in section
    table = section[section.index("Scores of each class") :]
    shown = [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)][1:]
    assert [row[0] for row in shown] == names
    for row, value in zip(shown, f1, strict=True):
        if row[4][:1].isdigit():
            assert float(row[4].split("\u00a0")[0]) == pytest.approx(100 * value, abs=0.051)


def test_of_the_models_of_clients_the_counts_of_many_classes_are_added_up(tmp_path):
    folder = many(tmp_path / "many", 60)
    tables = small.experiment(folder, method={"name": "local", "rounds": 1})
    result = fedfm.run(tables, folder / "run", progress=Progress())
    counts = result["details"]["class_counts"]
    assert sum(counts["rows"]) == sum(counts["predicted"]) == 5 * 400
    assert sum(counts["right"]) / sum(counts["rows"]) == pytest.approx(result["global_accuracy"])


def test_a_report_says_that_too_many_classes_have_no_scores(tmp_path):
    folder = many(tmp_path / "many", 1001)
    result = fedfm.run(small.experiment(folder, method={"rounds": 1}), folder / "run", progress=Progress())
    assert "class_counts" not in result["details"]
    assert re.search(
        r"Scores of single classes are kept for up to 1\D000 classes; this run has 1\D001\.", words(folder / "run")
    )


def test_a_report_says_that_silos_send_no_scores_of_classes(finished, tmp_path):
    """As of a deployment whose server has no rows of its own."""
    shutil.copytree(finished / "run", tmp_path / "run")
    path = tmp_path / "run" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["result"]["details"]["confusion"]
    manifest["result"]["global_accuracy"] = None
    path.write_text(json.dumps(manifest))
    assert "The server has no test rows" in words(tmp_path / "run")
    assert "The server has no test rows" not in words(finished / "run")


def test_a_report_claims_nothing_about_rows_that_only_a_silo_has_read(finished, tmp_path):
    """As of a deployment with silos' own files, of which one told no scores."""
    shutil.copytree(finished / "run", tmp_path / "run")
    path = tmp_path / "run" / "manifest.json"
    manifest = json.loads(path.read_text())
    before, silent = words(finished / "run"), manifest["clients"][0]
    manifest["split"] = None
    manifest["result"]["client_accuracy"][silent] = None
    path.write_text(json.dumps(manifest))
    text = words(tmp_path / "run")
    assert f"{silent} no scores" in text
    assert "Left out of means: 1 without scores" in text
    assert "no test rows" not in text
    assert "This report names the clients and shows their rows per class" in before
    assert "This report names the clients; ask them" in text


def test_models_of_clients_are_added_up(finished):
    tables = small.experiment(finished, method={"name": "local", "rounds": 1})
    result = fedfm.run(tables, finished / "alone", progress=Progress())
    counts = np.array(result["details"]["confusion"])
    assert counts.sum() == 5 * 48
    assert np.trace(counts) / counts.sum() == pytest.approx(result["global_accuracy"])
    assert "Counts of all clients&#x27; models are added up" in html.write(finished / "alone").read_text()


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
