"""A model that a group of processes computes; this process has only its names, its tools and its trained values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fedfm.core.rows import Batch, Rows
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import Params
from fedfm.models.load import load_model
from fedfm.models.memory_budget import warn
from fedfm.models.model import Model
from fedfm.models.spec import ModelSpec
from fedfm.tasks._language import LanguageTask
from fedfm.tasks.task import Task
from fedfm.training.local_job import Job
from fedfm.training.sharded import messages
from fedfm.training.sharded.group import GroupFailure, ProcessGroup
from fedfm.training.sharded.settings import GroupSettings, check_model, place_of

if TYPE_CHECKING:
    from fedfm.models.text_metrics import Answer

T = TypeVar("T")
KEPT = 1 << 28  # bytes of rows that each rank keeps for later requests


def load_group_model(spec: ModelSpec, settings: GroupSettings, **about: Any) -> GroupModel:
    """As :func:`fedfm.models.load.load_model`, for a model that the processes of a group share.

    Raises:
        InputError: there is no such model, or it cannot be shared among processes.
    """
    check_model(spec, settings.key)
    return GroupModel(load_model(spec, **about, bare=True), settings, about)


class GroupModel(Model):
    """A model that a group of processes computes.

    Attributes:
        group: the processes.
        ranks_hold: for each rank the bytes of its part of the weights, by how many its memory grew while it read them,
            and its device.
        runs_on: for the manifest, the ranks' devices and their number; None before the ranks have started.

    Args:
        bare: the model without weights.
        settings: the group.
        about: the arguments of :func:`load_group_model`.
    """

    def __init__(self, bare: Model, settings: GroupSettings, about: dict[str, Any]) -> None:
        vars(self).update(vars(bare))
        self._settings, self._about = settings, about
        why = bare.mixes_rows or ("the model has an encoder and a decoder" if self._is_encoder_decoder() else "")
        why = why or ("their texts have images" if bare.task.images_in_texts else "")
        if why:
            raise InputError(f"{settings.key}: {why}, so that rows cannot be shared among processes", key=settings.key)
        if bare.spec.quantization is not None:
            from fedfm.training.sharded import four_bits

            four_bits.check(bare, settings.key)
        vars(self.module)["generate"] = self._refuse
        self.group = ProcessGroup(settings)
        self._built = False
        self._halvings = 0  # how often the number of rows at once was halved because a rank was out of memory
        self._at_once = 1  # rows at once of the last request
        self._w: Params | None = None  # the values that load() was given last
        self._at_ranks: Params | None = None  # the values that the ranks have
        self.runs_on: dict[str, Any] | None = None
        self._kept = dict[str, int]()  # digests of the rows that the ranks have, and their bytes; the oldest first

    def _is_encoder_decoder(self) -> bool:
        return bool(getattr(getattr(self.module, "config", None), "is_encoder_decoder", False))

    # --- weights ------------------------------------------------------------------------------------------------------
    def params(self) -> Params:
        """The values of the trained tensors; those of the files before any others are loaded."""
        if not any(self._is_unread(tensor) for tensor in self._tensors.values()):
            return super().params()
        if self._w is None:
            self._w = Params({name: self._value(tensor) for name, tensor in self._tensors.items()})
        return self._w

    def _is_unread(self, tensor: Tensor) -> bool:
        """Whether a parameter has no memory in this process, since its values are in the files or at the ranks."""
        return self.slices is not None and tensor in self.slices.names

    def _value(self, tensor: Tensor) -> Tensor:
        return (
            self.slices.read(cast("nn.Parameter", tensor))
            if self.slices is not None and self._is_unread(tensor)
            else tensor
        )

    def load(self, w: Params) -> None:
        """Keep these values; the ranks get them when they compute next."""
        if w.layout is not self.layout and w.layout.slots.keys() ^ self.layout.slots.keys():
            raise KeyError(f"parameter names differ: {sorted(w.layout.slots.keys() ^ self.layout.slots.keys())[:6]}")
        w.check_like(self.layout)
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                if not self._is_unread(tensor):
                    tensor.copy_(w[name])
        self._w = w

    # --- computation --------------------------------------------------------------------------------------------------
    @property
    def train_jobs(self) -> Callable[[Sequence[Job]], list[Params]] | None:
        """The trainer; None for a head on features, which this process trains as usual."""
        if self.adaptation == "head" and self.head is not None:
            return None
        return lambda jobs: [self._train(job) for job in jobs]

    def _train(self, job: Job) -> Params:
        client, rows = job.client, job.client.data.train
        client.metrics["loss"] = 0.0
        if not len(rows):
            return job.w
        request = {
            "do": "train",
            "local": messages.of_local(job.local),
            "terms": messages.of_terms(job.terms),
            "seed": str(client.seed),
            "span": list(client.span),
        }

        def work() -> tuple[float, Params]:
            share = job.local.micro_batch or -(-job.local.batch_size // self.group.ranks)
            most = self._fitting(share)
            loss = self._ask(job.w, {**request, "most": most}, rows)[0]["loss"]
            self._at_ranks = None
            trained = self._collect()
            self._at_ranks = trained  # they have these values already
            return loss, trained

        def note(text: str) -> None:
            client.log(text)
            warn(text)

        client.metrics["loss"], trained = self._with_group(work, note)
        self.load(trained)
        return trained if job.terms.only is None else job.w.replace(trained.only(job.terms.only))

    def _collect(self) -> Params:
        self.group.tell({"do": "collect"})
        found = Params({name: self.group.receive_tensor() for name in self.names})
        self.group.answers()
        return found

    def predict(self, rows: Rows, batch_size: int = 64) -> Tensor:
        """Logits of all rows: each rank computes those of its part."""
        if self._has_features(rows) or not len(rows):
            return self.in_batches(rows, batch_size) if len(rows) else super().predict(rows, batch_size)
        if type(self.task).predict is not Task.predict:
            rows = rows.to_padded()
        parts = self._ask_for_parts("predict", rows, "logits", batch_size)
        return torch.cat(parts)

    def evaluate(self, rows: Rows, logits: Tensor | None = None) -> dict[str, Any]:
        """Scores, from the ranks' scores of their parts if these are sums of tokens; else from the logits."""
        if logits is None and self.is_language_model and self.task.sums and len(rows):
            joined: dict[str, Any] = self.task.join_scores(self._ask_for_parts("evaluate", rows, "scores"))
            return joined
        return super().evaluate(rows, self.predict(rows) if logits is None else logits)

    def encode(self, rows: Rows) -> Rows:
        """With adaptation ``head``, the rows' features: each rank computes those of its part, from frozen weights."""
        frozen = self.adaptation == "head" and self.head is not None and "features" not in rows.tensors
        if not len(rows) or not (frozen or self.task.keeps_base):
            return rows
        parts = self._ask_for_parts("encode", rows, "tensors")
        tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if "features" in tensors:
            return Rows(tensors, labels=rows.labels)
        return replace(rows, tensors=tensors)

    def generate(self, rows: Rows) -> list[Answer]:
        """The task's answers to the prompts of these rows."""
        from fedfm.models.text_metrics import Answer

        parts = self._ask_for_parts("generate", rows, "answers") if len(rows) else []
        return [Answer(tuple(ids), text, cut) for part in parts for ids, text, cut in json.loads(part)]

    def count_tokens(self, rows: Rows) -> dict[str, float]:
        """The sums of :func:`fedfm.models.text_metrics.count_tokens` over all rows."""
        parts = self._ask_for_parts("count_tokens", rows, "sums") if len(rows) else []
        return {name: sum(part[name] for part in parts) for name in LanguageTask.sums}

    def outputs(self, batch: Batch) -> Tensor:
        """Raise an error, since this process has no weights, unless only shapes matter."""
        self._refuse()
        return super().outputs(batch)

    def _refuse(self, *_: object, **__: object) -> None:
        if self.hollow:
            raise RunError(
                f"{self._settings.key}: a method or a task asks this process for outputs of the model, of which only "
                "its group has the weights"
            )

    def _has_features(self, rows: Rows) -> bool:
        return "features" in rows.tensors and self.head is not None

    def _ask_for_parts(self, what: str, rows: Rows, of: str, batch_size: int = 64) -> list[Any]:
        """The ranks' results for their parts of the rows, in the order of the rows."""

        def work() -> list[Any]:
            found = self._ask(self._current(), {"do": what, "batch_size": self._fitting(batch_size)}, rows)
            return [answer[of] for answer in found if answer[of] is not None]

        return self._with_group(work, warn)

    def _current(self) -> Params:
        """The trained values, as the same object as long as they stay the same."""
        if self._w is None:
            self._w = self.params()
        return self._w

    # --- the group ----------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Start the group, so that wrong settings are refused before the first round.

        Raises:
            InputError: the group cannot be started here.
        """
        self._with_group(lambda: None, warn)

    def close(self) -> None:
        """End the group."""
        self.group.close()
        self._built, self._at_ranks, self._kept = False, None, {}

    def _ask(self, w: Params, request: dict[str, Any], rows: Rows) -> list[dict[str, Any]]:
        """The ranks' answers to a request about these rows, computed from the trained values ``w``."""
        if self._at_ranks is not w:
            self._at_ranks = None
            self.group.tell({"do": "load"})
            for name in self.names:
                self.group.send_tensor(w[name])
            self.group.answers()
            self._at_ranks = w
        self.group.tell({**request, "rows": self._give(rows)})
        return self.group.answers()

    def _give(self, rows: Rows) -> str:
        """The digest of these rows, which the ranks have then. They keep rows until these exceed :data:`KEPT` bytes."""
        given = messages.encode({"do": "keep", "rows": messages.of_rows(rows)})
        digest = hashlib.sha256(given).hexdigest()
        if digest in self._kept:
            self._kept[digest] = self._kept.pop(digest)  # it is the newest now
            return digest
        while self._kept and sum(self._kept.values()) + len(given) > KEPT:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self.group.tell({"do": "forget", "digest": oldest})
            self.group.answers()
        self.group.tell_encoded(given)
        self.group.answers()
        self._kept[digest] = len(given)
        return digest

    def _with_group(self, work: Callable[[], T], note: Callable[[str], None]) -> T:
        """The result of ``work``. After a failure the group is started again, and the work begins again.

        Raises:
            InputError: the settings do not fit this machine.
            RunError: the group fails a second time, or a rank's memory does not even hold one row.
        """
        failed = False
        while True:
            try:
                if not self._built:
                    self._build()
                return work()
            except GroupFailure as failure:
                self.close()
                if failure.kind == "refused":
                    raise InputError(f"{self._settings.key}: {failure}", key=self._settings.key) from None
                if failure.kind == "memory" and self._at_once > 1:
                    self._halvings += 1
                    note(f"{failure}: the group is started again, with half as many rows at once")
                elif failure.kind in ("ended", "hangs") and not failed:
                    failed = True
                    note(f"{failure}; the group is started again, and the request is repeated")
                else:
                    raise RunError(f"{self._settings.key}: {failure}") from None
            except BaseException:
                self.close()
                raise

    def _build(self) -> None:
        group = self.group
        group.start()
        group.tell(
            {
                "do": "build",
                "spec": messages.of_spec(self.spec),
                "classes": list(self.classes),
                "kind": self._about["kind"],
                "task": self.task.name,
                "seed": str(self._about.get("seed", 0)),
                "head_bias": self._about.get("head_bias", False),
                "fingerprint": self.fingerprint,
                "place": place_of(self.spec.name),
                "deterministic": self._settings.deterministic,
            }
        )
        self.ranks_hold = group.answers()
        devices = [rank["device"] for rank in self.ranks_hold]
        names = " and ".join(dict.fromkeys(device["name"] for device in devices))
        self.runs_on = devices[0] | {"name": f"{names}, {group.ranks} processes", "processes": group.ranks}
        self._built = True

    def _fitting(self, rows: int) -> int:
        """The number of rows at once, after the halvings."""
        self._at_once = max(rows >> self._halvings, 1)
        return self._at_once


def begin(model: Model) -> None:
    """Start the group of a model.

    Raises:
        InputError: the group cannot be started here.
    """
    assert isinstance(model, GroupModel)  # noqa: S101 - for mypy; its loader made it
    model.begin()


@contextmanager
def running(model: Model) -> Iterator[None]:
    """Context manager: the group of a model runs; it is ended at the end.

    Raises:
        InputError: the group cannot be started here.
    """
    assert isinstance(model, GroupModel)  # noqa: S101 - for mypy; its loader made it
    try:
        model.begin()
        yield
    finally:
        model.close()
