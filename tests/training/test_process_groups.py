"""A client that trains with several processes: the same numbers, less memory, and what happens when a rank fails."""

import json
import subprocess
import sys
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import fedfm
import tiny_text
from fedfm.config.experiment import Experiment
from fedfm.core.client import Client, ClientData, Terms
from fedfm.data.table import Table
from fedfm.errors import InputError, RunError
from fedfm.linalg.threads import torch_threads
from fedfm.models import quantised
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training import SGD, AdamW, scheduler
from fedfm.training.local_job import Job
from fedfm.training.sharded import group_model
from fedfm.training.sharded.group_model import load_group_model
from fedfm.training.sharded.settings import GroupSettings

pytestmark = pytest.mark.proof
LAUNCHER = Path(__file__).parents[1] / "forked_ranks.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_text.save_all(tmp_path_factory.mktemp("groups"))


@pytest.fixture(autouse=True, scope="module")
def fork_server():
    """What imports PyTorch and transformers once for all groups of this file."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        place = f"{folder}/socket"
        server = subprocess.Popen([sys.executable, LAUNCHER, "serve", place], stdout=subprocess.PIPE)
        assert server.stdout.readline() == b"ready\n"
        patch.setenv("FORKED_RANKS", place)
        yield
        server.kill()
        server.communicate()


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield


def texts(folder, count=22):
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()[:count]]
    inputs = np.array([row["text"] * (1 + i % 2) for i, row in enumerate(rows)], dtype=object)
    classes = tuple(sorted({row["label"] for row in rows}))
    labels = np.array([classes.index(row["label"]) for row in rows])
    return Table("text", inputs, labels, classes, np.array([""] * count))


@contextmanager
def quietly():
    """Without the warnings that a group is started again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def launched(count, fault, folder, limit=30.0):
    return GroupSettings(count, f"{sys.executable} {LAUNCHER} {count} {fault} {folder}", limit, device="cpu")


class Pair:
    """The same model in one process and at a group."""

    def __init__(self, folder, settings, adaptation, task="language_modelling", **keys):
        self.table = texts(folder)
        about = {"classes": self.table.classes if task == "classification" else (), "kind": "text", "seed": 3}
        spec = ModelSpec(
            str(folder / "llama"),
            task=task,
            adaptation=AdaptationSpec(**adaptation),
            device="cpu",
            max_length=24,
            **keys,
        )
        self.one, self.group = load_model(spec, **about), load_group_model(spec, settings, **about)
        self.start = self.group.params()
        assert self.start.sha256() == self.one.params().sha256()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.group.close()

    def rounds(self, model, local, terms=lambda w: Terms(), count=2):
        """Parameters and losses after some rounds, and the scores then."""
        rows = model.encode(model.prepare(self.table, range(len(self.table))))
        w, losses, lines = self.start, [], []
        for t in range(count):
            client = Client("a", ClientData(*[lambda: rows] * 3), model, {}, 7 + t, log=lines.append)
            job = Job(client, w, local, terms(w))
            (w,) = scheduler.trainer_for(model, local, job.terms.only)([job])
            losses.append(client.metrics["loss"])
        model.load(w)
        return w, losses, model.evaluate(rows)["loss"], lines

    def distance(self, local, terms=lambda w: Terms()):
        """The largest difference of parameters and losses."""
        found = [self.rounds(model, local, terms) for model in (self.one, self.group)]
        (a, loss_a, score_a, _), (b, loss_b, score_b, _) = found
        assert (a - self.start).norm() > 1e-3
        apart = [(a[name] - b[name]).abs().max().item() for name in a]
        return max(*apart, *np.abs(np.subtract(loss_a, loss_b)), abs(score_a - score_b))


def proximal(w):
    return Terms(mu=0.1, correction=w * 0.01)


def some(w):
    return Terms(only=tuple(w)[:2])


