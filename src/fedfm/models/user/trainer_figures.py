"""A Trainer's own figures: ``compute_metrics`` of outputs and targets, called as ``Trainer.evaluate`` calls it.

The reference is transformers' ``Trainer.evaluation_loop``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.rows import Batch, Rows
from fedfm.errors import InputError, first_line
from fedfm.models.batches import batch_of, convert, rows_of
from fedfm.models.memory_budget import in_halves, warn

if TYPE_CHECKING:
    from fedfm.models.user.scored_module import ScoredModule
    from fedfm.models.wrap import WrappedModel

_MOST, _LONGEST = 100, 100  # largest number of figures, and of characters of a name
_SHOWN = 5  # largest number of names in a notice
_PROBE = 8  # number of rows of the first trial
_PADDING = -100  # fills the gaps when arrays of unequal shapes are joined, as in transformers
_KINDS = ("predictions", "label_ids", "inputs", "losses")  # arguments of transformers' EvalPrediction
_UNUSED = "of the Trainer, compute_metrics is not used: "


class TrainersFigures:
    """A Trainer's ``compute_metrics``, for evaluations of its module."""

    def __init__(self, given: ScoredModule, model: WrappedModel) -> None:
        self.given, self.model = given, model
        self._open = False  # whether an evaluation that calls the function for each batch has begun and not ended

    def collect(self) -> Collected:
        """Begin an evaluation."""
        args = self.given.trainer.args
        again, self._open = self._open, bool(args.batch_eval_metrics)
        return Collected(self, again)

    def close(self) -> None:
        """End an evaluation: the function has returned its result, and the next evaluation starts afresh."""
        self._open = False

    def try_on(self, rows: Rows) -> tuple[bool, tuple[str, ...]]:
        """Call the function on test rows before any training.

        The first rows may lack a class that the function needs. If it fails on these rows, it is tried on all rows.

        Returns:
            (whether the function is used, notices about values that are not reported).

        Raises:
            InputError: the function fails, or returns no dict.
        """
        if not len(rows):
            return False, (f"{_UNUSED}there are no test rows",)
        figures: dict[str, Any] = {}
        left_out: list[str] = []
        for n in sorted({min(_PROBE, len(rows)), len(rows)}):
            collected = self._collect(rows.take(range(n)))
            if not collected.complete:
                return False, (f"{_UNUSED}rows have no targets under the Trainer's label_names, or no outputs",)
            try:
                figures, left_out = collected.figures()
                break
            except InputError:
                raise
            except Exception as error:
                if n == len(rows):
                    raise InputError(_failure("compute_metrics", error)) from error
        lacks = f"compute_metrics: only numbers are reported, at most {_MOST}, not {_some(left_out)}"
        empty = "compute_metrics returns no numbers: nothing of it is reported"
        return bool(figures), ((lacks,) if left_out else ()) + (() if figures else (empty,))

    def _collect(self, rows: Rows) -> Collected:
        """Outputs and targets of the rows, in at least two batches, so that the joining of batches is tried, too."""

        def work(size: int) -> Collected:
            collected = self.collect()
            for start in range(0, len(rows), size):
                index = range(start, min(start + size, len(rows)))
                collected.add(batch_of(self.model.device, rows, index), last=index.stop == len(rows), classes=0)
            return collected

        try:
            return in_halves(self.given.at_once((len(rows) + 1) // 2), work, warn)[0]
        except (InputError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise InputError(_failure("prediction_step", error)) from error


class Collected:
    """Outputs and targets of the batches of one evaluation.

    Attributes:
        complete: whether all batches have outputs and targets. If not, a Trainer does not call its function.
    """

    def __init__(self, of: TrainersFigures, again: bool) -> None:
        self._of, self._trainer, self._args = of, of.given.trainer, of.given.trainer.args
        self.complete = True
        wanted = tuple(getattr(self._args, "include_for_metrics", None) or ())
        self._wanted = {"inputs": "inputs" in wanted, "losses": "loss" in wanted}
        self._joins = bool(getattr(self._args, "eval_do_concat_batches", True))
        self._kept: dict[str, Any] = {}
        self._found: Any = None  # the result of the last call, if the function is called for each batch
        self._error: Exception | None = None
        if again:  # memory ran out between calls for single batches, so the function would get some rows twice
            self._error = RuntimeError("an evaluation was begun again with smaller batches")

    def add(self, batch: Batch, *, last: bool, classes: int) -> tuple[Tensor, Any]:
        """Compute a batch; return its loss, and the logits (b, ``classes``) of a classifier."""
        given, trainer = self._of.given, self._trainer
        native, of_trainer = given.native(batch), given.of_trainer
        assert of_trainer is not None  # noqa: S101 - only a Trainer has such figures
        options = {}
        if getattr(self._args, "predict_with_generate", False):  # as Seq2SeqTrainer.evaluate
            options = {"max_length": self._args.generation_max_length, "num_beams": self._args.generation_num_beams}
            options = {name: value for name, value in options.items() if value is not None}
        with of_trainer.precision(given.module):
            loss, outputs, targets = trainer.prediction_step(given.module, native, False, **options)
        first = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
        fits = isinstance(first, Tensor) and first.dim() == 2 and first.shape[1] == classes
        logits = first if fits and not options else None
        if loss is None or (classes and logits is None):
            loss, logits = given.outcome(given.module, batch)
        if outputs is None or targets is None:
            self.complete = False
            return loss, logits
        if trainer.preprocess_logits_for_metrics is not None:
            try:
                outputs = trainer.preprocess_logits_for_metrics(outputs, targets)
            except Exception as error:
                self._error = self._error or InputError(_failure("preprocess_logits_for_metrics", error))
                return loss, logits
            if outputs is None:
                self.complete = False
                return loss, logits
        found = {"predictions": outputs, "label_ids": targets}
        if self._wanted["inputs"]:
            found["inputs"] = native[getattr(given.module, "main_input_name", "input_ids")]
        if self._wanted["losses"]:
            found["losses"] = loss.detach().repeat(rows_of(batch))
        if self._args.batch_eval_metrics:
            self._call_for_batch(found, last)
        else:
            self._keep({name: _to_numpy(value) for name, value in found.items()})
        return loss, logits

    def _call_for_batch(self, found: Mapping[str, Any], last: bool) -> None:
        try:
            self._found = self._trainer.compute_metrics(_prediction(found), compute_result=last)
        except Exception as error:
            self._error = self._error or error
        if last:
            self._of.close()

    def _keep(self, found: Mapping[str, Any]) -> None:
        from transformers.trainer_pt_utils import nested_concat

        if self._error is not None:
            return
        for name, value in found.items():
            if not self._joins:
                self._kept.setdefault(name, []).append(value)
                continue
            if isinstance(value, list):
                self._error = InputError(
                    f"Trainer: compute_metrics: {name} are lists, which a Trainer joins wrongly over batches; give "
                    "args.eval_do_concat_batches=False"
                )
                return
            try:
                old = self._kept.get(name)
                self._kept[name] = value if old is None else nested_concat(old, value, padding_index=_PADDING)
            except (TypeError, ValueError, AssertionError, KeyError) as error:
                self._error = InputError(
                    f"Trainer: compute_metrics: {name} of two batches cannot be joined: {first_line(error, 200)}; give "
                    "args.eval_do_concat_batches=False, or preprocess_logits_for_metrics"
                )
                return

    def figures(self) -> tuple[dict[str, float | None], list[str]]:
        """The figures by name, and the names of values that are not numbers.

        Raises:
            InputError: the function returns no dict.
            Exception: the function fails.
        """
        if self._error is not None:
            raise self._error
        found = self._found if self._args.batch_eval_metrics else self._trainer.compute_metrics(_prediction(self._kept))
        if not isinstance(found, Mapping):
            raise InputError(f"Trainer: compute_metrics returns a {type(found).__name__}: expected a dict of numbers")
        return read(found)

    def figures_or_none(self) -> dict[str, float | None] | None:
        """The figures; None if outputs or targets are missing, or the function fails on these rows."""
        if not self.complete:
            return None
        try:
            return self.figures()[0]
        except Exception:  # e.g. the client's rows lack a class; the result names the client
            return None


def _failure(name: str, error: Exception) -> str:
    return f"Trainer: {name} fails on the test rows: {type(error).__name__}: {first_line(error, 300)}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def read(found: Mapping[Any, Any]) -> tuple[dict[str, float | None], list[str]]:
    """(figures by name, names of values that are left out). A dict in a dict becomes ``outer/inner``; NaN becomes None.

    Example:
        >>> read({"f1": np.float32(0.5), "by_class": {"cat": 1}, "table": [[1, 2]], "r2": float("nan")})
        ({'f1': 0.5, 'by_class/cat': 1.0, 'r2': None}, ['table'])
    """
    figures, left_out = dict[str, float | None](), []
    for name, value in _flat("", found):
        number = _number(value)
        if number is None or len(figures) == _MOST or len(name) > _LONGEST:
            left_out.append(name[:_LONGEST])
        else:
            figures[name] = number if math.isfinite(number) else None
    return figures, left_out


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}/{key}" if prefix else str(key), inner)
    else:
        yield prefix, value


def _number(value: Any) -> float | None:
    """The value as a float; None if it is not a single number. The value None counts as an unknown number, NaN."""
    if value is None:
        return math.nan
    if isinstance(value, Tensor | np.ndarray | np.generic):
        if math.prod(value.shape) != 1:
            return None
        value = value.item()
    if not isinstance(value, bool | int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def join(parts: Sequence[tuple[float, Mapping[str, float | None]]]) -> dict[str, float | None]:
    """The mean of each figure over the clients that have the figure, weighted by their numbers of rows.

    Args:
        parts: (number of rows, figures) of each client.

    Example:
        >>> join([(1, {"f1": 0.0}), (3, {"f1": 1.0, "r2": None})])
        {'f1': 0.75, 'r2': None}
    """
    found: dict[str, float | None] = {}
    for name in dict.fromkeys(name for _, figures in parts for name in figures):
        known = [(n, value) for n, figures in parts if (value := figures.get(name)) is not None]
        found[name] = sum(n * value for n, value in known) / sum(n for n, _ in known) if known else None
    return found


def _prediction(found: Mapping[str, Any]) -> Any:
    from transformers import EvalPrediction

    return EvalPrediction(**{name: found.get(name) for name in _KINDS})


def _to_numpy(value: Any) -> Any:
    """The value with each tensor as a NumPy array; bfloat16 becomes float32, as in transformers."""

    def array(x: Tensor) -> np.ndarray:
        return (x.float() if x.dtype == torch.bfloat16 else x).detach().cpu().numpy()

    return convert(value, array)
