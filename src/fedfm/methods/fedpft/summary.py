"""FedPFT's message, a client's summary: this module checks it, reads its mixtures and draws rows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm import seeds
from fedfm.core.client import ClientId
from fedfm.core.federation import MAX_NORM
from fedfm.errors import E_FIELD, E_NONFINITE, E_NORM, E_SHAPE, ClientFault
from fedfm.methods.fedpft.encoding import Packed, unpack
from fedfm.methods.fedpft.mixtures.mixture import Mixture

MOST = 1 << 20  # largest count of a class in a summary; this count is the number of rows that every pass draws
_BLOCK = 1 << 14  # rows drawn at a time


@dataclass(frozen=True)
class Summary:
    """A client's reply: a mixture g^{i,c} for each of its classes c.

    Attributes:
        labels, counts: the classes, and the number |F^{i,c}| of rows of each, or ``samples`` if counts are withheld.
        mixtures: the mixtures of these classes, in this order.
        withheld: classes with fewer examples than ``min_count``; empty if counts are withheld.
        withheld_rows: number of examples of the withheld classes.
        kl, tv: divergences of the classes' smoothed features from their mixtures; empty unless ``bound`` is set.
    """

    labels: list[int]
    counts: list[int]
    mixtures: Packed
    withheld: list[int]
    withheld_rows: int = 0
    kl: list[float] = field(default_factory=list)
    tv: list[float] = field(default_factory=list)


def mixtures_of(summaries: Sequence[Summary]) -> list[tuple[int, int, Mixture]]:
    """(class, count, mixture) of all classes in the summaries."""
    return [(c, n, g) for s in summaries for c, n, g in zip(s.labels, s.counts, unpack(s.mixtures), strict=True)]


def gaussian(mean: np.ndarray, variance: Any) -> Mixture:
    """A mixture of one component, from its mean and its variance, which is a number, (d,) or (d, d)."""
    variances = np.asarray(variance)[None]
    scales = np.linalg.cholesky(variances) if variances.ndim == 3 else np.sqrt(variances)
    return Mixture(np.ones(1), mean[None].astype(np.float32), scales.astype(np.float32))


def checker(classes: int, dim: int, bounded: bool = False) -> Callable[[Summary], None]:
    """A function that refuses invalid summaries before anything is drawn from them."""

    def check(s: Summary) -> None:
        if not len(s.labels) == len(s.counts) == len(s.mixtures.components):
            raise ClientFault(
                E_FIELD, f"{len(s.labels)} labels, {len(s.counts)} counts, and another number of mixtures"
            )
        if len(set(s.labels)) < len(s.labels) or not all(0 <= c < classes for c in s.labels):
            raise ClientFault(E_FIELD, "labels that occur twice or are none of the classes")
        if not all(0 < n <= MOST for n in s.counts):
            raise ClientFault(E_FIELD, f"a count is not from 1 to {MOST}")
        away = set(s.withheld)
        if len(away) < len(s.withheld) or not away <= set(range(classes)) - set(s.labels):
            raise ClientFault(E_FIELD, "withheld classes that occur twice, are sent, or are none of the classes")
        if not len(away) <= s.withheld_rows <= MOST * len(away):
            raise ClientFault(E_FIELD, f"{len(away)} withheld classes cannot have the stated number of rows")
        if s.labels and s.mixtures.dim != dim:
            raise ClientFault(E_SHAPE, f"mixtures of {s.mixtures.dim} dimensions, features have {dim}")
        if {len(s.kl), len(s.tv)} != {len(s.labels) if bounded else 0} or not all(0 <= t <= 1 for t in s.tv):
            raise ClientFault(E_FIELD, "divergences that do not fit the labels")
        if not all(map(math.isfinite, s.kl)):
            raise ClientFault(E_NONFINITE, "a divergence is NaN or infinite")
        if not all(abs(divergence) <= MAX_NORM for divergence in s.kl):
            raise ClientFault(E_NORM, f"a divergence is above {MAX_NORM:g}")
        unpack(s.mixtures)

    return check


class Synthetic:
    """Draws from mixtures. Every pass draws the same rows, since each mixture has its own random stream."""

    def __init__(self, mixtures: Sequence[tuple[int, int, Mixture]], samples: int, seed: int) -> None:
        self._parts = [(c, samples or n, g) for c, n, g in mixtures]
        self._seed = seed
        self.numbers = sum(n * g.dim for _, n, g in self._parts)

    def __call__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i, (c, n, g) in enumerate(self._parts):
            rng = seeds.generator(self._seed, "mixture", c, i)
            for start in range(0, n, _BLOCK):
                count = min(_BLOCK, n - start)
                yield torch.from_numpy(g.sample(count, rng)), torch.full((count,), c, dtype=torch.int64)


def shuffle(
    received: Mapping[ClientId, Sequence[tuple[int, int, Mixture]]], rng: np.random.Generator
) -> list[tuple[int, int, Mixture]]:
    """All mixtures in random order, without their senders, as from a relay between clients and server.

    This hides which client has which classes. It protects no row, and similar mixtures may still be linked to one
    client.
    """
    everything = [mixture for found in received.values() for mixture in found]
    return [everything[i] for i in rng.permutation(len(everything))]


def check_errors(reply: dict[str, int]) -> None:
    """Refuse a reply whose number of errors does not fit its number of rows."""
    if reply.keys() != {"errors", "rows"} or not 0 <= reply["errors"] <= reply["rows"] <= MOST:
        raise ClientFault(E_FIELD, "the errors do not fit the number of rows")
