"""A client host answers Flower messages for its clients. It has their rows, their model and their memory.

It stays alive between messages: in a Ray actor of the simulation, or in a client's worker process.
"""

from __future__ import annotations

import contextlib
import json
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fedfm.config.experiment import Experiment
from fedfm.core import storage
from fedfm.core.checks import conform
from fedfm.core.client import ClientId
from fedfm.core.messages import Request
from fedfm.core.toml_text import check_depth
from fedfm.core.wire import codec, flower_records, payload
from fedfm.engines.flower import client_stub
from fedfm.engines.flower.recovery import last_reply
from fedfm.engines.flower.recovery.parameter_cache import NAMES, ParameterCache, refuse_references
from fedfm.errors import (
    E_EXCEPTION,
    E_EXPERIMENT,
    E_FIELD,
    E_FORMAT,
    E_REFUSED,
    SENTENCES,
    ClientFault,
    InputError,
    first_line,
    lines_of,
)
from fedfm.linalg.params import Params
from fedfm.privacy.exposure import HELLO, WORDS
from fedfm.runtime import row_sums
from fedfm.runtime.client import Silos
from fedfm.runtime.client_memory import CALLS, ROUNDS
from fedfm.runtime.evaluation import SCORE_HANDLER
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.population import populate, record_error
from fedfm.runtime.predictions import keeps_parts
from fedfm.runtime.site_policy import Question, SitePolicy, method_names, session
from fedfm.runtime.who_scores import may_reveal, why_unasked
from fedfm.version import __version__

_MISFIT = "the silo does not take part in this experiment; its log says why"


