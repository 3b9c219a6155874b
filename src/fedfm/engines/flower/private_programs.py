"""Start Flower's programs with changes: a SuperLink with a gate, and SuperNodes that run only fedfm's app.

``python -m fedfm.engines.flower.private_programs superlink|supernode|superexec ARGUMENTS``, or ``... forks FOLDER``,
where the folder tells deployments apart in a list of processes. As in :mod:`.private_api`, each use of Flower's private
API has a check in ``tests/engines/test_private_api.py``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from fedfm.engines.child_processes import run_and_exit
from fedfm.engines.flower import bundle
from fedfm.engines.flower.quiet_time import QuietTime


def superlink() -> None:
    """Run ``flower-superlink`` behind :class:`~.gate.AccessGate`. Arguments: the secret's file, then the program's own.

    The gate protects everything that the program's web server offers. Flower's other protocol, gRPC, is closed.
    """
    import uvicorn
    from flwr.common.constant import FLWR_INTERNAL_GRPC_CONTROL_API, FLWR_INTERNAL_GRPC_FLEET_API
    from flwr.superlink.cli import flower_superlink

    from fedfm.engines.flower.gate import AccessGate

    secret, serve = Path(sys.argv.pop(1)).read_bytes(), uvicorn.run
    for way in (FLWR_INTERNAL_GRPC_CONTROL_API, FLWR_INTERNAL_GRPC_FLEET_API):
        os.environ.pop(way, None)

    def run(app: Any, **options: Any) -> None:
        options["proxy_headers"] = False  # headers must not make a remote peer look local
        serve(AccessGate(app, secret), **options)

    uvicorn.run = run
    flower_superlink()


def _with_sleep(sleep: Callable[[float], None]) -> types.SimpleNamespace:
    """The module ``time`` with another ``sleep``."""
    return types.SimpleNamespace(**{**vars(time), "sleep": sleep})


def supernode() -> None:
    """Run ``flower-supernode``, but ask for messages every 0.2 s to 1 s instead of every 3 s, which is cheap on
    loopback.

    The interval is a constant in Flower. On other networks use ``flower-supernode`` itself.
    """
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli import flower_supernode

    silence, push = QuietTime(), loop._push_messages

    def push_and_listen(*args: Any, **more: Any) -> None:
        silence.end()  # a message has come
        push(*args, **more)
        silence.end()

    loop._push_messages = push_and_listen
    loop.time = _with_sleep(lambda seconds: time.sleep(min(seconds, silence.pause(0.2))))
    flower_supernode()


def superexec() -> None:
    """Run ``flower-superexec``, but fork for each message, since a new program would spend seconds on imports.

    The fork runs the code of ``flwr-clientapp``, but only for fedfm's app. Tasks other than a ClientApp's fail.
    """
    import flwr.clientapp
    import flwr.serverapp
    import flwr.supernode.cli.flwr_clientapp  # noqa: F401 - imported once for all forks
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor import LaunchResult, SubprocessExecutor

    silence = _ask_less_in_silence()

    def launch(self: Any, spec: Any) -> Any:
        silence.end()
        if spec.task_type != TaskType.CLIENT_APP:
            return LaunchResult.failed("a silo runs only ClientApps")
        if os.fork() == 0:
            _clientapp(spec)
        return LaunchResult.accepted()

    SubprocessExecutor.launch = launch
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the forks
    flower_superexec()


def _ask_less_in_silence() -> QuietTime:
    """Let an executor ask for tasks every second after a long silence; returns the silence, which a task ends."""
    silence, loop = QuietTime(), sys.modules["flwr.supercore.superexec.run_superexec"]
    vars(loop)["time"] = _with_sleep(lambda seconds: time.sleep(silence.pause(seconds)))
    return silence


def _clientapp(spec: Any) -> NoReturn:
    """Answer one message in this fork, then end the fork."""
    from flwr.supercore.exit import exit_handler
    from flwr.supercore.tls import validate_and_resolve_root_certificates

    def body() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        exit_handler.registered_exit_handlers.clear()  # they belong to the parent process
        _own_app_only().run_clientapp(
            runtime_api_address=spec.runtime_api_address,
            token=spec.token,
            insecure=spec.insecure,
            certificates=validate_and_resolve_root_certificates(spec.root_certificates_path, spec.insecure),
            parent_pid=spec.parent_pid,
            runtime_dependency_install=False,
        )

    run_and_exit(body)


def _own_app_only() -> Any:
    """The module of ``flwr-clientapp``, changed to unpack no bundle except fedfm's own."""
    program: Any = sys.modules["flwr.supernode.runtime.run_clientapp"]
    unpack = program.install_from_fab

    def unpack_own(content: bytes, *args: Any, **more: Any) -> Any:
        bundle.check(content)
        return unpack(content, *args, **more)

    program.install_from_fab = unpack_own
    return program


def server_superexec() -> None:
    """Run ``flower-superexec``, which starts one ServerApp and then has little to do."""
    from flwr.supercore.cli import flower_superexec

    _ask_less_in_silence()
    flower_superexec()


def forks() -> NoReturn:
    """Run all programs of a deployment as forks of this process."""
    import flwr.clientapp
    import flwr.serverapp
    import flwr.supernode.cli.flwr_clientapp
    import flwr.supernode.main  # noqa: F401 - all of these are imported once for all forks
    import uvicorn  # noqa: F401
    from flwr.supercore.cli import flower_superexec  # noqa: F401
    from flwr.superlink.cli import flower_superlink  # noqa: F401
    from flwr.supernode import start_client_internal  # noqa: F401

    import fedfm.engines.flower.gate  # noqa: F401
    from fedfm.engines.flower.program_forks import serve

    serve({**PROGRAMS, "server-superexec": server_superexec})


PROGRAMS = {"superlink": superlink, "supernode": supernode, "superexec": superexec}


def main() -> None:
    """Run the program that the first argument names."""
    program = {**PROGRAMS, "forks": forks}[sys.argv[1]]
    sys.argv = [f"flower-{sys.argv[1]}", *sys.argv[2:]]
    program()


if __name__ == "__main__":
    main()
