"""Each test row is scored once by a model, even if it is a client's own row and a global one.

Personal methods: each client's model is judged once a round, on its own rows; on all rows only at the end. One model
for all: the figures of all test rows are those of the clients' rows together.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedfm
import tiny_text
from fedfm.models.model import Model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save_all(tmp_path_factory.mktemp("text"))


@pytest.mark.sample("local-6", "fedbip-9", "fedavg-4")
@pytest.mark.parametrize(
    ("method", "last"),
    [("local", 6), ("fedamp", 9), ("ditto", 9), ("fedbip", 9), ("fedavg", 4)],  # 9: also the starts of the last pass
)
def test_a_model_is_scored_once_a_round(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, last: int
) -> None:
    judged: list[int] = []
    evaluate = Model.evaluate

    def counted(self: Model, rows: Any, *more: Any) -> dict[str, Any]:
        judged.append(len(rows))
        return evaluate(self, rows, *more)

    monkeypatch.setattr(Model, "evaluate", counted)
    tables = tiny_text.tables(folder, method, "llama")
    found = fedfm.run(tables, tmp_path / "run")
    assert not found["excluded"]
    each_round = 3 + (method == "fedavg")  # the clients; one model for all also on the global test rows, whose joined
    assert len(judged) == 2 * each_round + last  # texts are cut otherwise than each client's. Rounds 0, 1 and the last
    rows = max(judged)  # of the global test rows
    assert judged.count(rows) == 3  # one model in three evaluations, or three models in the last one


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each forward pass of a language model without gradients."""
    from transformers import LlamaForCausalLM

    read: list[int] = []
    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)
    def counted(self: Any, *args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled() and named.get("input_ids") is not None:
            read.append(len(named["input_ids"]))
        return forward(self, *args, **named)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    return read


def pairs(folder: Path, task: str) -> Path:
    """The texts as instructions, or with a better and a worse answer."""
    path = folder / f"{task}.jsonl"
    if not path.exists():
        with path.open("w") as file:
            for i, line in enumerate(map(json.loads, (folder / "rows.jsonl").read_text().splitlines())):
                _, *others = line["text"].split()
                texts = (line["text"], " ".join(others[-1 - i % 3 :]), " ".join(others[: 1 + i % 3]))
                names = ("instruction", "output") if task == "instruction" else ("prompt", "chosen", "rejected")
                file.write(json.dumps(dict(zip(names, texts, strict=False)) | {"split": line["split"]}) + "\n")
    return path


def experiment(folder: Path, task: str, **keys: Any) -> dict[str, Any]:
    tables = tiny_text.tables(folder, "fedavg", "llama", **keys)
    if task != "language_modelling":
        tables["data"]["path"] = str(pairs(folder, task))
        tables["model"] |= {"task": task, "template": "plain", "answer_tokens": 3}
    if task == "preference":
        del tables["model"]["answer_tokens"]
    return tables


@pytest.mark.parametrize(
    ("task", "clients", "rows", "passes"),
    [
        ("language_modelling", 1, 3, 3),  # 18 texts, joined and cut
        ("instruction", 3, 6, 3 * 3),
        ("preference", 3, 2 * 6, 3 * 3 + 3),  # of two texts each; once under the reference
    ],
)
def test_each_test_row_is_read_once_an_evaluation(
    folder: Path, tmp_path: Path, rows_read: list[int], task: str, clients: int, rows: int, passes: int
) -> None:
    tables = experiment(folder, task, clients=clients)
    if task == "instruction":
        tables["model"]["answer_tokens"] = 0  # answers are written in many passes
    fedfm.run(tables, tmp_path / "run")  # judged after rounds 0, 1 and 2
    assert rows_read.count(rows) == passes
    assert clients == 1 or clients * rows not in rows_read  # all of them at once


@pytest.mark.sample("run1")
@pytest.mark.parametrize("run", [{}, {"workers": 2}, {"wire": True}, {"transport": "int8"}])
def test_both_figures_are_those_of_the_rows(folder: Path, tmp_path: Path, run: dict[str, Any]) -> None:
    """Compared with the final model's scores of all test rows at once."""
    tables = experiment(folder, "instruction", run=run)
    result = fedfm.run(tables, tmp_path / "run")
    test = tmp_path / "test.jsonl"
    lines = [json.loads(line) for line in pairs(folder, "instruction").read_text().splitlines()]
    test.write_text("".join(json.dumps(line) + "\n" for line in lines if line["split"] == "test"))
    found = fedfm.predict(tmp_path / "run", test)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert result["loss"] == line["loss"]
    for name in ("loss", "perplexity", "rouge_1"):
        assert line[name] == pytest.approx(found[name], rel=1e-6), name
    assert line["local_loss"] != line["loss"]  # a mean over clients, and one over tokens


@pytest.mark.parametrize("task", ["language_modelling", "instruction", "preference"])
def test_scores_of_parts_are_those_of_all_rows(folder: Path, tmp_path: Path, task: str) -> None:
    """Three clients and one have the same start model and the same test rows."""
    found = []
    for clients in (1, 3):
        fedfm.run(experiment(folder, task, clients=clients, rounds=0), tmp_path / f"{clients}")
        found.append(json.loads((tmp_path / f"{clients}" / "metrics.jsonl").read_text().splitlines()[-1]))
    names = {
        "language_modelling": ("loss", "perplexity", "global_accuracy"),
        "instruction": ("loss", "perplexity", "global_accuracy", "rouge_1", "answers_cut"),
        "preference": ("loss", "global_accuracy", "reward_margin"),
    }
    for name in names[task]:
        assert found[0][name] is not None
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-6, abs=1e-9), name
    assert found[0]["local_loss"] == found[0]["loss"]  # one client: the same rows, hence the same bits


