"""All uses of Flower's private API, except those in :mod:`.private_programs` and :mod:`.private_ray`.

Each use has a check in ``tests/engines/test_private_api.py``. If a new version of Flower breaks a use, the check tells
which function of this module is affected. The module imports torch and Flower only when they are needed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfm.errors import E_DIED, E_EXCEPTION, ClientFault, InputError, RunError

if TYPE_CHECKING:
    from fedfm.core.messages import Request
    from fedfm.engines.flower.node_status import NodeStatus
    from fedfm.runtime.client import Silos

TESTED = ("1.41.", "1.42.")  # prefixes of the versions of Flower that pass the tests
SUPERLINK = 1  # sender's id in the SuperLink's own replies, which it sends for unavailable nodes
_PUSHES = 5  # attempts to push a message; all fail only if the SuperLink is killed during each
# Environment of executors: seconds between polls, by default 1.
QUICK_EXECUTOR = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}


def round_trip(record: Any) -> Any:
    """Split a RecordDict into objects, serialise and rebuild it, as Flower's network does."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    with no_object_id_recompute():
        name = record.object_id
        contents = {key: item.deflate() for key, item in get_all_nested_objects(record).items()}
    return inflate_object_from_contents(name, contents)


def serialised_nbytes(record: Any) -> int:
    """Size in bytes of a RecordDict in Flower's serialisation, equal objects counted once; see also
    :func:`codec.weigh`.
    """
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute

    with no_object_id_recompute():
        return sum(len(item.deflate()) for item in get_all_nested_objects(record).values())


def over_the_wire(silos: Silos, requests: Sequence[Request]) -> list[Any]:
    """Answer requests as over a network: payloads and replies are serialised and rebuilt."""
    from fedfm.core.wire import codec

    def transfer(request: Request, body: Any) -> Any:
        record = codec.to_record(codec.envelope(request.round, request.call, body))
        return codec.from_record(round_trip(record), None, silos.room)["body"]

    def transfer_reply(request: Request, value: Any) -> Any:
        try:
            return value if isinstance(value, ClientFault) else transfer(request, value)
        except ClientFault as fault:
            return fault
        except TypeError as error:  # the value cannot be serialised
            return ClientFault(E_EXCEPTION, str(error))

    delivered = [r._replace(payload=silos.conform(r.handler, transfer(r, r.payload))) for r in requests]
    return [transfer_reply(r, v) for r, v in zip(requests, silos.answer(delivered), strict=True)]


@contextlib.contextmanager
def identity(run_id: int = 1) -> Iterator[None]:
    """Context manager: set the identity that Flower's Message needs outside Flower's own processes."""
    from flwr.supercore.task_identity import TaskIdentity

    saved = (TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id)
    TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = 1, run_id, SUPERLINK
    try:
        yield
    finally:
        TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = saved


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Context manager: write Flower's log to a file instead of the terminal."""
    from flwr.supercore.logger import FLOWER_LOGGER

    handlers, propagate = list(FLOWER_LOGGER.handlers), FLOWER_LOGGER.propagate
    file = logging.FileHandler(log, delay=True)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    FLOWER_LOGGER.handlers, FLOWER_LOGGER.propagate = [file], False
    try:
        yield
    finally:
        FLOWER_LOGGER.handlers, FLOWER_LOGGER.propagate = handlers, propagate
        file.close()


def is_simulated(grid: Any) -> bool:
    """Whether this Grid belongs to Flower's simulation."""
    from flwr.superlink.grid import InMemoryGrid

    return isinstance(grid, InMemoryGrid)


def push(grid: Any, messages: Sequence[Any]) -> set[str]:
    """Push messages; returns the ids of those that the SuperLink accepted.

    A SuperLink that is killed may have stored a part of a message without confirming it. Then it refuses this part if
    the part is sent by itself, but it accepts the complete message. It stores only one message for each id.
    """
    for _ in range(_PUSHES - 1):
        with contextlib.suppress(push_error()):
            return set(grid.push_messages(messages))
        time.sleep(0.25)
    return set(grid.push_messages(messages))


def push_error() -> type[Exception]:
    """The exception that Flower raises when the SuperLink refuses a part of a message."""
    from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

    error: type[Exception] = ObjectPushError
    return error


def error_codes() -> Any:
    """Flower's codes of error replies, by name."""
    from flwr.common.constant import ErrorCode

    return ErrorCode


def client_fault(error: Any) -> ClientFault:
    """Convert Flower's error reply to a fault: either the ClientApp raised, or the node is unavailable."""
    codes, reason = error_codes(), str(error.reason or "")[:400]
    gone = (
        codes.NODE_UNAVAILABLE,
        codes.MESSAGE_UNAVAILABLE,
        codes.REPLY_MESSAGE_UNAVAILABLE,
        codes.CLIENT_APP_CRASHED,
    )
    if error.code in gone or "ActorDiedError" in reason or "ActorUnavailableError" in reason:
        return ClientFault(E_DIED, reason or "the node is no longer available")
    return ClientFault(E_EXCEPTION, reason or f"Flower error {error.code}")


def process_died(error: Any) -> bool:
    """Whether the error says that the process ended while its node is available, so that a new process may succeed."""
    reason = str(error.reason or "")
    crashed = error.code == error_codes().CLIENT_APP_CRASHED
    return crashed or "ActorDiedError" in reason or "ActorUnavailableError" in reason


def message_lost(error: Any) -> bool:
    """Whether the error says that a message or its reply was lost, so that the message can be sent again."""
    codes = error_codes()
    return error.code in (codes.NODE_UNAVAILABLE, codes.MESSAGE_UNAVAILABLE, codes.REPLY_MESSAGE_UNAVAILABLE)