class ClientHost:
    """Answers messages for the clients of one experiment.

    Args:
        experiment: reads the server's experiment on first use, so that an invalid one becomes a fault in a reply.
        memory: folder of the clients' memories.
        population: loads rows and model, given the experiment and, at a silo, the server's class names.
        on_error: receives tracebacks; they are never sent.
        own: the silo's policy if the silo has its own rows; None if its rows are a part of the server's table.
        answers: file for the last reply to a training request, in buffered asynchronous rounds; None: none is stored.
    """

    def __init__(
        self,
        experiment: Callable[[], Experiment],
        memory: Path,
        population: Callable[[Experiment, Sequence[str]], Partitioned],
        *,
        on_error: Callable[[ClientId, str], None] = lambda client, text: None,
        own: SitePolicy | None = None,
        answers: Path | None = None,
    ) -> None:
        self._answers = None if answers is None else last_reply.LastAnswer(answers)
        self._read, self._memory, self._populate = experiment, memory, population
        self._on_error, self._own = on_error, own
        self._round = 0  # round of the latest message
        self._cache: ParameterCache | None = None  # None until a hello asks for a cache

    @property
    def may_end(self) -> bool:
        """Whether the host may free its accelerator, since no round follows. A later message loads the model again."""
        model = self.__dict__["silos"].population.client_model if "silos" in self.__dict__ else None
        several = getattr(model, "group", None) is not None  # processes, which may each have a GPU
        elsewhere = model is not None and (several or model.device.type != "cpu")
        return elsewhere and self._round >= self.experiment.method.rounds

    @cached_property
    def experiment(self) -> Experiment:
        return self._read()

    @cached_property
    def silos(self) -> Silos:
        """The clients. Rows and model are loaded on first use.

        Raises:
            ClientFault: the silo has not agreed to this run.
        """
        if self._own is not None and self._own.classes is None:
            raise ClientFault(E_REFUSED, "this silo has not accepted a hello of this run")
        if self._own is None:
            return self._silos(())
        try:
            with self._own.rereading():
                return self._silos(self._own.classes or ())
        except InputError:
            raise ClientFault(E_EXPERIMENT, _MISFIT) from None

    def _silos(self, classes: Sequence[str]) -> Silos:
        population = self._populate(self.experiment, classes)
        waits = self._own is not None and row_sums.missing_keys(self.experiment) is not None
        return (row_sums.WaitingSilos if waits else Silos)(
            self.experiment.method,
            self.experiment.aggregation,
            population,
            memory=self._memory,
            seed=self.experiment.run.seed,
            attack=population.attackers,
            allow=self._allowed_words,
            on_error=self._on_error,
            reveal=self._own is None and self.experiment.privacy is None and not self._hides,
            local_scores=self.experiment.run.local_scores,
            scores_sent=self._scores_sent,
            transport=self.experiment.run.transport,
            own=None if self._own is None else self._own.of_client,
        )

    @property
    def _hides(self) -> bool:
        """Whether the server sees only sums of updates."""
        return self.experiment.aggregation.transport.form != "plain"

    @property
    def _scores_sent(self) -> int:
        """A client adds scores of the received model to one update in so many rounds; 0: the server requests scores."""
        late = self._answers is not None and self.experiment.run.asynchronous is not None
        return self.experiment.run.evaluate_every if late else 0

    @property
    def _allowed_words(self) -> list[str]:
        """The words that the silo's policy allows, without those that the experiment promises not to use.

        Such a promise is a part of a method's or of [privacy]'s guarantee, so no server may break it.
        """
        allowed = WORDS if self._own is None else self._own.policy.of(*method_names(self.experiment))
        unused = {"scores": bool(why_unasked(self.experiment)), "reveal": not may_reveal(self.experiment)}
        return [word for word in allowed if not unused.get(word)]

    def warm(self, shared: ClientHost | None = None) -> None:
        """Load rows and model before the first message if possible, or use those of ``shared``.

        An error is reported in the reply to the server's hello.
        """
        if self._own is None or self._own.classes is not None:
            with contextlib.suppress(Exception):
                if shared is not None and "silos" in shared.__dict__:
                    population = shared.silos.population
                    self._populate = lambda experiment, classes: population  # type: ignore[return-value,assignment]
                _ = self.silos

    def client(self, partition: int) -> ClientId:
        """The client with this number, counted in order of names."""
        names = self.silos.population.clients
        if not 0 <= partition < len(names):
            raise InputError(f"partition-id {partition}: the experiment has clients 0 to {len(names) - 1}")
        return names[partition]

    def answer(self, client: ClientId | int, handler: str, head: str, data: bytes) -> tuple[str, bytes]:
        """Answer one message. Message and reply are given as head and data. An error becomes a reply with a fault."""
        round = call = 0
        name = str(client)
        unsettled: Question | None = None  # the ledger counts it even if the answer fails, because rows were read
        try:
            known: Silos | None = self.__dict__.get("silos")  # None if they are not loaded
            message = payload.decode(head, data, None, most=None if known is None else known.room)
            if not isinstance(message, Mapping) or message.keys() != {"round", "call", "body"}:
                raise ClientFault(E_FORMAT, "the request is not an envelope")
            round, call = (_check_number(message[key], key, most) for key, most in (("round", ROUNDS), ("call", CALLS)))
            self._round = round
            name = self._name(client)
            if self._own is not None and self._own.reload():
                self.__dict__.pop("silos", None)
            answers, asked = self._keeping(handler), last_reply.referenced_name(message["body"])
            sent = asked or ("" if answers is None else last_reply.name_of(handler, head, data))
            given = None if answers is None else answers.find(sent)
            question, blank = Question(handler, (round, call), ""), ""
            if given is not None:
                self.silos.permit(handler)
                question, head, data = replace(question, asked=given[0]), *given[1:]
            elif asked is not None:
                raise last_reply.missing()
            elif handler == HELLO:
                head, data = _halves(codec.envelope(round, call, self._hello(name, message["body"])))
            else:
                body = self._payload(handler, message["body"])
                if self._own is not None:
                    timeless = handler == SCORE_HANDLER and not keeps_parts(self.experiment.method)
                    question = Question.of(handler, (round, call), body, timeless=timeless)
                    self._own.admit(question, self.experiment)
                    unsettled = question
                value = self._value(name, handler, body, (round, call))
                head, data = _halves(codec.envelope(round, call, value))
                blank = self.silos.blanks.get(name, "")
                if answers is not None:
                    answers.keep(sent, question.asked, head, data)
            if self._own is not None:
                self._own.leaves(question, (head, data), self.experiment, blank)
            return self._with_cached_names(head), data
        except ClientFault as bad:
            fault = bad
        except (Exception, SystemExit) as error:
            self._on_error(name, "".join(traceback.format_exception(error)))
            # The error's text may contain a silo's own paths and values, so the server does not receive it.
            text = SENTENCES[E_EXCEPTION] if self._own else f"{type(error).__name__}: {first_line(error)}"
            if self._own is not None and storage.is_write_failure(error):
                text = client_stub.DISK
            fault = ClientFault(E_EXCEPTION, text)
        if self._own is not None:
            if unsettled is not None:
                fault = self._own.refuses(unsettled, fault, self.experiment)
            self._own.log_refusal(handler, fault)
        why = {"code": fault.code, "reason": fault.reason[:400]}
        head, data = _halves({"round": round, "call": call, "fault": why})
        return self._with_cached_names(head), data

    def _payload(self, handler: str, body: Any) -> Any:
        """The payload of a message, if the silo's policy permits the message."""
        body = (refuse_references if self._cache is None else self._cache.resolve)(body)
        body = self.silos.conform(handler, body)
        self.silos.permit(handler)
        return body

    def _value(self, name: ClientId, handler: str, body: Any, at: tuple[int, int]) -> Any:
        """Run the client half of a handler and return its value."""
        (value,) = self.silos.answer([Request(name, handler, body, *at)])
        if isinstance(value, ClientFault):
            raise value
        return value

    def _keeping(self, handler: str) -> last_reply.LastAnswer | None:
        """Where to store the reply to this request; None unless a server may fetch it again (in asynchronous rounds).

        Raises:
            ClientFault: the silo has not agreed to this run.
        """
        if self._answers is None or not handler.startswith("train."):
            return None
        _ = self.silos  # first, so that a silo that has not agreed answers with this reason
        return self._answers if self.experiment.run.asynchronous is not None else None

    def _with_cached_names(self, head: str) -> str:
        """The head of a reply, extended by the hashes of the cached parameters."""
        return head if self._cache is None else codec.with_texts(head, {NAMES: self._cache.names})

    def _name(self, client: ClientId | int) -> ClientId:
        if self._own is not None:
            return self._own.name
        return self.client(client) if isinstance(client, int) else client

    def _hello(self, name: ClientId, greeting: Any) -> dict[str, Any]:
        """Answer a hello with name, versions and the model's fingerprint. This loads rows and model before round 1."""
        greeting = conform(greeting, dict[str, Any], "hello")
        if self._own is not None:
            self._agree(name, self._own, conform(greeting.get("classes"), list[str], "classes"))
            if row_sums.KEYS in greeting:
                row_sums.accept(self.silos, greeting[row_sums.KEYS])
        if greeting.get(NAMES) is True and self._cache is None:
            self._cache = ParameterCache(self._start)
            self._cache.begin()
        return {
            "name": name,
            "fedfm": __version__,
            "wire": flower_records.WIRE,
            "model": None if (model := self.silos.population.client_model) is None else model.identity,
            "own_data": self._own is not None,
        }

    def _start(self) -> Params | None:
        model = self.silos.population.client_model
        return None if model is None else model.params()

    def _agree(self, name: ClientId, own: SitePolicy, classes: Sequence[str]) -> None:
        """Agree to the run or refuse it. Only the silo's own log contains the reason of a refusal."""
        own.count_hello(classes)
        if own.classes is not None:
            if own.classes != tuple(classes):
                raise ClientFault(E_EXPERIMENT, "the classes differ from those at the beginning of this run")
            return
        try:
            self.__dict__["silos"] = self._silos(classes)
        except Exception as error:
            self._on_error(name, "".join(traceback.format_exception(error)))
            own.misfit(f"{type(error).__name__}: {'; '.join(lines_of(error))}")
            raise ClientFault(E_EXPERIMENT, _MISFIT) from None
        experiment = self.experiment
        own.agree(classes, f"method {experiment.method_name}, model {experiment.model.name}")


