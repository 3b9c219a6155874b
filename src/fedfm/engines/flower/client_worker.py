"""A client's worker: a process that keeps model and rows in memory and answers one message at a time.

``python -m fedfm.engines.flower.client_worker FOLDER`` serves the client that ``FOLDER/site.json`` describes, on a Unix
socket that only its user can open. The worker ends after some idle time, on request, or when the process with the id
FEDFM_PARENT ends. Workers of several folders, for clients with parts of one table, share the memory of table and model.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from fedfm.engines.child_processes import die_with, run_and_exit, watch_parent
from fedfm.engines.flower import client_stub
from fedfm.errors import InputError
from fedfm.linalg.threads import torch_threads
from fedfm.models import cuda_devices

if TYPE_CHECKING:
    from fedfm.engines.flower import client_host

IDLE = 900.0  # a worker ends after this many seconds without a message; FEDFM_WORKER_IDLE overrides it
ENDED = 30.0  # the same after the last round, if the host occupies an accelerator that others may need


def main() -> None:
    """Serve until idle. For several folders, load everything first and then fork one process for each."""
    os.umask(0o077)
    watch_parent()
    posts = [post for post in map(_Post.take, map(Path, sys.argv[1:])) if post is not None]
    if not posts:
        return
    if not _downloads(posts[0].folder):
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # read when those libraries are imported
    from fedfm.engines.flower import client_host

    if len(posts) > 1 and (places := _places(posts[0].folder, len(posts))):
        _spawn(posts, places)
        return
    with torch_threads(1):
        shared = client_host.of_folder(posts[0].folder)[0]
        shared.warm()
    if len(posts) == 1:
        posts[0].serve(shared)
        return
    parent = os.getpid()
    for post in posts:
        if os.fork() == 0:
            run_and_exit(partial(_serve_post, post, posts, parent, shared))
    for post in posts:
        post.leave()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _serve_post(post: _Post, posts: list[_Post], parent: int, shared: client_host.ClientHost) -> None:
    """Answer the messages of one client in this fork."""
    die_with(parent)
    watch_parent()
    for other in posts:
        if other is not post:
            other.leave()
    post.serve(shared)


def _places(folder: Path, count: int) -> list[str | None]:
    """The visible GPUs of each worker if the model is on an accelerator, otherwise an empty list. None means all GPUs.

    A process that has opened an accelerator cannot fork, so each worker is then a separate program.
    """
    import torch

    experiment = tomllib.loads(json.loads((folder / "site.json").read_text(encoding="utf-8"))["experiment"])
    device, run = experiment.get("model", {}).get("device", "auto"), experiment.get("run", {})
    if not cuda_devices.opens_accelerator(device):
        return []
    if device not in ("auto", "cuda") or not torch.cuda.is_available():
        return [None] * count
    gpus = cuda_devices.visible(os.environ, torch.cuda.device_count())
    try:
        found = cuda_devices.visible_to_processes(gpus, float(run.get("gpus_per_client") or 1.0))
    except InputError:  # the ServerApp reports it
        return [None] * count
    return [found[i % len(found)] for i in range(count)]


def _spawn(posts: list[_Post], places: list[str | None]) -> None:
    """Start a worker program for each post, and wait until all have ended."""
    started = []
    for post, place in zip(posts, places, strict=True):
        post.leave()
        seen = {} if place is None else {cuda_devices.VISIBLE: place}
        program = [sys.executable, "-P", "-m", "fedfm.engines.flower.client_worker", str(post.folder.resolve())]
        started.append(subprocess.Popen(program, env=os.environ | seen, stdin=subprocess.DEVNULL))
    for worker in started:
        worker.wait()


def _downloads(folder: Path) -> bool:
    """Whether this client may download models: a silo may if its file says so; a client on loopback always may."""
    try:
        silo = json.loads((folder / "site.json").read_text(encoding="utf-8"))["silo"]
        return silo is None or tomllib.loads(Path(silo).read_text(encoding="utf-8-sig")).get("downloads") is True
    except (OSError, ValueError):
        return False


class _Post:
    """A client's lock and socket. Its worker has the lock, and the socket opens before anything is loaded."""

    def __init__(self, folder: Path, lock: TextIO) -> None:
        self.folder, self._lock, self._listener = folder, lock, _listen(folder)

    @classmethod
    def take(cls, folder: Path) -> _Post | None:
        """Take the lock; None if another process has it."""
        lock = open(folder / "worker.lock", "a+")  # noqa: SIM115 - the lock lasts as long as the file is open
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return None
        return cls(folder, lock)

    def leave(self) -> None:
        """Close lock and socket in this process; the copies in other processes stay open."""
        self._lock.close()
        self._listener.close()

    def serve(self, shared: client_host.ClientHost) -> None:
        """Answer messages until idle."""
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        _serve(self.folder, self._listener, shared)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(client_stub.address(self.folder))
        self.leave()


def _listen(folder: Path) -> socket.socket:
    """A listening socket. It queues connections until the host is loaded."""
    path = client_stub.address(folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(8)
    listener.settimeout(float(os.environ.get("FEDFM_WORKER_IDLE", IDLE)))
    return listener


def _serve(folder: Path, listener: socket.socket, shared: client_host.ClientHost) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    from fedfm.engines.flower import client_host

    with torch_threads(1):
        here, own = client_host.of_folder(folder)
        here.warm(shared)
        idle = listener.gettimeout() or IDLE
        while True:
            try:
                link, _ = listener.accept()
            except TimeoutError:
                return
            with contextlib.closing(link), contextlib.suppress(OSError):
                link.settimeout(60.0)  # a stalled peer cannot block the host
                message = client_stub.receive(link)
                if message is None:
                    continue
                client, handler, head, data = message
                if handler == client_stub.END:
                    return
                link.settimeout(None)
                answer = here.answer(own if own is not None else json.loads(client), handler, head, data)
                client_stub.send(link, "", "", *answer)
                listener.settimeout(min(ENDED, idle) if here.may_end else idle)


if __name__ == "__main__":
    main()
