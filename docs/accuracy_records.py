"""The accuracies of docs/results/privacy.json in the form that `fedfm advise` reads, for docs/generate.py."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

from fedfm.api.intervals import interval

ROOT = Path(__file__).parent.parent
FILE = ROOT / "src" / "fedfm" / "api" / "measured_accuracy.json"
ROWS = {  # the tables' rows: kind, width of the vectors, model, number of classes
    "cifar10": ("features", 192, "features", 10),
    "banking77": ("features", 384, "features", 77),
    "lora": ("image", None, "nano-vit", 10),
}


def text() -> str:
    """The file's content: one JSON object per line."""
    kept = json.loads((ROOT / "docs" / "results" / "privacy.json").read_text(encoding="utf-8"))
    titles = json.loads((ROOT / "reproduce" / "privacy" / "tables.json").read_text(encoding="utf-8"))["tables"]
    lines = []
    for name, (kind, width, model, classes) in ROWS.items():
        about = {"kind": kind, "width": width, "model": model, "classes": classes}
        for table in (name, f"{name}_open"):
            of = titles[name]["title"].partition(":")[0]
            lines += [about | {"of": of, "page": "docs/results/privacy.md"} | row for row in _rows(kept, table)]
    return "[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n"


def _rows(kept: dict[str, Any], table: str) -> list[dict[str, Any]]:
    found = []
    for row, seeds in kept[table]["rows"].items():
        stem, _, epsilon = row.partition(".")
        e = tomllib.loads((ROOT / "reproduce" / "privacy" / f"{table}__{stem}.toml").read_text(encoding="utf-8"))
        if (protection := _protection(e)) is None:
            continue
        mean, half = interval([seed["accuracy"] for seed in seeds.values()])
        found.append(
            {
                "row": row,
                "protection": protection,
                "epsilon": float(epsilon) if epsilon else None,
                "adaptation": e["model"].get("adaptation", {}).get("name", "head"),
                "clients": e["data"]["partition"]["clients"],
                "accuracy": round(mean, 1),
                "half": None if math.isnan(half) else round(half, 1),
                "seeds": len(seeds),
            }
        )
    return found


def _protection(e: dict[str, Any]) -> str | None:
    """The name that `fedfm advise` has for what an experiment does; None if it has none."""
    privacy = e.get("privacy")
    if privacy is None:
        return "clear" if e["method"]["name"] == "fedavg" else None
    if privacy["unit"] == "client":
        return "secure_client_noise" if privacy.get("aggregator") == "secagg" else "client_noise"
    return "record_noise" if privacy.get("mechanism") == "dp_sgd" else "one_round_noise"
