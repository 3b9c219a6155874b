"""A user's module, loss and rows, or a Hugging Face Trainer, as a model and a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedfm.core import tasks
from fedfm.core.rows import Batch
from fedfm.data.spec import IN_MEMORY
from fedfm.data.table import Table
from fedfm.data.user_datasets import DatasetRows, Joined, check_dataset, column, read_once
from fedfm.errors import InputError, first_line
from fedfm.models.batches import batch_of, move, only_tensors
from fedfm.models.first_and_last_layer import find_ends, record_calls
from fedfm.models.loss_graph import reach, with_graph
from fedfm.models.memory_budget import in_halves, warn
from fedfm.models.user import buffers, gradients, seen_targets
from fedfm.models.user.fingerprint import fingerprint_of
from fedfm.models.user.module_checks import check_module
from fedfm.models.user.outputs import Outputs, forecast, forecasts, of_module
from fedfm.models.user.own_scores import scores_of
from fedfm.models.user.trainer_arguments import ITEMS, TrainersModule, is_trainer
from fedfm.models.wrap import WrappedModel, wrap

if TYPE_CHECKING:
    from fedfm.models.model_task import ModelTask
    from fedfm.models.user.trainer_figures import TrainersFigures

Loss = Callable[[Any, Tensor], Tensor]  # (the module's output, target) -> scalar, as torch.nn's losses
Objective = Callable[[nn.Module, Any], Tensor]  # (module, collated batch) -> scalar
Places = dict[tuple[str, str], np.ndarray]  # (split, client or "") -> indexes
_PROBE = 8  # number of rows of the trial batch
_PAIR = 2  # number of rows of a trial in training mode


class Given:
    """The user's module, loss and rows, converted to a model and a table."""

    def __init__(
        self,
        model: Any,
        loss: Loss | None,
        objective: Objective | None,
        logits: Callable[[nn.Module, Any], Tensor] | None,
        collate: Callable[[list[Any]], Any] | None,
        labels: str | None,
    ) -> None:
        self.trainer: Any = model if is_trainer(model) else None
        self.module: nn.Module = model.model if self.trainer is not None else model
        if not isinstance(self.module, nn.Module):
            hint = "; load it, e.g. with from_pretrained" if isinstance(model, str | os.PathLike) else ""
            raise InputError(
                f"model is a {type(model).__name__}: expected a torch.nn.Module or a transformers.Trainer{hint}"
            )
        if loss is not None and objective is not None:
            raise InputError("loss and objective: give one of the two")
        if self.trainer is not None and (loss is not None or objective is not None or collate is not None):
            raise InputError("loss, objective, collate: set them in the Trainer, or give only the Trainer's module")
        if logits is not None and objective is None:
            raise InputError("logits: only an objective needs it; with a loss the module's output is used")
        self._loss, self._objective, self._logits = loss, objective, logits
        self.end: Callable[[], None] = lambda: None  # undoes what :meth:`wrap` switched on in the module
        self._key = labels
        self._collate = collate or torch.utils.data.default_collate
        self._own_batches = collate is not None or self.trainer is not None  # whether batches may have lists and dicts
        self._columns: frozenset[str] | None = None
        self._listed = False  # whether batches are tuples
        self._whole = False  # whether a batch is one value: a dataclass, or a list with a dict for each row
        self._labelled = False  # whether every row has one class label
        self._sets: list[tuple[str, str, Any]] = []  # (split, client or "", data set)
        self._nan: int | None = None  # first row with a NaN
        self._wished: str | None = None  # the target's key according to a Trainer
        self._alias = ""  # the key of the target, if it is not "labels"
        self.notices: tuple[str, ...] = ()
        self.of_trainer: TrainersModule | None = None
        if self.trainer is not None:
            self.of_trainer = TrainersModule(self.trainer)
            self._collate, self._columns = self.trainer.data_collator, self.of_trainer.columns
            self._wished = self.of_trainer.label  # evaluation uses this key if rows have it

    def data_and_optimiser(
        self, clients: Any, train: Any, test: Any, local: Mapping[str, Any] | None
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Return (train, test, [method.local]); values that the arguments do not give come from the Trainer."""
        trainer, of_trainer = self.trainer, self.of_trainer
        assert of_trainer is not None  # noqa: S101 - only called if there is a Trainer
        if train is None and clients is None:
            train = trainer.train_dataset
            if train is None:
                raise InputError("Trainer: it has no train_dataset; give it one, or clients=...")
        test = trainer.eval_dataset if test is None else test
        if isinstance(test, Mapping) and clients is None:
            raise InputError("Trainer: its eval_dataset is a dict; give test=one of them")
        optimiser = of_trainer.local(local or {})
        self.notices = of_trainer.notices(optimiser)
        return train, test, optimiser

    # --- rows --------------------------------------------------------------------------------------------------------
    def collate(self, rows: list[Any], target: bool = True) -> Batch:
        """Collate rows into a batch of named tensors; the target's name is "labels".

        Args:
            target: whether rows must have the target if the user named its key.
        """
        if self._columns is not None and rows and isinstance(rows[0], Mapping):
            rows = [{k: v for k, v in row.items() if k in self._columns} for row in rows]
        try:
            batch = self._collate(rows)
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError) as error:
            text = f"{type(error).__name__}: {first_line(error, 200)}"
            hint = "" if self._own_batches else "; give collate=..."
            raise InputError(f"rows cannot be collated to a batch: {text}{hint}") from error
        if self._own_batches and (is_dataclass(batch) or _are_rows(batch, rows)):
            self._listed = self._whole = True
            return {"0": batch}
        if isinstance(batch, Tensor):
            batch = (batch,)
        if isinstance(batch, Mapping):
            named = dict(batch)
            wished = self._wished if self._wished in named else None
            key = self._key or wished or next((k for k in ("labels", "label") if k in named), None)
            if self._key is not None and self._key not in named:
                if not target:
                    return named
                raise InputError(f'labels: rows have no "{self._key}"; found {", ".join(map(str, named))}')
            if key is not None and key != "labels":
                named["labels"], self._alias = named[key], key
        elif isinstance(batch, (tuple, list)):
            self._listed = True
            named = {str(i): x for i, x in enumerate(batch)}
            if len(batch) > 1:
                named["labels"] = named.pop(str(len(batch) - 1))
        else:
            raise InputError(f"a batch is a {type(batch).__name__}: expected tensors, a tuple or a dict of them")
        for key, value in named.items():
            if not (isinstance(value, Tensor) or self._carries(value)):
                raise InputError(
                    f'"{key}" of a batch is a {type(value).__name__}: expected a tensor; tokenise or drop it, '
                    "or give collate=..."
                )
        return named

    def _carries(self, value: Any) -> bool:
        """Whether a batch may contain this value, which is not a tensor: a container of tensors or, with the user's own
        collate function, any plain value.
        """
        if not self._own_batches:
            return only_tensors(value)
        return isinstance(value, list | tuple | Mapping | bool | int | float | str | None) or is_dataclass(value)

    def table(self, clients: Mapping[str, Any] | None, train: Any, test: Any, by: str | None) -> tuple[Table, Places]:
        """A table of all rows with the column ``by``, which the partition needs; and each client's indexes."""
        sets = self._sets
        if clients is not None:
            sets += [("train", c, check_dataset(clients[c], f'clients["{c}"]')) for c in sorted(clients)]
        else:
            sets.append(("train", "", check_dataset(train, "train")))
        if isinstance(test, Mapping):
            if clients is None or (strange := sorted(test.keys() - clients.keys())):
                raise InputError(f"test: {'no clients are named' if clients is None else f'{strange} are not clients'}")
            sets += [("test", c, check_dataset(test[c], f'test["{c}"]', empty=True)) for c in sorted(test)]
        elif test is not None:
            sets.append(("test", "", check_dataset(test, "test")))
        inputs = Joined([data for _, _, data in sets])
        places, at = Places(), 0
        for which, client, data in sets:
            places[which, client] = np.arange(at, at + len(data))
            at += len(data)
        split = np.concatenate([np.full(len(data), which) for which, _, data in sets])
        columns = column([data for _, _, data in sets], by) if by and clients is None else {}
        notices = self.notices
        if any(p.requires_grad and p.dtype == torch.bfloat16 for p in self.module.parameters()):
            notices += (
                "the module's trainable parameters are bfloat16, in which steps below about 1/256 of a weight are "
                "lost; load it in float32, and with a Trainer set bf16=True",
            )
        table = Table("own", inputs, None, (), split, columns, "the data given to federate()", notices)
        self.rows = DatasetRows(table=table, index=np.arange(len(inputs)), collate=self.collate)
        labels, self._nan = read_once(self.rows)
        self._labelled = labels is not None
        return replace(table, labels=labels), places

    # --- the model ---------------------------------------------------------------------------------------------------
    def native(self, batch: Batch) -> Any:
        """The batch in the form of the user's collate function."""
        if self._whole:
            return batch["0"]
        if self._listed:
            return tuple(x for k, x in batch.items() if k != ITEMS)
        return {k: x for k, x in batch.items() if k != ITEMS and not (self._alias and k == "labels")}

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The training loss, a scalar."""
        if self.of_trainer is None:
            return self.outcome(module, batch)[0]
        value: Tensor = self.of_trainer.loss(module, self.native(batch), batch.get(ITEMS), outputs=False)
        return value.mean()

    def outcome(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """The loss and the outputs of a batch; the outputs are the logits, the module's output or None."""
        native = self.native(batch)
        if self.of_trainer is not None:
            if not self._labelled:  # saves the second pass in which SFTTrainer computes logits
                return self.of_trainer.loss(module, native, None, outputs=False).mean(), None
            value, found = self.of_trainer.loss(module, native, None, outputs=True)
            return value.mean(), found["logits"] if isinstance(found, Mapping) and "logits" in found else None
        if self._objective is not None:
            return self._objective(module, native), self._logits(module, native) if self._logits else None
        arguments = {k: x for k, x in batch.items() if k != self._alias}
        if self._loss is None:
            found = module(*arguments.values()) if self._listed else module(**arguments)
            own_loss, logits = (
                found.get(key) if isinstance(found, Mapping) else getattr(found, key, None)
                for key in ("loss", "logits")
            )
            if own_loss is None:
                raise InputError("the module returns no loss: give loss=(output, target) -> scalar")
            return own_loss, logits
        if "labels" not in batch:
            raise InputError("loss: rows have no target; expected (input, target), or a dict and labels=the target key")
        inputs = {k: x for k, x in arguments.items() if k != "labels"}
        output = module(*inputs.values()) if self._listed or len(inputs) == 1 else module(**inputs)
        return self._loss(output, batch["labels"]), output

    def model(self, classes: Sequence[str] = ()) -> WrappedModel:
        """The module as a model, without a trial on rows."""
        module = self.module
        check_module(module)
        live = [p for p in module.parameters() if p.requires_grad]
        if not live:
            raise InputError("model: no parameter requires a gradient: there is nothing to train")
        for what in ("dtype", "device"):
            if len(found := {str(getattr(p, what)) for p in live}) > 1:
                raise InputError(
                    f"model: trainable parameters are of {' and '.join(sorted(found))}; expected one {what}"
                )
        if live[0].dtype == torch.float16:
            raise InputError(
                "model: trainable parameters are float16, whose gradients vanish below 6e-8: expected float32, or "
                "bfloat16"
            )
        model = wrap(
            module,
            self.loss,
            classes=tuple(classes),
            logits=lambda m, b: self.outcome(m, b)[1],
            prepare=lambda t, index: DatasetRows(table=t, index=index, collate=self.collate),
            name=IN_MEMORY,
        )
        model.task = cast("ModelTask", tasks.find("own"))  # only general kernels, since the loss is the user's
        model.fingerprint = fingerprint_of(module, model.layout)
        return model

    def batch(self, rows: list[Any]) -> Batch:
        """A batch of rows on the module's device; the target may be absent."""
        device = next(self.module.parameters()).device
        return {k: move(x, device) for k, x in self.collate(rows, target=False).items()}

    def inputs(self, batch: Batch) -> Batch:
        """The batch without its target."""
        return {name: x for name, x in batch.items() if name not in ("labels", self._alias)}

    def predict(self, rows: list[Any]) -> Outputs:
        """The module's outputs for rows; the target is not used and may be absent.

        Raises:
            InputError: the module fails on the rows, or has no output for each row.
        """
        batch = self.batch(rows)
        try:
            if self._objective is not None:
                if self._logits is None:
                    raise InputError("the run was trained by an objective: give logits=(module, batch) -> outputs, too")
                return of_module(self._logits(self.module, self.native(batch)), batch)
            inputs = self.inputs(batch)
            if forecasts(self.module):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)  # so that a forecast always has the same samples
                    return of_module(forecast(self.module, inputs), batch)
            if self.of_trainer is not None:
                found = self.of_trainer.outputs(self.module, inputs)
            else:
                found = self.module(*inputs.values()) if self._listed or len(inputs) == 1 else self.module(**inputs)
        except InputError:
            raise
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            raise InputError(
                f"the module fails on these rows: {type(error).__name__}: {first_line(error, 300)}"
            ) from error
        return of_module(found, batch)

    def wrap(self, table: Table, classes: Sequence[str]) -> WrappedModel:
        """The module as a model, after a trial on the first rows."""
        module, model = self.module, self.model()
        if (said := self.of_trainer) is not None:
            self.end = said.begin_checkpointing()
            model.no_weight_decay, model.weigh = said.no_weight_decay, lambda parts: said.weigh(parts, self.native)
        count = self._trial(model, table)
        if count and table.labels is not None and int(table.labels.max()) >= count:
            raise InputError(f"labels: there is a {int(table.labels.max())}, and the module gives {count} logits")
        if classes and count and len(classes) != count:
            raise InputError(f"classes: {len(classes)} names, and the module gives {count} logits")
        top = count if count else 0 if table.labels is None else int(table.labels.max()) + 1
        model.classes = tuple(map(str, classes)) or _names(module, top)
        figures = self._trainers_figures(model, table)
        model.scores_function = lambda _, rows, size: scores_of(self, model, rows, size, count, figures)
        return model

    def _trainers_figures(self, model: WrappedModel, table: Table) -> TrainersFigures | None:
        """The object that computes the Trainer's own figures; None if there are none."""
        if self.trainer is None or self.trainer.compute_metrics is None:
            return None
        from fedfm.models.user.trainer_figures import TrainersFigures

        figures = TrainersFigures(self, model)
        with torch.random.fork_rng(devices=[]), model.evaluating():
            used, notices = figures.try_on(self.rows.take(table.rows("test")))
        model.notices += notices
        return figures if used else None

    def _trial(self, model: WrappedModel, table: Table) -> int:
        """Compute the loss of the first rows as a trial; return a classifier's number of logits, else 0.

        Raises:
            InputError: module or loss fail on the first rows, or the loss is not a scalar.
        """

        def run_step(size: int) -> tuple[Tensor, Any]:
            batch = batch_of(model.device, self.rows, range(size))
            return with_graph(lambda: self.outcome(self.module, batch))

        most = self.at_once(min(_PROBE, len(self.rows)))
        try:
            with torch.random.fork_rng(devices=[]), model.evaluating(), record_calls(self.module) as layers:
                (loss, logits), _ = in_halves(most, run_step, warn)
        except InputError:
            raise
        except Exception as error:
            what = "module and loss fail on the first rows"
            if self.trainer is None and self._loss is None and self._objective is None:
                what = "give loss=(output, target) -> scalar; without it the module gets the complete batch, and fails"
            raise InputError(f"{what}: {type(error).__name__}: {first_line(error, 300)}") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"the loss of a batch is {shape}: expected a scalar, the mean over the rows")
        first = range(min(_PAIR, most))
        again = partial(self.loss, self.module, batch_of(model.device, self.rows, first))
        model.notices += gradients.idle(model, reach(loss, model.live()), again)
        model.notices += buffers.keep(model, again)
        model.notices += seen_targets.refuse(model, batch_of(model.device, self.rows, range(1)), self._alias)
        model.ends = find_ends(self.module) or layers.ends(logits)
        self._check_nan(model)
        fits = isinstance(logits, Tensor) and logits.dim() == 2 and logits.is_floating_point() and logits.shape[1] > 1
        return int(logits.shape[1]) if fits and table.labels is not None else 0

    def at_once(self, most: int) -> int:
        """Number of rows of a batch without gradients: ``most``, or less if a Trainer's setting limits it."""
        return most if self.trainer is None else min(most, int(self.trainer.args.eval_batch_size))

    def _check_nan(self, model: WrappedModel) -> None:
        """Refuse rows with a NaN, unless their loss is finite."""
        if self._nan is None:
            return
        with torch.random.fork_rng(devices=[]), model.evaluating():
            start = max(min(self._nan, len(self.rows) - _PROBE), 0)
            batch = batch_of(model.device, self.rows, range(start, min(start + _PROBE, len(self.rows))))
            if bool(torch.isfinite(self.outcome(self.module, batch)[0])):
                return
        row = self._nan
        for split, client, data in self._sets:
            if row < len(data):
                where = f'{"clients" if split == "train" else split}["{client}"]' if client else split
                raise InputError(f"{where}, row {row} holds NaN, and its loss is NaN: fill the gap, or drop the row")
            row -= len(data)


def _are_rows(batch: Any, rows: list[Any]) -> bool:
    """Whether the user's collate function returns a list with a dict for each row."""
    listed = isinstance(batch, list) and len(batch) == len(rows) > 0 and all(isinstance(x, Mapping) for x in batch)
    return listed and not (isinstance(rows[0], tuple | list) and all(isinstance(x, Mapping) for x in rows[0]))


def _names(module: nn.Module, count: int) -> tuple[str, ...]:
    """The class names in a transformers configuration; if it has none for these classes, "0", "1", ..."""
    named = getattr(getattr(module, "config", None), "id2label", None) or {}
    numbers = range(count)
    return tuple(str(named[i]) for i in numbers) if set(named) == {*numbers} else tuple(map(str, numbers))
