"""A FlowerLink whose server goes on before all have answered, for buffered asynchronous rounds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from flwr.serverapp import Grid

from fedfm.core.messages import Reply, Request
from fedfm.engines.flower.link import POLL, FlowerLink
from fedfm.engines.flower.private_api import SUPERLINK
from fedfm.engines.flower.sending import Underway, failed, reply_of
from fedfm.engines.local.engine import Interrupted
from fedfm.errors import E_HELD, E_TIMEOUT, ClientFault


class FlowerStream(FlowerLink):
    """A link that streams; arguments as of :class:`FlowerLink`."""

    streams = True

    def __init__(self, grid: Grid, **settings: Any) -> None:
        self._underway: dict[str, tuple[Underway, float]] = {}  # with the time of giving up
        self._ready: deque[Reply] = deque()  # what is pulled is nowhere else, and the caller may stop
        super().__init__(grid, **settings)

    @property
    def straggling(self) -> bool:
        """Whether a client that timed out, or that nobody waits for, may still be running."""
        return super().straggling or bool(self._underway)

    def stream(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Deliver; yield replies to these and to earlier requests of this kind as they arrive, while any is awaited.

        A client that is absent, dies or is late gets a fault, and can be asked again.
        """
        if self._stop():
            raise Interrupted
        sent, absent = self._placed(requests)
        yield from absent
        yield from self._launch(sent)
        pause = POLL[0]
        while self._ready or self._underway:
            while self._ready:
                self._progress()
                yield self._ready.popleft()
            came = list(self._grid.pull_messages([*self._underway, *self._late]))
            for message in came:
                name = message.metadata.reply_to_message_id
                self._late.discard(name)
                if name not in self._underway:
                    continue
                one, _ = self._underway[name]
                if message.metadata.src_node_id not in (one.node, SUPERLINK):
                    continue  # from another node
                del self._underway[name]
                reply, self._held[one.node] = reply_of(message, one, self._most)
                if reply.fault is not None and reply.fault.code == E_HELD and one.spared:
                    self._ready.extend(self._launch([(one.node, one.request)]))  # again, whole
                    continue
                self._ready.append(reply)
            if self._stop():
                raise Interrupted
            now = time.monotonic()
            for name in [name for name, (_, deadline) in self._underway.items() if now > deadline]:
                late, _ = self._underway.pop(name)
                self._late.add(name)
                self._ready.append(failed(late.request, ClientFault(E_TIMEOUT, f"no reply within {self._timeout:g} s")))
            if not came:
                time.sleep(pause)
                pause = min(pause * 1.5, POLL[1])
            else:
                pause = POLL[0]

    def _launch(self, sent: Sequence[tuple[int, Request]]) -> Iterator[Reply]:
        """Send requests of :meth:`stream`; yields those that the SuperLink did not take."""
        waiting: dict[str, Underway] = {}
        yield from self._push(sent, waiting, self._timeout)
        self._underway |= {name: (one, time.monotonic() + self._timeout) for name, one in waiting.items()}
