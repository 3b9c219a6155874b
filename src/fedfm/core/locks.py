"""Locks of files and folders between processes. A lock ends with its process, even if the process is killed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

from fedfm.errors import InputError

_UNKNOWN = (errno.EBADF, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # errors of file systems that cannot lock folders
_TRIES = 100  # attempts to make a folder that others remove
_TAKEN: weakref.WeakSet[Lock] = weakref.WeakSet()  # locks of this process


class Lock:
    """An exclusive lock; call :meth:`take` to acquire it.

    Args:
        path: a file, which is made if it is absent.
        folder: whether ``path`` is an existing folder, which is locked without a file.
    """

    def __init__(self, path: Path, *, folder: bool = False) -> None:
        self.path, self._folder, self._descriptor = path, folder, -1

    @property
    def is_taken(self) -> bool:
        """Whether this object has the lock."""
        return self._descriptor >= 0

    def take(self, *, wait: bool = False) -> bool:
        """Take the lock; returns False if another process, or another object of this one, has it.

        Args:
            wait: whether to wait until the lock is free.

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
            if _is_at(descriptor, self.path):
                self._descriptor = descriptor
                _TAKEN.add(self)
            else:  # the last owner removed this file, and others lock a new one
                os.close(descriptor)
        return True

    def release(self) -> None:
        """Release the lock."""
        if self.is_taken:
            _TAKEN.discard(self)
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.release()


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the file at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _forget() -> None:
    """Release the locks in a forked child, since the child's copies would outlive a killed parent."""
    for lock in list(_TAKEN):
        lock.release()


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def alone_in(folder: Path, doing: str, mode: int = 0o777) -> Iterator[None]:
    """Context manager: exclusive use of a folder, which is made if it is absent.

    If the folder was made here and stays empty, it is removed before the lock is released, since another process may
    use it afterwards.

    Args:
        doing: what another process may be doing, e.g. "exporting".
        mode: permissions of a new folder, before the user's umask.

    Raises:
        InputError: the folder cannot be made, or another process has the lock.
    """
    lock, made = Lock(folder, folder=True), not folder.exists()
    try:
        for _ in range(_TRIES):
            folder.mkdir(mode=mode, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another process removed the empty folder
                if not lock.take():
                    raise InputError(f"{folder}: another process is {doing} here")
                break
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror}") from None
    try:
        yield
    finally:
        if made:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()
        lock.release()
