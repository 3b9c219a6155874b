"""fedfm.federate: a user's modules, and a Hugging Face Trainer, against hand-written loops."""

import asyncio
import json
import math
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import fedfm
from fedfm import seeds
from fedfm.cli import main
from fedfm.core.method import Method
from fedfm.errors import InputError


def rows(n=90, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(((x[:, 0] > 0) * 1 + (x[:, 1] > 0) * 1).astype(np.int64))


def data(n=90, seed=0):
    return TensorDataset(*rows(n, seed))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


LOCAL = {"learning_rate": 0.3, "epochs": 2, "batch_size": 16}


def federate(model=None, **changes):
    settings = {"train": data(), "partition": {"clients": 3}, "loss": cross_entropy, "rounds": 2, "local": LOCAL}
    settings |= {"run": {"workers": 1}, **changes}
    return fedfm.federate(model or network(), **{k: v for k, v in settings.items() if v is not None})


def by_hand(net, clients, rounds, loss, mu=0.0):
    """FedAvg (FedProx with mu) by torch's own optimiser and state_dict."""
    for t in range(1, rounds + 1):
        start = {k: v.clone() for k, v in net.state_dict().items()}
        total = {k: torch.zeros_like(v) for k, v in start.items()}
        for name, (x, y) in sorted(clients.items()):
            net.load_state_dict(start)
            optimiser = torch.optim.SGD(net.parameters(), lr=LOCAL["learning_rate"])
            rng = seeds.generator(seeds.derive(0, "client", t, name), "batches")
            for _ in range(LOCAL["epochs"]):
                order = rng.permutation(len(x))
                for i in range(0, len(x), LOCAL["batch_size"]):
                    index = order[i : i + LOCAL["batch_size"]]
                    optimiser.zero_grad()
                    value = loss(net(x[index]), y[index])
                    for k, p in net.named_parameters():
                        value = value + mu / 2 * ((p - start[k]) ** 2).sum()
                    value.backward()
                    optimiser.step()
            for k, v in net.state_dict().items():
                total[k] += v * len(x)
        n = sum(len(x) for x, _ in clients.values())
        net.load_state_dict({k: v / n for k, v in total.items()})
    return net.state_dict()


@pytest.mark.parametrize(("method", "keys"), [("fedavg", {}), ("fedprox", {"mu": 0.5})])
def test_a_module_is_trained_as_by_hand(tmp_path, method, keys):
    x, y = rows()
    parts = {"south": (x[:20], y[:20]), "north": (x[20:], y[20:])}
    net = network()
    result = federate(
        net,
        train=None,
        partition=None,
        clients={c: TensorDataset(*p) for c, p in parts.items()},
        test=data(40, 1),
        method=method,
        out=tmp_path / "run",
        **keys,
    )
    expected = by_hand(network(), parts, 2, cross_entropy, **keys)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=0)
    xt, yt = rows(40, 1)
    with torch.no_grad():
        assert result["accuracy"] == pytest.approx(float((net(xt).argmax(1) == yt).float().mean()))
        assert result["loss"] == pytest.approx(float(cross_entropy(net(xt), yt)), rel=1e-5)
    assert set(result["client_accuracy"]) == {"north", "south"}
    assert result["models"] == {"": str(tmp_path / "run" / "adapter")}
    run = fedfm.load_run(result["run"])
    assert [m["round"] for m in run.metrics()] == [0, 1, 2]
    assert (run.path / "report.html").exists()
    assert run.manifest["split"]["clients"]["south"]["train"]["rows"] == 20


def test_the_module_comes_back_as_it_was_but_for_its_weights(tmp_path):
    net = network()
    net[1].eval()
    federate(net, out=tmp_path / "run")
    assert [m.training for m in net] == [True, False, True]
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    assert len({p.untyped_storage().data_ptr() for p in net.parameters()}) == 4
    torch.save(net.state_dict(), tmp_path / "weights.pt")


def test_workers_change_nothing(tmp_path):
    one = federate(out=tmp_path / "1")
    two = federate(out=tmp_path / "2", run={"workers": 2})
    assert one["params_sha256"] == two["params_sha256"]


