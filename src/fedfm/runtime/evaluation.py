"""Evaluate a run's models: send messages to clients, and compute metrics from the replies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fedfm.core.capabilities import Judge, Personal, has
from fedfm.core.checks import conform
from fedfm.core.client import Client, ClientId, each, on_client
from fedfm.core.federation import Federation
from fedfm.core.messages import SCORES, Excluded
from fedfm.core.method import Method
from fedfm.core.metric_names import GLOBAL_ACCURACY, LOCAL_ACCURACY, LOSS, MACRO_F1, METRICS, PERPLEXITY
from fedfm.core.rows import Rows
from fedfm.errors import E_EXCEPTION, E_FIELD, E_REFUSED, ClientFault
from fedfm.linalg.params import Params
from fedfm.models import metrics
from fedfm.runtime.judge import CLASS_COUNTS, CONFUSION
from fedfm.runtime.predictions import PARTS, check_own, keeps_parts, own, personal, scores, seen_by
from fedfm.runtime.run_directory import Run
from fedfm.runtime.who_scores import judged_by_clients, may_reveal, why_unasked

if TYPE_CHECKING:
    from fedfm.models.model_task import ModelTask
    from fedfm.runtime.async_scores import Newest

T = TypeVar("T")
UNSCORED = "the client could not score the received model (see its errors.log), or no rows can have its scores"


class Evaluation:
    """Client half of the evaluation. A silo's policy may refuse each of these messages."""

    def __init__(self, method: Method[Any]) -> None:
        self.method = method

    @on_client(kind="scores")
    def evaluate(
        self, client: Client, w: Params, part: str, chosen: dict[str, dict[str, float]] | None = None
    ) -> dict[str, Any]:
        """Score the client's own model on its own ``test`` or ``val`` rows (see ``models.metrics.evaluate``).

        Args:
            chosen: values that the server chose for the task's keys from validation scores; by key, then by class.
        """
        client = _with_chosen(seen_by(self.method, client), chosen)
        return scores(self.method, client.model, own(self.method, client, w), _rows(client, part))

    @on_client(kind="scores")
    def evaluate_start(
        self, client: Client, w: Params, part: str, chosen: dict[str, dict[str, float]] | None = None
    ) -> dict[str, Any]:
        """Score the model from which the client's last local training started, in the same way as :meth:`evaluate`."""
        method: object = self.method
        if not has(method, Personal, "start_models"):
            raise ClientFault(
                E_REFUSED, "this method's clients score one model; their local training starts from that same model"
            )
        start = method.start_of(client, w)
        return scores(self.method, _with_chosen(client, chosen).model, start, _rows(client, part))

    @on_client(kind="reveal")
    def reveal(self, client: Client, w: Params) -> Params:
        """Return the client's own model, for the run directory."""
        return own(self.method, client, w)


SCORE_HANDLER = f"scores.{Evaluation.__name__}_{Evaluation.evaluate.__name__}"  # asks for scores


def _with_chosen(client: Client, chosen: Mapping[str, Mapping[str, float]] | None) -> Client:
    """Set the task's keys to the values in this request, so that no answer depends on an earlier request."""
    model = client.model
    model.task = model.task.of(model.spec).with_chosen(chosen or {}, model.classes)
    return client


def check_scores(found: Mapping[str, Any], task: ModelTask, classes: Sequence[str]) -> None:
    """Check that the common scores of a client, and the scores and sums of the task, can be averaged.

    Raises:
        ClientFault: with E_FIELD if a value is not a number, or if no rows can have it; with E_NONFINITE if a score is
            NaN or infinite.
    """
    if conform(found.get("n"), float, "n") < 0:
        raise ClientFault(E_FIELD, f"n is {found['n']}: expected a number of rows")
    kinds: dict[str, Any] = {**dict.fromkeys(task.lists, list[float | None]), METRICS: dict[str, float | None]}
    for key in ("accuracy", "loss", *task.figures, *task.sums):
        conform(found.get(key), kinds.get(key, float) | None, key)
    task.check_scores(found, classes)


def _rows(client: Client, part: str) -> Rows:
    if part not in PARTS:
        raise ClientFault(E_REFUSED, f"there are scores on {' and '.join(PARTS)} rows only")
    return client.data.test if part == "test" else client.data.val


