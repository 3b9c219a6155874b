"""Model: a foundation model with its adaptation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedfm.core import tasks
from fedfm.core.rows import Batch, Rows
from fedfm.errors import RunError
from fedfm.linalg import pages
from fedfm.linalg.params import Layout, Params, layout_of
from fedfm.models import kept_outputs, metrics, preparation, preprocessing
from fedfm.models.adapters.adaptation import live_head
from fedfm.models.decay import no_weight_decay
from fedfm.models.derived_modules import Bounded
from fedfm.models.families import Parts, unwrap
from fedfm.models.precision import reduced_precision
from fedfm.models.preprocessing import LOCAL_SHARE
from fedfm.models.preprocessors import Tools
from fedfm.models.spec import AdaptationSpec, ModelSpec

if TYPE_CHECKING:
    from fedfm.core.task_facts import TaskFacts
    from fedfm.data.table import Table
    from fedfm.models.file_slices import FileSlices
    from fedfm.models.model_task import ModelTask
    from fedfm.models.network import Pool

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Model:
    """A foundation model adapted to one task.

    Attributes:
        spec: its [model] table with the defaults filled in.
        task: defines targets, loss and scores; its fields have the values of the task's keys.
        classes: class names in the order of the logits; () for language models.
        adaptation_spec, adaptation: the trainable part, and its name.
        module: the torch module (Hugging Face, PEFT or our own), on ``device``.
        parts: its blocks and head.
        tools: the preprocessors of its rows.
        fingerprint: sha256 of the starting weights without new heads, and of the configuration.
        head: the linear head that the forward pass uses; None if the model has none.
        names: names of the trainable tensors, which clients send, in the module's order.
        layout: names, shapes and dtypes of :meth:`params`.
        train_too: modules in training mode during training; the others stay in evaluation mode.
        kernels: how cohorts train: ``exact``, ``fast`` or ``fast_bf16`` (see ``fedfm.training.packed``).
        predictor: a function that computes logits faster, or returns None for rows that it does not support; None if
            the model has no such function.
        loaders: number of processes that prepare deferred images in advance.
        notices: lines for the user on guesses about the model's files, and on settings that do nothing on this machine.
        compiled: whether the blocks compile at their first call.
        hollow: whether the frozen weights are not loaded; then the model cannot compute outputs.
        added_bias: whether the head has a bias that the architecture does not have.
        slices: where the values of its parameters are, if they are still in the files.
        no_weight_decay: names of tensors without weight decay, see :mod:`fedfm.models.decay`.
        weigh: maps the parts of a batch to (part, factor of its loss); None stands for factors in proportion to the
            numbers of targets.
    """

    kernels: str = "exact"
    predictor: Callable[[Model, Rows], Tensor | None] | None = None
    loaders: int = 0
    notices: tuple[str, ...] = ()
    compiled: bool = False
    hollow: bool = False
    slices: FileSlices | None = None
    added_bias: bool = False
    weigh: Callable[[Sequence[Batch]], Iterable[tuple[Batch, float]]] | None = None
    pool: Pool | None = None  # how a classifier pools its head's inputs (b, T, d); None until known
    weights_overridden: int = 0  # above 0 if hooks change the outputs of its modules
    share: Tensor | None = None  # (b,) for the current batch: the weight of the client's own adapter in a pair
    new: tuple[str, ...] = ()  # paths of modules that were created for the task, before the adaptation
    answers_alone: bool | None = None  # whether prompts are answered one at a time; None if not yet checked
    softmax: bool = True  # the loss is the cross-entropy of the logits, as the fast trainers require

    def __init__(
        self,
        module: nn.Module,
        *,
        spec: ModelSpec,
        task: str | TaskFacts,
        classes: Sequence[str],
        parts: Parts,
        tools: Tools,
        fingerprint: str,
        head: nn.Linear | None,
    ) -> None:
        self.spec, self.classes = spec, tuple(classes)
        self.task = cast("ModelTask", tasks.find(task)).of(spec)
        self.softmax = type(self).softmax and self.task.softmax and not self.task.mixes_rows
        self.module, self.parts, self.tools, self.fingerprint = module, parts, tools, fingerprint
        self.adaptation_spec = spec.adaptation or AdaptationSpec("full")
        self.adaptation = self.adaptation_spec.name
        self.head = head
        self._arguments = frozenset(inspect.signature(unwrap(module).forward).parameters)
        self.find_tensors()
        self.names = tuple(self._tensors)
        self.layout: Layout = layout_of(tuple((n, t.dtype, tuple(t.shape)) for n, t in self._tensors.items()))
        self.train_too = [
            m
            for name, m in module.named_modules()
            if "lora_dropout" in name
            or isinstance(m, Bounded)
            or (self.adaptation == "full" and isinstance(m, BATCH_NORMS))
        ]
        self._keepers = kept_outputs.keepers(module)
        self.no_weight_decay = no_weight_decay(module) & set(self.names)
        self.eval_mode()

    @property
    def device(self) -> torch.device:
        """The module's device."""
        parameter = next(self.module.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprints that the server and all clients of a run share.

        ``model`` covers weights and configuration. ``preparation`` covers the way in which rows are prepared, see
        :mod:`fedfm.models.preparation`.
        """
        return {"model": self.fingerprint, "preparation": preparation.fingerprint(self.tools)}

    @property
    def identity(self) -> str:
        """The fingerprints, joined into one text."""
        return "/".join(self.fingerprints.values())

    @property
    def feature_dim(self) -> int:
        """The length d of the head's input. Raises a ValueError if the model has no head."""
        return self._existing_head().in_features

    @property
    def last_layer(self) -> nn.Linear | None:
        """The head, or the output layer of a language model; None if the model has neither."""
        return self.head or live_head(self.module, self.parts.head)

    # --- weights ------------------------------------------------------------------------------------------------------
    def params(self) -> Params:
        """Copies of the trainable tensors, on the CPU."""
        return Params(self._tensors)

    def load(self, w: Params) -> None:
        """Copy these values into the module.

        Raises:
            KeyError: names differ from :attr:`names`.
            ValueError: shapes or dtypes differ.
        """
        if w.layout is not self.layout:
            if differ := w.layout.slots.keys() ^ self.layout.slots.keys():
                raise KeyError(f"parameter names differ: {sorted(differ)[:6]}")
            for name, tensor in self._tensors.items():
                if w[name].shape != tensor.shape or w[name].dtype != tensor.dtype:
                    raise ValueError(
                        f"{name}: {w[name].dtype} {tuple(w[name].shape)}, expected {tensor.dtype} {tuple(tensor.shape)}"
                    )
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(w[name])
        self.forget()
        for flat in w.flats.values():
            pages.release(flat)

    def forget(self) -> None:
        """Clear caches that modules computed from other weights, see :mod:`fedfm.models.kept_outputs`."""
        for module in self._keepers:
            kept_outputs.forget(module)

    def find_tensors(self) -> None:
        """Find the trained tensors in the module, again if its parameters were replaced."""
        self._tensors = dict(_sent_tensors(self.module, running_statistics=self.adaptation == "full"))

    def live(self) -> dict[str, Tensor]:
        """The trainable parameters themselves, not copies."""
        return {name: tensor for name, tensor in self._tensors.items() if tensor.requires_grad}

    # --- rows ---------------------------------------------------------------------------------------------------------
    def prepare(self, table: Table, index: Sequence[int] | np.ndarray, most: float | None = None) -> Rows:
        """Rows ``index`` of the table as tensors or tokens of this model, on the CPU.

        Args:
            most: images are prepared now if they take at most this number of bytes; else each batch prepares its own
                images. For None see :mod:`fedfm.models.images`.

        Raises:
            InputError: the model does not accept this kind of data.
        """
        return preprocessing.prepare(
            table,
            index,
            classes=self.classes,
            tools=self.tools,
            task=self.task,
            most=most,
            loaders=self.loaders,
            check=self._check_tokens,
        )

    def _check_tokens(self, *of: Any) -> None:
        from fedfm.models import lengths  # of texts alone

        lengths.check(self.tools, *of)

    def encode(self, rows: Rows) -> Rows:
        """With adaptation ``head``, the rows' features (n, d) from the frozen backbone; else the rows unchanged.

        The backbone always computes 32 rows at a time, so that the bits of a row's features depend on no other rows.
        """
        rows = self.task.encode(self, rows)
        if self.adaptation != "head" or self.head is None or "features" in rows.tensors:
            return rows
        features = self.features(rows)
        if any(
            isinstance(m, Bounded) for m in self.train_too
        ):  # activations of a polynomial student overflow outside its intervals
            features = torch.where(features.isfinite().all(1, keepdim=True), features, 0.0)
        return Rows({"features": features, **rows.targets}, labels=rows.labels)

    def features(self, rows: Rows) -> Tensor:
        """The head's inputs (n, d), on the CPU; in causal models the inputs for the last token before padding.

        Raises:
            ValueError: the model has no head.
        """
        if "features" in rows.tensors:
            return rows.tensors["features"]
        from fedfm.models.head_inputs import head_inputs

        return head_inputs(self, self._existing_head(), rows)

    def last_states(self, rows: Rows) -> Tensor:
        """The inputs (n, d) of :attr:`last_layer`.

        In causal models an input is the final hidden state of a row's last token. For instructions it is the final
        hidden state of the prompt's last token.

        Raises:
            ValueError: the model has no head.
        """
        if self.last_layer is None:
            raise ValueError("the model has no linear head, hence no last hidden state")
        from fedfm.models.head_inputs import head_inputs

        return head_inputs(self, self.last_layer, self.task.prompts(rows))

    def _existing_head(self) -> nn.Linear:
        if self.head is None:
            raise ValueError("the model has no linear head, hence no features")
        return self.head

    def blocks(self, rows: Rows) -> list[Tensor]:
        """As :func:`fedfm.models.block_outputs.blocks`."""
        from fedfm.models.block_outputs import blocks

        return blocks(self, rows)

    # --- forward ------------------------------------------------------------------------------------------------------
    def logits(self, batch: Batch) -> Tensor:
        """Logits (b, C), or (b, L, V) of a language model, for a batch of rows or of encoded rows."""
        if "features" in batch and self.head is not None:
            weight = self.head.weight
            return self.head(batch["features"].to(weight.device, weight.dtype))  # type: ignore[no-any-return]
        return self.task.logits(self, batch)

    def loss(self, batch: Batch) -> Tensor:
        """The task's mean loss, a scalar: over the rows for a classifier, over the next tokens for a language model."""
        return self.task.loss(self, batch)

    def flat(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits (m, C) and targets (m,) of the cross-entropy; the target ``IGNORE`` does not count."""
        return self.task.targets(self, logits, batch)

    def count_targets(self, batch: Batch) -> int:
        """The number of targets in the mean loss of this batch."""
        return self.task.count_targets(batch)

    @property
    def mixes_rows(self) -> str:
        """Why the loss of a batch is not a mean over its rows; empty if it is such a mean."""
        if any(isinstance(m, BATCH_NORMS) for m in self.train_too):
            return "the model's batch norm takes its statistics from a whole batch"
        return self.task.mixes_rows

    @property
    def is_language_model(self) -> bool:
        """Whether the model is a causal language model, whose rows are tokens without labels."""
        return self.task.is_language_model

    def predict(self, rows: Rows, batch_size: int = 64) -> Tensor:
        """Logits of all rows without gradients, float32 on the CPU.

        The ``predictor`` computes them if the model has one that supports the rows, otherwise the task does.
        """
        if self.predictor is not None and (found := self.predictor(self, rows)) is not None:
            return found
        return self.task.predict(self, rows, batch_size)

    def in_batches(self, rows: Rows, batch_size: int = 64) -> Tensor:
        """Logits of all rows without gradients, float32 on the CPU; rows of similar length share a batch."""
        from fedfm.models.memory_budget import by_tokens, in_halves, warn
        from fedfm.models.row_batches import by_length

        rows, back = by_length(rows)

        def by(size: int) -> list[Tensor]:
            with self.evaluating():
                return [self.logits(batch).float().cpu() for batch in rows.batches(size)]

        size = by_tokens(rows.longest, min(batch_size, max(len(rows), 1)))
        done, _ = in_halves(size, by, warn)
        return torch.cat(done)[back] if done else torch.zeros(0, len(self.classes))

    def evaluate(self, rows: Rows, logits: Tensor | None = None) -> dict[str, Any]:
        """Scores as in :func:`fedfm.models.metrics.evaluate`, from ``logits`` (n, C) if given."""
        if logits is None:
            return metrics.evaluate(self, rows)
        return self.task.scores_of(self, rows, logits)

    def train_mode(self) -> None:
        """Switch LoRA's dropout to training mode, and with adaptation ``full`` also batch norm.

        The model's own dropout stays off.
        """
        self.module.eval()
        for module in self._keepers:
            kept_outputs.begin(module)
        for module in self.train_too:
            module.train()
        if self.spec.gradient_checkpointing:
            from fedfm.models import checkpointing

            checkpointing.begin(self.parts)

    def eval_mode(self) -> None:
        """Switch all modules to evaluation mode."""
        self.module.eval()
        if self.spec.gradient_checkpointing:
            from fedfm.models import checkpointing

            checkpointing.end(self.parts)

    # --- inside -------------------------------------------------------------------------------------------------------
    def outputs(self, batch: Batch) -> Tensor:
        """The module's logits of a batch."""
        if self.hollow:
            raise RunError("this server has not loaded the model's weights, because it has no test rows")
        device, self.share = self.device, batch.get(LOCAL_SHARE)
        caches = {"use_cache", "kwargs"} if self.is_language_model else {"use_cache"}  # some take use_cache by **kwargs
        fixed = {"use_cache": False} if caches & self._arguments else {}
        given = {k: v.to(device) for k, v in batch.items() if k in self._arguments and k != "labels"}
        with reduced_precision(self.spec.dtype, device):
            out = self.module(**given, **fixed)
        return out if isinstance(out, Tensor) else out.logits if hasattr(out, "logits") else out.last_hidden_state

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager: evaluation mode without gradients; afterwards the former mode."""
        keepers, training = ([m for m in some if m.training] for some in (self._keepers, self.train_too))
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in keepers:
                kept_outputs.begin(module)
            for module in training:
                module.train()


def _sent_tensors(module: nn.Module, *, running_statistics: bool) -> Iterator[tuple[str, Tensor]]:
    """Parameters that require a gradient, and optionally running means and variances, in module order."""
    seen: set[int] = set()
    for prefix, m in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, parameter in m.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield dot + name, parameter
        if running_statistics and isinstance(m, BATCH_NORMS) and m.track_running_stats:
            for name in ("running_mean", "running_var"):
                yield dot + name, getattr(m, name)
