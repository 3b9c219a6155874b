"""Distillation of a model into its polynomial student (BlindFed, arXiv:2502.01289, Section 3.1 and Appendix E).

Three stages train one student, which starts as a copy of the teacher with centred weights:

0. *Tame*, with the exact functions: keep the outputs, and penalise scores, inputs of GELU, row sums of exp and
   variances that spread too far for a polynomial. This stage is ours; without it the student of a usual ViT gives NaN.
   After this stage, the functions' arguments are measured on the training rows, and polynomials replace the functions
   (:meth:`Distiller.swap`).
1. *States*: match every block's scores (loss L_a) and outputs (loss L_h) with those of the tamed model (equations
   10 to 14). The loss is L_a + L_h. Each of the two is a mean squared difference, divided by the teacher's variance
   and summed over the blocks.
2. *Outputs*: match the teacher's outputs: tau^2 KL(T || S), tau = 5 (equation 15), and the cross-entropy of the labels.

The teacher's head may be new for these classes, e.g. because a backbone has no head. Then its logits are of no use, and
the student matches the head's inputs. The loss is the mean squared difference of these inputs, divided by the teacher's
variance in each dimension. It replaces the KL divergence and the cross-entropy, so labels are not used.

In stages 1 and 2, arguments are clamped to their interval, and a penalty grows as an argument moves beyond 80 % of the
interval. After each of these stages the arguments are measured again without clamping
(:mod:`fedfm.encrypted.student.recalibrate`). The coefficients of the quadratic that replaces GELU are not trained. The
linear maps around it are trained, and can express every a > 0, b and c.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.core.fields import setting
from fedfm.core.rows import Batch
from fedfm.encrypted.student import conversion, fit_polynomials
from fedfm.encrypted.student.modules import Replaced
from fedfm.errors import InputError
from fedfm.models.derived_modules import hinge, penalties
from fedfm.models.model import Model
from fedfm.models.quiet import quiet

TAME, STATES, OUTPUTS = 0, 1, 2
STAGES = ("tame", "states", "outputs")
TAUGHT = ("teacher_logits", "teacher_features")  # keys under which a batch may contain the teacher's outputs
SCORES, HIDDEN, SPREAD = 5.0, 3.5, 0.8  # thresholds for the penalties of the tame stage
_KEEP, _SOFT = 4.0, 2.0  # weight and temperature of the KL divergence in the tame stage
_EPSILON = 1e-6
_FAINT = 1e-3  # initial fraction of the penalties' weight


@dataclass(frozen=True)
class Recipe:
    """The settings with which a model is made into a polynomial student."""

    epochs: tuple[int, ...] = setting(
        (3, 15, 15),
        "numbers of epochs of the stages: tame, states, outputs",
        ge=0,
        least=3,
        most=3,
        words="three integers of at least 0",
    )
    learning_rates: tuple[float, ...] = setting(
        (2e-3, 1e-3, 1e-5),
        "Adam's learning rate in each stage; large models need smaller rates",
        gt=0,
        finite=True,
        least=3,
        most=3,
        words="three finite numbers above 0",
    )
    batch_size: int = setting(16, "number of rows per step", ge=1)
    temperature: float = setting(5.0, "tau of the outputs stage", gt=0, finite=True)
    polynomials: str = setting(
        "scaled",
        "scaled: exp by T_degree(x / 2^squarings)^(2^squarings), 1 / sqrt(x) by Newton's iteration, GELU by a fitted "
        "quadratic; paper: exp by T_6, 1 / x (also in norms) with 7 steps and scaled by its maximum, GELU by "
        "0.125 x^2 + 0.25 x + 0.5",
        choices=fit_polynomials.KINDS,
    )
    degree: int = setting(2, "for scaled: even degree of the polynomial of exp", ge=2, le=16)
    squarings: int = setting(3, "for scaled: number of times that the polynomial of exp is squared", ge=0, le=8)
    decay: float = setting(1.0, "final fraction of a stage's learning rate, which falls linearly", gt=0, le=1)
    tameness: float = setting(5.0, "weight of the penalties of the tame stage", ge=0, finite=True)
    ramp: float = setting(
        0.0,
        "fraction of the tame stage over which the penalties' weight grows from a thousandth of tameness to tameness; "
        "full penalties at the start can destroy what a large model has learned",
        ge=0,
        le=1,
    )
    forced: float = setting(
        0.0,
        "fraction of the states stage in which each block gets the tamed model's state as its input, so that errors of "
        "one block do not move later blocks out of their intervals; for deep models",
        ge=0,
        le=1,
    )
    penalty: float = setting(10.0, "weight of the penalty on arguments beyond 80 % of an interval", ge=0, finite=True)
    widen: bool = setting(
        True,
        "whether to measure arguments again after the states stage and at the end, and widen the intervals that they "
        "exceed; 1 / x and 1 / sqrt(x) may then take one more step",
    )

    def rate(self, stage: int, part: float) -> float:
        """Return the learning rate after the fraction ``part`` (0 to 1) of a stage."""
        return self.learning_rates[stage] * (1 - (1 - self.decay) * part)

    def weight(self, part: float) -> float:
        """Return the weight of the tame stage's penalties after the fraction ``part`` of the stage."""
        return self.tameness * (_FAINT ** (1 - part / self.ramp) if part < self.ramp else 1.0)

    def validate(self) -> None:
        """Raise an InputError for an odd degree."""
        if self.degree % 2:
            raise InputError(
                f"distil.degree = {self.degree}: expected an even number, since a Taylor polynomial of exp with odd "
                "degree is negative somewhere"
            )


