"""`fedfm pretrain` from the command line: its folder, a resume after a kill, and its refusals."""

import json
from pathlib import Path

import pytest
import torch

from central import Lines, call, kill_after_an_epoch
from fedfm.api import execute
from fedfm.api.pretrain import pretrain
from fedfm.api.pretrain_spec import Pretraining
from fedfm.config.toml import to_toml
from fedfm.errors import InputError
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec

TABLES = {
    "data": {"name": "digits", "limit": 160},
    "model": {
        "name": "preact-resnet-small",
        "weights": "random",
        "options": {"widths": [4, 8], "blocks": [1, 1], "image_size": 8},
    },
    "pretrain": {
        "local": {"learning_rate": 0.1, "momentum": 0.9, "batch_size": 32, "epochs": 4},
        "milestones": [2, 3],
        "threads": 1,
    },
}
WORDS = "to be or not to be that is the question\n"


def tables(**changes):
    return {k: {**v, **changes.get(k, {})} for k, v in TABLES.items()}


def toml(folder, **changes):
    path = folder / "pre.toml"
    path.write_text(to_toml(tables(**changes)))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder, result, lines) of an undisturbed pretraining."""
    folder, seen = tmp_path_factory.mktemp("whole") / "net", Lines()
    return folder, pretrain(tables(), folder, watcher=seen), seen.lines


def test_the_folder_is_a_model(whole):
    folder, result, lines = whole
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "pretrain.json",
    ]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4]
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.1, 0.1, 0.01, 0.001])
    assert lines[-1]["train_loss"] < lines[0]["train_loss"]
    about = json.loads((folder / "pretrain.json").read_text())
    assert about["result"] == result
    assert about["history"] == lines
    assert json.loads((folder / "config.json").read_text())["id2label"]["3"] == "3"
    spec = ModelSpec(str(folder), adaptation=AdaptationSpec("full"))
    model = load_model(spec, classes=("x", "y"), kind="image")
    assert model.params()["fc.weight"].shape == (2, 8)
    assert sum(p.numel() for p in model.module.parameters()) == result["parameters"] - 8 * 8 - 8


def test_pretraining_equals_plain_training(whole, tmp_path):
    """Two epochs, the order of rows and the momentum written out with PyTorch's own SGD."""
    from fedfm import seeds
    from fedfm.data.load import load_table
    from fedfm.data.spec import DataSpec

    got = pretrain(
        tables(pretrain={"local": {**TABLES["pretrain"]["local"], "epochs": 2}, "milestones": [1]}), tmp_path
    )
    table = load_table(DataSpec(name="digits", limit=160), seed=0)
    spec = ModelSpec(**TABLES["model"], adaptation=AdaptationSpec("full"))
    model = load_model(spec, classes=table.classes, kind="image", seed=0)
    rows = model.prepare(table, table.rows("train"))
    optimiser = torch.optim.SGD(model.module.parameters(), lr=0.1, momentum=0.9)
    for epoch in (1, 2):
        optimiser.param_groups[0]["lr"] = (0.1, 0.01)[epoch - 1]
        order = seeds.generator(0, "pretrain", epoch).permutation(len(rows))
        model.train_mode()
        for part in torch.from_numpy(order).split(32):
            optimiser.zero_grad()
            model.loss(rows.batch(part)).backward()
            optimiser.step()
        model.eval_mode()
    expected = model.evaluate(model.prepare(table, table.rows("test")))
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert got["accuracy"] == pytest.approx(expected["accuracy"], abs=0.01)


@pytest.mark.parametrize("steps", [2, 8, 12])
def test_an_interrupted_pretraining_continues_to_the_same_bits(whole, tmp_path, steps):
    with pytest.raises(KeyboardInterrupt):
        pretrain(tables(), tmp_path / "net", watcher=Lines(steps))
    with pytest.raises(InputError, match=r"is not finished: continue the `fedfm pretrain` that began it"):
        load_model(ModelSpec(str(tmp_path / "net")), classes=("a",), kind="image")
    seen = Lines()
    result = pretrain(tables(), tmp_path / "net", watcher=seen)
    assert result["params_sha256"] == whole[1]["params_sha256"]
    assert len(seen.lines) == 4 - (steps - 1) // 5
    same = [
        name
        for name in ("model.safetensors", "config.json")
        if (tmp_path / "net" / name).read_bytes() == (whole[0] / name).read_bytes()
    ]
    assert same == ["model.safetensors", "config.json"]


