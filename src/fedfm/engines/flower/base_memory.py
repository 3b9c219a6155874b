"""Frozen weights that the processes of one machine hold once.

Weights that are used in the type in which they are stored stay in the model's file: processes map this file, and the
system holds its pages once. This module is for weights that loading converts, e.g. from bfloat16 to float32. The first
process copies them into an anonymous memory file. The others map it through ``/proc/PID/fd``, so nothing is left when
the last process has ended, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from fedfm.engines.shared_memory import data_at, map_file

_WORTH = 1 << 20  # bytes; fewer are not shared
_OPEN: dict[str, int] = {}  # descriptors through which other processes map this process's files, by the file's name


def share(module: nn.Module, name: str) -> int:
    """Let frozen parameters be views of a file that this machine's processes with the same ``name`` share.

    Only processes of one user share a file. Values that differ from those in the file are not shared.

    Returns:
        The number of bytes that are shared; 0 if sharing is not possible or not worth it.
    """
    frozen = list(_frozen_in_memory(module)) if hasattr(os, "memfd_create") else []
    if sum(parameter.nbytes for parameter in frozen) < _WORTH:
        return 0
    shapes = " ".join(f"{p.dtype} {tuple(p.shape)}" for p in frozen)
    file = "fedfm-base-" + hashlib.sha256(f"{name} {shapes}".encode()).hexdigest()[:24]
    shared = 0
    with contextlib.suppress(OSError), _one_at_a_time():
        fd = _find(file)
        _OPEN[file] = fd if fd is not None else _write(file, frozen)
        block, at = torch.from_numpy(map_file(os.dup(_OPEN[file]), shared=False)), 0
        for parameter in frozen:
            view = block[at : at + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            if torch.equal(view, parameter):
                parameter.data = view
                shared += parameter.nbytes
            at = data_at(at, parameter.nbytes)
    return shared


def _frozen_in_memory(module: nn.Module) -> Iterator[nn.Parameter]:
    """Frozen parameters on the CPU whose memory is not a file already."""
    maps = re.findall(r"^(\w+)-(\w+) \S+ \S+ \S+ [1-9]", Path("/proc/self/maps").read_text(), re.M)
    files = [(int(begin, 16), int(end, 16)) for begin, end in maps]
    for parameter in module.parameters():
        plain = parameter.device.type == "cpu" and parameter.is_contiguous() and not parameter.requires_grad
        if plain and parameter.nbytes and not any(b <= parameter.data_ptr() < e for b, e in files):
            yield parameter


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait until no other process of this machine shares weights."""
    folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _find(file: str) -> int | None:
    """A descriptor of the memory file with this name in any process of this user; None if there is none."""
    for entry in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # the process belongs to another user, or has ended
            for link in entry.iterdir():
                if os.readlink(link).startswith(f"/memfd:{file}"):
                    return os.open(link, os.O_RDONLY)
    return None


def _write(file: str, parameters: Sequence[nn.Parameter]) -> int:
    """Make a memory file of the parameters; returns its descriptor."""
    fd = os.memfd_create(file, os.MFD_CLOEXEC)
    at = 0
    with os.fdopen(os.dup(fd), "wb") as to:
        for parameter in parameters:
            to.seek(at)
            to.write(parameter.detach().reshape(-1).view(torch.uint8).numpy().data)
            at = data_at(at, parameter.nbytes)
        to.truncate(at)
    return fd