class Evaluator:
    """Server half of the evaluation: computes one line of metrics from the clients' scores and the global test rows.

    Args:
        judge: computes metrics of a model on the global test rows (see ``models.metrics.evaluate``); None if the server
            has no test rows.

    Attributes:
        missing: clients from which the server did not get scores or their own model, each with the reason.
        chosen: values that were chosen for the task's keys from validation scores; by key, then by class.
    """

    def __init__(self, run: Run, fed: Federation, judge: Judge | None) -> None:
        self.missing: list[Excluded] = []
        self.chosen: dict[str, dict[str, float]] = {}
        self._method: Method[Any] = run.experiment.method
        self._run, self._fed, self.judge = run, fed, None if self._method.traits.figures_only else judge
        self._clients = Evaluation(self._method)
        late = run.experiment.run.asynchronous
        every = run.experiment.run.evaluate_every
        self._newest: Newest | None = None
        if late is not None and fed.streams:
            from fedfm.runtime.async_scores import Newest

            self._newest = Newest(fed, every, late.buffer)
        self._by_updates = False  # whether scores come with the updates, so that no client is asked for them
        self._revealed: tuple[Any, dict[ClientId, Params]] | None = None

    @functools.cached_property
    def panel(self) -> Sequence[ClientId]:
        """The clients that are asked for scores; with ``run.evaluate_fraction`` a share, the same in all rounds."""
        fraction = self._run.experiment.run.evaluate_fraction
        return self._fed.clients if fraction == 1 else self._fed.draw(fraction, "evaluation")

    def models(self, state: Any, of: Sequence[ClientId] | None = None) -> dict[ClientId, Params]:
        """Return the final models that the server knows: for a personal method one per client, else one under "".

        Args:
            of: the clients whose models are wanted; None for all.
        """
        if personal(self._method):
            return {c: self._method.params_for(state, c) for c in (self._fed.clients if of is None else of)}
        return {"": self._method.params_for(state, "")}

    def collect_models(self, state: Any) -> dict[ClientId, Params]:
        """Return the final models with the parts that only clients keep; a client that refuses is absent.

        No client is asked for its parts if the server may see only sums, or releases in the ledger.
        """
        models = self.models(state)
        if not keeps_parts(self._method):
            return {} if self._method.traits.figures_only else models
        if not may_reveal(self._run.experiment):
            return {}
        if self._revealed is None or self._revealed[0] is not state:
            check = partial(check_own, self._method, model=self._fed.model)
            self._revealed = state, self._aside(self._clients.reveal, check=check, w=each(models))
        return self._revealed[1]

    def hear(self) -> None:
        """Store the scores that came with a round's updates; call it before the round is committed."""
        if self._newest is not None:
            for client in self._newest.hear():
                self._set_aside(partial(self._fed.exclude, client, E_EXCEPTION, UNSCORED, SCORES))

    def scores(self, state: Any, thorough: bool) -> dict[str, Any]:
        """Return metrics of a state: scores on the clients' own test rows, and on the server's global test rows.

        Between the asynchronous rounds of a deployment, clients are not asked for scores. A client's metrics are then
        the last that it reported; they belong to the model after round ``client_scored_round``.

        Args:
            thorough: whether to compute the costly metrics, too; only the last round has them.
        """
        models = self.models(state, self.panel)
        self._by_updates = self._newest is not None and not thorough and self._fed.round > 0
        by_client = {client: models.get(client) or models[""] for client in self.panel}
        chooses = self._validates and bool(self._task.needs_validation)
        validated = self._choose(by_client) if chooses else {}
        tested = self._own(by_client, "test")
        own = {c: m.get("accuracy") for c, m in tested.items()}
        local, loss = _mean("accuracy", tested.values()), _mean("loss", tested.values())
        line: dict[str, Any] = {"client_accuracy": own, LOCAL_ACCURACY: local, "local_loss": loss}
        if self._newest is not None and self._by_updates:
            line["client_scored_round"] = self._newest.rounds()
        if local is None and loss is not None:  # a client of a language model has no metric but the loss
            line["client_loss"] = {c: m.get("loss") for c, m in tested.items()}
        pooled = self._pooled_scores(tested.values())
        own_figures = [key for key in self._task.figures if any(key in m for m in tested.values())]
        common = self._task.common_figures if any(tested.values()) else ()
        line |= {f"local_{key}": pooled.get(key) for key in (*common, *own_figures)}
        if METRICS in own_figures:
            line[f"client_{METRICS}"] = {c: m[METRICS] for c, m in tested.items() if METRICS in m}
        if self._validates:
            validated = validated or self._validation_scores(by_client)
            line["val_loss"] = self._pooled_scores(validated.values())["loss"]
            if self._run.experiment.run.patience:  # two rounds are compared over the clients that are in both
                line["client_val_loss"] = {c: m["loss"] for c, m in validated.items()}
                line["client_val_rows"] = {c: m["n"] for c, m in validated.items()}
        if judged_by_clients(self._run.experiment):
            line |= {GLOBAL_ACCURACY: pooled["accuracy"], **{key: pooled[key] for key in (LOSS, PERPLEXITY, MACRO_F1)}}
            line |= {key: value for key, value in pooled.items() if key in self._task.figures}
        elif self.judge is not None and (thorough or not personal(self._method)):
            known = models
            if keeps_parts(self._method):  # as the clients received them
                known = {c: w for c, w in self.collect_models(state).items() if c in by_client}
            by_model = {client: self.judge(w, by_class=thorough) for client, w in known.items()}
            judged = list(by_model.values())
            line[GLOBAL_ACCURACY] = _mean("accuracy", judged)
            line |= {key: _mean(key, judged) for key in ("loss", "balanced_accuracy", "macro_f1", "perplexity")}
            of_some = ("attack_success", *self._task.figures, *metrics.BASE_AND_NEW)
            line |= {key: _mean(key, judged) for key in of_some if any(key in m for m in judged)}
            if thorough and judged and all(CONFUSION in m for m in judged):
                line[CONFUSION] = np.sum([m[CONFUSION] for m in judged], axis=0).tolist()
            if thorough and judged and all(CLASS_COUNTS in m for m in judged):
                from fedfm.models import class_counts

                line[CLASS_COUNTS] = class_counts.summary([m[CLASS_COUNTS] for m in judged])
            if personal(self._method) and self._fed.model.task.trained_classes is not None:
                line["client_base_and_new"] = {c: {k: m[k] for k in metrics.BASE_AND_NEW} for c, m in by_model.items()}
        if thorough and has(self._method, Personal, "start_models"):
            found = self._own(self._method.start_models(state), "test", self._clients.evaluate_start)
            line["server_accuracy"] = _mean("accuracy", found.values())
            line["server_client_accuracy"] = {c: m.get("accuracy") for c, m in found.items()}
            line["server_loss"] = _mean("loss", found.values())
            if "client_loss" in line:
                line["server_client_loss"] = {c: m.get("loss") for c, m in found.items()}
        line["accuracy"] = local if personal(self._method) else line.get(GLOBAL_ACCURACY, local)
        return line | ({"chosen": self.chosen} if self.chosen else {})

    @property
    def _task(self) -> ModelTask:
        """The task with the values of its keys in the experiment."""
        return self._fed.model.task.of(self._fed.model.spec)

    def _choose(self, models: Mapping[ClientId, Params]) -> dict[ClientId, dict[str, Any]]:
        """Let the task choose values of its keys by the scores on all clients' validation rows together.

        Returns:
            These scores by client.
        """
        validated, model = self._validation_scores(models), self._fed.model
        self.chosen = dict(self._task.choose(self._pooled_scores(validated.values()), model.classes)) or self.chosen
        if self.chosen:
            model.task = replace(self._task, **self.chosen)
        return validated

    def _validation_scores(self, models: Mapping[ClientId, Params]) -> dict[ClientId, dict[str, Any]]:
        """Return each client's scores on its validation rows; a client without such rows is absent."""
        return {c: m for c, m in self._own(models, "val").items() if m.get("loss") is not None}

    def _pooled_scores(self, scores: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return scores on all clients' rows together, without clients that reported no scores."""
        return self._fed.model.task.join_scores([m for m in scores if m])

    @property
    def _validates(self) -> bool:
        """Whether clients have validation rows and may be asked for scores on them."""
        if self._run.experiment.privacy is not None:
            return False
        split = self._run.manifest["split"]
        if split is None:  # silos with their own files: the server does not know their numbers of rows
            return self._run.experiment.data.val_fraction > 0
        if "sums" in split:
            return bool(split["sums"]["val"]["rows"])
        return any(counts["val"]["rows"] for counts in split["clients"].values())

    def _own(
        self, models: Mapping[ClientId, Params], part: str, handler: Callable[..., Any] | None = None
    ) -> dict[ClientId, dict[str, Any]]:
        """Return metrics of each client's model on its own rows; {} for a client that gave none or was not asked."""
        if why_unasked(self._run.experiment):
            return {client: {} for client in self.panel}
        if self._newest is not None and self._by_updates:
            return self._newest.of(part)
        first = next(iter(models.values()))
        payload: Any = first if all(w is first for w in models.values()) else each(models)
        more = {"chosen": self.chosen} if self.chosen and part == "test" else {}
        check = partial(check_scores, task=self._task, classes=self._fed.model.classes)
        half = handler or self._clients.evaluate
        replies = self._aside(half, of=self.panel, check=check, w=payload, part=part, **more)
        if self._newest is not None and self._fed.round == 0:
            self._newest.begin(part, replies)
        return {client: replies.get(client, {}) for client in self.panel}

    def _aside(self, handler: Callable[..., Any], **payload: Any) -> dict[ClientId, Any]:
        """Send clients a request that is not part of the method, e.g. for scores.

        These messages are not counted. A client that fails here has no scores, but stays in the round.
        """
        return self._set_aside(lambda: self._fed.ask(handler, counted=False, least=0, **payload))

    def _set_aside(self, call: Callable[[], T]) -> T:
        """Make a call to clients; clients that fail are listed in ``missing``, not among the round's exclusions."""
        excluded, cohort = list(self._fed.excluded), self._fed.cohort
        found = call()
        self.missing += self._fed.excluded[len(excluded) :]
        self._fed.excluded, self._fed.cohort = excluded, cohort
        return found


def _mean(key: str, scores: Iterable[Mapping[str, Any]]) -> Any:
    """The mean of the known scores; lists are averaged entry by entry. None if no score is known."""
    known = [m[key] for m in scores if m.get(key) is not None]
    if known and isinstance(known[0], list):
        return [_mean("", [{"": entry} for entry in entries]) for entries in zip(*known, strict=True)]
    if known and isinstance(known[0], dict):
        return {name: _mean(name, known) for name in dict.fromkeys(name for m in known for name in m)}
    return sum(known) / len(known) if known else None