def test_a_damaged_checkpoint_is_passed_over(whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        pretrain(tables(), tmp_path / "net", watcher=Lines(18))
    newest = sorted((tmp_path / "net" / "checkpoint").glob("epoch-*"))[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    seen = Lines()
    assert pretrain(tables(), tmp_path / "net", watcher=seen)["params_sha256"] == whole[1]["params_sha256"]
    assert [line["epoch"] for line in seen.lines] == [3, 4]


@pytest.mark.proof
def test_a_killed_process_goes_on_and_a_finished_one_answers(whole, tmp_path, capsys):
    out = tmp_path / "net"
    kill_after_an_epoch("pretrain", toml(tmp_path), out)
    code, text, _ = call(capsys, "pretrain", tmp_path / "pre.toml", "--out", out, "--format", "json")
    assert code == 0
    result = json.loads(text)
    assert result["params_sha256"] == whole[1]["params_sha256"]
    code, text, err = call(capsys, "pretrain", tmp_path / "pre.toml", "--out", out, "--format", "json")
    assert (code, json.loads(text), err) == (0, result, "")


def test_a_federation_starts_from_it(whole, tmp_path):
    result = execute.run(
        {
            "data": {"name": "digits", "limit": 100, "partition": {"name": "iid", "clients": 2}},
            "model": {"name": str(whole[0]), "adaptation": {"name": "head"}},
            "method": {"name": "fedavg", "rounds": 1},
            "run": {"workers": 1},
        },
        tmp_path / "run",
    )
    assert 0 <= result["accuracy"] <= 1


@pytest.mark.parametrize(("kind", "size"), [("words", 9), ("bpe", 262)])
def test_a_language_model_with_a_vocabulary_of_its_own(tmp_path, capsys, kind, size):
    (tmp_path / "wiki.txt").write_text(WORDS * 60)
    path = tmp_path / "pre.toml"
    path.write_text(
        to_toml(
            {
                "data": {"path": str(tmp_path / "wiki.txt")},
                "model": {"name": "nano-gpt2", "weights": "random", "max_length": 16},
                "pretrain": {
                    "local": {"name": "adam", "learning_rate": 0.01, "epochs": 3, "batch_size": 8},
                    "vocabulary_size": size,
                    "vocabulary": kind,
                    "threads": 1,
                },
            }
        )
    )
    code, text, err = call(capsys, "pretrain", path, "--out", tmp_path / "lm", "--format", "json")
    assert code == 0, err
    result = json.loads(text)
    assert result["perplexity"] < size / 2
    assert err.count("perplexity") == 3
    spec = ModelSpec(str(tmp_path / "lm"), adaptation=AdaptationSpec("full"), max_length=16)
    model = load_model(spec, classes=(), kind="passages")
    assert len(model.tools.tokenizer) == model.module.config.vocab_size
    assert len(model.tools.tokenizer) == (size if kind == "words" else pytest.approx(size, abs=5))
    # The same architecture and vocabulary from other weights: what a federation with a secret model starts from.
    fresh = load_model(
        ModelSpec(str(tmp_path / "lm"), weights="random", adaptation=AdaptationSpec("full")),
        classes=(),
        kind="passages",
        seed=5,
    )
    assert fresh.layout.slots.keys() == model.layout.slots.keys()
    assert fresh.fingerprint != model.fingerprint


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"adaptation": {"name": "lora"}}}, 'model.adaptation.name = "lora": pretraining trains all'),
        ({"data": {"partition": {"clients": 3}}}, "data.partition: pretraining uses all rows in one place"),
        ({"data": {"val_fraction": 0.1}}, "data.val_fraction: pretraining uses all rows in one place"),
        ({"pretrain": {"milestones": [3, 2]}}, r"pretrain.milestones = \[3, 2\]: expected ascending"),
        ({"pretrain": {"milestones": [4]}}, r"pretrain.milestones = \[4\]: expected .* between 0 and 4"),
        ({"pretrain": {"factor": 0.0}}, "pretrain.factor = 0.0: expected"),
        ({"pretrain": {"vocabulary_size": 300}}, "pretrain.vocabulary_size: the data are of kind image, expected text"),
        ({"pretrain": {"epochs": 4}}, "pretrain.epochs: unknown key"),
        ({"pretrain": {"local": {"name": "proximal"}}}, 'pretrain.local: expected name = "sgd"'),
        ({"pretrain": {"local": {"absent": "zero", "epochs": 4}}}, 'pretrain.local: expected name = "sgd"'),
        ({"model": {"weights": "pretrained", "options": None}}, "architecture without weights"),
        ({"model": {"name": "nowhere/"}}, "model.name: no folder nowhere/"),
        ({"method": {"name": "fedavg"}}, "method: unknown key"),
    ],
)
def test_invalid_pretrainings_are_refused(tmp_path, capsys, changes, says):
    path = tmp_path / "pre.toml"
    path.write_text(to_toml(tables(**changes) | {k: v for k, v in changes.items() if k not in TABLES}))
    code, _, err = call(capsys, "pretrain", path, "--out", tmp_path / "net")
    assert code == 2
    with pytest.raises(InputError, match=says):
        raise InputError(err)
    assert not (tmp_path / "net").exists()


