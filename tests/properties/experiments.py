"""Any experiment: settings and rows put together as a user might, sound or not.

    python tests/properties/experiments.py --examples 2000 --seed 1

prints a line for each kind of failure, then how many experiments ran and how many were refused. One that runs leaves no
client out; one that does not ends with an error of fedfm's own. The suite tries a few.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedfm
import tiny_text
from every_method import METHODS, experiment_of
from fedfm.config.toml import put
from fedfm.errors import E_NONFINITE, E_NORM, FedfmError

Tables = dict[str, Any]
COSTLY = ("blindfed",)  # a run takes seconds
EDITS: dict[str, tuple[Any, ...]] = {  # key -> values, some of which no experiment takes
    "method.rounds": (0, 1, 2),
    "method.fraction": (0.01, 0.5),
    "method.local.name": ("sgd", "adam", "adamw", "proximal", "ditto", "dual_adapter"),
    "method.local.learning_rate": (1e-9, 100.0),
    "method.local.epochs": (2,),
    "method.local.batch_size": (1, 2, 1000),
    "method.local.momentum": (0.9,),
    "method.local.micro_batch": (1, 4),
    "method.local.max_grad_norm": (1.0,),
    "method.local.schedule": ("cosine", "steps"),
    "method.local.absent": ("zero", "exclude"),
    "model.adaptation": (
        *({"name": name} for name in ("full", "head", "top_layers", "lora", "ffa_lora", "prompt", "side_adapter")),
        {"name": "top_layers", "layers": 3},
        {"name": "lora", "rank": 64, "targets": "all-linear"},
        {"name": "lora", "dora": True},
    ),
    "model.weights": ("random",),
    "model.dtype": ("bfloat16", "float16"),
    "model.max_length": (2, 8, 41, 2000),
    "model.task": ("classification", "zero_shot", "language_modelling", "instruction", "preference"),
    "model.gradient_checkpointing": (True,),
    "model.attention": ("eager", "flash_attention_2"),
    "model.quantization": ("nf4", "int8"),
    "model.loss": ("contrastive",),
    "model.options": ({"hidden_size": 17}, {"num_attention_heads": 3}, {"hidden_act": "no such"}),
    "data.limit": (1, 5),
    "data.test_fraction": (0.0, 0.5),
    "data.val_fraction": (0.3,),
    "data.scale": ("row", "unit"),
    "data.augment": (["flip"], ["crop"]),
    "data.partition": (
        *({"name": "iid", "clients": n} for n in (1, 2, 20)),
        *({"name": "dirichlet", "alpha": 0.01, "clients": n} for n in (3, 20)),
        {"name": "by_class", "classes_per_client": 2, "clients": 3},
    ),
    "run.kernels": ("fast", "fast_bf16"),
    "run.transport": ("int8", "bfloat16"),
    "run.wire": (True,),
    "run.local_scores": (True,),
    "run.asynchronous": ({"buffer": 1},),
    "aggregation.name": ("median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "norm_clipping"),
    "privacy": (
        {"aggregator": "secagg"},
        {"unit": "client", "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-3},
        {"unit": "record", "mechanism": "dp_sgd", "target_epsilon": 8.0, "delta": 1e-3, "clip_norm": 1.0},
    ),
}


def text_experiment(folder: Path, dice: random.Random) -> Tables:
    """A tiny text model for one of the tasks."""
    if not (folder / "llama").exists():
        tiny_text.save_all(folder)
    model, task = dice.choice(
        [("bert", "classification"), *(("llama", task) for task in ("language_modelling", "instruction", "preference"))]
    )
    tables = tiny_text.tables(folder, "fedavg", model, rounds=1)
    tables["model"]["task"] = task
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    words = {"instruction": ("instruction", "output"), "preference": ("prompt", "chosen")}.get(task)
    if words is not None:
        more = {"rejected": "old"} if task == "preference" else {}
        rows = [{words[0]: r["text"], words[1]: r["label"], "split": r["split"], **more} for r in rows]
        tables["model"]["answer_tokens"] = 2
        if task == "preference":
            del tables["model"]["answer_tokens"]
    path = folder / f"{task}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    tables["data"]["path"] = str(path)
    return tables


def edit_texts(path: Path, dice: random.Random) -> None:
    """Change a few rows."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    key = next(iter(rows[0]))
    row = dice.choice(rows)
    match dice.choice(["short", "long", "few", "unknown", "same", "alone", "number", "blank", "invisible"]):
        case "short":
            row[key] = "a"
        case "long":
            row[key] = "fish " * 300
        case "few":
            del rows[dice.randint(2, 12) :]
        case "unknown":
            row[key] = "zzz"
        case "same":
            rows = [{**row, "split": r["split"]} for r in rows]
        case "alone" if "label" in row:
            row["label"] = "alone"
        case "number":
            row[dice.choice(list(row))] = 7
        case "blank":
            row[key] = "  "
        case "invisible":
            row[key] = "\u200b\U0001f600"
    path.write_text("\n".join(map(json.dumps, rows)))


