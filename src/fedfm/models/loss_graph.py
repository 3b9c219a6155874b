"""Searches a loss's autograd graph for the trained tensors on which the loss depends, without a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

T = TypeVar("T")


@contextmanager
def without_values() -> Iterator[None]:
    """Context manager: graphs store no values, so that a backward pass would fail."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda _: None, _never):
        yield


def with_graph(compute: Callable[[], T]) -> T:
    """The result of ``compute`` within :func:`without_values`; if that fails, the result of a second call outside."""
    try:
        with without_values():
            return compute()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # the user's code has an error, which compute raises again, or needs a backward pass
        return compute()


def _never(_: Any) -> Tensor:
    raise RuntimeError("this graph stores no values for a backward pass")


def reach(loss: Any, live: Mapping[str, Tensor]) -> set[str]:
    """Names of the tensors on which the loss depends."""
    names = {id(tensor): name for name, tensor in live.items()}
    found = (names.get(id(getattr(node, "variable", None))) for node in _nodes(loss))
    return {name for name in found if name is not None}


def is_opaque(loss: Any) -> bool:
    """Whether the graph has functions in Python, such as gradient checkpointing, which may hide their inputs."""
    return any(isinstance(node, BackwardCFunction) for node in _nodes(loss))


def _nodes(loss: Any) -> Iterator[Any]:
    root = getattr(loss, "grad_fn", None)
    done, ahead = set[Any](), [] if root is None else [root]
    while ahead:
        node = ahead.pop()
        if node in done:
            continue
        done.add(node)
        yield node
        ahead += [parent for parent, _ in node.next_functions if parent is not None]