def test_other_folders_are_left_alone(whole, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    code, _, err = call(capsys, "pretrain", toml(tmp_path), "--out", tmp_path / "mine")
    assert (code, "is not an empty folder; give another --out" in err) == (2, True)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    code, _, err = call(capsys, "pretrain", toml(tmp_path), "--out", whole[0], "--set", "pretrain.seed=1")
    assert (code, "contains another pretraining" in err) == (2, True)
    code, _, err = call(capsys, "pretrain", tmp_path / "no.toml", "--out", tmp_path / "net")
    assert (code, "no such file; `fedfm pretrain exp.toml` takes" in err) == (2, True)


def test_an_exploding_loss_is_reported(tmp_path, capsys):
    local = {"learning_rate": 1e20, "epochs": 4}
    code, _, err = call(
        capsys, "pretrain", toml(tmp_path, pretrain={"local": local, "milestones": []}), "--out", tmp_path / "net"
    )
    assert code == 1
    assert "epoch 1: the loss is NaN or infinite; lower pretrain.local.learning_rate" in err


def test_many_pictures_are_prepared_batch_by_batch(whole, tmp_path, monkeypatch):
    monkeypatch.setattr("fedfm.api.model_folder.IN_ADVANCE", 1000)
    assert pretrain(tables(), tmp_path / "net")["params_sha256"] == whole[1]["params_sha256"]


def test_random_changes_of_pictures_are_refused():
    with pytest.raises(InputError, match=r"data\.augment: .* does not take it; drop it"):
        Pretraining.from_dict({**TABLES, "data": {**TABLES["data"], "augment": ["flip"]}})


def test_tables_round_trip():
    what = Pretraining.from_dict(TABLES)
    assert Pretraining.from_dict(what.to_dict()) == what
    assert what.model.adaptation.name == "full"
    assert Path(what.model.name).name == "preact-resnet-small"


def test_leftovers_of_a_process_killed_at_its_start_are_replaced(whole, tmp_path):
    out = tmp_path / "net"
    out.mkdir()
    (out / ".pretrain.json.x1y2").write_text("{")
    with pytest.raises(KeyboardInterrupt):
        pretrain(tables(), out, watcher=Lines(7))
    (out / ".pretrain.json.a3b4").write_text("{")  # killed again, as an epoch was written down
    assert pretrain(tables(), out)["params_sha256"] == whole[1]["params_sha256"]
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in whole[0].iterdir())
