"""docs/reference/models.md states the results of the trials."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

import models_page

NO_ADAPTER = "refused: --to peft: adaptation 'full' makes no PEFT adapter: use hf or torch"


@pytest.mark.parametrize(
    ("outcome", "cell"),
    [
        ({"train": "holds", "predict": "holds", "hf": "holds", "peft": "holds"}, "C"),
        ({"train": "holds", "predict": "holds", "hf": "holds", "peft": NO_ADAPTER}, "C"),
        ({"train": "holds", "predict": "holds", "hf": "refused: why", "peft": "holds"}, "C\\*"),
        ({"train": "refused: why"}, ""),
        ({"train": "fails: why"}, "C fails"),
        ({"train": "holds", "predict": "holds", "hf": "fails: why", "peft": "holds"}, "C fails"),
    ],
)
def test_a_cell_is_what_came_of_the_trial(tmp_path, monkeypatch, outcome, cell):
    kept = {
        "versions": {"torch": "9.9"},
        "families": {"x": {"kind": "encoder", "trials": {"classification, full": outcome}}},
    }
    (tmp_path / "results.json").write_text(json.dumps(kept))
    monkeypatch.setattr(models_page, "RESULTS", tmp_path / "results.json")
    page = models_page.page()
    assert f"\n| x | {cell} |\n" in page
    assert "torch 9.9" in page
    assert ("`why`" in page) == ("why" in str(outcome))
