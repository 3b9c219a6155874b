"""Write ``report.html``, one self-contained page without scripts, from the files of a run directory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fedfm.core.metric_names import GLOBAL_ACCURACY, LOCAL_ACCURACY
from fedfm.reports import account, classes, sections
from fedfm.reports.page import aside, page, save
from fedfm.reports.read import AUDIT, DOSSIER, WEIGHTS, RunFiles, mapping, numeric, read, sequence
from fedfm.reports.text import NONE, count, duration, esc, number, numbers, percent, plural, size
from fedfm.runtime.runs_below import order_in

if TYPE_CHECKING:
    from fedfm.core.output_files import RowPictures


def write(run_dir: Path, baselines: Sequence[Path] | None = None, rows: RowPictures | None = None) -> Path:
    """Write :func:`render` into a run's directory; returns the path."""
    return save(render(run_dir, baselines, rows), Path(run_dir) / "report.html")


def renew(run_dir: Path, rows: RowPictures | None = None) -> Path:
    """Write the report again, with ``rows`` if given, and the dossier if the run has one; return the report's path."""
    if (Path(run_dir) / DOSSIER).is_file():
        import_module("fedfm.reports.dossier").write(run_dir)
    return write(run_dir, rows=rows)


def render(
    run_dir: Path, baselines: Sequence[Path] | None = None, rows: RowPictures | None = None, live: str = ""
) -> str:
    """The report as a page. The same files give the same text; an unfinished run has the rounds so far.

    Args:
        baselines: directories of other runs for comparison; None means the baselines that ran with this run.
        rows: pictures of some test rows; None for a report without pictures.
        live: HTML in place of the line on an unfinished run.

    Raises:
        InputError: the manifest is missing, invalid, or of a newer schema.
    """
    run = read(run_dir)
    if baselines is None:
        first, *rest = order_in(Path(run_dir).resolve().parent) or [Path()]
        baselines = rest if first == Path(run_dir).resolve() else ()
    others = [read(path, messages=False) for path in baselines]
    details = mapping(run.result.get("details"))
    parts = [
        ("rounds", "Progress by round", sections.curves(run)),
        ("clients", "Clients", sections.clients(run)),
        ("newcomers", "Newcomers", _of_some("newcomers", run, bool(run.manifest.get("newcomers")))),
        ("departures", "Clients that left", _of_some("departures", run, bool(run.manifest.get("departures")))),
        ("worth", "What each client contributed", _of_some("client_worth", run, bool(run.manifest.get("worth")))),
        ("survey", "What the silos hold", _of_some("survey", run, "survey" in details)),
        ("classes", "Classes", classes.section(run)),
        ("targets", "Scores by target", _of_some("task_tables", run, any(key in details for key in run.task.lists))),
        ("rows", "Some test rows", import_module("fedfm.reports.row_pictures").section(rows) if rows else ""),
        ("compare", "Compared with baselines", _comparison([run, *others]) if others else ""),
        ("map", "Who learns from whom", _of_some("client_weights", run, (run.path / WEIGHTS).exists())),
        ("split", "How the data are split", sections.split(run)),
        ("features", "Mixtures of features", _of_some("fedpft", run, "formula_bytes" in details)),
        ("layers", "Active layers", _of_some("fedms", run, any("backward_seconds" in r.figures for r in run.rounds))),
        ("messages", "Messages", account.messages(run)),
        ("privacy", "Privacy", account.privacy(run)),
        ("audit", "Audits", _of_some("audit", run, (run.path / AUDIT).exists())),
        ("time", "Time by round", sections.time(run)),
        ("excluded", "Excluded clients", sections.exclusions(run)),
        ("result", "Result in detail", account.result(run)),
        ("manifest", "Manifest", account.manifest(run)),
    ]
    version = esc(run.manifest.get("fedfm") or "")
    head = f'<p class="eyebrow">fedfm {version} · run report</p><h1>{esc(run.name)}</h1>'
    missing = aside("This record is incomplete", run.missing, ' id="missing" role="alert"')
    head += f'<p class="lead">{sentence(run)}</p>{live or _status(run)}{missing}{_tiles(run)}{account.share_box(run)}'
    made = f"Written by fedfm {version} from manifest.json, metrics.jsonl and messages.jsonl of this run."
    return page(f"{run.name} · fedfm", head, [p for p in parts if p[2]], made)


def _of_some(name: str, run: RunFiles, has: bool) -> str:
    """The section that the module ``name`` writes; empty if the run has no data for this section."""
    return str(import_module(f"fedfm.reports.{name}").section(run)) if has else ""


def _comparison(runs: Sequence[RunFiles]) -> str:
    from fedfm.reports import compare

    return compare.section(runs)


