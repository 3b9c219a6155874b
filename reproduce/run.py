"""Run the rows of a folder of experiments and write one page of results.

    python reproduce/run.py fedpft
    python reproduce/run.py fedpft --only table5_cifar10 figure5 --seeds 0

Every row is one TOML file in ``reproduce/<folder>/``, named ``<table>__<row>.toml``; ``fedfm run`` takes it as it is
once its data lie where it says. ``tables.json`` beside them says what a table asks, its seeds, the rows that get only
the first of them or are the same at all, which rows have a key chosen by validation rows, and the claims. This script
makes data and models from a folder of raw sets (``--data``, by default ``../shared/data`` beside the repository) into
``reproduce/.data/``, runs what has not been run yet, and writes ``docs/results/<folder>.md`` with the command of every
figure. A table that is not run keeps its old rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claims import lines as claim_lines

from fedfm import api
from fedfm.experiment import Experiment
from fedfm.rundir import Run
from fedfm.studies import interval

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
HEAD = "| row | accuracy, % | mean of clients, % | MB up | epsilon | s | more |\n|---|---|---|---|---|---|---|"


def finished(path: Path, out: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The result of one run, made once and kept as long as the experiment is the same."""
    experiment = Experiment.load(path, dict(changes))
    if (out / "manifest.json").exists():
        if Run.open(out).manifest["experiment"] == experiment.to_dict():
            return api.resume(out)
        shutil.rmtree(out)  # it is of an older row of this name
    print(f"{out.parent.name}/{out.name}", file=sys.stderr, flush=True)
    return api.run(experiment, out)


