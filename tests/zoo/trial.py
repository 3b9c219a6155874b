"""One trial of the zoo: a family adapted for a task by two clients, predicted, exported, and loaded without fedfm.

Each step either holds, or is refused by an error of fedfm's own. What else happens is a failure: another exception,
a trained tensor that stays as it was and is not named, an export that says something else than ``fedfm predict``.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fedfm
from fedfm.api.predict import load
from fedfm.errors import FedfmError, first_line
from fedfm.models.load import load_model
from zoo import plain
from zoo.families import BOTH, DECODER, ENCODER, PAIR, PICTURES, WITH_PICTURES

HOLDS, REFUSED, FAILS = "holds", "refused", "fails"
ALIKE = 1e-4  # of probabilities, and of losses for each token
STEPS = ("train", "predict", "hf", "peft")
LANGUAGE = ("language_modelling", "instruction", "preference")

ADAPTATIONS: dict[str, dict[str, Any]] = {
    "full": {"adaptation": {"name": "full"}},
    "head": {"adaptation": {"name": "head"}},
    "top_layers": {"adaptation": {"name": "top_layers"}},
    "lora": {"adaptation": {"name": "lora", "rank": 2}},
    "lora all-linear": {"adaptation": {"name": "lora", "rank": 2, "targets": "all-linear"}},
    "ffa_lora": {"adaptation": {"name": "ffa_lora", "rank": 2}},
    "lora nf4": {"adaptation": {"name": "lora", "rank": 2}, "quantization": "nf4"},
    "prompt": {"adaptation": {"name": "prompt", "tokens": 2}},
}
TASKS: dict[str, tuple[str, ...]] = {
    ENCODER: ("classification", "instruction"),
    DECODER: ("classification", *LANGUAGE),
    BOTH: ("classification", "instruction"),
    PICTURES: ("classification",),
    PAIR: ("zero_shot", "classification"),
    WITH_PICTURES: ("classification", *LANGUAGE),
}


def trials(kind: str) -> list[tuple[str, str]]:
    """(task, adaptation) of a kind: all that its rows allow."""
    found = [(task, name) for task in TASKS[kind] for name in ADAPTATIONS]
    return [(task, name) for task, name in found if name != "prompt" or task == "zero_shot"]


class Difference(AssertionError):
    """Two things that should be alike are not."""


@dataclass
class Trial:
    """A trial.

    Attributes:
        kind: of the family.
        folder: its model.
        rows: the folder of files of rows.
        place: an empty folder.
    """

    kind: str
    folder: Path
    task: str
    adaptation: str
    rows: Path
    place: Path

    def run(self) -> dict[str, str]:
        """By step "holds", "refused: ..." with fedfm's own error, or "fails: ..." with another one and its place.

        Steps after one that does not hold are left out, but that each form of export is tried.
        """
        found = {"train": self._step(self._train)}
        if found["train"] == HOLDS:
            found["predict"] = self._step(self._predict)
        if found.get("predict") == HOLDS:
            found |= {to: self._step(lambda to=to: self._export(to)) for to in ("hf", "peft")}
        return found

    def _step(self, act: Callable[[], None]) -> str:
        try:
            act()
        except FedfmError as error:
            return self._short(f"{REFUSED}: {error}")
        except Exception as error:
            own = [frame for frame in traceback.extract_tb(error.__traceback__) if "fedfm" in frame.filename]
            at = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
            kind = "" if isinstance(error, Difference) else f"{type(error).__name__}: "
            return self._short(f"{FAILS}: {kind}{first_line(error)}{at}")
        return HOLDS

    def _short(self, text: str) -> str:
        for path, word in ((self.folder, "MODEL"), (self.place, "RUN"), (self.rows, "ROWS")):
            text = text.replace(str(path), word)
        return text

    @property
    def _sees(self) -> bool:
        return self.kind in (PICTURES, PAIR)

    def _file(self, few: str = "") -> Path:
        return self.rows / (f"pictures{few}.npz" if self._sees else f"{self.task}{few}.jsonl")

    def _train(self) -> None:
        notices = _Notices()
        model = {"name": str(self.folder), "task": self.task, "max_length": 24, **ADAPTATIONS[self.adaptation]}
        if self.task in ("instruction", "preference"):
            model["answer_tokens"] = plain.ANSWER
        local = {"name": "adam", "learning_rate": 0.01, "batch_size": 4, "weight_decay": 0.0}
        fedfm.run(
            {
                "data": {"path": str(self._file()), "partition": {"name": "iid", "clients": 2}},
                "model": model,
                "method": {"name": "fedavg", "rounds": 1, "local": local},
                "run": {"workers": 1, "seed": 3},
            },
            self.place / "run",
            progress=notices,
        )
        run, _, w = load(self.place / "run")
        shape = run.manifest["model"]
        start = load_model(
            run.experiment.model,
            classes=tuple(shape["classes"]),
            kind=shape["kind"],
            task=self.task,
            seed=run.experiment.run.seed,
            feature_dim=shape["feature_dim"],
            head_bias=run.experiment.method.needs.bias,
        ).params()
        still = [name for name, tensor in w.state().items() if tensor.numel() and tensor.equal(start.state()[name])]
        if unnamed := _unnamed(still, [*notices.texts, *run.manifest["notices"]]):
            raise Difference(f"{len(unnamed)} of {len(w.state())} trained tensors did not move, such as {unnamed[0]}")

    def _predict(self) -> None:
        self.predicted = fedfm.predict(self.place / "run", self._file("-few"), progress=fedfm.Progress())
        if self.task == "preference":  # of which predict gives the answers alone
            self.predicted["loss"] = plain.judge_answers(
                load(self.place / "run")[1].module, self.folder, self._file("-few")
            )

    def _export(self, to: str) -> None:
        out = self.place / to
        fedfm.export(self.place / "run", to, out)
        task = self.task
        auto = "AutoModelForCausalLM"
        if task == "classification":
            auto = f"AutoModelFor{'Image' if self._sees else 'Sequence'}Classification"
        elif task == "zero_shot":
            auto = "AutoModel"
        if to == "hf":
            model = plain.load_whole(out, auto)
        else:
            model = plain.load_adapter(out, self.folder, auto, in_bits=self.adaptation.endswith("nf4"))
        file = self._file("-few")
        if task == "zero_shot":
            pad = "max_length" if "siglip" in model.config.model_type else True
            self._compare(plain.compare_with_names(model, out, file, self.predicted["classes"], pad), "probabilities")
        elif task == "classification":
            by = plain.classify_pictures if self._sees else plain.classify_texts
            names = [model.config.id2label[i] for i in range(len(self.predicted["classes"]))]
            if names != self.predicted["classes"]:
                raise Difference(f"the export has the classes {names}, the run {self.predicted['classes']}")
            self._compare(by(model, out, file), "probabilities")
        elif task == "language_modelling":
            self._compare(plain.judge_text(model, out, file), "loss")
        else:
            self._compare(plain.judge_answers(model, out, file), "loss")
            mine = [answer.strip() for answer in self.predicted["answers"]]
            if (theirs := plain.answer(model, out, file)) != mine:
                raise Difference(f"answers of {mine} of fedfm predict are {theirs} of the export")

    def _compare(self, theirs: Any, what: str) -> None:
        gap = float(np.abs(np.asarray(theirs) - np.asarray(self.predicted[what])).max())
        if not gap <= ALIKE:  # also NaN
            raise Difference(f"{what} of fedfm predict and of the export differ by up to {gap:.1e}")


class _Notices(fedfm.Progress):
    """Keeps what a run says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def notice(self, text: str) -> None:
        self.texts.append(text)


def _unnamed(still: list[str], notices: list[str]) -> list[str]:
    """The tensors that did not change and that no notice names: how many of them get no gradient, and which."""
    for text in notices:
        count = re.match(r"\d+", text)
        if "gradient" in text and count and int(count[0]) == len(still) and any(name in text for name in still):
            return []
    return still
