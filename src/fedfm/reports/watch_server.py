"""Serve the report of a running run to a browser of this machine: read-only, without scripts, under a secret address.

Other users of the machine reach its loopback interface, and so does every web page that a browser has open. So the
address has a secret part; requests with another host name are refused, because a page can let its own name resolve to
127.0.0.1; and the answers forbid scripts, frames and other sites.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedfm.errors import InputError, reason_of
from fedfm.reports import live

REFRESH = 3  # seconds until a browser loads the page again
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_IDLE = 10.0  # seconds after which a silent connection is closed
_FILES = ("manifest.json", "metrics.jsonl", "messages.jsonl", "private/waiting.json")


class WatchServer(ThreadingHTTPServer):
    """Serves one run on 127.0.0.1.

    Args:
        run: a run directory.
        port: 0 for a free port.

    Attributes:
        url: the address of the page, with its secret part.
        showed_end: whether a browser has received the report of the finished run.

    Raises:
        InputError: the port is in use or needs other rights.
    """

    daemon_threads = True
    allow_reuse_address = False  # another user's program must not take over the address

    def __init__(self, run: Path, port: int = 0) -> None:
        if not 0 <= port <= 65535:
            raise InputError(f"--port {port}: expected a number from 0 to 65535; leave it out for a free port")
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise InputError(f"--port {port}: {reason_of(error)}; leave it out for a free port") from None
        self.run, self.path = run, f"/{secrets.token_urlsafe(16)}/"
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}
        self.url = f"http://127.0.0.1:{self.server_port}{self.path}"
        self.showed_end = False
        self._lock = threading.Lock()
        self._known: tuple[float, tuple[tuple[int, int], ...], tuple[str, bool]] = (0.0, (), ("", False))

    def page(self) -> tuple[str, bool]:
        """The page, and whether the run is finished. It is made again if a file has changed, at most once a second."""
        with self._lock:
            at, stamps, found = self._known
            now = tuple(_stamp(self.run / name) for name in _FILES)
            if now != stamps or (not found[1] and time.monotonic() - at > 1.0):
                found = live.render(self.run, REFRESH)
                self._known = time.monotonic(), now, found
            return found

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes its connection early is not a fault."""


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
        return status.st_mtime_ns, status.st_size
    except OSError:
        return 0, 0


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = _IDLE
    server_version, sys_version = "fedfm", ""

    def do_GET(self) -> None:
        """Answer with the page."""
        host = self.headers.get_all("Host") or []
        if len(host) != 1 or host[0].lower() not in self.server.hosts:
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "another host is asked for")
        elif not hmac.compare_digest(self.path.encode(), self.server.path.encode()):
            self._answer(HTTPStatus.NOT_FOUND, "no such page; open the address that `fedfm watch` printed")
        else:
            try:
                text, finished = self.server.page()
            except (InputError, OSError, ValueError, KeyError) as error:  # a file is being written, or is damaged
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error), again=True)
                return
            self._answer(HTTPStatus.OK, text, again=not finished, page=True)
            self.server.showed_end |= finished

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, text: str, *, again: bool = False, page: bool = False) -> None:
        body = (text if page else live.notice(text)).encode()
        self.send_response(status)
        refresh = {"Refresh": str(REFRESH)} if again else {}
        own = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in (*HEADERS.items(), *refresh.items(), *own.items()):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Write nothing to the terminal."""
