"""A silo in one run: the limits that its file sets, its agreement to the run, its log and its ledger."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedfm.config.experiment import Experiment
from fedfm.core import storage
from fedfm.core.wire import codec
from fedfm.core.wire.envelope import envelope_size
from fedfm.engines.flower import client_stub
from fedfm.errors import E_REFUSED, ClientFault, InputError, depends_on_rows, lines_of
from fedfm.privacy.exposure import EXPOSES, HELLO
from fedfm.runtime.own_rows import populate
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.run_manifest import of_silo
from fedfm.runtime.site_policy import Question
from fedfm.sites import consent_rules, identity, sent_sums, silo_config
from fedfm.sites.file_contents import FileContents
from fedfm.sites.ledger import NOTHING, Entry, Ledger, epsilon_alone, now
from fedfm.sites.ledger_mark import mark_of
from fedfm.sites.release_cost import ReleaseCosts
from fedfm.sites.request_log import RUNS, SiloLog
from fedfm.sites.unanswered import Unanswered

_FRAME = '{"m":{"round":"i","call":"i","body":'  # how the head of a reply starts, before the answer; see codec.envelope
_REFUSAL = 1 << 10  # largest number of bytes of a refusal


class SiloSession:
    """A silo in one run.

    Args:
        folder: the run's folder at the silo.
        site_file: content of ``site.json``, which names the silo's file.

    Raises:
        InputError: the silo's file is wrong.

    Attributes:
        name: the silo's name.
        policy: the silo's policy.
        require: the silo's requirements on an experiment.
        log: the silo's log.
        classes: the server's class names; None until the silo has accepted a hello with class names. A restarted
            process reads them from disk.
    """

    def __init__(self, folder: Path, site_file: Mapping[str, Any]) -> None:
        self._path, self._folder, self._site_file = Path(site_file["silo"]), folder, site_file
        self.log = SiloLog(client_stub.silo_folder(folder), self._path)
        self._unanswered = Unanswered(client_stub.silo_folder(folder) / "unanswered")
        self._load()
        self._rows: int | None = None  # number of training rows, once they are read
        self._record: dict[str, Any] | None = None
        classes = site_file.get("classes")
        self.classes: tuple[str, ...] | None = None if classes is None else tuple(classes)

    def _load(self) -> None:
        files = FileContents([self._path])
        self._silo = silo_config.load(self._path)
        files.add(identity.files(self._silo))
        silo_config.admit_methods(self._silo, self._path)
        self.name, self.policy, self.require = self._silo.name, self._silo.policy, self._silo.require
        self._identity = identity.of(self._silo)
        place = Path(self._silo.ledger)
        mark = mark_of(client_stub.silo_folder(self._folder), place)
        self.ledger = Ledger(place, self._silo.budget, mark, self.require)
        self._files = files

    @property
    def of_client(self) -> dict[str, Any]:
        """Attributes of :class:`~fedfm.core.client.Client` from the silo's file."""
        return {
            "smallest_cohort": self.require.smallest_cohort,
            "identity": self._identity.key,
            "roster": self._identity.roster,
            "log": lambda text: self.log.note(f"run {self._folder.parent.name}: {text}"),
        }

    def reload(self) -> bool:
        """Read the silo's file again if this file, the key or the roster changed; return whether one of them did.

        Raises:
            ClientFault: with E_REFUSED if the file is missing or wrong.
        """
        try:
            if not (changed := self._files.find_changes()):
                return False
            self._load()
        except (OSError, InputError) as error:
            for line in lines_of(error):
                self.log.note(f"nothing is answered: {line}")
            raise ClientFault(E_REFUSED, "the silo's file is wrong; its log says why") from None
        self.log.note(f"{', '.join(changed)} changed: {self._path.name} is read again")
        return True

    def populate(self, experiment: Experiment, classes: Sequence[str]) -> Partitioned:
        """Load the silo's rows and model, if the experiment exposes no more than the policy allows.

        Raises:
            InputError: the experiment does not fit the silo.
        """
        consent_rules.check(self._silo, experiment)
        found = populate(self._silo.rows, experiment, classes)
        self._rows = sum(len(rows.train) for rows in found.federated.clients.values())
        own = experiment.own_code or found.federated.table.kind == "own"  # the silo's own code says what is trained
        task = "" if own or found.client_model is None else found.client_model.task.name
        consent_rules.check(self._silo, experiment, self._rows, task)
        self._record = sent_sums.record_of(experiment, found)
        for notice in of_silo(experiment.method, found):
            self.log.note(f"run {self._folder.parent.name}: {notice}")
        return found

    def count_hello(self, classes: Sequence[str]) -> None:
        """Count a hello before it is answered, since the answer discloses whether the silo's rows fit.

        Raises:
            ClientFault: E_REFUSED by the policy, or after too many hellos that did not fit.
        """
        if not self.policy.words:
            raise ClientFault(E_REFUSED, "this silo's policy allows nothing")
        if self.classes is None:
            self.log.asks(self._question(classes))

    def agree(self, classes: Sequence[str], what: str) -> None:
        """Record that the silo takes part in the run from now on; ``what`` describes the run for the log."""
        self.classes = tuple(classes)
        text = json.dumps({**self._site_file, "classes": list(classes)})
        storage.write_atomic(self._folder / "site.json", text.encode(), 0o600)
        self.log.fits(self._question(classes))
        self.log.note(f"takes part in run {self._folder.parent.name}: {what}")

    @contextlib.contextmanager
    def rereading(self) -> Iterator[None]:
        """A context for reading the rows again in a run that the silo agreed to.

        The run counts as a misfit if it no longer fits, or if the process dies.

        Raises:
            ClientFault: with E_REFUSED if too many runs no longer fit.
        """
        question = self._question(self.classes or ())
        self.log.asks(question, RUNS)
        try:
            yield
        except InputError as error:
            for line in lines_of(error):
                self.log.misfit(f"run {self._folder.parent.name} no longer fits: {line}", RUNS)
            raise
        self.log.fits(question, RUNS)

    def misfit(self, reason: str) -> None:
        """Log why the silo does not take part."""
        self.log.misfit(reason)

    def note(self, text: str) -> None:
        """Log a line."""
        self.log.note(text)

    def admit(self, question: Question, experiment: Experiment) -> None:
        """Check before rows are read whether the silo answers.

        Raises:
            ClientFault: with E_REFUSED if the experiment has no such round, the round already had its question, or a
                budget does not allow another answer.
            NotWritten: the disk is full or read-only.
        """
        t, rounds = question.at[0], experiment.method.rounds
        if t > rounds:
            raise ClientFault(E_REFUSED, f"round {t}: the experiment ends after round {rounds}")
        entry = self._entry(question, experiment)
        if entry.cost != NOTHING:
            self._unanswered.settle(self.ledger, entry)
            self.ledger.admit(replace(entry, bytes=_REFUSAL))
            self._unanswered.begin(entry)

    def leaves(self, question: Question, reply: tuple[str, bytes], experiment: Experiment, fault: str = "") -> None:
        """Enter a reply into the silo's ledger, before the reply leaves.

        Args:
            reply: head and data of the reply's message.
            fault: code of the failure, if the reply is an empty part of a masked sum in place of a refusal.

        Raises:
            ClientFault: with E_REFUSED if a budget does not allow the reply, or the ledger cannot be written.
        """
        head, data = reply[0][len(_FRAME) : -2], reply[1][16:]
        entry = replace(
            self._entry(question, experiment),
            bytes=envelope_size(len(head), len(data)),
            sha256=hashlib.sha256(head.encode() + data).hexdigest(),
            fault=fault,
        )
        try:
            self.ledger.enter(entry)
            if question.handler.startswith("train."):
                sent_sums.write(self._folder, self._record, fault)
        except ClientFault as over:
            if question.handler != HELLO:  # this refusal reveals that there was an answer, so it counts as an answer
                with contextlib.suppress(ClientFault):
                    self._enter_refusal(question, over, experiment)
            raise
        finally:
            self._unanswered.end()

    def _entry(self, question: Question, experiment: Experiment) -> Entry:
        """Return the ledger entry of an answer, as far as it is known before the answer is computed."""
        handler = question.handler
        hello, kind = handler == HELLO, handler.partition(".")[0]
        cost = NOTHING if hello else ReleaseCosts(experiment, self._rows).of(handler)
        return Entry(
            time=now(),
            run=self._folder.parent.name,
            experiment=hashlib.sha256(self._site_file["experiment"].encode(errors="surrogatepass")).hexdigest(),
            round=question.at[0],
            call=question.at[1],
            method=experiment.method_name,
            handler=handler,
            exposes="hello" if hello else EXPOSES[kind],
            form=experiment.aggregation.transport.form if kind == "train" else "plain",
            bytes=0,
            sha256="",
            epsilon=epsilon_alone(cost, self._silo.budget.delta),
            cost=cost,
            asked=question.asked,
            part=question.part,
        )

    def _enter_refusal(self, question: Question, fault: ClientFault, experiment: Experiment) -> None:
        refusal = {"code": fault.code, "reason": fault.reason}
        entry = replace(
            self._entry(question, experiment),
            form="plain",
            bytes=min(codec.weigh(refusal), _REFUSAL),
            sha256=hashlib.sha256(json.dumps(refusal).encode()).hexdigest(),
            fault=fault.code,
        )
        self.ledger.enter(entry)

    def refuses(self, question: Question, fault: ClientFault, experiment: Experiment) -> ClientFault:
        """Count a fault as an answer in the ledger if it came after rows were read; return the fault to report."""
        try:
            if depends_on_rows(fault) and self._entry(question, experiment).cost != NOTHING:
                self._enter_refusal(question, fault, experiment)
        except ClientFault as over:
            return over
        finally:
            self._unanswered.end()
        return fault

    def log_refusal(self, handler: str, fault: ClientFault) -> None:
        """Log a request that was not answered."""
        with contextlib.suppress(OSError):  # the server gets its answer even if the disk is full
            self.log.note(
                f"run {self._folder.parent.name}: {handler[:100]} is not answered: {fault.code}: {fault.reason[:400]}"
            )

    def _question(self, classes: Sequence[str]) -> str:
        return json.dumps([self._site_file["experiment"], list(classes)])
