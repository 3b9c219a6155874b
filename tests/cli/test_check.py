"""`fedfm check` reads rows and model, and states what a run will cost."""

import json
import sys
import tomllib

import numpy as np
import pytest

import fedfm
import small
from fedfm.cli import main
from fedfm.core.toml_text import to_toml

DIGITS = """
[data]
name = "digits"
limit = 120
partition = {{ name = "dirichlet", alpha = 0.3, clients = 3 }}
[model]
name = "nano-vit"
adaptation = {{ name = "{adaptation}" }}
[method]
name = "{method}"
rounds = 2
"""


def checked(capsys, tmp_path, text, *more):
    path = tmp_path / "exp.toml"
    path.write_text(text)
    code = main(["check", str(path), *more])
    return code, *capsys.readouterr()


@pytest.mark.proof
def test_check_prints_rows_classes_bytes_time_and_memory(capsys, tmp_path):
    text = DIGITS.format(adaptation="head", method="fedavg")
    code, out, _ = checked(capsys, tmp_path, text, "--format", "json")
    assert code == 0
    found = json.loads(out)
    expected = found["forecast"]
    assert found["trainable"] == 128 * 10 + 10
    assert found["clients"] == list(expected["rows"]) == ["client-00", "client-01", "client-02"]
    assert sum(rows[0] for rows in expected["rows"].values()) == sum(
        n for classes in expected["counts"].values() for n in classes.values()
    )
    assert 0 < expected["client_seconds"] <= expected["run_seconds"]
    assert expected["memory"] > 50e6
    run = fedfm.run(tmp_path / "exp.toml", tmp_path / "run")
    for way in ("up", "down"):
        assert expected[f"bytes_{way}"] == pytest.approx(run[f"bytes_{way}"] / (2 * 3), rel=0.05)
    code, out, _ = checked(capsys, tmp_path, text)
    assert "client-00: " in out
    assert "of training for the largest client in a round" in out


@pytest.mark.parametrize(("rounds", "at_most"), [(1, True), (10**9, False)])
def test_check_bounds_the_time_of_a_short_run_on_features(capsys, tmp_path, rounds, at_most):
    tables = small.experiment(tmp_path, method={"rounds": rounds})
    code, out, _ = checked(capsys, tmp_path, to_toml(tables), "--format", "json")
    expected = json.loads(out)["forecast"]
    assert (code, expected["at_most"]) == (0, at_most)
    assert 0 < expected["client_seconds"] <= expected["run_seconds"]
    code, out, _ = checked(capsys, tmp_path, to_toml(tables))
    assert ("# at most about " in out) == at_most


def test_of_silos_with_rows_of_their_own_no_partition_is_shown(capsys, tmp_path):
    for name, seed in (("north", 0), ("south", 1)):
        rng = np.random.default_rng(seed)
        np.savez(tmp_path / f"{name}.npz", x=rng.normal(size=(40, 4)).astype(np.float32), y=np.arange(40) % 2)
    rest = '[model]\nname = "features"\n[method]\nname = "fedavg"\nrounds = 1\n'
    code, out, _ = checked(capsys, tmp_path, f'[data.clients]\nnorth = "north.npz"\nsouth = "south.npz"\n{rest}')
    assert code == 0
    assert "partition" not in out
    assert tomllib.loads(out)["data"]["clients"].keys() == {"north", "south"}
    at = '[run]\nengine = "deployment"\nsuperlink = "127.0.0.1:9"\n'
    code, out, _ = checked(capsys, tmp_path, f'[data]\npath = "north.npz"\n{rest}{at}')
    assert (code, "partition" in out) == (0, False)
    dealt = '[data]\npath = "north.npz"\npartition = { name = "iid", clients = 2 }\n'
    for text in (f"{dealt}{rest}{at}", f"{dealt}{rest}"):
        code, out, _ = checked(capsys, tmp_path, text)
        assert tomllib.loads(out)["data"]["partition"]["clients"] == 2


def test_check_prints_the_notices_that_a_run_gives_on_the_model(capsys, tmp_path):
    text = DIGITS.format(adaptation="lora", method="fedavg").replace('"lora"', '"lora", rank = 300')
    code, out, _ = checked(capsys, tmp_path, text)
    assert code == 0
    assert "# model.adaptation.rank = 300 is above the width" in out


def test_the_bytes_of_statistics_are_not_guessed(capsys, tmp_path):
    text = DIGITS.format(adaptation="head", method="fedpft").replace("rounds = 2", "")
    code, out, _ = checked(capsys, tmp_path, text, "--format", "json")
    assert code == 0
    assert json.loads(out)["forecast"]["bytes_up"] is None


@pytest.mark.parametrize(
    ("data", "model", "said"),
    [
        ('path = "{folder}/rows.csv"\nlabel = "topic"', 'name = "nano-vit"', "topic"),
        ('path = "{folder}/nan.npz"', 'name = "features"', "x[3, 2] is nan"),
        ('name = "digits"', 'name = "no-such/model"', "no-such/model"),
    ],
    ids=["label column", "NaN", "model"],
)
def test_check_refuses_rows_and_models_that_a_run_refuses(capsys, tmp_path, monkeypatch, data, model, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"row {i},{i % 2}\n" for i in range(20)))
    x = np.ones((20, 4), np.float32)
    x[3, 2] = np.nan
    np.savez(tmp_path / "nan.npz", x=x, y=np.arange(20) % 2)
    text = f'[data]\n{data.format(folder=tmp_path)}\n[model]\n{model}\n[method]\nname = "fedavg"\n'
    code, _, error = checked(capsys, tmp_path, text)
    assert code == 2
    assert said in error
    assert "Traceback" not in error


