"""Method to ServerApp and ClientApp: the components of an app that runs an experiment (``fedfm.apps``).

``fedfm app DIR`` writes such an app. Both sides run the code that is installed where they are; they tell each other
their versions before the first round. Importing this module imports Flower, and neither torch nor transformers: Flower
starts a process for every message, and the client's work is done in a worker that stays.
"""

from __future__ import annotations

import sys
import traceback

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedfm.core.wire import flower_records
from fedfm.engines.flower import client_stub
from fedfm.errors import E_EXCEPTION, ClientFault

__all__ = ["client", "server"]


class SiteApp(ClientApp):  # type: ignore[misc]
    """Answers every handler of every method: which ones there are, the site knows, and what it allows, its policy.

    Flower's own dispatch wants all names when the app is imported, before the experiment is known.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        """Forward to the site's worker; in a Ray actor, which stays warm itself, answer here."""
        head, data = "", b""
        try:
            head, data = flower_records.unpack(message.content)
            halves = _answer(flower_records.handler_of(message.metadata.message_type), context, head, data)
        except ClientFault as fault:
            halves = client_stub.fault_halves(fault, head, data)
        except Exception as error:  # its text may hold paths: it stays in this node's log
            traceback.print_exc()
            text = f"{type(error).__name__}: see the node's log"
            halves = client_stub.fault_halves(ClientFault(E_EXCEPTION, text), head, data)
        return Message(flower_records.pack(*halves), reply_to=message)


def _answer(handler: str, context: Context, head: str, data: bytes) -> tuple[str, bytes]:
    config, node = context.run_config, context.node_config
    if "silo" not in node and is_ray_actor():
        from fedfm.engines.flower.simulation import answer

        return answer(config, int(node["partition-id"]), context.run_id, handler, head, data)
    folder = client_stub.admitted(config, node, context.run_id)
    return client_stub.call(folder, node.get("client"), handler, head, data)


def is_ray_actor() -> bool:
    """Whether this process is one of Flower's simulation: on the machine of who started the run."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


client = SiteApp()
server = ServerApp()


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Run the experiment of the run's configuration, or go on with it."""
    from fedfm.engines.flower.server_app import serve

    serve(grid, context)
