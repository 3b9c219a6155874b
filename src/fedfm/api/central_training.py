"""Central training of a model into a folder: the steps that pretraining and distillation share.

A training that was killed resumes with the same bits: the seed determines an epoch's order of rows, and every epoch
ends with a checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from fedfm import seeds
from fedfm.api.central_spec import CentralTraining
from fedfm.api.model_folder import ModelFolder, claim
from fedfm.data.table import Table, fingerprint
from fedfm.errors import RunError
from fedfm.linalg.threads import torch_threads
from fedfm.models.model import Model
from fedfm.runtime.progress import EpochProgress
from fedfm.training.loop import Flat
from fedfm.training.update_rules import Rule

C = TypeVar("C", bound=CentralTraining[Any])


class CentralWork(Generic[C]):
    """One training and its folder.

    Attributes:
        kind: class of the training's tables.
        about: the JSON file that records how the model was made.
        temporary: folders that are removed when the model is finished.
    """

    kind: type[C]
    about: str
    temporary: tuple[str, ...]

    def __init__(self, place: ModelFolder, what: C, watcher: EpochProgress) -> None:
        self.place, self.what, self.folder, self.state = place, what, place.folder, place.state
        self.watcher, self.began = watcher, time.perf_counter()

    @classmethod
    def make(
        cls, what: str | Path | Mapping[str, Any] | C, out: str | Path, watcher: EpochProgress | None
    ) -> dict[str, Any]:
        """Train in the folder ``out``, from the newest undamaged checkpoint to the end, and return the result.

        If the training is finished already, only its result is returned.

        Args:
            what: a TOML file, nested tables, or the settings read from them.

        Raises:
            InputError: tables, data or model are invalid, or the folder contains something else.
            RunError: the loss is NaN or infinite.
        """
        tables: C
        if isinstance(what, str | Path):
            tables = cls.kind.load(what)
        else:
            tables = cls.kind.from_dict(what) if isinstance(what, Mapping) else what
        watcher = watcher or EpochProgress()
        own = (cls.about, *cls.temporary, "export")
        with claim(Path(out), cls.about, cls.kind.noun, tables.to_dict(), tables.spec.threads, own) as place:
            try:
                if place.state["result"] is not None:
                    return dict(place.state["result"])
                with torch_threads(place.state["threads"]):  # only one model trains, so it uses all cores
                    return cls(place, tables, watcher).run()
            finally:
                watcher.finished()

    def run(self) -> dict[str, Any]:
        """Train to the end, write the model's files, and return the result."""
        raise NotImplementedError

    def same(self, table: Table, model: Model) -> None:
        """Refuse to resume with other rows or another model."""
        self.place.same("data", fingerprint(table))
        self.place.same("model", model.fingerprint)

    def restore(self, model: Model, rule: Rule) -> int:
        """Go back to the last finished epoch; returns the number of finished epochs.

        The duration of the training includes the seconds that these epochs took.
        """
        done = self.place.restore(model, rule)
        self.began -= self.state["history"][-1]["seconds"] if done else 0.0
        return done

    def epoch(
        self, epoch: int, n: int, batch_size: int, model: Model, flat: Flat, rule: Rule,
        loss: Callable[[Any, int], Any], cure: str,
    ) -> float:  # fmt: skip
        """Train one epoch of n rows; returns the mean loss.

        Args:
            loss: computes the loss of the rows with these indices, in this step of the epoch; the function may set
                the learning rate of ``rule``.
            cure: what the user should change if the loss is NaN or infinite.

        Raises:
            RunError: the loss is NaN or infinite.
        """
        order, total = seeds.generator(self.what.spec.seed, self.what.section, epoch).permutation(n), 0.0
        model.train_mode()
        for step, start in enumerate(range(0, n, batch_size)):
            index = order[start : start + batch_size]
            found = loss(index, step)
            found.backward()
            rule.step(flat.p, flat.g)
            flat.g.zero_()
            total += float(found.detach()) * len(index)
            self.watcher.step()
        model.eval_mode()
        if not math.isfinite(total):
            raise RunError(f"epoch {epoch}: the loss is NaN or infinite; {cure}")
        return total / n

    def commit(self, line: dict[str, Any], model: Model, rule: Rule) -> None:
        """Store an epoch's state and its line of metrics, with the seconds since the training began."""
        line["seconds"] = round(time.perf_counter() - self.began, 3)
        self.state["history"].append(line)
        self.place.commit(line["epoch"], model, rule)
        self.watcher.epoch(line)

    def close(self, result: dict[str, Any]) -> dict[str, Any]:
        """Move the model's files to their place, and write the result."""
        return self.place.close(result, (*self.temporary, "export"))
