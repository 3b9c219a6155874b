"""Choose polynomials for the functions of a block from the extremes of the functions' arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedfm.encrypted.student.modules import Functions, PolynomialSoftmax
from fedfm.encrypted.student.neuron_polynomials import NeuronGelu
from fedfm.encrypted.student.polynomials import WIDEST, Exponential, Inverse, InverseSquareRoot, Quadratic
from fedfm.errors import InputError

KINDS = ("scaled", "paper")
WIDER = 1.3  # factor by which measured intervals are widened
ROOM = 1.1  # a new measurement, widened by this factor, must fit into the interval
_ROUNDING = 1e-9
_NORMS = {"first": "variances before the attention", "second": "variances before the MLP"}
ERROR = 5e-3  # largest relative error of 1 / x and 1 / sqrt(x) within their intervals


class Measured:
    """The extremes of the arguments of one block's functions, over all rows so far.

    Attributes:
        extremes: smallest and largest values by argument: (2,) for ``scores``, ``hidden`` (inputs of GELU), ``first``
            and ``second`` (the variances before attention and MLP); (2, heads) for ``sums``, the row sums of the
            polynomial of exp.
        moments, targets: sums of x^0 .. x^4 and of gelu(x) x^0 .. x^2 over the inputs x of GELU, for least squares.
    """

    def __init__(self) -> None:
        self.extremes: dict[str, Tensor] = {}
        self.moments = torch.zeros(5, dtype=torch.float64)
        self.targets = torch.zeros(3, dtype=torch.float64)

    def add(self, block: Functions) -> None:
        """Add the arguments that the block's functions recorded for the last batch."""
        seen = block.softmax.seen
        self._extend("scores", seen["scores"].flatten())
        self._extend("sums", seen["sums"].transpose(0, 1).flatten(1))
        for name, norm in zip(("first", "second"), block.norms, strict=True):
            self._extend(name, norm.seen["variance"].flatten())
        x = block.gelu.seen["hidden"].double().flatten()
        self._extend("hidden", x)
        y = nn.functional.gelu(x)
        self.moments += torch.stack([(x**i).sum() for i in range(5)]).cpu()
        self.targets += torch.stack([(y * x**i).sum() for i in range(3)]).cpu()

    def _extend(self, name: str, x: Tensor) -> None:
        low, high = x.amin(-1).double().cpu(), x.amax(-1).double().cpu()
        if name in self.extremes:
            old = self.extremes[name]
            low, high = torch.minimum(low, old[0]), torch.maximum(high, old[1])
        self.extremes[name] = torch.stack([low, high])

    def quadratic(self) -> tuple[float, float, float]:
        """Return (a, b, c) of the quadratic that fits GELU by least squares."""
        gram = torch.stack([self.moments[i : i + 3] for i in range(3)])
        c, b, a = torch.linalg.solve(gram, self.targets).tolist()
        return a, b, c

    def around(self, name: str) -> tuple[float, float]:
        """Return the extremes, widened around their middle by :data:`WIDER`."""
        low, high = self.extremes[name].tolist()
        middle, half = (low + high) / 2, (high - low) / 2 * WIDER
        return middle - half, middle + half

    def positive(self, name: str, widest: float = WIDEST) -> Tensor:
        """Return extremes (2, ...) of positive values; :data:`WIDER` divides the lower and multiplies the upper.

        A smaller factor is used if the ratio of the extremes would otherwise be above ``widest``.
        """
        low, high = self.extremes[name]
        factor = (widest * (1 - _ROUNDING) * low / high).clamp_min(1).sqrt().clamp_max(WIDER)
        return torch.stack([low / factor, high * factor])


def exponential_of(kind: str, degree: int, squarings: int) -> Exponential:
    """Make the polynomial for exp: the paper's T_6, or T_degree(x / 2^squarings)^(2^squarings)."""
    return Exponential(6, 0) if kind == "paper" else Exponential(degree, squarings)