def restarting(error: Any) -> bool:
    """Whether the error says that Ray is still restarting the actor, which has not received the message."""
    reason = str(error.reason or "")
    return "ActorUnavailableError" in reason and "restarting" in reason


def build(app: Path) -> bytes:
    """The bundle of an app folder, as from ``flwr build``."""
    from flwr.cli.build import build_fab_from_disk

    return bytes(build_fab_from_disk(app))


OPERATOR = "operator.secret"  # file next to the authority's certificate; its holder has the operator's rights


class _Bearer:
    """Adds the operator's secret to requests to the SuperLink's gate."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        """Add the secret to a request and pass it on."""
        context.request.headers["Authorization"] = f"Bearer {self._secret}"
        return call_next(context)


class NodeView:
    """A silo's own requests to the SuperLink, signed with the key of its node.

    Args:
        address: host:port.
        root_certificates: PEM file of the authority that signed the SuperLink's certificate.
        key: the node's private key, in ssh-keygen's format.
    """

    def __init__(self, address: str, root_certificates: Path, key: Path) -> None:
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        private: Any = load_ssh_private_key(key.read_bytes(), None)
        self._client = FleetHttpClient.from_server_address(
            address,
            False,
            root_certificates.read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(private, private.public_key()),
            ],
        )

    def over(self, node: int, run: int) -> bool | None:
        """Whether a run has ended; None if the SuperLink does not answer."""
        import httpx
        from flwr.proto.node_pb2 import Node
        from flwr.proto.run_pb2 import GetRunRequest

        try:
            self._client.GetRun(GetRunRequest(node=Node(node_id=node), run_id=run))
        except httpx.HTTPStatusError as error:
            return True if error.response.status_code == httpx.codes.FORBIDDEN else None
        except (httpx.HTTPError, ValueError):
            return None
        return False

    def close(self) -> None:
        self._client.close()


class Control:
    """The operator's connection to a SuperLink, to register nodes, to submit runs, and to list nodes and runs.

    Args:
        address: host:port.
        root_certificates: PEM file of the authority that signed the SuperLink's certificate. The operator's secret is
            the file ``operator.secret`` in the same folder. A SuperLink without a gate needs no secret.

    A call raises :class:`RunError` if the SuperLink does not answer, and :class:`InputError` if it requires the secret.
    """

    def __init__(self, address: str, root_certificates: Path) -> None:
        from flwr.supercore.control.control_http_client import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        self._address, self._secret = address, root_certificates.parent / OPERATOR
        bearer = [_Bearer(self._secret.read_text().strip())] if self._secret.is_file() else []
        self._client = ControlHttpClient.from_server_address(
            server_address=address,
            insecure=False,
            root_certificates=root_certificates.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="fedfm"), *bearer],
        )

    def register(self, public_key: bytes, name: str) -> int:
        """Register a SuperNode's public key, so that the SuperLink admits the node; returns the node's id."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        with self._reaching():
            return int(self._client.RegisterNode(RegisterNodeRequest(public_key=public_key, name=name)).node_id)

    def unregister(self, node: int) -> None:
        """Remove a SuperNode's key, so that the SuperLink no longer admits the node."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        with self._reaching():
            self._client.UnregisterNode(UnregisterNodeRequest(node_id=node))

    def online(self) -> set[int]:
        """Ids of the SuperNodes that are now connected."""
        return {node.id for node in self.nodes() if node.online}

    def nodes(self) -> list[NodeStatus]:
        """The registered SuperNodes."""
        from flwr.proto.control_pb2 import ListNodesRequest

        from fedfm.engines.flower.node_status import NodeStatus, moment

        with self._reaching():
            nodes = self._client.ListNodes(ListNodesRequest()).nodes_info
        found = []
        for node in nodes:
            if node.status != "unregistered":
                online, seen = node.status == "online", moment(node.online_until) if node.last_activated_at else None
                found.append(NodeStatus(node.node_id, node.name, bytes(node.public_key), online, seen))
        return found

    def start(self, app: Path) -> int:
        """Submit an app folder, as ``flwr run`` does; returns the run's id.

        Raises:
            RunError: the SuperLink did not accept it.
        """
        import hashlib

        from flwr.common.serde import fab_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        content = build(app)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        with self._reaching():
            reply = self._client.StartRun(StartRunRequest(fab=fab_to_proto(fab)))
        if not reply.HasField("run_id"):
            raise RunError("the SuperLink did not start the run")
        return int(reply.run_id)

    def status(self, run_id: int) -> tuple[str, str]:
        """State (pending, starting, running or finished) and details of a run."""
        from flwr.proto.control_pb2 import ListRunsRequest

        with self._reaching():
            runs = self._client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict
        state = runs[run_id].status
        return str(state.status), f"{state.sub_status} {state.details}".strip()

    def stop(self, run_id: int) -> None:
        from flwr.proto.control_pb2 import StopRunRequest

        with self._reaching():
            self._client.StopRun(StopRunRequest(run_id=run_id))

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.FORBIDDEN:
                raise RunError(f"the SuperLink at {self._address} refuses: {error}") from None
            why = "has another secret" if self._secret.is_file() else "is missing"
            text = f"the SuperLink at {self._address} accepts only its operator: {self._secret} {why}"
            raise InputError(text) from None
        except httpx.HTTPError as error:
            raise RunError(f"the SuperLink at {self._address} cannot be reached: {error}") from None

    def close(self) -> None:
        self._client.close()
