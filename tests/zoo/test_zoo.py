"""Every family with every task and adaptation trains, predicts and exports, or is refused in fedfm's own words. What
once worked, by results.json, is not refused.

`make test-models` runs all; `make test` and `make test-proofs` some families that differ in kind: every task with LoRA,
and one with the top layers.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from zoo import making
from zoo.families import FAMILIES
from zoo.trial import FAILS, HOLDS, STEPS, Trial, trials

RESULTS = json.loads((Path(__file__).parent / "results.json").read_text("utf-8"))["families"]
KNOWN: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "known_failures.json").read_text("utf-8"))
OFTEN = ("bert", "llama", "mixtral", "mamba2", "bart", "swin", "resnet", "clip")  # in `make test`, too
SOMETIMES = ("bert", "mixtral", "swin", "resnet")  # other tests of `make test` train them


def _cases():
    for family, about in FAMILIES.items():
        for task, adaptation in trials(about.kind):
            often = adaptation == "lora" or (task, adaptation) == ("classification", "top_layers")
            marks = [] if family in OFTEN and often else [pytest.mark.models]
            if not marks and family in SOMETIMES:
                marks = [pytest.mark.proof]
            if reason := KNOWN.get(family, {}).get(f"{task}, {adaptation}"):
                marks.append(pytest.mark.xfail(strict=True, reason=reason))
            yield pytest.param(family, task, adaptation, marks=marks, id=f"{family}-{task}-{adaptation}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a family's model, made at its first use."""

    @functools.cache
    def made(family):
        return making.write(FAMILIES[family], tmp_path_factory.mktemp("models") / "model")

    return made


@pytest.mark.filterwarnings("ignore")  # of libraries, about models of these sizes
@pytest.mark.parametrize(("family", "task", "adaptation"), list(_cases()))
def test_a_family_works_or_is_refused(family, task, adaptation, folder, rows_folder, tmp_path, record_property):
    about = FAMILIES[family]
    outcome = Trial(about.kind, folder(family), task, adaptation, rows_folder, tmp_path).run()
    record_property("trial", [family, about.kind, f"{task}, {adaptation}", outcome])
    assert outcome
    assert set(outcome) <= set(STEPS)
    assert not [f"{step} {what}" for step, what in outcome.items() if what.startswith(FAILS)]
    before = RESULTS.get(family, {}).get("trials", {}).get(f"{task}, {adaptation}", {})
    assert {step for step, what in before.items() if what == HOLDS} <= {
        s for s, what in outcome.items() if what == HOLDS
    }


def test_known_failures_are_of_trials_that_are_there():
    there = {(name, f"{task}, {by}") for name, about in FAMILIES.items() for task, by in trials(about.kind)}
    assert {(name, trial) for name, of in KNOWN.items() for trial in of} <= there
