"""The documents contain no number that the code can count, and name every member of a list."""

import re
from pathlib import Path

import pytest

from fedfm.aggregation._secagg_keys import degree, least_of
from fedfm.aggregation.secure import Secure
from fedfm.config.registry import available, ours
from fedfm.config.run_spec import ENGINES
from fedfm.core import storage
from fedfm.core.client import MAX_WEIGHT
from fedfm.core.federation import MAX_NORM
from fedfm.engines.flower import run_config
from fedfm.privacy.exposure import WORDS
from fedfm.sites.request_log import MISFITS

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent.name != "results"),
]
NUMBER = (
    r"(?:\d+|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|twenty)"
)
COUNTED = re.compile(rf"\b{NUMBER} (?:\w+ )?(?:packages|engines|extras|methods|audits|attacks|aggregations)\b", re.I)
ALLOWED = {"30 methods"}  # checked below


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_neither_speaks_of_this_release_nor_counts_by_hand(page):
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert not re.search(r"\b(this|the present|the current) (release|version)\b", text, re.I)
    assert set(COUNTED.findall(text)) <= ALLOWED


def test_the_check_sees_what_is_counted():
    text = "fifteen packages, three engines, 7 of 11 extras, ten methods, four robust aggregations, one engine"
    assert COUNTED.findall(text) == [
        "fifteen packages",
        "three engines",
        "11 extras",
        "ten methods",
        "four robust aggregations",
    ]


def test_the_readme_is_right_that_there_are_more_than_30_methods():
    assert "more than 30 methods" in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert len(ours("methods")) > 30


def test_the_threat_model_has_the_limits_of_the_code():
    text = " ".join((ROOT / "docs/threat-model.md").read_text(encoding="utf-8").split())
    whole = [n for n in range(3, 100) if degree(0, n) == n - 1]
    assert f"with {whole[0]} to {whole[-1]} clients all of them" in text
    assert whole == [*range(whole[0], whole[-1] + 1)]
    gone = {n: n - least_of(Secure().threshold, n) for n in (3, 5, 10)}
    assert gone == {3: 0, 5: 1, 10: 3}
    assert "of three clients none, of five one, of ten three" in text
    assert MISFITS == 5
    assert "after five different hellos that do not fit" in text
    assert (run_config.LONGEST, storage.LONGEST, MAX_WEIGHT, MAX_NORM) == (1 << 20, 8 << 20, 1e9, 1e15)
    for limit in ("at most 1 MiB; it is parsed", "logs stop at 8 MiB", "(up to 10^9)", "a norm above 1e15"):
        assert limit in text


def first_cells(page, heading):
    """The first cells of the rows in the table with these column titles."""
    part = page.read_text(encoding="utf-8").partition(f"\n| {heading} ")[2]
    rows = part.partition("\n\n")[0].splitlines()[2:]
    return [row.strip("| ").split(" | ")[0] for row in rows]


def test_who_sees_what_has_one_row_for_each_method():
    named = [
        re.split(r", (?:masked|permuted|decentralised)", cell)[0]
        for cell in first_cells(REFERENCE / "who-sees-what.md", "method")
    ]
    named = [name for cell in dict.fromkeys(named) for name in cell.split(", ")]
    assert sorted(named) == sorted(ours("methods"))


def test_the_engines_the_words_and_the_attacks_are_all_there():
    assert [
        re.sub(r"[`()]| \(default\)", "", c).split()[0] for c in first_cells(REFERENCE / "engines.md", "engine")
    ] == list(ENGINES)
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert all(f"`{word}`" in text for word in WORDS)
    attacks = (ROOT / "docs/how-to/attacks.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in attacks for kind in ("attacks", "aggregation") for name in available(kind))
