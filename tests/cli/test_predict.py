"""`fedfm predict` of language models: answers to instructions, and the figures of the run's own evaluation."""

import csv
import json

import numpy as np
import pytest

import fedfm
import tiny_text
from central import call
from fedfm.api.predict import predict
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from small import jsonl
from tiny_text import COMMON

FIGURES = ("loss", "perplexity")
ALL = (*FIGURES, "exact_match", "rouge_1")


def instructions(n=40):
    """The answer is the first word, or all of them; some prompts are longer than what training reads of them."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(n):
        words = [str(w) for w in rng.choice(COMMON, rng.integers(2, 30))]
        output = words[0] if i % 3 else " ".join(words)
        rows.append({"instruction": " ".join(words), "output": output, "split": "test" if i % 4 == 0 else "train"})
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The run ``asked`` of an instruction model, and its test rows."""
    path = tiny_text.save_all(tmp_path_factory.mktemp("models"))
    rows = instructions()
    jsonl(path / "asked.jsonl", rows)
    jsonl(path / "test.jsonl", [row for row in rows if row["split"] == "test"])
    jsonl(path / "bare.jsonl", [{"instruction": row["instruction"]} for row in rows if row["split"] == "test"])
    fedfm.run(experiment(path), path / "asked")
    return path


def experiment(path, method="fedavg", **model):
    tables = tiny_text.tables(path, method, "llama")
    tables["data"]["path"] = str(path / "asked.jsonl")
    tables["model"] |= {"task": "instruction", "max_length": 16, **model}
    return tables


def test_the_figures_of_answers_are_those_of_the_run(folder):
    result, found = (
        fedfm.load_run(folder / "asked").manifest["result"],
        predict(folder / "asked", folder / "test.jsonl"),
    )
    assert found["loss"] == pytest.approx(result["loss"], rel=1e-6)
    assert found["perplexity"] == pytest.approx(result["perplexity"], rel=1e-6)
    assert found["exact_match"] == result["accuracy"]
    assert found["rouge_1"] == pytest.approx(result["details"]["rouge_1"], rel=1e-9)
    assert len(found["cut"]) / len(found["answers"]) == pytest.approx(result["details"]["answers_cut"])


def test_outputs_are_not_needed_and_not_read_for_an_answer(folder):
    whole, bare = (predict(folder / "asked", folder / name) for name in ("test.jsonl", "bare.jsonl"))
    assert bare["answers"] == whole["answers"]
    assert len(bare["answers"]) == 10
    assert all(isinstance(answer, str) for answer in bare["answers"])
    assert [bare[key] for key in ALL] == [None] * 4


def test_rows_without_an_output_are_answered_and_not_scored(folder, tmp_path):
    rows = [row for row in instructions() if row["split"] == "test"]
    some = jsonl(tmp_path / "some.jsonl", rows[:4])
    for hole in ("", " ", None):
        mixed = [row if i < 4 else row | {"output": hole} for i, row in enumerate(rows)]
        found = predict(folder / "asked", jsonl(tmp_path / "mixed.jsonl", mixed))
        expected = predict(folder / "asked", some)
        assert [found[key] for key in ALL] == [expected[key] for key in ALL]
        assert len(found["answers"]) == 10


def test_an_output_that_is_no_text_is_refused(folder, tmp_path, capsys):
    file = jsonl(tmp_path / "new.jsonl", [{"instruction": "the old bird", "output": 3}])
    code, _, err = call(capsys, "predict", folder / "asked", file)
    assert code == 2
    assert f'{file}, line 1: column "output" holds int 3: text is expected' in err
    assert len(err.strip().splitlines()) == 1


def test_a_run_that_answers_nothing_still_predicts(folder, tmp_path):
    result = fedfm.run(experiment(folder, answer_tokens=0), tmp_path / "silent")
    assert result["details"]["rouge_1"] is result["accuracy"] is None
    found = predict(tmp_path / "silent", folder / "bare.jsonl")
    assert found["answers"] == predict(folder / "asked", folder / "bare.jsonl")["answers"]


