"""Do the disclosed activations that a client receives depend on other clients' rows?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from fedfm.audits.audit import Audit
from fedfm.audits.finding import COUNT, Finding
from fedfm.audits.replay import Replay
from fedfm.encrypted.audits.encrypted_error import MOST
from fedfm.encrypted.blindfed import BlindFed
from fedfm.runtime.run_directory import Run

QUESTION = "Do the states that a client received depend on other clients' rows?"


class OtherClients(Audit):
    """Finds the largest difference between the states that a client received and its rows' states in the clear."""

    methods: ClassVar[tuple[str, ...]] = ("blindfed",)
    replays: ClassVar[bool] = False

    def unfit(self, run: Run) -> str | None:
        method = run.experiment.method_as(BlindFed)
        if method.encryption == "clear":
            return 'encryption = "clear" computes the states from each client\'s rows alone'
        if "max_error" not in (run.manifest["result"] or {}).get("details", {}):
            return "the run did not compare the states of its clients: silos do not disclose them"
        return None

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        far = float(replay.run.manifest["result"]["details"]["max_error"])
        says = (
            f"At the end of the run, the states that each client received were compared with states computed in the "
            f"clear from its rows alone. They differ by at most {far:.1e}. "
        )
        says += (
            "The encryption explains this: the received states contain nothing of other clients' rows. The adapters' "
            "mean is not part of this comparison."
            if far <= MOST
            else "The encryption does not explain this: the received states depend on more than the client's own rows."
        )
        return [Finding("states.other_clients", QUESTION, far, None, None, MOST, COUNT, says, far > MOST)]
