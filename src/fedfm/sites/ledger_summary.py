"""Summary of a silo's ledger: the messages that left the silo, by run and in total, and the rest of its budgets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfm.core.text import visible
from fedfm.errors import InputError
from fedfm.privacy.policy import Budget
from fedfm.sites import silo_config
from fedfm.sites.ledger import Entry, Totals, entries
from fedfm.sites.ledger_mark import lacks_lines, mark_of

_WHAT = silo_config.EXPOSED | {"hello": "hello (its name, versions and model)"}
_HEAD = ("run", "method", "rounds", "messages", "bytes", "epsilon", "what the server got")


def report(path: Path) -> dict[str, Any]:
    """Return the output of ``fedfm silo show``.

    Args:
        path: the silo's file.

    Raises:
        InputError: the silo's file is wrong, or its ledger is damaged or an older copy.
    """
    silo = silo_config.load(path)
    left = entries(Path(silo.ledger))
    mark = mark_of(path.resolve().parent / ".fedfm", Path(silo.ledger))
    if Path(silo.ledger).exists() and lacks_lines(Path(silo.ledger).read_bytes(), mark):
        raise InputError(
            f"{silo.ledger} lacks lines that it had, as an older copy does, so the silo answers nothing: put the "
            f"newest copy back; to go on without these lines remove {mark}"
        )
    runs = [_sums(silo.budget, [e for e in left if e.run == run]) for run in dict.fromkeys(e.run for e in left)]
    total = _sums(silo.budget, left)
    limits = {key: getattr(silo.budget, key) for key in ("epsilon", "bytes", "rounds")}
    budget = {
        key: {"spent": total[key], "limit": limit, "left": _rest(limit, total[key])}
        for key, limit in limits.items()
        if limit is not None
    }
    named = [{"run": e.run, "method": e.method, "experiment": e.experiment} for e in _firsts(left)]
    found = [one | sums for one, sums in zip(named, runs, strict=True)]
    return {"name": silo.name, "ledger": silo.ledger, "runs": found, "total": total, "budget": budget}


def _firsts(left: Sequence[Entry]) -> list[Entry]:
    return [*{e.run: e for e in reversed(left)}.values()][::-1]


def _sums(budget: Budget, left: Sequence[Entry]) -> dict[str, Any]:
    """Return sums over entries; ``epsilon`` is None if nothing bounds the epsilon of some entry."""
    totals = Totals()
    for entry in left:
        totals.add(entry)
    epsilon = totals.epsilon(budget.delta)
    what = Counter((e.exposes, e.form) for e in left)
    return {
        "rounds": totals.rounds,
        "messages": totals.messages,
        "bytes": totals.bytes,
        "failures": totals.faults,
        "asked_again": totals.again,
        "epsilon": epsilon if epsilon < math.inf else None,
        "delta": budget.delta,
        "claimed": any(e.cost.by == "server" for e in left),
        "left": [{"exposes": word, "form": form, "messages": n} for (word, form), n in what.items()],
        "first": left[0].time if left else None,
        "last": left[-1].time if left else None,
    }


def _rest(limit: float, spent: float | None) -> float:
    return 0 if spent is None else max(limit - spent, 0)


def render(found: Mapping[str, Any]) -> str:
    """Format the result of :func:`report` as text."""
    if not found["runs"]:
        return f"{found['name']}: nothing has left ({found['ledger']})"
    rows = [_HEAD, *(_row(one["run"], one["method"], one) for one in found["runs"])]
    if len(found["runs"]) > 1:
        rows.append(_row("all", "", found["total"]))
    lines = [f"messages that left {found['name']}, by {found['ledger']}", "", *_columns(rows)]
    if found["budget"]:
        table = [("budget", "spent", "limit", "left")]
        table += [(key, *(_number(key, of[k]) for k in table[0][1:])) for key, of in found["budget"].items()]
        lines += ["", *_columns(table)]
    if found["total"]["epsilon"] is None:
        lines += ["", "epsilon none: nothing bounds what the answers of this run reveal about single rows"]
    if failures := found["total"]["failures"]:
        lines += ["", f"failures {failures}: refusals, or empty parts of a masked sum; silo.log has the reasons"]
    if again := found["total"]["asked_again"]:
        lines += ["", f"asked again {again}: a second question to one handler in one round, counted as a round"]
    if found["total"]["claimed"]:
        lines += ["", "epsilon claimed: the server adds the noise, and this silo cannot check that"]
    return "\n".join(lines)


def _row(name: str, method: str, sums: Mapping[str, Any]) -> tuple[str, ...]:
    got = ", ".join(
        f"{_WHAT[one['exposes']]}{f', {form}' if (form := one['form']) != 'plain' else ''}: {one['messages']}"
        for one in sums["left"]
    )
    epsilon = _number("epsilon", sums["epsilon"]) + (" claimed" if sums["claimed"] and sums["epsilon"] else "")
    return visible(name), method, str(sums["rounds"]), str(sums["messages"]), f"{sums['bytes']:,}", epsilon, got


def _number(key: str, value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}" if key == "epsilon" else f"{value:,}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
