"""Check the server from a silo's machine: address, certificate and clock. A problem is reported in one line."""

from __future__ import annotations

import datetime
import email.utils
import http.client
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedfm.errors import first_line

# Flower refuses a node whose clock is too many seconds ahead of the server's, or behind it.
AHEAD, BEHIND = 5.0, 305.0
_GRAIN = 1.0  # resolution of the server's reported time, in seconds
_WAIT = 5.0  # seconds to wait for the server's answer
_PAUSES = (2.0, 10.0, 30.0)  # seconds between two checks: first; longest with a problem; longest without one
_NOT_YET, _ENDED, _SIGNER, _NAMES = {9}, {10}, {2, 7, 18, 19, 20, 21}, {62, 64}  # OpenSSL's X509_V_ERR_*


@dataclass(frozen=True)
class Reachability:
    """Result of one check of the server.

    Attributes:
        problem: why nodes cannot connect, and what would help; "" if they can.
        passing: whether the problem may pass by itself, e.g. because the server has not been started yet.
        ahead: seconds by which this machine's clock is ahead of the server's; None if the server reports no time.
    """

    problem: str = ""
    passing: bool = False
    ahead: float | None = None


def look(server: str, authority: Path, wait: float = _WAIT) -> Reachability:
    """Check a server once.

    Args:
        server: host:port.
        authority: PEM file of the federation's authority.
    """
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    try:
        context = ssl.create_default_context(cafile=str(authority))
        link = http.client.HTTPSConnection(host, int(port), timeout=wait, context=context)
        try:
            link.request("GET", "/health")
            answer = link.getresponse()
        finally:
            link.close()
    except ssl.SSLCertVerificationError as error:
        return Reachability(f"{server}: {_certificate(error, host)}")
    except ssl.SSLError as error:
        return Reachability(f"{server} does not speak TLS as fedfm's server does: {error.reason or first_line(error)}")
    except socket.gaierror:
        return Reachability(f"{host}: this machine knows no such host; the operator chose this address for the kit")
    except ConnectionRefusedError:
        return Reachability(
            f"nothing listens at {server}: the server has not been started, or a firewall refuses", True
        )
    except TimeoutError:
        late = f"{server} does not answer within {wait:g} s: the address is wrong, or a firewall blocks it"
        return Reachability(late, True)
    except (OSError, http.client.HTTPException) as error:
        return Reachability(f"{server} does not answer: {first_line(error) or type(error).__name__}", True)
    if answer.status != http.client.OK:
        return Reachability(f"{server} answers with status {answer.status}")
    moment = answer.getheader("date")
    if moment is None:
        return Reachability()
    try:
        off = datetime.datetime.now(datetime.UTC) - email.utils.parsedate_to_datetime(moment)
    except (TypeError, ValueError):
        return Reachability()
    return Reachability(ahead=off.total_seconds())


def _certificate(error: ssl.SSLCertVerificationError, host: str) -> str:
    clock = f"this machine's clock says {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    if error.verify_code in _NOT_YET:
        return f"the server's certificate is not valid yet; {clock}"
    if error.verify_code in _ENDED:
        return f"the server's certificate has expired ({clock}); the operator renews it with `fedfm provision --renew`"
    if error.verify_code in _NAMES:
        return f"the server's certificate is not for {host}; the operator adds it to hosts and renews"
    if error.verify_code in _SIGNER:
        return "the server's certificate is of another federation; the authority in this kit's ca.crt did not sign it"
    return f"the server's certificate is invalid: {error.verify_message}"


def clock_problem(ahead: float | None) -> str:
    """What is wrong with a clock that is ``ahead`` seconds ahead of the server's; "" if nothing is."""
    if ahead is None or -BEHIND < ahead < AHEAD + _GRAIN:
        return ""
    way, most = ("ahead of", AHEAD) if ahead > 0 else ("behind", BEHIND)
    return f"this machine's clock is {abs(ahead):.0f} s {way} the server's (allowed: at most {most:g} s); set the clock"


class Lookout:
    """Checks the server repeatedly in a thread of its own, since a check that gets no answer takes seconds.

    Args:
        tell: called with a line when the result changes.
    """

    def __init__(self, server: str, authority: Path, tell: Callable[[str], None]) -> None:
        self._server, self._authority, self._tell = server, authority, tell
        self._problem: str | None = None  # None before the first check
        self._passing = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def clear(self) -> bool:
        """Whether a node could have connected at the last check."""
        return self._problem == ""

    @property
    def may_connect(self) -> bool:
        """Whether a node may try to connect: no problem is known that a person must solve first."""
        return self.clear or self._passing

    def end(self) -> None:
        """Stop checking."""
        self._end.set()

    def _watch(self) -> None:
        pause = _PAUSES[0]
        while True:
            seen = look(self._server, self._authority)
            problem = seen.problem or clock_problem(seen.ahead)
            if self._end.is_set():
                return
            if problem != self._problem:
                if problem:
                    self._tell(f"{problem}; trying again")
                elif self._problem:
                    self._tell(f"{self._server} answers")
                pause = _PAUSES[0]
            self._problem, self._passing = problem, seen.passing
            if self._end.wait(pause):
                return
            pause = min(pause * 2, _PAUSES[1] if problem else _PAUSES[2])
