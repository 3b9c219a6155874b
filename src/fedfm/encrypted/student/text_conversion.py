"""Make a BERT's polynomial student without training: the blocks of :mod:`.direct_conversion` in post-norm order."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedfm.encrypted.student import fit_polynomials
from fedfm.encrypted.student.direct_conversion import WIDEST_DIRECT, Fitting, run_exact
from fedfm.encrypted.student.modules import Functions
from fedfm.encrypted.student.recalibrate import Call


class PostNormFitting(Fitting):
    """The conversion of one block that normalises after each sum.

    Scale and shift of the norms do not change. The maps before a norm are fitted again to the exact model's sums.
    """

    @staticmethod
    def exact_states(
        block: Any, functions: Functions, states: list[Tensor], calls: list[Call]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the exact block's outputs, and its states after the first norm."""
        caught = list[Tensor]()
        hook = functions.norms[0].register_forward_hook(lambda _, __, y: caught.append(y))
        try:
            return run_exact(block, states, calls), caught
        finally:
            hook.remove()

    def convert(
        self, calls: list[Call], between: list[Tensor], after: list[Tensor]
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the block's entry, and its outputs; see :meth:`Fitting.convert`."""
        block, softmax, (first, second) = self.block, self.functions.softmax, self.functions.norms
        entry: dict[str, Any] = {"widest": WIDEST_DIRECT, "norms": []}
        states = [args[0] for args, _ in calls]
        entry |= self._softmax(calls)
        fit_polynomials.apply_softmax(softmax, entry)
        contexts, projection = list[Tensor](), block.attention.output.dense
        hook = projection.register_forward_pre_hook(lambda _, args: contexts.append(args[0]))
        try:
            run_exact(block, states, calls)
        finally:
            hook.remove()
        self._fit(projection, contexts, self._missing_sums(first, between, states, projection, contexts))
        sums = [x + projection(y) for x, y in zip(states, contexts, strict=True)]
        entry["norms"].append(self._norm(sums, "variances after the attention"))
        first.inverse = fit_polynomials.norm_of(entry["norms"][0], WIDEST_DIRECT)
        states = [first(x) for x in sums]
        neurons, values = self._neurons([block.intermediate.dense(x) for x in states])
        entry["gelu"] = neurons.to_entry()
        self.functions.gelu.quadratic = neurons
        down = block.output.dense
        self._fit(down, values, self._missing_sums(second, after, states, down, values))
        sums = [x + down(y) for x, y in zip(states, values, strict=True)]
        entry["norms"].append(self._norm(sums, "variances after the MLP"))
        second.inverse = fit_polynomials.norm_of(entry["norms"][1], WIDEST_DIRECT)
        return entry, [second(x) for x in sums]

    def _missing_sums(
        self, norm: Any, want: list[Tensor], states: list[Tensor], linear: Any, features: list[Tensor]
    ) -> Tensor:
        """Return what the map has to add to the states, so that the norm gives the wanted states, centred.

        The norm forgets each token's scale. So each wanted state has the scale that the sum has now.
        """
        sums = self._sample([x + linear(y) for x, y in zip(states, features, strict=True)])
        size = sums.var(-1, correction=0, keepdim=True).sqrt()
        missing: Tensor = (self._sample(want) - norm.bias) / norm.weight * size - self._sample(states)
        return missing - missing.mean(-1, keepdim=True)
