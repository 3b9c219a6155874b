"""docs/reference/models.md, from what `make test-models` found: tests/zoo/results.json."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "tests" / "zoo" / "results.json"
HOLDS, REFUSED, FAILS = "holds", "refused", "fails"
TITLES = {
    "encoder": "Encoders of text",
    "decoder": "Language models",
    "encoder-decoder": "Encoder-decoders of text",
    "vision": "Models of pictures",
    "two encoders": "Pairs of encoders",
    "language model that sees": "Language models that see, asked in text",
}
LETTERS = {
    "classification": "C",
    "language_modelling": "L",
    "instruction": "I",
    "preference": "P",
    "zero_shot": "Z",
}
_MANY = 6  # families that a line names

INTRODUCTION = """# Models

<!-- Written by docs/generate.py from tests/zoo/results.json, which `make test-models` writes. -->

fedfm takes any model of transformers that fits its tasks. This page shows what was tried: tiny models with random
weights, {families} families, with {libraries}.
Two clients train each for one round, `fedfm predict` reads a few rows, and `fedfm export` writes the model.
transformers and PEFT then load the export without fedfm. A letter says that all of this holds:

- every trained tensor has changed, or a notice names those that get no gradient;
- the export gives the probabilities or the loss of `fedfm predict` within 1e-4, and the same answers.

| letter | task |
|---|---|
{letters}

A letter with `*` stands for a model that trains and predicts, and that the export to transformers, or of LoRA to PEFT,
refuses. `fails` says that fedfm has a fault there, `?` that it was not tried. What is in no cell is refused in one
line; the reasons are below each table. `lora` takes fedfm's default targets, `all-linear` all linear maps of
the blocks; `nf4` quantises the frozen base. Only `lora` and `ffa_lora` make adapters of PEFT.

The command is `make test-models`. It says nothing of accuracy: a large checkpoint of a family may need other settings.
"""


def page() -> str:
    """The page."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    families: dict[str, Any] = found["families"]
    libraries = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    letters = "\n".join(f"| {letter} | `{task}` |" for task, letter in LETTERS.items())
    parts = [INTRODUCTION.format(families=len(families), libraries=libraries, letters=letters)]
    for kind, title in TITLES.items():
        if of := {name: _trials(about) for name, about in families.items() if about["kind"] == kind}:
            parts += [f"## {title}\n", _table(of), *_lists(of)]
    return "\n".join(parts)


Trials = dict[tuple[str, str], dict[str, str]]  # (task, adaptation) -> step -> what came of it


def _trials(about: dict[str, Any]) -> Trials:
    parted = {tuple(name.split(", ", 1)): outcome for name, outcome in about["trials"].items()}
    return {(task, adaptation): outcome for (task, adaptation), outcome in parted.items()}


def _table(families: dict[str, Trials]) -> str:
    tried = list(dict.fromkeys(trial for trials in families.values() for trial in trials))
    columns = list(dict.fromkeys(by for _, by in tried))
    lines = ["| family | " + " | ".join(f"`{by}`" for by in columns) + " |", "|" + "---|" * (len(columns) + 1)]
    for name, trials in families.items():
        cells = [_cell({task: trials.get((task, by)) for task in LETTERS if (task, by) in tried}) for by in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(tasks: dict[str, dict[str, str] | None]) -> str:
    """Letters of the tasks that hold, of those that fail, and of those that were not tried."""
    parts: dict[str, list[str]] = {"": [], " fails": [], "?": []}
    for task, outcome in tasks.items():
        if outcome is None:
            parts["?"].append(LETTERS[task])
        elif _first(outcome, FAILS):
            parts[" fails"].append(LETTERS[task])
        elif outcome.get("predict") == HOLDS:
            starred = _first(outcome, REFUSED) and not _no_adapter(outcome)
            parts[""].append(LETTERS[task] + ("\\*" if starred else ""))
    return ", ".join(" ".join(letters) + what for what, letters in parts.items() if letters)


def _first(outcome: dict[str, str], what: str) -> str:
    """Step and text of the first step that was refused, or that fails; "" where none was."""
    return next((f"{step}: {text[len(what) + 2 :]}" for step, text in outcome.items() if text.startswith(what)), "")


def _no_adapter(outcome: dict[str, str]) -> bool:
    """Whether all that was refused is PEFT's form of what is not an adapter."""
    return not outcome.get("hf", REFUSED).startswith(REFUSED) and "makes no PEFT adapter" in outcome.get("peft", "")


def _lists(families: dict[str, Trials]) -> list[str]:
    """What is refused and what fails, by reason."""
    parts = []
    for what, title in ((REFUSED, "What is refused:"), (FAILS, "What fails:")):
        by: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for name, trials in families.items():
            for (_, adaptation), outcome in trials.items():
                if (text := _first(outcome, what)) and not (what == REFUSED and _no_adapter(outcome)):
                    by[_general(text, name)][adaptation].add(name)
        if by:
            parts.append(f"{title}\n")
            parts.append("\n".join(_line(reason, where, len(families)) for reason, where in sorted(by.items())) + "\n")
    return parts


def _general(text: str, family: str) -> str:
    """A reason without what is of one family alone."""
    for own, general in (
        (r"has no \w+ for", "has no class of it for"),
        (r": it has [\w, ]+$", ""),
        (r"<class '[\w.]+'>", "of it"),
        (r"\d+ of \d+ trained", "some trained"),
        (rf"'{re.escape(family)}'", "FAMILY"),
        (r"differ by up to \S+", "differ"),
    ):
        text = re.sub(own, general, text)
    return text.strip()


def _line(reason: str, where: dict[str, set[str]], most: int) -> str:
    """A reason, its adaptations and its families."""
    names = sorted(set().union(*where.values()))
    several = "all families" if len(names) == most else f"{len(names)} families, such as {', '.join(names[:_MANY])}"
    who = several if len(names) > _MANY or len(names) == most else ", ".join(names)
    step, _, text = reason.partition(": ")
    return f"- {step}, {', '.join(f'`{by}`' for by in where)}: `{text.replace('`', chr(39))}` ({who})"
