"""ServerApp and ClientApp of a Flower app that runs an experiment (``fedfm.apps``).

``fedfm app DIR`` writes such an app. Server and clients run their own installed code, and compare versions before the
first round. This module imports Flower but neither torch nor transformers: Flower starts a process for every message,
and a long-lived worker does the client's work.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedfm.core.wire import flower_records
from fedfm.engines.flower import client_stub, run_config
from fedfm.errors import E_EXCEPTION, E_EXPERIMENT, ClientFault, InputError

__all__ = ["client", "server"]


class ClientHostApp(ClientApp):  # type: ignore[misc]
    """Forwards every message to the client host, which knows the handlers and the silo's policy.

    Flower's own dispatch needs all handler names when the app is imported. The experiment is not known at that time.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        """Forward the message to the client's worker; in a Ray actor, which stays alive, answer it here."""
        head, data = "", b""
        try:
            head, data = flower_records.unpack(message.content)
            halves = _answer(flower_records.handler_of(message.metadata.message_type), context, head, data)
        except ClientFault as fault:
            halves = client_stub.fault_halves(fault, head, data)
        except OSError as error:
            halves = client_stub.fault_halves(client_stub.off(error, Path()), head, data)
        except Exception as error:  # the error's text may contain paths, so only this node's log has it
            traceback.print_exc()
            text = f"{type(error).__name__}: see the node's log"
            halves = client_stub.fault_halves(ClientFault(E_EXCEPTION, text), head, data)
        return Message(flower_records.pack(*halves), reply_to=message)


def _answer(handler: str, context: Context, head: str, data: bytes) -> tuple[str, bytes]:
    node = context.node_config
    try:
        config = run_config.merge_settings(context.run_config)
    except InputError as error:
        raise ClientFault(E_EXPERIMENT, str(error)) from None
    if "silo" not in node and is_ray_actor():
        from fedfm.engines.flower.simulation import answer

        return answer(config, int(node["partition-id"]), context.run_id, handler, head, data)
    folder = client_stub.admit(config, node, context.run_id)
    client_stub.enter_run(folder, context.node_id, context.run_id)
    return client_stub.call(folder, node.get("client"), handler, head, data)


def is_ray_actor() -> bool:
    """Whether this process is an actor of Flower's simulation, which runs on the operator's own machine."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


client = ClientHostApp()
server = ServerApp()


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Run or resume the experiment that the run's configuration contains."""
    from fedfm.engines.flower.server_app import serve

    serve(grid, context)