class Taps:
    """A model that records the block outputs, head inputs and functions' arguments of each forward pass.

    Attributes:
        functions: the replaced functions of each block.
        states: outputs of the blocks in the last forward pass, each (n, T, d). In a pre-norm model they are centred:
            the mean over features is subtracted.
        features: inputs of the head in the last forward pass, (n, d).

    Raises:
        InputError: the model has no head, or polynomials cannot replace the functions of its blocks.
    """

    def __init__(self, model: Model) -> None:
        if model.head is None or not model.task.classifies_by_head:
            raise InputError(
                f"model.name: {model.spec.name!r} has no classification head, so there are no features that the "
                f"student could keep"
            )
        self.model, self.functions = model, conversion.prepare(model.module)
        self.states: list[Tensor] = []
        self.features = torch.empty(0)
        self._centred = conversion.pre_norm(model.module)
        for _, block in model.parts.blocks:
            block.register_forward_hook(self._block)
        model.head.register_forward_pre_hook(self._head)

    def _block(self, _: Any, __: Any, y: Any) -> None:
        y = y[0] if isinstance(y, tuple) else y
        self.states.append(y - y.mean(-1, keepdim=True) if self._centred else y)

    def _head(self, _: Any, args: tuple[Tensor, ...]) -> None:
        self.features = args[0].float()

    def __call__(self, batch: Batch) -> Tensor:
        """Compute logits (n, C), and record states, features and arguments."""
        self.states.clear()
        hinge(self.modules())
        return self.model.logits(batch).float()

    def modules(self) -> list[Replaced]:
        """Return the replaced functions of all blocks."""
        return [module for block in self.functions for module in block]

    @contextmanager
    def starting(self, states: list[Tensor]) -> Iterator[None]:
        """A context in which each block except the first gets a given state (n, T, d) as its input."""
        blocks = [block for _, block in self.model.parts.blocks]
        hooks = [
            block.register_forward_pre_hook(lambda _, args, x=x: (x, *args[1:]))
            for block, x in zip(blocks[1:], states, strict=False)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which the functions record their arguments."""
        for module in self.modules():
            module.recording = True
        try:
            yield
        finally:
            for module in self.modules():
                module.recording, module.seen = False, {}


class Distiller:
    """The losses of the three stages, and the switch to polynomials after the first stage.

    Args:
        teacher, student: two copies of one model with adaptation ``full``; the student is changed.
        new_head: whether the teacher's head is new; if so, the head's inputs take the place of the logits.
        low: whether linear maps multiply in bfloat16 during training.
    """

    def __init__(self, teacher: Model, student: Model, recipe: Recipe, *, new_head: bool, low: bool = False) -> None:
        self.recipe, self.new_head, self.low = recipe, new_head, low
        self.teacher, self.student = Taps(teacher), Taps(student)
        self.tamed = self.teacher  # the switch to polynomials replaces this model by the tamed one
        self.entries: list[dict[str, Any]] = []
        student.train_too = [*student.train_too, *self.student.modules()]
        conversion.centre(student.module)

    @torch.no_grad()
    def scale_class_tokens(self, batch: Batch) -> None:
        """Scale the student's class tokens, if it has any, to the mean variance of its patch tokens."""
        embedding: Any = self.student.model.parts.embedding
        names = [n for n in ("cls_token", "distillation_token") if hasattr(embedding, n)]
        if not names:
            return
        caught: list[Tensor] = []
        hook = embedding.register_forward_hook(lambda _, __, y: caught.append(y))
        try:
            self.student(batch)
        finally:
            hook.remove()
        variance = caught[0].var(-1, correction=0).mean(0)  # (T,)
        for i, name in enumerate(names):
            factor = (variance[len(names) :].mean() / variance[i].clamp_min(_EPSILON)).sqrt()
            getattr(embedding, name).mul_(factor)
            embedding.position_embeddings[:, i].mul_(factor)

    # --- losses -------------------------------------------------------------------------------------------------------
    def loss(self, stage: int, batch: Batch, part: float = 1.0) -> Tensor:
        """Return the mean loss of a batch in a stage, a scalar with gradients to the student.

        Args:
            part: completed fraction of the stage, from 0 to 1.
        """
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.low):
            if stage == TAME:
                with self.student.recording():
                    logits = self._teach(batch)
                    return self._outputs(logits, batch, _SOFT, _KEEP) + self.recipe.weight(part) * self._tameness()
            if stage == STATES:
                return self._states(batch, forced=part < self.recipe.forced) + self._hinge()
            tau = self.recipe.temperature
            return self._outputs(self._teach(batch), batch, tau, tau**2) + self._hinge()

    def _teach(self, batch: Batch) -> Tensor:
        """Compute the student's outputs, and the teacher's unless the batch has them; return the student's logits."""
        if TAUGHT[1] in batch:
            self._target, self._kept = (
                batch.get(name, torch.empty(0)).to(self.teacher.model.device) for name in TAUGHT
            )
        else:
            with torch.no_grad():
                self._target = self.teacher(batch)
                self._kept = self.teacher.features
        return self.student(batch)

    def _outputs(self, logits: Tensor, batch: Batch, tau: float, weight: float) -> Tensor:
        if self.new_head:
            return weight * nearness(self.student.features, self._kept, each=True)
        soft = F.log_softmax(logits / tau, -1), F.log_softmax(self._target / tau, -1)
        kl = F.kl_div(*soft, log_target=True, reduction="batchmean")
        return weight * kl + F.cross_entropy(logits, batch["labels"].to(logits.device))

    def _tameness(self) -> Tensor:
        """Return the penalties on the functions' recorded arguments."""
        terms = []
        for block in self.student.functions:
            log_sums = block.softmax.seen["log_sums"]  # (n, heads, T, 1)
            away = (log_sums - log_sums.mean((0, 2, 3), keepdim=True)).abs()
            terms += [3 * (away - SPREAD), block.softmax.seen["scores"].abs() - SCORES]
            terms.append(block.gelu.seen["hidden"].abs() - HIDDEN)
            for norm in block.norms:
                log_variance = (norm.seen["variance"] + norm.eps).log()
                terms.append(3 * ((log_variance - log_variance.mean()).abs() - SPREAD))
        return torch.stack([term.clamp_min(0).square().mean() for term in terms]).sum()

    def _states(self, batch: Batch, *, forced: bool) -> Tensor:
        """Return the loss L_a + L_h."""
        with torch.no_grad(), self.tamed.recording():
            self.tamed(batch)
            scores = [block.softmax.seen["scores"] for block in self.tamed.functions]
        with self.student.recording(), self.student.starting(self.tamed.states if forced else []):
            self.student(batch)
            mine = [block.softmax.seen["scores"] for block in self.student.functions]
        states = zip(self.student.states, self.tamed.states, strict=True)
        pairs = [*zip(mine, scores, strict=True), *states]
        return torch.stack([nearness(s, t) for s, t in pairs]).sum()

    def _hinge(self) -> Tensor:
        return self.recipe.penalty * penalties(self.student.modules())

    # --- the swap -----------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def measure(self, batches: Callable[[], Iterable[Batch]]) -> list[dict[str, Any]]:
        """Choose each block's polynomials for the student's arguments on these rows; do not install them yet.

        Raises:
            InputError: the arguments of a function spread too far.
        """
        conversion.centre(self.student.model.module)
        exponential = fit_polynomials.exponential_of(self.recipe.polynomials, self.recipe.degree, self.recipe.squarings)
        measured = [fit_polynomials.Measured() for _ in self.student.functions]
        for block in self.student.functions:
            block.softmax.exponential = exponential
        try:
            with self.student.model.evaluating(), self.student.recording():
                for batch in batches():
                    self.student(batch)
                    for one, block in zip(measured, self.student.functions, strict=True):
                        one.add(block)
        finally:
            for block in self.student.functions:
                block.softmax.exponential = None
                for module in block:
                    module.forget()
        return [
            fit_polynomials.entry(one, self.recipe.polynomials, exponential, f"block {i}")
            for i, one in enumerate(measured, 1)
        ]

    def swap(self, entries: list[dict[str, Any]], tamed: Model) -> None:
        """Install the polynomials. ``tamed`` is a third copy of the model, which receives the tamed weights."""
        self.put(entries)
        self.tamed = Taps(tamed)

    def put(self, entries: list[dict[str, Any]]) -> None:
        """Install these polynomials in the student's blocks."""
        self.entries = entries
        for block, entry in zip(self.student.functions, entries, strict=True):
            fit_polynomials.apply(block, entry)


def nearness(student: Tensor, teacher: Tensor, each: bool = False) -> Tensor:
    """Return the mean squared difference divided by the teacher's variance.

    If ``each`` is true, each entry of the last axis is divided by its own variance, before the mean over these entries.
    """
    student, teacher = student.float(), teacher.float()
    square = (student - teacher).square()
    if not each:
        return square.mean() / teacher.var(correction=0).clamp_min(_EPSILON)
    dims = tuple(range(square.dim() - 1))
    return (square.mean(dims) / teacher.var(dims, correction=0).clamp_min(_EPSILON)).mean()


def save(model: Model, folder: Path, *, new_head: bool) -> None:
    """Write a student as a transformers folder, with its image processor or tokenizer, but without a new head."""
    module: Any = model.module
    config = copy.deepcopy(module.config)
    if new_head:
        module = getattr(module, module.base_model_prefix)
        module.config.num_labels = 2  # transformers' default, since the folder names no classes
    try:
        with quiet():
            module.save_pretrained(str(folder))
            for tool in (model.tools.processor, model.tools.tokenizer):
                if tool is not None:
                    tool.save_pretrained(str(folder))
    finally:
        model.module.config = config
