"""Runs of task "preference", and of conversations: they learn, and what cannot work is refused."""

import json
import random

import pytest

import fedfm
import tiny_text
from fedfm.api.predict import export, predict
from fedfm.cli import main
from fedfm.errors import InputError
from fedfm.models.adapters import base_alone
from small import jsonl
from tiny_text import COMMON

GOOD, BAD = ("swim river", "river water"), ("wing nest", "nest sky")


def preferences(n=48):
    """Preferences: of two answers, the one about rivers is better."""
    rng = random.Random(0)
    return [
        {
            "prompt": " ".join(rng.sample(COMMON, 3)),
            "chosen": rng.choice(GOOD),
            "rejected": rng.choice(BAD),
            "split": "test" if i % 4 == 0 else "train",
        }
        for i in range(n)
    ]


def conversations(n=40):
    """Every answer is the first word of what was asked; some rows are long."""
    rng = random.Random(1)
    rows = []
    for i in range(n):
        turns = [{"role": "system", "content": "the"}] if i % 3 == 0 else []
        for _ in range(1 + i % 3):
            words = rng.sample(COMMON, 2 + i % 5)
            turns += [{"role": "user", "content": " ".join(words)}, {"role": "assistant", "content": words[0]}]
        rows.append({"messages": turns, "split": "test" if i % 4 == 0 else "train"})
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tiny_text.save_all(tmp_path_factory.mktemp("models"))
    jsonl(path / "preferences.jsonl", preferences())
    jsonl(path / "talks.jsonl", conversations())
    return path


def tables(folder, method="fedavg", rounds=2, *, model=None, data="preferences.jsonl", **keys):
    found = tiny_text.tables(folder, method, "llama", rounds, clients=2, **keys)
    found["data"]["path"] = str(folder / data)
    found["model"] |= {"task": "preference" if data == "preferences.jsonl" else "instruction", "max_length": 24}
    found["model"] |= model or {}
    return found


def test_a_run_learns_which_answers_are_better(folder, tmp_path):
    result = fedfm.run(tables(folder, rounds=3), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # log 2: the model is its reference
    assert result["loss"] < 0.6
    assert result["accuracy"] == result["global_accuracy"] > 0.9
    assert result["perplexity"] is None
    assert result["details"]["reward_margin"] > 0.2
    assert lines[-1]["reward_margin"] == result["details"]["reward_margin"]
    assert result["details"]["local_reward_margin"] is not None

    new = jsonl(tmp_path / "new.jsonl", [{"prompt": row["prompt"]} for row in preferences()[:5]])
    found = predict(tmp_path / "run", new)
    assert len(found["answers"]) == 5
    assert all(isinstance(answer, str) for answer in found["answers"])
    assert found["loss"] is None
    assert found["answers"] == predict(tmp_path / "run", jsonl(tmp_path / "all.jsonl", preferences()[:5]))["answers"]
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").exists()


def test_the_bits_do_not_depend_on_the_number_of_workers(folder, tmp_path):
    prints = {fedfm.run(tables(folder, run={"workers": n}), tmp_path / f"workers{n}")["params_sha256"] for n in (1, 2)}
    assert len(prints) == 1


class _Killed(RuntimeError):
    pass


class _Kill(fedfm.Progress):
    def round(self, line):
        if line["round"] == 1:
            raise _Killed


@pytest.mark.proof
def test_a_killed_run_goes_on_with_the_same_bits(folder, tmp_path):
    local = {"name": "adamw", "learning_rate": 0.01, "batch_size": 5, "schedule": "linear", "warmup_steps": 2}
    exp = tables(folder, rounds=3)
    exp["method"]["local"] = local
    whole = fedfm.run(exp, tmp_path / "whole")
    with pytest.raises(_Killed):
        fedfm.run(exp, tmp_path / "cut", progress=_Kill())
    assert len(fedfm.load_run(tmp_path / "cut").metrics()) == 2
    resumed = fedfm.resume(tmp_path / "cut")
    assert resumed["params_sha256"] == whole["params_sha256"]
    assert resumed["loss"] == whole["loss"]


def test_the_reference_is_computed_once_a_row(folder, tmp_path, monkeypatch):
    """However many rounds there are: the rows of every client and of the server, once."""
    counts = []
    alone = base_alone.base_alone

    def counted(module):
        counts[-1] += 1
        return alone(module)

    monkeypatch.setattr(base_alone, "base_alone", counted)
    for rounds in (1, 4):
        counts.append(0)
        fedfm.run(tables(folder, rounds=rounds), tmp_path / f"rounds{rounds}")
    assert counts[0] == counts[1] > 0


@pytest.mark.sample("ditto", "scaffold")
@pytest.mark.parametrize("method", ["fedprox", "scaffold", "flora", "ditto", "feddpa", "fedamp", "fedbip", "local"])
def test_methods_that_train_by_the_local_loop_train_this_too(folder, tmp_path, method):
    sgd = {"name": "sgd", "learning_rate": 0.5}
    local = {"scaffold": sgd, "ditto": {}, "feddpa": {}}.get(method)
    wanted = tables(folder, method, local=local)
    if method in ("ditto", "feddpa"):
        wanted["method"]["local"] = {"optimiser": "adamw", "learning_rate": 0.05, "batch_size": 8}
    result = fedfm.run(wanted, tmp_path / "run")
    assert result["loss"] < 0.69
    assert result["accuracy"] > 0.5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": {"adaptation": {"name": "full"}}}, 'model.adaptation.name: "full" changes the base'),
        ({"model": {"task": "classification"}}, 'it has preferences: set model.task = "preference"'),
        ({"model": {"beta": 0}}, "model.beta = 0.0: expected a finite number above 0"),
        ({"method": "fedpft", "local": None}, "no single class"),
        ({"model": {"template": "no place"}}, "model.template"),
    ],
)
def test_unsuitable_settings_are_refused(folder, tmp_path, change, says):
    wanted = tables(folder, **{k: v for k, v in change.items() if k == "model"})
    if "method" in change:
        wanted["method"] = {"name": change["method"]}
    with pytest.raises(InputError, match=says):
        fedfm.run(wanted, tmp_path / "run")


