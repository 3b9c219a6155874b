"""A site's warm worker: one process that keeps Python, torch, the model and the rows, and answers one message at a time.

``python -m fedfm.engines.worker FOLDER`` serves the site that ``FOLDER/site.json`` describes, on a Unix socket that only its
user can open. It ends when nobody has asked for a while, or with the process that FEDFM_PARENT names.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from fedfm.engines import stub

IDLE = 900.0  # seconds without a message; FEDFM_WORKER_IDLE says otherwise


def main() -> None:
    """Serve until idle."""
    os.umask(0o077)
    folder = Path(sys.argv[1])
    _watch_parent()
    with open(folder / "worker.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # another one serves already
        lock.write(str(os.getpid()))
        lock.flush()
        with contextlib.closing(_listen(folder)) as listener:
            _serve(folder, listener)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(stub.address(folder))


def _listen(folder: Path) -> socket.socket:
    """Bound before anything is loaded: who connects early waits."""
    path = stub.address(folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(8)
    listener.settimeout(float(os.environ.get("FEDFM_WORKER_IDLE", IDLE)))
    return listener


def _serve(folder: Path, listener: socket.socket) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    from fedfm.engines import site
    from fedfm.serve import single_thread

    with single_thread():
        here, own = site.of_folder(folder)
        here.warm()
        while True:
            try:
                link, _ = listener.accept()
            except TimeoutError:
                return
            with contextlib.closing(link), contextlib.suppress(OSError):
                link.settimeout(60.0)  # a peer that stalls does not hold the site
                message = stub.receive(link)
                if message is None:
                    continue
                client, handler, head, data = message
                link.settimeout(None)
                answer = here.answer(own if own is not None else json.loads(client), handler, head, data)
                stub.send(link, "", "", *answer)


def _watch_parent() -> None:
    parent = int(os.environ.get("FEDFM_PARENT", "0"))
    if not parent:
        return

    def watch() -> None:
        while True:
            try:
                os.kill(parent, 0)
            except ProcessLookupError:
                os._exit(0)
            except PermissionError:
                return
            time.sleep(0.5)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
