"""`fedfm predict` and `fedfm export` of any run, with rows, folders and flags as a user might give them, sound or not.

    python tests/properties/commands.py --examples 1000 --seed 1

prints a line for each kind of failure, then how the commands ended. Each ends by 0, 1 or 2 with a line of fedfm's own;
neither shows a traceback nor names a file that has one. The suite tries a few.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedfm
import small
import tiny_text
from fedfm.cli import main as command_line
from fedfm.models.quiet import quiet

OF_AN_UNFORESEEN = ("Traceback", "the traceback", "defect of fedfm", "an error of a library")
FEW = ("texts", "instructions", "features")  # runs that the suite makes
VALUES: tuple[Any, ...] = (
    *("", "  ", "zzz", "fish " * 3000, "\ud800", "\u200b", "a\x00b", "\ufeffthe", '"', "=1+1", "🐟" * 50),
    *(None, 7, -1.5, 1e308, float("nan"), float("inf"), True, 10**30, [], ["the", "fish"], {"a": 1}, [[1.0]]),
)
NAMES = ("text", "label", "split", "id", "output", "instruction", "Text", "", "image", "messages", "x\n")


def make_runs(folder: Path, kinds: Collection[str] = ()) -> dict[str, Path]:
    """Finished runs by kind, each beside its own rows.

    Args:
        kinds: those that are wanted [all].
    """
    text = tiny_text.save_all(folder / "text")
    rows = [json.loads(line) for line in (text / "rows.jsonl").read_text().splitlines()]
    asked = [{"instruction": r["text"], "output": r["label"], "split": r["split"]} for r in rows]
    wanted = [{"prompt": r["text"], "chosen": r["label"], "rejected": "old", "split": r["split"]} for r in rows]
    for name, these in (("asked", asked), ("wanted", wanted)):
        (text / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in these))
    instruction = {"task": "instruction", "answer_tokens": 2}
    experiments = {
        "texts": tiny_text.tables(text, "fedavg", rounds=1, clients=2),
        "own models": tiny_text.tables(text, "ditto", rounds=1, clients=2),
        "language": tiny_text.tables(text, "fedavg", "llama", rounds=1, clients=2),
        "instructions": tiny_text.tables(text, "fedavg", "llama", rounds=1, clients=2),
        "preferences": tiny_text.tables(text, "fedavg", "llama", rounds=1, clients=2),
        "features": small.experiment(folder),
        "pictures": small.experiment(folder),
        "mixtures": small.experiment(folder) | {"method": {"name": "fedpft"}},
    }
    experiments["instructions"]["model"] |= instruction
    experiments["instructions"]["data"]["path"] = str(text / "asked.jsonl")
    experiments["preferences"]["model"] |= {"task": "preference"}
    experiments["preferences"]["data"]["path"] = str(text / "wanted.jsonl")
    experiments["pictures"]["data"]["path"] = str(small.pictures(folder))
    experiments["pictures"]["model"] = {"name": str(small.tiny_vit(folder)), "adaptation": {"name": "lora", "rank": 2}}
    found = {}
    for name in kinds or experiments:
        tables = experiments[name]
        found[name] = folder / "runs" / name.replace(" ", "-")
        with warnings.catch_warnings(), quiet():
            warnings.simplefilter("ignore")
            fedfm.run(tables, found[name], progress=fedfm.Progress())
    return found


def rows_of(run: Path) -> Path:
    """The file of the rows that a run was trained on."""
    return Path(fedfm.load_run(run).experiment.data.path)


def edit_rows(rows: list[dict[str, Any]], dice: random.Random) -> None:
    """Change, add or take out values, columns and rows."""
    key, row = dice.choice(list(rows[0])), dice.choice(rows)
    match dice.choice(["value", "value", "column", "values", "missing", "more", "renamed", "few", "none", "wide"]):
        case "value":
            row[key] = dice.choice(VALUES)
        case "values":
            for other in rows:
                other[key] = dice.choice(VALUES)
        case "column":
            for other in rows:
                other.pop(key, None)
        case "missing":
            row.pop(key, None)
        case "more":
            name = dice.choice(NAMES)
            for other in rows:
                other[name] = dice.choice(VALUES)
        case "renamed":
            name = dice.choice(NAMES)
            for other in rows:
                other[name] = other.pop(key, None)
        case "few":
            del rows[dice.choice([1, 2, 3]) :]
        case "none":
            rows.clear()
        case "wide":
            row.update({f"c{i}": i for i in range(300)})


def write_rows(rows: list[dict[str, Any]], dice: random.Random, folder: Path) -> Path:
    """The rows in one of the formats for texts."""
    ending = dice.choice([".jsonl", ".jsonl", ".csv", ".tsv", ".json", ".parquet", ".txt", ".npz", ".xlsx", ""])
    path = folder / f"new{ending}"
    lines = "\n".join(json.dumps(row) for row in rows)
    if ending in (".csv", ".tsv"):
        with path.open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            names = list(dict.fromkeys(name for row in rows for name in row))
            writer = csv.DictWriter(file, names, delimiter="\t" if ending == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif ending == ".json":
        path.write_text(json.dumps(dice.choice([rows, {"data": rows}, rows[:1], "rows", 3])))
    elif ending == ".parquet":
        import pandas

        try:
            pandas.DataFrame(rows).to_parquet(path)
        except Exception:  # values that no column of parquet holds
            pandas.DataFrame([{k: str(v).encode(errors="replace") for k, v in row.items()} for row in rows]).to_parquet(
                path
            )
    else:
        path.write_text(lines)
    return path


def edit_arrays(path: Path, dice: random.Random, folder: Path) -> Path:
    """An npz like that of the run, changed."""
    with np.load(path) as file:
        arrays = dict(file)
    x, new = arrays["x"], folder / "new.npz"
    kind = dice.choice(
        ["same", "few", "none", "wide", "flat", "deep", "text", "type", "nan", "names", "short", "object"]
    )
    match kind:
        case "few":
            arrays = {k: v[:2] if len(v) == len(x) else v for k, v in arrays.items()}
        case "none":
            arrays = {k: v[:0] if len(v) == len(x) else v for k, v in arrays.items()}
        case "wide":
            arrays["x"] = np.concatenate([x, x], -1)
        case "flat":
            arrays["x"] = x.reshape(len(x), -1)
        case "deep":
            arrays["x"] = x[..., None]
        case "text":
            arrays["x"] = np.array(["fish"] * len(x))
        case "type":
            arrays["x"] = x.astype(
                dice.choice([np.int8, np.uint16, np.float64, np.complex64, np.bool_, "datetime64[s]"])
            )
        case "nan":
            arrays["x"] = np.where(np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) == 3, np.nan, x)
        case "names":
            arrays["classes"] = np.array(["other", "names"])
        case "short":
            arrays["x"] = x[:-1]
        case "object":
            arrays = {dice.choice(["a", "X", "x", "y"]): x}
    np.savez(new, **arrays)
    return new


def damage(path: Path, dice: random.Random) -> None:
    """Cut or change the bytes of a file."""
    whole = bytearray(path.read_bytes())
    if not whole or dice.random() < 0.3:
        path.write_bytes(b"")
    elif dice.random() < 0.5:
        path.write_bytes(whole[: dice.randrange(len(whole))])
    else:
        for _ in range(20):
            whole[dice.randrange(len(whole))] = dice.randrange(256)
        path.write_bytes(whole)


def picture_folder(dice: random.Random, folder: Path) -> Path:
    """A folder of pictures, some of which are none."""
    from PIL import Image

    place = folder / "new"
    (place / "ant").mkdir(parents=True)
    for i in range(dice.choice([0, 1, 4])):
        mode = dice.choice(["RGB", "L", "RGBA", "P", "1", "I;16", "CMYK", "LA"])
        size = dice.choice([(16, 16), (1, 1), (3, 400), (64, 20)])
        ending = "tiff" if mode == "CMYK" else "png"
        image = Image.new(mode, size)
        image.save(place / dice.choice(["ant", "."]) / f"{i}.{ending}")
    extra = place / dice.choice(["ant/x.png", "notes.txt", "ant/y.jpg", "z.dcm"])
    extra.write_bytes(dice.choice([b"", b"none", bytes(range(256))]))
    return place


def new_rows(run: Path, dice: random.Random, folder: Path) -> Path:
    """A file or folder to predict: like the run's rows, changed up to three times, or another thing."""
    rows, kind = rows_of(run), dice.random()
    if kind < 0.06:
        return dice.choice([folder / "nowhere.csv", folder, run, Path("/dev/null"), Path("no/such:function"), Path()])
    if kind < 0.2 and rows.suffix == ".npz":
        return picture_folder(dice, folder)
    if rows.suffix == ".npz":
        path = edit_arrays(rows, dice, folder)
    else:
        lines = [json.loads(line) for line in rows.read_text().splitlines()][:6]
        for _ in range(dice.choice([0, 1, 1, 2, 3])):
            if lines:
                edit_rows(lines, dice)
        path = write_rows(lines, dice, folder)
    if dice.random() < 0.15:
        damage(path, dice)
    return path


