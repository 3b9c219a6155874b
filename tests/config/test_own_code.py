"""Runs of a user's own module and rows: by module:function in the TOML, or given again to a finished run."""

import json
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

import fedfm
from fedfm.api.execute import drive
from fedfm.api.predict import export, predict
from fedfm.audits.audit import perform
from fedfm.audits.replay import open_finished, replay
from fedfm.audits.row_evidence import evidence
from fedfm.cli import main
from fedfm.config.experiment import Experiment
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.runtime.run_directory import Run

SCRIPT = """
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset


    def rows(n, seed):
        x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


    def pieces():
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        net[0].bias.requires_grad_(False)
        return {"model": net, "train": rows(60, 0), "test": rows(20, 1), "loss": nn.functional.cross_entropy,
                "classes": ["low", "mid", "high"]}


    def silos():
        told = pieces()
        del told["train"]
        return told | {"clients": {"north": rows(30, 2), "south": rows(20, 3)}}


    def line():
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
        data = [(row, row.sum(0, keepdim=True)) for row in x]
        return {"model": nn.Linear(4, 1), "train": data, "test": data[:9], "loss": nn.functional.mse_loss}


    def new():
        return [(x,) for x, _ in rows(7, 4)]


    def trainer():
        from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

        small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        model = BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=8, **small))
        ids = torch.randint(2, 20, (24, 5), generator=torch.Generator().manual_seed(0))
        data = [{"input_ids": i, "labels": int(i[0] > 9)} for i in ids]
        args = TrainingArguments("hf", learning_rate=0.01, num_train_epochs=2, seed=5, report_to=[], use_cpu=True)
        return Trainer(model, args, train_dataset=data, eval_dataset=data[:8])


    def words():
        ids = torch.randint(2, 20, (24, 5), generator=torch.Generator().manual_seed(0))
        return [{"input_ids": i} for i in ids[:8]]
"""


