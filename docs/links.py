"""Checks every link of the built site: `python docs/links.py site` exits with 1 if one is dead.

A link into the site must name an existing file, and an anchor an existing id. Of other links only the form is checked,
because the check needs no network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_EXTERNAL = re.compile(r"https?://[\w-]+(\.[\w-]+)+(:\d+)?([/?#]\S*)?|mailto:\S+@\S+|data:\S+")


class _Page(HTMLParser):
    """Ids and link targets of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.targets.append(value)


def dead(site: Path) -> Iterator[str]:
    """One line for each dead link: page and target."""
    site = site.resolve()
    pages = {path: _Page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for target in page.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                alive = bool(_EXTERNAL.fullmatch(target))
            else:
                aim = (path.parent / unquote(url.path)).resolve() if url.path else path
                alive = aim.is_file() and aim.is_relative_to(site)
                if alive and url.fragment and aim in pages:
                    alive = unquote(url.fragment) in pages[aim].ids
            if not alive:
                yield f"{path.relative_to(site)}: {target}"


if __name__ == "__main__":
    found = list(dead(Path(sys.argv[1])))
    print("\n".join([*found, f"{len(found)} dead links"]), file=sys.stderr)  # noqa: T201
    sys.exit(bool(found))