def edit_arrays(path: Path, dice: random.Random) -> None:
    """Change feature vectors or pictures, or how many there are."""
    with np.load(path) as file:
        arrays = dict(file)
    x, y = arrays["x"].copy(), arrays["y"].copy()
    n = len(x)
    match dice.choice(["zero", "same", "units", "few", "one class", "negative"]):
        case "zero":
            x[:] = 0
        case "same":
            x[:] = x[0]
        case "units" if x.dtype.kind == "f":
            x[:, 0] *= dice.choice([1e6, 1e12, 1e20])
        case "few":
            n = dice.randint(2, 9)
        case "one class":
            y[:] = 0
        case "negative" if x.dtype.kind == "f":
            x = -abs(x)
    whole = len(arrays["x"])
    np.savez(path, **{k: v[:n] if len(v) == whole else v for k, v in {**arrays, "x": x, "y": y}.items()})


def draw(folder: Path, dice: random.Random) -> Tables:
    """One experiment, its files in the folder: sound, with up to three settings and up to two changes of rows."""
    name = dice.choice([m for m in METHODS if m not in COSTLY])
    tables = copy.deepcopy(
        experiment_of(name, folder, rounds=1) if dice.random() < 0.6 else text_experiment(folder, dice)
    )
    tables["run"]["workers"] = 1
    path = Path(tables["data"].get("path", ""))
    for _ in range(dice.choice([0, 0, 1, 1, 2]) if path.is_file() else 0):
        (edit_texts if path.suffix == ".jsonl" else edit_arrays)(path, dice)
    for key in dice.sample(sorted(EDITS), dice.choice([0, 1, 1, 2, 3])):
        put(tables, key, copy.deepcopy(dice.choice(EDITS[key])))
    return tables


def outcome(tables: Tables, out: Path) -> str:
    """ "ran", or the kind of the error that refused it.

    Raises:
        AssertionError: a client was left out for another reason than numbers that grew too large.
        Exception: what is not an error of fedfm's own.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = fedfm.run(tables, out, progress=fedfm.Progress())
    except FedfmError as error:
        if "E_EXCEPTION" in str(error):
            raise AssertionError(str(error)) from error
        return type(error).__name__
    left_out = [e for e in result["excluded"] if e["code"] not in (E_NONFINITE, E_NORM)]
    assert not left_out, left_out[0]
    return "ran"


def within(folder: Path, seed: int, judge: Callable[[Tables, Path], str] = outcome) -> tuple[str, Tables]:
    """The outcome of one drawn experiment, in a folder that is made and removed."""
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        tables = draw(place, random.Random(seed))
        return judge(tables, place / "run"), tables
    finally:
        shutil.rmtree(place, ignore_errors=True)


def main() -> None:
    """``python tests/properties/experiments.py``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found, known, latest = Counter[str](), set[str](), dict[str, Tables]()

    def note_and_judge(tables: Tables, out: Path) -> str:
        latest["last"] = tables
        return outcome(tables, out)

    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seed * 1_000_000, args.seed * 1_000_000 + args.examples):
            try:
                found[within(Path(folder), seed, note_and_judge)[0]] += 1
            except Exception as error:
                found["failed"] += 1
                frame = traceback.extract_tb(error.__traceback__)[-1]
                if (kind := f"{frame.filename}:{frame.lineno} {str(error)[:80]}") not in known:
                    known.add(kind)
                    text, tables = f"{type(error).__name__}: {str(error)[:300]}", json.dumps(latest.get("last"))
                    sys.stdout.write(f"{seed} {text} ({kind}) {tables}\n")
                    sys.stdout.flush()
    sys.stdout.write(f"{dict(found)}\n")


if __name__ == "__main__":
    main()
