"""How often to poll: the longer no message has come, the rarer."""

from __future__ import annotations

import time


class QuietTime:
    """The time since the last message. A longer silence makes polls rarer, since each costs some 10 ms of a core."""

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        self._since = time.monotonic()

    def pause(self, least: float) -> float:
        """Seconds until the next poll, so that a message waits at most a twentieth longer than the silence before."""
        return max(least, min((time.monotonic() - self._since) / 20, 1.0))
