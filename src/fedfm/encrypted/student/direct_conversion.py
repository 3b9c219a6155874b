"""Make a polynomial student without training: block by block, from least squares on auxiliary rows.

The polynomials of a trained ViT's functions fail for four reasons. Each has a cure in closed form:

- Row sums of exp spread over a factor of e^13. A row's scores may be shifted by any linear function of the row's query,
  which does not change the softmax: an offset of the keys, and a number a head. It is fitted to the logarithms of the
  row sums, in a norm that weighs large residuals (p = 8).
- Scores reach 20. The polynomial of exp is squared more often, as far as the block's scores need it.
- One row sum or variance above its interval makes an iteration diverge, and the row is lost. Their intervals have much
  room above the largest measured argument (:data:`ROOM_ABOVE`). If this room doubles, 1 / x takes one more step, on one
  ciphertext for each head, and 1 / sqrt(x) takes less than two, on one ciphertext. A block has hundreds of other steps.
  Where a block needs more than :data:`WIDEST_DIRECT`, its rare small arguments are left below the interval, where
  iterations only fall short.
- GELU is not a quadratic there. Each neuron gets a polynomial of degree 8
  (:mod:`fedfm.encrypted.student.neuron_polynomials`).

Errors add up over the blocks. So both maps whose outputs are added to the tokens, after the attention and after GELU,
are fitted again by ridge regression, to the states of the exact model at this place. So a block corrects a part of the
errors of the blocks before it.

Some ViTs have a neuron whose output is a hundred times the other features (Darcet et al. Vision transformers need
registers. ICLR 2024). Its weights after GELU are scaled down to a largest output (:data:`_PEAK`), in the exact model
as well: the norms that follow read its direction, not its length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fedfm.core.rows import Batch
from fedfm.encrypted.student import conversion, fit_polynomials
from fedfm.encrypted.student.distillation_loss import Taps
from fedfm.encrypted.student.modules import Functions
from fedfm.encrypted.student.neuron_polynomials import MARGIN, NeuronGelu, fit_neurons
from fedfm.encrypted.student.recalibrate import Call, first_inputs
from fedfm.errors import InputError

WIDEST_DIRECT = 65536.0  # largest ratio of an interval of 1 / x or 1 / sqrt(x)
ROOM_ABOVE = 8.0  # a largest row sum or variance may be exceeded by this factor
_PEAK = 12.0  # largest output of one neuron, in multiples of the root mean square of the median token
_POWER, _TURNS = 8, 12  # the norm of the offsets' residuals, and the turns of its reweighted least squares
_RIDGE = 1e-3
_SAMPLE = 16384  # number of tokens to which the maps are fitted
_FEW = 2048  # number of tokens to which a neuron's polynomial is fitted
_CLASS = 0.3  # share of the class tokens in the weight of a fit
_CLOSE = 0.03  # largest relative error of exp at the largest measured score
_LOWEST = -1.5  # scores may be as low as this times 2^squarings, where exp is nearly zero
_MOST_SQUARINGS = 7


@torch.no_grad()
def convert(
    taps: Taps,
    batches: Callable[[], Iterable[Batch]],
    tick: Callable[[], None] = lambda: None,
    margin: float = MARGIN,
    fitting_of: type[Fitting] | None = None,
) -> list[Any]:
    """Fit all polynomials, install them, and fit the maps to the tokens again; return the entries of all blocks.

    Args:
        taps: the student with exact functions.
        batches: the rows.
        tick: called after each block.
        margin: factor by which measured intervals are widened.
        fitting_of: how a block is converted; None for a pre-norm block.

    Raises:
        InputError: arguments of a block spread too far.
    """
    fitting_of = fitting_of or Fitting
    conversion.centre(taps.model.module)
    blocks: list[Any] = [block for _, block in taps.model.parts.blocks]
    embedding: Any = taps.model.parts.embedding
    front = sum(hasattr(embedding, name) for name in ("cls_token", "distillation_token"))
    entries = []
    with taps.model.evaluating():
        calls = first_inputs(taps, blocks[0], batches())
        weights = _token_weights(calls, front)
        exact = [args[0] for args, _ in calls]
        for number, (block, functions) in enumerate(zip(blocks, taps.functions, strict=True), 1):
            exact, between = fitting_of.exact_states(block, functions, exact, calls)
            fitting = fitting_of(taps, block, functions, f"block {number}", margin, weights)
            entry, states = fitting.convert(calls, between, exact)
            taps.states.clear()
            entries.append(entry)
            calls = [((x, *args[1:]), named) for x, (args, named) in zip(states, calls, strict=True)]
            tick()
    for module in taps.modules():
        module.forget()
    return entries


def _token_weights(calls: list[Call], front: int) -> Tensor:
    """Weigh all tokens of all rows, (tokens,): a sample of the patches, and all class tokens; the mean is 1."""
    chosen = []
    patches = sum(args[0].shape[0] * (args[0].shape[1] - front) for args, _ in calls)
    every = max(1, patches // _SAMPLE)
    for args, _ in calls:
        n, tokens, _ = args[0].shape
        weight = torch.zeros(n * tokens)
        weight[::every] = 1.0
        weight = weight.view(n, tokens)
        weight[:, :front] = -1.0
        chosen.append(weight.flatten())
    weights = torch.cat(chosen)
    special = weights < 0
    if front:
        weights[special] = _CLASS / (1 - _CLASS) * float((weights > 0).sum()) / float(special.sum())
    return weights / weights[weights > 0].mean()


def run_exact(block: Any, states: list[Tensor], calls: list[Call]) -> list[Tensor]:
    """Return a block's outputs for these states; the calls have its other arguments."""
    out = []
    for x, (args, named) in zip(states, calls, strict=True):
        y = block(x, *args[1:], **named)
        out.append(y[0] if isinstance(y, tuple) else y)
    return out


