"""Global metrics put together from the clients' pieces: the same as on all rows at once, and the same everywhere."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfm.aggregation.base import Aggregator
from fedfm.core.capabilities import Predictor
from fedfm.core.federation import Federation
from fedfm.data.table import ClientRows, FederatedData, Table
from fedfm.engines.interruption import Interrupted
from fedfm.engines.local import engine
from fedfm.engines.local.engine import Judges, LocalLink
from fedfm.errors import E_REFUSED
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.runtime import predictions
from fedfm.runtime.client import Silos
from fedfm.runtime.evaluation import Evaluation
from fedfm.runtime.judge import judge
from fedfm.runtime.partitioned import REST, Partitioned
from fedfm.training import packed
from fedfm.training.packed import predictor

CLASSES = ("ant", "bee", "cow")
METHOD = FedAvg()


def population(own: list[list[int]], adaptation: str = "lora", rows: int = 24) -> Partitioned:
    """``rows`` test pictures; client k is judged on those that ``own[k]`` names."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (rows + 3, 8, 8, 1), dtype=np.uint8)
    split = np.array(["test"] * rows + ["train"] * 3)
    table = Table("image", pictures, rng.integers(0, 3, rows + 3), CLASSES, split)
    none = np.zeros(0, dtype=np.int64)
    clients = {f"c{k}": ClientRows(none + rows, none, np.array(i, dtype=np.int64)) for k, i in enumerate(own)}
    spec = ModelSpec("nano-vit", adaptation=AdaptationSpec(adaptation))
    model = load_model(spec, classes=CLASSES, kind="image")
    model.predictor = packed.predict  # as of a run
    return Partitioned(FederatedData(table, clients, np.arange(rows)), model)


def start(everyone: Partitioned) -> Params:
    generator = torch.Generator().manual_seed(0)
    return everyone.model.params().map(lambda t: t + 0.1 * torch.randn(t.shape, generator=generator))


def link_of(everyone: Partitioned, folder: Path, workers: int, **more: Any) -> LocalLink:
    return LocalLink(Judges(METHOD, Aggregator(), everyone, memory=folder), workers=workers, **more)


DEALT = {
    "all": [[0, 5, 7, 20], list(range(8, 20)), [1, 2, 3, 4, 6, 21, 22, 23]],
    "some are nobody's": [[3, 4], [], [9, 10, 11]],
    "two hold the same": [[1, 2, 3], [3, 4, 5], [6]],
    "one holds others": [[1, 2], [24, 25], [3]],
    "nobody holds any": [[], []],
}


@pytest.mark.parametrize("own", DEALT.values(), ids=DEALT)
def test_pieces_are_the_test_rows_once(own: list[list[int]]) -> None:
    everyone = population(own)
    pieces = everyone.pieces
    assert sorted(np.concatenate(list(pieces.values())).tolist()) == list(range(24))
    for name, index in pieces.items():
        assert name == REST or index.tolist() == own[int(name[1:])]
        assert len(everyone.piece(name)) == len(index) > 0
        assert name == REST or everyone.piece(name) is everyone.data(name).test


@pytest.mark.parametrize("own", DEALT.values(), ids=DEALT)
def test_the_same_as_on_all_rows_at_once(own: list[list[int]]) -> None:
    everyone = population(own)
    w = start(everyone)
    found = judge(everyone, METHOD)
    assert found is not None
    expected = predictions.scores(METHOD, everyone.model, w, everyone.test)
    loss, total = expected.pop("loss"), expected.pop("loss_of_rows")
    scores = found(w)
    assert scores.pop("loss") == pytest.approx(loss, rel=1e-6)
    assert scores.pop("loss_of_rows") == pytest.approx(total, rel=1e-6)
    assert loss > 0
    counts = np.array(scores.pop("confusion"))
    assert counts.sum() == 24
    assert np.trace(counts) / 24 == pytest.approx(expected["accuracy"])
    assert scores == expected


