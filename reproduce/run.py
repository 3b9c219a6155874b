"""Run the rows of a folder of experiments and write one page of results.

    python reproduce/run.py fedpft
    python reproduce/run.py fedpft --only table5_cifar10 figure5 --seeds 0
    python reproduce/run.py fedbaf/full --only table3      # the paper's sizes; the page is docs/results/fedbaf-full.md

Every row is one TOML file in ``reproduce/<folder>/``, named ``<table>__<row>.toml``; ``fedfm run`` takes it as it is
once its data lie where it says. ``tables.json`` beside them says what a table asks, its seeds, the rows that get only
the first of them or are the same at all, which rows have a key chosen by validation rows (``tune``: row -> key ->
values; ``tuned_as``: row -> the row whose choice it takes; ``tuning``: seed and share of the rows, or ``by`` accuracy
with its ``seeds`` on ``<set>.tuning.npz``; at each point of a grid anew; a grid whose best value is its last is
widened), which rates are the paper's (``rates``: row -> ``how`` and ``of``), and the claims (none on a row whose rate
is borrowed or set by hand); with a ``grid`` (name -> changed keys, as ``fedfm run --set`` takes them) every row is run
at each of its points, as ``<row>.<point>`` (with its own seeds where ``seeds_at`` says so; with the choice of another
point where ``tuned_at`` says so, for all rows or for ``<row>.<point>``; with the choices of another table, at its point
``tuned_at`` if it has a grid, where ``tuned_in`` names it), and an ``audit`` is made of every run. ``across`` (name ->
heading -> point of the grid) shows the points of one line side by side, a table a column; with ``keep_states`` the
states that a frozen model releases of a picture are computed once for all runs of a table. This script makes data and
models from a folder of raw sets (``--data``, by default ``../shared/data`` beside the repository) into
``reproduce/.data/``, runs what has not been run yet, and writes ``docs/results/<folder>.md`` with the command of every
figure. A table that is not run keeps its old rows. With ``--keep`` a row that is on the page keeps its rates and its
seeds: only those that it lacks are run, and first of all each row's first seed again. If it does not give what it gave,
the table is refused and stays as it is (``kept_seeds.py``). Rows whose noise the operating system draws are not
compared: they are run anew.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rates
from cached_runs import run_once
from claims import LEFT_OUT, NO_CLAIMS, PERCENT, RATES, looks, no_claims, spread, tally
from claims import lines as claim_lines
from kept_seeds import add_seeds, differences, refuse_moved

from fedfm.audits.audit import earlier, perform
from fedfm.config.experiment import Experiment
from fedfm.runtime.run_directory import Run

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
COLUMNS = {  # key of what is kept -> heading, and how its values over the seeds are said
    "accuracy": ("accuracy, %", "spread"),
    "perplexity": ("perplexity", "spread"),
    "before": ("of clients before aggregation, %", "spread"),
    "clients": ("mean of clients, %", "spread"),
    "own": ("theta_i: after the local pass, %", "spread"),
    "start": ("theta_bar_i: before it, %", "spread"),
    "global": ("on all test rows, %", "spread"),
    "own_loss": ("theta_i, nats a token", "fine spread"),
    "start_loss": ("theta_bar_i, nats a token", "fine spread"),
    "rouge": ("ROUGE-1, 100ths", "spread"),
    "score": ("score on the clients' own test rows, 100ths", "spread"),
    "megabytes_up": ("MB up", "mean of two digits"),
    "epsilon": ("epsilon", "first"),
    "rounds_to_target": ("rounds to the target", "reached"),
    "tmac": ("TMAC, 10^9", "reached"),
    "gmacs": ("GMAC a client and round", "mean of two digits"),
    "choice": ("rate", "rate"),
    "seconds": ("s", "mean"),
    "more": ("more", "words"),
}
DEFAULT = ("accuracy", "clients", "megabytes_up", "epsilon", "seconds", "more")
LIMITS = {  # what a figure of a column can be, where it is none of 100
    "perplexity": (1.0, math.inf),
    "score": (-math.inf, 100.0),
    **dict.fromkeys(("own_loss", "start_loss", "rounds_to_target", "tmac"), (0.0, math.inf)),
}
NEVER = "not reached"
SIDES = {
    "own": 1.0,
    "start": 1.0,
    "global": 1.0,
    "own_loss": 100.0,
    "start_loss": 100.0,
    "score": 1.0,
}  # what is kept -> points of a claim
CURVE = "| row | round | tau_t | a_t / U | relative L2 error | Dist |\n|---|---|---|---|---|---|"


def shown_figures(
    result: Mapping[str, Any], chosen: str, operations: Mapping[str, Any], score: str = ""
) -> dict[str, Any]:
    """The figures of a result and of the ledger's operations that the page shows; ``score`` is a task's own score."""
    details = result["details"]
    more = [chosen] if chosen else []
    if "formula_bytes" in details:
        more.append(f"formula {details['formula_bytes'] / 1e6:.2f} MB")
    if details.get("chain_accuracy"):
        more.append("along: " + ", ".join(f"{100 * a:.1f}" for a in details["chain_accuracy"]))
    if "bound" in details:
        more.append(f"bound {details['bound']['ours']:.2f}, printed {details['bound']['printed']:.2f}")
    if "active_layers" in details:
        active, rows = (sorted(details[key].values()) for key in ("active_layers", "deciding_rows"))
        more.append(f"{active[0]} to {active[-1]} active layers, decided by {rows[0]} to {rows[-1]} rows")
    if details.get("times_paper_noise"):
        more.append(f"the paper's noise is {details['times_paper_noise']:.1f} times ours")
    local, before = result["local_accuracy"], details.get("accuracy_before_aggregation")
    found = {
        "accuracy": None if result["accuracy"] is None else round(100 * result["accuracy"], 3),
        "clients": None if local is None else round(100 * local, 3),
        "megabytes_up": round(result["bytes_up"] / 1e6, 4),
        "epsilon": result["epsilon"],
        "seconds": round(result["seconds"], 1),
        "more": more,
    }
    if result["global_accuracy"] is not None:
        found["global"] = round(100 * result["global_accuracy"], 3)
    if score:
        found["score"] = round(100 * (local if score == "accuracy" else details[f"local_{score}"]), 3)
    if result.get("perplexity") is not None:
        found["perplexity"] = round(result["perplexity"], 3)
    if before is not None:
        found["before"] = round(100 * before, 3)
    found |= sides(result, details)
    if operations.get("macs_per_client_round") is not None:
        found["gmacs"] = float(f"{operations['macs_per_client_round'] / 1e9:.4g}")
    if "target_accuracy" in operations:
        tmac, rounds = operations["tmac"], operations["rounds_to_target"]
        found["rounds_to_target"] = NEVER if rounds is None else rounds
        found["tmac"] = NEVER if tmac is None else float(f"{tmac / 1e9:.4g}")
    return found


def sides(result: Mapping[str, Any], details: Mapping[str, Any]) -> dict[str, float]:
    """Clients on their own test rows with theta_i, as the last local pass ended, and with theta_bar_i: what that pass
    started from where every client has a model of its own, else the last aggregate, which is of that pass's results.
    """
    if "server_accuracy" in details:  # a model a client
        pairs = {"own": result["local_accuracy"], "start": details["server_accuracy"]}
        losses = {"own_loss": result.get("local_loss"), "start_loss": details.get("server_loss")}
    elif "accuracy_before_aggregation" in details:
        pairs = {"own": details["accuracy_before_aggregation"], "start": result["local_accuracy"]}
        losses = {"own_loss": details.get("loss_before_aggregation"), "start_loss": result.get("local_loss")}
    else:
        pairs, losses = {"own": result["local_accuracy"]}, {"own_loss": result.get("local_loss")}
    found = {key: round(100 * value, 3) for key, value in pairs.items() if value is not None}
    if details.get("local_rouge_1") is not None:
        found["rouge"] = round(100 * details["local_rouge_1"], 3)
    return found | {key: round(value, 5) for key, value in losses.items() if value is not None}


def audit_curve(out: Path, name: str) -> list[dict[str, float]]:
    """tau_t, the pull a_t / U and the distances of every round, from the audit of a finished run."""
    wanted = "extraction.all_colluding"
    if wanted not in (found := {f["name"]: f for f in earlier(out)}):
        found = {f.name: f.to_dict() for f in perform(out, [name])}
    curve: list[dict[str, float]] = found[wanted]["detail"]["curve"]
    return [{key: float(f"{value:.4g}") for key, value in line.items()} for line in curve]


def cell(key: str, found: Sequence[Mapping[str, Any]]) -> str:
    """What a column says of a row; what stands beside the figures is of the first seed."""
    values = [f[key] for f in found if f.get(key) is not None]
    how, possible = COLUMNS[key][1], LIMITS.get(key, PERCENT)
    if how == "fine spread":
        return spread(values, possible, 3) if values else ""
    if not values or how == "spread":
        return spread(values, possible) if values else ""
    if how == "reached":
        reached = [v for v in values if v != NEVER]
        few = "" if len(reached) == len(values) else f" ({len(reached)} of {len(values)} seeds)"
        return spread(reached, possible) + few if reached else NEVER
    if how == "first":
        return f"{values[0]:g}"
    if how == "rate":
        return rates.Choice(**values[0]).to_cell()
    if how == "words":
        return "; ".join([*values[0], *unfit(found[0].get("choice", {}))])
    return f"{statistics.fmean(values):.{2 if how == 'mean of two digits' else 0}f}"


def unfit(found: Mapping[str, Any]) -> list[str]:
    """Beside the words of a search: where the rate came from, if not from one at this row's point."""
    choice = rates.Choice(**{"how": "", **found})
    if choice.how == rates.BORROWED:
        return [f"rate borrowed from `{choice.of}`"]
    return [rates.FORBIDS[choice.how]] if choice.how == rates.HAND else []


