"""Read a run directory for its report. Invalid files are refused. An unfinished run may lack values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfm.core import storage, tasks
from fedfm.core.messages import ROUND
from fedfm.core.metric_names import LOCAL_LOSS, SCORES
from fedfm.core.text import from_json
from fedfm.errors import InputError
from fedfm.reports.text import finite, numbers
from fedfm.runtime import logs
from fedfm.runtime.disclosure import guarantee
from fedfm.runtime.exposure import Exposure, exposure_of
from fedfm.runtime.runs_below import no_run

if TYPE_CHECKING:
    from fedfm.core.task_facts import TaskFacts

WEIGHTS, AUDIT, DOSSIER = "weights.npz", "audit.json", "dossier.html"  # names of files that only some runs have
SCHEMA = 1  # newest version of the manifest that this module reads
BASE_AND_NEW = ("base_accuracy", "new_accuracy", "harmonic_mean")  # as fedfm.models.metrics names them


@dataclass(frozen=True)
class Round:
    """A line of metrics.jsonl. A value is None if it is undefined, and NaN if training diverged.

    Attributes:
        number: 0 before training, then 1, 2, ...
        values: accuracy, global_accuracy, local_accuracy, loss, balanced_accuracy, macro_f1, perplexity, local_loss,
            train_loss, val_loss, base_accuracy, new_accuracy, harmonic_mean, and the drawn scores of the run's task.
        seconds: duration of this round. (In the file, seconds count from the start of the run.)
        bytes_up, bytes_down: bytes of the method's own messages since the start of the run.
        figures: all numbers of the line, including the method's own figures.
        clients: accuracy of each client on its own test rows; None for a client without an accuracy.
        losses: loss of each client, if no accuracy is defined.
        scored: the number of an earlier round, for each client whose scores belong to that round's model.
    """

    number: int
    seconds: float | None
    values: Mapping[str, float | None]
    figures: Mapping[str, float]
    clients: Mapping[str, float | None]
    losses: Mapping[str, float | None]
    scored: Mapping[str, float | None]
    cohort: tuple[str, ...]
    excluded: tuple[tuple[str, str, str, str], ...]  # (client, code, reason, part)
    bytes_up: float
    bytes_down: float


@dataclass(frozen=True)
class RunFiles:
    """The content of the files of one run.

    Attributes:
        task: the run's task, with the defaults of its keys.
        result: the run's result; empty while the run is unfinished.
        rounds: committed rounds in order of number.
        exposure: what each party received, summed over all messages.
        missing: a sentence for each damaged or missing record, and for each file that was lost during the run.
    """

    path: Path
    manifest: Mapping[str, Any]
    task: TaskFacts
    result: Mapping[str, Any]
    rounds: tuple[Round, ...]
    exposure: Exposure
    missing: tuple[str, ...]

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended."""
        return bool(self.manifest.get("finished")) and bool(self.result)

    @property
    def experiment(self) -> Mapping[str, Any]:
        """The experiment with every default filled in."""
        return mapping(self.manifest.get("experiment"))

    @property
    def name(self) -> str:
        """The run's name, or else the name of its directory."""
        return str(self.manifest.get("name") or self.path.resolve().name)

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.result.get("method") or mapping(self.experiment.get("method")).get("name") or "unknown method")

    @property
    def planned_rounds(self) -> int | None:
        """Number of rounds in the experiment."""
        asked = numeric(mapping(self.experiment.get("method")).get("rounds"))
        return int(asked) if finite(asked) else None

    @property
    def done_rounds(self) -> int:
        """Number of committed rounds of training."""
        return max((r.number for r in self.rounds), default=0)

    def value(self, name: str) -> float | None:
        """A metric of the result, or else of the last committed round."""
        for known in (self.result, mapping(self.result.get("details"))):
            if name in known:
                return numeric(known[name])
        return self.rounds[-1].values.get(name) if self.rounds else None

    @property
    def client_accuracy(self) -> Mapping[str, float | None]:
        """Each client's accuracy at the end; None for a client that reported none."""
        final = _by_client(self.result.get("client_accuracy"))
        return final or next((r.clients for r in reversed(self.rounds) if r.clients), {})

    @property
    def client_loss(self) -> Mapping[str, float | None]:
        """Each client's loss at the end, if no accuracy is defined; None for a client that reported none."""
        final = _by_client(mapping(self.result.get("details")).get("client_loss"))
        return final or next((r.losses for r in reversed(self.rounds) if r.losses), {})

    @property
    def silos_own_rows(self) -> bool:
        """Whether the clients read their own rows, so that no common rows were partitioned."""
        at_sites = self.manifest.get("clients") and self.manifest.get("split", "") is None  # True in a deployment
        return bool(mapping(self.experiment.get("data")).get("clients") or at_sites)

    @property
    def finite_accuracies(self) -> list[float]:
        """The clients' finite accuracies."""
        return numbers(self.client_accuracy.values())

    @property
    def sample(self) -> str:
        """Words for the clients that were asked for scores, if they are a sample; "" if all were asked."""
        asked = mapping(mapping(self.result.get("details")).get("evaluated"))
        share, of = numeric(mapping(self.experiment.get("run")).get("evaluate_fraction")), self.manifest.get("clients")
        if not asked and (share is None or share >= 1):
            return ""
        n, total = numeric(asked.get("clients", len(self.client_accuracy))), len(sequence(of))
        return f"a sample of {n:,.0f} of {total:,} clients, drawn once from run.seed" if n and n != total else ""

    @property
    def worst(self) -> float | None:
        """The lowest of the clients' accuracies."""
        return min(self.finite_accuracies, default=None)

    @property
    def spread(self) -> float | None:
        """Population standard deviation of the clients' accuracies."""
        return statistics.pstdev(self.finite_accuracies) if self.finite_accuracies else None

    @property
    def seconds(self) -> float | None:
        """Seconds in the result, or else the sum over the rounds."""
        total = numeric(self.result.get("seconds"))
        if total is not None or not self.rounds:
            return total
        return sum(numbers(r.seconds for r in self.rounds))

    def traffic_total(self, direction: str) -> float | None:
        """Bytes of the method's own messages in the direction ``"up"`` or ``"down"``."""
        total = numeric(self.result.get(f"bytes_{direction}"))
        if total is not None or not self.rounds:
            return total
        return self.rounds[-1].bytes_up if direction == "up" else self.rounds[-1].bytes_down

    @property
    def guarantee(self) -> dict[str, Any] | None:
        """The differential privacy that the run claims, see :func:`~fedfm.runtime.disclosure.guarantee`."""
        ledger = mapping(self.manifest.get("ledger"))
        spent = {**ledger, "epsilon": self.result.get("epsilon", ledger.get("epsilon"))}
        return guarantee(spent, mapping(self.experiment.get("privacy")))

    @property
    def exclusions(self) -> list[tuple[int, str, str, str, str]]:
        """(round, client, code, reason, part) of every exclusion."""
        return [(r.number, *e) for r in self.rounds for e in r.excluded]