def test_a_users_module_with_one_client_is_scored_once(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 5, generator=generator)
    y = (x[:, 0] > 0).long()
    read: list[int] = []

    class Network(torch.nn.Linear):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled():
                read.append(len(features))
            return super().forward(features)

    data = torch.utils.data.TensorDataset(x, y)
    test = torch.utils.data.TensorDataset(x[:24], y[:24])
    result = fedfm.federate(
        Network(5, 2),
        train=data,
        test=test,
        loss=torch.nn.functional.cross_entropy,
        partition={"name": "iid", "clients": 1},
        rounds=2,
        run={"workers": 1},
        out=tmp_path / "run",
    )
    assert result["local_accuracy"] == result["global_accuracy"]
    assert read.count(24) == 3


@pytest.mark.parametrize("run", [{}, {"workers": 2}, {"wire": True}])
def test_classes_without_cached_logits_with_one_client(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: dict[str, Any]
) -> None:
    """The scores are the client's; the last round's counts by class are of a pass over all rows, and fit them."""
    passes: list[int] = []
    predict = Model.predict

    def counted(self: Model, rows: Any, *more: Any) -> torch.Tensor:
        passes.append(len(rows))
        return predict(self, rows, *more)

    monkeypatch.setattr(Model, "predict", counted)
    tables = tiny_text.tables(folder, "fedavg", clients=1, lora={"dropout": 0.1}, run=run)
    result = fedfm.run(tables, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert passes == ([18] if run.get("workers") else [18] * 4)  # rounds 0, 1 and twice 2; two workers are not counted
    for line in lines:
        assert line["loss"] == line["local_loss"]
        assert line["global_accuracy"] == line["local_accuracy"]
        assert line["balanced_accuracy"] is not None
        assert line["macro_f1"] is not None
    assert [line["round"] for line in lines if "confusion" in line] == [2]
    table = torch.tensor(lines[-1]["confusion"]).double()
    recall = table.diagonal() / table.sum(1)
    f1 = 2 * table.diagonal() / (table.sum(0) + table.sum(1))
    assert result["accuracy"] == pytest.approx(table.trace().item() / 18)
    assert result["balanced_accuracy"] == pytest.approx(recall.mean().item())
    assert result["macro_f1"] == pytest.approx(f1.mean().item())


def test_running_text_of_several_clients_is_other_rows_for_each(folder: Path, tmp_path: Path) -> None:
    """Why it is judged twice: no mean of the scores of the clients' blocks is the score of the blocks of all texts."""
    found = {}
    for clients in (1, 3):
        fedfm.run(experiment(folder, "language_modelling", clients=clients, rounds=0), tmp_path / f"{clients}")
        found[clients] = json.loads((tmp_path / f"{clients}" / "metrics.jsonl").read_text().splitlines()[-1])
    assert found[3]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)  # whoever holds the texts
    assert found[3]["global_accuracy"] == found[1]["global_accuracy"] > 0
    assert set(found[3]["client_accuracy"].values()) == {0.0}  # the one token that it gets right follows others there