def row(name: str, by_seed: Mapping[str, Mapping[str, Any]], columns: Sequence[str] = DEFAULT) -> str:
    """One line of a table."""
    return "| " + " | ".join([name, *(cell(key, list(by_seed.values())) for key in columns)]) + " |"


def head(columns: Sequence[str] = DEFAULT) -> str:
    """The line above them."""
    return f"| row | {' | '.join(COLUMNS[key][0] for key in columns)} |\n|---|{'---|' * len(columns)}"


def beside(
    rows: Mapping[str, Mapping[str, Mapping[str, Any]]],
    across: Mapping[str, Mapping[str, str]],
    columns: Sequence[str],
) -> list[str]:
    """One table for each column: a line for each name in ``across`` and row, with the grid's points side by side."""
    headings = list(dict.fromkeys(heading for points in across.values() for heading in points))
    ends = sorted((f".{p}" for points in across.values() for p in points.values()), key=len)  # a point may have a dot
    kinds = list(dict.fromkeys(name.removesuffix(next(e for e in ends[::-1] if name.endswith(e))) for name in rows))
    out = []
    for key in columns:
        out += [f"| {COLUMNS[key][0]} | {' | '.join(headings)} |", f"|---|{'---|' * len(headings)}"]
        for name, points in across.items():
            for kind in kinds:
                found = [rows.get(f"{kind}.{points.get(heading)}", {}) for heading in headings]
                cells = [cell(key, list(by_seed.values())) for by_seed in found]
                out.append(f"| {kind}{name and f'.{name}'} | {' | '.join(cells)} |")
        out.append("")
    return out


