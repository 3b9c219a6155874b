"""FolderLink: the server's side of message exchange through a folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedfm.core.client import ClientId
from fedfm.core.crossing import Crossing
from fedfm.core.messages import Reply, Request
from fedfm.core.wire import codec, payload
from fedfm.core.wire.limits import MAX_HEAD
from fedfm.engines.answers import other_version, parse_envelope, parse_hello
from fedfm.engines.folder.letters import Content, digest
from fedfm.engines.folder.mailbox import Mailbox, Stamp, stamp_of
from fedfm.engines.folder.request_record import RequestRecord
from fedfm.engines.interruption import Interrupted
from fedfm.errors import E_CLIENT, E_DIED, E_TIMEOUT, ClientFault, RunError
from fedfm.privacy.exposure import HELLO

_POLL = (0.05, 2.0)  # seconds between two checks of the folder: first and longest
_QUIET = 5.0  # the operator gets a line after this many seconds of waiting
_AGAIN = 600.0  # the operator gets the same line again after this many seconds
# Largest number of bytes of a letter's content without its data: the head in UTF-8, and the front.
_AROUND = MAX_HEAD * 4 + (1 << 16)
_NAMED = 10  # largest number of silos that are listed in a notice


@dataclass
class Post:
    """The server's state for one silo: both mailboxes, and the record of requests."""

    out: Mailbox
    back: Mailbox
    sent: RequestRecord
    last_reply: float | None = None  # monotonic time of the silo's last reply


@dataclass
class _Open:
    """A request to which no reply has come."""

    request: Request
    digest: str
    content: Content
    nbytes: int
    number: int
    asked: float  # monotonic time
    stamp: Stamp | None = None  # stamp of the letter's file; None until it is written


