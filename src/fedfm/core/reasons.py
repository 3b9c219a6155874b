"""Why too few clients answered, and what can be done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fedfm.core.messages import Excluded
from fedfm.errors import E_DIED, E_EXCEPTION, E_NONFINITE, E_NORM, E_REFUSED, E_TIMEOUT

_DIVERGED = "training diverged; take a smaller method.local.learning_rate, or set method.local.max_grad_norm"
_HELP = {
    E_NONFINITE: _DIVERGED,
    E_NORM: _DIVERGED,
    E_TIMEOUT: "a larger run.timeout waits longer",
    E_REFUSED: "the silo's policy decides; ask its operator, or change what the experiment asks for",
    E_EXCEPTION: "private/errors.log of the clients has the traceback",
    E_DIED: "see the memory of the clients' machines",
}


def reasons(excluded: Sequence[Excluded]) -> str:
    """Suffix for a message: the most frequent reason with an example, and what helps; nothing without any.

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
    return f": {named}: {code}: {of[0].reason}{f' ({_HELP[code]})' if code in _HELP else ''}{more}"