def what_stands_for(run: Path, dice: random.Random, folder: Path) -> Path:
    """The run; seldom a copy that lacks a file or has a damaged one, or no run at all."""
    if dice.random() > 0.12:
        return run
    if dice.random() < 0.2:
        return dice.choice([folder / "nowhere", folder, rows_of(run)])
    copy = folder / "copy"
    shutil.copytree(run, copy)
    one = dice.choice(sorted(path for path in copy.rglob("*") if path.is_file()))
    if dice.random() < 0.5:
        one.unlink()
    else:
        damage(one, dice)
    return copy


def draw(runs: dict[str, Path], dice: random.Random, folder: Path) -> list[str]:
    """The words of one command."""
    whole = dice.choice(list(runs.values()))
    run = what_stands_for(whole, dice, folder)
    clients = ["client-00", "client-01"] if dice.random() < 0.8 else ["client-99", "", "../..", "a\nb"]
    whose = ["--client", dice.choice(clients)] if dice.random() < (0.9 if "own" in whole.name else 0.1) else []
    last = ["--last"] if dice.random() < 0.1 else []
    if dice.random() < 0.65:
        out = folder / dice.choice(["out.json", "out.jsonl", "out.csv", "out.txt", "no/such/out.csv", "."])
        to = ["--out", str(out)] if dice.random() < 0.4 else []
        form = ["--format", dice.choice(["json", "text"])] if dice.random() < 0.3 else []
        engine = ["--engine", "deployment"] if dice.random() < 0.03 else []
        return ["predict", str(run), str(new_rows(whole, dice, folder)), *whose, *last, *to, *form, *engine]
    out = folder / "export"
    match dice.choice(["new", "new", "new", "empty", "used", "file", "below a file", "deep", "kernel"]):
        case "empty":
            out.mkdir()
        case "used":
            out.mkdir()
            (out / "model.safetensors").write_bytes(b"")
        case "file":
            out.write_text("a file")
        case "below a file":
            out.write_text("a file")
            out = out / "inside"
        case "deep":
            out = out / ("a" * 300)
        case "kernel":
            out = Path("/proc/none/export")  # nobody can write there, not even root
    return [
        "export",
        str(run),
        "--to",
        dice.choice(["hf", "peft", "torch", "hf", "onnx", ""]),
        "--out",
        str(out),
        *whose,
        *last,
    ]


