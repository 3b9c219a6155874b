"""Say why too few clients answered, and what helps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fedfm.core.messages import Excluded
from fedfm.errors import E_DIED, E_EXCEPTION, E_NONFINITE, E_NORM, E_REFUSED, E_TIMEOUT

_HELP = {
    E_TIMEOUT: "a larger run.timeout waits longer",
    E_REFUSED: "the silo decides; ask its operator, or change the experiment's requests",
    E_EXCEPTION: "private/errors.log of the clients has the traceback",
    E_DIED: "check the memory of the clients' machines",
}


def reasons(excluded: Sequence[Excluded], diverged: str = "") -> str:
    """Suffix for a message: the most frequent reason with an example, and what helps; empty if there is no reason.

    Args:
        diverged: what helps if training diverged; it depends on the method.

    Example:
        >>> reasons([Excluded(1, "a", E_TIMEOUT, "no reply in time"), Excluded(1, "b", E_TIMEOUT, "no reply in time")])
        ': a, b: E_TIMEOUT: no reply in time (a larger run.timeout waits longer)'
    """
    if not excluded:
        return ""
    ((code, _),) = Counter(e.code for e in excluded).most_common(1)
    of = [e for e in excluded if e.code == code]
    named = ", ".join(e.client for e in of[:3]) + (f" and {len(of) - 3} more" if len(of) > 3 else "")
    others = len(excluded) - len(of)
    more = f"; {others} for other reasons" if others else ""
    help_ = diverged if code in (E_NONFINITE, E_NORM) else _HELP.get(code, "")
    return f": {named}: {code}: {of[0].reason}{f' ({help_})' if help_ else ''}{more}"