@pytest.fixture
def ward(tmp_path, monkeypatch):
    (tmp_path / "ward_script.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import ward_script

    yield ward_script
    sys.modules.pop("ward_script", None)


def tables(name, **changes):
    local = {"learning_rate": 0.3, "batch_size": 8}
    partition = {} if name == "silos" else {"partition": {"clients": 3}}
    found = {"data": {"name": f"ward_script:{name}"} | partition, "model": {"name": f"ward_script:{name}"}}
    return found | {"method": {"name": "fedavg", "rounds": 3, "local": local}, "run": {"workers": 1}} | changes


def both(name):
    return {"data": {"name": name}, "model": {"name": name}}


def test_a_function_in_the_file_runs_predicts_exports_and_is_audited(ward, tmp_path, capsys):
    from fedfm.config.toml import to_toml

    (tmp_path / "exp.toml").write_text(to_toml(tables("pieces")))
    assert main(["run", "exp.toml", "--out", "run", "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["accuracy"] > 0.4
    assert main(["predict", "run", "ward_script:new", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(["export", "run", "--to", "torch", "--out", "weights"]) == 0
    state = load_file(tmp_path / "weights" / "model.safetensors")
    assert set(state) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    net = ward.pieces()["model"]
    net.load_state_dict(state)
    with torch.no_grad():
        logits = net(torch.stack([x for (x,) in ward.new()]))
    assert found["predictions"] == [["low", "mid", "high"][i] for i in logits.argmax(1)]
    np.testing.assert_allclose(found["probabilities"], logits.softmax(1), atol=1e-5)
    with torch.no_grad():
        x, y = ward.rows(20, 1).tensors
        assert result["accuracy"] == pytest.approx(float((net(x).argmax(1) == y).float().mean()))
    assert len(replay(open_finished(tmp_path / "run")).replies) == 9  # an error if it ends with other bits


def test_workers_engines_and_a_kill_change_no_bits(ward, tmp_path):
    whole = fedfm.run(tables("silos"), tmp_path / "whole")
    assert set(whole["client_accuracy"]) == {"north", "south"}
    wired = fedfm.run(tables("silos", run={"workers": 2, "wire": True}), tmp_path / "wired")
    assert wired["params_sha256"] == whole["params_sha256"]

    class Stop(fedfm.Progress):
        def round(self, line):
            if line["round"] == 1:
                raise RuntimeError

    with pytest.raises(RuntimeError):
        fedfm.run(tables("silos"), tmp_path / "cut", progress=Stop())
    assert fedfm.resume(tmp_path / "cut")["params_sha256"] == whole["params_sha256"]


def test_a_module_that_is_no_classifier_predicts_its_outputs(ward, tmp_path, capsys):
    from fedfm.config.toml import to_toml

    (tmp_path / "exp.toml").write_text(to_toml(tables("line")))
    assert main(["check", "exp.toml"]) == 0
    assert "5 trainable parameters" in capsys.readouterr().out
    result = fedfm.run(tables("line"), tmp_path / "run")
    assert result["accuracy"] is None
    capsys.readouterr()
    assert main(["predict", "run", "ward_script:new"]) == 0
    printed = [float(line) for line in capsys.readouterr().out.split()]
    state = load_file(tmp_path / "run" / "adapter" / "model.safetensors")
    x = torch.stack([x for (x,) in ward.new()])
    np.testing.assert_allclose(printed, (x @ state["weight"].T + state["bias"]).flatten(), rtol=1e-4, atol=1e-5)


def test_rows_of_a_module_without_classes_are_told_apart_by_its_loss(ward, tmp_path):
    fedfm.run(tables("line"), tmp_path / "run")
    found = {f.name: f for f in perform(tmp_path / "run")}
    assert found["model_membership"].detail["members"] == found["update_membership"].detail["members"] == 40
    seen = replay(open_finished(tmp_path / "run"))
    population = seen.fresh()
    rows, state = population.data("client-00").train, load_file(tmp_path / "run" / "adapter" / "model.safetensors")
    x, y = (rows.batch(range(len(rows)))[key] for key in ("0", "labels"))
    expected = ((x @ state["weight"].T + state["bias"] - y) ** 2).flatten()
    method = seen.run.experiment.method
    np.testing.assert_allclose(-evidence(method, population.model, Params(state), rows), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.release
@pytest.mark.deployment
def test_a_deployment_on_loopback_has_the_same_bits(ward, tmp_path):
    here, there = (fedfm.run(tables("silos", run={"engine": e}), tmp_path / e) for e in ("local", "deployment"))
    assert here["params_sha256"] == there["params_sha256"]


@pytest.mark.deployment
def test_silos_bring_code_and_rows_of_their_own(ward, tmp_path):
    """Each silo's file names a function of its own; that of the experiment is not there."""
    here = fedfm.run(tables("silos"), tmp_path / "here")
    files = {}
    for name in ("north", "south"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"code_of_{name}.py").write_text(textwrap.dedent(SCRIPT))
        files[name] = folder / "silo.toml"
        files[name].write_text(f'name = "{name}"\ndata = "code_of_{name}:silos"\nallow = ["mean", "scores"]\n')
    run = Run.create(
        Experiment.from_dict(tables("silos", run={"engine": "deployment"}), imports=True), tmp_path / "run"
    )
    there = drive(run, fedfm.Progress(), fresh=True, silos=files)
    assert there["params_sha256"] == here["params_sha256"]
    assert there["excluded"] == []


def test_a_trainers_arguments_fill_the_client_optimiser(ward, tmp_path):
    bare = tables("trainer", method={"name": "fedavg", "rounds": 2, "local": {"batch_size": 6}})
    result = fedfm.run(bare, tmp_path / "run")
    run = fedfm.load_run(result["run"])
    local = run.experiment.method.local
    assert (local.learning_rate, local.epochs, local.batch_size, local.schedule) == (0.01, 2, 6, "linear")
    assert (local.max_grad_norm, run.experiment.run.seed) == (1.0, 5)
    in_memory = fedfm.federate(
        ward.trainer(),
        partition={"clients": 3},
        rounds=2,
        local={"batch_size": 6},
        run={"workers": 1},
        out=tmp_path / "m",
    )
    assert in_memory["bytes_up"] == result["bytes_up"]
    found = predict(tmp_path / "run", "ward_script:words")
    assert len(found["predictions"]) == 8
    export(tmp_path / "run", "hf", tmp_path / "hf-model")
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf-model").eval()
    with torch.no_grad():
        shares = model(torch.stack([r["input_ids"] for r in ward.words()])).logits.softmax(1)
    np.testing.assert_allclose(found["probabilities"], shares, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"name": "nano-vit"}}, "the same name twice"),
        (
            {"data": {"name": "ward_script:gone"}, "model": {"name": "ward_script:gone"}},
            "ward_script:gone.*no attribute",
        ),
        ({"data": {"name": "ward_gone:f"}, "model": {"name": "ward_gone:f"}}, "No module named 'ward_gone'"),
        (
            {"data": {"name": "ward_script:new"}, "model": {"name": "ward_script:new"}},
            "ward_script:new: model is a list",
        ),
        ({"data": {"name": "ward_script:rows"}, "model": {"name": "ward_script:rows"}}, r"rows\(\) fails: TypeError"),
        ({"data": {"name": "ward_script:pieces", "limit": 5}}, "data.limit: ward_script:pieces provides"),
        ({"model": {"name": "ward_script:pieces", "dtype": "bfloat16"}}, "model.dtype: ward_script:pieces provides"),
        ({"method": {"name": "fedpft"}}, "no client optimiser"),
        ({"attack": {"name": "label_shuffle", "fraction": 0.2}}, "cannot be attacked"),
    ],
)
def test_mismatched_modules_and_rows_are_refused(ward, tmp_path, changes, words):
    with pytest.raises(InputError, match=words):
        fedfm.run(tables("pieces", **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.proof
def test_a_run_in_memory_needs_its_module_again(ward, tmp_path, capsys):
    told = ward.pieces()
    settings = {"partition": {"clients": 3}, "rounds": 2, "run": {"workers": 1}, "local": {"learning_rate": 0.3}}
    fedfm.federate(**told, **settings, out=tmp_path / "run")
    for command in (
        ["predict", "run", "ward_script:new"],
        ["export", "run", "--to", "torch", "--out", "w"],
        ["audit", "run"],
    ):
        assert main(command) == 2
        assert "from Python" in capsys.readouterr().err
    net = told["model"]
    with torch.no_grad():
        expected = net(torch.stack([x for (x,) in ward.new()])).argmax(1)
    fresh = ward.pieces()["model"]
    fresh[0].bias.data.copy_(net[0].bias.data)  # the frozen part is the run's
    found = predict(tmp_path / "run", ward.new(), given={"model": fresh, "loss": cross_entropy})
    assert found["predictions"] == [["low", "mid", "high"][i] for i in expected]
    export(tmp_path / "run", "torch", tmp_path / "w", given=fresh)
    torch.testing.assert_close(load_file(tmp_path / "w" / "model.safetensors"), net.state_dict())
    with pytest.raises(InputError, match="is not the run's"):
        predict(tmp_path / "run", ward.new(), given=nn.Linear(4, 3))
    with pytest.raises(InputError, match="is not the run's"):
        predict(tmp_path / "run", ward.new(), given=ward.pieces()["model"])  # another frozen bias
    seen = replay(open_finished(tmp_path / "run", told), given=told).replies  # an error if it ends with other bits
    assert len(seen) == 6
    settings["method"], settings["rounds"] = "fedbip", 2
    federated = fedfm.federate(**told, **settings, out=tmp_path / "bip")
    assert perform(federated["run"], given=told)
    settings["method"] = "fedavg"
    federated = fedfm.federate(**told, **settings, out=tmp_path / "avg")
    found = {f.name: f for f in perform(federated["run"], given=told)}
    assert found["model_membership"].detail["members"] == found["update_membership"].detail["members"] == 60


def test_an_audit_of_a_module_from_python_says_what_is_lacking(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    clients = {name: [(row, 0) for row in x[k::2]] for k, name in enumerate(("north", "south"))}
    given = {"clients": clients, "loss": torch.nn.functional.cross_entropy}
    names = {"classes": ("a", "b")}
    keys = {"rounds": 1, "out": tmp_path / "run", "progress": fedfm.Progress()}
    fedfm.federate(torch.nn.Linear(3, 2), **given, **names, **keys)
    given["model"] = torch.nn.Linear(3, 2)
    with pytest.raises(InputError, match="with test and classes as "):
        fedfm.audit(tmp_path / "run", progress=fedfm.Progress(), given=given)
    assert fedfm.audit(tmp_path / "run", "label_counts", progress=fedfm.Progress(), given=given | names)
