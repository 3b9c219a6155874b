"""Say why too few clients answered, and what helps."""

from __future__ import annotations

from collections.abc import Sequence

from fedfm.core.messages import Excluded
from fedfm.errors import E_DIED, E_EXCEPTION, E_NONFINITE, E_NORM, E_REFUSED, E_TIMEOUT

_NAMED = 3  # largest number of clients that are named for a code
_HELP = {
    E_TIMEOUT: "a larger run.timeout waits longer",
    E_REFUSED: "the silo decides; ask its operator, or change the experiment's requests",
    E_EXCEPTION: "private/errors.log of the clients has the traceback",
    E_DIED: "check the memory of the clients' machines",
}


def reasons(excluded: Sequence[Excluded], diverged: str = "") -> str:
    """Suffix for a message: the clients with the most frequent code, an example of its reason, and what helps; then the
    other clients with their codes. The suffix is empty if no client was excluded.

    Args:
        diverged: what helps if training diverged; it depends on the method.

    Example:
        >>> reasons([Excluded(1, "a", E_TIMEOUT, "no reply in time"), Excluded(1, "b", E_TIMEOUT, "no reply in time")])
        ': a, b: E_TIMEOUT: no reply in time (a larger run.timeout waits longer)'
    """
    if not excluded:
        return ""
    by_code: dict[str, list[Excluded]] = {}
    for one in excluded:
        by_code.setdefault(one.code, []).append(one)
    (code, of), *others = sorted(by_code.items(), key=lambda item: -len(item[1]))
    help_ = diverged if code in (E_NONFINITE, E_NORM) else _HELP.get(code, "")
    more = "".join(f"; {_names(some)}: {other}" for other, some in others)
    return f": {_names(of)}: {code}: {of[0].reason}{f' ({help_})' if help_ else ''}{more}"


def _names(excluded: Sequence[Excluded]) -> str:
    more = f" and {len(excluded) - _NAMED} more" if len(excluded) > _NAMED else ""
    return ", ".join(one.client for one in excluded[:_NAMED]) + more