def outcome(words: list[str]) -> str:
    """Command and exit code.

    Raises:
        AssertionError: it ended otherwise, or showed or named a traceback.
    """
    said, wrong = io.StringIO(), io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
        warnings.simplefilter("ignore")
        try:
            code: Any = command_line(words)
        except SystemExit as end:  # of argparse
            code = end.code
    text = wrong.getvalue()
    assert code in (0, 1, 2), text
    for mark in OF_AN_UNFORESEEN:
        assert mark not in text, text
    assert code == 0 or text.strip(), "nothing was said"
    assert "Traceback" not in said.getvalue()
    if code == 0 and words[0] == "export":
        assert any(Path(words[words.index("--out") + 1]).iterdir())
    return f"{words[0]} {code}"


def within(runs: dict[str, Path], folder: Path, seed: int) -> tuple[str, list[str]]:
    """The outcome of one drawn command, in a folder that is made and removed."""
    place = Path(tempfile.mkdtemp(dir=folder))
    words: list[str] = []
    try:
        words = draw(runs, random.Random(seed), place)
        return outcome(words), words
    except Exception as error:
        error.add_note(f"seed {seed}: {words}")
        raise
    finally:
        shutil.rmtree(place, ignore_errors=True)


def main() -> None:
    """``python tests/properties/commands.py``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found, known = Counter[str](), set[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = make_runs(folder)
        for seed in range(args.seed * 1_000_000, args.seed * 1_000_000 + args.examples):
            try:
                found[within(runs, folder, seed)[0]] += 1
            except Exception as error:
                found["failed"] += 1
                text = f"{type(error).__name__}: {str(error)[:600]}"
                if (kind := text.replace(name, "")[-80:]) not in known:
                    known.add(kind)
                    sys.stdout.write(f"{text}\n  {error.__notes__[-1]}\n")
                    sys.stdout.flush()
    sys.stdout.write(f"{dict(found)}\n")


if __name__ == "__main__":
    main()
