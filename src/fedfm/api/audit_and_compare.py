"""Audit, compare and report finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfm.runtime.progress import Progress
from fedfm.runtime.progress_bar import Bar
from fedfm.runtime.runs_below import each_run

if TYPE_CHECKING:
    from fedfm.audits.finding import Finding


def audit(
    run: str | Path,
    attacks: str | Sequence[str] = (),
    *,
    progress: Progress | None = None,
    given: Any = None,
    time_limit: float | None = None,
) -> list[Finding]:
    """Attack a finished run. The findings are also written to its ``audit.json``, manifest and report.

    Args:
        attacks: name or names of attacks [all cheap ones that apply].
        given: only for a run of ``fedfm.federate``: a dict of federate's arguments with its module, rows and loss.
        progress: its ``notice`` receives messages; by default they go to stderr.
        time_limit: seconds after which the audit ends; a notice names the attacks that were not run. An attack that has
            begun is interrupted only if the audit runs in the main thread.

    Raises:
        InputError: there is no finished run, or a named attack does not apply.
        RunError: the time limit was reached before the first finding.
    """
    from fedfm.audits.audit import perform_within
    from fedfm.audits.steps import command
    from fedfm.reports import html

    named = [attacks] if isinstance(attacks, str) else attacks
    notice = (progress or Bar()).notice
    done = perform_within(time_limit, run, named, notice, given=given)
    if done.left_out:
        notice(f"the time limit was reached; for the other attacks run: {command(run, done.left_out)}")
    html.renew(Path(run))
    return done.findings


def compare(*runs: str | Path | Sequence[str | Path], out: str | Path | None = None) -> str:
    """Compare runs in a text table, and with ``out`` also on a page.

    Args:
        runs: directories of runs, lists of them, or folders that contain several runs.

    Raises:
        InputError: no run is given, a file is missing or invalid, or ``out`` cannot be written.
    """
    from fedfm.reports import compare as pages

    given = ([run] if isinstance(run, str | Path) else run for run in runs)
    paths = each_run(Path(run) for several in given for run in several)
    if out is not None:
        pages.write(paths, Path(out))
    return pages.table(paths)


def report(run: str | Path) -> Path:
    """Write the ``report.html`` of a run; returns its path.

    Args:
        run: directory of the run, which may be unfinished.

    Raises:
        InputError: there is no run.
    """
    from fedfm.reports import html

    return html.write(Path(run))
