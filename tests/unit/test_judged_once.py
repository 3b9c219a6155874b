"""Personal methods: each client's model is judged once a round, on its own rows; on all rows only at the end."""

from pathlib import Path
from typing import Any

import pytest

import fedfm
import tiny_text
from fedfm.models.model import Model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save_all(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize(
    ("method", "last"),
    [("local", 6), ("fedamp", 9), ("ditto", 9), ("fedbip", 9), ("fedavg", 4)],  # 9: also the starts of the last pass
)
def test_once_a_round(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, last: int) -> None:
    judged: list[int] = []
    evaluate = Model.evaluate

    def counted(self: Model, rows: Any, *more: Any) -> dict[str, Any]:
        judged.append(len(rows))
        return evaluate(self, rows, *more)

    monkeypatch.setattr(Model, "evaluate", counted)
    tables = tiny_text.tables(folder, method, "llama")
    found = fedfm.run(tables, tmp_path / "run")
    assert not found["excluded"]
    each_round = 3 + (method == "fedavg")  # the clients; one model for all also on the global test rows
    assert len(judged) == 2 * each_round + last  # rounds 0 and 1, and the last one
    rows = max(judged)  # of the global test rows
    assert judged.count(rows) == 3  # one model in three evaluations, or three models in the last one
