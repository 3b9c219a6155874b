"""Call a user's function with random draws that are the same in every process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fedfm import seeds
from fedfm.errors import InputError


def call(function: Callable[[], Any], name: str, seed: int) -> Any:
    """The return value of a user's function; the seed fixes its random draws in every process.

    Raises:
        InputError: the function fails; the message has the function's error.
    """
    try:
        with _seed_generators(seeds.derive(seed, "own")):
            return function()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{name}() fails: {type(error).__name__}: {error}") from error


@contextmanager
def _seed_generators(seed: int) -> Iterator[None]:
    """Context manager: the global random generators start at the seed; afterwards they have their former states."""
    kept = random.getstate(), np.random.get_state()  # noqa: NPY002 - a user's code may draw from it
    try:
        with torch.random.fork_rng(devices=[]):
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002