def test_rows_may_be_dicts_tuples_or_a_module_of_several_inputs(tmp_path):
    x, y = rows()

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, left, right):
            return self.net(torch.cat([left, right], 1))

    sets = {
        "tuples": list(zip(x, y, strict=True)),
        "three": list(zip(x[:, :1], x[:, 1:], y, strict=True)),
        "dicts": [{"x": a, "label": int(b)} for a, b in zip(x, y, strict=True)],
        "named": [{"left": a[:3], "right": a[3:], "y": b} for a, b in zip(x.numpy(), y.numpy(), strict=True)],
    }
    models = {"tuples": network(), "three": Two(), "dicts": network(), "named": Two()}
    digests = set()
    for name, train in sets.items():
        net = models[name]
        key = {"labels": "y"} if name == "named" else {}
        result = federate(net, train=train, test=train, out=tmp_path / name, **key)
        assert result["accuracy"] is not None
        weights = (net.net if isinstance(net, Two) else net).state_dict()
        digests.add(tuple(float(v.double().sum()) for v in weights.values()))
    assert len(digests) == 1


def test_an_objective_of_ones_own_has_the_batch_as_it_was_collated(tmp_path):
    x, y = rows()
    seen = []

    def objective(module, batch):
        seen.append(sorted(batch))
        return cross_entropy(module(batch["x"]), batch["y"])

    train = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
    net, other = network(), network()
    settings = {"train": train, "test": train, "labels": "y", "objective": objective, "loss": None}
    blind = federate(net, out=tmp_path / "blind", **settings)
    assert blind["accuracy"] is None
    assert blind["loss"] < 1.1
    sighted = federate(other, out=tmp_path / "sighted", logits=lambda m, b: m(b["x"]), **settings)
    assert sighted["accuracy"] > 0.4
    assert sighted["params_sha256"] == blind["params_sha256"]
    assert set(map(tuple, seen)) == {("x", "y")}
    federate(third := network(), out=tmp_path / "plain", train=data())
    torch.testing.assert_close(third.state_dict(), net.state_dict())


def test_without_class_labels_there_is_only_the_loss(tmp_path):
    x, _ = rows()
    target = x.sum(1, keepdim=True)
    net = nn.Linear(4, 1)
    train = TensorDataset(x, target)
    result = federate(net, train=train, test=train, loss=nn.functional.mse_loss, rounds=8, out=tmp_path / "run")
    assert result["accuracy"] is None
    assert set(result["client_accuracy"].values()) == {None}
    assert result["loss"] == pytest.approx(float(nn.functional.mse_loss(net(x), target).detach()), rel=1e-4)
    assert result["loss"] < 0.1
    assert (tmp_path / "run" / "report.html").exists()


def test_partitions_deal_by_class_and_by_column(tmp_path):
    from datasets import Dataset

    x, y = rows()
    table = Dataset.from_dict(
        {"x": x.tolist(), "labels": y.tolist(), "ward": ["a" if i % 3 else "b" for i in range(90)]}
    )
    by_class = federate(partition={"name": "by_class", "classes_per_client": 1, "clients": 3}, out=tmp_path / "c")
    split = fedfm.load_run(by_class["run"]).manifest["split"]["clients"]
    assert all(sum(n > 0 for n in c["train"]["by_class"]) == 1 for c in split.values())

    def collate(rows):
        return {"x": torch.tensor([r["x"] for r in rows]), "labels": torch.tensor([r["labels"] for r in rows])}

    by_column = {"name": "by_column", "column": "ward"}
    federate(train=table, collate=collate, partition=by_column, test=table, out=tmp_path / "w")
    split = fedfm.load_run(tmp_path / "w").manifest["split"]["clients"]
    assert {c: s["train"]["rows"] for c, s in split.items()} == {"a": 60, "b": 30}


def test_clients_may_bring_test_rows_of_their_own(tmp_path):
    result = federate(
        train=None,
        partition=None,
        clients={"a": data(30), "b": data(30, 2)},
        test={"a": data(10, 3)},
        val_fraction=0.2,
        out=tmp_path / "run",
    )
    assert result["client_accuracy"]["b"] is None
    assert result["client_accuracy"]["a"] == result["global_accuracy"]
    split = fedfm.load_run(result["run"]).manifest["split"]
    assert split["clients"]["a"]["val"]["rows"] == 6
    assert split["clients"]["a"]["train"]["rows"] == 24


