"""The client side of a run: for each request, call the client half of a method (its ``@on_client`` functions).

All engines share this code. The local engine calls :meth:`Silos.answer` directly. A Flower ClientApp also decodes the
message before this call, and encodes the result after it.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, get_type_hints

from fedfm import seeds
from fedfm.aggregation.base import Aggregator
from fedfm.core.checks import conform
from fedfm.core.client import AGGREGATION_MESSAGE, SCALE, Client, ClientData, ClientId, Update, action
from fedfm.core.messages import Request
from fedfm.core.method import Method
from fedfm.core.update_metrics import BEFORE, JUDGED, LOSS_BEFORE
from fedfm.errors import (
    E_EXCEPTION,
    E_FIELD,
    E_LOST,
    E_READONLY,
    E_REFUSED,
    OF_NO_ROW,
    SEE_LOG,
    SENTENCES,
    ClientFault,
    Lost,
    RunError,
    TooFewRows,
    depends_on_rows,
    first_line,
)
from fedfm.linalg.params import Params
from fedfm.linalg.precisions import EXACT
from fedfm.models.model import Model
from fedfm.privacy.exposure import EXPOSES, WORDS
from fedfm.runtime.client_halves import handlers, kinds
from fedfm.runtime.client_memory import DiskMemory, Store, first, secret
from fedfm.runtime.evaluation import Evaluation
from fedfm.runtime.predictions import scores, seen_by
from fedfm.training import scheduler

if TYPE_CHECKING:
    from fedfm.core.transport import Coding
    from fedfm.training.private import Descent


class Population(Protocol):
    """The source of the clients' data: the partition of one experiment, or a silo's own file."""

    @property
    def clients(self) -> Sequence[ClientId]:
        """The clients' names, sorted."""

    @property
    def client_model(self) -> Model | None:
        """The model that clients train; None if clients have no model."""

    def data(self, client: ClientId) -> ClientData:
        """Return the client's rows, ready for the model."""


