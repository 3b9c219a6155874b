"""The gate in front of a SuperLink: who may do what. Flower serves silos and operator on one port, without accounts.

It checks the same path as Flower's own router, so that the two cannot disagree.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

SILOS = "/v1/fleet/"  # what a silo's node needs; Flower asks it for the signature of a registered key
RUNTIME = "/v1/runtime/"  # tasks of the server's own executor; Flower asks for its secret, or for the task's token
HEALTH = "/health"
REFUSED = b"this needs the operator's secret: operator.secret of the server's kit"

App = Callable[[Mapping[str, Any], Any, Callable[[Mapping[str, Any]], Awaitable[None]]], Awaitable[None]]


class AccessGate:
    """An ASGI application that admits to another one.

    Everybody reaches Flower's fleet interface, and processes of this machine its runtime interface as well. For the
    rest, a request needs ``Authorization: Bearer SECRET``: to submit and stop runs, to register nodes and to list them.

    Args:
        app: the SuperLink's application.
        secret: the operator's.

    Raises:
        ValueError: the secret is shorter than 32 bytes.
    """

    def __init__(self, app: App, secret: bytes) -> None:
        if len(secret := secret.strip()) < 32:
            raise ValueError("the operator's secret needs 32 bytes and more")
        self._app, self._bearer = app, b"Bearer " + secret

    async def __call__(
        self, scope: Mapping[str, Any], receive: Any, send: Callable[[Mapping[str, Any]], Awaitable[None]]
    ) -> None:
        """Pass on or refuse."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._admits(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(REFUSED)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSED})
        else:  # Flower has no other way in
            await send({"type": "websocket.close", "code": 1008})

    def _admits(self, scope: Mapping[str, Any]) -> bool:
        path = scope["path"]
        if path == HEALTH or path.startswith(SILOS) or (path.startswith(RUNTIME) and _is_here(scope.get("client"))):
            return True
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._bearer)


def _is_here(client: Any) -> bool:
    """Whether the other side is a process of this machine."""
    try:
        return bool(client) and ipaddress.ip_address(str(client[0]).partition("%")[0]).is_loopback
    except ValueError:
        return False
