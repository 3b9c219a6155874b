"""Regression: one or more numbers from an image, a text or a vector.

See also :mod:`fedfm.tasks._numbers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fedfm.core.fields import setting
from fedfm.tasks._own_targets import OwnTargetsTask
from fedfm.tasks.task import Column, Scores, Sums, Trained

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedfm.core.row_targets import FigureTable, RowTargets
    from fedfm.core.rows import Batch, Rows
    from fedfm.core.score_plots import Groups
    from fedfm.data.sources._sheet import Sheet
    from fedfm.data.spec import DataSpec
    from fedfm.data.table import FederatedData, Table
    from fedfm.linalg.params import Params
    from fedfm.models.network import Network

_SURE = 1.959963984540054  # half the width of a 95 % interval, in standard errors
_LEAST = 3  # smallest number of training rows whose sums a silo sends
_BY_TARGET = tuple(f"{name}{part}_by_target" for part in ("", "_se") for name in ("mse", "mae", "r2"))


@dataclass(frozen=True)
class Regression(OwnTargetsTask):
    """A new linear head predicts the centred and scaled targets; the loss is the mean squared error."""

    name: ClassVar[str] = "regression"
    class_word: ClassVar[str] = "target"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("targets", 'columns of numbers, each a target, task "regression" [the column data.label]', several=True),
    )
    no_pretraining: ClassVar[str] = "expected classification, language_modelling or instruction"
    figures: ClassVar[tuple[str, ...]] = ("mse", "mae", "r2", *_BY_TARGET, "calibration")
    least_rows: ClassVar[int] = 5  # four sums of powers determine the targets of four rows
    row_means: ClassVar[Mapping[str, str]] = MappingProxyType({"loss": "loss_of_rows"})
    sums: ClassVar[tuple[str, ...]] = ("rows", "loss_of_rows", "moments", "calibration")
    lists: ClassVar[tuple[str, ...]] = ("moments", *_BY_TARGET, "calibration")
    problem_type: ClassVar[str | None] = "regression"
    keys_from_sums: ClassVar[frozenset[str]] = frozenset({"target_means", "target_scales"})

    scale_targets: bool = setting(
        True, "regression: train on (target - mean) / deviation, both of the training rows of all clients"
    )
    target_means: tuple[float, ...] = setting(
        (), "regression: a mean for each target, used instead of the mean of the training rows", finite=True
    )
    target_scales: tuple[float, ...] = setting(
        (), "regression: a deviation for each target, used instead of that of the training rows", gt=0, finite=True
    )

    # --- rows ---------------------------------------------------------------------------------------------------------
    @property
    def reads_all_rows(self) -> tuple[str, str] | None:
        if not self.scale_targets or self.target_means or self.target_scales:
            return None
        what = "model.scale_targets = true takes means and deviations of the targets from all clients' training rows"
        return what, "set it to false, or set a fixed scale by model.target_means and model.target_scales"

    def keys_of_rows(self, data: FederatedData) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        from fedfm.tasks import _numbers

        return _numbers.scale_of(data, self.target_means, self.target_scales, self.scale_targets)

    def sums_of_rows(self, rows: Rows) -> list[float]:
        """A silo's sums over its training rows, from which :meth:`keys_of_sums` computes the scale.

        Raises:
            TooFewRows: the sums would disclose the targets.
        """
        from fedfm.errors import TooFewRows
        from fedfm.tasks import _numbers

        if 0 < len(rows) < _LEAST:  # sum and sum of squares determine the targets of two rows
            raise TooFewRows(f"sums of fewer than {_LEAST} training rows would disclose their targets")
        return _numbers.sums(rows.tensors["targets"].double().numpy())

    def check_sums(self, sums: Sequence[float], names: Sequence[str]) -> None:
        """Refuse sums from a silo that cannot be sums over rows."""
        from fedfm.tasks import _numbers

        _numbers.check_sums(sums, len(names))

    def keys_of_sums(
        self, parts: Sequence[Sequence[float]], names: Sequence[str]
    ) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """The same as :meth:`keys_of_rows`, computed from the :meth:`sums_of_rows` of all silos."""
        from fedfm.tasks import _numbers

        return _numbers.scale_of_sums(parts, names)

    def read_targets(self, sheet: Sheet, spec: DataSpec, *, source: str) -> RowTargets:
        from fedfm.tasks import _numbers

        return _numbers.read(sheet, spec, source)

    def target_groups(self, classes: Sequence[str]) -> tuple[tuple[str, ...], int]:
        """Bins of each target; a row is in one of them; see :class:`fedfm.tasks._row_survey.TargetGroups`."""
        from fedfm.tasks import _numbers

        return _numbers.bin_names_of(classes, self.target_scales), len(classes)

    def group_members(self, table: Table, classes: Sequence[str]) -> np.ndarray:
        """The bins of each row's targets (n, G)."""
        from fedfm.models.preprocessing import targets_of
        from fedfm.tasks import _numbers

        targets = targets_of(table, tuple(classes), self)["targets"]
        return _numbers.into_bins_of(targets, self.target_means, self.target_scales)

    # --- model --------------------------------------------------------------------------------------------------------
    def row_losses(self, model: Network, batch: Batch) -> tuple[Tensor, Tensor]:
        from fedfm.tasks import _numbers

        return _numbers.row_losses(model, batch, self.target_means, self.target_scales)

    def head_targets(self, rows: Rows, outputs: int) -> Tensor:
        from fedfm.tasks import _numbers

        return _numbers.scale(rows.tensors["targets"], self.target_means, self.target_scales)

    # --- scores -------------------------------------------------------------------------------------------------------
    def count_of(self, model: Network, rows: Rows, logits: Tensor) -> Sums:
        from fedfm.tasks import _calibration, _numbers

        if "targets" not in rows.tensors:
            return {}
        targets = _numbers.scale(rows.tensors["targets"], self.target_means, self.target_scales)
        said = logits.double()
        return {**_numbers.count(said, targets), "calibration": _calibration.count(said, targets)}

    def list_sizes(self, classes: Sequence[str]) -> dict[str, int]:
        from fedfm.tasks import _calibration, _numbers

        of_sums = {"moments": _numbers.MOMENTS, "calibration": _calibration.SUMS}
        return {**super().list_sizes(classes), **{name: count * len(classes) for name, count in of_sums.items()}}

    def from_sums(self, sums: Mapping[str, Any]) -> Scores:
        from fedfm.tasks import _numbers

        scores = _numbers.scores(sums["rows"], sums["moments"], self.target_scales)
        known = sums["calibration"] if sums["rows"] and isinstance(sums["calibration"], list) else None
        return {"accuracy": None, **self.means_over_rows(sums), **scores, "calibration": known}

    def coarsen(self, scores: Mapping[str, Any]) -> Mapping[str, Any]:
        return {key: value for key, value in scores.items() if key != "calibration"}

    # --- results ------------------------------------------------------------------------------------------------------
    def answer(self, trained: Trained, table: Table) -> dict[str, Any]:
        from fedfm.tasks import _numbers

        return _numbers.answer(trained, table, self.target_means, self.target_scales)

    def for_export(self, model: Network, w: Params) -> tuple[Self, Params]:
        from fedfm.tasks import _numbers

        found = _numbers.in_units(model, w, self.target_means, self.target_scales)
        if found is None:
            return self, w
        w, held = found
        left = () if held or not any(self.target_means) else self.target_means
        return replace(self, target_means=left, target_scales=()), w

    def about_outputs(self) -> str:
        from fedfm.tasks import _numbers

        return _numbers.about_outputs(self.target_means, self.target_scales)

    def describe(self, model: Network) -> dict[str, Any]:
        scale = {"target_means": list(self.target_means), "target_scales": list(self.target_scales)}
        return {"task": self.name, **{key: value for key, value in scale.items() if value}}

    def plots(self, figures: Mapping[str, Any], classes: Sequence[str]) -> list[Groups]:
        from fedfm.tasks import _calibration

        return _calibration.plots(figures, classes, self.target_means, self.target_scales)

    def tables(self, figures: Mapping[str, Any], classes: Sequence[str]) -> list[FigureTable]:
        """A table of the targets' scores, on the global test rows, or else on the clients' test rows."""
        from fedfm.core.row_targets import FigureTable

        whose = "" if figures.get("mse_by_target") else "local_"
        if not figures.get(f"{whose}mse_by_target"):
            return []
        where = "the global test rows" if not whose else "the clients' test rows, each by its client's model"
        rows = []
        for j, name in enumerate(classes):
            cells = []
            for figure in ("mse", "mae", "r2"):
                value, error = (_entry(figures.get(f"{whose}{figure}{part}_by_target"), j) for part in ("", "_se"))
                cells.append("-" if value is None else f"{value:.4g}{_interval(value, error, figure)}")
            rows.append((name, *cells))
        note = (
            f"On {where}. In brackets: intervals of 95 % over rows, estimate +- 1.96 standard errors (for R2 by the "
            "delta method); they take rows as independent, and the model as given."
        )
        return [FigureTable("Errors by target", ("target", "MSE", "MAE", "R2"), tuple(rows), note)]


def _entry(values: Any, j: int) -> float | None:
    found = list(values.values()) if isinstance(values, Mapping) else values
    return found[j] if isinstance(found, list) and j < len(found) else None


def _interval(value: float, error: float | None, figure: str) -> str:
    if error is None:
        return ""
    low, high = value - _SURE * error, value + _SURE * error
    low, high = (low, min(high, 1.0)) if figure == "r2" else (max(low, 0.0), high)
    return f" [{low:.4g}, {high:.4g}]"
