"""The subcommands ``fedfm advise`` and ``fedfm survey``: what to know before anybody trains."""

from __future__ import annotations

import json
import shlex
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.api.command_registry import Command, engine_argument, set_argument
from fedfm.api.terminal import hint_on_stop, say
from fedfm.cli.imports import quick_imports
from fedfm.core.text import visible

_WIDTH = 79


def advise(args: Namespace) -> int:
    """Run ``fedfm advise``; return the exit code."""
    with quick_imports():
        from fedfm.api.advise import advise
        from fedfm.core.overrides import parse_overrides

    changes = parse_overrides(args.set)
    asked = {"epsilon": args.epsilon, "delta": args.delta, "clip_norm": args.clip_norm, "seconds": args.seconds}
    result = advise(args.experiment, args.out, changes=changes, **asked)
    return say(args, result, lambda: "\n".join(_lines(result, args)))


def _lines(result: Mapping[str, Any], args: Namespace) -> list[str]:
    """The options as a table, and a paragraph about each."""
    from fedfm.reports.text import NBSP, duration, size

    lines = [f"{'option':<19}  {'seconds':>11}  {'bytes':>9}  {'epsilon':>7}  {'unit':<6}  the server reads"]
    for o in result["options"]:
        data = (">" if o["at_least"] else "") + size(o["bytes"])
        epsilon = "none" if o["epsilon"] is None else f"{o['epsilon']:.3g}"
        cells = f"{o['name']:<19}  {duration(o['seconds']):>11}  {data:>9}  {epsilon:>7}  {o['unit'] or '':<6}  "
        read = textwrap.wrap(visible(o["readable"]["server"]), max(_WIDTH - len(cells), 16))
        lines += [cells + read[0], *(" " * len(cells) + line for line in read[1:])]
    lines.append("")
    for o in result["options"]:
        lines += _paragraph(o, args)
    for o in result["refused"]:
        lines += [*_wrap(f"{o['name']}: {o['what']}"), *_wrap(f"not possible: {o['reason']}", 2), ""]
    return [line.replace(NBSP, " ") for line in lines]


def _paragraph(o: Mapping[str, Any], args: Namespace) -> list[str]:
    """What one option is, from what its figures follow, who reads what, and how to run it."""
    delta = f", delta = {o['delta']:g}" if o["delta"] is not None else ""
    lines = _wrap(f"{o['name']}: {o['what']}{delta}; rounds = {o['rounds']}")
    lines += _wrap(f"seconds and bytes: {o['basis']}", 2)
    lines += [line for who, what in o["readable"].items() for line in _wrap(f"{who}: {what}", 2)]
    if (found := o["accuracy"]) is not None:
        half = "" if found["half"] is None else f" ± {found['half']}"
        clear = "" if found["clear"] is None else f", {found['clear']} % in the clear"
        where = f"{found['of']}, {found['clients']} clients, {found['page']}, row {found['row']}"
        lines += _wrap(f"accuracy there, no forecast for your rows: {found['accuracy']}{half} %{clear} ({where})", 2)
    lines += [line for note in o["notes"] for line in _wrap(note, 2)]
    if o["file"] is not None:
        lines += _wrap(f"fedfm run {shlex.quote(o['file'])}", 2)
    elif o["set"] is None:
        lines += _wrap("fedfm advise ... --out DIR writes its file", 2)
    else:
        words = [f"--set {shlex.quote(f'{key}={_toml(value)}')}" for key, value in o["set"].items()]
        lines += _wrap(" ".join(["fedfm run", shlex.quote(str(args.experiment)), *words]), 2)
    return [*lines, ""]


def _toml(value: Any) -> str:
    """A value as ``--set`` takes it: a bare word, a number, or TOML."""
    from fedfm.core.toml_text import to_toml

    if isinstance(value, str):
        return value
    return (
        to_toml({"v": {"v": value}}).partition("v = ")[2].strip() if isinstance(value, Mapping) else json.dumps(value)
    )


