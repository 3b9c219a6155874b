"""Wraps a torch module and its loss as a Model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedfm.core.rows import Batch, Rows
from fedfm.models.batches import move, rows_of
from fedfm.models.families import Parts
from fedfm.models.first_and_last_layer import Ends
from fedfm.models.model import Model
from fedfm.models.preprocessors import Tools
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.models.weight_fingerprint import fingerprint

if TYPE_CHECKING:
    from fedfm.data.table import Table
    from fedfm.linalg.params import Params


class WrappedModel(Model):
    """A :class:`Model` with functions for the loss, the logits and the preparation of rows."""

    softmax = False
    ends: Ends | None = None  # None if ``parts`` determines them
    loss_function: Callable[[nn.Module, Batch], Tensor]
    logits_function: Callable[[nn.Module, Batch], Tensor] | None = None
    prepare_function: Callable[[Table, np.ndarray], Rows] | None = None
    scores_function: Callable[[Model, Rows, int], dict[str, Any]] | None = None  # instead of models.metrics.evaluate
    reset_buffers: Sequence[tuple[nn.Module, str, Tensor, Tensor]] = ()  # module, buffer's name, buffer, its value
    evaluation_only: Sequence[nn.Module] = ()  # modules that stay in evaluation mode when the module trains

    def load(self, w: Params) -> None:
        """Copy the values, and reset buffers that no message contains: they depend on a client's rows."""
        super().load(w)
        with torch.no_grad():
            for module, name, buffer, value in self.reset_buffers:
                module._buffers[name] = buffer.copy_(value)  # the module may have put another tensor in its place

    def train_mode(self) -> None:
        super().train_mode()
        self._set_evaluation_mode()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        try:
            with super().evaluating():
                yield
        finally:
            self._set_evaluation_mode()

    def _set_evaluation_mode(self) -> None:
        for module in self.evaluation_only:
            module.training = False

    def loss(self, batch: Batch) -> Tensor:
        return self.loss_function(self.module, self._to_device(batch))

    def logits(self, batch: Batch) -> Tensor:
        """The result of the given function, else the module's output for the batch without its labels."""
        batch = self._to_device(batch)
        if self.logits_function is not None:
            return self.logits_function(self.module, batch)
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        if len(inputs) == 1:  # a module with one argument may use any name for it
            return self.module(*inputs.values())  # type: ignore[no-any-return]
        return self.module(**inputs)  # type: ignore[no-any-return]

    def prepare(self, table: Table, index: Sequence[int] | np.ndarray, most: float | None = None) -> Rows:
        """Prepare rows by the given function, else as feature vectors."""
        if self.prepare_function is not None:
            return self.prepare_function(table, np.asarray(index, dtype=np.int64))
        return super().prepare(table, index, most)

    def encode(self, rows: Rows) -> Rows:
        return rows

    def features(self, rows: Rows) -> Tensor:
        tensors = {("vectors" if name == "features" else name): x for name, x in rows.tensors.items()}
        return super().features(dataclasses.replace(rows, tensors=tensors))

    def count_targets(self, batch: Batch) -> int:
        return rows_of(batch)

    def outputs(self, batch: Batch) -> Tensor:
        return self.logits({("features" if name == "vectors" else name): x for name, x in batch.items()})

    def _to_device(self, batch: Batch) -> Batch:
        return {name: move(x, self.device) for name, x in batch.items()}


def wrap(
    module: nn.Module,
    loss: Callable[[nn.Module, Batch], Tensor],
    *,
    classes: Sequence[str] = (),
    head: str = "",
    trainable: Iterable[str] | None = None,
    logits: Callable[[nn.Module, Batch], Tensor] | None = None,
    prepare: Callable[[Table, np.ndarray], Rows] | None = None,
    name: str = "wrapped",
) -> WrappedModel:
    """Make any torch module a Model.

    Args:
        module: the module, on its device.
        loss: (module, batch) -> scalar, the mean over the batch.
        classes: class names, for metrics.
        head: path of the last linear layer, for methods that need features.
        trainable: names of the parameters that clients train and send; None means all.
        logits: (module, batch) -> (b, C); None means the module's output.
        prepare: (table, index) -> Rows; None means rows of feature vectors.
        name: the model's name in messages and manifests.

    Raises:
        KeyError: a name in ``trainable`` is not a parameter.
        ValueError: ``head`` is not a linear layer.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> model = wrap(net, lambda m, b: nn.functional.cross_entropy(m(b["features"]), b["labels"]), head="2")
        >>> model.names
        ('0.weight', '0.bias', '2.weight', '2.bias')
    """
    if trainable is not None:
        wanted = set(trainable)
        if unknown := wanted - {n for n, _ in module.named_parameters()}:
            raise KeyError(f"no such parameters: {sorted(unknown)[:6]}")
        for n, p in module.named_parameters():
            p.requires_grad_(n in wanted)
    found = module.get_submodule(head) if head else None
    if found is not None and not isinstance(found, nn.Linear):
        raise ValueError(f"head: {head!r} is a {type(found).__name__}, expected a Linear")
    spec = ModelSpec(name, task="classification", adaptation=AdaptationSpec("full"))
    weight_hash = fingerprint(module.state_dict(), {"model_type": type(module).__name__})
    parts = Parts(None, (), None, None, head)
    model = WrappedModel(
        module,
        spec=spec,
        task="classification",
        classes=classes,
        parts=parts,
        tools=Tools(),
        fingerprint=weight_hash,
        head=found,
    )
    model.evaluation_only = _evaluation_modules(module)
    excluded = {*map(id, model.evaluation_only)}
    # Unlike a foundation model, this module trains with its own dropout.
    model.train_too = [m for m in module.modules() if id(m) not in excluded]
    model.loss_function, model.logits_function, model.prepare_function = loss, logits, prepare
    model.ends = Ends((), head or None)
    return model


def _evaluation_modules(module: nn.Module) -> list[nn.Module]:
    """The modules that ``module.train()`` leaves in evaluation mode: a class may freeze its batch norm like this."""
    modes = [(m, m.training) for m in module.modules()]
    module.train()
    found = [m for m, _ in modes if not m.training]
    for m, mode in modes:
        m.training = mode
    return found
