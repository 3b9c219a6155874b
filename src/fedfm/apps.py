"""The Flower apps: ``fedfm.apps:server`` and ``fedfm.apps:client``, the components of an app that runs an experiment.

``fedfm app DIR`` writes such an app. Both sides run the code that is installed where they are; they tell each other
their versions before the first round. Importing this module imports Flower, and neither torch nor transformers: Flower
starts a process for every message, and the client's work is done in a worker that stays.
"""

from __future__ import annotations

import sys

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedfm import records
from fedfm.engines import stub
from fedfm.errors import ClientFault, InputError

__all__ = ["client", "server"]


class SiteApp(ClientApp):  # type: ignore[misc]
    """Answers every handler of every method: which ones there are, the site knows, and what it allows, its policy.

    Flower's own dispatch wants all names when the app is imported, before the experiment is known.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        """Forward to the site's worker; in a Ray actor, which stays warm itself, answer here."""
        head, data = "", b""
        try:
            head, data = records.unpack(message.content)
            halves = _answer(message.metadata.message_type, context, head, data)
        except ClientFault as fault:
            halves = stub.fault_halves(fault, head, data)
        except InputError as error:
            halves = stub.fault_halves(ClientFault("E_EXCEPTION", str(error)), head, data)
        return Message(records.pack(*halves), reply_to=message)


def _answer(handler: str, context: Context, head: str, data: bytes) -> tuple[str, bytes]:
    config, node = context.run_config, context.node_config
    if "ray" in sys.modules:
        from fedfm.engines.simulation import answer

        return answer(config, int(node["partition-id"]), context.run_id, handler, head, data)
    folder = stub.folder_of(config, node, context.run_id)
    stub.prepare(folder, config, node)
    return stub.call(folder, node.get("client", node.get("partition-id")), handler, head, data)


client = SiteApp()
server = ServerApp()


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Run the experiment of the run's configuration, or go on with it."""
    from fedfm.engines.host import serve

    serve(grid, context)
