"""Read numeric targets, scale them, and score predictions of them.

The scores are computed from sums over rows. Let e = prediction - target and z = target, both in units of the target's
standard deviation. The scores of a target need the sums of |e|, e^2, z and z^2. Their standard errors also need the
sums of e^4, e^2 z, e^2 z^2, z^3 and z^4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfm.core.client import MAX_WEIGHT
from fedfm.core.row_targets import RowTargets
from fedfm.core.text import listing
from fedfm.data.sources._files import column
from fedfm.data.sources._sheet import Sheet
from fedfm.data.spec import DataSpec
from fedfm.data.table import FederatedData
from fedfm.errors import E_FIELD, ClientFault, InputError
from fedfm.linalg.params import Params
from fedfm.tasks._target_numbers import LARGEST, doubts, numbers

if TYPE_CHECKING:
    from torch import Tensor

    from fedfm.core.rows import Batch
    from fedfm.data.table import Table
    from fedfm.models.network import Network
    from fedfm.models.trained import Trained

ONE = "value"  # name of the target if there is only one; its column may have another name at each silo
MOMENTS = 9  # number of sums for each target
_ROUNDING = 1e-15  # the mean of equal numbers is rounded: it differs from them by at most this share
_SCALED_BINS = (-2.0, -1.0, 0.0, 1.0, 2.0)  # edges of bins of targets for a survey, in deviations from the mean
_PLAIN_BINS = (-1000.0, -100.0, -10.0, -1.0, 0.0, 1.0, 10.0, 100.0, 1000.0)  # the same without a known scale
_LOST = 1e-3  # largest distance of two neighbouring outputs, in deviations, at which means are added to the bias


# --- rows -------------------------------------------------------------------------------------------------------------
def read(sheet: Sheet, spec: DataSpec, source: str) -> RowTargets:
    """The numbers of the columns ``data.targets``; if the key is not set, those of the column ``data.label``.

    Raises:
        InputError: a column is missing, or a cell is not a finite number; the message says where.
    """
    names = spec.listed_columns("targets")
    if not names:
        return _of_label(sheet, spec, source)
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f'data.targets: "{twice[0]}" occurs twice; each column is one target', key="data.targets")
    cells = [column(sheet.columns, name, "data.targets", source) for name in names]
    columns = [numbers(values, name, sheet) for values, name in zip(cells, names, strict=True)]
    return RowTargets(np.stack(columns, axis=1), names, frozenset(names), doubts(cells, columns, names))


def _of_label(sheet: Sheet, spec: DataSpec, source: str) -> RowTargets:
    """The numbers of the label column; a list of numbers in each cell gives several targets."""
    values, name, notices = column(sheet.columns, spec.label, "data.label", source), spec.label, tuple[str, ...]()
    known = sheet.names.get(name)
    if not any(isinstance(value, list) for value in values):
        if known:
            notices = (
                f'the numbers in column "{name}" stand for classes ({listing(known, 3)}): they are read as numbers',
            )
        found = numbers(values, name, sheet)
        said = (*notices, *doubts([values], [found], [name]))
        return RowTargets(found[:, None], (ONE,), frozenset({name}), said)
    sizes = [len(value) if isinstance(value, list) else 1 for value in values]
    if odd := [row for row, size in enumerate(sizes) if size != sizes[0]]:
        raise InputError(
            f'{sheet.at(odd[0])}: {sizes[odd[0]]} numbers in "{name}", and {sizes[0]} in {sheet.at(0)}: all rows need '
            "the same number of them"
        )
    cells = [[value[j] for value in values] for j in range(sizes[0])]
    columns = [numbers(of, name, sheet) for of in cells]
    named = known if known and len(known) == sizes[0] else tuple(f"{name}-{j}" for j in range(sizes[0]))
    if not columns:
        raise InputError(f'{sheet.at(0)}: column "{name}" holds an empty list: numbers are expected')
    said = doubts(cells, columns, named)
    return RowTargets(np.stack(columns, axis=1), (ONE,) if len(named) == 1 else named, frozenset({name}), said)


def scale_of(
    data: FederatedData, means: Sequence[float], scales: Sequence[float], wanted: bool
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Target means and standard deviations over all clients' training rows, as keys of the [model] table; a notice.

    Args:
        means, scales: the values that the user sets for these keys, to replace those of the rows; () if not set.
        wanted: whether targets are scaled.

    Raises:
        InputError: a target has the same value in all rows, or the keys do not fit the targets.
    """
    table, given = data.table, (means, scales)
    names = table.classes
    if bool(means) != bool(scales):
        raise InputError("model.target_means, target_scales: set both or neither", key="model.target_means")
    if means and not wanted:
        raise InputError(
            "model.scale_targets = false: target_means and target_scales have no effect; drop them",
            key="model.scale_targets",
        )
    for key, values in zip(("target_means", "target_scales"), given, strict=True):
        if values and len(values) != len(names):
            raise InputError(
                f"model.{key}: {len(values)} numbers for {len(names)} targets ({listing(names, 6)})", key=f"model.{key}"
            )
    if table.targets is None or not data.clients:
        return {}, ()
    y = table.targets[np.concatenate([rows.train for rows in data.clients.values()])]  # (n, T)
    if constant := np.flatnonzero((y == y[0]).all(0)).tolist():
        which = f'"{names[constant[0]]}"' if len(names) > 1 else "target"
        raise InputError(
            f"{table.source}: all {len(y)} training rows have the same {which}, {y[0, constant[0]]:g}: there is "
            "nothing to learn"
        )
    if means or not wanted:
        return {}, ()
    return scale_of_sums([sums(table.targets[rows.train]) for rows in data.clients.values()], names)


