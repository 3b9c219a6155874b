"""Backdoor: the model learns to predict one class for every row with a trigger, and is correct on all other rows.

Gu, Dolan-Gavitt, Garg. BadNets: Identifying Vulnerabilities in the Machine Learning Model Supply Chain. 2017.
arXiv:1708.06733. In federated learning, with a scaled update that outweighs the others: Bagdasaryan, Veit, Hua, Estrin,
Shmatikov. How To Backdoor Federated Learning. AISTATS 2020. arXiv:1807.00459, eq. 3.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfm.attacks.attack import Attack
from fedfm.core import tasks
from fedfm.core.client import Update
from fedfm.core.fields import setting
from fedfm.data.pictures import rgb
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.model import Model

if TYPE_CHECKING:
    from fedfm.data.table import Table


@dataclass(frozen=True)
class Backdoor(Attack):
    """Each attacker puts the trigger on a fraction of its training rows and gives these rows the label ``target``.

    As a trigger, images get a chequered square in the lower right corner, feature vectors get alternating values in
    the first coordinates, and texts get a word at the beginning.
    """

    target: str = setting("", "the class that the attack wants for triggered rows; empty: the first")
    share: float = setting(0.5, "fraction of an attacker's training rows that get the trigger", gt=0, le=1)
    size: int = setting(3, "side of the square in pixels, or number of coordinates", ge=1)
    value: float = setting(
        3.0, "for feature vectors: the coordinates become +value, -value, ...", finite=True, but=(0.0,)
    )
    word: str = setting("cf", "for texts: the word that is the trigger", pattern=r"(.|\s)*\S(.|\s)*", words="a word")
    factor: float = setting(1.0, "factor that multiplies the attackers' updates", finite=True, but=(0.0,))

    def poison(self, rows: Table, rng: np.random.Generator, task: str) -> Table:
        if rows.labels is None:
            raise InputError('attack.name = "backdoor": the rows have no labels', key="attack.name")
        count = math.ceil(self.share * len(rows) - 1e-9)
        chosen = np.sort(rng.permutation(len(rows))[:count])
        marked, labels = self.trigger(rows.take(chosen)).inputs, rows.labels.copy()
        labels[chosen] = self.target_of(rows.classes)
        inputs: Any = rows.inputs.copy() if isinstance(rows.inputs, np.ndarray) else list(rows.inputs)
        for i, item in zip(chosen.tolist(), marked, strict=True):
            inputs[i] = item
        return replace(rows, inputs=inputs, labels=labels)

    def trigger(self, rows: Table) -> Table:
        if rows.kind == "features":
            x = rows.inputs.copy()  # (n, d)
            x[:, : self.size] = self.value * (-1.0) ** np.arange(self.size)
            return replace(rows, inputs=x)
        if rows.kind == "image":
            if isinstance(rows.inputs, np.ndarray):
                return replace(rows, inputs=self._stamp(rows.inputs))
            return replace(rows, inputs=[self._stamped_file(item) for item in rows.inputs])
        return replace(rows, inputs=[f"{self.word} {text}" for text in rows.inputs])

    def _stamp(self, images: np.ndarray) -> np.ndarray:
        """The images (n, H, W, C), uint8, with the square drawn on them."""
        side = min(images.shape[1:3])
        if 2 * self.size > side:
            raise InputError(
                f"attack.size = {self.size}: images are {side} pixels wide; expected at most {side // 2}",
                key="attack.size",
            )
        out = images.copy()
        i = np.arange(self.size)
        out[:, -self.size :, -self.size :] = np.where((i[:, None] + i) % 2, 0, 255)[:, :, None]
        return out

    def _stamped_file(self, item: Any) -> bytes:
        """Draw the square on an image, which is a path or bytes; returns lossless PNG."""
        from PIL import Image

        pixels = self._stamp(np.asarray(rgb(item))[None])[0]
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "PNG")
        return out.getvalue()

    def target_of(self, classes: Sequence[str]) -> int:
        return list(classes).index(self.target) if self.target else 0

    def upload(self, update: Update, w: Params | None) -> Update:
        return update if self.factor == 1 else replace(update, delta=self.factor * update.delta)

    def fits(self, kind: str, task: str, model: Model, classes: Sequence[str]) -> None:
        found = tasks.find(task)
        if found.is_language_model or found.own_targets or not classes:
            raise InputError(
                f'attack.name = "backdoor": task "{task}" does not give each row one class, so there is no target',
                key="attack.name",
            )
        if self.target and self.target not in classes:
            raise InputError(
                f'attack.target = "{self.target}": expected one of {", ".join(map(str, classes[:20]))}',
                key="attack.target",
            )
        if kind == "text":
            tokenizer = model.tools.tokenizer
            ids = tokenizer(self.word, add_special_tokens=False)["input_ids"]
            if not ids or (tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids):
                raise InputError(
                    f'attack.word = "{self.word}": the model\'s tokenizer does not know it; try another',
                    key="attack.word",
                )
        elif kind not in ("image", "features"):
            raise InputError(
                f'attack.name = "backdoor": there is no trigger for data of kind "{kind}"', key="attack.name"
            )

    @property
    def needs(self) -> str:
        return "" if self.factor == 1 else "update"
