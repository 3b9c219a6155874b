"""BlindFed's Table 4: the paper's counts of numbers, by construction, and by hand."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "reproduce" / "blindfed"


@pytest.fixture
def table4(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("table4", FOLDER / "table4.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("page", None)


def test_the_papers_counts(table4):
    d, tokens, classes, rank = 768, 577, 10, 8
    head = classes * (d + 1)
    block = 2 * rank * d + 2 * rank * tokens + 1  # two maps, two of the mixer, alpha
    layer = 12 * d * d + 13 * d  # attention 4 d^2 + 4 d, MLP 8 d^2 + 5 d, two norms 4 d
    whole = (
        12 * layer + (16 * 16 * 3 + 1) * d + (tokens + 1) * d + 2 * d + head
    )  # patches, positions, class token, norm
    rows = {row["ViT-B/16, 384 x 384"]: row for row in table4.papers()}
    assert {name: row["numbers"] for name, row in rows.items()} == {
        "linear": head,
        "full": whole,
        "ours": 12 * block + head,
    }
    assert all(row["M = 2^20"] == row["printed, M"] for row in rows.values())


def test_counts_that_are_not_the_papers_are_refused(table4, monkeypatch):
    monkeypatch.setattr(table4, "RANK", 4)
    with pytest.raises(SystemExit, match=r"ours: .* the paper prints 0.2536"):
        table4.papers()
