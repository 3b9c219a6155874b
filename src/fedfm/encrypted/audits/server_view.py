"""Audit of the bytes that the server received in a BlindFed run, as the log of all messages records them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from fedfm.audits.audit import Audit
from fedfm.audits.finding import Finding, VerdictRule
from fedfm.audits.replay import Replay
from fedfm.encrypted.blindfed import BlindFed
from fedfm.runtime import logs
from fedfm.runtime.run_directory import Run

QUESTION = "Did the server receive anything of the clients' rows except ciphertexts and hidden sums?"
# A message in the clear may have at most this number of bytes, which is enough for row counts and scores. For
# comparison, the pixels of one 32 x 32 image take 3,072 bytes.
SMALL = 10_000
HIDDEN = ("encrypted", "masked")


class ServerView(Audit):
    """Counts bytes that the server received in the clear, in messages that could contain rows or updates."""

    methods: ClassVar[tuple[str, ...]] = ("blindfed",)
    replays: ClassVar[bool] = False

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        return [examine(replay.run)]


def examine(run: Run) -> Finding:
    """Return the finding for a run's messages.jsonl."""
    forms, clear, largest = Counter[str](), Counter[str](), 0
    for line in logs.messages(run.path / logs.MESSAGES):
        if line["to"] != "server":
            continue
        forms[line["form"]] += line["bytes"]
        if line["form"] not in HIDDEN:
            clear[line["handler"]] += line["bytes"]
            largest = max(largest, line["bytes"])
    method = run.experiment.method_as(BlindFed)
    rows = [name for name in clear if name.startswith("query.BlindFed")]
    kinds = "kinds of messages with states of rows in the clear"
    rule = VerdictRule(("estimate > bound", f"{kinds} > 0"), ("estimate <= bound", f"{kinds} <= 0"))
    rule = rule.with_numbers({kinds: len(rows)})
    rule = rule.if_complete(logs.gaps_of_messages(run.path / logs.MESSAGES, run.manifest["result"]))
    shown = "; ".join(f"{name}: {count} B" for name, count in sorted(clear.items())) or "none"
    says = f"Bytes to the server by form: {dict(sorted(forms.items()))}. In the clear: {shown}."
    if method.encryption == "clear":
        says += ' encryption = "clear" is a simulation: the server saw the rows.'
    elif rows or largest > SMALL:
        says += " Without secure aggregation, updates travel in the clear."
    promised = method.encryption == "ckks" and bool(rows)
    return Finding("server.view", QUESTION, float(largest), None, None, float(SMALL), rule, says, promised,
                   {"forms": dict(forms)})  # fmt: skip
