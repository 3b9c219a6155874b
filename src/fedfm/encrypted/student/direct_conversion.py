"""Make a polynomial student without training: block by block, from least squares on auxiliary rows.

The polynomials of a trained ViT's functions fail for four reasons. Each has a cure in closed form:

- Row sums of exp spread over a factor of e^13. A row's scores may be shifted by any linear function of the row's query,
  which does not change the softmax: an offset of the keys, and a number a head. It is fitted to the logarithms of the
  row sums, in a norm that weighs large residuals (p = 8).
- Scores reach 20. The polynomial of exp is squared more often, as far as the block's scores need it.
- Variances and row sums keep ratios above 64. A larger ratio takes more steps on one ciphertext for the variances, and
  on one for each head for the row sums: few among the hundreds of the other steps. Where a block needs more than
  :data:`WIDEST_DIRECT`, its rare small arguments are left below the interval, where iterations only fall short.
- GELU is no quadratic there. Each neuron gets a polynomial of degree 8
  (:mod:`fedfm.encrypted.student.neuron_polynomials`), and ridge regression fits the map after it again.

Some ViTs have a neuron whose output is a hundred times the other features (Darcet et al. Vision transformers need
registers. ICLR 2024). Its weights after GELU are scaled down to a largest output (:data:`_PEAK`): the norms that follow
read its direction, not its length.

Later blocks are fitted to the states that the earlier polynomials give, so that errors do not add up unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fedfm.core.rows import Batch
from fedfm.encrypted.student import conversion, fit_polynomials
from fedfm.encrypted.student.distillation_loss import Taps
from fedfm.encrypted.student.fit_polynomials import Measured
from fedfm.encrypted.student.modules import Functions
from fedfm.encrypted.student.neuron_polynomials import MARGIN, fit_neurons
from fedfm.encrypted.student.polynomials import Exponential
from fedfm.encrypted.student.recalibrate import Call, first_inputs, run_block
from fedfm.errors import InputError

WIDEST_DIRECT = 4096.0  # largest ratio of an interval of 1 / x or 1 / sqrt(x)
_PEAK = 12.0  # largest output of one neuron, in multiples of the root mean square of the median token
_POWER, _TURNS = 8, 12  # the norm of the offsets' residuals, and the turns of its reweighted least squares
_RIDGE = 1e-3
_SAMPLE = 6144  # number of tokens to which the map after GELU is fitted
_FEW = 1024  # number of tokens to which a neuron's polynomial is fitted
_CLOSE = 0.03  # largest relative error of exp at the largest score
_MOST_SQUARINGS = 7


@torch.no_grad()
def convert(
    taps: Taps,
    batches: Callable[[], Iterable[Batch]],
    tick: Callable[[], None] = lambda: None,
    margin: float = MARGIN,
) -> list[Any]:
    """Fit all polynomials, install them, and fit the maps after GELU again; return the entries of all blocks.

    Args:
        taps: the student with exact functions; a pre-norm model.
        batches: the rows.
        tick: called after each block.
        margin: factor by which measured intervals are widened.

    Raises:
        InputError: arguments of a block spread too far.
    """
    conversion.centre(taps.model.module)
    blocks: list[Any] = [block for _, block in taps.model.parts.blocks]
    entries = []
    with taps.model.evaluating():
        calls = first_inputs(taps, blocks[0], batches())
        for number, (block, functions) in enumerate(zip(blocks, taps.functions, strict=True), 1):
            entry, states = _convert_block(taps, block, functions, calls, f"block {number}", margin)
            entries.append(entry)
            calls = [((x, *args[1:]), named) for x, (args, named) in zip(states, calls, strict=True)]
            tick()
    for module in taps.modules():
        module.forget()
    return entries


def _convert_block(
    taps: Taps, block: Any, functions: Functions, calls: list[Call], where: str, margin: float
) -> tuple[dict[str, Any], list[Tensor]]:
    softmax = functions.softmax
    queries, log_sums = _rows_of_scores(taps, block, functions, calls)
    found = torch.stack([-_offset(q, s) for q, s in zip(queries, log_sums, strict=True)]).to(softmax.scales)
    softmax.offset, softmax.shift = found[:, :-1].contiguous(), found[:, -1].contiguous()
    softmax.exponential = _exponential(taps, block, functions, calls, where)
    hidden = _Hidden(block.mlp.fc1.out_features, sum(args[0].shape[0] * args[0].shape[1] for args, _ in calls))
    hook = block.mlp.fc1.register_forward_hook(hidden)
    try:
        measured, states = run_block(taps, block, functions, calls, margin)
    finally:
        hook.remove()
    typical = torch.cat([x.var(-1, correction=0).flatten() for x in states]).median().sqrt()
    _leave_room(measured)
    entry = fit_polynomials.entry(measured, "scaled", softmax.exponential, where, WIDEST_DIRECT)
    x = torch.cat(hidden.sample)
    neurons = fit_neurons(x[:: max(1, len(x) // _FEW)], hidden.low, hidden.high, margin)
    entry |= {"gelu": neurons.to_entry(), "offset": softmax.offset.tolist(), "shift": softmax.shift.tolist()}
    _fit_down(block.mlp.fc2, x, neurons.values(neurons.places(x)), typical)
    fit_polynomials.apply(functions, entry)
    _, states = run_block(taps, block, functions, calls)
    return entry, states


def _leave_room(measured: Measured) -> None:
    """Raise the largest positive arguments by a margin, and cut the smallest ones at the widest ratio.

    Above its interval an iteration diverges; below, it only gives less than 1 / x or 1 / sqrt(x).
    """
    for name in ("sums", "first", "second"):
        low, high = measured.extremes[name]
        high = high * measured.wider
        low = torch.maximum(low, high * measured.wider**2 / WIDEST_DIRECT)
        measured.extremes[name] = torch.stack([low, high])


class _Hidden:
    """A hook that keeps a sample of pre-activations (tokens, neurons), and the extremes of all of them."""

    def __init__(self, neurons: int, tokens: int) -> None:
        self.low, self.high = torch.full((neurons,), torch.inf), torch.full((neurons,), -torch.inf)
        self.sample: list[Tensor] = []
        self._every = max(1, tokens // _SAMPLE)

    def __call__(self, _: nn.Module, __: Any, y: Tensor) -> None:
        rows = y.flatten(0, -2)
        self.sample.append(rows[:: self._every])
        self.low, self.high = torch.minimum(self.low, rows.amin(0)), torch.maximum(self.high, rows.amax(0))


def _rows_of_scores(taps: Taps, block: nn.Module, functions: Functions, calls: list[Call]) -> tuple[Tensor, Tensor]:
    """Return the queries (heads, rows, d / heads) and the logarithms of their row sums of exp (heads, rows)."""
    queries, log_sums = [], []
    with taps.recording():
        for args, named in calls:
            block(*args, **named)
            seen = functions.softmax.seen
            queries.append(seen["query"].transpose(0, 1).flatten(1, 2))
            log_sums.append(seen["log_sums"].transpose(0, 1).flatten(1))
            taps.states.clear()
    return torch.cat(queries, 1), torch.cat(log_sums, 1)


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


def _exponential(taps: Taps, block: nn.Module, functions: Functions, calls: list[Call], where: str) -> Exponential:
    """Return the polynomial of exp with the fewest squarings that is close to exp at the largest score.

    Raises:
        InputError: the most squarings are too few.
    """
    ends: list[Tensor] = []
    with taps.recording():
        for args, named in calls:
            block(*args, **named)
            ends.append(torch.stack(functions.softmax.seen["scores"].aminmax()))
            taps.states.clear()
    low, high = float(torch.stack(ends).min()), float(torch.stack(ends).max())
    for squarings in range(3, _MOST_SQUARINGS + 1):
        if low > -1.5 * 2**squarings and high**3 / (6 * 4**squarings) <= _CLOSE:
            return Exponential(2, squarings, (low, high))
    raise InputError(
        f"{where}: scores from {low:.3g} to {high:.3g} are too large for {_MOST_SQUARINGS} squarings; a student with "
        "distil.direct = false can be trained to have smaller ones"
    )


def _fit_down(down: nn.Linear, hidden: Tensor, features: Tensor, typical: Tensor) -> None:
    """Fit the map after GELU to the polynomials' values (n, neurons), so that its outputs stay what they were."""
    exact = torch.nn.functional.gelu(hidden)
    peaks = exact.abs().amax(0) * down.weight.square().mean(0).sqrt()
    weight = down.weight * (_PEAK * typical / peaks.clamp_min(1e-12)).clamp_max(1.0)
    want = exact @ weight.T
    mean, middle = features.mean(0), want.mean(0)
    centred = (features - mean).double()
    gram = centred.T @ centred
    ridge = _RIDGE * gram.diagonal().median()
    error = (want - middle).double() - centred @ weight.double().T
    change = torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=gram.dtype), centred.T @ error)
    down.weight.copy_(weight + change.T)
    down.bias.add_(middle - down.weight @ mean)
    down.weight.sub_(down.weight.mean(0, keepdim=True)), down.bias.sub_(down.bias.mean())