def sums(y: np.ndarray) -> list[float]:
    """The number of rows of y (n, T); for each target, the sum and the sum of squared deviations from these rows' mean.

    Each sum is computed exactly and rounded once, so that it does not depend on the order of the rows. Deviations are
    squared, not the targets: if the mean is much larger than the deviations, a sum of squared targets loses digits.
    """
    columns = y.T.tolist()
    totals = [math.fsum(column) for column in columns]
    means = [total / len(y) if len(y) else 0.0 for total in totals]
    squares = [math.fsum((v - mean) ** 2 for v in column) for column, mean in zip(columns, means, strict=True)]
    return [float(len(y)), *totals, *squares]


def check_sums(found: Sequence[float], targets: int) -> None:
    """Check that the :func:`sums` of a silo can be sums over rows.

    Raises:
        ClientFault: they cannot.
    """
    if len(found) != 1 + 2 * targets:
        raise ClientFault(E_FIELD, f"{len(found)} sums: expected {1 + 2 * targets}")
    n, totals, squares = found[0], found[1 : 1 + targets], found[1 + targets :]
    if not 0 <= n <= MAX_WEIGHT or n != int(n):
        raise ClientFault(E_FIELD, f"{n} rows: expected a number of rows")
    if not all(abs(total) <= n * LARGEST for total in totals) or not all(0 <= v <= n * LARGEST**2 for v in squares):
        raise ClientFault(E_FIELD, f"sums beyond those of {n:.0f} rows")