def read(run_dir: Path, messages: bool = True) -> RunFiles:
    """Read the files of a run, finished or not.

    Args:
        run_dir: folder with manifest.json, metrics.jsonl and messages.jsonl.
        messages: whether to read also messages.jsonl, which may be long.

    Raises:
        InputError: the manifest is missing or invalid, or a newer fedfm wrote it.
    """
    run_dir = Path(run_dir)
    path = run_dir / "manifest.json"
    storage.refuse_pipes(run_dir)
    if not path.is_file():
        raise no_run(run_dir)
    try:
        manifest = from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); restore the file as fedfm wrote it") from error
    if not isinstance(manifest, dict):
        raise InputError(f"{path}: expected a JSON object, not {type(manifest).__name__}")
    if isinstance(names := manifest.get("clients"), list) and any(isinstance(name, list) for name in names):
        from fedfm.runtime.short_names import with_all_names

        manifest = with_all_names(manifest, path)
    schema = manifest.get("schema", SCHEMA)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise InputError(
            f"{path}: its schema is {schema!r}, but this fedfm reads up to {SCHEMA}; use the release of fedfm that "
            f"wrote the run"
        )
    result = mapping(manifest.get("result"))
    # If a resumed run repeated a round, the file has two lines for this round; the later line counts.
    task = _task_of(manifest)
    drawn = [f"{prefix}{name}" for name in task.drawn for prefix in ("", "local_")]
    rounds = {r.number: r for r in (_round(line, drawn) for line in _lines(run_dir / logs.METRICS))}
    left_out = {(r.number, client) for r in rounds.values() for client, _, _, part in r.excluded if part == ROUND}
    lost = [mapping(mark) for mark in sequence(manifest.get("lost"))]
    missing = [f"{mark.get('file')} {mark.get('how')}: the run continued without it" for mark in lost]
    return RunFiles(
        path=run_dir,
        manifest=manifest,
        task=task,
        result=result,
        rounds=_spans([rounds[t] for t in sorted(rounds)]),
        exposure=exposure_of(run_dir / logs.MESSAGES, left_out) if messages else Exposure((), {}, None),
        missing=(*missing, *_gaps(run_dir, result, max(rounds, default=-1), messages)),
    )


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """The valid objects of a log; ``RunFiles.missing`` names the invalid lines."""
    return (line for _, line, _ in logs.lines(path) if line is not None)