def test_a_model_a_client_leaves_the_module_alone_and_says_where_they_are(tmp_path):
    from safetensors.torch import load_file

    net = network()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    result = federate(net, method="local", test=data(30, 1), out=tmp_path / "run")
    torch.testing.assert_close(net.state_dict(), before)
    assert sorted(result["models"]) == ["client-00", "client-01", "client-02"]
    trained = [load_file(f"{folder}/model.safetensors") for folder in result["models"].values()]
    assert all(set(t) == set(before) for t in trained)
    assert not torch.equal(trained[0]["0.weight"], trained[1]["0.weight"])


class _Stopped(RuntimeError):
    pass


class _Stop(fedfm.Progress):
    def round(self, line):
        if line["round"] == 2:
            raise _Stopped


class _Interrupt(fedfm.Progress):
    def round(self, line):
        raise KeyboardInterrupt


def test_calling_again_goes_on_and_a_finished_run_gives_its_weights(tmp_path, capsys):
    straight = federate(first := network(), rounds=4, method="scaffold", out=tmp_path / "straight")
    net = network()
    with pytest.raises(_Stopped):
        federate(net, rounds=4, method="scaffold", out=tmp_path / "broken", progress=_Stop())
    torch.testing.assert_close(net.state_dict(), network().state_dict())  # untouched, as nothing was finished
    with pytest.raises(KeyboardInterrupt, match=r"continue with the same call, with out='.*broken'"):
        federate(net, rounds=4, method="scaffold", out=tmp_path / "broken", progress=_Interrupt())
    assert main(["resume", str(tmp_path / "broken")]) == 2
    assert "came from Python; call fedfm.federate" in capsys.readouterr().err
    fresh = network(seed=5)  # a script that is started again draws other weights: the run has its own
    resumed = federate(fresh, rounds=4, method="scaffold", out=tmp_path / "broken")
    assert resumed["params_sha256"] == straight["params_sha256"]
    torch.testing.assert_close(fresh.state_dict(), first.state_dict())
    again = federate(last := network(seed=6), rounds=4, method="scaffold", out=tmp_path / "broken")
    assert again == resumed
    torch.testing.assert_close(last.state_dict(), first.state_dict())
    with pytest.raises(InputError, match="another experiment"):
        federate(rounds=3, method="scaffold", out=tmp_path / "broken")
    with pytest.raises(_Stopped):
        federate(rounds=4, out=tmp_path / "open", progress=_Stop())
    with pytest.raises(InputError, match="data changed"):
        federate(rounds=4, train=data(91), out=tmp_path / "open")
    assert main(["predict", str(tmp_path / "straight"), "x.csv"]) == 2


def test_a_finished_run_goes_on_with_more_rounds(tmp_path):
    federate(first := network(), rounds=4, method="scaffold", out=tmp_path / "straight")
    federate(network(), rounds=2, method="scaffold", out=tmp_path / "more")
    before = (tmp_path / "more/manifest.json").read_bytes()
    for refused in ({"rounds": 4}, {"changes": {"run.workers": 1}}):
        with pytest.raises(InputError, match="same out, and with more rounds"):
            fedfm.resume(tmp_path / "more", **refused)
    with pytest.raises(InputError, match="another experiment"):
        federate(rounds=4, method="scaffold", seed=1, out=tmp_path / "more")
    assert (tmp_path / "more/manifest.json").read_bytes() == before  # it is finished as it was
    result = federate(last := network(seed=5), rounds=4, method="scaffold", out=tmp_path / "more")
    assert result["rounds"] == 4
    torch.testing.assert_close(last.state_dict(), first.state_dict(), rtol=0, atol=0)


