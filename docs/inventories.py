"""Which other projects' documents the site can link to: those whose inventory of names can be read now."""

from __future__ import annotations

import sys
import threading
import urllib.request

PROJECTS = {
    "python": "https://docs.python.org/3",
    "numpy": "https://numpy.org/doc/stable",
    "torch": "https://docs.pytorch.org/docs/stable",
}
_WAIT = 3.0  # seconds for all hosts together


def reachable(projects: dict[str, str], seconds: float = _WAIT) -> dict[str, tuple[str, None]]:
    """The mapping for ``sphinx.ext.intersphinx``. A line on the standard error names the projects that are left out.

    Args:
        projects: name -> address of its documents.
        seconds: time for all hosts to answer, names' look-up included.
    """
    found: set[str] = set()

    def ask(name: str, address: str) -> None:
        request = urllib.request.Request(f"{address}/objects.inv", method="HEAD")  # noqa: S310  the addresses above
        try:
            with urllib.request.urlopen(request, timeout=seconds):  # noqa: S310
                found.add(name)
        except OSError:
            return

    asked = [threading.Thread(target=ask, args=pair, daemon=True) for pair in projects.items()]
    for thread in asked:
        thread.start()
    for thread in asked:
        thread.join(seconds)
    kept = {name: (address, None) for name, address in projects.items() if name in found}
    if missing := [name for name in projects if name not in kept]:
        print(f"no links to the documents of {', '.join(missing)}: no answer in {seconds:g} s", file=sys.stderr)  # noqa: T201
    return kept