def tuned(path: Path, runs: Path, tune: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The keys of the least validation loss over a grid, and words for it; test rows decide nothing.

    One seed is searched, without ``val_fraction`` of every client's rows; the rows of the table then train on all.
    """
    keys = list(tune["grid"])
    losses: dict[tuple[Any, ...], float] = {}
    for values in itertools.product(*tune["grid"].values()):
        changes = dict(zip(keys, values, strict=True))
        out = runs / f"{path.stem}-tune" / "-".join(f"{v:g}" for v in values)
        finished(path, out, changes | {"data.val_fraction": tune["val_fraction"], "run.seed": tune["seed"]})
        loss = [line["val_loss"] for line in Run.open(out).metrics() if line.get("val_loss") is not None][-1]
        losses[values] = loss if loss == loss else float("inf")
    best = min(losses, key=lambda values: losses[values])
    said = []
    for key, value in zip(keys, best, strict=True):
        grid = tune["grid"][key]
        at_edge = len(grid) > 1 and value in (min(grid), max(grid))
        edge = ", the grid's edge" if at_edge else ""
        said.append(f"{key.removeprefix('method.')} {value:g} of {', '.join(f'{v:g}' for v in grid)}{edge}")
    return dict(zip(keys, best, strict=True)), "; ".join(said)


def kept(result: Mapping[str, Any], chosen: str) -> dict[str, Any]:
    """Of a result, what the page shows."""
    details = result["details"]
    more = [chosen] if chosen else []
    if "formula_bytes" in details:
        more.append(f"formula {details['formula_bytes'] / 1e6:.2f} MB")
    if details.get("chain_accuracy"):
        more.append("along: " + ", ".join(f"{100 * a:.1f}" for a in details["chain_accuracy"]))
    if "bound" in details:
        more.append(f"bound {details['bound']['ours']:.2f}, printed {details['bound']['printed']:.2f}")
    if details.get("times_paper_noise"):
        more.append(f"the paper's noise is {details['times_paper_noise']:.1f} times ours")
    local = result["local_accuracy"]
    return {
        "accuracy": round(100 * result["accuracy"], 3),
        "clients": None if local is None else round(100 * local, 3),
        "megabytes_up": round(result["bytes_up"] / 1e6, 4),
        "epsilon": result["epsilon"],
        "seconds": round(result["seconds"], 1),
        "more": more,
    }


def spread(values: Sequence[float]) -> str:
    """``90.2 ± 0.3``: mean and half of the 95 % interval of the mean over the seeds; or the one value."""
    mean, half = interval(values)
    return f"{mean:.1f}" if len(values) < 2 else f"{mean:.1f} ± {half:.1f}"


def row(name: str, by_seed: Mapping[str, Mapping[str, Any]]) -> str:
    """One line of a table; what is said beside the figures is of the first seed."""
    found = list(by_seed.values())
    epsilon, local = found[0]["epsilon"], [f["clients"] for f in found if f["clients"] is not None]
    cells = [
        name,
        spread([f["accuracy"] for f in found]),
        spread(local) if local else "",
        f"{statistics.fmean(f['megabytes_up'] for f in found):.2f}",
        "" if epsilon is None else f"{epsilon:g}",
        f"{statistics.fmean(f['seconds'] for f in found):.0f}",
        "; ".join(found[0]["more"]),
    ]
    return "| " + " | ".join(cells) + " |"


def write(folder: Path, about: dict[str, Any], page: dict[str, Any]) -> None:
    """``docs/results/<folder>.md``: the claims with their verdicts; what each table asks, its rows, what was found."""
    out = [f"# {about['title']}", "", about["intro"], ""]
    found = {
        f"{table}__{name}": {seed: kept["accuracy"] for seed, kept in by_seed.items()}
        for table, part in page.items()
        for name, by_seed in part["rows"].items()
    }
    if verdicts := claim_lines(about.get("claims", []), found):
        out += ["## The claims", "", about["claims_intro"], "", *verdicts]
        out += [about["claims_found"], ""] if about.get("claims_found") else []
    for table, text in about["tables"].items():
        if table in page:
            rows = [row(name, by_seed) for name, by_seed in page[table]["rows"].items()]
            out += [f"## {text['title']}", "", f"`{page[table]['command']}`", "", HEAD, *rows, ""]
            out += [text["found"], ""] if text.get("found") else []
    (ROOT / "docs" / "results" / f"{folder.name}.md").write_text("\n".join(out), encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of reproduce/, e.g. fedpft")
    parser.add_argument("--only", nargs="*", help="tables (the part of a row's name before __); none: only the page")
    parser.add_argument("--seeds", help="e.g. 0,1,2 [what tables.json says of each table]")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    options = parser.parse_args()
    folder, runs = HERE / options.folder, HERE / ".runs" / options.folder
    about = json.loads((folder / "tables.json").read_text())
    tables: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.toml")):
        tables.setdefault(path.stem.partition("__")[0], []).append(path)
    if unknown := (set(options.only or []) | set(tables)) - (set(about["tables"]) & set(tables)):
        raise SystemExit(f"{', '.join(sorted(unknown))}: expected rows, and a title in tables.json")
    store = ROOT / "docs" / "results" / f"{options.folder}.json"
    page: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
    for table in about["tables"] if options.only is None else options.only:
        text = about["tables"][table]
        seeds = [int(s) for s in options.seeds.split(",")] if options.seeds else text.get("seeds", [0])
        command = f"python reproduce/run.py {options.folder} --only {table}"
        found = {p.stem.partition("__")[2]: results(p, runs, text, seeds, options.data) for p in tables[table]}
        page = json.loads(store.read_text()) if store.exists() else {}  # another process may have written
        page[table] = {
            "command": command + (f" --seeds {options.seeds}" if options.seeds else ""),
            "rows": found,
        }
        store.write_text(json.dumps(page, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        write(folder, about, page)
    write(folder, about, page)


def results(path: Path, runs: Path, text: Mapping[str, Any], seeds: Sequence[int], data: Path) -> dict[str, Any]:
    """Seed -> what is kept, of one row."""
    from sets import Sets, named

    os.chdir(HERE)  # paths in the rows are relative to it
    for name in named(Experiment.load(path)):
        Sets(data, path.parent).make(name)
    changes, chosen = {}, ""
    if grid := text.get("tune", {}).get(path.stem.partition("__")[2]):
        changes, chosen = tuned(path, runs, {"val_fraction": 0.1, "seed": 0, "grid": grid})
    name, found = path.stem.partition("__")[2], {}
    if name in text.get("single", []):
        seeds = seeds[:1]
    for seed in seeds:
        if found and name in text.get("constant", []):  # a convex problem on all rows: a seed changes nothing
            found[str(seed)] = found[str(seeds[0])]
            continue
        result = finished(path, runs / f"{path.stem}-seed{seed}", changes | {"run.seed": seed})
        found[str(seed)] = kept(result, chosen)
    return found


if __name__ == "__main__":
    main()
