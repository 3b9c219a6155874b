"""Names: a function that acts is a verb, and a value is a noun; a bare participle is neither."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fedfm"
SCRIPTS = ("benchmarks", "campaign", "docs", "examples", "release", "reproduce")
ALLOWED = Path(__file__).with_name("participles.txt")
NOUNS = {"bed", "embed", "exceed", "feed", "need", "red", "seed", "shed", "speed"}
IRREGULAR = re.compile(
    "(?:fore|mi[s]|over|re|un|under|with)?"
    "(?:begun|broken|brought|built|caught|chosen|dealt|done|drawn|fallen|felt|found|frozen|given|gone|grown|heard|held|"
    "hidden|kept|known|laid|led|left|lent|lost|made|meant|met|paid|ridden|said|seen|sent|shapen|shown|sold|spent|spoilt|"
    "stood|taken|taught|thought|thrown|told|won|worn|written)"
)


def is_participle(name: str) -> bool:
    """Whether a name is a single participle, as ``told`` or ``_folded``."""
    word = name.strip("_")
    return "_" not in word and word not in NOUNS and bool(IRREGULAR.fullmatch(word) or re.fullmatch("[a-z]+ed", word))


def functions(folder: Path) -> list[str]:
    """``file name`` of every function in a folder, also of methods and nested functions."""
    return [
        f"{path.relative_to(folder)} {name}"
        for path in folder.rglob("*.py")
        for name in re.findall(r"^[ \t]*(?:async )?def (\w+)", path.read_text(encoding="utf-8"), re.M)
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("told", True),
        ("_folded", True),
        ("__seen", True),
        ("_unmet", True),
        ("fold", False),
        ("seed", False),
        ("is_locked", False),
    ],
)
def test_a_bare_participle_is_recognised(name, expected):
    assert is_participle(name) is expected


def test_no_function_is_a_bare_participle():
    lines = ALLOWED.read_text(encoding="utf-8").splitlines()
    allowed = {line for line in lines if line and not line.startswith("#")}
    every = functions(SOURCE)
    found = [function for function in every if is_participle(function.split()[1])]
    assert not set(found) - allowed, "name it by a verb if it acts, by a noun if it is a value"
    assert not allowed - set(found), f"these are gone: remove them from {ALLOWED.name}"
    assert len(found) <= 0.01 * len(every)


def test_no_function_of_a_script_is_a_bare_participle():
    found = [name for script in SCRIPTS for name in functions(ROOT / script) if is_participle(name.split()[1])]
    assert not found, "name it by a verb if it acts, by a noun if it is a value"
