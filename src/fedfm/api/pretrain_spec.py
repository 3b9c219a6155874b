"""Settings of `fedfm pretrain`, which are the tables of its file."""

from __future__ import annotations

from dataclasses import dataclass

from fedfm.api.central_spec import CentralTraining
from fedfm.core import tasks
from fedfm.core.fields import setting
from fedfm.errors import InputError
from fedfm.models.spec import ModelSpec
from fedfm.training import SGD, Local, Proximal


@dataclass(frozen=True)
class PretrainSpec:
    """The table [pretrain]."""

    local: Local = setting(SGD(), "optimiser, with the keys of [method.local]: epochs, learning_rate, ...")
    milestones: tuple[int, ...] = setting((), "epochs after which the learning rate is multiplied by `factor`")
    factor: float = setting(0.1, "factor of the learning rate at a milestone", gt=0, le=1)
    vocabulary_size: int | None = setting(
        None, "for language models: train a vocabulary of this many tokens on the training text"
    )
    vocabulary: str = setting("bpe", "bpe (on bytes) or words (between blanks)")
    seed: int = setting(0, "seed of the initial weights, the split and the order of rows", ge=0)
    threads: int = setting(0, "number of CPU threads; 0: one per core; another number may change the last bits", ge=0)


@dataclass(frozen=True)
class Pretraining(CentralTraining[PretrainSpec]):
    """The complete settings of a pretraining, with all defaults filled in: [data], [model], [pretrain].

    Example:
        >>> p = Pretraining.from_dict({
        ...     "data": {"name": "digits"},
        ...     "model": {"name": "preact-resnet-small", "weights": "random"},
        ...     "pretrain": {"local": {"epochs": 3}}})
        >>> p.spec.local.epochs, p.model.adaptation.name
        (3, 'full')
    """

    section = "pretrain"
    noun = "pretraining"
    settings = PretrainSpec

    @classmethod
    def refuse(cls, model: ModelSpec, spec: PretrainSpec) -> None:
        """Raise an InputError for a task, an optimiser, milestones or a vocabulary that pretraining does not take."""
        if (task := tasks.task_named(model.task)) is not None and task.no_pretraining:
            raise InputError(f'model.task = "{task.name}": {task.no_pretraining}', key="model.task")
        if isinstance(spec.local, Proximal) or spec.local.absent != "keep":
            raise InputError(
                'pretrain.local: expected name = "sgd", "adam" or "adamw", and absent = "keep"',
                key="pretrain.local",
            )
        after = list(spec.milestones)
        if after != sorted(set(after)) or any(not 0 < e < spec.local.epochs for e in after):
            raise InputError(
                f"pretrain.milestones = {after}: expected ascending numbers of epochs between 0 and "
                f"{spec.local.epochs}",
                key="pretrain.milestones",
            )
        if spec.vocabulary_size is not None and model.weights != "random":
            raise InputError(
                "pretrain.vocabulary_size: a new vocabulary does not match pretrained weights; set model.weights = "
                '"random"',
                key="pretrain.vocabulary_size",
            )

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch (1, 2, ...)."""
        local = self.spec.local
        return local.learning_rate * self.spec.factor ** sum(epoch > after for after in self.spec.milestones)
