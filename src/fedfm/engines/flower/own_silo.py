"""A silo's part in one run: what its file allows, what it has agreed to, and what it writes into its log."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfm.config.experiment import Experiment
from fedfm.core import storage
from fedfm.engines.flower import client_stub
from fedfm.engines.flower.silo_log import SiloLog
from fedfm.errors import E_REFUSED, ClientFault
from fedfm.runtime import silo_file
from fedfm.runtime.population import Partitioned


class Own:
    """A silo in one run.

    Attributes:
        name: of the silo.
        classes: the server's class names, if a hello with them has fitted; kept for a process that takes over.
        policy: what the silo lets out.
    """

    def __init__(self, silo: silo_file.Silo, log: SiloLog, folder: Path, told: Mapping[str, Any]) -> None:
        self._silo, self._log, self._folder, self._told = silo, log, folder, told
        self.name, self.policy = silo.name, silo.policy
        classes = told.get("classes")
        self.classes: tuple[str, ...] | None = None if classes is None else tuple(classes)

    @classmethod
    def of(cls, folder: Path, told: Mapping[str, Any]) -> Own:
        """The silo whose file ``site.json`` names.

        Raises:
            InputError: its file is wrong.
        """
        path = Path(told["silo"])
        silo = silo_file.load(path)
        silo_file.admit_methods(silo, path)
        return cls(silo, SiloLog(client_stub.silo_folder(folder), path), folder, told)

    def populate(self, experiment: Experiment, classes: Sequence[str]) -> Partitioned:
        """The silo's rows and model, if the experiment shows no more than the policy allows.

        Raises:
            InputError: the experiment does not fit the silo.
        """
        silo_file.check(self._silo, experiment)
        return silo_file.populate(self._silo, experiment, classes)

    def asked(self, classes: Sequence[str]) -> None:
        """Before a hello is answered: its answer tells whether the silo's rows fit.

        Raises:
            ClientFault: E_REFUSED by the policy, or after too many that did not fit.
        """
        if not self.policy.words:
            raise ClientFault(E_REFUSED, "this silo's policy allows nothing")
        if self.classes is None:
            self._log.asks(self._question(classes))

    def agree(self, classes: Sequence[str], what: str) -> None:
        """Take part from here on."""
        self.classes = tuple(classes)
        text = json.dumps({**self._told, "classes": list(classes)})
        storage.write_atomic(self._folder / "site.json", text.encode(), 0o600)
        self._log.fits(self._question(classes))
        self._log.note(f"takes part in run {self._folder.parent.name}: {what}")

    def misfit(self, why: str) -> None:
        """Say in the log why a hello did not fit."""
        self._log.misfit(why)

    def refused(self, handler: str, fault: ClientFault) -> None:
        """Note what was not answered."""
        with contextlib.suppress(OSError):  # a full disk does not keep the answer from the server
            self._log.note(f"run {self._folder.parent.name}: {handler[:100]} is not answered: {fault.code}")

    def _question(self, classes: Sequence[str]) -> str:
        return json.dumps([self._told["experiment"], list(classes)])
