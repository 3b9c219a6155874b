"""Flower's Grid in this process: the real ServerApp's and ClientApp's side of a network, with a place for mischief."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from fedfm.engines.flower.private_api import round_trip

Mischief = Callable[[Message, Message], list[Message]]  # (request, honest reply) -> what comes back


class InProcessGrid(Grid):
    """One node a ClientApp; contents are serialised and rebuilt both ways."""

    def __init__(self, apps: dict[int, Any], mischief: Mischief = lambda request, reply: [reply]) -> None:
        self.apps, self.mischief = apps, mischief
        self.sent: list[Message] = []
        self._replies: list[Message] = []

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return list(self.apps)

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=node, last_activated_at="") for node in self.apps]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            self.sent.append(message)
            names.append(_name(message, f"m{len(self.sent)}"))
            reply = self._answer(message)
            for crooked in self.mischief(message, reply):
                self._replies.append(crooked)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted = set(message_ids)
        out = [r for r in self._replies if r.metadata.reply_to_message_id in wanted]
        self._replies = [r for r in self._replies if r not in out]
        return out

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        context = Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
        honest, message.content = message.content, round_trip(message.content)
        try:
            reply = self.apps[node](message, context)
            reply.content = round_trip(reply.content)
        except Exception as error:
            reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
        finally:
            message.content = honest
        return reply


def _name(message: Message, name: str) -> str:
    message.metadata.__dict__["_message_id"] = name
    return name
