"""All uses of Ray's private API, and of the private parts of Flower's simulation; see :mod:`.private_api`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any


def simulate(
    main: Callable[[Any, Any], None],
    client: Any,
    nodes: int,
    gpus: float = 0.0,
    pool: Callable[..., Any] | None = None,
) -> None:
    """Run a ServerApp's main function and a ClientApp in Flower's simulation, on a Ray instance that is running.

    Args:
        gpus: GPUs per actor; Ray makes only these visible to the actor.
        pool: makes the pool of actors, in place of Flower's own.
    """
    from flwr.server.superlink.fleet.vce.backend import raybackend
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    app = ServerApp()
    app.main()(main)
    # Flower passes these options to Ray. With them Ray restarts a dead actor; otherwise all later messages to it fail.
    resources = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0 if pool else -1}
    backend: Any = raybackend
    flowers = backend.BasicActorPool
    backend.BasicActorPool = pool or flowers
    try:
        run_simulation(app, client, nodes, backend_config={"client_resources": resources})
    finally:
        backend.BasicActorPool = flowers


def start_ray(workers: int, folder: str, gpus: int) -> None:
    """Start Ray with ``workers`` cores and ``gpus`` GPUs; ``folder`` is for its files.

    Raises:
        ImportError: Ray is not installed.
    """
    import ray

    ray.init(
        address="local",  # also if RAY_ADDRESS names a cluster
        num_cpus=workers,
        num_gpus=gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=f"{folder}/ray",
    )


def join_ray(address: str, environment: Mapping[str, str]) -> None:
    """Connect to a Ray cluster that is running; its processes for this job get these environment variables."""
    import ray

    ray.init(
        address=address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": dict(environment)},
    )


def kill_ray() -> None:
    """Kill the processes of the Ray instance that this process started."""
    from ray._private import worker

    node, worker._global_node = worker._global_node, None
    if node is not None:
        node.kill_all_processes(check_alive=False, allow_graceful=False)