def test_frozen_parameters_stay_and_peft_sends_its_adapter_only(tmp_path):
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    net = get_peft_model(network(), LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"]))
    before = {k: v.clone() for k, v in net.state_dict().items()}
    result = federate(net, test=data(30, 1), out=tmp_path / "run")
    trainable = {n for n, p in net.named_parameters() if p.requires_grad}
    changed = {k for k, v in net.state_dict().items() if not torch.equal(v, before[k])}
    assert changed <= trainable
    assert any("lora_B" in k for k in changed)
    assert set(load_file(f"{result['models']['']}/model.safetensors")) == trainable
    assert result["accuracy"] is not None


class Frozen(nn.Module):
    """Keeps its batch norm in evaluation mode, as a user who trains on few rows does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.head = nn.Linear(6, 3)

    def train(self, mode=True):
        super().train(mode)
        self.body[1].eval()
        return self

    def forward(self, x):
        return self.head(self.body(x).tanh())


@pytest.mark.parametrize("inside", [False, True])
def test_batch_norm_that_train_leaves_in_evaluation_stays_there(tmp_path, inside):
    net = nn.Sequential(Frozen()) if inside else Frozen()
    norm = next(m for m in net.modules() if isinstance(m, nn.BatchNorm1d))
    modes = set()
    norm.register_forward_hook(lambda m, _, out: modes.add(m.training))
    dropped = next(m for m in net.modules() if isinstance(m, nn.Dropout))
    drops = set()
    dropped.register_forward_hook(lambda m, _, out: drops.add(m.training))
    federate(net, test=data(seed=1), out=tmp_path / "run")
    assert (modes, drops) == ({False}, {False, True})
    assert norm.running_mean.tolist() == [0.0] * 6
    assert norm.running_var.tolist() == [1.0] * 6
    notices = json.loads((tmp_path / "run/manifest.json").read_text()).get("notices", [])
    assert not [text for text in notices if "batch norm" in text or "buffer" in text]


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.centre.mul_(0.9).add_(0.1 * x.mean(0))
        return self.inner(x - self.centre)


def with_frozen_weights():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    for weight in net[1].parameters():
        weight.requires_grad_(False)
    return net


def with_instance_norm():
    norm = nn.InstanceNorm1d(1, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (1, 4)), norm, nn.Flatten(), nn.Linear(4, 3))


class Replaced(Centred):
    def forward(self, x):
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * x.mean(0)
        return self.inner(x - self.centre)


@pytest.mark.parametrize("make", [Centred, Replaced, with_instance_norm])
def test_a_client_s_buffers_do_not_reach_the_next_client(tmp_path, make):
    """So results do not depend on which clients a process trains, and the module has its own buffers afterwards."""
    found = []
    for workers in (1, 3):
        torch.manual_seed(0)
        net = make()
        before = {name: b.clone() for name, b in net.named_buffers()}
        out = tmp_path / f"run-{workers}"
        result = federate(net, out=out, run={"workers": workers})
        found.append(result["params_sha256"])
        assert all(torch.equal(b, before[name]) for name, b in net.named_buffers())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Centred, '1 buffer of the module changes in training, and no message has it: "centre"'),
        (with_instance_norm, "2 buffers of the module change in training, and no message has them"),
        (with_frozen_weights, "the weights of 1 layers of batch norm are frozen, and their running statistics change"),
        (network, ""),
    ],
)
def test_buffers_that_change_in_training_and_are_not_sent_are_named(tmp_path, make, words):
    net = make()
    before = {name: b.clone() for name, b in net.named_buffers()}
    federate(net, out=tmp_path / "run", rounds=0)
    assert all(torch.equal(b, before[name]) for name, b in net.named_buffers())  # the trial changes nothing
    notices = json.loads((tmp_path / "run/manifest.json").read_text()).get("notices", [])
    found = [text for text in notices if "in training" in text]
    assert len(found) == bool(words)
    assert words in "".join(found)


@pytest.mark.parametrize("method", ["centralised", "fedadam", "fedyogi", "fedavgm", "scaffold"])
def test_every_method_takes_it(tmp_path, method):
    net = network()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    result = federate(net, method=method, test=data(30, 1), out=tmp_path / "run")
    assert result["excluded"] == []
    assert any(not torch.equal(v, before[k]) for k, v in net.state_dict().items())


@pytest.mark.parametrize("method", ["fedavg", "fedavgm", "fedadam", "fedyogi", "scaffold"])
def test_batch_norm_statistics_travel(tmp_path, method):
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    federate(net, train=TensorDataset(rows()[0] + 5, rows()[1]), rounds=6, method=method, out=tmp_path / "run")
    assert 3 < net[0].running_mean.mean() < 6  # the rows' is 5, whatever the server's step on weights
    assert (net[0].running_var > 0).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "resnet"}, "expected a torch.nn.Module"),
        ({"clients": {"a": data(4)}}, "drop train and partition"),
        ({"train": None}, "name -> data set"),
        ({"train": iter([1])}, "map-style"),
        ({"train": []}, "no rows"),
        ({"train": None, "partition": None, "clients": {"a": data(3), "b": []}}, 'clients\\["b"\\] has no rows'),
        ({"train": None, "partition": None, "clients": {"a": data(3), "": data(3)}}, "is not a client's name"),
        ({"train": None, "partition": None, "clients": {"a": data(3)}, "test": {"c": data(3)}}, "are not clients"),
        ({"loss": None}, "^give loss=\\(output"),
        ({"method": "fedpft"}, '^method = "fedpft" has no client optimiser'),
        ({"objective": lambda m, b: m(b[0]).sum()}, "give one of the two"),
        ({"loss": lambda a, b: a}, "expected a scalar"),
        ({"train": TensorDataset(torch.randn(9, 7), torch.zeros(9).long())}, "fail on the first rows"),
        ({"train": TensorDataset(torch.randn(9, 4), torch.arange(9))}, "the module gives 3 logits|first rows"),
        ({"train": [{"text": "a", "label": 1}, {"text": "b", "label": 0}] * 3}, '"text" of a batch is a list'),
        ({"train": [(torch.zeros(i), 1) for i in range(1, 9)]}, "cannot be collated"),
        ({"train": TensorDataset(torch.randn(9, 4))}, "rows have no target"),
        ({"method": "fedavgg"}, 'did you mean "fedavg"'),
        ({"mu": 0.1}, "method.mu: unknown key"),
        ({"local": {"learning_rat": 1}}, "method.local.learning_rat: unknown key"),
        ({"run": {"engine": "simulation"}}, 'in memory run on engine = "local" only'),
        ({"partition": {"name": "dirichlet"}}, "data.partition.alpha is required"),
        ({"partition": {"clients": 500}}, "at most one client per row"),
        ({"classes": ("a", "b")}, "2 names, and the module gives 3 logits"),
        ({"labels": "y"}, 'rows have no "y"'),
    ],
)
def test_wrong_arguments_are_refused_before_any_training(tmp_path, changes, words):
    if "labels" in changes:
        changes = changes | {"train": [{"x": torch.zeros(4), "label": 0}] * 6}
    with pytest.raises(InputError, match=words):
        federate(out=tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_rows_with_nan_are_named(tmp_path):
    x, y = torch.randn(600, 4), torch.arange(600) % 3
    x[431, 2] = math.nan  # of b: row 131
    halves = {"b": TensorDataset(x[300:], y[300:]), "a": TensorDataset(x[:300], y[:300])}
    with pytest.raises(InputError, match=r'^clients\["b"\], row 131 holds NaN'):
        federate(train=None, partition=None, clients=halves, out=tmp_path / "a")
    targets = torch.randn(40, 3)
    targets[39] = math.nan
    with pytest.raises(InputError, match=r"^train, row 39 holds NaN"):
        federate(train=TensorDataset(torch.randn(40, 4), targets), loss=nn.functional.mse_loss, out=tmp_path / "b")
    assert not (tmp_path / "a").exists()


def test_a_module_that_fills_nan_may_have_rows_with_it(tmp_path):
    x = torch.randn(40, 4)
    x[3, 1] = math.nan

    def filled(module, batch):
        return nn.functional.cross_entropy(module(batch[0].nan_to_num()), batch[1])

    data = TensorDataset(x, torch.arange(40) % 3)
    result = federate(train=data, loss=None, objective=filled, rounds=1, out=tmp_path / "run")
    assert result["excluded"] == []


def test_models_that_cannot_be_trained_are_refused(tmp_path):
    frozen = network().requires_grad_(False)
    with pytest.raises(InputError, match="nothing to train"):
        federate(frozen, out=tmp_path / "a")
    mixed = network()
    mixed[2].double()
    with pytest.raises(InputError, match="expected one dtype"):
        federate(mixed, out=tmp_path / "b")


def test_an_experiment_in_memory_is_both_or_neither(tmp_path):
    from small import experiment

    tables = experiment(tmp_path, model={"name": "(in memory)"})
    with pytest.raises(InputError, match="both or neither"):
        fedfm.Experiment.from_dict(tables)


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def bert(seed=0):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=40, max_position_embeddings=16, num_labels=3, **small, **dropout)
    return BertForSequenceClassification(config)


def texts(n=60, seed=0):
    """Made-up token ids of unequal length; the label is told by one token."""
    from datasets import Dataset

    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, n)
    ids = [[1, int(10 + y), *rng.integers(20, 40, rng.integers(2, 8)).tolist()] for y in labels]
    return Dataset.from_dict({"input_ids": ids, "note": ["x"] * n, "label": labels.tolist()})


class Pad:
    """A data collator, as DataCollatorWithPadding does it."""

    def __call__(self, features):
        length = max(len(f["input_ids"]) for f in features)
        ids = torch.tensor([f["input_ids"] + [0] * (length - len(f["input_ids"])) for f in features])
        labels = torch.tensor([f["label"] for f in features])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def trainer(folder, model, **args):
    from transformers import Trainer, TrainingArguments

    settings = {"learning_rate": 5e-3, "per_device_train_batch_size": 8, "num_train_epochs": 2, "weight_decay": 0.1}
    settings |= {"report_to": [], "use_cpu": True, "disable_tqdm": True} | args
    arguments = TrainingArguments(output_dir=str(folder / "hf"), **settings)
    return Trainer(model, arguments, train_dataset=texts(), eval_dataset=texts(24, 1), data_collator=Pad())


def test_a_trainer_is_federated_as_by_hand(tmp_path):
    model = bert()
    made = trainer(tmp_path, model, adam_beta2=0.98, adam_epsilon=1e-6)
    result = fedfm.federate(made, partition={"clients": 2}, rounds=2, out=tmp_path / "run", run={"workers": 1})
    local = fedfm.load_run(result["run"]).experiment.method.local
    assert (type(local).__name__, local.learning_rate, local.batch_size, local.epochs) == ("AdamW", 5e-3, 8, 2)
    assert local.weight_decay == 0.1
    assert (local.schedule, local.max_grad_norm) == ("linear", 1.0)
    assert "schedule linear" in fedfm.load_run(result["run"]).manifest["notices"][0]

    net, train = bert(), texts()
    from fedfm.data.partition import deal
    from fedfm.data.spec import DataSpec, PartitionSpec
    from fedfm.data.table import Table

    split = np.array(["train"] * 60)
    table = Table("own", list(range(60)), np.array(train["label"]), ("0", "1", "2"), split)
    dealt = deal(table, DataSpec(partition=PartitionSpec(clients=2)), seed=42)
    for t in (1, 2):
        start = {k: v.clone() for k, v in net.state_dict().items()}
        total = {k: torch.zeros_like(v) for k, v in start.items()}
        for name, mine in dealt.clients.items():
            net.load_state_dict(start)
            net.train()
            spared = {n for n, _ in net.named_parameters() if n.endswith("bias") or "LayerNorm" in n}
            groups = [
                {"params": [p for n, p in net.named_parameters() if (n in spared) == bare], "weight_decay": decay}
                for bare, decay in ((False, 0.1), (True, 0.0))
            ]
            optimiser = torch.optim.AdamW(groups, lr=5e-3, betas=(0.9, 0.98), eps=1e-6)
            steps = 2 * -(-len(mine.train) // 8)
            done = (t - 1) * steps
            rng = seeds.generator(seeds.derive(42, "client", t, name), "batches")
            for _ in range(2):
                order = rng.permutation(len(mine.train))
                for i in range(0, len(order), 8):
                    batch = Pad()([train[int(j)] for j in mine.train[order[i : i + 8]]])
                    optimiser.zero_grad()
                    net(**batch).loss.backward()
                    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                    for group in optimiser.param_groups:
                        group["lr"] = 5e-3 * (1 - done / (2 * steps))
                    optimiser.step()
                    done += 1
            for k, v in net.state_dict().items():
                total[k] += v * len(mine.train)
        net.load_state_dict({k: (v / 60).to(start[k].dtype) for k, v in total.items()})
    for name, value in net.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], value, atol=1e-5, rtol=1e-4)
    assert made.evaluate()["eval_loss"] == pytest.approx(result["loss"], rel=1e-4)
    assert 0 <= result["accuracy"] <= 1


def test_a_trainer_with_clients_of_its_own_and_a_changed_optimiser(tmp_path):
    made = trainer(tmp_path, bert(), gradient_accumulation_steps=2, label_smoothing_factor=0.1)
    sets = {"a": texts(16, 2), "b": texts(24, 3)}
    result = fedfm.federate(made, clients=sets, rounds=1, local={"name": "sgd", "epochs": 1}, out=tmp_path / "run")
    local = fedfm.load_run(result["run"]).experiment.method.local
    assert (type(local).__name__, local.batch_size, local.epochs) == ("SGD", 16, 1)
    assert result["loss"] is not None


def test_a_trainers_loss_is_the_trainers(tmp_path):
    with pytest.raises(InputError, match="set them in the Trainer"):
        fedfm.federate(trainer(tmp_path, bert()), partition={"clients": 2}, loss=cross_entropy)


def test_a_model_that_returns_its_loss_needs_no_trainer(tmp_path):
    model = bert()
    result = fedfm.federate(model, train=texts(), collate=Pad(), partition={"clients": 2}, test=texts(20, 1), rounds=1,
                            out=tmp_path / "run", local={"name": "adam"}, run={"workers": 1})  # fmt: skip
    assert result["accuracy"] is not None
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["model"]["classes"] == ["LABEL_0", "LABEL_1", "LABEL_2"]


def test_a_users_loss_is_never_computed_by_kernels_for_another_loss(tmp_path, monkeypatch):
    from peft import LoraConfig, get_peft_model

    from fedfm.models.quiet import quiet
    from fedfm.training import packed

    monkeypatch.setattr(packed, "train", None)  # it computes cross-entropy, whatever the loss
    with quiet():
        net = get_peft_model(bert(), LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"]))
    seen = []

    def objective(module, batch):
        seen.append(len(batch["labels"]))
        return module(**batch).loss * 2

    settings = {"train": texts(), "collate": Pad(), "objective": objective, "loss": None}
    result = federate(net, rounds=1, out=tmp_path / "run", **settings)
    assert result["excluded"] == []
    assert seen


# --- notebooks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_run_inside_an_event_loop_and_a_thread(tmp_path, workers):
    from small import experiment

    tables = experiment(tmp_path, run={"workers": workers})
    got = [fedfm.run(tables, tmp_path / "plain")]

    async def cell():  # a notebook's cell runs while its loop does
        return fedfm.run(tables, tmp_path / "loop")

    got.append(asyncio.run(cell()))
    thread = threading.Thread(target=lambda: got.append(fedfm.run(tables, tmp_path / "thread")))
    thread.start()
    thread.join()
    assert len({r["params_sha256"] for r in got}) == 1
    assert len(got) == 3


def test_public_names_are_importable_from_the_package():
    for name in fedfm.__all__:
        assert getattr(fedfm, name) is not None
    assert callable(fedfm.federate)
    assert issubclass(fedfm.Method, Method)
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        fedfm.nothing_of_that_name  # noqa: B018


@pytest.mark.parametrize("to", ["torch", "peft"])
def test_the_card_of_an_exported_own_module_has_code_that_loads_it(tmp_path, to):
    from peft import LoraConfig, PeftModel, get_peft_model

    net = get_peft_model(network(), LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"]))
    federate(net, test=data(30, 1), out=tmp_path / "run")
    fedfm.export(tmp_path / "run", to, tmp_path / "out", given=net)
    card = (tmp_path / "out/README.md").read_text()
    names = {}
    exec(card.split("```python\n")[1].split("```")[0].replace("FOLDER", str(tmp_path / "out")), names)
    if to == "torch":
        again = get_peft_model(network(), LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"]))
        again.load_state_dict(names["weights"])
    else:
        assert any("lora_B" in name for name in names["weights"])
        again = PeftModel.from_pretrained(network(), str(tmp_path / "out"))
    rows = torch.ones(2, next(net.parameters()).shape[1])
    torch.testing.assert_close(again.eval()(rows), net.eval()(rows))


def test_an_export_has_the_adapter_that_the_module_uses_under_any_name(tmp_path, capsys):
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    net = get_peft_model(network(), config, adapter_name="first")
    net.add_adapter("second", config)
    net.set_adapter("second")
    federate(net, test=data(30, 1), out=tmp_path / "run")
    fedfm.export(tmp_path / "run", "peft", tmp_path / "out", given=net)
    assert '"first" is not written' in capsys.readouterr().err
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    again = PeftModel.from_pretrained(network(), str(tmp_path / "out"))
    rows = torch.randn(4, next(net.parameters()).shape[1])
    torch.testing.assert_close(again.eval()(rows), net.eval()(rows))


def test_adapters_that_are_used_together_are_not_written_as_one(tmp_path):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    net = get_peft_model(network(), config)
    net.add_adapter("second", config)
    net.base_model.set_adapter(["default", "second"])
    federate(net, test=data(30, 1), out=tmp_path / "run")
    with pytest.raises(InputError, match=r'--to peft: "default", "second" are used together, expected one adapter'):
        fedfm.export(tmp_path / "run", "peft", tmp_path / "other", given=net)