def entry(measured: Measured, kind: str, exponential: Exponential, where: str) -> dict[str, Any]:
    """Choose the polynomials of one block; return them in the form for :func:`apply` and ``config.json``.

    Raises:
        InputError: the arguments of 1 / x or 1 / sqrt(x) spread too far, or the fit of GELU has a <= 0.
    """
    a, b, c = (0.125, 0.25, 0.5) if kind == "paper" else measured.quadratic()
    try:
        inverse = inverse_entry(measured.positive("sums"), kind, WIDEST)
        norms = [_norm(measured.positive(name), kind, name, WIDEST) for name in _NORMS]
        exponential = dataclasses.replace(exponential, interval=measured.around("scores"))
        quadratic = Quadratic(a, b, c, measured.around("hidden"))
    except ValueError as error:
        raise InputError(
            f"{where}: {error}; train longer in the tame stage (the first of distil.epochs), or use a higher rate there"
        ) from None
    return {
        "exp": {
            "degree": exponential.degree,
            "squarings": exponential.squarings,
            "interval": list(exponential.interval),
        },
        "inverse": inverse,
        "norms": norms,
        "gelu": {"a": quadratic.a, "b": quadratic.b, "c": quadratic.c, "interval": list(quadratic.interval)},
    }


def refit(
    entry: Mapping[str, Any], measured: Measured, kind: str, name: str, *, keep: bool = False
) -> dict[str, Any] | None:
    """Choose one argument's polynomials again; return the block's new entry, or None if the interval is wide enough.

    The model was trained with the coefficients of exp and GELU. They stay the same; only their intervals change.

    Args:
        measured: the extremes of the block's arguments.
        name: ``sums``, ``first``, ``second``, ``scores`` or ``hidden``, as in :class:`Measured`.
        keep: whether the new interval must include the old one. If the resulting ratio is too large for 1 / x or
            1 / sqrt(x), the lower end is cut: above an interval the iterations diverge, but below it they only lose
            accuracy.

    Raises:
        ValueError: the arguments spread too far.
    """
    low, high = measured.extremes[name]
    widest = entry.get("widest", WIDEST)
    if name in _NORMS:
        place = list(_NORMS).index(name)
        old = torch.tensor(entry["norms"][place]["interval"], dtype=torch.float64)
        if _inside(low, high, old):
            return None
        norms = list(entry["norms"])
        norms[place] = _norm(_union(measured.positive(name, widest), old if keep else None, widest), kind, name, widest)
        return {**entry, "norms": norms}
    if name == "sums":
        scales = torch.tensor(entry["inverse"]["scales"], dtype=torch.float64)
        old = torch.tensor(entry["inverse"]["interval"], dtype=torch.float64)
        if _inside(low * scales, high * scales, old):
            return None
        found = _union(measured.positive(name, widest), old[:, None] / scales if keep else None, widest)
        return {**entry, "inverse": inverse_entry(found, kind, widest)}
    part = {"scores": "exp", "hidden": "gelu"}[name]
    first, last = entry[part]["interval"]
    if first <= low and high <= last:
        return None
    low, high = measured.around(name)
    interval = [min(low, first), max(high, last)] if keep else [low, high]
    return {**entry, part: {**entry[part], "interval": interval}}


def _union(found: Tensor, old: Tensor | None, widest: float) -> Tensor:
    """Return the union of two ranges of positive arguments (2, ...); if its ratio is too large, cut the lower end."""
    if old is None:
        return found
    low, high = torch.minimum(found[0], old[0]), torch.maximum(found[1], old[1])
    return torch.stack([torch.maximum(low, high / (widest * (1 - _ROUNDING))), high])


def _inside(low: Tensor, high: Tensor, interval: Tensor) -> bool:
    """Whether positive arguments lie in an interval and leave room for unseen rows."""
    return bool(interval[0] * ROOM <= low.min()) and bool(high.max() * ROOM <= interval[1])