@pytest.mark.proof
def test_rows_of_preferences_can_be_hidden_by_noise(folder, tmp_path):
    wanted = tables(folder, rounds=1, local={"name": "sgd", "learning_rate": 0.1})
    wanted["privacy"] = {
        "mechanism": "dp_sgd",
        "unit": "record",
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "clip_norm": 1.0,
    }
    result = fedfm.run(wanted, tmp_path / "run")
    assert result["epsilon"] > 0
    assert result["loss"] is not None


def test_conversations_from_run_to_prediction_and_export(folder, tmp_path, capsys):
    from transformers import AutoTokenizer

    wanted = tables(folder, rounds=1, data="talks.jsonl", model={"max_length": 12})
    result = fedfm.run(wanted, tmp_path / "run")
    assert result["perplexity"] > 1
    assert result["details"]["rouge_1"] is not None
    notices = json.loads((tmp_path / "run" / "manifest.json").read_text())["notices"]
    cut = [notice for notice in notices if "model.max_length" in notice]
    lengths = [words(row) for row in conversations()]
    assert 0 < sum(n > 12 for n in lengths) < len(lengths)
    trained, tested = (
        [n > 12 for n, row in zip(lengths, conversations(), strict=True) if row["split"] == s]
        for s in ("train", "test")
    )
    assert cut == [
        f"{sum(trained)} of {len(trained)} training rows and {sum(tested)} of {len(tested)} test rows have more than "
        "12 tokens (model.max_length) and are cut: prompts lose their beginning, and answers lose their "
        "end, so the model does not learn where these answers end"
    ]

    asked = [{"messages": row["messages"][:-1]} for row in conversations()[:6]]
    found = predict(tmp_path / "run", jsonl(tmp_path / "new.jsonl", asked))
    whole = predict(tmp_path / "run", jsonl(tmp_path / "whole.jsonl", conversations()[:6]))
    pairs = [{"instruction": "the old bird"}]
    assert len(found["answers"]) == 6
    assert found["answers"] == whole["answers"]
    assert found["loss"] is None
    assert whole["loss"] > 0
    assert len(predict(tmp_path / "run", jsonl(tmp_path / "pairs.jsonl", pairs))["answers"]) == 1

    export(tmp_path / "run", "hf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = tokenizer.apply_chat_template(asked[0]["messages"], tokenize=False, add_generation_prompt=True)
    assert text == "the\n" + asked[0]["messages"][1]["content"] + "\n"

    assert main(["run", str(toml(tmp_path, wanted)), "--out", str(tmp_path / "again")]) == 0
    assert cut[0] in capsys.readouterr().err
    wrong = jsonl(tmp_path / "wrong.jsonl", [{"messages": [{"role": "user"}]}])
    assert main(["predict", str(tmp_path / "run"), str(wrong)]) == 2
    assert "message 1 of column" in capsys.readouterr().err


def words(row):
    """Tokens of a conversation as the plain template writes it: one a word, and the end of each answer."""
    return sum(len(m["content"].split()) + (m["role"] == "assistant") for m in row["messages"])


def toml(tmp_path, wanted):
    from fedfm.config.experiment import Experiment

    (tmp_path / "exp.toml").write_text(Experiment.from_dict(wanted).to_toml())
    return tmp_path / "exp.toml"