@pytest.mark.sample("all")
@pytest.mark.parametrize("own", [DEALT["all"], DEALT["some are nobody's"]], ids=["all", "some are nobody's"])
def test_scores_have_the_same_bits_wherever_the_parts_are_evaluated(own: list[list[int]], tmp_path: Path) -> None:
    found = []
    for workers in (0, 1, 2, 3):
        everyone = population(own)
        w = start(everyone)
        if not workers:  # as on engines whose clients are elsewhere
            found.append([judge(everyone, METHOD)(v) for v in (w, 0.5 * w)])
            continue
        link = link_of(everyone, tmp_path / str(workers), workers)
        fed = Federation(link, model=everyone.model, aggregator=Aggregator())
        here = judge(everyone, METHOD, link.judge)
        numbers = []
        for t, v in enumerate((w, 0.5 * w)):
            fed.begin(t)
            fed.ask(Evaluation(METHOD).evaluate, w=v, part="test", counted=False)
            numbers.append(here(v))
        found.append(numbers)
        link.close()
    assert found[0][0] != found[0][1]
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_that_clients_have_scored_are_not_scored_again(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone = population(DEALT["some are nobody's"])
    log = tmp_path / "log"
    log.touch()
    compute = predictor.CachedLogits._compute

    def noted(self: Any, p: torch.Tensor, rows: Any) -> torch.Tensor:
        with open(log, "a") as file:  # workers are processes
            file.write(f"{len(rows)}\n")
        return compute(self, p, rows)

    monkeypatch.setattr(predictor.CachedLogits, "_compute", noted)
    link = link_of(everyone, tmp_path, workers)
    fed, w = Federation(link, model=everyone.model, aggregator=Aggregator()), start(everyone)
    fed.begin(1)
    fed.ask(Evaluation(METHOD).evaluate, w=w, part="test", counted=False)
    judge(everyone, METHOD, link.judge)(w)
    link.close()
    assert sorted(map(int, log.read_text().split())) == [2, 3, 19]  # two clients' rows and the rest


def test_what_workers_cannot_judge_is_said_once_and_judged_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone, lines = population(DEALT["all"]), list[str]()
    link, w, server = link_of(everyone, tmp_path, 2, notice=lines.append), start(everyone), os.getpid()
    compute = engine.logits

    def fails(method: Any, model: Any, w: Params, rows: Any) -> torch.Tensor:
        if os.getpid() != server and len(rows) < 12:
            raise KeyError("no such layer")
        return compute(method, model, w, rows)

    monkeypatch.setattr(engine, "logits", fails)
    pids = []
    for v in (w, 0.5 * w):
        assert judge(everyone, METHOD, link.judge)(v) == judge(everyone, METHOD)(v)
        assert link._pool is not None
        pids.append([worker.pid for worker in link._pool._workers])
    link.close()
    assert pids[0] == pids[1]  # an error ends no worker
    (line,) = lines
    assert "2 of 3 parts" in line
    assert "KeyError: 'no such layer'" in line


@pytest.mark.proof
def test_a_worker_that_dies_leaves_its_piece_to_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = population(DEALT["all"])
    link, w, server = link_of(everyone, tmp_path, 2), start(everyone), os.getpid()
    answer = Judges.answer
    monkeypatch.setattr(Judges, "answer", lambda *a: os._exit(3) if os.getpid() != server else answer(*a))
    assert judge(everyone, METHOD, link.judge)(w) == judge(everyone, METHOD)(w)
    link.close()


def test_a_stop_is_heeded(tmp_path: Path) -> None:
    everyone = population(DEALT["all"])
    link = link_of(everyone, tmp_path, 2, stop=lambda: True)
    with pytest.raises(Interrupted):
        link.judge(start(everyone))
    link.close()


@dataclass(frozen=True)
class Liar(Predictor, FedAvg):
    """A method that says one class of every row that it is shown, and more of it the more rows these are."""

    def logits(self, model: Any, w: Params, rows: Any) -> torch.Tensor:
        return torch.full((len(rows), len(model.classes)), 0.0).index_fill_(1, torch.tensor([0]), float(len(rows)))


def test_other_ways_of_judging_see_all_rows_at_once() -> None:
    everyone = population(DEALT["all"])
    found = judge(everyone, Liar())(start(everyone))
    wrong = float((everyone.test.labels != 0).float().mean())
    assert found["loss"] == pytest.approx(24 * wrong, rel=1e-6)  # 24 rows at once
    head = population(DEALT["all"], "head")
    w = head.model.params()
    scores = judge(head, METHOD)(w)
    assert {k: v for k, v in scores.items() if k != "confusion"} == predictions.scores(METHOD, head.model, w, head.test)
    assert "pieces" not in vars(head)
    empty = population([[], []])
    empty.federated = replace(empty.federated, test=empty.federated.test[:0])
    assert judge(empty, METHOD) is None


def test_silos_of_other_links_know_nothing_of_it(tmp_path: Path) -> None:
    everyone = population(DEALT["all"])
    request = engine.Request("c0", engine.JUDGE, {"w": start(everyone)}, 1, 1)
    (fault,) = Silos(METHOD, Aggregator(), everyone, memory=tmp_path).answer([request])
    assert fault.code == E_REFUSED