def scale_of_sums(parts: Sequence[Sequence[float]], names: Sequence[str]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Mean and standard deviation of each target over all clients' rows, as keys of the [model] table; a notice.

    The result does not depend on the order of the clients.

    Args:
        parts: the :func:`sums` of each client.

    Raises:
        InputError: there are no rows, or a target has the same value in all rows.
    """
    t, n, means, scales = len(names), math.fsum(part[0] for part in parts), list[float](), list[float]()
    some = [part for part in parts if part[0]]
    if not some:
        raise InputError("no client has training rows: there is nothing to learn")
    for j, name in enumerate(names):
        mean = math.fsum(part[1 + j] for part in some) / n
        between = (part[0] * (part[1 + j] / part[0] - mean) ** 2 for part in some)
        means.append(mean)
        scales.append(math.sqrt(math.fsum([*(part[1 + t + j] for part in some), *between]) / n))
        if scales[-1] <= _ROUNDING * abs(mean):
            which = f'"{name}"' if t > 1 else "target"
            raise InputError(f"all {n:.0f} training rows have the same {which}, {mean:g}: there is nothing to learn")
    of = [f"{name} {m:.4g} and {s:.4g}" for name, m, s in zip(names, means, scales, strict=True)]
    notice = (
        f"targets are centred and scaled by mean and deviation of the {n:.0f} training rows of all clients: "
        f"{'; '.join(of[:4])}{f' and {len(of) - 4} more' if len(of) > 4 else ''}; all parties learn these numbers"
    )
    return {"target_means": tuple(means), "target_scales": tuple(scales)}, (notice,)


# --- model ------------------------------------------------------------------------------------------------------------
def row_losses(model: Network, batch: Batch, means: Sequence[float], scales: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The mean squared error of each row over its targets, (b,), and a count of 1 for each row."""
    import torch

    logits = model.logits(batch).float()  # (b, T)
    targets = scale(batch["targets"], means, scales).float().to(logits.device)
    return (logits - targets).square().mean(1), torch.ones(len(logits), dtype=torch.int64)


def scale(targets: Tensor, means: Sequence[float], scales: Sequence[float]) -> Tensor:
    """Centre and scale targets (b, T), as the head predicts them; empty means count as 0, and empty scales as 1."""
    return (targets - targets.new_tensor(means or [0.0])) / targets.new_tensor(scales or [1.0])


# --- survey -----------------------------------------------------------------------------------------------------------
def _bins(scales: Sequence[float]) -> tuple[tuple[float, ...], str]:
    """The edges of a target's bins and their unit: deviations from the mean if a scale is known, else its own unit."""
    return (_SCALED_BINS, " deviations") if scales else (_PLAIN_BINS, "")


def bin_names_of(names: Sequence[str], scales: Sequence[float]) -> tuple[str, ...]:
    """Names of the bins of all targets, target by target."""
    from fedfm.tasks._row_survey import bin_names

    edges, unit = _bins(scales)
    return tuple(f"{name}, {part}{unit}" for name in names for part in bin_names(edges))


def into_bins_of(targets: Tensor, means: Sequence[float], scales: Sequence[float]) -> np.ndarray:
    """Memberships (n, T B) of targets (n, T) in the bins of :func:`bin_names_of`."""
    from fedfm.tasks._row_survey import into_bins

    edges, _ = _bins(scales)
    values = scale(targets, means, scales).numpy()
    return np.concatenate([into_bins(values[:, j], edges) for j in range(values.shape[1])], axis=1)


# --- scores -----------------------------------------------------------------------------------------------------------
def count(said: Tensor, targets: Tensor) -> dict[str, Any]:
    """The sums over rows, from predictions and targets (n, T), both in units of the targets' standard deviations."""
    import torch

    e, z = said - targets, targets
    parts = (e.abs(), e**2, z, z**2, e**4, e**2 * z, e**2 * z**2, z**3, z**4)
    moments = torch.stack([part.sum(0) for part in parts])  # (9, T)
    return {"rows": len(said), "loss_of_rows": float((e**2).mean(1).sum()), "moments": moments.flatten().tolist()}


def scores(n: float, moments: Any, scales: Sequence[float]) -> dict[str, Any]:
    """MSE, MAE and R^2 of each target and their means over targets, in the users' units, with standard errors.

    The standard errors are those of means over independent rows. The standard error of R^2 comes from the delta method,
    which here is the infinitesimal jackknife over rows.
    """
    known = moments if isinstance(moments, list) and moments and len(moments) % MOMENTS == 0 else [math.nan] * MOMENTS
    sums = np.array([math.nan if value is None else value for value in known], np.float64).reshape(MOMENTS, -1)
    s = np.array(scales) if len(scales) == sums.shape[1] else np.ones(sums.shape[1])
    a, u, z, zz, uu, uz, uzz, z3, z4 = sums  # each (T,)
    with np.errstate(all="ignore"):
        mean = z / n
        spread = zz - n * mean**2
        spread = np.where(spread > 1e-12 * zz, spread, math.nan)
        q = u / spread
        uv = uzz - 2 * mean * uz + mean**2 * u
        vv = z4 - 4 * mean * z3 + 6 * mean**2 * zz - 3 * n * mean**4
        found = {
            "mse": u / n * s**2,
            "mae": a / n * s,
            "r2": 1 - q,
            "mse_se": _error(uu - u**2 / n, n) * s**2,
            "mae_se": _error(u - a**2 / n, n) * s,
            "r2_se": _error(uu - 2 * q * uv + q**2 * vv, n) * n / spread,
        }
    lists = {f"{name}_by_target": values.tolist() if n else None for name, values in found.items()}
    return {name: float(found[name].mean()) if n else None for name in ("mse", "mae", "r2")} | lists


def _error(squares: np.ndarray, n: float) -> np.ndarray:
    """The standard error of a mean, from the sum of squared deviations; NaN for fewer than two values."""
    found: np.ndarray = np.sqrt(np.maximum(squares, 0) / (n - 1) / n) if n > 1 else np.full(len(squares), math.nan)
    return found


# --- results ----------------------------------------------------------------------------------------------------------
def answer(trained: Trained, table: Table, means: Sequence[float], scales: Sequence[float]) -> dict[str, Any]:
    """Predictions in the users' units: a number for each row; with several targets, a dict of numbers by target."""
    model = trained.model
    said = trained.logits(trained.encode(model.prepare(table, range(len(table))))).double()  # (n, T)
    rows: list[list[float]] = (said * said.new_tensor(scales or [1.0]) + said.new_tensor(means or [0.0])).tolist()
    several = len(model.classes) > 1
    values = [dict(zip(model.classes, row, strict=True)) if several else row[0] for row in rows]
    return {"classes": list(model.classes), "values": values}


def in_units(model: Network, w: Params, means: Sequence[float], scales: Sequence[float]) -> tuple[Params, bool] | None:
    """The weights with the scale folded into the head, which then predicts in the users' units.

    Means are added to the head's bias only if the head's outputs can hold the sums: a year in bfloat16 would be a
    multiple of 8, and a time in seconds since 1970 in float32 a multiple of 128.

    Returns:
        (weights, whether the means are in the bias); None if there is no scale, or no head into which the scale can be
        folded.
    """
    if not scales or model.head is None:
        return None
    import torch

    weight, bias = _name_of(model, model.head.weight), _name_of(model, model.head.bias)
    if weight not in w:
        return None
    factors, shifts = torch.tensor(scales, dtype=torch.float64), torch.tensor(means, dtype=torch.float64)
    kinds = {p.dtype for p in model.module.parameters() if p.is_floating_point()}  # a reader loads all in the least
    step = max(torch.finfo(dtype).eps for dtype in kinds)
    held = bias in w and bool((step * shifts.abs() <= _LOST * factors).all())
    new = {weight: (w[weight].double() * factors[:, None]).to(w[weight].dtype)}
    if bias in w:
        new[bias] = (w[bias].double() * factors + (shifts if held else 0.0)).to(w[bias].dtype)
    return Params({name: new.get(name, w[name]) for name in w}), held


def _name_of(model: Network, tensor: Tensor | None) -> str:
    return next((name for name, p in model.module.named_parameters() if p is tensor), "")


def about_outputs(means: Sequence[float], scales: Sequence[float]) -> str:
    """A sentence on how the outputs become numbers in the users' units."""
    if scales:
        return f"The outputs times {_text_of(scales)}, plus {_text_of(means)}, are in the units of the targets."
    if means:
        return (
            f"Add {_text_of(means)} to the outputs, in 64 bits: the sums are in the units of the targets. The head has "
            "no bias, or its outputs have too few bits for the sums."
        )
    return "The outputs are in the units of the targets."


def _text_of(values: Sequence[float]) -> str:
    return repr(values[0]) if len(values) == 1 else str(list(values))
