"""Check before a resume that all files that the run needs are intact, or record in the manifest which files are not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfm.core import storage
from fedfm.errors import InputError, Lost
from fedfm.runtime import file_integrity, logs, validation_losses
from fedfm.runtime.file_integrity import DAMAGED, LISTS, MISSING
from fedfm.runtime.predictions import keeps_parts
from fedfm.runtime.resume_changes import check_edits, note_versions
from fedfm.runtime.run_directory import Run


@dataclass(frozen=True)
class Loss:
    """A damaged or missing file.

    Attributes:
        how: the fault, as the predicate of a sentence about the file, e.g. :data:`DAMAGED`.
        root, party: ``ROOT``, and the party that owns the file. If no party owns it, root is None.
    """

    path: Path
    how: str
    root: Path | None = None
    party: str = ""

    def forget(self) -> None:
        """Remove a damaged file, and remove its name from the list."""
        if self.root is None:
            return
        folder, list_file = self.root / self.party, self.root / LISTS / self.party / "list"
        if self.how == DAMAGED:
            self.path.unlink(missing_ok=True)
        file_integrity.write_list(list_file, file_integrity.files(folder), sync=True)


def settle(run: Run, accept: bool = False) -> list[str]:
    """Refuse a run with damaged or missing files; return new notices for the manifest.

    Args:
        accept: whether the run may continue without these files; if so, the manifest records the loss permanently.

    Raises:
        Lost: a file is damaged or missing; the run is unchanged.
        InputError: a version before 0.2.0 wrote the run, or somebody changed the experiment in its manifest.
    """
    record, _ = run.newest()
    if record is not None and "kept" not in record:
        raise InputError(
            f"{run.path}: a version of fedfm before 0.2.0 wrote this run, without lists of its files; resume it with "
            f"that version"
        )
    if record is not None:
        check_edits(run, record)
    known = len(run.manifest["notices"])
    marked = {(mark["file"], mark["how"]) for mark in run.manifest.get("lost", ())}
    found = [loss for loss in _losses(run, record) if loss.root or _key(run, loss) not in marked]
    if found and not accept:
        raise Lost(_refusal(run, found))
    note_versions(run)
    for loss in found:
        loss.forget()
        file, how = _key(run, loss)
        after = None if record is None else record["round"]
        run.manifest.setdefault("lost", []).append({"file": file, "how": how, "after_round": after})
        run.note(f"{file} {how}: the run continued without it")
    if len(run.manifest["notices"]) > known:
        run.write_manifest()
    return list(run.manifest["notices"][known:])


def _key(run: Run, loss: Loss) -> tuple[str, str]:
    return str(loss.path.relative_to(run.path)), loss.how


def _refusal(run: Run, found: list[Loss]) -> str:
    first, more = found[0], len(found) - 1
    others = f" ({more} more file{'s are' if more > 1 else ' is'} lost)" if more else ""
    return (
        f"{first.path} {first.how}{others}: {_meaning(first)}. Put the file{'s' if more else ''} back, or continue "
        f"without {'them' if more else 'it'}, which the manifest then records: fedfm resume {run.path} --accept-loss"
    )


def _meaning(loss: Loss) -> str:
    if loss.path.suffix == ".secret":
        return "the run began with this secret; another secret would release a second sample of its data"
    if loss.path.name == logs.METRICS:
        return "run.patience chooses the model by its validation losses"
    if loss.root is None:
        return "without a checkpoint the run starts over, or ends with another model"
    return "it is state that a client or the server keeps between rounds, and without it the result differs"


def _losses(run: Run, record: Mapping[str, Any] | None) -> Iterator[Loss]:
    """Find damaged or missing files that the run needs when it continues after this checkpoint."""
    private = run.path / "private"
    if record is None:
        yield from _no_checkpoint(run)
        yield from _losses_in(private, -1, ())
        return
    yield from _losses_in(private, record["round"], record["kept"])
    if run.experiment.run.patience:
        yield from _not_judged(run, record)


def _no_checkpoint(run: Run) -> Iterator[Loss]:
    """Yield the damaged checkpoints; or else the missing one, if lines of metrics prove that there was one."""
    _, damaged = run.newest()
    if damaged:
        yield from (Loss(path, DAMAGED) for path in damaged)
    elif rounds := [line["round"] for line in run.metrics()]:
        yield Loss(run.checkpoint(max(rounds)), MISSING)


def _not_judged(run: Run, record: Mapping[str, Any]) -> Iterator[Loss]:
    """Find lost files that early stopping needs: the validation losses, and the checkpoint of the best round."""
    log, t = run.path / logs.METRICS, record["round"]
    yield from (Loss(log, gap.removeprefix(f"{logs.METRICS} ")) for gap in logs.gaps_of_metrics(log, t - 1))
    first = run.experiment.method.traits.complete_from
    best = validation_losses.best_round([line for line in run.metrics() if first <= line["round"] < t])
    if best is not None and "model_of_round" not in record["extra"] and not keeps_parts(run.experiment.method):
        path = run.checkpoint(best)
        if not storage.whole(path):
            yield Loss(path, DAMAGED if path.exists() else MISSING)


def _losses_in(private: Path, until: int, wanted: Iterable[str]) -> Iterator[Loss]:
    """Find damaged and missing files below a run's ``private/``.

    Args:
        until: the round after which the run continues; files of later rounds do not matter, since they are written
            again.
        wanted: the result of :func:`~fedfm.runtime.file_integrity.parties` after this round.
    """
    for place in (private / name for name in wanted):
        if not (place / "list").is_file():
            yield Loss(place / "list", MISSING, place.parent.parent, place.name)
    for root in file_integrity.roots(private):
        for party in file_integrity.party_folders(root):
            yield from _losses_of(root, party, until)


def _losses_of(root: Path, party: str, until: int) -> Iterator[Loss]:
    folder, list_file = root / party, root / LISTS / party / "list"
    try:
        names = file_integrity.read_list(list_file) or set()
    except Lost:
        names = set()
        yield Loss(list_file, DAMAGED, root, party)
    for name in sorted(names | file_integrity.files(folder)):
        version = file_integrity.version_of(name)
        if version is not None and version[0] > until:
            continue
        path = folder / name
        if not path.exists():
            yield Loss(path, MISSING, root, party)
        elif not (storage.whole(path) if version else file_integrity.read_secret(path) is not None):
            yield Loss(path, DAMAGED, root, party)