@pytest.mark.parametrize(
    ("adaptation", "task", "local", "terms"),
    [
        (
            {"name": "lora", "rank": 3},
            "language_modelling",
            AdamW(learning_rate=0.01, batch_size=8, micro_batch=2),
            None,
        ),
        ({"name": "full"}, "language_modelling", SGD(learning_rate=0.05, batch_size=7, max_grad_norm=0.5), proximal),
        ({"name": "full"}, "classification", AdamW(learning_rate=0.01, batch_size=8, micro_batch=3), None),
        ({"name": "top_layers", "layers": 1}, "classification", SGD(learning_rate=0.05, momentum=0.9), some),
        ({"name": "head"}, "classification", SGD(learning_rate=0.1, batch_size=8), None),
    ],
    ids=["lora", "full", "full-classifier", "top_layers", "head"],
)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.each_value
def test_ranks_equal_one_process(folder, ranks, adaptation, task, local, terms):
    if local.micro_batch == 0 and ranks == 3 and task == "language_modelling":
        pytest.skip("shown by two ranks")
    with Pair(folder, launched(ranks, "none", folder), adaptation, task) as pair:
        assert pair.distance(local, terms or (lambda w: Terms())) < 1e-5
        held = [rank["bytes"] for rank in pair.group.ranks_hold]
        whole = sum(p.nbytes for p in pair.one.module.parameters())
        assert whole <= sum(held) < 1.1 * whole
        assert max(held) < 1.3 * whole / ranks


def test_reduced_precision_and_checkpointing(folder):
    """Frozen weights in bfloat16, the adapter in float32, and blocks that are computed twice."""
    keys = {"dtype": "bfloat16", "gradient_checkpointing": True}
    with Pair(folder, launched(2, "none", folder), {"name": "lora", "rank": 2}, **keys) as pair:
        assert pair.distance(SGD(learning_rate=0.05, batch_size=8, micro_batch=2)) < 1e-4


