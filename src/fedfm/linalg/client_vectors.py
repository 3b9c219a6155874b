"""A vector for each client, in memory or in files."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

from fedfm.linalg.out_of_core import keep_all
from fedfm.linalg.params import Params


class Vectors(dict[str, Params]):
    """A vector for each client.

    A sum or difference has the clients that both operands have, in the order of the right operand. Its vectors are
    computed one by one, and :func:`keep_all` stores each before the next one is computed.

    Example:
        >>> theta_bar = Vectors(a=Params({"w": torch.tensor([1.0])}), b=Params({"w": torch.tensor([2.0])}))
        >>> {i: w["w"].tolist() for i, w in (theta_bar + {"b": theta_bar["a"]}).items()}
        {'b': [3.0]}
    """

    def __add__(self, other: Mapping[str, Params]) -> Vectors:
        return self._with(other, operator.add)

    def __sub__(self, other: Mapping[str, Params]) -> Vectors:
        return self._with(other, operator.sub)

    def less(self, w: Params) -> Vectors:
        """Each vector minus w."""
        return self - dict.fromkeys(self, w)

    def cast(self, other: Mapping[str, Params]) -> Vectors:
        """Each vector in the dtypes of the same client's vector in ``other``."""
        return self._with({i: other[i] for i in self}, lambda x, y: x.cast(y.layout))

    def _with(self, other: Mapping[str, Params], operation: Callable[[Params, Params], Params]) -> Vectors:
        both = [i for i in other if i in self]
        return Vectors(zip(both, keep_all(operation(self[i], other[i]) for i in both), strict=True))
