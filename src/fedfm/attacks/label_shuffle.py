"""Label shuffle: attackers train on their own rows with wrong labels, and for more epochs.

Park, Pranav, Moura, Joe-Wong. FedBaF: Federated Learning Aggregation Biased by a Foundation Model. AISTATS 2025.
arXiv:2410.18352: a fraction zeta of the clients shuffles labels and trains lambda times as many epochs; for language
models the epochs are divided by lambda. Data poisoning by wrong labels: Biggio, Nelson, Laskov. Support Vector Machines
Under Adversarial Label Noise. ACML 2011.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fedfm.attacks.attack import Attack
from fedfm.core import tasks
from fedfm.core.fields import setting
from fedfm.data.task_rows import row_task
from fedfm.training import Local

if TYPE_CHECKING:
    from fedfm.data.table import Table


@dataclass(frozen=True)
class LabelShuffle(Attack):
    """Each attacker permutes the labels of its training rows once.

    For a language model it permutes the words of each passage. For instructions it permutes the answers. For
    preferences it swaps the two answers of a row with probability 1/2. Labels of a single class stay unchanged.
    """

    intensity: int = setting(1, "lambda: factor of the attackers' local epochs; divisor for language models", ge=1)

    def poison(self, rows: Table, rng: np.random.Generator, task: str) -> Table:
        return row_task(tasks.owner(rows.kind) or tasks.find(task)).shuffle_targets(rows, rng)

    def local(self, local: Local, task: str) -> Local:
        if self.intensity == 1:
            return local
        epochs = (
            max(local.epochs // self.intensity, 1)
            if tasks.find(task).is_language_model
            else local.epochs * self.intensity
        )
        return replace(local, epochs=epochs)

    @property
    def needs(self) -> str:
        return "epochs" if self.intensity > 1 else ""
