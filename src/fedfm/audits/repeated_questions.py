"""Check in the run's message log whether the server asked a client for the same thing twice in a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from fedfm.audits.audit import Audit
from fedfm.audits.finding import COUNT, Finding
from fedfm.audits.replay import Replay
from fedfm.runtime import logs
from fedfm.runtime.run_directory import Run

QUESTION = "Was a client asked more than once for the same thing in one round?"
EXPECTED = (
    "Expected for each client in a round: one request for its scores on each part of its rows, one for its own model, "
    "and as many requests for an update as other clients get"
)
ONE_A_ROUND = (
    "train",
    "scores",
    "reveal",
)  # kinds of messages that are checked; a method may send other kinds batch by batch


class RepeatedQuestions(Audit):
    """Counts messages by round, handler, part of the rows and client. It needs no replay."""

    replies: ClassVar[bool] = False
    replays: ClassVar[bool] = False

    def reads(self, run: Run) -> bool:
        return True

    def unfit(self, run: Run) -> str | None:
        return None if run.experiment.method.rounds else "the run has no rounds, so no request could be repeated in one"

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        return [finding_of(replay.run)]


def finding_of(run: Run) -> Finding:
    """The finding from a run's messages.jsonl.

    A method may train its clients several times in a round if it trains all of them equally often. If a run ends with
    the model of an earlier round, the last round also asks for the scores of that model.
    """
    calls: dict[tuple[int, str, str, str], set[int]] = {}
    for line in logs.messages(run.path / logs.MESSAGES):
        if line.get("from") != "server":
            continue
        if line["handler"].partition(".")[0] in ONE_A_ROUND:
            place = line["round"], line["handler"], line.get("part", ""), line["to"]
            calls.setdefault(place, set()).add(line["call"])
    result = run.manifest["result"]
    best = result["details"].get("model_of_round", result["rounds"])
    last = result["rounds"] if best != result["rounds"] else None
    again, fewest = Counter[str](), dict[tuple[int, str], int]()
    for (t, handler, _, _), times in calls.items():
        fewest[t, handler] = min(len(times), fewest.get((t, handler), len(times)))
    for (t, handler, part, _), times in calls.items():
        most = 2 if t == last and handler.startswith("scores.") else 1
        if handler.startswith("train."):
            most = fewest[t, handler]
        if len(times) > most:
            again[f"{handler} {part}".strip()] += len(times) - most
    asked = sum(map(len, calls.values()))
    shown = "; ".join(f"{name}: {count} more" for name, count in sorted(again.items())) or "none was repeated"
    rule = COUNT.if_complete(logs.gaps_of_messages(run.path / logs.MESSAGES, result))
    return Finding("repeated_questions", QUESTION, float(again.total()), None, None, 0.0, rule,
                   f"{asked} requests to {len({c for *_, c in calls})} clients: {shown}. {EXPECTED}.",
                   detail={"asked": asked, "again": dict(again)})  # fmt: skip