class FolderLink:
    """Delivers requests as letters, and waits for the letters that answer them.

    A file that answers no open request is ignored. The operator gets a line if this file was altered, belongs to
    another silo or answers another request. So a person who can write to the folder cannot exclude a silo.

    Args:
        posts: the :class:`Post` of each silo by name.
        run: key of the run.
        experiment: text of the experiment that the silos get.
        patience: seconds that a silo may take; if infinite, the run waits until it is stopped.
        identity: fingerprint of the server's model; a silo with another model does not take part.
        most: largest number of bytes of a reply, from :func:`fedfm.core.wire.limits.room`.
        greeting: payload of the hello message.
        min_clients: smallest number of silos with which a run begins.
        lazy: whether a silo gets its hello when it is first asked, rather than before the run.
        stop: called while waiting; True raises :class:`Interrupted`.
        waits: called with the silos that were asked, each with 0, and with those that have not answered.
        progress: called for every silo that answers.
        notice: receives lines that the run stores; ``tell`` receives lines only for the screen.

    Raises:
        RunError: fewer than ``min_clients`` can take part within the time limit.
    """

    def __init__(
        self,
        posts: Mapping[ClientId, Post],
        run: str,
        experiment: str,
        *,
        patience: float = math.inf,
        identity: str | None = None,
        most: int | None = None,
        greeting: Mapping[str, Any] | None = None,
        min_clients: int = 1,
        lazy: bool = False,
        stop: Callable[[], bool] = lambda: False,
        waits: Callable[[Mapping[ClientId, int], Collection[ClientId]], None] = lambda asked, missing: None,
        progress: Callable[[], None] = lambda: None,
        notice: Callable[[str], None] = lambda text: None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._posts, self._run, self._experiment, self._patience = dict(posts), run, experiment, patience
        self._identity, self._most, self._stop = identity, most, stop
        self._progress, self._notice, self._tell, self._waits = progress, notice, tell, waits
        for post in self._posts.values():
            post.back.most = None if most is None else most + _AROUND
        self._barred: dict[ClientId, ClientFault] = {}
        # Awaited silos in the last notice, and the time of this notice.
        self._last_notice: tuple[tuple[str, ...], float] = ((), -math.inf)
        self._encoded: tuple[Any, ...] | None = None
        self._met: list[Crossing] = []
        self._list: Callable[[Crossing], None] = self._met.append
        self._greeting, self._min_clients, self._hellos = dict(greeting or {}), min_clients, dict[ClientId, _Open]()
        self._round, self._greeted = 0, set[ClientId]() if lazy else {*self._posts}
        self.greet({})

    @property
    def clients(self) -> Sequence[ClientId]:
        """Sorted names of the silos."""
        return sorted(self._posts)

    def list_hellos(self, add: Callable[[Crossing], None]) -> None:
        """Record the hellos of this process in a transcript; those of late silos are added when they arrive."""
        self._list = add
        for crossing in self._met:
            add(crossing)

    def greet(self, more: Mapping[str, Any]) -> None:
        """Send a hello to all silos; a lazy link only to those that had one. From now on all hellos have these entries.

        Raises:
            RunError: fewer than ``min_clients`` can take part within the time limit.
        """
        self._greeting |= more
        self._hellos = {}
        self._gather(sorted(self._greeted - self._barred.keys()))
        able = len(self._posts) - len(self._barred) - len(self._hellos)
        if able < self._min_clients:
            why = "; ".join(f"{name}: {fault}" for name, fault in sorted(self._barred.items()))
            text = f"{able} of {len(self._posts)} silos can take part, min_clients is {self._min_clients}"
            raise RunError(f"{text} ({why})" if why else text)

    def exchange(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Deliver requests; yield replies as they arrive. A silo that does not take part, or is late, gets a fault."""
        if self._stop():
            raise Interrupted
        for name in list(self._hellos):  # a late answer to a hello may have arrived
            if (reply := self._look(self._hellos[name])) is not None:
                self._meet(reply)
        if new := sorted({request.client for request in requests} - self._greeted):
            self._round = requests[0].round
            self._greeted.update(new)
            self._gather(new)
        opened: dict[ClientId, _Open] = {}
        for request in requests:
            name = request.client
            if name in self._barred:
                yield _fault_reply(request, self._barred[name])
            elif name in self._hellos:
                yield _fault_reply(request, ClientFault(E_DIED, "it has not answered the hello yet"))
            else:
                self._posts[name].sent.forget(request.round)
                opened[name] = self._ask(request)
        for reply in self._collect(opened):
            self._progress()
            yield reply

    # --- one request --------------------------------------------------------------------------------------------------

    def _ask(self, request: Request) -> _Open:
        """Give a request its number; :meth:`_look` writes the letter."""
        if self._encoded is None or self._encoded[0] is not request.payload or self._encoded[1] != request[1:]:
            head, pieces = payload.encode(codec.envelope(request.round, request.call, request.payload))
            data = b"".join(pieces)  # a broadcast is encoded once
            of = digest(request.handler, head, [data]), head, data, codec.weigh(request.payload)
            self._encoded = request.payload, request[1:], of
        name, head, data, nbytes = self._encoded[2]
        front = {"handler": request.handler, "experiment": self._experiment}
        sent = self._posts[request.client].sent
        if sent.answer(request.round, name) is None:
            sent.ask(name)
        return _Open(request, name, Content(front, head, data), nbytes, sent.number, time.monotonic())

    def _look(self, one: _Open) -> Reply | None:
        """The reply to a request if it has arrived; otherwise make sure that the request's letter is in the folder."""
        post = self._posts[one.request.client]
        if (kept := post.sent.answer(one.request.round, one.digest)) is not None:
            return self._reply(one, kept)
        for _, content in post.back.letters(lambda header: (header.run, header.number) == (self._run, one.number)):
            if content.front.get("request") != one.digest:
                post.back.tell(post.back.file(self._run, one.number).name, "is ignored: it answers another request")
                continue
            reply = self._reply(one, content)
            if reply.fault is None:
                post.sent.keep(one.request.round, one.digest, self._run, content)
            else:
                post.sent.close()
            post.out.drop(self._run, one.number + 1)
            post.last_reply = time.monotonic()
            return reply
        self._ensure_written(post, one)
        return None

    def _ensure_written(self, post: Post, one: _Open) -> None:
        """Write the letter unless the folder has it unchanged: the disk may be new, or the file may be damaged."""
        path = post.out.file(self._run, one.number)
        if one.stamp is not None and stamp_of(path) == one.stamp:
            return
        if not post.out.holds(self._run, one.number):
            post.out.put(self._run, one.number, one.content)
            post.out.drop(self._run, one.number)
        one.stamp = stamp_of(path)

    def _reply(self, one: _Open, content: Content) -> Reply:
        request = one.request
        try:
            value = payload.decode(content.head, content.data, None, most=self._most)
            round, call, body, fault = parse_envelope(value)
            if fault is None:
                return Reply(request.client, body, round, call, one.nbytes, codec.weigh(body))
        except ClientFault as bad:
            return _fault_reply(request, bad, one.nbytes)
        return Reply(request.client, None, round, call, one.nbytes, 0, fault)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _collect(self, waiting: dict[ClientId, _Open], keep: bool = False) -> Iterator[Reply]:
        """Yield replies as they arrive; a late silo gets a fault, and its request is withdrawn unless ``keep``."""
        pause, asked, changed = _POLL[0], len(waiting), time.monotonic()
        names = dict.fromkeys(waiting, 0)
        while waiting:
            self._waits(names, waiting)
            came, now = False, time.monotonic()  # a letter that is in the folder by now is not late
            for name, one in sorted(waiting.items()):
                if (reply := self._look(one)) is not None:
                    came, changed = True, time.monotonic()
                    del waiting[name]
                    yield reply
            if self._stop():
                raise Interrupted
            for name, one in sorted(waiting.items()):
                if now - one.asked > self._patience:
                    del waiting[name]
                    if not keep:
                        self._posts[name].out.drop(self._run, one.number + 1)
                    fault = ClientFault(E_TIMEOUT, f"no reply within {self._patience:g} s")
                    yield _fault_reply(one.request, fault, one.nbytes)
            if waiting:
                if now - changed > _QUIET:
                    self._say(sorted(waiting), asked)
                pause = _POLL[0] if came else min(pause * 1.5, _POLL[1])
                time.sleep(pause)
        self._waits(names, ())

    def _say(self, names: Sequence[ClientId], asked: int) -> None:
        """Tell the operator for which silos the run waits."""
        now = time.monotonic()
        if self._last_notice[0] == tuple(names) and now - self._last_notice[1] < _AGAIN:
            return
        self._last_notice = tuple(names), now
        known = [self._last_reply_text(name, now) for name in names[:_NAMED]]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        self._tell(f"waiting for {len(names)} of {asked} silos: {', '.join(known)}{more}")

    def _last_reply_text(self, name: ClientId, now: float) -> str:
        last_reply = self._posts[name].last_reply
        return name if last_reply is None else f"{name} (last reply {_ago(now - last_reply)} ago)"

    # --- hello --------------------------------------------------------------------------------------------------------

    def _gather(self, silos: Sequence[ClientId]) -> None:
        """Send hellos, and wait until these silos have answered, for at most the time limit of a silo."""
        hellos = {name: self._ask(Request(name, HELLO, self._greeting, 0, 0)) for name in silos}
        self._hellos |= hellos
        for reply in self._collect(hellos, keep=True):
            if reply.fault is None or reply.fault.code != E_TIMEOUT:
                self._meet(reply)
        if late := [name for name in silos if name in self._hellos]:
            self._notice(f"no answer to the hello from {', '.join(late)}")

    def _meet(self, reply: Reply) -> None:
        """Admit or exclude the silo that answered the hello."""
        name, one = reply.client, self._hellos.pop(reply.client)
        fault = reply.fault
        if fault is None:
            try:
                said, fault = parse_hello(reply.value, self._identity, [name])
                if said != name:
                    fault = ClientFault(
                        E_CLIENT, f'its silo.toml says name = "{said[:40]}", but the roster calls it "{name}"'
                    )
            except ClientFault as bad:
                fault = bad
        if fault is None and (text := other_version(name, reply.value)):
            self._notice(text)
        if fault is not None:
            self._posts[name].sent.close()  # so that a resumed run sends a new hello
            self._barred[name] = fault
            self._notice(f"{name} does not take part: {fault}")
        for sender, receiver, nbytes in (("server", name, one.nbytes), (name, "server", reply.nbytes_up)):
            self._list(Crossing(self._round, sender, receiver, HELLO, nbytes, "plain", counted=False))


def _fault_reply(request: Request, fault: ClientFault, down: int = 0) -> Reply:
    return Reply(request.client, None, request.round, request.call, down, 0, fault)


def _ago(seconds: float) -> str:
    for name, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {name}{'s' * (count > 1)}"
    return "less than a minute"