class Silos:
    """Runs handlers (the functions that answer requests) for the clients of a population.

    Args:
        memory: folder of the clients' memories; each client has a subfolder.
        attack: function that replaces the halves of attacking clients; its arguments are the half, the client and the
            payload (see :class:`fedfm.attacks.attackers.Attackers`). None if all clients are honest.
        allow: the silo's policy, as words of :mod:`fedfm.privacy.policy`; ``("mean",)`` discloses no single reply.
        on_error: receives the traceback if a handler raises; the traceback stays at the client.
        local_scores: whether an update for a mean also contains the accuracy of the client's trained model on the
            client's own test rows. It is measured before aggregation.
        scores_sent: if this is n > 0 and the policy allows scores, an update contains scores of the received model
            once in n rounds (see :mod:`fedfm.runtime.async_scores`).
        reveal: whether the server receives the text of an error in a client half, which may contain paths and values.
            If False, the server receives the error's code and a sentence that does not depend on rows.
        transport: precision of the Params in messages, ``run.transport``.
        own: attributes of each :class:`~fedfm.core.client.Client` that come from a silo's file: ``smallest_cohort``,
            ``identity``, ``roster``, ``log``; None if the clients' rows are parts of the server's table.

    Attributes:
        blanks: the error's code for each client that sent an empty update in the last call of :meth:`answer`.
    """

    def __init__(
        self,
        method: Method[Any],
        aggregator: Aggregator,
        population: Population,
        *,
        memory: Path,
        seed: int = 0,
        attack: Callable[[Callable[..., Any], Client, Mapping[str, Any]], Any] | None = None,
        allow: Collection[str] = WORDS,
        on_error: Callable[[ClientId, str], None] = lambda client, text: None,
        reveal: bool = True,
        local_scores: bool = False,
        scores_sent: int = 0,
        transport: str = EXACT,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        # Make the coding now: it needs the model's parameters before any message changes them.
        self._coding: Coding | None = None
        if transport != EXACT:
            from fedfm.core.transport import Coding

            if (model := population.client_model) is None:
                raise RunError('the clients of this method have no model: expected run.transport = "float32"')
            self._coding = Coding(transport, model)
        self._rebuilt: tuple[Any, Any] = (None, None)  # the last payload in two forms: as received, and decoded
        self.population, self.aggregator, self.attack, self.allow = population, aggregator, attack, tuple(allow)
        self._memory, self._seed, self._on_error = memory, seed, on_error
        self.method, self._reveal, self._local_scores = method, reveal, local_scores
        self._scores_sent, self._scored = scores_sent, dict[ClientId, int]()
        self._own, self.blanks = dict(own or {}), dict[ClientId, str]()
        parts = (method, Evaluation(method), *aggregator.parts)
        self._handlers = {f"{kind}.{action(fn)}": fn for fn in handlers(*parts) for kind in kinds(fn)}
        self._hints = {name: get_type_hints(fn) for name, fn in self._handlers.items()}

    @property
    def width(self) -> int:
        """The largest number of clients that one call of :meth:`answer` can serve."""
        return scheduler.width(self.population.client_model)

    @property
    def least(self) -> int:
        """The smallest number of clients for which one call of :meth:`answer` is faster than one call for each."""
        return scheduler.least(self.population.client_model)

    @functools.cached_property
    def room(self) -> int:
        """The largest size in bytes of a message to or from these clients."""
        from fedfm.core.wire import limits

        return limits.room(getattr(self.population.client_model, "layout", None))

    def prepare(self, requests: Sequence[Request]) -> None:
        """Load the objects that all clients share, before processes are forked."""
        if any(request.handler.startswith(("train.", "aggregate.")) for request in requests[:1]):
            scheduler.prepare(self.population.client_model)

    def answer(self, requests: Sequence[Request]) -> list[Any]:
        """Answer the requests together; each result is a reply's value or a ClientFault."""
        self.blanks.clear()
        if self._coding is not None:
            requests = [request._replace(payload=self._payload(request.payload)) for request in requests]
        calls = [partial(self._answer, request) for request in requests]
        together = len(calls) > 1 and scheduler.trains_in_batches(self.population.client_model)
        results = scheduler.run_chunk(calls, together=together)
        return [
            self.fault(request.client, r) if isinstance(r, BaseException) else r
            for request, r in zip(requests, results, strict=True)
        ]

    def _payload(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the payload with its Params decoded; clients that share a payload get the same object."""
        if self._coding is None:
            return payload
        if self._rebuilt[0] is not payload:
            self._rebuilt = payload, self._coding.rebuild(payload)
        return self._rebuilt[1]  # type: ignore[no-any-return]

    def conform(self, handler: str, payload: Any) -> Any:
        """Check a received payload against the handler's annotations.

        Raises:
            ClientFault: the handler does not take this payload.
        """
        if not isinstance(payload, Mapping) or handler not in self._hints:
            return payload  # answer() reports that the handler is unknown
        if self._coding is not None:
            payload = self._coding.rebuild(payload)
        hints = self._hints[handler]
        if handler.startswith("train."):
            hints = hints | {
                AGGREGATION_MESSAGE: self.aggregator.transport.message_type,
                SCALE: self.aggregator.mechanism.message_type,
            }
        if unknown := payload.keys() - (hints.keys() - {"client", "return"}):
            raise ClientFault(E_FIELD, f"{handler} has no arguments {sorted(unknown)}")
        return {key: conform(value, hints[key], key) for key, value in payload.items()}

    def permit(self, handler: str) -> None:
        """Check a request against the silo's policy.

        Raises:
            ClientFault: with E_REFUSED and the reason.
        """
        kind, _, name = handler.partition(".")
        if (why := self._why_refused(kind, name)) is not None:
            raise ClientFault(E_REFUSED, why)

    def fault(self, client: ClientId, error: BaseException) -> ClientFault:
        """Return the fault that the server receives; the client's error log has all further details."""
        if isinstance(error, ClientFault):
            if self._reveal or error.code in OF_NO_ROW:
                return error
            self._on_error(client, f"{error}\n")
            return ClientFault(error.code, SENTENCES.get(error.code, SEE_LOG))
        self._on_error(client, "".join(traceback.format_exception(error)))
        text = first_line(error)
        if isinstance(error, Lost):
            return ClientFault(E_LOST, text if self._reveal else f"its stored state is damaged or missing: {SEE_LOG}")
        if not self._reveal:
            return ClientFault(E_EXCEPTION, SENTENCES[E_EXCEPTION])
        return ClientFault(E_EXCEPTION, f"{type(error).__name__}: {text}" if text else type(error).__name__)

    def _answer(self, request: Request) -> Any:
        self.permit(request.handler)
        kind, _, name = request.handler.partition(".")
        fn, client = self._handlers[request.handler], self.client(request)
        payload = {key: value for key, value in request.payload.items() if key not in (AGGREGATION_MESSAGE, SCALE)}
        client.aggregation_message, client.scale = request.payload.get(AGGREGATION_MESSAGE), request.payload.get(SCALE)
        alike = {key: payload[key] for key in sorted(payload.keys() - {*fn.varying})}  # type: ignore[attr-defined]
        if client.scale is not None:
            alike[SCALE] = client.scale
        client.broadcast = (request.handler, request.round, alike)
        attack = None if kind == "aggregate" else self.attack  # an attacker follows the protocol of secure aggregation
        half = partial(fn, client, **payload) if attack is None else partial(attack, fn, client, payload)

        def call_half() -> Any:
            versions = _versions(payload)
            reply = half()
            if _versions(payload) != versions:
                raise ClientFault(E_READONLY, f"{name} changed a received tensor, but payloads are read-only")
            return reply

        if kind == "train":
            self.aggregator.transport.ready(client)
            try:
                reply = self._part(client, request, payload, call_half)
            except Exception as error:
                return self._blank(client, error)
        else:
            reply = call_half()
            if kind == "scores":
                self._check_enough(client.model, reply)
                reply = self._for_server(client.model, reply)
        if self._coding is not None:
            reply = self._coding.encode(reply)
        client.memory.commit()  # type: ignore[attr-defined]
        return reply

    def _part(self, client: Client, request: Request, payload: Mapping[str, Any], call_half: Callable[[], Any]) -> Any:
        """Return the client's part of a mean: update and metrics, in the form (e.g. masked) of the aggregation."""
        of_sent = self._of_sent(client, payload) if self._scores_due(request) else {}
        reply = call_half()
        if self._local_scores and isinstance(reply, Update):
            reply = replace(reply, metrics=reply.metrics | self._before_aggregation(client))
        if of_sent and isinstance(reply, Update):
            reply = replace(reply, metrics=reply.metrics | of_sent)
        return self.aggregator.protect(client, reply)

    def _blank(self, client: Client, error: Exception) -> Any:
        """Return an empty part of a sum, which the client sends in place of an error.

        Whether a client half fails may depend on its rows. A server that sees only sums must not learn this. So the
        client sends an empty part, and the silo's log has the error. If all clients' rows are parts of the server's
        table, there are no logs of silos, and the server gets the fault.

        Raises:
            Exception: the error itself, if the server sees single updates or the error does not depend on rows.
        """
        reply = self.aggregator.blank(client) if self._own and depends_on_rows(error) else None
        if reply is None:
            raise error
        code = error.code if isinstance(error, ClientFault) else E_EXCEPTION
        self.blanks[client.id] = code
        text = str(error) if isinstance(error, ClientFault) else "".join(traceback.format_exception(error))
        self._on_error(client.id, f"{text}\n")
        client.log(
            f"it sent an empty part of the sum ({code}), which the server cannot notice; errors.log has the cause"
        )
        return reply

    def _why_refused(self, kind: str, name: str) -> str | None:
        """Return the reason to refuse a request, or None.

        The silo itself looks up what a handler exposes; it does not rely on the server.
        """
        if f"{kind}.{name}" not in self._handlers:
            own = [k for k in EXPOSES if f"{k}.{name}" in self._handlers]
            none = f"{name} is not a handler of this run, or the method lists it in neither means nor asks"
            return f"{name} answers {' and '.join(own)}, not {kind}" if own else none
        if (exposed := EXPOSES.get(kind, kind)) not in self.allow:
            return f'this silo\'s policy does not allow {kind}.{name}: "{exposed}" is not in allow'
        return None

    def _scores_due(self, request: Request) -> bool:
        """Whether the client scores the received model in this round. A restarted process counts from the start."""
        if not self._scores_sent or EXPOSES["scores"] not in self.allow:
            return False
        last = self._scored.get(request.client)
        if last is not None and 0 <= request.round - last < self._scores_sent:
            return False
        self._scored[request.client] = request.round
        return True

    def _of_sent(self, client: Client, payload: Mapping[str, Any]) -> dict[str, float]:
        """Return the scores of the received model. If scoring fails, the update reports that, and training goes on."""
        from fedfm.runtime import async_scores

        try:
            return async_scores.of_sent(self.method, client, payload, partial(self._for_server, client.model))
        except Exception as error:
            self._on_error(client.id, "".join(traceback.format_exception(error)))
            return {async_scores.FAILED: 1.0}

    def _before_aggregation(self, client: Client) -> dict[str, float]:
        """Return accuracy and loss of the client's trained model, and the number 1; empty without test rows.

        The server averages all three over the clients. The mean of the ones is the fraction of clients with test rows.
        """
        if client.trained is None or not len(client.data.test):
            return {}
        seen = seen_by(self.method, client)
        found = self._for_server(seen.model, scores(self.method, seen.model, client.trained, seen.data.test))
        metrics = {BEFORE: found.get("accuracy"), LOSS_BEFORE: found.get("loss")}
        known = {key: value for key, value in metrics.items() if value is not None}
        return known | {JUDGED: 1.0} if known else {}

    def _check_enough(self, model: Model, found: Mapping[str, Any]) -> None:
        """Refuse to report scores on too few rows of the silo's own."""
        if not self._own:
            return
        from fedfm.runtime.coarse_scores import too_few

        if why := too_few(found.get("n"), model.task):
            raise TooFewRows(why)

    def _for_server(self, model: Model, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a model's scores in the form that may leave the silo: rounded, if the rows are the silo's own."""
        if not self._own:
            return found
        from fedfm.runtime.coarse_scores import coarse

        return coarse(found, model.task)

    def client(self, request: Request) -> Client:
        """Make the object for the client at this request: with its rows, memory and seed."""
        plan, data = self.aggregator.mechanism.plan, self.population.data(request.client)
        descent: Descent | None = None
        if plan is not None:
            from fedfm.training import private

            descent, data = private.Descent(plan, data), private.hide_rows(data)
        return Client(
            id=request.client,
            data=data,
            model=cast(Model, self.population.client_model),  # it is None only for methods whose clients use no model
            memory=DiskMemory(self._memory, request.client, (request.round, request.call)),
            seed=seeds.derive(self._seed, "client", request.round, request.client),
            secret=partial(secret, self._memory, request.client),
            write_once=partial(first, self._memory, request.client),
            store=Store(self._memory, request.client),
            **self._own,
            private=descent,
            span=self._span(request.round),
            round=request.round,
            trainer=scheduler.train_client,
        )

    def _span(self, t: int) -> tuple[float, float]:
        """Return begin and end of round t as fractions of the run: (0, 0) before all rounds, (1, 1) after them."""
        total = max(self.method.rounds, 1)
        return min(max(t - 1, 0), total) / total, min(t, total) / total


def _versions(payload: Mapping[str, Any]) -> int:
    """Return a number that grows whenever a tensor of the payload is written to."""
    params = (value for value in payload.values() if isinstance(value, Params))
    return sum(flat._version for value in params for flat in value.flats.values())