def _gaps(run_dir: Path, result: Mapping[str, Any], last: int, messages: bool) -> list[str]:
    """Sentences about missing records up to the end of a finished run, or up to an unfinished run's checkpoint."""
    files = [f for where in ("", "private/") for f in run_dir.glob(f"{where}checkpoint/round-*.safetensors")]
    committed = [int(name) for f in files if (name := f.stem.removeprefix("round-")).isdigit()]
    # A round's line is written after its checkpoint.
    last = int(whole(result.get("rounds"))) if result else max([last, *(t - 1 for t in committed)])
    logs_of = (run_dir if messages else run_dir / logs.METRICS), last, result or None
    of_logs = logs.gaps(*logs_of) if messages else logs.gaps_of_metrics(*logs_of)
    # Only a run with private/ must have a checkpoint: a copy without private/ was made to share the run.
    gone = bool(result) and last not in committed and (run_dir / "private").is_dir()
    model = f"the checkpoint of round {last} is missing: `fedfm predict`, `export` and `audit` need it"
    return [*of_logs, *([model] if gone else [])]


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a JSON object; otherwise an empty object."""
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> Sequence[Any]:
    """The value if it is a JSON array; otherwise an empty array."""
    return value if isinstance(value, list) else []


def numeric(value: Any) -> float | None:
    """The value if it is a number; otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _by_client(found: Any) -> dict[str, float | None]:
    return {str(k): numeric(v) for k, v in mapping(found).items()}


def _task_of(manifest: Mapping[str, Any]) -> TaskFacts:
    """The run's task: the task that its experiment names, or else the task of its rows."""
    named = mapping(mapping(manifest.get("experiment")).get("model")).get("task")
    kind = mapping(manifest.get("model")).get("kind")
    if named in tasks.names():
        return tasks.find(named)
    return (tasks.owner(kind) or tasks.implied_task(kind)) if isinstance(kind, str) else tasks.default()


def _round(line: Mapping[str, Any], drawn: Sequence[str]) -> Round:
    return Round(
        number=int(whole(line.get("round"))),
        seconds=numeric(line.get("seconds")),
        values={
            name: numeric(line.get(name))
            for name in (*SCORES, *drawn, LOCAL_LOSS, "train_loss", "val_loss", *BASE_AND_NEW)
        },
        figures={name: x for name, value in line.items() if (x := numeric(value)) is not None},
        clients=_by_client(line.get("client_accuracy")),
        losses=_by_client(line.get("client_loss")),
        scored=_by_client(line.get("client_scored_round")),
        cohort=tuple(str(c) for c in sequence(line.get("cohort"))),
        excluded=tuple(_exclusion(mapping(e)) for e in sequence(line.get("excluded"))),
        bytes_up=whole(line.get("bytes_up")),
        bytes_down=whole(line.get("bytes_down")),
    )


def _exclusion(entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    client, code, reason = (str(entry.get(key, "")) for key in ("client", "code", "reason"))
    return client, code, reason, str(entry.get("part", ROUND))


def _spans(rounds: Sequence[Round]) -> tuple[Round, ...]:
    """The rounds, each with its own duration instead of the seconds since the start of the run."""
    out, before = [], 0.0
    for r in rounds:
        own = r.seconds
        if finite(r.seconds):
            own, before = r.seconds - before, r.seconds
            own = own if own >= 0 else before  # the clock started again from 0
        out.append(replace(r, seconds=own))
    return tuple(out)


def whole(value: Any) -> float:
    """The value if it is a finite number; otherwise 0."""
    x = numeric(value)
    return x if finite(x) else 0.0
