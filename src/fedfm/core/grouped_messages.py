"""Lines of ``messages.jsonl`` that each stand for many alike messages, for calls to very many clients."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedfm.core.crossing import Crossing
from fedfm.core.name_ranges import expand, shorten

SERVER = "server"


def group(crossings: Sequence[Crossing]) -> Iterator[str]:
    """Yield lines: messages that differ only in the client become one line, which lists the clients in short form."""
    groups: dict[Crossing, list[str]] = {}
    for c in crossings:
        if c.sender == SERVER:
            groups.setdefault(c._replace(receiver=""), []).append(c.receiver)
        elif c.receiver == SERVER:
            groups.setdefault(c._replace(sender=""), []).append(c.sender)
        else:
            yield c.line()
    for c, clients in groups.items():
        if len(clients) == 1:
            yield c._replace(sender=c.sender or clients[0], receiver=c.receiver or clients[0]).line()
        else:
            key = "to" if c.sender else "from"
            yield json.dumps(json.loads(c.line()) | {key: shorten(sorted(clients)), "messages": len(clients)})


def ungroup(line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each message for which a line stands; none if the line is damaged."""
    key = "to" if isinstance(line.get("to"), list) else "from"
    try:
        clients = expand(line.get(key))
    except ValueError:
        return
    one = {name: value for name, value in line.items() if name != "messages"}
    yield from ({**one, key: client} for client in clients)
