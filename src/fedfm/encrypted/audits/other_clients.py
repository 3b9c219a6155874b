"""What the released states of a double-blind run tell a client of other clients' rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from fedfm.audits.audit import Audit
from fedfm.audits.finding import COUNT, Finding
from fedfm.audits.replay import Replay
from fedfm.encrypted.audits.encrypted_error import MOST
from fedfm.encrypted.blindfed import BlindFed
from fedfm.runtime.run_directory import Run

QUESTION = "Do the states that a client was sent depend on other clients' rows?"


class OtherClients(Audit):
    """How far the states that the clients keep are from those of their own rows alone, computed in the clear."""

    methods: ClassVar[tuple[str, ...]] = ("blindfed",)
    replays: ClassVar[bool] = False

    def unfit(self, run: Run) -> str | None:
        method = run.experiment.method_as(BlindFed)
        if method.encryption == "clear":
            return 'encryption = "clear": the states are computed from each client\'s rows alone'
        if "max_error" not in (run.manifest["result"] or {}).get("details", {}):
            return "the run did not compare the states that its clients keep: silos keep them to themselves"
        return None

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        far = float(replay.run.manifest["result"]["details"]["max_error"])
        says = (
            f"At the end of the run the states that every client kept were compared with those of its own rows alone, "
            f"computed in the clear: they differ by at most {far:.1e}, the error of the encryption. "
        )
        says += (
            "Nothing of other clients' rows is in them; what the adapters' mean says of these is another matter."
            if far <= MOST
            else "Something else is in them."
        )
        return [Finding("states.other_clients", QUESTION, far, None, None, MOST, COUNT, says, far > MOST)]
