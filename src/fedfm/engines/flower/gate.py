"""The access gate in front of a SuperLink. Flower serves silos and operator on one port, without accounts.

The gate checks the same path as Flower's own router, so gate and router always agree on where a request goes.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

SILOS = "/v1/fleet/"  # for silos' nodes; Flower requires the signature of a registered key
RUNTIME = "/v1/runtime/"  # for the server's own executor; Flower requires the executor's secret, or the task's token
HEALTH = "/health"
REFUSED = b"this needs the operator's secret: operator.secret of the server's kit"

App = Callable[[Mapping[str, Any], Any, Callable[[Mapping[str, Any]], Awaitable[None]]], Awaitable[None]]


class AccessGate:
    """An ASGI application that controls access to another ASGI application.

    Anyone can reach Flower's fleet interface. Processes of this machine can also reach its runtime interface. Every
    other request (to submit or stop runs, to register or list nodes) needs ``Authorization: Bearer SECRET``.

    Args:
        app: the SuperLink's application.
        secret: the operator's secret.

    Raises:
        ValueError: the secret is shorter than 32 bytes.
    """

    def __init__(self, app: App, secret: bytes) -> None:
        if len(secret := secret.strip()) < 32:
            raise ValueError("the operator's secret needs at least 32 bytes")
        self._app, self._bearer = app, b"Bearer " + secret

    async def __call__(
        self, scope: Mapping[str, Any], receive: Any, send: Callable[[Mapping[str, Any]], Awaitable[None]]
    ) -> None:
        """Forward a request or refuse it with a status."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._admits(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(REFUSED)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSED})
        else:  # Flower uses no other protocol
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