class Fitting:
    """The conversion of one block.

    Args:
        weights: (tokens,), of all tokens of all rows, in the order of the calls.
    """

    def __init__(
        self, taps: Taps, block: Any, functions: Functions, where: str, margin: float, weights: Tensor
    ) -> None:
        self.taps, self.block, self.functions = taps, block, functions
        self.where, self.margin = where, margin
        self.chosen = (weights > 0).nonzero().flatten()
        self.weights = weights[self.chosen].double()

    @staticmethod
    def exact_states(
        block: Any, functions: Functions, states: list[Tensor], calls: list[Call]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the exact block's outputs, and its tokens between attention and MLP; scale down a neuron's peaks."""
        down, caught = block.mlp.fc2, list[Tensor]()
        peaks = torch.zeros(down.in_features)

        def watch(_: nn.Module, args: Any) -> None:
            torch.maximum(peaks, args[0].abs().flatten(0, -2).amax(0), out=peaks)

        hooks = [
            down.register_forward_pre_hook(watch),
            block.attention.o_proj.register_forward_hook(lambda _, __, y: caught.append(y)),
        ]
        try:
            out = run_exact(block, states, calls)
        finally:
            for hook in hooks:
                hook.remove()
        between = [x + y for x, y in zip(states, caught, strict=True)]
        typical = torch.cat([x.var(-1, correction=0).flatten() for x in out]).median().sqrt()
        limits = _PEAK * typical / (peaks * down.weight.square().mean(0).sqrt()).clamp_min(1e-12)
        if bool((limits < 1).any()):
            down.weight.mul_(limits.clamp_max(1.0))
            down.weight.sub_(down.weight.mean(0, keepdim=True))
            out = run_exact(block, states, calls)
        return out, between

    def convert(
        self, calls: list[Call], between: list[Tensor], after: list[Tensor]
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the block's entry, and its outputs.

        Args:
            between, after: the exact model's tokens between attention and MLP, and after the block.
        """
        block, softmax, (first, second) = self.block, self.functions.softmax, self.functions.norms
        entry: dict[str, Any] = {"widest": WIDEST_DIRECT, "norms": []}
        states = [args[0] for args, _ in calls]
        entry["norms"].append(self._norm(states, "variances before the attention"))
        entry |= self._softmax(calls)
        contexts = list[Tensor]()
        fit_polynomials.apply_softmax(softmax, entry)
        first.inverse = fit_polynomials.norm_of(entry["norms"][0], WIDEST_DIRECT)
        hook = block.attention.o_proj.register_forward_pre_hook(lambda _, args: contexts.append(args[0]))
        try:
            run_exact(block, states, calls)
        finally:
            hook.remove()
        self._fit(block.attention.o_proj, contexts, self._missing(between, states))
        states = [x + block.attention.o_proj(y) for x, y in zip(states, contexts, strict=True)]
        entry["norms"].append(self._norm(states, "variances before the MLP"))
        second.inverse = fit_polynomials.norm_of(entry["norms"][1], WIDEST_DIRECT)
        hidden = [block.mlp.fc1(second(x)) for x in states]
        neurons, values = self._neurons(hidden)
        entry["gelu"] = neurons.to_entry()
        self.functions.gelu.quadratic = neurons
        self._fit(block.mlp.fc2, values, self._missing(after, states))
        return entry, [x + block.mlp.fc2(y) for x, y in zip(states, values, strict=True)]

    def _neurons(self, hidden: list[Tensor]) -> tuple[NeuronGelu, list[Tensor]]:
        """Fit each neuron's polynomial to its pre-activations; return the polynomials and their values."""
        low = torch.stack([x.flatten(0, -2).amin(0) for x in hidden]).amin(0)
        high = torch.stack([x.flatten(0, -2).amax(0) for x in hidden]).amax(0)
        few = slice(None, None, max(1, len(self.chosen) // _FEW))
        part = self.weights[few]
        neurons = fit_neurons(self._sample(hidden)[few], low, high, self.margin, part / part.mean())
        return neurons, [neurons.values(neurons.places(x)) for x in hidden]

    def _sample(self, parts: list[Tensor]) -> Tensor:
        return torch.cat([x.flatten(0, -2) for x in parts])[self.chosen]

    def _missing(self, exact: list[Tensor], states: list[Tensor]) -> Tensor:
        """Return the exact model's chosen tokens, centred, minus the student's."""
        want = self._sample(exact)
        return want - want.mean(-1, keepdim=True) - self._sample(states)

    def _norm(self, states: list[Tensor], what: str) -> dict[str, Any]:
        variances = torch.cat([x.double().var(-1, correction=0).flatten() for x in states])
        high = float(variances.max()) * self.margin * ROOM_ABOVE
        low = max(float(variances.min()) / self.margin**2, high / WIDEST_DIRECT * 1.001)
        return fit_polynomials.norm_entry((low, high), what, WIDEST_DIRECT)

    def _softmax(self, calls: list[Call]) -> dict[str, Any]:
        """Fit the offset of the keys, and choose the polynomials of exp and 1 / x.

        Both scores and logarithms of row sums move by the offset's linear function of the query, so that one pass of
        the exact block is enough.
        """
        softmax = self.functions.softmax
        found: dict[str, list[Tensor]] = {"query": [], "log_sums": [], "top": [], "bottom": []}
        with self.taps.recording():
            for args, named in calls:
                self.block(*args, **named)
                seen = softmax.seen
                found["query"].append(seen["query"].transpose(0, 1).flatten(1, 2))
                found["log_sums"].append(seen["log_sums"].transpose(0, 1).flatten(1))
                found["top"].append(seen["scores"].amax(-1).transpose(0, 1).flatten(1))
                found["bottom"].append(seen["scores"].amin(-1).transpose(0, 1).flatten(1))
        query, log_sums, top, bottom = (torch.cat(x, 1) for x in found.values())
        offset = torch.stack([-_offset(q, s) for q, s in zip(query, log_sums, strict=True)])
        moved = (query @ offset[:, :-1, None])[..., 0] + offset[:, -1:]  # (heads, rows)
        log_sums = log_sums + moved
        # Row sums and their inverses are equally large if each head's interval is around 1.
        high = log_sums.amax(1).double() + math.log(self.margin * ROOM_ABOVE)
        low = log_sums.amin(1).double() - math.log(self.margin)
        low = torch.maximum(low, high - math.log(WIDEST_DIRECT) + 1e-3)
        middle = ((low + high) / 2)[:, None].to(top)
        half = float((high - low).max()) / 2
        largest = max(float((top + moved - middle).max()), 0.0)
        lowest = float((bottom + moved - middle).min())
        enough = (
            r
            for r in range(3, _MOST_SQUARINGS + 1)
            if largest**3 / (6 * 4**r) <= _CLOSE and self.margin * lowest > _LOWEST * 2**r
        )
        squarings = next(enough, None)
        if squarings is None:
            raise InputError(
                f"{self.where}: scores from {lowest:.3g} to {largest:.3g} are too large for {_MOST_SQUARINGS} "
                "squarings; a student with distil.direct = false can be trained to have smaller ones"
            )
        ends = torch.tensor([[-half], [half]], dtype=torch.float64).expand(2, len(offset)).exp()
        return {
            # No score of a row exceeds the logarithm of its row sum.
            "exp": {"degree": 2, "squarings": squarings, "interval": [_LOWEST * 2**squarings, half]},
            "inverse": fit_polynomials.inverse_entry(ends, "scaled", WIDEST_DIRECT),
            "offset": offset[:, :-1].tolist(),
            "shift": (offset[:, -1] - middle[:, 0]).tolist(),
        }

    def _fit(self, linear: nn.Linear, features: list[Tensor], missing: Tensor) -> None:
        """Change a map by ridge regression so that its outputs for the chosen tokens are nearest to ``missing``."""
        x, y, w = self._sample(features).double(), missing.double(), self.weights[:, None]
        mean, middle = (x * w).sum(0) / w.sum(), (y * w).sum(0) / w.sum()
        x, y = x - mean, y - middle
        gram = (x * w).T @ x
        ridge = _RIDGE * gram.diagonal().median()
        error = y - x @ linear.weight.double().T
        change = torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=gram.dtype), (x * w).T @ error)
        weight = linear.weight.double() + change.T
        bias = middle - weight @ mean
        linear.weight.copy_(weight - weight.mean(0, keepdim=True))
        linear.bias.copy_(bias - bias.mean())


def _offset(query: Tensor, log_sums: Tensor) -> Tensor:
    """Return (c, b) for which query @ c + b is closest to the log sums, in the norm of p = 8."""
    x = torch.cat([query, torch.ones(len(query), 1)], 1).double()
    y, weight = log_sums.double(), torch.ones(len(query), dtype=torch.float64)
    found = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(_TURNS):
        gram = (x * weight[:, None]).T @ x
        gram += 1e-4 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
        found = torch.linalg.solve(gram, (x * weight[:, None]).T @ y)
        away = (y - x @ found).abs()
        weight = (weight + (away / away.max().clamp_min(1e-12)).clamp_min(1e-2) ** (_POWER - 2)) / 2
    return found.float()
