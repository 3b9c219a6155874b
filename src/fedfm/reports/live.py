"""The report of a run that is not finished, with a line on what happens now, for ``fedfm watch``."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from fedfm.core.capabilities import Private
from fedfm.privacy.accountant import Accountant
from fedfm.reports import html
from fedfm.reports.page import aside, page
from fedfm.reports.read import RunFiles, mapping, numeric, read, sequence
from fedfm.reports.text import NONE, count, esc, number
from fedfm.runtime import waiting_file
from fedfm.runtime.client_memory import Store
from fedfm.runtime.disclosure import rows_of
from fedfm.runtime.run_directory import Run

_NAMED = 10  # largest number of silos that a tile names
_HERE = ("local", "simulation")  # engines that compute the clients themselves


def render(path: Path, seconds: int) -> tuple[str, bool]:
    """The page of a run, and whether the run is finished. Nothing is written.

    Args:
        seconds: time until the page is loaded again.

    Raises:
        InputError: the folder has no run, or a file of it is damaged.
    """
    run = read(path, messages=False)
    return html.render(path, live="" if run.is_finished else _now(run, seconds)), run.is_finished


def notice(text: str) -> str:
    """A page for a run that cannot be shown at the moment."""
    return page("fedfm", f"<h1>fedfm</h1>{aside('No report at the moment', [text])}", [], "")


def _now(run: RunFiles, seconds: int) -> str:
    """What happens now: the round, the silos, the privacy spent so far."""
    planned = "" if run.planned_rounds is None else f" of {count(run.planned_rounds)}"
    at = datetime.datetime.now().astimezone().strftime("%H:%M:%S")
    tiles = [
        ("Round", f"{count(run.done_rounds)}{planned}", "done" if run.rounds else "preparing the first one"),
        *_silos(run),
        ("Epsilon spent", *_epsilon(run)),
    ]
    cells = "".join(f"<div><dt>{esc(a)}</dt><dd>{esc(b)}</dd><dd>{esc(c)}</dd></div>" for a, b, c in tiles)
    again = f"The run goes on. As of {at}; the page loads itself again every {seconds} seconds, until the run ends."
    return f'<div id="live" role="status"><p class="note">{again}</p><dl class="tiles">{cells}</dl></div>'


def _silos(run: RunFiles) -> list[tuple[str, str, str]]:
    """Tiles on the silos that have answered and on those for which the server waits."""
    engine, names = mapping(run.experiment.get("run")).get("engine"), sequence(run.manifest.get("clients"))
    waiting = waiting_file.read(run.path)
    if engine in _HERE:
        return [("Clients", count(len(names)), "computed on this machine"), ("Waited for", NONE, "no site is asked")]
    if waiting is None:
        return [("Silos connected", NONE, "no silo has been asked yet"), ("Waited for", NONE, "")]
    here = sorted({*waiting.asked} - {*waiting.missing})
    return [
        ("Silos that answered", count(len(here)), _names(here)),
        ("Waited for", count(len(waiting.missing)), _names(waiting.missing) if waiting.missing else "no silo"),
    ]


def _names(names: Sequence[str]) -> str:
    more = f" and {count(len(names) - _NAMED)} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _epsilon(files: RunFiles) -> tuple[str, str]:
    """The epsilon of everything released so far, and the epsilon after all planned rounds.

    The round that is computed now counts, since clients may have sent what it releases. What a method itself releases,
    and DP-SGD, count as a whole from the first round on.
    """
    planned = numeric(mapping(files.manifest.get("ledger")).get("epsilon"))
    if planned is None:
        asked = {"target_epsilon", "noise_multiplier"} & mapping(files.experiment.get("privacy")).keys()
        return NONE, "no round has begun" if asked else "nothing is claimed"
    if not files.rounds:
        return NONE, f"no round has begun; {number(planned)} for all rounds"
    run = Run.open(files.path)
    mechanism = run.experiment.aggregation.mechanism
    now = files.done_rounds + 1 if files.planned_rounds is None else min(files.done_rounds + 1, files.planned_rounds)
    begun = max(int(run.manifest["ledger"].get("begun", 0)), now)
    begun += mechanism.repeat_count(Store(run.path / "private", "server"))
    spent = Accountant()
    if isinstance(run.experiment.method, Private):
        run.experiment.method.spend(spent)
    mechanism.spend(spent, begun, rows_of(run))
    epsilon = number(spent.epsilon or 0.0)
    if epsilon == number(planned) and now != files.planned_rounds:
        return epsilon, "at most: all rounds are counted as a whole from the first on"
    return epsilon, f"with the round computed now, of {number(planned)} for all rounds"
