"""Locks between processes, of a file or of a folder. A lock ends with its process, even if that is killed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

from fedfm.errors import InputError

_UNKNOWN = (errno.EBADF, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # a network file system that locks no folders
_TRIES = 100  # to make a folder that others remove
_TAKEN: weakref.WeakSet[Lock] = weakref.WeakSet()  # of this process


class Lock:
    """An exclusive lock; it is free until :meth:`take`.

    Args:
        path: a file, which is made if it is absent.
        folder: ``path`` is a folder; it is there, and holds no file for the lock.
    """

    def __init__(self, path: Path, *, folder: bool = False) -> None:
        self.path, self._folder, self._descriptor = path, folder, -1

    @property
    def is_taken(self) -> bool:
        """Whether this object has the lock."""
        return self._descriptor >= 0

    def take(self, *, wait: bool = False) -> bool:
        """Take the lock; False if another process, or another object of this one, has it. Writes nothing to the file.

        Args:
            wait: until it is free.

        Raises:
            OSError: the file can be neither opened nor made, or its file system has no locks.
        """
        while not self.is_taken:
            flags = os.O_DIRECTORY if self._folder else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            descriptor = os.open(self.path, flags | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(descriptor)
                return False
            except OSError as error:
                if not self._folder or error.errno not in _UNKNOWN:
                    os.close(descriptor)
                    raise
            if _is_at(descriptor, self.path):  # else its last owner has removed it: the next one is another file
                self._descriptor = descriptor
                _TAKEN.add(self)
            else:
                os.close(descriptor)
        return True

    def release(self) -> None:
        """Let others take it."""
        if self.is_taken:
            _TAKEN.discard(self)
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.release()


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one of this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _forget() -> None:
    """In a forked child: its copies would keep the locks of a parent that is killed."""
    for lock in list(_TAKEN):
        lock.release()


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def alone_in(folder: Path, doing: str, mode: int = 0o777) -> Iterator[None]:
    """Context manager: a folder, which is made if it is absent, where no other process that asks for it works.

    A folder that was made for it goes again if it stays empty: within the lock, since it may be another's without.

    Args:
        doing: what another process may be doing, e.g. "exporting".
        mode: permissions of a new folder, before the user's umask.

    Raises:
        InputError: it cannot be made, or another process has the lock.
    """
    lock, made = Lock(folder, folder=True), not folder.exists()
    try:
        for _ in range(_TRIES):
            folder.mkdir(mode=mode, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another process has removed its empty folder
                if not lock.take():
                    raise InputError(f"{folder}: another process is {doing} here")
                break
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror}") from None
    try:
        yield
    finally:
        if made:
            with contextlib.suppress(OSError):  # it holds something
                folder.rmdir()
        lock.release()
