"""Distil a model into a polynomial student, in a folder that experiments can name.

A distillation that is killed and resumed gives the same bits as one that is not killed. The student's folder can be
loaded only after the distillation has ended. Pretraining (:mod:`fedfm.api.pretrain`) has the same two properties.
``distil.json`` records how the student was made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedfm.api.central_training import CentralWork
from fedfm.api.model_folder import held_out
from fedfm.core import storage
from fedfm.core.libraries import refuse
from fedfm.core.rows import Rows
from fedfm.data.load import load_table
from fedfm.data.table import Table
from fedfm.encrypted.student import conversion, token_grid
from fedfm.encrypted.student.direct_conversion import Fitting, convert
from fedfm.encrypted.student.distil_rows import AT_ONCE, Lessons
from fedfm.encrypted.student.distil_spec import Distillation
from fedfm.encrypted.student.distillation_loss import OUTPUTS, STAGES, STATES, TAME, Distiller, save
from fedfm.encrypted.student.interval_table import finish
from fedfm.encrypted.student.recalibrate import measure_again, widen
from fedfm.encrypted.student.scores import PROBED, Outputs, RowSource, compare, outputs, quick
from fedfm.encrypted.student.text_conversion import PostNormFitting
from fedfm.encrypted.student.text_places import with_places
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import sha256_of
from fedfm.models.adapters.side_texts import text_places
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.quiet import quiet
from fedfm.runtime.progress import EpochProgress
from fedfm.training import Adam
from fedfm.training.loop import flat_of
from fedfm.training.update_rules import Rule

ABOUT = "distil.json"
_TAMED, _START, _WRITTEN = "tamed.safetensors", "start", "written"  # names of files in the checkpoint's folder


@refuse("model.name: a library fails on this model and these rows")
def distil(
    what: str | Path | Mapping[str, Any] | Distillation, out: str | Path, *, watcher: EpochProgress | None = None
) -> dict[str, Any]:
    """Make a model's polynomial student and write its folder. A call with the same settings resumes a killed one.

    Args:
        what: the settings: a TOML file, nested tables, or a :class:`Distillation`.
        out: the student's folder. It may be absent, empty, or from a killed call with the same settings.

    Returns:
        ``folder``, ``epochs``, ``parameters``, ``seconds``, ``params_sha256``; ``blocks``: depth, polynomials and
        violations of each. On held-out rows (the source's val rows, or test rows if it has no val rows):
        ``teacher_accuracy``, ``accuracy``, ``agreement``, ``distance``, ``outside``. If the head is new for these
        classes, one head is fitted to the teacher's frozen features, and another to the student's. If the model is a
        polynomial student already, the result is that of :func:`recalibrate.measure_again`.

    Raises:
        InputError: tables, data or model are invalid, the folder contains something else, or the arguments of a
            function spread too far for a polynomial.
        RunError: the loss is NaN or infinite.
    """
    return _DistilWork.make(what, out, watcher)


class _DistilWork(CentralWork[Distillation]):
    """One distillation and its folder."""

    kind = Distillation
    about = ABOUT
    temporary = ("checkpoint",)

    def run(self) -> dict[str, Any]:
        table = load_table(self.what.data, seed=self.what.spec.seed, task="classification")
        teacher = self._model(table)
        self.same(table, teacher)
        index, held = table.rows("train"), held_out(table)
        if not len(index) or not len(held):
            raise InputError(f"{table.source}: distillation needs training rows and held-out rows")
        spec = self.what.spec
        if conversion.is_polynomial_student(teacher.module):
            return measure_again(self.place, spec, table, teacher, self.watcher)
        if spec.polynomials == "paper" and table.kind == "text":
            raise InputError(
                'distil.polynomials = "paper": its norms divide by the variance, and a text model\'s norms follow its '
                'sums; expected "scaled"',
                key="distil.polynomials",
            )
        student = self._student(table)
        if (spec.views > 1 or spec.drawn) and table.kind != "image":
            name, value = ("views", spec.views) if spec.views > 1 else ("drawn", spec.drawn)
            raise InputError(f"distil.{name} = {value}: {table.source} contains no images", key=f"distil.{name}")
        if spec.direct and not (conversion.pre_norm(student.module) or text_places(student.module)):
            raise InputError("distil.direct = true: expected a ViT, a DeiT, an I-JEPA or a BERT", key="distil.direct")
        distiller = Distiller(teacher, student, spec, new_head=bool(teacher.new), low=spec.bfloat16)
        lessons = Lessons(
            self._temporary,
            table,
            distiller.teacher,
            student,
            index,
            views=spec.views,
            seed=spec.seed,
            low=spec.bfloat16,
            drawn=spec.drawn,
        )
        theirs = outputs(distiller.teacher, teacher.prepare(table, held), len(held))
        judged = student.prepare(table, held)
        if spec.direct:
            self.watcher.started(1, 0, len(distiller.student.functions))
            kind = Fitting if conversion.pre_norm(student.module) else PostNormFitting
            entries = convert(distiller.student, lessons.calibration_batches, self.watcher.step, spec.margin, kind)
            distiller.put(entries)
        else:
            self._train(table, distiller, lessons, judged, theirs)
        return self._finish(distiller, lessons, judged, theirs)

    @property
    def _temporary(self) -> Path:
        return self.place.folder / "checkpoint"

    def _model(self, table: Table, name: str | None = None) -> Model:
        what = self.what.model if name is None else dataclasses.replace(self.what.model, name=name)
        return load_model(what, classes=table.classes, kind=table.kind, seed=self.what.spec.seed, keep_head=True)

    def _student(self, table: Table) -> Model:
        """Make the student from the model, with another number of tokens if the settings or texts require it."""
        spec, folder = self.what.spec, self._temporary / _START
        texts = table.kind == "text"
        if spec.image_size is None and spec.class_token and not texts:
            return self._model(table)
        if not (folder / _WRITTEN).exists():
            teacher = self._model(table)
            made: Any
            if texts:
                made = with_places(teacher.module, self.what.model.max_length)
                tool = teacher.tools.tokenizer
            else:
                made = token_grid.with_tokens(teacher, spec.image_size, spec.class_token)
                tool = token_grid.processor_for(teacher.tools.processor, spec.image_size)
            with quiet():
                made.save_pretrained(str(folder))
                tool.save_pretrained(str(folder))
            (folder / _WRITTEN).touch()
        return self._model(table, str(folder))

    def _train(self, table: Table, distiller: Distiller, lessons: Lessons, judged: Rows, theirs: Outputs) -> None:
        spec, n, student = self.what.spec, len(lessons), distiller.student.model
        distiller.scale_class_tokens(lessons.view(0).batch(np.arange(min(n, AT_ONCE))))
        ends, flat = np.cumsum(spec.epochs), flat_of(student)
        rule, steps = Rule(Adam(), flat.p), -(-n // spec.batch_size)
        done = self.restore(student, rule)
        self.watcher.started(int(ends[-1]), done, steps)
        cure = "lower distil.learning_rates, train longer in the tame stage, and give another --out"
        if done > ends[TAME]:
            self._swap(table, distiller, lessons)
        if done > ends[STATES]:
            self._widen(distiller, lessons, STATES)
        for epoch in range(done + 1, int(ends[-1]) + 1):
            stage = int(np.searchsorted(ends, epoch))
            if epoch == ends[TAME] + 1:
                self._swap(table, distiller, lessons)
            if stage == OUTPUTS and epoch == ends[STATES] + 1:
                self._widen(distiller, lessons, STATES)
            if epoch - 1 in ends:
                rule = Rule(Adam(), flat.p)
            before = epoch - 1 - (int(ends[stage]) - spec.epochs[stage])  # completed epochs of this stage
            loss = partial(self._loss, distiller, lessons.of(epoch), rule, stage, before, steps)
            mean = self.epoch(epoch, n, spec.batch_size, student, flat, rule, loss, cure)
            line: dict[str, Any] = {"epoch": epoch, "stage": STAGES[stage], "learning_rate": rule.eta}
            self.commit(line | {"train_loss": mean} | quick(distiller, theirs, judged), student, rule)
        if not distiller.entries:
            self._swap(table, distiller, lessons)

    def _loss(
        self,
        distiller: Distiller,
        rows: RowSource,
        rule: Rule,
        stage: int,
        before: int,
        steps: int,
        index: np.ndarray,
        step: int,
    ) -> Tensor:
        """Compute the loss on the rows with the indices ``index``.

        Args:
            before: number of completed epochs of the stage.
            steps: number of steps of an epoch.
            step: number of completed steps of this epoch.
        """
        part = (before + step / steps) / self.what.spec.epochs[stage]
        rule.eta = self.what.spec.rate(stage, part)
        return distiller.loss(stage, rows.batch(index), part)

    def _swap(self, table: Table, distiller: Distiller, lessons: Lessons) -> None:
        """Switch to polynomials: choose them now, or read them if a killed process has chosen them already."""
        path, student = self._temporary / _TAMED, distiller.student.model
        if "polynomials" not in self.state:
            entries = distiller.measure(lessons.calibration_batches)
            storage.save(path, student.params())
            self.state["polynomials"] = entries
            self.place.write()
        w = storage.load(path)
        if w is None:
            raise RunError(f"{path} is damaged, so this distillation cannot continue; give another --out")
        tamed = self._student(table)
        tamed.load(w)
        distiller.swap(self.state["polynomials"], tamed)

    def _widen(self, distiller: Distiller, lessons: Lessons, stage: int) -> None:
        """Set the intervals after a stage: measure them now, or read them if a killed process has measured them."""
        spec = self.what.spec
        if not spec.widen or spec.direct:  # a conversion has measured block by block already
            return
        known = self.state.setdefault("widened", {})
        if STAGES[stage] not in known:
            found = widen(distiller.student, distiller.entries, spec.polynomials, lessons.calibration_batches)
            known[STAGES[stage]] = found
            self.place.write()
        distiller.put(known[STAGES[stage]])

    def _finish(self, distiller: Distiller, lessons: Lessons, judged: Rows, theirs: Outputs) -> dict[str, Any]:
        """Write the model's files and the result."""
        student = distiller.student.model
        conversion.centre(student.module)
        self._widen(distiller, lessons, OUTPUTS)
        rows = lessons.view(0)
        logits, features, labels = (x[:PROBED] for x in rows.known)
        figures = compare(distiller, rows, judged, theirs, (logits, features, labels))
        finish(distiller, lessons.calibration_batches, figures["outside"])
        save(student, self.place.half(), new_head=distiller.new_head)
        result = {
            "folder": str(self.place.folder),
            "epochs": sum(self.what.spec.epochs),
            "parameters": sum(p.numel() for p in student.module.parameters()),
            **figures,
            "seconds": round((self.state["history"] or [{"seconds": 0.0}])[-1]["seconds"], 3),
            "params_sha256": sha256_of({"": student.params()}),
        }
        return self.close(result)