def save_wide(folder):
    """A LLaMA whose maps are multiples of 64 wide, which bitsandbytes needs on a CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    torch.manual_seed(5)
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
    about = {"vocab_size": 40, "max_position_embeddings": 40, "initializer_range": 0.1}
    special = {"pad_token_id": 0, "bos_token_id": 4, "eos_token_id": 3}
    LlamaForCausalLM(LlamaConfig(**shape, **about, **special)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.release), 3])
def test_four_bits_are_cut_by_rows(folder, tmp_path, ranks):
    """With the codes and scales of one process, also where the last rank has fewer rows."""
    pytest.importorskip("bitsandbytes")
    path = save_wide(tmp_path / "llama")
    for file in (folder / "llama").glob("token*"):
        (path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "rows.jsonl").write_bytes((folder / "rows.jsonl").read_bytes())
    keys = {"quantization": "nf4", "gradient_checkpointing": ranks == 2}
    with Pair(tmp_path, launched(ranks, "none", folder), {"name": "lora", "rank": 2}, **keys) as pair:
        assert quantised.kind_of(pair.one.module) == "nf4"
        assert pair.distance(SGD(learning_rate=0.05, batch_size=8, micro_batch=2)) < 1e-5
        held = [rank["bytes"] for rank in pair.group.ranks_hold]
        assert max(held) < 1.4 * quantised.nbytes(pair.one.module) / ranks


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("killed", "rank 1 of 2 has ended; the group is started again, and the request is repeated"),
        ("stopped", "rank 1 of 2 hangs: no progress within 15 s"),
        pytest.param("asleep", "of 2 hangs: no progress within 15 s", marks=pytest.mark.release),
        ("memory", "rank 1 of 2: OutOfMemoryError: of the device: the group is started again, with half as many rows"),
    ],
)
def test_the_group_recovers(folder, tmp_path, fault, says):
    local = AdamW(learning_rate=0.01, batch_size=8, micro_batch=4)
    with (
        Pair(folder, launched(2, fault, tmp_path, 15.0), {"name": "lora", "rank": 2}) as pair,
        quietly(),
    ):
        w, losses, _, lines = pair.rounds(pair.group, local)
        assert len(lines) == 1, lines
        assert says in lines[0]
        right = loop_of(pair, local)
        assert max((w[name] - right[0][name]).abs().max() for name in w) < (1e-5 if fault != "memory" else 1e-3)
        assert losses == pytest.approx(right[1], abs=1e-5)


def loop_of(pair, local):
    w, losses, _, _ = pair.rounds(pair.one, local)
    return w, losses


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("killed", RunError, None),
        ("error", RunError, "rank 1 of 2: ValueError: a defect"),
        ("version", InputError, "rank 1 on .* has fedfm 0.0, and this process .*; install the same version"),
        ("gpus", InputError, "has 1 GPUs for 2 processes"),
        ("exit", InputError, "launch ended with exit status 3 before it was ready: no licence"),
        ("weights", InputError, "the weights of llama are .*: copy the same folder to all machines"),
    ],
)
def test_one_line_says_what_is_wrong(folder, tmp_path, monkeypatch, fault, kind, says):
    settings = launched(2, "killed\\ again" if fault == "killed" else fault, tmp_path)
    if fault == "gpus":
        settings = GroupSettings(2, settings.launch, device="auto")
    if fault == "weights":
        monkeypatch.chdir(folder)
        tiny_text.save_gpt2(tmp_path / "llama")
        spec = "llama"
    else:
        spec = str(folder / "llama")
    about = {"classes": (), "kind": "text", "seed": 3}
    model = load_group_model(ModelSpec(spec, task="language_modelling", device="cpu"), settings, **about)
    rows = model.prepare(texts(folder), range(8))
    client = Client("a", ClientData(*[lambda: rows] * 3), model, {}, 7)
    with quietly(), pytest.raises(kind, match=says or "has ended") as found:
        model.train_jobs([Job(client, model.params(), SGD(learning_rate=0.1))])
    assert "\n" not in str(found.value)
    assert str(found.value).startswith("run.processes_per_client: ")


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        ("no-such-launcher --now", "launch: no-such-launcher cannot be started: No such file or directory"),
        ("false", "launch ended with exit status 1 before it was ready"),
        (f"{sys.executable} -c pass", "launch ended with exit status 0 before it was ready"),
    ],
)
def test_a_launch_line_that_fails(folder, launch, says):
    spec = ModelSpec(str(folder / "llama"), task="language_modelling", device="cpu")
    model = load_group_model(spec, GroupSettings(2, launch, 3.0, key="processes"), classes=(), kind="text")
    with quietly(), pytest.raises((InputError, RunError), match=says):
        model.begin()


def test_torchrun_starts_a_group(folder):
    line = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 --master-port 0"
    with Pair(folder, GroupSettings(2, line, device="cpu"), {"name": "lora", "rank": 2}) as pair:
        assert pair.distance(SGD(learning_rate=0.05, batch_size=8, micro_batch=2)) < 1e-5


def test_a_run_and_its_resume_equal_one_process(folder, tmp_path):
    """The ranks are started here; the run ends after a round, and goes on with new ranks."""
    local = {"micro_batch": 2}
    one = tiny_text.tables(folder, "fedavg", "llama", 2, clients=2, local=local)
    two = tiny_text.tables(folder, "fedavg", "llama", 1, clients=2, local=local, run={"processes_per_client": 2})
    a = fedfm.run(one, tmp_path / "one", progress=fedfm.Progress())
    fedfm.run(two, tmp_path / "two", progress=fedfm.Progress())
    b = fedfm.resume(tmp_path / "two", rounds=2, progress=fedfm.Progress())
    device = json.loads((tmp_path / "two" / "manifest.json").read_text())["device"]
    assert device["processes"] == 2
    assert device["name"].endswith(", 2 processes")
    assert b["loss"] == pytest.approx(a["loss"], abs=1e-5)
    ends = [fedfm.load_run(tmp_path / name) for name in ("one", "two")]
    methods = [run.experiment.method for run in ends]
    w, v = (of.params_for(run.state(of.state_type), "") for run, of in zip(ends, methods, strict=True))
    assert max((w[name] - v[name]).abs().max() for name in w) < 1e-5


def answering(folder, tmp_path):
    """A model whose folder asks for a repetition penalty, and seven instructions."""
    (tmp_path / "llama").mkdir()
    for file in (folder / "llama").iterdir():
        (tmp_path / "llama" / file.name).write_bytes(file.read_bytes())
    settings = tmp_path / "llama" / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"repetition_penalty": 1.7}))
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()[:7]]
    rows = [{"instruction": line["text"], "output": line["label"], "split": line["split"]} for line in lines]
    for name, count in (("some", 7), ("three", 3)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[:count]))
    tables = tiny_text.tables(folder, "fedavg", "llama", 1, clients=1, local={"micro_batch": 2})
    tables["model"] |= {"name": str(tmp_path / "llama"), "task": "instruction", "template": "plain"}
    tables["model"] |= {"answer_tokens": 4, "max_length": 24}
    tables["data"]["path"] = str(tmp_path / "some.jsonl")
    return tables


def test_answers_are_those_of_one_process(folder, tmp_path):
    """Of three prompts, one rank has two and the other has one, which it may answer with fewer passes."""
    tables = answering(folder, tmp_path)
    tables["run"]["processes_per_client"] = 2
    result = fedfm.run(tables, tmp_path / "run", progress=fedfm.Progress())
    tables["run"].pop("processes_per_client")
    assert fedfm.run(tables, tmp_path / "one", progress=fedfm.Progress())["loss"] == pytest.approx(result["loss"])
    a, b, c = (
        fedfm.predict(tmp_path / run, tmp_path / "three.jsonl", processes=count, progress=fedfm.Progress())
        for run, count in (("run", 1), ("run", None), ("one", 2))
    )
    assert a["answers"] == b["answers"] == c["answers"]
    assert all(a["answers"])
    assert any("repetition_penalty = 1.7" in text for text in b["warnings"])
    for key in ("loss", "perplexity"):
        assert b[key] == pytest.approx(a[key], rel=1e-5)
        assert c[key] == pytest.approx(a[key], rel=1e-3)  # of another run


def test_classes_and_probabilities_are_those_of_one_process(folder, tmp_path):
    tables = tiny_text.tables(folder, "fedavg", "bert", 1, clients=1, run={"processes_per_client": 2})
    fedfm.run(tables, tmp_path / "run", progress=fedfm.Progress())
    found = [fedfm.predict(tmp_path / "run", folder / "rows.jsonl", processes=count) for count in (1, None, 3)]
    for other in found[1:]:
        assert other["predictions"] == found[0]["predictions"]
        assert np.abs(np.subtract(other["probabilities"], found[0]["probabilities"])).max() < 1e-5
    with pytest.raises(InputError, match="--processes 0: expected at least 1"):
        fedfm.predict(tmp_path / "run", folder / "rows.jsonl", processes=0)


def test_rows_are_sent_once_and_kept_within_a_bound(folder, monkeypatch):
    local = SGD(learning_rate=0.05, batch_size=8, micro_batch=2)
    with Pair(folder, launched(2, "none", folder), {"name": "lora", "rank": 2}) as pair:
        sent, tell, at = [], pair.group.group.tell_encoded, pair.group.group
        monkeypatch.setattr(at, "tell_encoded", lambda message: [sent.append(len(message)), tell(message)])
        w, *_ = pair.rounds(pair.group, local, count=3)
        assert len(sent) == 1
        other = pair.group.prepare(pair.table, range(5))
        first = pair.group.prepare(pair.table, range(len(pair.table)))
        monkeypatch.setattr(group_model, "KEPT", sent[0])  # there is no room for both
        for rows in (other, other, first, other):
            found = pair.group.evaluate(rows)["loss"]
        assert len(sent) == 4
        pair.one.load(w)
        assert found == pytest.approx(pair.one.evaluate(other)["loss"], abs=1e-5)


def test_a_silo_with_processes_answers_like_any_other(folder, tmp_path):
    from fedfm.core.messages import Request
    from fedfm.runtime.client import Silos
    from fedfm.runtime.own_rows import OwnRows, populate

    tables = tiny_text.tables(folder, "fedavg", "llama", local={"micro_batch": 2})
    tables["data"], tables["run"]["processes_per_client"] = {"classes": [], "kind": "passages"}, 2
    tables["run"] |= {"engine": "deployment", "workers": 0}
    experiment = Experiment.from_dict(tables)
    deltas = []
    for processes in (1, 2):
        rows = OwnRows("a", str(folder / "rows.jsonl"), models=(str(folder / "llama"),), processes=processes)
        if processes == 1:
            with pytest.raises(InputError, match="this silo's file has processes = 1"):
                populate(rows, experiment, ())
            tables["run"].pop("processes_per_client")
        found = populate(rows, Experiment.from_dict(tables) if processes == 1 else experiment, ())
        silos = Silos(experiment.method, experiment.aggregation, found, memory=tmp_path / str(processes), seed=1)
        w = found.model.params()
        (reply,) = silos.answer([Request("a", "train.FedAvg_train", {"w": w}, 1, 0)])
        deltas.append(reply.delta)
    found.model.close()
    assert max((deltas[0][name] - deltas[1][name]).abs().max() for name in deltas[0]) < 1e-5