def sentence(run: RunFiles) -> str:
    """The result in one sentence."""
    model = mapping(run.experiment.get("model")).get("name") or "a model of the server"
    clients = len(sequence(run.manifest.get("clients"))) or len(run.client_accuracy)
    text = (
        f"<strong>{esc(run.method)}</strong> on {esc(model)} with {esc(data_of(run))} at {plural(clients, 'client')}: "
    )
    perplexity, accuracy = run.value("perplexity"), run.value("accuracy")
    figures = [f"perplexity {number(perplexity)}"] if perplexity is not None else []
    if accuracy is not None or (perplexity is None and run.value("loss") is None):
        figures.append(f"accuracy {percent(accuracy)}")
    figures = figures or [f"loss {number(run.value('loss'))}"]
    text += ", ".join(figures)
    if attackers := sequence(run.manifest.get("attackers")):
        attack = mapping(run.experiment.get("attack")).get("name")
        text += f" under attack ({esc(attack)}) by {esc(', '.join(map(str, attackers[:20])))}"
        text += f" and {count(len(attackers) - 20)} more" if len(attackers) > 20 else ""
    text += f" after {plural(run.done_rounds, 'round')} and {duration(run.seconds)}, "
    return text + f"{size(run.traffic_total('up'))} sent up and {size(run.traffic_total('down'))} down."


def data_of(run: RunFiles) -> str:
    """The name of the data, and how they were split."""
    data = mapping(run.experiment.get("data"))
    named = next((data[k] for k in ("name", "hub", "path") if data.get(k)), None)
    if run.silos_own_rows:  # no common rows were split
        return "the silos’ own data"
    partition = mapping(data.get("partition"))
    how = str(partition.get("name", ""))
    if partition.get("alpha") is not None:
        how += f" {number(numeric(partition['alpha']))}"
    return f"{named or 'the silos’ own data'}{f' ({how})' if how else ''}"


def _status(run: RunFiles) -> str:
    if run.is_finished:
        return ""
    planned = f" of {run.planned_rounds}" if run.planned_rounds is not None else ""
    text = f"{run.done_rounds}{planned} rounds are committed; this page shows the state after the last one."
    text = f"{text if run.rounds else 'No round is committed yet.'} <code>fedfm resume</code> continues from there."
    return f'<aside id="status" role="status"><strong>Unfinished run</strong><p>{text}</p></aside>'


def _tiles(run: RunFiles) -> str:
    worst = next((c for c, v in run.client_accuracy.items() if v is not None and v == run.worst), "")
    spread, planned = run.spread, run.planned_rounds
    of = f"of {planned} planned" if planned is not None and planned != run.done_rounds else ""
    details = mapping(run.result.get("details"))
    if "stopped_early" in details:
        of += ", stopped early by validation rows"
    if (best := details.get("model_of_round", run.done_rounds)) != run.done_rounds:
        of += f"; the model is that of round {count(best)}"
    epsilon = numeric(run.result.get("epsilon", mapping(run.manifest.get("ledger")).get("epsilon")))
    mean, planned_rounds = f"mean of {run.sample or 'the clients'}", "" if run.is_finished else "of all planned rounds"
    tiles = [
        ("Global accuracy", percent(accuracy), "on the global test rows")
        if (accuracy := run.value(GLOBAL_ACCURACY)) is not None or run.value("loss") is None
        else ("Global loss", number(run.value("loss")), "on the global test rows"),
        ("Local accuracy", percent(run.value(LOCAL_ACCURACY)), mean),
        ("Worst client", percent(run.worst), worst),
        ("Spread", NONE if spread is None else f"{100 * spread:.1f}", "points, standard deviation over clients"),
        ("Rounds", count(run.done_rounds), of),
        ("Time", duration(run.seconds), ""),
        ("Sent", f"{size(run.traffic_total('up'))}", f"up; {size(run.traffic_total('down'))} down"),
        ("Epsilon", number(epsilon), "nothing is claimed" if epsilon is None else planned_rounds),
    ]
    if (both := run.value("harmonic_mean")) is not None:
        shares = (percent(run.value(key)) for key in ("base_accuracy", "new_accuracy"))
        tiles.insert(2, ("Base and new", percent(both), "harmonic mean of {} and {}".format(*shares)))
    if run.value("perplexity") is not None:  # the main metric of a language model
        first = ("Perplexity", number(run.value("perplexity")), "on the global test rows")
        tiles = [first, *(tiles[1:] if run.value("accuracy") is None else [*tiles[:3], *tiles[4:]])]
    if run.value("accuracy") is None and (losses := numbers(run.client_loss.values())):
        worst = next(c for c, v in run.client_loss.items() if v == max(losses))
        tiles[1:4] = [
            ("Local loss", number(statistics.fmean(losses)), mean),
            ("Worst client", number(max(losses)), worst),
            ("Spread", number(statistics.pstdev(losses)), "of the loss, standard deviation over clients"),
        ]
    cells = "".join(f"<div><dt>{esc(a)}</dt><dd>{esc(b)}</dd><dd>{esc(c)}</dd></div>" for a, b, c in tiles)
    return f'<dl class="tiles">{cells}</dl>'