def inverse_entry(found: Tensor, kind: str, widest: float) -> dict[str, Any]:
    """Approximate 1 / x for row sums of exp with these extremes (2, heads); scales bring all heads to one interval."""
    lows, highs = found
    scales = 1 / highs if kind == "paper" else 2 / (lows + highs)
    interval = (float((lows * scales).min()), float((highs * scales).max()))
    check_ratio(interval, "row sums of exp", widest)
    steps = 7 if kind == "paper" else next(s for s in range(1, 64) if Inverse(s, interval, 1.0).error() <= ERROR)
    return {"steps": steps, "interval": list(interval), "scales": scales.tolist()}


def _norm(found: Tensor, kind: str, name: str, widest: float) -> dict[str, Any]:
    low, high = found.tolist()
    if kind == "paper":
        check_ratio((low, high), _NORMS[name], widest)
        return {"kind": "inverse", "steps": 7, "scale": 1 / high, "interval": [low, high]}
    return norm_entry((low, high), _NORMS[name], widest)


def norm_entry(interval: tuple[float, float], what: str, widest: float) -> dict[str, Any]:
    """Approximate 1 / sqrt(x) on an interval by Newton's iteration.

    Raises:
        ValueError: the interval is not positive, or its ratio is above ``widest``.
    """
    check_ratio(interval, what, widest)
    steps = InverseSquareRoot.within(ERROR, interval, widest).steps
    return {"kind": "inverse_square_root", "steps": steps, "interval": list(interval)}


def apply(block: Functions, entry: Mapping[str, Any]) -> None:
    """Install the polynomials of an entry into a block.

    Raises:
        KeyError, TypeError, ValueError: the entry is damaged, or a polynomial is not accurate in its interval.
    """
    gelu, widest = entry["gelu"], float(entry.get("widest", WIDEST))
    apply_softmax(block.softmax, entry)
    for norm, spec in zip(block.norms, entry["norms"], strict=True):
        norm.inverse = norm_of(spec, widest)
    if gelu.get("kind") == "neurons":
        block.gelu.quadratic = NeuronGelu.from_entry(gelu)
    else:
        block.gelu.quadratic = Quadratic(gelu["a"], gelu["b"], gelu["c"], _pair(gelu["interval"]))


def apply_softmax(softmax: PolynomialSoftmax, entry: Mapping[str, Any]) -> None:
    """Install the polynomials of exp and 1 / x, and the offset of the keys; it raises what :func:`apply` does."""
    exp, inverse = entry["exp"], entry["inverse"]
    scales = torch.tensor(inverse["scales"], dtype=torch.float64)
    if scales.shape != softmax.scales.shape:
        raise ValueError(f"{len(scales)} scales came for {len(softmax.scales)} heads")
    softmax.exponential = Exponential(exp["degree"], exp["squarings"], _pair(exp["interval"]))
    check_ratio(_pair(inverse["interval"]), "row sums of exp", float(entry.get("widest", WIDEST)))
    softmax.inverse = Inverse(inverse["steps"], _pair(inverse["interval"]), 1.0)
    softmax.scales.copy_(scales)
    if "offset" in entry:
        softmax.offset = torch.tensor(entry["offset"]).to(softmax.scales)
        softmax.shift = torch.tensor(entry["shift"]).to(softmax.scales)


def norm_of(spec: Mapping[str, Any], widest: float) -> InverseSquareRoot | Inverse:
    """Return a norm's polynomial; it raises what :func:`apply` does."""
    interval = _pair(spec["interval"])
    check_ratio(interval, "variances", widest)
    if spec["kind"] == "inverse_square_root":
        return InverseSquareRoot(spec["steps"], interval)
    return Inverse(spec["steps"], interval, spec["scale"])


def _pair(values: Any) -> tuple[float, float]:
    low, high = map(float, values)
    if not low <= high:
        raise ValueError(f"interval {values}: expected low <= high")
    return low, high


def check_ratio(interval: tuple[float, float], what: str, widest: float = WIDEST) -> None:
    """Raise a ValueError if an interval for 1 / x or 1 / sqrt(x) is not positive or is too wide."""
    low, high = interval
    if not low > 0 or high / low > widest:
        raise ValueError(
            f"{what} from {low:.3g} to {high:.3g}; expected positive values with a ratio of at most {widest:g}"
        )
