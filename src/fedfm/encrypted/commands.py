"""The commands of the encrypted package: ``fedfm distil``, and ``fedfm predict --engine deployment``."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfm.api.command_registry import Command, training_arguments
from fedfm.api.terminal import hint_for_epochs, hint_on_stop, say, tell

if TYPE_CHECKING:
    from fedfm.runtime.progress import Progress


def distil(args: Namespace) -> int:
    """Run ``fedfm distil``; return the exit code."""
    from fedfm.core.overrides import parse_overrides
    from fedfm.encrypted.student.distil import ABOUT, distil
    from fedfm.encrypted.student.distil_spec import Distillation
    from fedfm.encrypted.student.distil_table import table
    from fedfm.encrypted.student.folding import MOST_OUTSIDE, remedy
    from fedfm.runtime.step_bars import Epochs

    what = Distillation.load(args.experiment, parse_overrides(args.set))
    with hint_on_stop(lambda: hint_for_epochs(args, ABOUT)):
        result = distil(what, args.out, watcher=Epochs())
    if not result.get("outside", 0.0) <= MOST_OUTSIDE:
        text = f"{result['outside']:.2%} of the arguments are outside their intervals, more than {MOST_OUTSIDE:.1%}"
        tell(f"fedfm: {text}: encrypted runs refuse this student; {remedy(result['blocks'])}", sys.stderr)
    return say(args, result, table(result))


def predict_remote(path: Path, file: Path, progress: Progress) -> dict[str, Any]:
    """Run ``fedfm predict --engine deployment``; see :func:`fedfm.encrypted.remote_prediction.predict_remote`."""
    from fedfm.encrypted import remote_prediction

    return remote_prediction.predict_remote(path, file, progress)


def foundation_for(name: str) -> str:
    """For ``fedfm advise``; see :func:`fedfm.encrypted.advice.foundation_for`."""
    from fedfm.encrypted import advice

    return advice.foundation_for(name)


def readers() -> tuple[tuple[str, str], ...]:
    """For ``fedfm advise``: who reads what of a run on encrypted rows; see :mod:`fedfm.encrypted.advice`."""
    from fedfm.encrypted import advice

    return advice.READABLE


_DISTIL_EXAMPLES = """examples:
  fedfm distil student.toml --out student              compares teacher and student on held-out rows, block by block
  fedfm distil student.toml --out student              continues after a kill; the result has the same bits
  fedfm run exp.toml --set model.name=student          uses the student as an ordinary model, with any adaptation
  fedfm run exp.toml --set method.foundation=student   computes the student on encrypted rows (blindfed)

a distillation:
  [data]
  path = "auxiliary.npz"                               # rows of any domain, all on this machine
  [model]
  name = "nano-vit"                                    # a ViT, DeiT, I-JEPA or BERT: built in, a folder, a hub id
  [distil]
  epochs = [3, 15, 15]                                 # of the three stages: tame, states, outputs

A polynomial student has polynomials in place of softmax, LayerNorm and GELU. Its attention scores, variances and row
sums must stay in intervals where a polynomial of low degree is accurate. The first stage, tame, trains the model
with the exact functions so that these values fit; an interval that is too wide is refused. The other stages train with
polynomials to match the teacher's states and outputs. The output folder has config.json with the polynomials and their
intervals, model.safetensors, the image processor or tokenizer, and distil.json, which records how the student was made.
The folder has no head if the teacher's head is new for these classes.

If model.name is a polynomial student already, epochs = [0, 0, 0] trains nothing, but measures the intervals again on
the rows of [data]. Use this for rows that differ from the rows of the distillation.
"""

COMMANDS = (
    Command(
        "distil",
        distil,
        "make a model's polynomial student for encrypted rows, as a folder",
        _DISTIL_EXAMPLES,
        partial(training_arguments, table="distil"),
        json=True,
    ),
)
ACTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("predict", "deployment"): predict_remote,
    ("advise", "encrypted_rows"): foundation_for,
    ("advise", "readers"): readers,
}