def test_clients_with_models_of_their_own_answer_by_them(folder, tmp_path):
    result = fedfm.run(experiment(folder, "local"), tmp_path / "own")
    losses = set()
    for client in result["client_accuracy"]:
        found = predict(tmp_path / "own", folder / "test.jsonl", client)
        assert len(found["answers"]) == 10
        losses.add(found["loss"])
    assert len(losses) == len(result["client_accuracy"])
    assert np.mean(list(losses)) == pytest.approx(result["loss"], rel=1e-6)


def test_the_command_line_answers_and_says_where_the_limit_stops_it(folder, tmp_path, capsys):
    code, out, err = call(capsys, "predict", folder / "asked", folder / "bare.jsonl", "--format", "json")
    found = json.loads(out)
    assert code == 0
    assert found["answers"]
    assert found["perplexity"] is None
    assert found["cut"]  # a model that has hardly learned goes on and on
    assert f"{len(found['cut'])} of 10 answers stop at 16 tokens (model.answer_tokens of the run)" in err
    code, out, _ = call(capsys, "predict", folder / "asked", folder / "test.jsonl")
    lines = out.splitlines()
    assert lines[:10] == found["answers"]
    assert len(lines) == 11
    assert lines[10].startswith("perplexity ")


def test_answers_are_written_to_a_file(folder, tmp_path, capsys):
    found = predict(folder / "asked", folder / "test.jsonl")
    expected = [{"row": i, "answer": a, "cut": i in found["cut"]} for i, a in enumerate(found["answers"])]
    for name in ("a.jsonl", "a.csv", "a.json"):
        code, out, _ = call(capsys, "predict", folder / "asked", folder / "test.jsonl", "--out", tmp_path / name)
        assert code == 0
        assert out.splitlines()[0] == str(tmp_path / name)
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == expected
    with (tmp_path / "a.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{k: str(v) for k, v in row.items()} for row in expected]
    assert json.loads((tmp_path / "a.json").read_text()) == found


@pytest.mark.parametrize(
    ("name", "says"), [("a.txt", "ends in .json, .jsonl, .csv"), ("no/a.csv", "no folder"), ("there.csv", "exists")]
)
def test_a_file_that_would_not_be_written_is_refused_before_any_row_is_read(folder, tmp_path, capsys, name, says):
    (tmp_path / "there.csv").write_text("mine")
    code, _, err = call(capsys, "predict", folder / "asked", tmp_path / "absent.jsonl", "--out", tmp_path / name)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert (tmp_path / "there.csv").read_text() == "mine"


@pytest.mark.parametrize("ending", [".jsonl", ".txt"])
def test_the_perplexity_of_text_is_that_of_the_run(folder, tmp_path, ending):
    rng = np.random.default_rng(3)
    lines = [" ".join(rng.choice(COMMON, rng.integers(3, 20))) for _ in range(600)]
    tables = tiny_text.tables(folder, "fedavg", "llama")
    tables["data"]["path"] = str(tmp_path / f"all{ending}")
    tables["model"]["max_length"] = 16
    if ending == ".txt":  # test rows are the end of the text
        (tmp_path / "all.txt").write_text("\n".join(lines) + "\n")
        table = load_table(DataSpec(path=str(tmp_path / "all.txt")), seed=1, task="language_modelling")
        (tmp_path / "new.txt").write_text("".join(table.inputs[i] for i in table.rows("test")))
    else:
        rows = [{"text": line, "split": "test" if i % 5 == 0 else "train"} for i, line in enumerate(lines)]
        jsonl(tmp_path / "all.jsonl", rows)
        jsonl(tmp_path / "new.jsonl", [{"text": line} for line in lines[::5]])
    result = fedfm.run(tables, tmp_path / "run")
    found = predict(tmp_path / "run", tmp_path / f"new{ending}")
    for key in FIGURES:
        assert found[key] == pytest.approx(result[key], rel=1e-6)
