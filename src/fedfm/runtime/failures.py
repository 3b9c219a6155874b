"""Clients that were left out of rounds, of scores, or of the models that the server asked for.

A run goes on without a client that fails. So the result states which client was left out, how often and why. It also
lists failed scores, although no round needs scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedfm.core.messages import MISSING, ROUND, Excluded
from fedfm.errors import E_CLIENT, E_DUPLICATE, E_ROUND

_EXTRA = (
    E_DUPLICATE,
    E_CLIENT,
    E_ROUND,
)  # codes of unexpected replies; the expected reply may have come, too
_SHOWN = 10  # largest number of clients that are named


def entry(excluded: Excluded) -> dict[str, Any]:
    """Convert an exclusion to an entry of a line of ``metrics.jsonl``; the line itself has the round."""
    return {
        "client": excluded.client,
        "code": excluded.code,
        "reason": excluded.reason,
        "part": excluded.part,
    }


def of_line(line: Mapping[str, Any]) -> list[Excluded]:
    """Return the exclusions in a line of ``metrics.jsonl``."""
    found = line.get("excluded") or ()
    return [Excluded(line["round"], e["client"], e["code"], e["reason"], e.get("part", ROUND)) for e in found]


def whole(
    of_rounds: Sequence[Excluded], lines: Iterable[Mapping[str, Any]], more: Iterable[Excluded]
) -> list[Excluded]:
    """Return all exclusions of a run, each once.

    Args:
        of_rounds: exclusions from the committed rounds.
        lines: lines of ``metrics.jsonl``, with the exclusions from scores and models.
        more: exclusions from messages after the last line.
    """
    others = [e for line in lines for e in of_line(line) if e.part != ROUND]
    return [*of_rounds, *dict.fromkeys([*others, *more])]


def sentences(excluded: Sequence[Excluded], rounds: int) -> list[str]:
    """Return a sentence for each client and part: how often it was left out, and the last reason.

    The client that was left out most often comes first.

    Args:
        rounds: number of rounds of the run.
    """
    by: dict[tuple[str, str], list[Excluded]] = {}
    for e in excluded:
        if e.code not in _EXTRA:
            by.setdefault((e.client, e.part), []).append(e)
    sentences = []
    for (client, part), found in sorted(by.items(), key=lambda item: (-len(item[1]), item[0])):
        ((code, _),) = Counter(e.code for e in found).most_common(1)
        reason = next(e.reason for e in reversed(found) if e.code == code)
        sentences.append(f"{client} was {MISSING[part]} {_often(found, part, rounds)}, {code}: {reason}")
    if len(sentences) <= _SHOWN:
        return sentences
    return [*sentences[:_SHOWN], f"{len(sentences) - _SHOWN} more were left out; `excluded` in the result names each"]


def _often(found: Sequence[Excluded], part: str, rounds: int) -> str:
    at = {e.round for e in found}
    if at == {0}:
        return "before the first round"
    if part == ROUND:
        return f"in {len(at - {0})} of {rounds} rounds"
    return f"in {len(at)} evaluations" if len(at) > 1 else f"after round {max(at)}"
