"""Check before a resume that all files that the run needs are intact, or record in the manifest which files are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedfm.core import storage
from fedfm.errors import InputError, Lost
from fedfm.runtime import file_integrity, logs, validation_losses
from fedfm.runtime.file_integrity import Loss
from fedfm.runtime.predictions import keeps_parts
from fedfm.runtime.resume_changes import check_edits, note_versions
from fedfm.runtime.run_directory import Run


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
        yield from file_integrity.losses(private, -1, ())
        return
    yield from file_integrity.losses(private, record["round"], record["kept"])
    if run.experiment.run.patience:
        yield from _not_judged(run, record)


def _no_checkpoint(run: Run) -> Iterator[Loss]:
    """Yield the damaged checkpoints; or else the missing one, if lines of metrics prove that there was one."""
    _, damaged = run.newest()
    if damaged:
        yield from (Loss(path, file_integrity.DAMAGED) for path in damaged)
    elif rounds := [line["round"] for line in run.metrics()]:
        yield Loss(run.checkpoint(max(rounds)), file_integrity.MISSING)


def _not_judged(run: Run, record: Mapping[str, Any]) -> Iterator[Loss]:
    """Find lost files that early stopping needs: the validation losses, and the checkpoint of the best round."""
    log, t = run.path / logs.METRICS, record["round"]
    yield from (Loss(log, gap.removeprefix(f"{logs.METRICS} ")) for gap in logs.gaps_of_metrics(log, t - 1))
    first = run.experiment.method.traits.complete_from
    best = validation_losses.best_round([line for line in run.metrics() if first <= line["round"] < t])
    if best is not None and "model_of_round" not in record["extra"] and not keeps_parts(run.experiment.method):
        path = run.checkpoint(best)
        if not storage.whole(path):
            yield Loss(path, file_integrity.DAMAGED if path.exists() else file_integrity.MISSING)