def _check_number(value: Any, key: str, most: int) -> int:
    """Check the number of a round or a call; the two numbers identify a version of a client's memory."""
    number: int = conform(value, int, key)
    if not 0 <= number <= most:
        raise ClientFault(E_FIELD, f"{key} {number} is not in [0, {most}]")
    return number


def _halves(value: Any) -> tuple[str, bytes]:
    head, pieces = payload.encode(value)
    return head, b"".join(pieces)


def of_experiment(
    experiment: Callable[[], Experiment],
    memory: Path,
    errors: Path,
    answers: Path | None = None,
    load: Callable[[Experiment], Partitioned] = populate,
) -> ClientHost:
    """A client host whose clients hold parts of the experiment's own table.

    Args:
        errors: folder whose subfolder ``private`` is for tracebacks.
        answers: as in :class:`ClientHost`.
        load: loads rows and model.
    """
    on_error = partial(record_error, errors)
    return ClientHost(experiment, memory, lambda known, classes: load(known), on_error=on_error, answers=answers)


def of_folder(folder: Path) -> tuple[ClientHost, ClientId | int]:
    """The client host that ``folder/site.json`` describes, and its client. The folder also contains the memories.

    Raises:
        InputError: the silo's own file is wrong.
    """
    site_file = json.loads((folder / "site.json").read_text(encoding="utf-8"))

    def experiment(imports: bool) -> Experiment:
        if site_file["silo"]:
            check_depth(site_file["experiment"])
        return Experiment.from_dict(tomllib.loads(site_file["experiment"]), imports=imports)

    (folder / "private").mkdir(mode=0o700, exist_ok=True)
    answers = folder / "private" / last_reply.FILE
    if not site_file["silo"]:
        return of_experiment(partial(experiment, True), folder / "memory", folder, answers), site_file["client"]
    own = session(folder, site_file)
    site = ClientHost(
        partial(experiment, False),
        folder / "memory",
        own.populate,
        on_error=partial(record_error, folder),
        own=own,
        answers=answers,
    )
    return site, own.name