def _wrap(text: str, indent: int = 0) -> list[str]:
    first, more = " " * indent, " " * (indent + 2)
    return textwrap.wrap(
        visible(text),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=more,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _advise_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("experiment", type=Path, help="TOML file")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write each option there as an experiment, NAME.toml")
    set_argument(parser)
    parser.add_argument("--epsilon", type=float, help="epsilon of the options with noise [the experiment's, else 8]")
    parser.add_argument("--delta", type=float, help="delta of the options with noise [the experiment's, else 1e-5]")
    parser.add_argument(
        "--clip-norm", type=float, metavar="C", help="bound of an update or a row's gradient [the experiment's, else 1]"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="about how long the rehearsal of one option may take [5]"
    )


def survey(args: Namespace) -> int:
    """Run ``fedfm survey``; return the exit code."""
    with quick_imports():
        from fedfm.api.survey import survey
        from fedfm.cli.running import hint_for_rounds, watch
        from fedfm.core.overrides import parse_overrides, refuse_doubles
        from fedfm.reports.survey import text
        from fedfm.reports.text import NBSP

    changes = parse_overrides(args.set)
    refuse_doubles(changes, {"run.engine": ("--engine", args.engine)})
    if args.engine:
        changes["run.engine"] = args.engine
    asked = {"epsilon": args.epsilon, "delta": args.delta, "reference": args.reference}
    progress = watch()
    with hint_on_stop(lambda: hint_for_rounds(progress)):
        result = survey(args.experiment, args.out, changes=changes, progress=progress, **asked)
    return say(args, result, lambda: f"{text(result)}\n\n{Path(result['run']) / 'survey.json'}".replace(NBSP, " "))


def _survey_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("experiment", type=Path, help="TOML file; its [method] is replaced")
    parser.add_argument("--out", type=Path, help="run directory [runs/<name>-<time>]")
    set_argument(parser, "change a key, such as method.min_count")
    engine_argument(parser)
    parser.add_argument("--epsilon", type=float, help="noise for single rows [that of [privacy], else none]")
    parser.add_argument("--delta", type=float, help="delta of the noise [that of [privacy], else 1e-5]")
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="FILE",
        help="survey.json of other rows by the same model, e.g. of its training data [that in the model's folder]",
    )


_SURVEY_EXAMPLES = """examples:
  fedfm survey exp.toml                                what the silos hold, by one round of sums; nothing is trained
  fedfm survey exp.toml --epsilon 1                    with noise for single rows, which each silo's ledger counts
  fedfm survey exp.toml --set privacy.aggregator=secagg      by secure sums: the server sees no silo's part
  fedfm survey exp.toml --set method.by_silo=false     ask for sums only, also without secure aggregation
  fedfm survey exp.toml --format json | tail -1        {"run": ..., "silos": ..., "counts": ..., "risks": ...}
  fedfm show survey                                    its keys: bins, thresholds, what is told to whom

A silo answers once, if its terms allow it, and its ledger has one line. Without secure aggregation and [privacy] the
server sees each silo's sums and reports distances by silo.
"""
_ADVISE_EXAMPLES = """examples:
  fedfm advise exp.toml                                the protections that this experiment could have, with prices
  fedfm advise exp.toml --epsilon 2 --out options      the same at epsilon 2; each option as options/NAME.toml
  fedfm run options/secure_sums.toml                   run one of them
  fedfm advise exp.toml --format json | tail -1        {"options": [{"name": ..., "seconds": ...}], "refused": [...]}

options: clear; secure_sums (the server sees sums); client_noise, secure_client_noise (a client with all its rows is
hidden); record_noise (a row is hidden: DP-SGD, or the method's own noise); one_round_sums (analytic);
one_round_noise (fedpft); encrypted_rows (blindfed, if the model is a polynomial student or has one).

Each option is rehearsed on this machine with all clients, at most three rounds, and as many rows as --seconds allows.
Bytes are counted in the rehearsal, seconds measured, and both continued to all rounds and rows; every option says what
was measured. Epsilon is the accountant's for all rounds. Encrypted rows are planned, not rehearsed. An accuracy is
shown only where this project measured it on rows of the same kind, width and number of classes.
"""

COMMANDS = (
    Command(
        "advise",
        advise,
        "set out the protections of an experiment with their price",
        _ADVISE_EXAMPLES,
        _advise_arguments,
        json=True,
    ),
    Command(
        "survey",
        survey,
        "ask the silos what they hold, by one round of sums",
        _SURVEY_EXAMPLES,
        _survey_arguments,
        json=True,
    ),
)