def labelled(tmp_path, labels, split=None):
    x = np.random.default_rng(0).normal(size=(len(labels), 4)).astype(np.float32)
    classes, y = np.unique(labels, return_inverse=True)
    np.savez(tmp_path / "rows.npz", x=x, y=y, classes=classes, split=np.array(split or ["train"] * 30 + ["test"] * 30))
    return f'[data]\npath = "{tmp_path}/rows.npz"\n[model]\nname = "features"\n[method]\nname = "fedavg"\nrounds = 1\n'


def test_labels_that_are_spelled_in_two_ways_are_noticed(capsys, tmp_path):
    text = labelled(tmp_path, ["Sports", "sports", "Sports  news", "sports news", "world", "world"] * 10)
    code, out, _ = checked(capsys, tmp_path, text)
    assert code == 0
    assert '# the classes "Sports" and "sports"; "Sports  news" and "sports news" differ only by case or spaces' in out
    fedfm.run(tmp_path / "exp.toml", tmp_path / "run")
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert any("differ only by case or spaces" in notice for notice in manifest["notices"])
    capsys.readouterr()
    code, out, _ = checked(capsys, tmp_path, labelled(tmp_path, ["sports", "world"] * 30))
    assert "differ by case" not in out


def test_labels_that_differ_by_form_or_by_a_mark_are_noticed(capsys, tmp_path):
    twins = ["na\u00efve", "nai\u0308ve", "world"] * 20  # in a list of classes, whose places are numbers
    code, _, err = checked(capsys, tmp_path, labelled(tmp_path, twins))
    assert (code, "class names must be different" in err) == (2, True)
    code, out, _ = checked(capsys, tmp_path, labelled(tmp_path, ["sci-tech", "sci_tech", "Sci Tech", "world"] * 15))
    assert code == 0
    assert '"Sci Tech" and "sci-tech" and "sci_tech" differ only by -, _, spaces or case' in out
    assert "differ by case or spaces" not in out
    code, out, _ = checked(capsys, tmp_path, labelled(tmp_path, ["top-1", "top-10", "nan-o"] * 20))
    assert (code, "differ by" in out, "without a label" in out) == (0, False, False)


def test_labels_that_are_one_number_are_noticed(capsys, tmp_path):
    code, out, _ = checked(capsys, tmp_path, labelled(tmp_path, ["1", "1.0", "01", "2", "-2", "1e999999999"] * 10))
    assert code == 0
    assert '# the classes "01" and "1" and "1.0" differ only by how they write a number' in out
    assert '"-2"' not in out.split("differ by")[0].split("# the classes")[1]
    different = ["1", "-1", "10", "1_0", "1.01", "12345678901234567890123456789012", "12345678901234567890123456789013"]
    code, out, _ = checked(capsys, tmp_path, labelled(tmp_path, (different * 10)[:60]))
    assert (code, "differ by" in out) == (0, False)


@pytest.mark.parametrize("word", ["nan", "NaN", "N/A", "None"])
def test_a_label_that_means_no_label_gets_a_notice(capsys, tmp_path, word):
    rows = "".join(f"row {i},{[word, 'sport', 'world'][i % 3]}\n" for i in range(60))
    (tmp_path / "rows.csv").write_text(f"text,label\n{rows}")
    x = labelled(tmp_path, [word, "sport", "world"] * 20)
    code, out, _ = checked(capsys, tmp_path, x)
    assert code == 0
    assert f'# the class "{word}" is trained like any other; if it marks rows without a label' in out


def test_classes_that_nobody_trains_are_noticed(capsys, tmp_path):
    labels = ["a", "b", "c"] * 20
    split = ["test" if label == "c" or i % 4 == 0 else "train" for i, label in enumerate(labels)]
    code, out, _ = checked(capsys, tmp_path, labelled(tmp_path, labels, split))
    assert code == 0
    assert '# no client has a training row of "c"' in out


def test_rows_that_fedpft_would_withhold_are_counted_before_the_run(capsys, tmp_path):
    labels, split = ["a"] * 20 + ["b"] * 20 + ["c"] * 3 + ["d"] * 2, ["train"] * 45
    text = labelled(tmp_path, [*labels, "a", "b"], [*split, "test", "test"]).replace('"fedavg"', '"fedpft"')
    text = text.replace('rows.npz"\n', 'rows.npz"\npartition = { name = "iid", clients = 1 }\n')
    said = "5 rows of 2 classes withheld: each of these classes has fewer than method.min_count = 5 rows at its client"
    code, out, _ = checked(capsys, tmp_path, text)
    assert code == 0
    assert f"# {said}" in out
    assert said in fedfm.run(tmp_path / "exp.toml", tmp_path / "run")["warnings"]
    capsys.readouterr()
    for key, more in (("min_count=2", False), ("min_count=3", True), ("topology=chain", False)):
        code, out, _ = checked(capsys, tmp_path, text, "--set", f"method.{key}")
        assert (code, "withheld: each" in out) == (0, more), key


def test_a_tracker_whose_library_is_missing_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # its import fails
    monkeypatch.delitem(sys.modules, "fedfm.runtime.trackers.to_wandb", raising=False)
    text = labelled(tmp_path, ["a", "b"] * 30)
    code, _, error = checked(capsys, tmp_path, f'{text}[run]\ntrack = ["wandb"]\n')
    assert code == 2
    assert "run.track: wandb is not installed" in error
    assert 'pip install "fedfm[wandb]"' in error