def curves(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """The curves of audited runs: about eight rounds of the first seed of each."""
    out = []
    for name, by_seed in rows.items():
        curve = next(iter(by_seed.values())).get("curve", [])
        step = max(1, len(curve) // 8)
        for line in [c for c in curve if (c["round"] - 1) % step == 0 or c is curve[-1]]:
            cells = (f"{line['round']:g}", *(f"{line[k]:.3g}" for k in ("angle", "pull", "error", "dist")))
            out.append(f"| {name} | {' | '.join(cells)} |")
    return [CURVE, *out, ""] if out else []


def figures(page: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What claims compare: accuracy by ``<table>__<row>``; with ``:before``, clients' own before aggregation; with
    ``:own`` and ``:start`` accuracy of theta_i and theta_bar_i on the client's own test rows, with ``:global`` on all
    test rows, with ``:score`` the table's own ``score``, with ``:own_loss`` and
    ``:start_loss`` 100 times their losses, in nats; with ``:perplexity`` 100 times its logarithm, so that differences
    are about per cent; with ``:fall``, by how many per cent tau_t falls from the first half of the rounds to the
    second.
    """
    out: dict[str, dict[str, float]] = {}
    for table, part in page.items():
        for name, by_seed in part["rows"].items():
            for seed, kept in by_seed.items():
                full = f"{table}__{name}"
                if kept["accuracy"] is not None:
                    out.setdefault(full, {})[seed] = kept["accuracy"]
                for key, factor in SIDES.items():
                    if key in kept:
                        out.setdefault(f"{full}:{key}", {})[seed] = factor * kept[key]
                if "before" in kept:
                    out.setdefault(f"{full}:before", {})[seed] = kept["before"]
                if "perplexity" in kept:
                    out.setdefault(f"{full}:perplexity", {})[seed] = 100 * math.log(kept["perplexity"])
                if "curve" in kept:
                    tau = [line["angle"] for line in kept["curve"]]
                    halves = [statistics.fmean(h) for h in (tau[: len(tau) // 2], tau[len(tau) // 2 :])]
                    out.setdefault(f"{full}:fall", {})[seed] = 100 * (1 - halves[1] / halves[0])
    return out


def doubtful(page: Mapping[str, Any]) -> dict[str, str]:
    """``<table>__<row>`` -> what its rates forbid or leave open; empty where they were chosen at its point."""
    return {
        f"{table}__{name}": rates.doubt(part.get("choices", {}).get(name, {}))
        for table, part in page.items()
        for name, by_seed in part["rows"].items()
    }


def origins(page: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """``<table>__<row>`` -> how its rates came about."""
    return {
        f"{table}__{name}": choice for table, part in page.items() for name, choice in part.get("choices", {}).items()
    }


def write(folder: Path, about: dict[str, Any], page: dict[str, Any]) -> None:
    """``docs/results/<folder>.md``: the claims with their verdicts; what each table asks, its rows, what was found."""
    out = [f"# {about['title']}", "", about["intro"], ""]
    doubts = doubtful(page)
    if verdicts := claim_lines(about.get("claims", []), figures(page), doubts):
        of_seeds = [line for text in looks(about["claims"], figures(page), doubts) for line in (text, "")]
        said = [RATES, "", *of_seeds, *tally(about["claims"], figures(page), doubts), ""]
        out += ["## The claims", "", about["claims_intro"], "", *said, *verdicts]
        out += [about["claims_found"], ""] if about.get("claims_found") else []
    for table, text in about["tables"].items():
        if table in page:
            columns = text.get("columns", DEFAULT)
            choices = page[table].get("choices", {})
            rows = {
                name: {seed: kept | {"choice": choices.get(name, {"how": ""})} for seed, kept in by_seed.items()}
                for name, by_seed in page[table]["rows"].items()
            }
            out += [f"## {text['title']}", "", f"`{page[table]['command']}`", ""]
            if across := text.get("across"):
                out += beside(rows, across, columns)
            else:
                out += [head(columns), *(row(name, by_seed, columns) for name, by_seed in rows.items()), ""]
            out += curves(rows)
            out += [text["found"], ""] if text.get("found") else []
    if others := no_claims(about.get("claims", []), figures(page), doubts, origins(page)):
        out += [f"## {NO_CLAIMS}", "", f"{LEFT_OUT} {about['untuned']}", "", *others, ""]
    if about.get("not_run"):
        missing = [f"- {text['title']}: `{command(folder, t)}`" for t, text in about["tables"].items() if t not in page]
        out += ["## Not run", "", about["not_run"], "", *missing, *([""] if missing else [])]
    (ROOT / "docs" / "results" / f"{page_name(folder)}.md").write_text("\n".join(out), encoding="utf-8")


def page_name(folder: Path) -> str:
    """``fedbaf``, ``fedbaf-full``, ``one-shot``."""
    return "-".join(folder.relative_to(HERE).parts).replace("_", "-")


def command(folder: Path, table: str) -> str:
    """What runs one table."""
    return f"python reproduce/run.py {folder.relative_to(HERE).as_posix()} --only {table}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of reproduce/, e.g. fedpft")
    parser.add_argument("--only", nargs="*", help="tables (the part of a row's name before __); none: only the page")
    parser.add_argument("--rows", nargs="*", help="of these tables, e.g. fedpft_diag_10; the others keep their figures")
    parser.add_argument("--seeds", help="e.g. 0,1,2 [what tables.json says of each table]")
    parser.add_argument("--keep", action="store_true", help="the page's rates and seeds; run those that it lacks")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    options = parser.parse_args()
    folder, runs = HERE / options.folder, HERE / ".runs" / options.folder
    about = json.loads((folder / "tables.json").read_text())
    tables: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.toml")):
        tables.setdefault(path.stem.partition("__")[0], []).append(path)
    if unknown := (set(options.only or []) | set(tables)) - (set(about["tables"]) & set(tables)):
        raise SystemExit(f"{', '.join(sorted(unknown))}: expected rows, and a title in tables.json")
    store = ROOT / "docs" / "results" / f"{page_name(folder)}.json"
    page: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
    for table in about["tables"] if options.only is None else options.only:
        text = about["tables"][table]
        if "tuned_in" in text:
            text["choices"] = about["tables"][text["tuned_in"]]
        seeds = [int(s) for s in options.seeds.split(",")] if options.seeds else None
        found: dict[str, Any] = {}
        choices: dict[str, Any] = {}
        before = page.get(table) if options.keep else None
        paths = [p for p in tables[table] if options.rows is None or p.stem.partition("__")[2] in options.rows]
        if before:
            moved = [results(path, runs, text, seeds, options.data, before, check=True)[0] for path in paths]
            refuse_moved(table, {row: found for rows in moved for row, found in rows.items()}, command(folder, table))
        for path in paths:
            rows_here, choices_here = results(path, runs, text, seeds, options.data, before)
            found |= rows_here
            choices |= choices_here
        page = json.loads(store.read_text()) if store.exists() else {}  # another process may have written
        if options.rows is not None:
            found = page.get(table, {}).get("rows", {}) | found
            choices = page.get(table, {}).get("choices", {}) | choices
        of_seeds = f" --seeds {options.seeds}" if options.seeds else ""
        page[table] = {
            "command": page[table]["command"] if before else command(folder, table) + of_seeds,
            "rows": found,
            "choices": choices,
        }
        store.write_text(json.dumps(page, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        write(folder, about, page)
    write(folder, about, page)


def results(
    path: Path,
    runs: Path,
    text: Mapping[str, Any],
    seeds: Sequence[int] | None,
    data: Path,
    before: Mapping[str, Any] | None = None,
    check: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run one row at every point of the table's grid; return its figures by name and seed, and its choices of rates.

    Args:
        seeds: the seeds; None means those of the table.
        before: the table on the page, where its rates and seeds are kept.
        check: only run the first seed of each row that is on the page; the result is name -> what moved.
    """
    from sets import Sets, needed_names
    from states import keep

    if text.get("keep_states"):
        keep()
    os.chdir(HERE)  # paths in the rows are relative to it
    grid = text.get("grid", {"": {}})
    for keys in grid.values():
        for name in needed_names(Experiment.load(path, keys)):
            Sets(data, path.parent).make(name)
            if text.get("tuning", {}).get("by") == "accuracy":
                Sets(data, path.parent).make(f"{Path(name).stem}.tuning.npz")
    name = path.stem.partition("__")[2]
    out: dict[str, Any] = {}
    choices: dict[str, Any] = {}
    for point, keys in grid.items():
        row = f"{name}{point and f'.{point}'}"
        old = before["rows"].get(row, {}) if before else {}
        privacy = Experiment.load(path, keys).privacy
        drawn = privacy is not None and privacy.states_epsilon
        if check and (drawn or not old):
            continue
        choice = rates.Choice(**before["choices"][row]) if before and old else rates.Choice("")
        if old and (choice.keys or not searched_grid(text, name)):
            changes, words = dict(choice.keys), next(iter(old.values()))["more"][0] if choice.keys else ""
        else:
            changes, words, choice = find_rates(path, runs, text, point)

        def run(seed: int, row: str = row, changes: Mapping[str, Any] = changes | keys, words: str = words) -> Any:
            where = runs / f"{path.stem.partition('__')[0]}__{row}-seed{seed}"
            result = run_once(path, where, {**changes, "run.seed": seed})
            operations = Run.open(where).manifest["ledger"].get("operations", {})
            found = shown_figures(result, words, operations, text.get("score", ""))
            return found | ({"curve": audit_curve(where, text["audit"])} if text.get("audit") else {})

        at = text.get("seeds_at", {})
        its = numbers(at[row if row in at else name]) if row in at or name in at else None
        of = [s for s in seeds or its or numbers(text.get("seeds", 1)) if its is None or s in its]
        of = of[:1] if name in text.get("single", []) else sorted({*of, *map(int, old)})
        if check:
            first = min(map(int, old))
            out[row] = differences(old[str(first)], run(first))
        elif name in text.get("constant", []):  # a convex problem on all rows: a seed changes nothing
            out[row] = dict.fromkeys(map(str, of), run(of[0]))
        else:
            out[row] = add_seeds(of, {} if drawn else old, run)
        choices[row] = choice.to_dict()
    return out, choices


def whose_search(text: Mapping[str, Any], name: str) -> str:
    """The row whose search gives ``name`` its keys."""
    return str((text.get("choices", text).get("tuned_as", {}) | text.get("tuned_as", {})).get(name, name))


def searched_grid(text: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What the search of a row tries; empty where nothing is searched."""
    grid: Mapping[str, Any] = text.get("choices", text).get("tune", {}).get(whose_search(text, name), {})
    return grid


def numbers(seeds: int | Sequence[int]) -> Sequence[int]:
    """The seeds that ``tables.json`` means by so many, or by a list of them."""
    return range(seeds) if isinstance(seeds, int) else seeds


def find_rates(path: Path, runs: Path, text: Mapping[str, Any], point: str) -> tuple[dict[str, Any], str, rates.Choice]:
    """The keys that a search gives a row at a point of its table, words for them, and how all its rates came about."""
    table, _, name = path.stem.partition("__")
    keys = text.get("grid", {"": {}})[point]
    row = f"{path.stem}{point and f'.{point}'}"
    method = Experiment.load(path, keys).to_dict()["method"]
    declared = None if any(key.endswith("learning_rate") for key in keys) else text.get("rates", {}).get(name)
    choices, as_whom = text.get("choices", text), whose_search(text, name)
    if not (grid := searched_grid(text, name)):
        return {}, "", rates.choice(method, row, "", {}, declared=declared)
    whose = path.with_name(f"{text.get('tuned_in', table)}__{as_whom}.toml")
    at_whom = text.get("tuned_at", {})
    at = at_whom.get(f"{name}.{point}", at_whom.get(point, "" if "tuned_in" in text else point))
    of = f"{whose.stem}{at and f'.{at}'}"
    how = {"val_fraction": 0.1, "seed": 0} | choices.get("tuning", {}) | {"grid": grid}
    best, edge, words = rates.search(whose, runs / f"{of}-tune", how, choices.get("grid", {"": {}})[at])
    fixed = [key for key, values in grid.items() if len(values) == 1]
    return best, words, rates.choice(method, row, of, best, edge, fixed=fixed, declared=declared)


if __name__ == "__main__":
    main()
