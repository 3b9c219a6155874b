"""The pool of Ray actors of a run over several machines, for Flower's simulation.

Flower's own pool also offers actors whose node is lost, so that all later messages to them would fail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from fedfm.errors import first_line

_PATIENCE = 120.0  # seconds after which a message fails if no actor runs
_FAILURES = 20  # number of actors that fail while they start, after which no new ones are made


class ActorPool:
    """Ray actors. Each of them is starting, ready, or answering a message.

    A lost actor is replaced by a new one, which Ray puts on any node with room. Flower calls the methods from several
    threads.

    Args:
        capacity: largest number of actors.
        lost: called with the name of a client whose actor was lost, and the id of the actor's node.
        closed: set when the run ends; then no message waits for an actor any more.
        notice: called with a line on actors that did not start: on the first one, and when no new ones are made.
    """

    def __init__(
        self,
        actor_type: Any,
        client_resources: Mapping[str, float],
        actor_kwargs: Mapping[str, Any],
        *,
        capacity: int,
        lost: Callable[[str, str], None],
        closed: threading.Event,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._make: Callable[[], Any] = lambda: actor_type.options(**client_resources).remote(**actor_kwargs)
        self.actors_capacity, self.num_actors = capacity, 0
        self._lost, self._closed, self._lock, self._notice = lost, closed, threading.Lock(), notice
        self._ready: list[Any] = []
        self._starting: dict[Any, Any] = {}  # an actor that starts, by the result of its first call
        self._busy: dict[Any, tuple[Any, str]] = {}  # actor and client, by the result of the call
        self._nodes: dict[Any, str] = {}  # id of each actor's node
        self._failures = 0

    def add_actors_to_pool(self, num_actors: int) -> None:
        """Make actors."""
        for _ in range(num_actors):
            self._start()
        self.num_actors += num_actors

    def _start(self) -> None:
        actor = self._make()
        self._starting[actor.__ray_call__.remote(_node_of)] = actor

    def is_actor_available(self) -> bool:
        """Whether an actor is ready."""
        with self._lock:
            self._admit()
            return bool(self._ready)

    def submit(self, actor_fn: Callable[..., Any], job: tuple[Any, Any, str, Any]) -> Any:
        """Give a message to an actor; returns a reference to the result.

        Raises:
            RayActorError: no actor runs, and none has started for some time.
        """
        actor = self._take()
        future = actor_fn(actor, *job)
        with self._lock:
            self._busy[future] = actor, job[1].metadata.group_id
        return future

    def _take(self) -> Any:
        idle_since = time.monotonic()
        while not self._closed.is_set():
            with self._lock:
                self._admit()
                if self._ready:
                    return self._ready.pop()
                if self._busy:
                    idle_since = time.monotonic()
            if time.monotonic() - idle_since > _PATIENCE:
                raise _death(f"no process of a client started on the Ray cluster within {_PATIENCE:g} s")
            time.sleep(0.05)
        raise _death("the run has ended")

    def _admit(self) -> None:
        """Move actors that have started to those that are ready."""
        if not self._starting:
            return
        done, _ = ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)
        for first in done:
            actor = self._starting.pop(first)
            try:
                self._nodes[actor] = ray.get(first)
                self._ready.append(actor)
            except ray.exceptions.RayError as error:
                self._failures += 1
                if self._failures == 1:
                    self._notice(f"a client's process on the Ray cluster did not start: {first_line(error)}")
                if self._failures == _FAILURES:
                    self._notice(f"{_FAILURES} clients' processes did not start on the Ray cluster: no more are tried")
                if self._failures < _FAILURES:
                    self._start()

    def fetch_result_and_return_actor_to_pool(self, future: Any) -> tuple[Any, Any]:
        """Wait for the reply to a message; returns it with the client's new context."""
        try:
            _, message, context = ray.get(future)
        except ray.exceptions.RayTaskError:  # the client's code raised an error, and the actor runs
            raise
        except ray.exceptions.RayError:
            with self._lock:
                actor, client = self._busy.pop(future)
                node = self._nodes.pop(actor)
                ray.kill(actor)  # its core must be free for the new actor
                self._start()
            self._lost(client, node)
            raise
        self.add_actor_back_to_pool(future)
        return message, context

    def add_actor_back_to_pool(self, future: Any) -> None:
        """Mark an actor as ready; one that was lost has been replaced already."""
        with self._lock:
            if future in self._busy:
                self._ready.append(self._busy.pop(future)[0])

    def terminate_all_actors(self) -> None:
        """Let the actors end."""
        with self._lock:
            for actor in (*self._ready, *self._starting.values()):
                ray.kill(actor)


def _death(why: str) -> ray.exceptions.RayActorError:
    """An error that the server takes for a client whose process has ended."""
    return ray.exceptions.RayActorError(error_msg=f"ActorDiedError: {why}")


def _node_of(actor: Any) -> str:
    """Id of the node of an actor, which calls this function."""
    return str(ray.get_runtime_context().get_node_id())
