"""Notices of a prediction: rows that share an id, and no notice of the run that is repeated or no longer true."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_text
from fedfm.api.execute import run
from fedfm.api.predict import predict
from fedfm.config.experiment import Experiment


@pytest.mark.proof
def test_ids_that_rows_share_are_counted_and_the_trained_head_is_not_called_new(tmp_path: Path) -> None:
    bert = tiny_text.save_bert(tmp_path / "bert")
    rows = "".join(f"row {i} is {word},{word}\n" for i in range(10) for word in ("fish", "bird"))
    (tmp_path / "rows.csv").write_text("text,label\n" + rows)
    experiment = Experiment(
        data={"path": str(tmp_path / "rows.csv"), "partition": {"name": "iid", "clients": 2}},
        model={"name": str(bert), "max_length": 8},
        method={"name": "fedavg", "rounds": 1},
        run={"workers": 1},
    )
    run(experiment, tmp_path / "run")
    (tmp_path / "new.csv").write_text("id,text\na,a fish\na,a bird\nb,a cow\n")
    said = predict(tmp_path / "run", tmp_path / "new.csv")["warnings"]
    assert any("1 of 3 rows of" in text and 'have the id (column "id") of an earlier row' in text for text in said)
    assert not any("new head" in text for text in said)
