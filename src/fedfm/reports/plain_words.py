"""Explain a run's epsilon in two sentences, and adapt sentences about its private files."""

from __future__ import annotations

import math
import re
from pathlib import Path

from fedfm.reports.read import RunFiles, numeric
from fedfm.reports.text import number

_NAME = r"(?:[\w-]+/(?:[\w.-]+)?|[\w-]+\.(?:jsonl|json|npz|html))"
_SUBJECT = re.compile(rf"{_NAME}(?:(?:, | and ){_NAME})*")
_MEMORIES = re.compile(r" holds clients' memories and keys(, if the run has any)?")
_LARGEST = 700.0  # largest epsilon with a finite e^epsilon


def _content_of(private: Path) -> list[str]:
    """The kinds of files in a run's private folder, in words; a lock and ``data.json`` are not listed."""
    files = [path.relative_to(private) for path in private.rglob("*") if path.is_file()]
    kinds = {
        "clients' memories": lambda p: p.parts[0] == "memory" and "+kept" not in p.parts and p.suffix != ".secret",
        "the server's memory": lambda p: p.parts[0] == "server" and p.suffix != ".secret",
        "keys": lambda p: p.suffix in (".secret", ".pem", ".key") or p.name.endswith("_key"),
        "checkpoints": lambda p: p.parts[0] == "checkpoint",
        "the programs and silos of a deployment": lambda p: p.parts[0] == "deployment",
        "messages": lambda p: p.parts[0] in ("folder", "answered", "underway"),
        "logs": lambda p: p.suffix == ".log",
    }
    return [words for words, of in kinds.items() if any(map(of, files))]


def reading(run: RunFiles) -> str:
    """Explain in two sentences what a run's epsilon means for one person; "" without a finite epsilon.

    Group privacy: a mechanism that is (epsilon, delta)-private for one row is (k epsilon, delta (e^(k epsilon) - 1) /
    (e^epsilon - 1))-private for k rows of one person.
    """
    found = run.guarantee
    epsilon = numeric(found["epsilon"]) if found else None
    if found is None or epsilon is None or not math.isfinite(epsilon):
        return ""
    delta, factor = numeric(found["delta"]) or 0.0, math.exp(min(epsilon, _LARGEST))
    twice = f"epsilon = {number(2 * epsilon)}"
    twice += f" at delta = {number(min((1 + factor) * delta, 1.0))}" if delta else ""
    but = f", except with a probability of about {number(delta)}" if delta else ""
    if found["unit"] == "client":
        what = "all rows of one client"
        more = (
            f"A person with rows at k clients spends k times as much as a person at one client (two clients: {twice})"
        )
    else:
        what = "one given row"
        more = f"A person with k rows spends k times as much as a person with one row (two rows: {twice})"
    return (
        f"For anyone who sees all that the run released, the odds that {what} took part change by at most a factor of "
        f"e^epsilon = {number(factor)}{but}. {more}; epsilon does not cover test rows, names of clients and classes, "
        "times, and other runs on the same rows."
    )


def present(run: RunFiles, sentence: str) -> str:
    """Shorten a sentence about files so that it names only files that the run has; "" if the run has none of them."""
    subject = _SUBJECT.match(sentence)
    if subject is None:
        return sentence
    there = [name for name in re.findall(_NAME, subject[0]) if (run.path / name).exists()]
    if not there:
        return ""
    rest = sentence[subject.end() :]
    if there[0] == "private/" and (claim := _MEMORIES.match(rest)):
        held = _content_of(run.path / "private")
        if not held and "private/data.json" not in rest:
            return "private/ holds a lock, but no clients' memories or keys."
        rest = " holds " + (_enumerate_words(held) if held else "no memories or keys") + rest[claim.end() :]
    if not (run.path / "dossier.html").exists():
        rest = rest.replace("report.html and dossier.html state", "report.html states")
    *first, last = there
    glue = ", " if rest.startswith(" and ") else " and "
    return (glue.join([", ".join(first), last]) if first else last) + rest


def _enumerate_words(words: list[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
