"""Ranks follow the order of the clients' names: a notice lists them, and a client that leaves changes no other rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedfm
from fedfm.api.leave import leave
from fedfm.audits import shadow_runs
from small import pictures, tiny_vit

QUIET = fedfm.Progress()


def tables(folder: Path, ranks: list[int], clients: int = 3, **method: Any) -> dict[str, Any]:
    return {
        "data": {"path": str(pictures(folder)), "partition": {"name": "iid", "clients": clients}},
        "model": {"name": str(tiny_vit(folder)), "adaptation": {"name": "lora", "rank": 4}},
        "method": {"name": "raflora", "rounds": 1, "ranks": ranks, "local": {"batch_size": 64}, **method},
        "run": {"workers": 1},
    }


def rank_notices(folder: Path) -> list[str]:
    return [text for text in fedfm.load_run(folder).manifest["notices"] if "by client" in text]


@pytest.mark.parametrize(
    "method", [{}, {"name": "flora"}, {"name": "fedex_lora"}, {"name": "fedbip", "space": "product"}]
)
def test_the_ranks_of_the_clients_are_reported(method, tmp_path):
    fedfm.run(tables(tmp_path, [1, 2, 4, 3], **method), tmp_path / "run", progress=QUIET)
    names = '"client-00 1", "client-01 2", "client-02 4"'
    assert rank_notices(tmp_path / "run") == [
        f"method.ranks by client: {names}; the last 1 of 4 ranks belong to no client"
    ]


def test_equal_ranks_give_no_notice(tmp_path):
    fedfm.run(tables(tmp_path, [2]), tmp_path / "run", progress=QUIET)
    assert rank_notices(tmp_path / "run") == []


@pytest.mark.sample("ranks0-left0", "ranks2-left2")
@pytest.mark.parametrize(("ranks", "left"), [([1, 2, 4], [1, 4]), ([1, 2], [1, 1]), ([3], [3])])
def test_a_client_that_leaves_moves_no_rank(ranks, left, tmp_path, monkeypatch):
    monkeypatch.setattr(shadow_runs, "BUDGET", 0.0)
    fedfm.run(tables(tmp_path, ranks), tmp_path / "run", progress=QUIET)
    leave(tmp_path / "run", "client-01", tmp_path / "rest", retrain=True, progress=QUIET)
    assert list(fedfm.load_run(tmp_path / "rest").experiment.method.ranks) == left
